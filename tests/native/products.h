// Products added into a buffer, for the driver: every element against the same sum, written out one product at a time.
#pragma once

#include <algorithm>

#include "case.h"
#include "product.h"

// A matrix with `gap` elements between its rows that are not its own, in an allocation that ends with its last element.
struct Matrix {
  DType dtype;
  int64_t rows, columns, stride;
  std::vector<char> bytes;

  Matrix(DType dtype_, int64_t rows_, int64_t columns_, int64_t gap)
      : dtype(dtype_), rows(rows_), columns(columns_), stride(columns_ + gap) {
    bytes.resize(size_t((rows - 1) * stride + columns) * fa::size_of(dtype));
    for (size_t i = 0; i < bytes.size(); i += fa::size_of(dtype)) {
      std::memcpy(&bytes[i], random_element(dtype), fa::size_of(dtype));
    }
  }

  Operand operand() { return {bytes.data(), dtype}; }
  float at(int64_t row, int64_t column) const {
    return float(reference::load(dtype, &bytes[size_t(row * stride + column) * fa::size_of(dtype)]));
  }
};

// What `buffer` should hold afterwards.
inline std::vector<float> expected_product(const Matrix& buffer, const Matrix& left, const Matrix& right, bool first) {
  const int64_t at_once = fa::product_tokens(buffer.rows);
  std::vector<float> expected(size_t(buffer.rows * buffer.columns));
  for (int64_t i = 0; i < buffer.rows * buffer.columns; ++i) {
    float total = buffer.at(i / buffer.columns, i % buffer.columns);
    for (int64_t from = 0; from < left.rows; from += at_once) {
      float sum = 0, term = 0;
      for (int64_t t = from; t < left.rows && t < from + at_once; ++t) {
        term = std::fma(left.at(t, i / buffer.columns), right.at(t, i % buffer.columns), term);
        if ((t + 1) % fa::kTermTokens == 0) sum += term, term = 0;
      }
      if (std::min(left.rows, from + at_once) % fa::kTermTokens) sum += term;
      total = first && from == 0 ? sum : total + sum;
    }
    expected[size_t(i)] = total;
  }
  return expected;
}

inline void compare_product(const float* found, const std::vector<float>& expected, const std::string& what) {
  if (std::memcmp(found, expected.data(), expected.size() * sizeof(float))) fail("product of " + what);
  ++checks;
}

inline void check_product(DType dtype, int64_t rows, int64_t columns, int64_t tokens, int64_t gap, bool first,
                          int threads) {
  Matrix left(dtype, tokens, rows, gap), right(dtype, tokens, columns, gap), buffer(DType::f32, rows, columns, 0);
  const std::vector<float> expected = expected_product(buffer, left, right, first);
  float* to = reinterpret_cast<float*>(buffer.bytes.data());
  if (first) std::memset(to, 0xff, buffer.bytes.size());  // NaN: it must not be read
  fa::cpu_add_product(to, rows, columns, left.operand(), left.stride, right.operand(), right.stride, tokens, first,
                      threads);
  compare_product(to, expected,
                  std::to_string(rows) + " x " + std::to_string(columns) + ", " + std::to_string(tokens) + " tokens, " +
                      std::to_string(threads) + " threads");
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// As where the buffer is beyond the cache, which would take long here.
inline void product_past_the_cache(int64_t rows, int64_t columns) {
  const int64_t tokens = 5;
  Matrix left(DType::f32, tokens, rows, 0), right(DType::f32, tokens, columns, 0), none(DType::f32, rows, columns, 0);
  const fa::ProductKernels& kernels = fa::cpu_kernels().product;
  const int64_t panels = (columns + kernels.columns - 1) / kernels.columns;
  const size_t bytes = size_t(rows * columns) * sizeof(float);
  std::unique_ptr<void, Free> aligned(std::aligned_alloc(64, bytes));  // a multiple of 64
  std::vector<float> packed(size_t(panels * kernels.columns * tokens));
  float* to = static_cast<float*>(aligned.get());
  fa::Product p{to,   rows, columns, left.operand(), left.stride, right.operand(), right.stride, tokens,
                true, true, packed.data()};
  for (int64_t panel = 0; panel < panels; ++panel) kernels.pack_panel(p, panel);
  for (int64_t row = 0; row < rows; row += fa::kProductRows) {
    kernels.chunk(p, row, fa::kProductRows, 0, panels);
  }
  compare_product(to, expected_product(none, left, right, true), "a first one past the cache");
}

inline void products_on_threads() {
  if (!fa::has_product()) return;
  for (int threads : {1, 3, 7}) check_product(DType::f32, 99, 700, 20, 0, threads == 3, threads);
}

// Sizes around those of tiles, panels, chunks and blocks of tokens.
inline void products() {
  if (!fa::has_product()) return;
  for (bool first : {false, true}) {
    for (int64_t rows : {1, 5, 6, 7, 12, 13, 47, 48, 49, 97}) {
      for (int64_t columns : {1, 15, 16, 17, 32, 33, 64}) {
        check_product(DType::f32, rows, columns, 3, rows % 2, first, 2);
      }
    }
    for (int64_t tokens : {1, 2, 63, 64, 65, 129, 256, 257, 513}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f16}) check_product(dtype, 50, 40, tokens, 3, first, 2);
      check_product(DType::f32, 1100, 5, tokens, 0, first, 2);
    }
  }
  for (int64_t rows : {12, 49}) {
    for (int64_t columns : {16, 48, 64}) product_past_the_cache(rows, columns);
  }
}
