// What cuda_launch.cpp fills in and the kernels in cuda_*.cu run: tables of rows that go to a kernel by value.
//
// By value, because then there is nothing to upload, to keep alive or to order between streams, and a CUDA graph keeps
// its own copy. 32764 bytes of parameters (CUDA 12.1, compute capability 7.0) hold 450 rows: one launch for the few
// hundred tensors of a model, found in the constant cache by bisection. All of a kernel's parameters are copied at every
// launch, so that calls of few rows (step in backward: one) use small tables where that takes few kernels more: for
// counts, and for accumulations of common dtypes.
//
// What the kernels include has little of the standard library: nvcc reads it five times.
#pragma once

#include <cstring>

#include "cuda_port.h"
#include "scatter.h"
#include "squares.h"
#include "weights.h"

namespace fa {

constexpr int kThreads = 256;            // of a block
constexpr int64_t kChunkElements = 4096;  // of a block: 16 a thread
constexpr int kParameterBytes = 32764;

enum Tensor { kParam, kExpAvg, kExpAvgSq, kGrad, kAccum, kMaxExpAvgSq, kMaster, kTensors };

// Scalars of one row of an update, in the dtype of its arithmetic. Made by count_updates, read by the kernels of the
// same step; the memory is the caller's.
struct alignas(16) ScalarSlot {
  unsigned char scalars[sizeof(StepScalars<double>)];
  uint32_t skip;  // not 0: no update, the window is dropped
  uint32_t parameter, step;  // as in Randomness
  uint32_t ignores_grad;     // not 0: the last micro-batch counts nothing
};

// A scale that only the device knows. 0 adds nothing, not even NaN.
struct DeviceScale {
  double wide;
  float narrow;
};

// What a table says of all its rows.
struct RowTableHead {
  const ScalarSlot* slots = nullptr;  // of an update
  double scale = 1;                   // of an accumulation
  float scale_f32 = 1;
  int count = 0;
  const DeviceScale* device_scale = nullptr;  // instead
  DType dtypes[kTensors] = {};        // of all rows
  DType accum_dtype = DType::f32;     // as Row::accum_dtype
  Weights weights = Weights::plain;   // of all rows, as these
  bool has_grad = false, has_accum = false, amsgrad = false;
  uint64_t seed = 0;                  // of stochastic rounding
  double* squares = nullptr;          // of an accumulation: for every kSquaresBlock elements of a block its sum
};

template <int kCapacity_>
struct RowTable : RowTableHead {
  static constexpr int kCapacity = kCapacity_;

  unsigned first_block[kCapacity];    // of each row
  int slot[kCapacity];                // its number in slots
  int64_t numel[kCapacity];
  char* data[kCapacity][kTensors];

  RowTable() = default;
  template <int kOther>
  explicit RowTable(const RowTable<kOther>& other) : RowTableHead(other) {  // of at most kCapacity rows
    std::memcpy(first_block, other.first_block, size_t(count) * sizeof *first_block);
    std::memcpy(slot, other.slot, size_t(count) * sizeof *slot);
    std::memcpy(numel, other.numel, size_t(count) * sizeof *numel);
    std::memcpy(data, other.data, size_t(count) * sizeof *data);
  }
};
using LargeTable = RowTable<454>;
using SmallTable = RowTable<56>;
static_assert(sizeof(LargeTable) <= kParameterBytes && sizeof(RowTable<LargeTable::kCapacity + 1>) > kParameterBytes);
static_assert(sizeof(SmallTable) <= 4096 && sizeof(RowTable<SmallTable::kCapacity + 1>) > 4096);

// One row whose tensors do not lie in one order, or of dtypes no other kernel knows.
struct StridedRow {
  static constexpr int kDims = 64;  // torch's limit

  const ScalarSlot* slots = nullptr;
  double scale = 1;
  float scale_f32 = 1;
  const DeviceScale* device_scale = nullptr;
  int slot = 0;
  int ndim = 0;
  DType dtypes[kTensors] = {};
  DType accum_dtype = DType::f32;
  Weights weights = Weights::plain;
  bool has_grad = false, has_accum = false, amsgrad = false;
  uint64_t seed = 0;
  double* squares = nullptr;          // as in RowTable, of the whole row
  int64_t numel = 0;
  int64_t sizes[kDims];
  char* data[kTensors] = {};
  int64_t strides[kTensors][kDims];
};
static_assert(sizeof(StridedRow) <= kParameterBytes);

// Counts of updates, and what their scalars are made of.
struct CountTableHead {
  static constexpr int kGroups = 32;

  ScalarSlot* slots = nullptr;       // of the first row; the others' follow
  double scale = 1, coefficient = 1;
  const float* found_inf = nullptr;   // not 0: no update; null: 0
  const double* clip = nullptr;       // multiplies the coefficient; null: 1
  const double* counts = nullptr;     // of contributions that each buffer holds; null: one at least. As slots, by row
  const DeviceScale* device_scale = nullptr;  // instead of scale
  int count = 0;
  Hyper groups[kGroups];
};

template <int kCapacity_>
struct CountTable : CountTableHead {
  static constexpr int kCapacity = kCapacity_;

  void* step[kCapacity];             // on the device: counted there; on the host: the bits of the new count, a double
  uint32_t parameter[kCapacity];     // as in Randomness
  uint8_t group[kCapacity];
  uint8_t kind[kCapacity];           // of enum CountKind

  CountTable() = default;
  template <int kOther>
  explicit CountTable(const CountTable<kOther>& other) : CountTableHead(other) {  // of at most kCapacity rows
    std::memcpy(step, other.step, size_t(count) * sizeof *step);
    std::memcpy(parameter, other.parameter, size_t(count) * sizeof *parameter);
    std::memcpy(group, other.group, size_t(count) * sizeof *group);
    std::memcpy(kind, other.kind, size_t(count) * sizeof *kind);
  }
};
using LargeCounts = CountTable<1800>;
using SmallCounts = CountTable<140>;
static_assert(sizeof(LargeCounts) <= kParameterBytes && sizeof(SmallCounts) <= 4096);
enum CountKind : uint8_t { kStepIsDouble = 1, kStepOnHost = 2, kSlotIsDouble = 4, kHasGrad = 8, kHasAccum = 16 };

// Rows' sums of squares, each to be added up from those of its blocks.
struct SquaresTable {
  static constexpr int kCapacity = 1600;

  int count = 0;
  const double* blocks[kCapacity];
  unsigned block_count[kCapacity];
  double* row[kCapacity];
};
static_assert(sizeof(SquaresTable) <= kParameterBytes);

// Which kernel a row needs; rows of equal keys go in one launch.
struct KernelKey {
  DType dtypes[kTensors] = {};
  DType accum_dtype = DType::f32;
  bool steps = false, has_grad = false, has_accum = false, amsgrad = false;
  bool squares = false;  // of an accumulation: sums of squares are wanted
  Weights weights = Weights::plain;

  bool operator==(const KernelKey& o) const {
    for (int i = 0; i < kTensors; ++i) {
      if (dtypes[i] != o.dtypes[i]) return false;
    }
    return accum_dtype == o.accum_dtype && steps == o.steps && has_grad == o.has_grad && has_accum == o.has_accum &&
           amsgrad == o.amsgrad && squares == o.squares && weights == o.weights;
  }
};

// Whether there are kernels for tables of such rows; StridedRow takes every row.
bool can_accumulate(const KernelKey& key);
bool can_step(const KernelKey& key);

// Launches on the current device. `blocks`: of all rows together.
void launch_accumulate(const KernelKey& key, const LargeTable& table, unsigned blocks, cudaStream_t stream);
void launch_step(const KernelKey& key, const LargeTable& table, unsigned blocks, cudaStream_t stream);
void launch_strided(bool steps, const StridedRow& row, cudaStream_t stream);
void launch_counts(const LargeCounts& table, cudaStream_t stream);
void launch_strided_squares(const StridedRow& row, cudaStream_t stream);  // of scale*grad, as accum_dtype rounds it
void launch_squares(const SquaresTable& table, cudaStream_t stream);
void launch_scatter(const ScatterJob& job, cudaStream_t stream);  // rows ascend and have an order; some may be outside

// Why the kernels cannot run on the current device, as a CUDA error; cudaSuccess if they can.
cudaError_t try_kernels();

}  // namespace fa
