// How a 16-bit parameter keeps what its dtype cannot hold: an fp32 master, the master's missing half, or rounding up or
// down by chance. One element, one function, for host and device.
#pragma once

#include "dtypes.h"

namespace fa {

// The order is that of the states in fused_accum/state.py.
enum class Weights : uint8_t { plain, master, split, stochastic };

// Where a parameter's random words come from: nothing but what names an element, and the update.
struct Randomness {
  uint64_t seed = 0;
  uint32_t parameter = 0;  // its place among all of the optimizer
  uint32_t step = 0;       // number of the update
};

namespace {

FA_HD bool has_master(Weights weights) { return weights == Weights::master || weights == Weights::split; }

// -- fp32 master beside the parameter ------------------------------------------------------------------------------

// The weight to update: the master while the parameter is what the master rounds to; a parameter that was changed from
// outside (a loaded model) takes its place. NaN equals nothing and is taken from the parameter.
template <class P>
FA_HD float weight_of(P stored, float master) {
  const float weight = load_as<float>(stored);
  return load_as<float>(Encode<P, float>::of(master)) == weight ? master : weight;
}

// -- split: bf16 and the other half of the fp32 pattern ---------------------------------------------------------------

// The pattern is high * 2^16 + low with low in [-2^15, 2^15), so that high is the master rounded to nearest, ties away
// from zero: to nearest even would give two masters one code at a tie. NaN is made 0x7fc00000 first.
// Two functions: with a struct of both halves gcc does not vectorize.
FA_HD uint32_t pattern_to_split(float master) {
  const uint32_t u = bits_of(master);
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u;
}
FA_HD bf16 high_half(float master) { return bf16{static_cast<uint16_t>((pattern_to_split(master) + 0x8000u) >> 16)}; }
FA_HD i16 low_half(float master) { return i16{static_cast<uint16_t>(pattern_to_split(master))}; }

// A parameter that was changed from outside meets the half of the weight before it: where the two are no code (0 or an
// infinity and a half that belongs elsewhere would give NaN), the parameter alone counts; elsewhere the weight read
// still rounds to the parameter.
FA_HD float joined(bf16 high, i16 low) {
  const uint32_t top = static_cast<uint32_t>(high.bits) << 16;
  const uint32_t u = top + ((static_cast<uint32_t>(low.bits) ^ 0x8000u) - 0x8000u);
  return float_of((u & 0x7fffffffu) > 0x7f800000u ? top : u);
}

// -- stochastic rounding -----------------------------------------------------------------------------------------------

struct Words {
  uint32_t at[4];
};

// Philox4x32-10: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
FA_HD Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The words of elements 4*block to 4*block + 3, in row-major order whatever the layout in memory.
FA_HD Words random_words(const Randomness& r, uint64_t block) {
  return philox(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), r.parameter, r.step,
                static_cast<uint32_t>(r.seed), static_cast<uint32_t>(r.seed >> 32));
}

template <class P> struct EncodeByChance;

// The discarded part is the chance to round away from zero: adding a uniform number below one unit, then cutting.
template <> struct EncodeByChance<bf16> {
  static FA_HD bf16 of(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    const uint32_t cut = (u + (random >> 16)) >> 16;
    const uint32_t magnitude = u & 0x7fffffffu;
    return bf16{static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fc0u : cut)};
  }
};

template <> struct EncodeByChance<f16> {
  static FA_HD f16 of(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + (random >> 19)) >> 13;
    // Below 2^-14 the units are 2^-24, and there are at most 1024: counted in parts of 2^-31, integers, since a GPU's
    // double precision may be slow. What lies below float's own subnormals is none.
    const uint32_t exponent = magnitude >> 23, away = exponent < 112u ? 112u - exponent : 0u;
    const uint64_t parts = (uint64_t((magnitude & 0x7fffffu) | 0x800000u) << 17) >> (away < 63u ? away : 63u);
    const uint32_t subnormal = static_cast<uint32_t>((parts + (random >> 1)) >> 31);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal > 0x7c00u ? 0x7c00u : normal;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return f16{static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? special : finite))};
  }
};

}  // namespace
}  // namespace fa
