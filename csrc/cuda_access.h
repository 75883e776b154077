// Ways to a row's memory, for the kernels alone: how tensors are stored, what a block and a thread work on.
#pragma once

#include <limits>
#include <type_traits>

#include "cuda_check.h"
#include "cuda_kernels.h"

namespace fa {
namespace {

template <class S, int kCount>
struct alignas(kCount * sizeof(S) < 16 ? kCount * sizeof(S) : 16) Pack {
  S at[kCount];
};

// kCount elements of type S, in as few accesses as the hardware allows.
template <class S, int kCount>
__device__ __forceinline__ Pack<S, kCount> load_pack(const void* from) {
  constexpr int kPart = kCount * sizeof(S) <= 16 ? kCount : int(16 / sizeof(S));
  Pack<S, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    const auto part = global_load(reinterpret_cast<const Pack<S, kPart>*>(static_cast<const S*>(from) + i));
#pragma unroll
    for (int j = 0; j < kPart; ++j) pack.at[i + j] = part.at[j];
  }
  return pack;
}

template <class S, int kCount>
__device__ __forceinline__ void store_pack(void* to, const Pack<S, kCount>& pack) {
  constexpr int kPart = kCount * sizeof(S) <= 16 ? kCount : int(16 / sizeof(S));
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    Pack<S, kPart> part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.at[j] = pack.at[i + j];
    global_store(reinterpret_cast<Pack<S, kPart>*>(static_cast<S*>(to) + i), part);
  }
}

// How a tensor is stored: a dtype known when compiling.
template <class S>
struct As {
  static constexpr int kWidest = int(16 / sizeof(S));  // elements in 16 bytes
  template <int kCount> using Raw = Pack<S, kCount>;

  static __device__ __forceinline__ char* at(char* data, int64_t i, DType) { return data + i * int64_t(sizeof(S)); }
  template <int kCount>
  static __device__ __forceinline__ Raw<kCount> load(const char* from, DType) { return load_pack<S, kCount>(from); }
  template <int kCount>
  static __device__ __forceinline__ void store(char* to, const Raw<kCount>& raw, DType) { store_pack(to, raw); }
  template <class T, int kCount>
  static __device__ __forceinline__ void decode(const Raw<kCount>& raw, DType, T (&x)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = load_as<T>(raw.at[j]);
  }
  template <class T, int kCount>
  static __device__ __forceinline__ Raw<kCount> encode(const T (&x)[kCount], DType) {
    Raw<kCount> raw;
#pragma unroll
    for (int j = 0; j < kCount; ++j) raw.at[j] = Encode<S, T>::of(x[j]);
    return raw;
  }
};

// How a tensor is stored: float32, bfloat16, float16 or i16, as the launch says. Loads branch on the size alone and
// convert later, so that they need not wait for each other.
struct AsLaunched {
  static constexpr int kWidest = 8;
  template <int kCount>
  struct Raw {
    Pack<float, kCount> bits;  // of kCount float32, or, in the first half, of as many 16-bit values
  };

  static __device__ __forceinline__ char* at(char* data, int64_t i, DType d) { return data + i * int64_t(size_of(d)); }
  template <int kCount>
  static __device__ __forceinline__ Raw<kCount> load(const char* from, DType d) {
    return d == DType::f32 ? Raw<kCount>{load_pack<float, kCount>(from)} : from_halves(load_pack<bf16, kCount>(from));
  }
  template <int kCount>
  static __device__ __forceinline__ void store(char* to, const Raw<kCount>& raw, DType d) {
    if (d == DType::f32) store_pack(to, raw.bits);
    else store_pack(to, halves(raw));
  }
  template <class T, int kCount>
  static __device__ __forceinline__ void decode(const Raw<kCount>& raw, DType d, T (&x)[kCount]) {
    const Pack<bf16, kCount> half = halves(raw);
    if (d == DType::f32) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = raw.bits.at[j];
    } else if (d == DType::bf16) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = load_as<T>(half.at[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = load_as<T>(f16{half.at[j].bits});
    }
  }
  template <class T, int kCount>
  static __device__ __forceinline__ Raw<kCount> encode(const T (&x)[kCount], DType d) {
    Raw<kCount> raw;
    Pack<bf16, kCount> half;
    if (d == DType::f32) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) raw.bits.at[j] = x[j];
    } else if (d == DType::bf16) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) half.at[j] = Encode<bf16, T>::of(x[j]);
      raw = from_halves(half);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) half.at[j].bits = Encode<f16, T>::of(x[j]).bits;
      raw = from_halves(half);
    }
    return raw;
  }

  // The 16-bit values of `raw`, of any 16-bit dtype, and back.
  template <int kCount>
  static __device__ __forceinline__ Pack<bf16, kCount> halves(const Raw<kCount>& raw) {
    Pack<bf16, kCount> half;
#pragma unroll
    for (int j = 0; j < kCount; ++j) half.at[j].bits = uint16_t(bits_of(raw.bits.at[j / 2]) >> (j % 2 * 16));
    return half;
  }
  template <int kCount>
  static __device__ __forceinline__ Raw<kCount> from_halves(const Pack<bf16, kCount>& half) {
    Raw<kCount> raw{};
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      const uint32_t second = j + 1 < kCount ? half.at[j + 1 < kCount ? j + 1 : j].bits : 0u;
      raw.bits.at[j / 2] = float_of(half.at[j].bits | second << 16);
    }
    return raw;
  }
};

template <class... As> constexpr int kWidestOf = 0;
template <class A, class... As>
constexpr int kWidestOf<A, As...> = A::kWidest > kWidestOf<As...> ? A::kWidest : kWidestOf<As...>;

// One block's part of a row.
struct Part {
  int row;
  int64_t start;  // its first element
  int count;
};

template <class Table>
__device__ __forceinline__ Part part_of_block(const Table& table) {
  int row = 0, end = table.count;
  while (end - row > 1) {
    const int middle = (row + end) / 2;
    if (table.first_block[middle] <= blockIdx.x) row = middle;
    else end = middle;
  }
  const int64_t start = int64_t(blockIdx.x - table.first_block[row]) * kChunkElements;
  const int64_t rest = table.numel[row] - start;
  return {row, start, int(rest < kChunkElements ? rest : kChunkElements)};
}

template <class T>
__device__ __forceinline__ StepScalars<T> load_scalars(const ScalarSlot& slot) {
  struct alignas(8) Word { unsigned char bytes[8]; };
  static_assert(sizeof(StepScalars<T>) % sizeof(Word) == 0, "scalars are moved in words");
  StepScalars<T> s;
#pragma unroll
  for (size_t i = 0; i < sizeof s / sizeof(Word); ++i) {
    const Word word = global_load(reinterpret_cast<const Word*>(slot.scalars) + i);
    memcpy(reinterpret_cast<char*>(&s) + i * sizeof(Word), &word, sizeof word);
  }
  return s;
}

// A micro-batch's scale, by value or from the device.
template <class T>
struct Scale {
  T value;
  bool nothing;  // is added

  template <class Table>
  explicit __device__ __forceinline__ Scale(const Table& table) {
    if constexpr (sizeof(T) == 4) {
      value = table.device_scale ? global_load(&table.device_scale->narrow) : table.scale_f32;
    } else {
      value = table.device_scale ? global_load(&table.device_scale->wide) : table.scale;
    }
    nothing = table.device_scale && value == 0;
  }
};

// For a largest second moment of rows without amsgrad: adamw_update<true> then has the bits of adamw_update<false>.
template <class T> constexpr T kBelowAll = -std::numeric_limits<T>::infinity();

// Rounds a sum to what a buffer of `dtype` would give back.
template <class T>
__device__ __forceinline__ T rounded_to(DType dtype, T x) {
  switch (dtype) {
    case DType::bf16: return load_as<T>(Encode<bf16, T>::of(x));
    case DType::f16: return load_as<T>(Encode<f16, T>::of(x));
    case DType::f32: return static_cast<T>(static_cast<float>(x));
    default: return x;
  }
}

// Stands for T where the host picks a kernel.
template <class T>
struct Named {
  using type = T;
};

// Of dtypes that are rare, or known at launch alone, there are few kernels, and none for small tables: more would take
// as long to compile and be as large as all others.
template <class Storage> constexpr bool kCommon = true;
template <> constexpr bool kCommon<AsLaunched> = false;
template <> constexpr bool kCommon<As<double>> = false;

template <class Parameter, class Table>
void launch(void (*kernel)(Parameter), const Table& table, unsigned blocks, cudaStream_t stream) {
  FA_LAUNCH(kernel, blocks, unsigned(kThreads), 0, stream, table);
  FA_CUDA_CHECK(cudaGetLastError());
}

}  // namespace
}  // namespace fa
