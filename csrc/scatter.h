// Rows added into a buffer by index: the gradient of an embedding, at a cost that depends on its tokens alone.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace fa {

// accum[index[t]] += grad[t] for every t with index[t] != skip, in the order of t for each row of accum: the same bits
// for any number of threads. accum: `rows` rows, grad: `tokens` rows, of `width` elements each, row after row; accum is
// f32, bf16 or f64, sums are rounded to it once a call. Throws std::out_of_range, before anything has changed.
void cpu_scatter_rows(void* accum, DType accum_dtype, int64_t rows, const int64_t* index, const void* grad,
                      DType grad_dtype, int64_t tokens, int64_t width, int64_t skip, int threads);

}  // namespace fa
