// Storage dtypes and their conversions to and from the dtype of the arithmetic; all round to nearest even.
#pragma once

#include <cstddef>

#include "adamw_math.h"

namespace fa {

// The order is that of PARAMETER_DTYPES in fused_accum/state.py. i16: halves of masters (weights.h), never numbers.
enum class DType : uint8_t { f32, bf16, f16, f64, i16 };

namespace {

FA_HD size_t size_of(DType d) { return d == DType::f64 ? 8 : d == DType::f32 ? 4 : 2; }

FA_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

FA_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct i16 {
  uint16_t bits;
};

FA_HD float decode(bf16 h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }

FA_HD bf16 encode_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16{static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

FA_HD float decode(f16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + ((127u - 15u) << 23);
  const uint32_t special = magnitude + ((255u - 31u) << 23);  // infinity and NaN
  // A subnormal is an integer times 2^-24: put it behind the leading one of 2^-14 and take that away.
  const uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  return float_of(sign | (exponent == 0x0f800000u ? special : exponent == 0 ? subnormal : normal));
}

FA_HD f16 encode_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves the result's bits, rounded by the addition itself, at the end of the sum.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return f16{static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite))};
}

// decode/encode for any storage type S and arithmetic type T.
template <class T> FA_HD T load_as(float x) { return static_cast<T>(x); }
template <class T> FA_HD T load_as(double x) { return static_cast<T>(x); }
template <class T> FA_HD T load_as(bf16 x) { return static_cast<T>(decode(x)); }
template <class T> FA_HD T load_as(f16 x) { return static_cast<T>(decode(x)); }

template <class S, class T>
struct Encode;
template <class T> struct Encode<float, T> { static FA_HD float of(T x) { return static_cast<float>(x); } };
template <class T> struct Encode<double, T> { static FA_HD double of(T x) { return static_cast<double>(x); } };
template <class T> struct Encode<bf16, T> { static FA_HD bf16 of(T x) { return encode_bf16(static_cast<float>(x)); } };
template <class T> struct Encode<f16, T> { static FA_HD f16 of(T x) { return encode_f16(static_cast<float>(x)); } };

}  // namespace
}  // namespace fa
