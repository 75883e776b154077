// Sums of squares inside kernels, in the CPU's order (Squares in cpu_kernels.cpp): in double, element i of
// kSquaresBlock in lane i % 16, then halves of the lanes added to each other. A block of threads leaves its values in
// shared memory; 16 threads for each sum read them from there.
#pragma once

#include "cuda_access.h"

namespace fa {
namespace {

constexpr int kLanes = 16;
constexpr int kSums = int(kChunkElements / kSquaresBlock);  // of a block
static_assert(kSums * kLanes % 32 == 0, "whole warps add up");

// A block's values, in 16 bytes each; behind every kSquaresBlock there is a gap, so that the two sums of a warp are in
// different banks.
template <class T>
struct Shared {
  static constexpr int kTogether = int(16 / sizeof(T));
  using Unit = Pack<T, kTogether>;
  static constexpr int kUnits = (int(kChunkElements) + kSums * kLanes) / kTogether;

  static __device__ __forceinline__ int place(int i) { return i + i / int(kSquaresBlock) * kLanes; }

  // kCount values, of which the first is number i, a multiple of kCount.
  template <int kCount>
  static __device__ __forceinline__ void store(Unit* units, int i, const T (&x)[kCount]) {
    T* const to = units->at + place(i);
    constexpr int kPart = kCount < kTogether ? kCount : kTogether;
#pragma unroll
    for (int j = 0; j < kCount; j += kPart) {
      Pack<T, kPart> part;
#pragma unroll
      for (int k = 0; k < kPart; ++k) part.at[k] = x[j + k];
      shared_store(reinterpret_cast<Pack<T, kPart>*>(to + j), part);
    }
  }
};

// The square of a float is exact in double, so that fma gives the bits of a product and a sum.
__device__ __forceinline__ double add_square(double sum, float x) {
  const double wide = x;
  return fma(wide, wide, sum);
}
__device__ __forceinline__ double add_square(double sum, double x) { return sum + x * x; }

// All threads of the block call it: stores the sums of `count` values, as many as there are, at squares[0], [1], ...
template <class T>
__device__ __forceinline__ void store_squares(const typename Shared<T>::Unit* units, int count, double* squares) {
  __syncthreads();
  const int thread = int(threadIdx.x);
  if (thread >= kSums * kLanes) return;
  const int first = thread / kLanes * int(kSquaresBlock);
  const int end = count < first + int(kSquaresBlock) ? count : first + int(kSquaresBlock);
  double sum = 0;
#pragma unroll 4
  for (int i = first + thread % kLanes; i < end; i += kLanes) {
    sum = add_square(sum, shared_load(units->at + Shared<T>::place(i)));
  }
#pragma unroll
  for (unsigned half = kLanes / 2; half; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  if (thread % kLanes == 0 && first < count) global_store(squares + thread / kLanes, sum);
}

}  // namespace
}  // namespace fa
