// Ways to a row's memory, for cpu_kernels.cpp alone: in place, gathered and converted in blocks, or past the cache.
// All with internal linkage: it is compiled once per instruction set.
#pragma once

#include "kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fa {
namespace {

constexpr int64_t kBlock = 1024;  // elements

template <class T> constexpr DType dtype_of();
template <> constexpr DType dtype_of<float>() { return DType::f32; }
template <> constexpr DType dtype_of<bf16>() { return DType::bf16; }
template <> constexpr DType dtype_of<f16>() { return DType::f16; }
template <> constexpr DType dtype_of<double>() { return DType::f64; }
template <> constexpr DType dtype_of<i16>() { return DType::i16; }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls visit(first place, step between places, how many) for each run along the last dimension of elements
// [begin, begin + n) in logical order.
template <class Visit>
void for_each_run(const Row& row, const Operand& t, int64_t begin, int64_t n, Visit visit) {
  const int last = row.ndim - 1;
  int64_t done = 0;
  while (done < n) {
    int64_t rest = begin + done, place = 0;
    int64_t column = 0;
    for (int d = last; d >= 0; --d) {
      const int64_t coordinate = rest % row.sizes[d];
      rest /= row.sizes[d];
      place += coordinate * t.strides[d];
      if (d == last) column = coordinate;
    }
    const int64_t length = last < 0 ? 1 : smaller(row.sizes[last] - column, n - done);
    visit(place, last < 0 ? 0 : t.strides[last], length);
    done += length;
  }
}

template <class S>
void gather(const Row& row, const Operand& t, int64_t begin, int64_t n, S* to) {
  for_each_run(row, t, begin, n, [&](int64_t place, int64_t step, int64_t length) {
    const char* from = static_cast<const char*>(t.data) + place * int64_t(sizeof(S));
    for (int64_t i = 0; i < length; ++i, from += step * int64_t(sizeof(S))) memcpy(to++, from, sizeof(S));
  });
}

template <class S>
void scatter(const Row& row, const Operand& t, int64_t begin, int64_t n, const S* from) {
  for_each_run(row, t, begin, n, [&](int64_t place, int64_t step, int64_t length) {
    char* to = static_cast<char*>(t.data) + place * int64_t(sizeof(S));
    for (int64_t i = 0; i < length; ++i, to += step * int64_t(sizeof(S))) memcpy(to, from++, sizeof(S));
  });
}

// Calls f with a value of the storage type of `dtype`.
template <class F>
void with_storage(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(float());
    case DType::bf16: return f(bf16());
    case DType::f16: return f(f16());
    case DType::f64: return f(double());
    case DType::i16: return;  // not numbers: load_halves
  }
}

// Whether t can be used in place as an array of T.
template <class T>
bool in_place(const Operand& t) {
  return t.dtype == dtype_of<T>() && !t.strides && reinterpret_cast<uintptr_t>(t.data) % sizeof(T) == 0;
}

template <class T>
T* at(const Operand& t, int64_t place) {
  return static_cast<T*>(t.data) + place;
}

// Elements [begin, begin + n) of t as T: its own memory, or `buffer` filled with them.
template <class T>
T* load(const Row& row, const Operand& t, int64_t begin, int64_t n, T* buffer) {
  if (in_place<T>(t)) return at<T>(t, begin);
  with_storage(t.dtype, [&](auto zero) {
    using S = decltype(zero);
    S raw[kBlock];
    const S* from = raw;
    if (t.strides) {
      gather(row, t, begin, n, raw);
    } else {
      const char* place = static_cast<const char*>(t.data) + begin * int64_t(sizeof(S));
      if (reinterpret_cast<uintptr_t>(place) % alignof(S) == 0) {
        from = reinterpret_cast<const S*>(place);
      } else {
        memcpy(raw, place, size_t(n) * sizeof(S));
      }
    }
    for (int64_t i = 0; i < n; ++i) buffer[i] = load_as<T>(from[i]);
  });
  return buffer;
}

// Copies past the cache: a plain store would first read the line it overwrites.
void stream_copy(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
  using Vector = __m512i;
  auto put = [](char* t, const char* f) {
    _mm512_stream_si512(reinterpret_cast<Vector*>(t), _mm512_loadu_si512(f));
  };
#elif defined(__AVX2__)
  using Vector = __m256i;
  auto put = [](char* t, const char* f) {
    _mm256_stream_si256(reinterpret_cast<Vector*>(t), _mm256_loadu_si256(reinterpret_cast<const Vector*>(f)));
  };
#elif defined(__SSE2__)
  using Vector = __m128i;
  auto put = [](char* t, const char* f) {
    _mm_stream_si128(reinterpret_cast<Vector*>(t), _mm_loadu_si128(reinterpret_cast<const Vector*>(f)));
  };
#endif
#if defined(__SSE2__)
  constexpr int64_t kVector = sizeof(Vector);
  const int64_t head = smaller(bytes, int64_t(-reinterpret_cast<uintptr_t>(to) % uintptr_t(kVector)));
  memcpy(to, from, size_t(head));
  int64_t i = head;
  for (; i + kVector <= bytes; i += kVector) put(to + i, from + i);
  memcpy(to + i, from + i, size_t(bytes - i));
#else
  memcpy(to, from, size_t(bytes));
#endif
}

// Puts values back to elements [begin, begin + n) of t; nothing to do where they are t's own memory.
template <class T>
void store(const Row& row, const Operand& t, int64_t begin, int64_t n, const T* values) {
  with_storage(t.dtype, [&](auto zero) {
    using S = decltype(zero);
    char* place = static_cast<char*>(t.data) + begin * int64_t(sizeof(S));
    if (!t.strides && place == reinterpret_cast<const char*>(values)) return;
    S raw[kBlock];
    if (!t.strides && reinterpret_cast<uintptr_t>(place) % alignof(S) == 0) {
      S* to = reinterpret_cast<S*>(place);
      for (int64_t i = 0; i < n; ++i) to[i] = Encode<S, T>::of(values[i]);
      return;
    }
    for (int64_t i = 0; i < n; ++i) raw[i] = Encode<S, T>::of(values[i]);
    if (t.strides) {
      scatter(row, t, begin, n, raw);
    } else {
      memcpy(place, raw, size_t(n) * sizeof(S));
    }
  });
}

template <class T>
void zero(const Row& row, const Operand& t, int64_t begin, int64_t n) {
  if (!t.strides) {
    memset(static_cast<char*>(t.data) + begin * int64_t(size_of(t.dtype)), 0, size_t(n) * size_of(t.dtype));
    return;
  }
  const T zeros[kBlock] = {};
  store(row, t, begin, n, zeros);
}

// Halves of masters, at elements [begin, begin + n) of t.
inline void load_halves(const Row& row, const Operand& t, int64_t begin, int64_t n, i16* to) {
  if (t.strides) return gather(row, t, begin, n, to);
  memcpy(to, static_cast<const char*>(t.data) + begin * int64_t(sizeof(i16)), size_t(n) * sizeof(i16));
}

inline void store_halves(const Row& row, const Operand& t, int64_t begin, int64_t n, const i16* from) {
  if (t.strides) return scatter(row, t, begin, n, from);
  memcpy(static_cast<char*>(t.data) + begin * int64_t(sizeof(i16)), from, size_t(n) * sizeof(i16));
}

// Random words of elements [begin, begin + n), n at most kBlock. `room`: kBlock + 8 words.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))  // half again as fast; integers alone, so that no flag of floating point is lost
#endif
inline const uint32_t* random_of(const Randomness& source, int64_t begin, int64_t n, uint32_t* room) {
  const uint64_t first = uint64_t(begin) / 4;
  const int64_t blocks = int64_t((uint64_t(begin + n) + 3) / 4 - first);
  for (int64_t b = 0; b < blocks; ++b) {
    const Words words = random_words(source, first + uint64_t(b));
    for (int i = 0; i < 4; ++i) room[4 * b + i] = words.at[i];
  }
  return room + begin % 4;
}

// Rounds values to what `dtype` can hold.
template <class T>
void round_to(DType dtype, T* values, int64_t n) {
  if (dtype == dtype_of<T>()) return;
  with_storage(dtype, [&](auto zero) {
    using S = decltype(zero);
    for (int64_t i = 0; i < n; ++i) values[i] = load_as<T>(Encode<S, T>::of(values[i]));
  });
}

}  // namespace
}  // namespace fa
