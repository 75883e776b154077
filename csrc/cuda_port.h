// The contract between the CUDA sources and what runs them: nvcc, or, with FA_CUDA_EMULATION, the emulator in
// tests/native/cuda_emulation.h, which runs the same cuda_*.cu and cuda_launch.cpp on the CPU and checks them.
//
// Both sides give exactly this:
//
// In kernels (cuda_*.cu), besides plain C++:
//   __global__ __device__ __forceinline__ __launch_bounds__(threads, blocks)
//   threadIdx.x, blockIdx.x (grids and blocks have one dimension; all block sizes are multiples of 32)
//   __syncthreads()
//   __shfl_down_sync(0xffffffffu, float | double | unsigned, unsigned delta)   all 32 lanes take part
//   FA_SHARED(type, name, count)       declares a block's array: __shared__ type name[count]
//   global_load(const V*), global_store(V*, V)   the only accesses to global memory; V is trivially copyable, of 1, 2,
//                                      4, 8 or 16 bytes, aligned to its size
//   shared_load(const V*), shared_store(V*, V)   the only accesses to FA_SHARED arrays; same V
//   FA_PARAMETER(Struct) name          declares a kernel's only parameter: a constant of at most 32764 bytes, which the
//                                      launch copies (the emulator, whose launches are done on return, does not)
//
// On the host (cuda_launch.cpp, cuda_*.cu, cuda_check.h):
//   FA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)
//       kernel is a function pointer or a name without template commas; grid and block are unsigned; no dynamic
//       shared memory is used so far; the launch goes to the current device (cudaSetDevice)
//   types      cudaStream_t (pointer to an incomplete type), cudaError_t, cudaFuncAttributes
//   constants  cudaSuccess, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor
//   functions  cudaGetDevice, cudaSetDevice, cudaGetDeviceCount, cudaDeviceGetAttribute, cudaDriverGetVersion,
//              cudaGetLastError, cudaGetErrorName, cudaGetErrorString, cudaFuncGetAttributes(&attributes, kernel)
// Nothing is allocated, copied, or waited for: tables go by value, and scratch memory is the caller's.
#pragma once

#if defined(FA_CUDA_EMULATION)

#include "cuda_emulation.h"

#else

#include <cuda_runtime.h>

#include <cstring>

#define FA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define FA_SHARED(type, name, count) __shared__ type name[count]
#define FA_PARAMETER(type) const __grid_constant__ type

#if defined(__CUDACC__)
namespace fa {
namespace {

// One register-sized word, or several, as the hardware moves them: a struct of small members would go in pieces.
template <size_t kBytes> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <class To, class From>
__device__ __forceinline__ To same_bits(From from) {  // by value: read whole, whatever becomes of it
  static_assert(sizeof(To) == sizeof(From), "a word is as large as the value");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// By way of the global window, so that the compiler knows what kind of memory it is: LDG and STG, not LD and ST.
template <class W>
__device__ __forceinline__ W* in_global(const void* place) {
  return static_cast<W*>(__cvta_global_to_generic(__cvta_generic_to_global(place)));
}

template <class V>
__device__ __forceinline__ V global_load(const V* from) {
  using W = typename Word<sizeof(V)>::type;
  return same_bits<V>(*in_global<W>(from));
}

template <class V>
__device__ __forceinline__ void global_store(V* to, V value) {
  using W = typename Word<sizeof(V)>::type;
  *in_global<W>(to) = same_bits<W>(value);
}

template <class V>
__device__ __forceinline__ V shared_load(const V* from) { return *from; }

template <class V>
__device__ __forceinline__ void shared_store(V* to, V value) { *to = value; }

}  // namespace
}  // namespace fa
#endif  // __CUDACC__

#endif
