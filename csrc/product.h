// The weight gradient of a linear layer, added straight into a buffer: a GEMM whose result is accumulated.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace fa {

constexpr int64_t kProductRows = 48;     // of the buffer, that a thread takes at a time
constexpr int64_t kProductTokens = 256;  // that are packed at a time
constexpr int64_t kTermTokens = 64;      // products added up one after the other; more would be less exact than a BLAS

// Whether this processor has kernels for it (cpu_tiles.h).
bool has_product();

// buffer += left^T right, or = where `first` (the buffer is not read then). buffer: float32, rows x columns, row after
// row. left, right: tokens x rows and tokens x columns, of one dtype but float64, `*_stride` elements between tokens.
// All in float32: products of kTermTokens tokens are added up, then such terms, and then what kProductTokens tokens give
// is added to the buffer. The same bits for any number of threads, and instruction set that has kernels. Takes
// columns * min(tokens, kProductTokens) floats of memory while it runs; throws std::bad_alloc, before anything has
// changed.
void cpu_add_product(float* buffer, int64_t rows, int64_t columns, Operand left, int64_t left_stride, Operand right,
                     int64_t right_stride, int64_t tokens, bool first, int threads);

}  // namespace fa
