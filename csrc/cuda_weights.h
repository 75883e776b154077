// How kernels read and write the weights of 16-bit parameters that keep more than their dtype holds (weights.h). Which
// way is a question of the launch, asked once per piece: masters, halves and chance share their kernels.
#pragma once

#include "cuda_access.h"

namespace fa {
namespace {

// The word of one element; picked without an index, which would put the words into memory.
__device__ __forceinline__ uint32_t random_word(const Randomness& source, uint64_t element) {
  const Words words = random_words(source, element / 4);
  const uint32_t low = element & 1 ? words.at[1] : words.at[0], high = element & 1 ? words.at[3] : words.at[2];
  return element & 2 ? high : low;
}

// The words of kCount elements from `first` on, a multiple of kCount.
template <int kCount>
__device__ __forceinline__ void random_words_of(const Randomness& source, uint64_t first, uint32_t (&words)[kCount]) {
  if constexpr (kCount == 1) {
    words[0] = random_word(source, first);
  } else {
    static_assert(kCount % 4 == 0, "whole blocks of the generator");
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const Words four = random_words(source, (first + j) / 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[j + k] = four.at[k];
    }
  }
}

// kCount parameters as stored and what is beside each: a master, its half (in the first half of `extra`), or nothing.
template <int kCount>
struct KeptPiece {
  Pack<bf16, kCount> param;  // patterns: of float16 too
  typename AsLaunched::template Raw<kCount> extra;
};

// The ways of one launch.
struct Keeping {
  Weights weights;
  DType param, extra;

  template <int kCount>
  __device__ __forceinline__ KeptPiece<kCount> load(const char* params, const char* extras) const {
    KeptPiece<kCount> piece{};
    piece.param = load_pack<bf16, kCount>(params);
    if (weights != Weights::stochastic) piece.extra = AsLaunched::load<kCount>(extras, extra);
    return piece;
  }

  template <int kCount>
  __device__ __forceinline__ void decode(const KeptPiece<kCount>& piece, float (&w)[kCount]) const {
    if (weights == Weights::split) {
      const auto low = AsLaunched::halves(piece.extra);
#pragma unroll
      for (int j = 0; j < kCount; ++j) w[j] = joined(piece.param.at[j], i16{low.at[j].bits});
    } else if (param == DType::bf16) {
      decode_as<bf16>(piece, w);
    } else {
      decode_as<f16>(piece, w);
    }
  }

  // `first`: number of the first element in its tensor.
  template <int kCount>
  __device__ __forceinline__ void store(char* params, char* extras, const float (&w)[kCount], const Randomness& source,
                                        int64_t first) const {
    Pack<bf16, kCount> stored;
    if (weights == Weights::split) {
      Pack<bf16, kCount> low;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        stored.at[j] = high_half(w[j]);
        low.at[j].bits = low_half(w[j]).bits;
      }
      store_pack(extras, low);
    } else if (weights == Weights::master) {
      Pack<float, kCount> masters;
#pragma unroll
      for (int j = 0; j < kCount; ++j) masters.at[j] = w[j];
      store_pack(extras, masters);
      param == DType::bf16 ? encode_as<bf16>(w, stored) : encode_as<f16>(w, stored);
    } else {
      uint32_t words[kCount];
      random_words_of<kCount>(source, uint64_t(first), words);
      param == DType::bf16 ? encode_by_chance<bf16>(w, words, stored) : encode_by_chance<f16>(w, words, stored);
    }
    store_pack(params, stored);
  }

 private:
  template <class P, int kCount>
  __device__ __forceinline__ void decode_as(const KeptPiece<kCount>& piece, float (&w)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const P stored{piece.param.at[j].bits};
      w[j] = weights == Weights::master ? weight_of(stored, piece.extra.bits.at[j]) : load_as<float>(stored);
    }
  }

  template <class P, int kCount>
  static __device__ __forceinline__ void encode_as(const float (&w)[kCount], Pack<bf16, kCount>& stored) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) stored.at[j].bits = Encode<P, float>::of(w[j]).bits;
  }

  template <class P, int kCount>
  static __device__ __forceinline__ void encode_by_chance(const float (&w)[kCount], const uint32_t (&words)[kCount],
                                                          Pack<bf16, kCount>& stored) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) stored.at[j].bits = EncodeByChance<P>::of(w[j], words[j]).bits;
  }
};

}  // namespace
}  // namespace fa
