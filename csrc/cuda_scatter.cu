// CUDA kernel of an embedding's gradient: rows added into a buffer by index, at a cost that depends on the tokens alone.
//
// The tokens come sorted by row, those of a row in their order. A thread takes a piece of a row of the buffer and adds
// to it what all tokens of that row have there, one after the other, as csrc/scatter.cpp does: the same bits, with no
// atomics. Where it is put at a token that is not its row's first, it has nothing to do.
#include "cuda_access.h"

namespace fa {
namespace {

constexpr int64_t kBlocks = 1 << 16;  // at most; each thread works on as many pieces as it must
constexpr int kTokensTogether = 4;  // under way together, of a row that many tokens name

template <class T, class G, class A, int kCount>
struct Piece {
  const ScatterJob& job;
  int64_t column;
  T sum[kCount];

  __device__ __forceinline__ typename G::template Raw<kCount> fetch(int64_t place) const {
    const int64_t token = global_load(job.order + place);
    const char* from = G::at(const_cast<char*>(job.grad), token * job.width + column, job.grad_dtype);
    return G::template load<kCount>(from, job.grad_dtype);
  }
  __device__ __forceinline__ void add(const typename G::template Raw<kCount>& raw) {
    T x[kCount];
    G::template decode<T, kCount>(raw, job.grad_dtype, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += x[j];
  }
};

template <class T, class G, class A, int kCount>
__global__ void __launch_bounds__(kThreads) scatter_rows(FA_PARAMETER(ScatterJob) job) {
  const int64_t pieces = job.width / kCount;
  const int64_t end = job.tokens * pieces;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < end; i += kBlocks * int64_t(kThreads)) {
    int64_t place = i / pieces;
    const int64_t row = global_load(job.rows + place);
    const bool first = place == 0 || global_load(job.rows + place - 1) != row;
    if (!first || row == job.skip || row < 0 || row >= job.row_count) continue;
    Piece<T, G, A, kCount> piece{job, i % pieces * kCount, {}};
    char* const at = A::at(job.accum, row * job.width + piece.column, job.accum_dtype);
    A::template decode<T, kCount>(A::template load<kCount>(at, job.accum_dtype), job.accum_dtype, piece.sum);
#pragma unroll 1
    while (place + kTokensTogether <= job.tokens && global_load(job.rows + place + kTokensTogether - 1) == row) {
      typename G::template Raw<kCount> raw[kTokensTogether];
#pragma unroll
      for (int k = 0; k < kTokensTogether; ++k) raw[k] = piece.fetch(place + k);
#pragma unroll
      for (int k = 0; k < kTokensTogether; ++k) piece.add(raw[k]);
      place += kTokensTogether;
    }
#pragma unroll 1
    for (; place < job.tokens && global_load(job.rows + place) == row; ++place) piece.add(piece.fetch(place));
    A::template store<kCount>(at, A::template encode<T, kCount>(piece.sum, job.accum_dtype), job.accum_dtype);
  }
}

template <class T, class G, class A, int kCount>
void launch_pieces(const ScatterJob& job, cudaStream_t stream) {
  const int64_t blocks = (job.tokens * (job.width / kCount) + kThreads - 1) / kThreads;
  launch(&scatter_rows<T, G, A, kCount>, job, unsigned(blocks < kBlocks ? blocks : kBlocks), stream);
}

template <class T, class G, class A>
void launch_widest(const ScatterJob& job, cudaStream_t stream) {
  constexpr int kCount = kWidestOf<G, A>;
  const auto places = reinterpret_cast<uintptr_t>(job.accum) | reinterpret_cast<uintptr_t>(job.grad);
  if (places % 16 == 0 && job.width % kCount == 0) launch_pieces<T, G, A, kCount>(job, stream);
  else launch_pieces<T, G, A, 1>(job, stream);
}

}  // namespace

void launch_scatter(const ScatterJob& job, cudaStream_t stream) {
  const DType grad = job.grad_dtype, accum = job.accum_dtype;
  if (accum == DType::f64) launch_widest<double, As<double>, As<double>>(job, stream);
  else if (accum == DType::f32 && grad == DType::f32) launch_widest<float, As<float>, As<float>>(job, stream);
  else if (accum == DType::f32 && grad == DType::bf16) launch_widest<float, As<bf16>, As<float>>(job, stream);
  else launch_widest<float, AsLaunched, AsLaunched>(job, stream);
}

}  // namespace fa
