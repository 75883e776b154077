// Sums of squares, for cpu_kernels.cpp alone: internal linkage, as it is compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fa {
namespace {

// As many consecutive elements, as doubles, as one register holds. Written out per instruction set: gcc turns
// __builtin_convertvector of floats into halves that wait for one another.
#if defined(__AVX512F__)
using Doubles = __m512d;
inline Doubles doubles(const float* x) {
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(x));  // all lanes: gcc 12 warns of the plain one's own insides
}
inline Doubles doubles(const double* x) { return _mm512_loadu_pd(x); }
#elif defined(__AVX2__)
using Doubles = __m256d;
inline Doubles doubles(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline Doubles doubles(const double* x) { return _mm256_loadu_pd(x); }
#elif defined(__SSE2__)
using Doubles = __m128d;
inline Doubles doubles(const float* x) {
  return _mm_cvtps_pd(_mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(x))));
}
inline Doubles doubles(const double* x) { return _mm_loadu_pd(x); }
#else
using Doubles = double;
inline Doubles doubles(const float* x) { return *x; }
inline Doubles doubles(const double* x) { return *x; }
#endif

// A sum of squares in double, in 16 lanes and a fixed tree above them, so that every instruction set gives the same
// bits (the square of a float is exact, and products are never contracted). Added to in multiples of 16 but for the
// last time.
template <class T>
class Squares {
 public:
  void add(const T* x, int64_t n) {
    Doubles sums[kRegisters];  // in registers: for all the compiler knows, x might be lanes_
#pragma GCC unroll 16
    for (int r = 0; r < kRegisters; ++r) memcpy(&sums[r], lanes_ + r * kWidth, sizeof sums[r]);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma GCC unroll 16
      for (int r = 0; r < kRegisters; ++r) {
        const Doubles value = doubles(x + i + r * kWidth);
        sums[r] += value * value;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRegisters; ++r) memcpy(lanes_ + r * kWidth, &sums[r], sizeof sums[r]);
    for (int64_t lane = 0; i + lane < n; ++lane) lanes_[lane] += double(x[i + lane]) * double(x[i + lane]);
  }

  double total() const {
    double sums[kLanes];
    memcpy(sums, lanes_, sizeof sums);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half; half /= 2) {
#pragma GCC unroll 8
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return sums[0];
  }

 private:
  static constexpr int kLanes = 16, kWidth = int(sizeof(Doubles) / sizeof(double)), kRegisters = kLanes / kWidth;

  double lanes_[kLanes] = {};
};

template <class T>
double sum_of_squares(const T* x, int64_t n) {
  Squares<T> sum;
  sum.add(x, n);
  return sum.total();
}

}  // namespace
}  // namespace fa
