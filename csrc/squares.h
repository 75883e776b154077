// In which order squares are added up: every backend's sums have the same bits.
#pragma once

#include <cstdint>

namespace fa {

// A row's sum of squares is that of its blocks' sums: block k goes into lane k % kSquaresLanes, in order, then halves of
// the lanes are added to each other.
constexpr int64_t kSquaresBlock = 1024;  // elements
constexpr int kSquaresLanes = 256;

}  // namespace fa
