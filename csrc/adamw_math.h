// THE math: one element, one function, for host and device. Loops, loads and stores are elsewhere.
//
// Equation numbers are those of the README. fma is always written out, so that every compiler, instruction set and
// device gives the same bits (build with -ffp-contract=off, nvcc with -fmad=false).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FA_HD __host__ __device__ __forceinline__
#else
#define FA_HD inline
#endif

namespace fa {

// What an update needs that does not depend on the element, computed once per (group, t) in double.
template <class T>
struct StepScalars {
  T scale;              // s, of the last micro-batch
  T coefficient;        // c, negated if maximize
  T decay;              // 1 - lr*weight_decay
  T one_minus_beta1;
  T minus_beta1;
  T beta2;
  T one_minus_beta2;
  T minus_step_size;    // -lr / (1 - beta1^t)
  T inverse_sqrt_bias_correction2;  // 1 / sqrt(1 - beta2^t)
  T eps;
};

// One group's hyper-parameters.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize, amsgrad;
  const void* device_lr = nullptr;  // where a GPU's kernels read lr instead: float32, or float64
  bool device_lr_is_double = false;
};

namespace {  // internal linkage: objects built for different instruction sets must not share a copy

#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
FA_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// fmaf without the instruction: the product is exact in double, the sum is rounded to odd, so that the last
// rounding, to float, is the only one (Boldo & Melquiond, "Emulation of FMA and correctly rounded sums").
FA_HD float fma(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;
  const double sum = product + c;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const bool inexact = error > 0 || error < 0;  // false for NaN: an infinite sum stays
  const bool away = (error > 0) == (sum > 0);
  bits += (inexact && !(bits & 1)) ? (away ? uint64_t(1) : ~uint64_t(0)) : uint64_t(0);
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
}
#endif
FA_HD double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FA_HD float square_root(float x) { return __builtin_sqrtf(x); }
FA_HD double square_root(double x) { return __builtin_sqrt(x); }

// An unevaluated sum of two doubles, twice as precise.
struct Twofold {
  double high, low;
};
FA_HD Twofold product(Twofold x, Twofold y) {
  const double high = x.high * y.high;
  const double low = fma(x.high, y.high, -high) + (x.high * y.low + x.low * y.high);
  const double sum = high + low;
  return {sum, low - (sum - high)};
}

// beta^t for a count t, to the nearest double: by squaring, since libraries' pow differ in the last bit, on GPUs too.
FA_HD double power(double beta, double t) {
  Twofold result = {1, 0}, square = {beta, 0};
  for (uint64_t n = static_cast<uint64_t>(t); n; n >>= 1) {
    if (n & 1) result = product(result, square);
    square = product(square, square);
  }
  return result.high;
}

// The scalars of update number t. scale: s; coefficient: c.
FA_HD StepScalars<double> step_scalars(const Hyper& h, double t, double scale, double coefficient) {
  return {scale, h.maximize ? -coefficient : coefficient, 1 - h.lr * h.weight_decay, 1 - h.beta1, -h.beta1, h.beta2,
          1 - h.beta2, -h.lr / (1 - power(h.beta1, t)), 1 / square_root(1 - power(h.beta2, t)), h.eps};
}

// Rounded once to the dtype of the arithmetic.
template <class T>
FA_HD StepScalars<T> rounded(const StepScalars<double>& s) {
  return {T(s.scale), T(s.coefficient), T(s.decay), T(s.one_minus_beta1), T(s.minus_beta1), T(s.beta2),
          T(s.one_minus_beta2), T(s.minus_step_size), T(s.inverse_sqrt_bias_correction2), T(s.eps)};
}

// (1) The first contribution of a window, and a later one.
template <class T>
FA_HD T first_contribution(T scale, T g) { return scale * g; }
template <class T>
FA_HD T add_contribution(T a, T scale, T g) { return fma(scale, g, a); }

// (2) The window's gradient from its sum.
template <class T>
FA_HD T window_gradient(T sum, const StepScalars<T>& s) { return s.coefficient * sum; }

// m + w*(g - m), from the end that is nearer: exact at w = 0 and at w = 1.
template <class T>
FA_HD T interpolate(T m, T g, T w, T w_minus_1) {
  const bool near_m = w < T(0.5);
  return fma(near_m ? w : w_minus_1, g - m, near_m ? m : g);
}

// (3) to (5): Loshchilov & Hutter, arXiv 1711.05101, as torch.optim.AdamW has it.
template <bool kAmsgrad, class T>
FA_HD void adamw_update(T& p, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq, T g, const StepScalars<T>& s) {
  exp_avg = interpolate(exp_avg, g, s.one_minus_beta1, s.minus_beta1);
  exp_avg_sq = fma(s.one_minus_beta2 * g, g, s.beta2 * exp_avg_sq);
  T largest = exp_avg_sq;
  if (kAmsgrad) {  // NaN wins, as in torch.maximum
    const bool keep = max_exp_avg_sq >= exp_avg_sq || max_exp_avg_sq != max_exp_avg_sq;
    largest = keep ? max_exp_avg_sq : exp_avg_sq;
    max_exp_avg_sq = largest;
  }
  const T denominator = fma(square_root(largest), s.inverse_sqrt_bias_correction2, s.eps);
  p = fma(s.minus_step_size, exp_avg / denominator, p * s.decay);
}

}  // namespace
}  // namespace fa
