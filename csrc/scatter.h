// Rows added into a buffer by index: the gradient of an embedding, at a cost that depends on its tokens alone.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace fa {

// accum[rows[k]] += grad[order[k]] for every k with rows[k] != skip, those of each row of accum in the order of k: the
// same bits on every executor. Each has `width` elements, row after row; accum is f32, bf16 or f64, a sum is rounded to
// it once. An address each:
struct ScatterJob {
  char* accum = nullptr;  // row_count rows
  const char* grad = nullptr;  // `tokens` rows
  const int64_t* rows = nullptr;   // `tokens` of them
  const int64_t* order = nullptr;  // `tokens` of them; null: 0, 1, 2, ...
  int64_t tokens = 0, width = 0, row_count = 0;
  int64_t skip = -1;
  DType accum_dtype = DType::f32, grad_dtype = DType::f32;
};

}  // namespace fa
