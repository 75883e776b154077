#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_pool.h"
#include "kernels.h"

namespace fa {
namespace {

constexpr int64_t kColumns = 512;  // a chunk's share of a row: also a single, frequent index is shared by threads
constexpr int64_t kTokens = 64;    // a chunk's tokens, but for a longer run of one index

struct Place {
  int64_t row, token;
  bool operator<(const Place& other) const { return row != other.row ? row < other.row : token < other.token; }
};

template <class T, class A, class G>
struct Scatter {
  A* accum;
  const G* grad;
  int64_t width, column_blocks;
  const std::vector<Place>& places;    // sorted: equal rows are next to each other, tokens in their order
  const std::vector<int64_t>& starts;  // of chunks of places; no row is in two chunks

  void operator()(int64_t chunk) const {
    const int64_t part = chunk / column_blocks;
    const int64_t from = chunk % column_blocks * kColumns;
    const int64_t n = std::min(kColumns, width - from);
    T sum[kColumns];
    for (int64_t i = starts[part]; i < starts[part + 1];) {
      A* a = accum + places[i].row * width + from;
      for (int64_t c = 0; c < n; ++c) sum[c] = load_as<T>(a[c]);
      for (const int64_t row = places[i].row; i < starts[part + 1] && places[i].row == row; ++i) {
        const G* g = grad + places[i].token * width + from;
        for (int64_t c = 0; c < n; ++c) sum[c] += load_as<T>(g[c]);
      }
      for (int64_t c = 0; c < n; ++c) a[c] = Encode<A, T>::of(sum[c]);
    }
  }
};

template <class T, class A, class G>
void run(void* accum, const void* grad, int64_t width, const std::vector<Place>& places,
         const std::vector<int64_t>& starts, int threads) {
  const int64_t column_blocks = (width + kColumns - 1) / kColumns;
  Scatter<T, A, G> scatter{static_cast<A*>(accum), static_cast<const G*>(grad), width, column_blocks, places, starts};
  in_parallel(int64_t(starts.size() - 1) * column_blocks, threads, scatter);
}

template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(float());
    case DType::bf16: return f(bf16());
    case DType::f16: return f(f16());
    case DType::f64: return f(double());
    case DType::i16: throw std::invalid_argument("there are no sums of integers");
  }
}

}  // namespace

// Throws std::out_of_range for a row that accum has not, before anything has changed.
void CpuExecutor::scatter_rows(const ScatterJob& job) {
  std::vector<Place> places;
  places.reserve(size_t(job.tokens));
  for (int64_t k = 0; k < job.tokens; ++k) {
    const int64_t row = job.rows[k], token = job.order ? job.order[k] : k;
    if (row < 0 || row >= job.row_count) {
      throw std::out_of_range("index " + std::to_string(row) + " of token " + std::to_string(token) +
                              " is outside the " + std::to_string(job.row_count) + " rows");
    }
    if (row != job.skip) places.push_back({row, token});
  }
  std::sort(places.begin(), places.end());
  std::vector<int64_t> starts{0};
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].row != places[i - 1].row && int64_t(i) - starts.back() >= kTokens) starts.push_back(int64_t(i));
  }
  if (places.empty() || job.width == 0) return;
  starts.push_back(int64_t(places.size()));
  with_type(job.accum_dtype, [&](auto a) {
    with_type(job.grad_dtype, [&](auto g) {
      using A = decltype(a);
      using G = decltype(g);
      using T = std::conditional_t<std::is_same_v<A, double>, double, float>;
      run<T, A, G>(job.accum, job.grad, job.width, places, starts, threads_);
    });
  });
}

}  // namespace fa
