// CUDA kernels for single rows whose tensors do not lie in one order, or are of dtypes that no other kernel knows, and
// the counts of updates. In place: temporaries would have to be allocated in mid-step, inside a graph's capture too,
// and copied back. Such rows are rare, so these kernels are small, not fast.
#include "cuda_access.h"

namespace fa {
namespace {

template <class T>
__device__ T load_any(const char* from, DType dtype) {
  switch (dtype) {
    case DType::f32: return load_as<T>(global_load(reinterpret_cast<const float*>(from)));
    case DType::bf16: return load_as<T>(global_load(reinterpret_cast<const bf16*>(from)));
    case DType::f16: return load_as<T>(global_load(reinterpret_cast<const f16*>(from)));
    default: return load_as<T>(global_load(reinterpret_cast<const double*>(from)));
  }
}

template <class T>
__device__ void store_any(char* to, DType dtype, T x) {
  switch (dtype) {
    case DType::f32: return global_store(reinterpret_cast<float*>(to), Encode<float, T>::of(x));
    case DType::bf16: return global_store(reinterpret_cast<bf16*>(to), Encode<bf16, T>::of(x));
    case DType::f16: return global_store(reinterpret_cast<f16*>(to), Encode<f16, T>::of(x));
    default: return global_store(reinterpret_cast<double*>(to), Encode<double, T>::of(x));
  }
}

// Element i, in logical order, of every tensor of the row.
struct Element {
  const StridedRow& row;
  int64_t offset[kTensors] = {};

  __device__ Element(const StridedRow& row_, int64_t i) : row(row_) {
    for (int d = row.ndim - 1; d >= 0; --d) {
      const int64_t coordinate = i % row.sizes[d];
      i /= row.sizes[d];
#pragma unroll
      for (int k = 0; k < kTensors; ++k) offset[k] += coordinate * row.strides[k][d];
    }
  }
  __device__ char* at(Tensor k) const { return row.data[k] + offset[k] * int64_t(size_of(row.dtypes[k])); }
  template <class T> __device__ T load(Tensor k) const { return load_any<T>(at(k), row.dtypes[k]); }
  template <class T> __device__ void store(Tensor k, T x) const { store_any<T>(at(k), row.dtypes[k], x); }
};

constexpr unsigned kStridedBlocks = 1 << 16;  // at most; each works on as many elements as it must

template <class T>
__global__ void __launch_bounds__(kThreads) accumulate_strided(const __grid_constant__ StridedRow row) {
  const T scale = static_cast<T>(row.scale);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < row.numel; i += kStridedBlocks * int64_t(kThreads)) {
    const Element element(row, i);
    const T g = element.load<T>(kGrad);
    element.store<T>(kAccum, row.has_accum ? add_contribution(element.load<T>(kAccum), scale, g)
                                           : first_contribution(scale, g));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) step_strided(const __grid_constant__ StridedRow row) {
  const ScalarSlot& slot = row.slots[row.slot];
  const bool skip = global_load(&slot.skip);
  const StepScalars<T> s = load_scalars<T>(slot);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < row.numel; i += kStridedBlocks * int64_t(kThreads)) {
    const Element element(row, i);
    if (!skip) {
      T sum = row.has_accum ? element.load<T>(kAccum) : T(0);
      if (row.has_grad) {
        const T g = element.load<T>(kGrad);
        sum = row.has_accum ? add_contribution(sum, s.scale, g) : first_contribution(s.scale, g);
        sum = rounded_to(row.accum_dtype, sum);
      }
      T p = element.load<T>(kParam), m = element.load<T>(kExpAvg), v = element.load<T>(kExpAvgSq);
      T v_max = row.amsgrad ? element.load<T>(kMaxExpAvgSq) : T(0);
      const T g = window_gradient(sum, s);
      if (row.amsgrad) {
        adamw_update<true>(p, m, v, v_max, g, s);
        element.store<T>(kMaxExpAvgSq, v_max);
      } else {
        adamw_update<false>(p, m, v, v_max, g, s);
      }
      element.store<T>(kParam, p);
      element.store<T>(kExpAvg, m);
      element.store<T>(kExpAvgSq, v);
    }
    if (row.has_accum) element.store<T>(kAccum, T(0));
  }
}

template <class T>
__device__ void store_scalars(ScalarSlot* slot, const StepScalars<double>& exact) {
  struct alignas(8) Word { unsigned char bytes[8]; };
  const StepScalars<T> s = rounded<T>(exact);
  for (size_t i = 0; i < sizeof s / sizeof(Word); ++i) {
    Word word;
    memcpy(&word, reinterpret_cast<const char*>(&s) + i * sizeof word, sizeof word);
    global_store(reinterpret_cast<Word*>(slot->scalars) + i, word);
  }
}

// The count after this update; stored where it is kept on the device.
template <class S>
__device__ double count_once(void* place, bool skip) {
  const S t = global_load(static_cast<const S*>(place)) + S(1);
  if (!skip) global_store(static_cast<S*>(place), t);
  return static_cast<double>(t);
}

__global__ void __launch_bounds__(kThreads) count_updates(const __grid_constant__ CountTable table) {
  const int row = int(blockIdx.x * kThreads + threadIdx.x);
  if (row >= table.count) return;
  const bool skip = table.found_inf && global_load(table.found_inf) != 0;
  const double coefficient =
      table.grad_scale ? table.coefficient * (1 / double(global_load(table.grad_scale))) : table.coefficient;
  void* const place = table.step[row];
  double t;
  if (table.kind[row] & kStepOnHost) memcpy(&t, &place, sizeof t);
  else t = table.kind[row] & kStepIsDouble ? count_once<double>(place, skip) : count_once<float>(place, skip);
  Hyper hyper = table.groups[table.group[row]];
  if (hyper.device_lr) {
    hyper.lr = hyper.device_lr_is_double ? global_load(static_cast<const double*>(hyper.device_lr))
                                         : double(global_load(static_cast<const float*>(hyper.device_lr)));
  }
  const StepScalars<double> s = step_scalars(hyper, t, table.scale, coefficient);
  ScalarSlot* const slot = table.slots + row;
  if (table.kind[row] & kSlotIsDouble) store_scalars<double>(slot, s);
  else store_scalars<float>(slot, s);
  global_store(&slot->skip, uint32_t(skip));
}

}  // namespace

void launch_strided(bool steps, const StridedRow& row, cudaStream_t stream) {
  const bool wide = row.dtypes[steps ? kParam : kAccum] == DType::f64;
  const int64_t blocks = (row.numel + kThreads - 1) / kThreads;
  launch(steps ? (wide ? &step_strided<double> : &step_strided<float>)
               : (wide ? &accumulate_strided<double> : &accumulate_strided<float>),
         row, unsigned(blocks < kStridedBlocks ? blocks : kStridedBlocks), stream);
}

void launch_counts(const CountTable& table, cudaStream_t stream) {
  launch(&count_updates, table, unsigned((table.count + kThreads - 1) / kThreads), stream);
}

cudaError_t try_kernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, &count_updates);
}

}  // namespace fa
