// The codec of "split" over all 2^32 float32 patterns, and the cuts of stochastic rounding over a part of them
// Exit status 0 when all is as it should be.
#include <cstdio>

#include "weights.h"

using namespace fa;

namespace {

// Whether any of 2^16 patterns with this upper half does not come back, or is not rounded to nearest, ties away from zero.
uint32_t wrong_in(uint32_t top) {
  uint32_t wrong = 0;
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint32_t u = top << 16 | i;
    const uint32_t wanted = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u;
    const bf16 high = high_half(float_of(u));
    const uint32_t nearest = (wanted >> 16) + (wanted >> 15 & 1u);  // magnitudes: a tie goes up
    wrong |= (bits_of(joined(high, low_half(float_of(u)))) ^ wanted) | (high.bits ^ (nearest & 0xffffu));
  }
  return wrong != 0;
}

// Any two halves: the weight read is never NaN unless the parameter is.
uint32_t strange_in(uint32_t top) {
  uint32_t strange = 0;
  const bool is_nan = (top & 0x7fffu) > 0x7f80u;
  for (uint32_t i = 0; i < 65536; ++i) {
    const float x = joined(bf16{uint16_t(top)}, i16{uint16_t(i)});
    strange += uint32_t(!is_nan && x != x);
  }
  return strange;
}

// The same bits with no randomness and with the most of it: the two neighbours, nothing else.
template <class P>
uint32_t far_in(uint32_t top, uint32_t infinity) {
  uint32_t far = 0;
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint32_t u = top << 16 | i;
    const float x = float_of(u);
    const uint32_t low = EncodeByChance<P>::of(x, 0).bits, high = EncodeByChance<P>::of(x, 0xffffffffu).bits;
    const uint32_t nearest = Encode<P, float>::of(x).bits;
    const bool fits = load_as<float>(P{uint16_t(low)}) == x;
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    const bool right = is_nan ? low == high && (low & 0x7fffu) > infinity
                              : fits ? low == high : high == low + 1 && (nearest == low || nearest == high);
    far += uint32_t(!right);
  }
  return far;
}

}  // namespace

int main() {
  uint64_t wrong = 0, strange = 0, far = 0;
  for (uint32_t top = 0; top < 65536; ++top) {
    wrong += wrong_in(top);
    const uint32_t magnitude = top & 0x7fffu;
    if (magnitude < 4 || magnitude >= 0x7f00u || top % 29 == 0) strange += strange_in(top);  // 0 and infinity, mostly
    if (top % 37 == 0) far += far_in<bf16>(top, 0x7f80u);
    // Beyond what fp16 holds, and where a chance of less than 2^-31 is lost, the two neighbours are one.
    const uint32_t exponent = top >> 7 & 0xffu;
    if (top % 31 == 0 && exponent >= 127 - 48 && exponent < 127 + 16) far += far_in<f16>(top, 0x7c00u);
  }
  std::printf("%llu upper halves wrong, %llu halves strange, %llu roundings far\n", static_cast<unsigned long long>(wrong),
              static_cast<unsigned long long>(strange), static_cast<unsigned long long>(far));
  return wrong || strange || far ? 1 : 0;
}
