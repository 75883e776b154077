// CUDA kernels of an update, for rows whose tensors lie in one order; see cuda_accumulate.cu.
#include <initializer_list>

#include "cuda_weights.h"

namespace fa {
namespace {

// Where a thread is in the tensors of a row, and how they are stored; P: parameter and gradient, A: buffer, S: state.
// The pointers move on, so that none but the present ones take registers.
template <class P_, class A_, class S_>
struct Places {
  using P = P_;
  using A = A_;
  using S = S_;
  char *param, *grad, *accum, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;
  const DType* dtypes;

  __device__ __forceinline__ Places(char* const* data, const DType* dtypes_, int64_t element)
      : param(data[kParam]),
        grad(data[kGrad]),
        accum(data[kAccum]),
        exp_avg(data[kExpAvg]),
        exp_avg_sq(data[kExpAvgSq]),
        max_exp_avg_sq(data[kMaxExpAvgSq]),
        master(data[kMaster]),
        dtypes(dtypes_) {
    advance(element);
  }

  __device__ __forceinline__ void advance(int64_t elements) {
    param = P::at(param, elements, dtypes[kParam]);
    grad = P::at(grad, elements, dtypes[kGrad]);
    accum = A::at(accum, elements, dtypes[kAccum]);
    exp_avg = S::at(exp_avg, elements, dtypes[kExpAvg]);
    exp_avg_sq = S::at(exp_avg_sq, elements, dtypes[kExpAvgSq]);
    max_exp_avg_sq = S::at(max_exp_avg_sq, elements, dtypes[kMaxExpAvgSq]);
    master = AsLaunched::at(master, elements, dtypes[kMaster]);
  }
};

// Which tensors rows have, known when compiling.
template <bool kGrad, bool kAccum>
struct Known {
  static constexpr bool kKeeps = false, kAmsgrad = false;  // possibly
  static constexpr bool has_grad = kGrad, has_accum = kAccum, amsgrad = false, keeps = false;

  template <class Table> explicit __device__ Known(const Table&) {}
};

// The same as the launch says: one kernel for many, where the registers of all of them cost nothing.
struct AtLaunch {
  static constexpr bool kKeeps = false, kAmsgrad = true, keeps = false;
  const bool has_grad, has_accum, amsgrad;

  template <class Table>
  explicit __device__ AtLaunch(const Table& table)
      : has_grad(table.has_grad), has_accum(table.has_accum), amsgrad(table.amsgrad) {}
};

// As the launch says, but amsgrad for certain; parameters that for certain keep more than their 16 bits; or that may.
struct Amsgrad : AtLaunch {
  static constexpr bool amsgrad = true;

  using AtLaunch::AtLaunch;
};
struct Keeps : AtLaunch {
  static constexpr bool kKeeps = true, keeps = true;

  using AtLaunch::AtLaunch;
};
struct MayKeep : AtLaunch {
  static constexpr bool kKeeps = true;
  const bool keeps;

  template <class Table>
  explicit __device__ MayKeep(const Table& table) : AtLaunch(table), keeps(table.weights != Weights::plain) {}
};

template <int kCount, class A>
__device__ __forceinline__ void clear(char* to, DType dtype) {
  const float zeros[kCount] = {};
  A::template store<kCount>(to, A::template encode<float, kCount>(zeros, dtype), dtype);
}

// (2) to (6) on kCount elements; `first`: the number of the first in its tensor.
template <class T, int kCount, class How, class Where>
__device__ __forceinline__ void step_piece(const How& how, const Where& at, DType sum_dtype, const StepScalars<T>& s,
                                           bool ignores_grad, const Keeping& keeping, const Randomness& source,
                                           int64_t first) {
  using P = typename Where::P;
  using A = typename Where::A;
  using S = typename Where::S;
  typename A::template Raw<kCount> raw_a;
  typename P::template Raw<kCount> raw_g, raw_p;
  typename S::template Raw<kCount> raw_m, raw_v, raw_v_max;
  KeptPiece<kCount> kept;
  if (how.has_accum) raw_a = A::template load<kCount>(at.accum, at.dtypes[kAccum]);
  if (how.has_grad) raw_g = P::template load<kCount>(at.grad, at.dtypes[kGrad]);
  if (how.keeps) kept = keeping.load<kCount>(at.param, at.master);
  else raw_p = P::template load<kCount>(at.param, at.dtypes[kParam]);
  raw_m = S::template load<kCount>(at.exp_avg, at.dtypes[kExpAvg]);
  raw_v = S::template load<kCount>(at.exp_avg_sq, at.dtypes[kExpAvgSq]);
  if (how.amsgrad) raw_v_max = S::template load<kCount>(at.max_exp_avg_sq, at.dtypes[kMaxExpAvgSq]);

  T g[kCount] = {}, p[kCount], m[kCount], v[kCount], v_max[kCount];
  if (how.has_accum) A::template decode<T, kCount>(raw_a, at.dtypes[kAccum], g);
  if (how.has_grad) {
    T x[kCount];
    P::template decode<T, kCount>(raw_g, at.dtypes[kGrad], x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (!how.has_accum) g[j] = first_contribution(s.scale, x[j]);
      else if (!ignores_grad) g[j] = add_contribution(g[j], s.scale, x[j]);
    }
    A::template decode<T, kCount>(A::template encode<T, kCount>(g, sum_dtype), sum_dtype, g);  // as a buffer rounds it
  }
  if (!how.keeps) P::template decode<T, kCount>(raw_p, at.dtypes[kParam], p);
  else if constexpr (How::kKeeps) keeping.decode(kept, p);
  S::template decode<T, kCount>(raw_m, at.dtypes[kExpAvg], m);
  S::template decode<T, kCount>(raw_v, at.dtypes[kExpAvgSq], v);
  if (how.amsgrad) {
    S::template decode<T, kCount>(raw_v_max, at.dtypes[kMaxExpAvgSq], v_max);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v_max[j] = kBelowAll<T>;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    adamw_update<How::kAmsgrad>(p[j], m[j], v[j], v_max[j], window_gradient(g[j], s), s);
  }
  if (how.amsgrad) {
    S::template store<kCount>(at.max_exp_avg_sq, S::template encode<T, kCount>(v_max, at.dtypes[kMaxExpAvgSq]),
                              at.dtypes[kMaxExpAvgSq]);
  }
  if (!how.keeps) {
    P::template store<kCount>(at.param, P::template encode<T, kCount>(p, at.dtypes[kParam]), at.dtypes[kParam]);
  } else if constexpr (How::kKeeps) {
    keeping.store(at.param, at.master, p, source, first);
  }
  S::template store<kCount>(at.exp_avg, S::template encode<T, kCount>(m, at.dtypes[kExpAvg]), at.dtypes[kExpAvg]);
  S::template store<kCount>(at.exp_avg_sq, S::template encode<T, kCount>(v, at.dtypes[kExpAvgSq]),
                            at.dtypes[kExpAvgSq]);
  if (how.has_accum) clear<kCount, A>(at.accum, at.dtypes[kAccum]);
}

// An update that is dropped leaves its buffer zero.
template <class A>
__device__ __forceinline__ void clear_part(char* accum, DType dtype, int count) {
#pragma unroll 1
  for (int i = int(threadIdx.x); i < count; i += kThreads) clear<1, A>(A::at(accum, i, dtype), dtype);
}

// Blocks of a multiprocessor at least, which bounds a thread's registers: 4 to 64, 3 to 80, 2 to 128. Fewer threads are
// enough where each has more bytes under way.
template <class P, int kCount, class How> constexpr int kBlocksOfStep = 2;
template <class P, int kCount, bool kGrad, bool kAccum>
constexpr int kBlocksOfStep<P, kCount, Known<kGrad, kAccum>> = kCount == 8 ? 3 : 4;
template <class P, int kCount> constexpr int kBlocksOfStep<P, kCount, Amsgrad> = kCount == 8 ? 2 : 3;

template <class T, class P, class A, class S, class How>
__global__ void __launch_bounds__(kThreads, kBlocksOfStep<P, kWidestOf<P, A, S>, How>)
    step_rows(FA_PARAMETER(LargeTable) table) {
  const How how(table);
  const Part part = part_of_block(table);
  char* const* data = table.data[part.row];
  const ScalarSlot& slot = table.slots[table.slot[part.row]];
  if (global_load(&slot.skip)) {
    if (how.has_accum) {
      clear_part<A>(A::at(data[kAccum], part.start, table.dtypes[kAccum]), table.dtypes[kAccum], part.count);
    }
    return;
  }
  const StepScalars<T> s = load_scalars<T>(slot);
  const bool ignores_grad = how.has_grad && how.has_accum && global_load(&slot.ignores_grad);
  const Keeping keeping{table.weights, std::is_same_v<P, As<bf16>> ? DType::bf16 : table.dtypes[kParam],
                        table.dtypes[kMaster]};
  Randomness source;
  if (How::kKeeps) source = {table.seed, global_load(&slot.parameter), global_load(&slot.step)};
  const DType sum_dtype = sizeof(T) == 8 ? DType::f64 : A::kWidest == 4 ? DType::f32 : table.accum_dtype;

  constexpr int kCount = kWidestOf<P, A, S>;
  uintptr_t places = 0;
#pragma unroll
  for (int k = 0; k < kTensors; ++k) places |= reinterpret_cast<uintptr_t>(data[k]);
  const int thread = int(threadIdx.x);
  const int end = places % 16 == 0 ? part.count / kCount * kCount : 0;
  Places<P, A, S> at(data, table.dtypes, part.start + thread * kCount);
#pragma unroll 1
  for (int i = thread * kCount; i < end; i += kCount * kThreads) {
    step_piece<T, kCount>(how, at, sum_dtype, s, ignores_grad, keeping, source, part.start + i);
    at.advance(kCount * kThreads);
  }
  Places<P, A, S> rest(data, table.dtypes, part.start + end + thread);
#pragma unroll 1
  for (int i = end + thread; i < part.count; i += kThreads) {
    step_piece<T, 1>(how, rest, sum_dtype, s, ignores_grad, keeping, source, part.start + i);
    rest.advance(kThreads);
  }
}

// Calls f with the storages of parameter and gradient, buffer, state and the arithmetic's dtype that fit `key`.
template <class F>
bool with_storages(const KernelKey& key, F f) {
  const auto all = [&](DType dtype, std::initializer_list<Tensor> tensors) {
    for (Tensor k : tensors) {
      const bool used = k == kGrad ? key.has_grad : k == kAccum ? key.has_accum : k != kMaxExpAvgSq || key.amsgrad;
      if (used && key.dtypes[k] != dtype) return false;
    }
    return true;
  };
  const auto plain = [&](DType storage, DType arithmetic) {
    return all(storage, {kParam, kGrad}) && all(arithmetic, {kAccum, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) &&
           key.accum_dtype == arithmetic;
  };
  const auto none_is_double = [&] {
    for (DType dtype : key.dtypes) {
      if (dtype == DType::f64) return false;
    }
    return true;
  };
  if (plain(DType::f64, DType::f64)) return f(As<double>(), As<double>(), As<double>(), double()), true;
  if (plain(DType::f32, DType::f32)) return f(As<float>(), As<float>(), As<float>(), float()), true;
  if (plain(DType::bf16, DType::f32)) return f(As<bf16>(), As<float>(), As<float>(), float()), true;
  if (none_is_double()) return f(AsLaunched(), AsLaunched(), AsLaunched(), float()), true;
  return false;
}

}  // namespace

bool can_step(const KernelKey& key) {
  return with_storages(key, [](auto...) {});
}

void launch_step(const KernelKey& key, const LargeTable& table, unsigned blocks, cudaStream_t stream) {
  with_storages(key, [&](auto p, auto a, auto s, auto wide) {
    using P = decltype(p);
    using A = decltype(a);
    using S = decltype(s);
    using T = decltype(wide);
    const auto step = [&](auto how) {
      using How = typename decltype(how)::type;
      launch(&step_rows<T, P, A, S, How>, table, blocks, stream);
    };
    if constexpr (std::is_same_v<P, As<bf16>>) {
      if (key.weights != Weights::plain) return step(Named<Keeps>());
    }
    if constexpr (std::is_same_v<P, AsLaunched>) step(Named<MayKeep>());
    else if constexpr (!kCommon<P>) step(Named<AtLaunch>());
    else if (key.amsgrad) step(Named<Amsgrad>());
    else if (!key.has_accum) step(Named<Known<true, false>>());
    else if (key.has_grad) step(Named<Known<true, true>>());
    else step(Named<Known<false, true>>());
  });
}

}  // namespace fa
