// csrc/cuda_port.h's other side: kernels compiled as C++, one block after another, each thread of it a fiber. Nothing
// of CUDA is needed.
//
// What it checks, besides what sanitizers see: races (two threads of a block that touch the same bytes with no barrier
// between, or two blocks of a launch), barriers that not all threads reach, misaligned accesses, launches on a stream
// of another device than the current one. Blocks and threads start in an order drawn from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <typeinfo>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct FakeIndex {
  unsigned x;
};
extern __thread FakeIndex threadIdx, blockIdx, blockDim, gridDim;  // __thread: no guard around every use

void __syncthreads();

// ---- the runtime, with fake devices ----------------------------------------------------------------------------

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalAddress = 700,
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
struct cudaFuncAttributes {
  int binaryVersion, ptxVersion, maxThreadsPerBlock, numRegs;
};

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <class P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);

// ---- launches, shared memory, shuffles, accesses -----------------------------------------------------------------

namespace cuda_emulation {

struct Launch {
  unsigned grid, block;
  cudaStream_t stream;
  size_t parameter_bytes;
  void (*call)(const void* context);  // one thread
  const void* context;
};

// `kind`: the parameter's type, by which kernels are told apart in logs and errors.
void launch(const std::type_info& kind, const Launch& launch);

template <class P>
void launch(void (*kernel)(P), unsigned grid, unsigned block, cudaStream_t stream,
            const std::remove_reference_t<P>& parameter) {
  struct Context {
    void (*kernel)(P);
    const std::remove_reference_t<P>* parameter;
  } context{kernel, &parameter};
  const auto call = [](const void* c) {
    const auto* context = static_cast<const Context*>(c);
    context->kernel(*context->parameter);
  };
  launch(typeid(P), Launch{grid, block, stream, sizeof parameter, call, &context});
}

extern bool steps_on_device;  // see cuda_emulation_control.h

// The running block's memory for the declaration that `tag` stands for, filled with 0xaa when first asked for.
void* shared(const void* tag, size_t bytes);

// Gives `value` to the warp and returns that of the lane `delta` above, or its own; all 32 must call it.
uint64_t shuffle_down(uint64_t value, unsigned delta);

enum class Access { read, write };

extern bool watching;  // whether accesses are to be noted
// Notes an access of the running thread; false: it must not be performed.
bool note(const void* address, size_t bytes, Access access);
[[noreturn]] void misaligned(const void* address, size_t bytes);

template <class V>
inline V load(const V* from) {
  static_assert(std::is_trivially_copyable<V>::value && (sizeof(V) & (sizeof(V) - 1)) == 0 && sizeof(V) <= 16,
                "one load instruction");
  if (reinterpret_cast<uintptr_t>(from) % sizeof(V)) misaligned(from, sizeof(V));
  V value{};
  if (watching && !note(from, sizeof(V), Access::read)) return value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
inline void store(V* to, const V& value) {
  static_assert(std::is_trivially_copyable<V>::value && (sizeof(V) & (sizeof(V) - 1)) == 0 && sizeof(V) <= 16,
                "one store instruction");
  if (reinterpret_cast<uintptr_t>(to) % sizeof(V)) misaligned(to, sizeof(V));
  if (watching && !note(to, sizeof(V), Access::write)) return;
  std::memcpy(to, &value, sizeof value);
}

}  // namespace cuda_emulation

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  static_assert(sizeof(T) <= 8 && std::is_arithmetic<T>::value, "CUDA shuffles numbers");
  (void)mask;  // by contract all lanes
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = cuda_emulation::shuffle_down(bits, delta);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace fa {
namespace {

template <class V> inline V global_load(const V* from) { return cuda_emulation::load(from); }
template <class V> inline void global_store(V* to, V value) { cuda_emulation::store(to, value); }
template <class V> inline V shared_load(const V* from) { return cuda_emulation::load(from); }
template <class V> inline void shared_store(V* to, V value) { cuda_emulation::store(to, value); }

}  // namespace
}  // namespace fa

#define FA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                \
  do {                                                                           \
    static_assert((shared_bytes) == 0, "no dynamic shared memory is emulated");  \
    cuda_emulation::launch((kernel), (grid), (block), (stream), __VA_ARGS__);      \
  } while (false)
#define FA_PARAMETER(type) const type&
#define FA_SHARED(type, name, count)  \
  static const char tag_of_##name = 0; \
  type(&name)[count] = *static_cast<type(*)[count]>(cuda_emulation::shared(&tag_of_##name, sizeof(type[count])))
