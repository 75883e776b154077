// What the kernels should compute, one element at a time, written apart from csrc/: conversions by arithmetic instead
// of bits, fma from the C++ library, every operand addressed through its strides.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace reference {

using fa::DType;
using fa::Operand;
using fa::Row;

// How a 16-bit float is made up: bits of fraction, exponent bias.
struct Format {
  int fraction_bits, bias;
};
inline Format format_of(DType dtype) { return dtype == DType::bf16 ? Format{7, 127} : Format{10, 15}; }

inline double load_half(Format f, uint16_t half) {
  const int fraction = half & ((1 << f.fraction_bits) - 1), exponent = (half & 0x7fff) >> f.fraction_bits;
  const double sign = half & 0x8000 ? -1 : 1;
  if (exponent == 2 * f.bias + 1) return fraction ? NAN : sign * INFINITY;
  const double significand = fraction + (exponent ? 1 << f.fraction_bits : 0);
  return sign * std::ldexp(significand, (exponent ? exponent : 1) - f.bias - f.fraction_bits);
}

// x rounded to nearest even.
inline uint16_t store_half(Format f, double x) {
  const int sign = std::signbit(x) ? 0x8000 : 0, infinity = (2 * f.bias + 1) << f.fraction_bits;
  if (std::isnan(x)) return uint16_t(infinity | 1 << (f.fraction_bits - 1));
  int exponent;
  std::frexp(x, &exponent);
  exponent = x == 0 || exponent - 1 < 1 - f.bias ? 1 : exponent - 1 + f.bias;  // 1: of subnormals too
  if (exponent > 2 * f.bias) return uint16_t(sign | infinity);
  const double units = std::nearbyint(std::ldexp(std::fabs(x), f.bias + f.fraction_bits - exponent));
  // Exponent and fraction are one number: a fraction that was rounded up to the next power of two carries.
  const int bits = ((exponent - 1) << f.fraction_bits) + int(units);
  return uint16_t(sign | (bits > infinity ? infinity : bits));
}

inline double load(DType dtype, const void* from) {
  if (dtype == DType::f64) {
    double x;
    return std::memcpy(&x, from, sizeof x), x;
  }
  if (dtype == DType::f32) {
    float x;
    return std::memcpy(&x, from, sizeof x), x;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return load_half(format_of(dtype), half);
}

inline void store(DType dtype, void* to, double x) {
  const float narrow = static_cast<float>(x);
  if (dtype == DType::f64) {
    std::memcpy(to, &x, sizeof x);
  } else if (dtype == DType::f32) {
    std::memcpy(to, &narrow, sizeof narrow);
  } else {
    const uint16_t half = store_half(format_of(dtype), narrow);
    std::memcpy(to, &half, sizeof half);
  }
}

inline double rounded_to(DType dtype, double x) {
  char bytes[8];
  store(dtype, bytes, x);
  return load(dtype, bytes);
}

// Place of element i, counted in logical order, in elements from the operand's first.
inline int64_t place(const Row& row, const Operand& t, int64_t i) {
  if (!t.strides) return i;
  int64_t at = 0;
  for (int d = row.ndim - 1; d >= 0; --d) {
    at += i % row.sizes[d] * t.strides[d];
    i /= row.sizes[d];
  }
  return at;
}

template <class T>
T value(const Row& row, const Operand& t, int64_t i) {
  const char* data = static_cast<const char*>(t.data);
  return static_cast<T>(load(t.dtype, data + place(row, t, i) * int64_t(fa::size_of(t.dtype))));
}

// The sum of a window's contributions with the row's gradient, if it has one.
template <class T>
T sum(const Row& row, int64_t i, T scale, DType dtype) {
  if (!row.has_grad) return value<T>(row, row.accum, i);
  const T g = value<T>(row, row.grad, i);
  const T total = row.has_accum ? std::fma(scale, g, value<T>(row, row.accum, i)) : scale * g;
  return static_cast<T>(rounded_to(dtype, total));
}

struct Updated {
  double param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

template <class T>
Updated updated(const Row& row, int64_t i) {
  const auto& s = *row.scalars;
  const T g = T(s.coefficient) * sum<T>(row, i, T(s.scale), row.accum_dtype);
  T p = value<T>(row, row.param, i), m = value<T>(row, row.exp_avg, i), v = value<T>(row, row.exp_avg_sq, i);
  m = T(s.one_minus_beta1) < T(0.5) ? std::fma(T(s.one_minus_beta1), g - m, m) : std::fma(T(s.minus_beta1), g - m, g);
  v = std::fma(T(s.one_minus_beta2) * g, g, T(s.beta2) * v);
  T top = v;
  if (row.amsgrad) {
    const T old = value<T>(row, row.max_exp_avg_sq, i);
    top = old >= v || std::isnan(old) ? old : v;
  }
  const T denominator = std::fma(std::sqrt(top), T(s.inverse_sqrt_bias_correction2), T(s.eps));
  p = std::fma(T(s.minus_step_size), m / denominator, p * T(s.decay));
  return {p, m, v, top};
}

}  // namespace reference
