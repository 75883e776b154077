// CPU kernels over a range of one row. Compiled once per instruction set, with FA_ISA naming it; nothing here may
// have external linkage but the table at the end.
//
// Tensors that lie in order go straight through one loop that reads, computes and writes: memory is busiest when all
// streams run at once. What is strided, misaligned or of mixed dtypes goes in blocks that stay in the L1 cache:
// load (convert, gather) -> the same loop -> store.
#include <type_traits>

#include "cpu_access.h"
#include "cpu_tiles.h"
#include "cpu_squares.h"

#define FA_CONCAT_(a, b) a##b
#define FA_CONCAT(a, b) FA_CONCAT_(a, b)
#define FA_STRING_(a) #a
#define FA_STRING(a) FA_STRING_(a)

namespace fa {
namespace {

constexpr int64_t kTile = 256;  // bytes stored past the cache at a time: short, so that reads go on meanwhile
constexpr int64_t kAhead = 4096;  // bytes: how far ahead to ask for them; beside such stores the hardware does not

template <class T, class G>
void add(T* __restrict__ a, const G* __restrict__ g, T scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] = add_contribution(a[i], scale, load_as<T>(g[i]));
}

template <class T, class G>
void write(T* __restrict__ a, const G* __restrict__ g, T scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] = first_contribution(scale, load_as<T>(g[i]));
}

// `squares`, if not null, is added to.
template <class T, class G>
void write_past_cache(T* a, const G* g, T scale, int64_t n, Squares<T>* squares) {
  constexpr int64_t kPart = kTile / int64_t(sizeof(T));
  alignas(64) T tile[kPart];
  for (int64_t done = 0; done < n; done += kPart) {
    const int64_t part = smaller(kPart, n - done);
    const char* ahead = reinterpret_cast<const char*>(g + done) + kAhead;
    for (int64_t i = 0; i < kPart * int64_t(sizeof(G)); i += 64) __builtin_prefetch(ahead + i, 0, 0);
    write(tile, g + done, scale, part);
    if (squares) squares->add(tile, part);
    stream_copy(reinterpret_cast<char*>(a + done), reinterpret_cast<const char*>(tile), part * int64_t(sizeof(T)));
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class T, class G>
void accumulate_straight(const Row& row, T scale, int64_t begin, int64_t n, bool streaming, double* squares) {
  T* a = at<T>(row.accum, begin);
  const G* g = at<G>(row.grad, begin);
  const bool past_cache = streaming && !row.has_accum;
  if (!squares) {
    past_cache      ? write_past_cache<T, G>(a, g, scale, n, nullptr)
    : row.has_accum ? add(a, g, scale, n)
                    : write(a, g, scale, n);
    return;
  }
  for (int64_t from = 0; from < n; from += kBlock) {  // what was written is still in the L1 cache
    const int64_t part = smaller(kBlock, n - from);
    Squares<T> sum;
    if (past_cache) {
      write_past_cache(a + from, g + from, scale, part, &sum);
    } else {
      row.has_accum ? add(a + from, g + from, scale, part) : write(a + from, g + from, scale, part);
      sum.add(a + from, part);
    }
    *squares++ = sum.total();
  }
}

template <class T>
void accumulate_range(const Row& row, double scale_, int64_t begin, int64_t end, bool streaming, double* squares) {
  static_assert(kBlock == kSquaresBlock, "a block has one sum of squares");
  const T scale = static_cast<T>(scale_);
  bool straight = false;
  with_storage(row.grad.dtype, [&](auto zero) {
    using G = decltype(zero);
    // Float64 with anything else is too rare for loops of its own.
    if constexpr ((sizeof(G) == 8) == (sizeof(T) == 8)) {
      straight = in_place<G>(row.grad) && in_place<T>(row.accum);
      if (straight) accumulate_straight<T, G>(row, scale, begin, end - begin, streaming, squares);
    }
  });
  if (straight) return;

  alignas(64) T grad_buffer[kBlock], accum_buffer[kBlock];
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t n = smaller(kBlock, end - from);
    const T* g = load(row, row.grad, from, n, grad_buffer);
    T* a = row.has_accum ? load(row, row.accum, from, n, accum_buffer) : accum_buffer;
    row.has_accum ? add(a, g, scale, n) : write(a, g, scale, n);
    if (squares) {
      round_to(row.accum.dtype, a, n);
      *squares++ = sum_of_squares(a, n);
    }
    store(row, row.accum, from, n, a);
  }
}

template <class T>
void measure_range(const Row& row, double scale_, int64_t begin, int64_t end, double* squares) {
  const T scale = static_cast<T>(scale_);
  alignas(64) T buffer[kBlock], sum[kBlock];
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t n = smaller(kBlock, end - from);
    if (!row.has_grad) {
      *squares++ = sum_of_squares(load(row, row.accum, from, n, buffer), n);
      continue;
    }
    write(sum, load(row, row.grad, from, n, buffer), scale, n);
    round_to(row.accum_dtype, sum, n);
    *squares++ = sum_of_squares(sum, n);
  }
}

// The weight of one element, from the parameter and what is kept beside it; and back.
template <Weights kWeights, class T, class P, class X>
T load_weight(P stored, const X* extra, int64_t i) {
  if constexpr (kWeights == Weights::master) return weight_of(stored, extra[i]);
  else if constexpr (kWeights == Weights::split) return joined(stored, extra[i]);
  else return load_as<T>(stored);
}

template <Weights kWeights, class T, class P, class X>
void store_weight(P& stored, X* extra, int64_t i, T weight) {
  if constexpr (kWeights == Weights::split) {
    stored = high_half(weight);
    extra[i] = low_half(weight);
  } else if constexpr (kWeights == Weights::stochastic) {
    stored = EncodeByChance<P>::of(weight, extra[i]);
  } else {
    stored = Encode<P, T>::of(weight);
    if constexpr (kWeights == Weights::master) extra[i] = weight;
  }
}

// (2) to (6) for n elements; P: how parameter and gradient are stored; X: what is beside the parameter. Never inlined:
// gcc forgets __restrict__ then, and no longer vectorizes.
template <class T, class P, bool kGrad, bool kAccum, bool kAmsgrad, Weights kWeights, class X>
__attribute__((noinline)) void update(P* __restrict__ p, const P* __restrict__ g, T* __restrict__ a,
                                      T* __restrict__ m, T* __restrict__ v, T* __restrict__ v_max,
                                      X* __restrict__ extra, StepScalars<T> s, int64_t n) {
  T unused{};
  for (int64_t i = 0; i < n; ++i) {
    T sum;
    if constexpr (!kGrad) {
      sum = a[i];
    } else {
      const T x = load_as<T>(g[i]);
      sum = kAccum ? add_contribution(a[i], s.scale, x) : first_contribution(s.scale, x);
    }
    T weight = load_weight<kWeights, T>(p[i], extra, i);
    adamw_update<kAmsgrad>(weight, m[i], v[i], kAmsgrad ? v_max[i] : unused, window_gradient(sum, s), s);
    store_weight<kWeights>(p[i], extra, i, weight);
    if constexpr (kAccum) a[i] = T(0);
  }
}

// The update of a range whose tensors can all be used in place.
template <class T, class P, Weights kWeights, class X>
void update_in_place(const Row& row, const StepScalars<T>& s, int64_t begin, int64_t n, X* extra) {
  auto run = [&](auto grad, auto accum, auto amsgrad) {
    update<T, P, grad.value, accum.value, amsgrad.value, kWeights>(
        at<P>(row.param, begin), grad.value ? at<P>(row.grad, begin) : nullptr,
        accum.value ? at<T>(row.accum, begin) : nullptr, at<T>(row.exp_avg, begin), at<T>(row.exp_avg_sq, begin),
        amsgrad.value ? at<T>(row.max_exp_avg_sq, begin) : nullptr, extra, s, n);
  };
  auto with_sources = [&](auto amsgrad) {
    if (!row.has_grad) return run(std::false_type(), std::true_type(), amsgrad);
    row.has_accum ? run(std::true_type(), std::true_type(), amsgrad)
                  : run(std::true_type(), std::false_type(), amsgrad);
  };
  row.amsgrad ? with_sources(std::true_type()) : with_sources(std::false_type());
}

// Returns false, with nothing done, where the range's tensors cannot all be used in place.
template <class T, class P>
bool step_straight(const Row& row, const StepScalars<T>& s, int64_t begin, int64_t n) {
  const bool straight = in_place<P>(row.param) && in_place<T>(row.exp_avg) && in_place<T>(row.exp_avg_sq) &&
                        (!row.amsgrad || in_place<T>(row.max_exp_avg_sq)) &&
                        (!row.has_grad || (in_place<P>(row.grad) && row.accum_dtype == dtype_of<T>())) &&
                        (!row.has_accum || in_place<T>(row.accum));
  if (!straight) return false;
  if (row.weights == Weights::plain) {
    update_in_place<T, P, Weights::plain>(row, s, begin, n, static_cast<T*>(nullptr));
    return true;
  }
  if constexpr (std::is_same_v<P, bf16>) {
    if (row.weights == Weights::master) {
      if (!in_place<float>(row.master)) return false;
      update_in_place<T, P, Weights::master>(row, s, begin, n, at<float>(row.master, begin));
      return true;
    }
    if (row.weights == Weights::stochastic) {
      uint32_t room[kBlock + 8];
      for (int64_t from = begin; from < begin + n; from += kBlock) {
        const int64_t part = smaller(kBlock, begin + n - from);
        update_in_place<T, P, Weights::stochastic>(row, s, from, part, random_of(row.randomness, from, part, room));
      }
      return true;
    }
    if (!in_place<i16>(row.master)) return false;
    update_in_place<T, P, Weights::split>(row, s, begin, n, at<i16>(row.master, begin));
    return true;
  }
  return false;
}

// Weights in float32 for a block of a 16-bit parameter, and back.
class BlockOfWeights {
 public:
  BlockOfWeights(const Row& row, int64_t begin, int64_t n) : row_(row), begin_(begin), n_(n) {}

  void load_into(float* weights) {
    if (row_.weights == Weights::master) {
      const float* master = load(row_, row_.master, begin_, n_, buffer_);
      float rounded[kBlock];
      memcpy(rounded, master, size_t(n_) * sizeof(float));
      round_to(row_.param.dtype, rounded, n_);
      for (int64_t i = 0; i < n_; ++i) weights[i] = rounded[i] == weights[i] ? master[i] : weights[i];
    } else if (row_.weights == Weights::split) {
      load_halves(row_, row_.master, begin_, n_, halves_);
      for (int64_t i = 0; i < n_; ++i) weights[i] = joined(encode_bf16(weights[i]), halves_[i]);
    }
  }

  // Leaves in `weights` what the parameter can hold.
  void store_from(float* weights) {
    if (row_.weights == Weights::master) {
      store(row_, row_.master, begin_, n_, weights);
    } else if (row_.weights == Weights::split) {
      for (int64_t i = 0; i < n_; ++i) {
        halves_[i] = low_half(weights[i]);
        weights[i] = decode(high_half(weights[i]));
      }
      store_halves(row_, row_.master, begin_, n_, halves_);
    } else if (row_.weights == Weights::stochastic) {
      const uint32_t* random = random_of(row_.randomness, begin_, n_, room_);
      const bool is_bf16 = row_.param.dtype == DType::bf16;
      for (int64_t i = 0; i < n_; ++i) {
        weights[i] = is_bf16 ? decode(EncodeByChance<bf16>::of(weights[i], random[i]))
                             : decode(EncodeByChance<f16>::of(weights[i], random[i]));
      }
    }
  }

 private:
  const Row& row_;
  const int64_t begin_, n_;
  alignas(64) float buffer_[kBlock];
  i16 halves_[kBlock];
  uint32_t room_[kBlock + 8];
};

template <class T>
void step_range(const Row& row, int64_t begin, int64_t end) {
  const StepScalars<T> s = rounded<T>(*row.scalars);
  bool straight = false;
  with_storage(row.param.dtype, [&](auto zero) {
    using P = decltype(zero);
    // Converting float16 takes so long that blocks cost nothing, and its loops take long to compile.
    if constexpr ((sizeof(P) == 8) == (sizeof(T) == 8) && !std::is_same_v<P, f16>) {
      straight = step_straight<T, P>(row, s, begin, end - begin);
    }
  });
  if (straight) return;

  alignas(64) T sum[kBlock], grad_buffer[kBlock];
  alignas(64) T p_buffer[kBlock], m_buffer[kBlock], v_buffer[kBlock], v_max_buffer[kBlock];
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t n = smaller(kBlock, end - from);
    if (row.has_accum) {
      const T* a = load(row, row.accum, from, n, sum);
      if (a != sum) memcpy(sum, a, size_t(n) * sizeof(T));
      zero<T>(row, row.accum, from, n);
    }
    if (row.has_grad) {
      const T* g = load(row, row.grad, from, n, grad_buffer);
      row.has_accum ? add(sum, g, s.scale, n) : write(sum, g, s.scale, n);
      round_to(row.accum_dtype, sum, n);
    }
    BlockOfWeights weights(row, from, n);
    T* p = load(row, row.param, from, n, p_buffer);
    if constexpr (sizeof(T) == 4) weights.load_into(p);
    T* m = load(row, row.exp_avg, from, n, m_buffer);
    T* v = load(row, row.exp_avg_sq, from, n, v_buffer);
    const T* no_grad = nullptr;
    T* nothing = nullptr;
    if (row.amsgrad) {
      T* v_max = load(row, row.max_exp_avg_sq, from, n, v_max_buffer);
      update<T, T, false, true, true, Weights::plain>(p, no_grad, sum, m, v, v_max, nothing, s, n);
      store(row, row.max_exp_avg_sq, from, n, v_max);
    } else {
      update<T, T, false, true, false, Weights::plain>(p, no_grad, sum, m, v, nullptr, nothing, s, n);
    }
    if constexpr (sizeof(T) == 4) weights.store_from(p);
    store(row, row.param, from, n, p);
    store(row, row.exp_avg, from, n, m);
    store(row, row.exp_avg_sq, from, n, v);
  }
}

// Arithmetic is in float64 for float64 parameters, else in float32.
void accumulate(const Row& row, double scale, int64_t begin, int64_t end, bool streaming, double* squares) {
  row.accum.dtype == DType::f64 ? accumulate_range<double>(row, scale, begin, end, streaming, squares)
                                : accumulate_range<float>(row, scale, begin, end, streaming, squares);
}

void measure(const Row& row, double scale, int64_t begin, int64_t end, double* squares) {
  row.accum_dtype == DType::f64 ? measure_range<double>(row, scale, begin, end, squares)
                                : measure_range<float>(row, scale, begin, end, squares);
}

void step(const Row& row, int64_t begin, int64_t end) {
  row.param.dtype == DType::f64 ? step_range<double>(row, begin, end) : step_range<float>(row, begin, end);
}

}  // namespace

extern const CpuKernels FA_CONCAT(cpu_kernels_, FA_ISA);
const CpuKernels FA_CONCAT(cpu_kernels_, FA_ISA) = {FA_STRING(FA_ISA), accumulate, measure, step,
                                                   kProduct};

}  // namespace fa
