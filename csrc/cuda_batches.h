// How rows come to launches, for cuda_launch.cpp alone: by dtypes and flags, as many rows in one launch as a table holds.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda_kernels.h"
#include "kernels.h"

namespace fa {
namespace {

// What multiplies a micro-batch: a value, or, if not null, what is there on the device.
struct MicroScale {
  double value;
  const DeviceScale* on_device = nullptr;
};

const Operand& operand(const Row& row, int k) {
  switch (k) {
    case kParam: return row.param;
    case kExpAvg: return row.exp_avg;
    case kExpAvgSq: return row.exp_avg_sq;
    case kGrad: return row.grad;
    case kAccum: return row.accum;
    case kMaster: return row.master;
    default: return row.max_exp_avg_sq;
  }
}

KernelKey key_of(const Row& row, bool steps) {
  KernelKey key;
  key.steps = steps;
  key.has_grad = row.has_grad;
  key.has_accum = row.has_accum;
  key.amsgrad = steps && row.amsgrad;
  key.squares = !steps && row.squares;
  key.weights = row.weights;
  for (int k = 0; k < kTensors; ++k) key.dtypes[k] = operand(row, k).dtype;
  if (steps) {  // the rounding of a sum that is only read has been done
    const DType arithmetic = row.param.dtype == DType::f64 ? DType::f64 : DType::f32;
    key.accum_dtype = row.has_grad ? row.accum_dtype : arithmetic;
  }
  return key;
}

// Whether the tables' kernels can read the row: its tensors are lines of whole elements of known dtypes.
bool fits_table(const Row& row, const KernelKey& key) {
  for (int k = 0; k < kTensors; ++k) {
    if (operand(row, k).strides) return false;
  }
  return key.steps ? can_step(key) : can_accumulate(key);
}

// What cannot be read element by element faults on a GPU, and takes every later call of the process with it.
void refuse_misaligned(const void* data, DType dtype) {
  if (reinterpret_cast<uintptr_t>(data) % size_of(dtype)) {
    throw std::invalid_argument("a tensor's memory does not start at a multiple of its element size; clone it");
  }
}

void refuse_misaligned(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    for (int k = 0; k < kTensors; ++k) refuse_misaligned(operand(row, k).data, operand(row, k).dtype);
  }
}

constexpr int64_t kSquaresOfBlock = kChunkElements / kSquaresBlock;

// The sums of squares of a call's rows: kernels put those of blocks into scratch memory, the last launch adds them up.
class BlockSquares {
 public:
  explicit BlockSquares(double* room) : next_(room) {}

  // Room for the sums of a launch of `blocks` blocks.
  double* take(int64_t blocks) {
    double* const found = next_;
    next_ += blocks * kSquaresOfBlock;
    return found;
  }

  // The sum of `row` is that of the sums from `first` on.
  void add(const Row& row, const double* first, cudaStream_t stream) {
    if (!table_) table_ = std::make_unique<SquaresTable>();
    if (table_->count == SquaresTable::kCapacity) finish(stream);
    const int i = table_->count++;
    table_->blocks[i] = first;
    table_->block_count[i] = static_cast<unsigned>((row.numel + kSquaresBlock - 1) / kSquaresBlock);
    table_->row[i] = row.squares;
  }

  // After the kernels of all rows added so far.
  void finish(cudaStream_t stream) {
    if (table_ && table_->count) {
      launch_squares(*table_, stream);
      table_->count = 0;
    }
  }

 private:
  double* next_;
  std::unique_ptr<SquaresTable> table_;
};

int64_t blocks_of(const Row& row) { return (row.numel + kChunkElements - 1) / kChunkElements; }

// Rows of one kernel, until they are launched. Tables are filled in place.
class Batch {
 public:
  Batch(const KernelKey& key, const ScalarSlot* slots, MicroScale scale) : key_(key), table_(new LargeTable) {
    table_->slots = slots;
    table_->weights = key.weights;
    table_->has_grad = key.has_grad;
    table_->has_accum = key.has_accum;
    table_->amsgrad = key.amsgrad;
    table_->scale = scale.value;
    table_->scale_f32 = static_cast<float>(scale.value);
    table_->device_scale = scale.on_device;
    table_->accum_dtype = key.accum_dtype;
    std::copy(std::begin(key.dtypes), std::end(key.dtypes), table_->dtypes);
  }

  const KernelKey& key() const { return key_; }

  bool takes(const Row& row) const {
    return table_->count < LargeTable::kCapacity && blocks_ + blocks_of(row) <= kMaxBlocks;
  }

  void add(const Row& row, int slot) {
    const int i = table_->count++;
    rows_.push_back(&row);
    table_->seed = row.randomness.seed;  // the same for all rows of a call
    table_->first_block[i] = static_cast<unsigned>(blocks_);
    table_->slot[i] = slot;
    table_->numel[i] = row.numel;
    for (int k = 0; k < kTensors; ++k) table_->data[i][k] = static_cast<char*>(operand(row, k).data);
    blocks_ += blocks_of(row);
  }

  void launch(cudaStream_t stream, BlockSquares& squares) {
    if (!table_->count) return;
    if (key_.squares) table_->squares = squares.take(blocks_);
    (key_.steps ? launch_step : launch_accumulate)(key_, *table_, static_cast<unsigned>(blocks_), stream);
    if (key_.squares) {
      for (size_t i = 0; i < rows_.size(); ++i) {
        squares.add(*rows_[i], table_->squares + table_->first_block[i] * kSquaresOfBlock, stream);
      }
    }
    table_->count = 0;
    rows_.clear();
    blocks_ = 0;
  }

 private:
  static constexpr int64_t kMaxBlocks = (int64_t(1) << 31) - 1;  // of a grid

  KernelKey key_;
  std::unique_ptr<LargeTable> table_;
  std::vector<const Row*> rows_;
  int64_t blocks_ = 0;
};

StridedRow strided(const Row& row, const ScalarSlot* slots, int slot, MicroScale scale) {
  StridedRow s;
  s.slots = slots;
  s.scale = scale.value;
  s.scale_f32 = static_cast<float>(scale.value);
  s.device_scale = scale.on_device;
  s.slot = slot;
  s.accum_dtype = row.accum_dtype;
  s.weights = row.weights;
  s.seed = row.randomness.seed;
  s.has_grad = row.has_grad;
  s.has_accum = row.has_accum;
  s.amsgrad = row.amsgrad;
  s.numel = row.numel;
  bool in_line = true;
  for (int k = 0; k < kTensors; ++k) in_line = in_line && !operand(row, k).strides;
  s.ndim = in_line ? 1 : row.ndim;
  if (s.ndim > StridedRow::kDims) throw std::invalid_argument("a tensor has more than 64 dimensions");
  if (in_line) s.sizes[0] = row.numel;
  else std::copy_n(row.sizes, row.ndim, s.sizes);
  for (int k = 0; k < kTensors; ++k) {
    const Operand& t = operand(row, k);
    s.data[k] = static_cast<char*>(t.data);
    s.dtypes[k] = t.dtype;
    if (t.strides) std::copy_n(t.strides, row.ndim, s.strides[k]);
    else std::fill_n(s.strides[k], s.ndim, t.data && in_line ? 1 : 0);
  }
  return s;
}

// The sum of squares of what the row's accum holds, or, where it has none, of scale*grad.
void launch_strided_squares_of(const Row& row, StridedRow s, BlockSquares& squares, cudaStream_t stream) {
  s.accum_dtype = row.accum.dtype;
  if (row.accum.data) {
    s.scale = s.scale_f32 = 1;
    s.device_scale = nullptr;
    s.data[kGrad] = s.data[kAccum];
    s.dtypes[kGrad] = s.dtypes[kAccum];
    std::copy_n(s.strides[kAccum], s.ndim, s.strides[kGrad]);
  }
  s.squares = squares.take(blocks_of(row));
  launch_strided_squares(s, stream);
  squares.add(row, s.squares, stream);
}

// Launches rows [begin, end); row i has slot number i.
void run_rows(const std::vector<Row>& rows, size_t begin, size_t end, bool steps, const ScalarSlot* slots,
              MicroScale scale, BlockSquares& squares, cudaStream_t stream) {
  std::vector<Batch> batches;
  for (size_t i = begin; i < end; ++i) {
    const Row& row = rows[i];
    if (!row.numel) {
      if (row.squares) squares.add(row, nullptr, stream);
      continue;
    }
    const KernelKey key = key_of(row, steps);
    if (!fits_table(row, key)) {
      const StridedRow s = strided(row, slots, int(i), scale);
      if (steps || row.accum.data) launch_strided(steps, s, stream);
      if (row.squares) launch_strided_squares_of(row, s, squares, stream);
      continue;
    }
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return b.key() == key; });
    if (batch == batches.end()) batch = batches.emplace(batches.end(), key, slots, scale);
    if (!batch->takes(row)) batch->launch(stream, squares);
    batch->add(row, int(i));
  }
  for (Batch& batch : batches) batch.launch(stream, squares);
  squares.finish(stream);
}

}  // namespace
}  // namespace fa
