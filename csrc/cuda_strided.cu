// CUDA kernels for single rows whose tensors do not lie in one order, or are of dtypes that no other kernel knows, and
// the counts of updates. In place: temporaries would have to be allocated in mid-step, inside a graph's capture too,
// and copied back. Such rows are rare, so these kernels are small, not fast. Also what rows' sums of squares are.
#include "cuda_squares.h"
#include "cuda_weights.h"

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
__global__ void __launch_bounds__(kThreads) accumulate_strided(FA_PARAMETER(StridedRow) row) {
  const Scale<T> scale(row);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < row.numel; i += kStridedBlocks * int64_t(kThreads)) {
    const Element element(row, i);
    if (scale.nothing && row.has_accum) continue;
    const T g = element.load<T>(kGrad);
    element.store<T>(kAccum, scale.nothing   ? T(0)
                             : row.has_accum ? add_contribution(element.load<T>(kAccum), scale.value, g)
                                             : first_contribution(scale.value, g));
  }
}

// A block works on kChunkElements of them.
template <class T>
__global__ void __launch_bounds__(kThreads) measure_strided(FA_PARAMETER(StridedRow) row) {
  using Unit = typename Shared<T>::Unit;
  FA_SHARED(Unit, units, Shared<T>::kUnits);
  const int64_t start = int64_t(blockIdx.x) * kChunkElements, rest = row.numel - start;
  const int count = int(rest < kChunkElements ? rest : kChunkElements);
  const Scale<T> scale(row);
  for (int i = int(threadIdx.x); i < count; i += kThreads) {
    const T g = Element(row, start + i).load<T>(kGrad);
    const T sum[1] = {scale.nothing ? T(0) : rounded_to(row.accum_dtype, first_contribution(scale.value, g))};
    Shared<T>::store(units, i, sum);
  }
  store_squares<T>(units, count, row.squares + int64_t(blockIdx.x) * kSums);
}

template <class T>
__global__ void __launch_bounds__(kThreads) step_strided(FA_PARAMETER(StridedRow) row) {
  const ScalarSlot& slot = row.slots[row.slot];
  const bool skip = global_load(&slot.skip), ignores_grad = global_load(&slot.ignores_grad);
  const StepScalars<T> s = load_scalars<T>(slot);
  const bool kept = sizeof(T) == 4 && row.weights != Weights::plain;
  const Keeping keeping{row.weights, row.dtypes[kParam], row.dtypes[kMaster]};
  const Randomness source{row.seed, global_load(&slot.parameter), global_load(&slot.step)};
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < row.numel; i += kStridedBlocks * int64_t(kThreads)) {
    const Element element(row, i);
    if (!skip) {
      T sum = row.has_accum ? element.load<T>(kAccum) : T(0);
      if (row.has_grad && !ignores_grad) {
        const T g = element.load<T>(kGrad);
        sum = row.has_accum ? add_contribution(sum, s.scale, g) : first_contribution(s.scale, g);
        sum = rounded_to(row.accum_dtype, sum);
      }
      T p[1], m = element.load<T>(kExpAvg), v = element.load<T>(kExpAvgSq);
      if constexpr (sizeof(T) == 4) {
        if (kept) keeping.decode(keeping.load<1>(element.at(kParam), element.at(kMaster)), p);
      }
      if (!kept) p[0] = element.load<T>(kParam);
      T v_max = row.amsgrad ? element.load<T>(kMaxExpAvgSq) : kBelowAll<T>;
      const T g = window_gradient(sum, s);
      adamw_update<true>(p[0], m, v, v_max, g, s);
      if (row.amsgrad) element.store<T>(kMaxExpAvgSq, v_max);
      if constexpr (sizeof(T) == 4) {
        if (kept) keeping.store(element.at(kParam), element.at(kMaster), p, source, i);
      }
      if (!kept) element.store<T>(kParam, p[0]);
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

template <class Table>
__global__ void __launch_bounds__(kThreads) count_updates(FA_PARAMETER(Table) table) {
  const int row = int(blockIdx.x * kThreads + threadIdx.x);
  if (row >= table.count) return;
  const double scale = table.device_scale ? global_load(&table.device_scale->wide) : table.scale;
  const bool ignores_grad = table.device_scale && scale == 0;
  const bool from_grad = table.kind[row] & kHasGrad && !ignores_grad;
  const bool from_accum = table.kind[row] & kHasAccum && !(table.counts && global_load(table.counts + row) == 0);
  const bool skip = (table.found_inf && global_load(table.found_inf) != 0) || !(from_grad || from_accum);
  double coefficient = table.coefficient;
  if (table.clip) coefficient *= global_load(table.clip);
  void* const place = table.step[row];
  double t;
  if (table.kind[row] & kStepOnHost) memcpy(&t, &place, sizeof t);
  else t = table.kind[row] & kStepIsDouble ? count_once<double>(place, skip) : count_once<float>(place, skip);
  Hyper hyper = table.groups[table.group[row]];
  if (hyper.device_lr) {
    hyper.lr = hyper.device_lr_is_double ? global_load(static_cast<const double*>(hyper.device_lr))
                                         : double(global_load(static_cast<const float*>(hyper.device_lr)));
  }
  const StepScalars<double> s = step_scalars(hyper, t, scale, coefficient);
  ScalarSlot* const slot = table.slots + row;
  if (table.kind[row] & kSlotIsDouble) store_scalars<double>(slot, s);
  else store_scalars<float>(slot, s);
  global_store(&slot->skip, uint32_t(skip));
  global_store(&slot->parameter, table.parameter[row]);
  global_store(&slot->step, uint32_t(t));
  global_store(&slot->ignores_grad, uint32_t(ignores_grad));
}

// A block for every row; the order is that of BlockSquares in cpu_launch.cpp.
__global__ void __launch_bounds__(kThreads) add_squares(FA_PARAMETER(SquaresTable) table) {
  static_assert(kThreads == kSquaresLanes, "a thread is a lane");
  FA_SHARED(double, lanes, kSquaresLanes);
  const int row = int(blockIdx.x), thread = int(threadIdx.x);
  const double* const blocks = table.blocks[row];
  double sum = 0;
#pragma unroll 4
  for (unsigned k = threadIdx.x; k < table.block_count[row]; k += kThreads) sum += global_load(blocks + k);
  shared_store(lanes + thread, sum);
  for (int half = kSquaresLanes / 2; half; half /= 2) {
    __syncthreads();
    if (thread < half) shared_store(lanes + thread, shared_load(lanes + thread) + shared_load(lanes + thread + half));
  }
  if (thread == 0) global_store(table.row[row], shared_load(lanes));
}

}  // namespace

void launch_strided(bool steps, const StridedRow& row, cudaStream_t stream) {
  const bool wide = row.dtypes[steps ? kParam : kAccum] == DType::f64;
  const int64_t blocks = (row.numel + kThreads - 1) / kThreads;
  launch(steps ? (wide ? &step_strided<double> : &step_strided<float>)
               : (wide ? &accumulate_strided<double> : &accumulate_strided<float>),
         row, unsigned(blocks < kStridedBlocks ? blocks : kStridedBlocks), stream);
}

void launch_strided_squares(const StridedRow& row, cudaStream_t stream) {
  launch(row.accum_dtype == DType::f64 ? &measure_strided<double> : &measure_strided<float>, row,
         unsigned((row.numel + kChunkElements - 1) / kChunkElements), stream);
}

void launch_squares(const SquaresTable& table, cudaStream_t stream) {
  launch(&add_squares, table, unsigned(table.count), stream);
}

void launch_counts(const LargeCounts& table, cudaStream_t stream) {
  const auto blocks = unsigned((table.count + kThreads - 1) / kThreads);
  if (table.count > SmallCounts::kCapacity) return launch(&count_updates<LargeCounts>, table, blocks, stream);
  launch(&count_updates<SmallCounts>, SmallCounts(table), blocks, stream);
}

cudaError_t try_kernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, &count_updates<SmallCounts>);
}

}  // namespace fa
