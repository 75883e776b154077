// The kernels of product.h, for cpu_kernels.cpp alone: with internal linkage, as it is compiled once per instruction
// set. Without vectors that multiply and add at once there are none; a BLAS does it as fast then.
//
// A tile of the buffer stays in registers while all tokens are added up; only then is the buffer read, and written. So
// it passes through the caches once, however many tokens there are, and what is read again and again is packed: the
// right operand, once for all threads, in panels as wide as a tile; of the left one, a chunk's columns.
#pragma once

#include "cpu_access.h"
#include "product.h"

namespace fa {
namespace {

#if defined(__AVX512F__)
using Lanes = __m512;
constexpr int kTileRows = 12;
inline Lanes lanes(const float* from) { return _mm512_loadu_ps(from); }
inline Lanes lanes_of(float x) { return _mm512_set1_ps(x); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes sum(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline void put(float* to, Lanes x) { _mm512_storeu_ps(to, x); }
inline void put_past_cache(float* to, Lanes x) { _mm512_stream_ps(to, x); }
#elif defined(__AVX2__)
using Lanes = __m256;
constexpr int kTileRows = 6;
inline Lanes lanes(const float* from) { return _mm256_loadu_ps(from); }
inline Lanes lanes_of(float x) { return _mm256_set1_ps(x); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes sum(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline void put(float* to, Lanes x) { _mm256_storeu_ps(to, x); }
inline void put_past_cache(float* to, Lanes x) { _mm256_stream_ps(to, x); }
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
constexpr int kLanes = sizeof(Lanes) / sizeof(float);
constexpr int kTileColumns = 2 * kLanes;
static_assert(kLeastProductRows % kTileRows == 0, "a chunk is whole tiles");

enum class Put { add, over, past_cache };

// sums <- products of packed columns (kTileRows a token) and a panel (kTileColumns a token).
__attribute__((always_inline)) inline void multiply(int64_t tokens, const float* __restrict__ left,
                                                    const float* __restrict__ right, Lanes (&sums)[kTileRows][2]) {
  for (auto& row : sums) row[0] = row[1] = lanes_of(0.0f);
  for (int64_t t = 0; t < tokens; ++t, left += kTileRows, right += kTileColumns) {
    const Lanes low = lanes(right), high = lanes(right + kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i) {
      const Lanes x = lanes_of(left[i]);
      sums[i][0] = fused(x, low, sums[i][0]);
      sums[i][1] = fused(x, high, sums[i][1]);
    }
  }
}

// Calls visit(row, column, lanes) for all of a tile.
template <class Visit>
__attribute__((always_inline)) inline void for_each_lanes(Lanes (&sums)[kTileRows][2], Visit visit) {
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) {
    visit(i, 0, sums[i][0]);
    visit(i, kLanes, sums[i][1]);
  }
}

template <Put kPut>
void tile(int64_t tokens, const float* left, const float* right, float* to, int64_t stride) {
  if (kPut == Put::add) {  // the tile after the next; the hardware does not see so many streams
    for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(to + i * stride + 2 * kTileColumns, 1, 3);
  }
  Lanes sums[kTileRows][2];
  multiply(smaller(tokens, kTermTokens), left, right, sums);
  for (int64_t done = kTermTokens; done < tokens; done += kTermTokens) {
    float before[kTileRows * kTileColumns];
    for_each_lanes(sums, [&](int i, int c, Lanes x) { put(before + i * kTileColumns + c, x); });
    multiply(smaller(tokens - done, kTermTokens), left + done * kTileRows, right + done * kTileColumns, sums);
    for_each_lanes(sums, [&](int i, int c, Lanes& x) { x = sum(lanes(before + i * kTileColumns + c), x); });
  }
  for_each_lanes(sums, [&](int i, int c, Lanes x) {
    float* place = to + i * stride + c;
    if (kPut == Put::add) put(place, sum(lanes(place), x));
    else if (kPut == Put::over) put(place, x);
    else put_past_cache(place, x);
  });
}

// A tile of which the buffer holds only a part.
void part_of_tile(const Product& p, const float* left, const float* right, float* to, int64_t rows, int64_t columns) {
  float whole[kTileRows * kTileColumns];
  tile<Put::over>(p.tokens, left, right, whole, kTileColumns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      float& place = to[i * p.columns + c];
      const float x = whole[i * kTileColumns + c];
      place = p.first ? x : place + x;
    }
  }
}

// Elements [begin, begin + n) of every token as float, kWidth a token; what is beyond n is 0.
template <int kWidth>
void pack(const Product& p, const Operand& from, int64_t token_stride, int64_t begin, int64_t n, float* to) {
  with_storage(from.dtype, [&](auto zero) {
    using S = decltype(zero);
    const S* token = static_cast<const S*>(from.data) + begin;
    for (int64_t t = 0; t < p.tokens; ++t, token += token_stride, to += kWidth) {
      if (n >= kWidth) {  // a loop of known length becomes a few vectors
        for (int i = 0; i < kWidth; ++i) to[i] = load_as<float>(token[i]);
      } else {
        for (int i = 0; i < kWidth; ++i) to[i] = i < n ? load_as<float>(token[i]) : 0.0f;
      }
    }
  });
}

void pack_panel(const Product& p, int64_t panel) {
  const int64_t begin = panel * kTileColumns;
  pack<kTileColumns>(p, p.right, p.right_stride, begin, p.columns - begin, p.panels + begin * p.tokens);
}

void product_chunk(const Product& p, int64_t first_row, int64_t most_rows, int64_t first_panel, int64_t last_panel) {
  alignas(64) float left[kProductRows * kProductTokens];
  const int64_t rows = smaller(most_rows, p.rows - first_row);
  for (int64_t i = 0; i < rows; i += kTileRows) {
    pack<kTileRows>(p, p.left, p.left_stride, first_row + i, rows - i, left + i * p.tokens);
  }
  // Aligned rows: a tile's are then whole cache lines.
  const bool past_cache = p.past_cache && reinterpret_cast<uintptr_t>(p.buffer) % 64 == 0 && p.columns % 16 == 0;
  for (int64_t i = 0; i < rows; i += kTileRows) {
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const int64_t column = panel * kTileColumns;
      float* to = p.buffer + (first_row + i) * p.columns + column;
      const float *tokens = left + i * p.tokens, *right = p.panels + column * p.tokens;
      if (rows - i < kTileRows || p.columns - column < kTileColumns) {
        part_of_tile(p, tokens, right, to, smaller(kTileRows, rows - i), smaller(kTileColumns, p.columns - column));
      } else if (!p.first) {
        tile<Put::add>(p.tokens, tokens, right, to, p.columns);
      } else {
        past_cache ? tile<Put::past_cache>(p.tokens, tokens, right, to, p.columns)
                   : tile<Put::over>(p.tokens, tokens, right, to, p.columns);
      }
    }
  }
  if (past_cache) _mm_sfence();
}

constexpr ProductKernels kProduct = {kTileColumns, pack_panel, product_chunk};
#else
constexpr ProductKernels kProduct = {};
#endif

}  // namespace
}  // namespace fa
