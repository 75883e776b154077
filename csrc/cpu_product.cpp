#include "product.h"

#include <algorithm>
#include <memory>

#include "cpu_pool.h"

namespace fa {
namespace {

constexpr int64_t kChunks = 8;       // a thread, at least
constexpr int64_t kLeastPanels = 8;  // a chunk: with fewer, packing the left operand would take as long

struct Free {
  void operator()(float* memory) const { operator delete[](memory, std::align_val_t(64)); }
};

void skip_tokens(Operand& operand, int64_t elements) {
  operand.data = static_cast<char*>(operand.data) + elements * int64_t(size_of(operand.dtype));
}

}  // namespace

bool has_product() { return cpu_kernels().product.chunk; }

void cpu_add_product(float* buffer, int64_t rows, int64_t columns, Operand left, int64_t left_stride, Operand right,
                     int64_t right_stride, int64_t tokens, bool first, int threads) {
  const ProductKernels& kernels = cpu_kernels().product;
  const int64_t panels = (columns + kernels.columns - 1) / kernels.columns;
  // Of a chunk: less where threads would have nothing to do, or wait for one that has more than they.
  int64_t high = kProductRows, wide = panels;
  auto chunks = [&] { return ((rows + high - 1) / high) * ((panels + wide - 1) / wide); };
  while (high > kLeastProductRows && chunks() < kChunks * threads) high /= 2;
  while (wide > kLeastPanels && chunks() < kChunks * threads) wide = (wide + 1) / 2;
  const int64_t column_chunks = (panels + wide - 1) / wide;

  const int64_t most = std::min(tokens, product_tokens(rows));
  const std::unique_ptr<float[], Free> memory(new (std::align_val_t(64)) float[size_t(panels * kernels.columns * most)]);
  Product p{buffer, rows, columns, left, left_stride, right, right_stride, 0, first, false, memory.get()};
  p.past_cache = rows * columns * int64_t(sizeof(float)) > last_level_cache_bytes() / 2;
  for (int64_t done = 0; done < tokens; done += p.tokens) {
    p.tokens = std::min(most, tokens - done);
    in_parallel(panels, threads, [&](int64_t panel) { kernels.pack_panel(p, panel); });
    in_parallel(chunks(), threads, [&](int64_t chunk) {
      const int64_t from = chunk % column_chunks * wide;
      kernels.chunk(p, chunk / column_chunks * high, high, from, std::min(panels, from + wide));
    });
    p.first = p.past_cache = false;
    skip_tokens(p.left, p.tokens * left_stride);
    skip_tokens(p.right, p.tokens * right_stride);
  }
}

}  // namespace fa
