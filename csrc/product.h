// The weight gradient of a linear layer, added straight into a buffer: a GEMM whose result is accumulated.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace fa {

constexpr int64_t kProductRows = 48;     // of the buffer, that a thread takes at a time, at most
constexpr int64_t kLeastProductRows = 12;
constexpr int64_t kProductTokens = 256;  // that are packed at a time, at most
constexpr int64_t kTermTokens = 64;      // products added up one after the other; more would be less exact than a BLAS

// Tokens that are packed at a time: so many that they take a quarter of the buffer's memory, if that is a term or more.
inline int64_t product_tokens(int64_t rows) {
  const int64_t terms = rows / 4 / kTermTokens;
  return terms < 1 ? kTermTokens : terms * kTermTokens > kProductTokens ? kProductTokens : terms * kTermTokens;
}

// Whether this processor has kernels for it (cpu_tiles.h).
bool has_product();

// buffer += left^T right, or = where `first` (the buffer is not read then). buffer: float32, rows x columns, row after
// row. left, right: tokens x rows and tokens x columns, of one dtype but float64, `*_stride` elements between tokens.
// All in float32: products of kTermTokens tokens are added up, then such terms, and then what product_tokens(rows)
// tokens give is added to the buffer. The same bits for any number of threads, and instruction set that has kernels.
// Takes columns * product_tokens(rows) floats of memory while it runs; throws std::bad_alloc, before anything changed.
void cpu_add_product(float* buffer, int64_t rows, int64_t columns, Operand left, int64_t left_stride, Operand right,
                     int64_t right_stride, int64_t tokens, bool first, int threads);

}  // namespace fa
