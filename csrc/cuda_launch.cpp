#include "cuda_launch.h"

#include <algorithm>
#include <cstring>

#include "cuda_check.h"

#ifndef FA_CUDA_ARCHS  // what setup.py compiled the kernels for
#define FA_CUDA_ARCHS "no architecture"
#endif

namespace fa {
namespace {

// Makes a device current while in scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FA_CUDA_CHECK(cudaGetDevice(&before_));
    if (device == before_) return;
    FA_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

const Operand& operand(const Row& row, int k) {
  switch (k) {
    case kParam: return row.param;
    case kExpAvg: return row.exp_avg;
    case kExpAvgSq: return row.exp_avg_sq;
    case kGrad: return row.grad;
    case kAccum: return row.accum;
    default: return row.max_exp_avg_sq;
  }
}

KernelKey key_of(const Row& row, bool steps) {
  KernelKey key;
  key.steps = steps;
  key.has_grad = row.has_grad;
  key.has_accum = row.has_accum;
  key.amsgrad = steps && row.amsgrad;
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

// Rows of one kernel, until they are launched. Tables are filled in place.
class Batch {
 public:
  Batch(const KernelKey& key, const ScalarSlot* slots, double scale) : key_(key), table_(new LargeTable) {
    table_->slots = slots;
    table_->scale = scale;
    table_->scale_f32 = static_cast<float>(scale);
    table_->accum_dtype = key.accum_dtype;
    std::copy(std::begin(key.dtypes), std::end(key.dtypes), table_->dtypes);
  }

  const KernelKey& key() const { return key_; }

  bool takes(const Row& row) const {
    return table_->count < LargeTable::kCapacity && blocks_ + blocks_of(row) <= kMaxBlocks;
  }

  void add(const Row& row, int slot) {
    const int i = table_->count++;
    table_->first_block[i] = static_cast<unsigned>(blocks_);
    table_->slot[i] = slot;
    table_->numel[i] = row.numel;
    for (int k = 0; k < kTensors; ++k) table_->data[i][k] = static_cast<char*>(operand(row, k).data);
    blocks_ += blocks_of(row);
  }

  void launch(cudaStream_t stream) {
    if (!table_->count) return;
    (key_.steps ? launch_step : launch_accumulate)(key_, *table_, static_cast<unsigned>(blocks_), stream);
    table_->count = 0;
    blocks_ = 0;
  }

 private:
  static constexpr int64_t kMaxBlocks = (int64_t(1) << 31) - 1;  // of a grid

  static int64_t blocks_of(const Row& row) { return (row.numel + kChunkElements - 1) / kChunkElements; }

  KernelKey key_;
  std::unique_ptr<LargeTable> table_;
  int64_t blocks_ = 0;
};

StridedRow strided(const Row& row, const ScalarSlot* slots, int slot, double scale) {
  StridedRow s;
  s.slots = slots;
  s.scale = scale;
  s.slot = slot;
  s.accum_dtype = row.accum_dtype;
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

// Launches rows [begin, end); row i has slot number i.
void run_rows(const std::vector<Row>& rows, size_t begin, size_t end, bool steps, const ScalarSlot* slots, double scale,
              cudaStream_t stream) {
  std::vector<Batch> batches;
  for (size_t i = begin; i < end; ++i) {
    const Row& row = rows[i];
    if (!row.numel) continue;
    const KernelKey key = key_of(row, steps);
    if (!fits_table(row, key)) {
      launch_strided(steps, strided(row, slots, int(i), scale), stream);
      continue;
    }
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return b.key() == key; });
    if (batch == batches.end()) batch = batches.emplace(batches.end(), key, slots, scale);
    if (!batch->takes(row)) batch->launch(stream);
    batch->add(row, int(i));
  }
  for (Batch& batch : batches) batch.launch(stream);
}

#if defined(FA_CUDA_EMULATION)
using cuda_emulation::steps_on_device;
#else
constexpr bool steps_on_device = false;  // all of them, because a test says so
#endif

bool counted_on_host(const Row& row) { return row.step_on_host && !steps_on_device; }

// Counts an update of every row and makes its scalars.
void run_counts(const std::vector<Row>& rows, const std::vector<Hyper>& hypers, ScalarSlot* slots, double scale,
                double coefficient, const CudaExecutor::Factors& factors, cudaStream_t stream) {
  const auto table = std::make_unique<CountTable>();
  table->slots = slots;
  table->scale = scale;
  table->coefficient = coefficient;
  table->grad_scale = reinterpret_cast<const float*>(factors.grad_scale);
  table->found_inf = reinterpret_cast<const float*>(factors.found_inf);
  std::vector<int> places(hypers.size(), -1);  // of groups in the table
  int groups = 0;
  const auto flush = [&] {
    if (table->count) launch_counts(*table, stream);
    table->slots += table->count;
    table->count = 0;
    std::fill(places.begin(), places.end(), -1);
    groups = 0;
  };
  for (const Row& row : rows) {
    int* place = &places[size_t(row.group)];
    if (table->count == CountTable::kCapacity || (*place < 0 && groups == CountTable::kGroups)) flush();
    if (*place < 0) {
      *place = groups++;
      table->groups[*place] = hypers[size_t(row.group)];
    }
    const int i = table->count++;
    const bool on_host = counted_on_host(row);
    table->group[i] = static_cast<uint8_t>(*place);
    table->kind[i] = uint8_t((row.step_is_double ? kStepIsDouble : 0) | (on_host ? kStepOnHost : 0) |
                             (row.param.dtype == DType::f64 ? kSlotIsDouble : 0));
    table->step[i] = row.step;
    if (on_host) {
      const double t = row.step_is_double ? *static_cast<double*>(row.step) += 1
                                          : double(*static_cast<float*>(row.step) += 1);
      static_assert(sizeof t == sizeof table->step[i]);
      std::memcpy(&table->step[i], &t, sizeof t);
    }
  }
  flush();
}

}  // namespace

CudaExecutor::CudaExecutor(int device, uint64_t stream, uint64_t slots, int64_t slot_count, Factors factors)
    : device_(device),
      stream_(reinterpret_cast<cudaStream_t>(stream)),
      slots_(reinterpret_cast<ScalarSlot*>(slots)),
      slot_count_(slot_count),
      factors_(factors) {}

void CudaExecutor::accumulate(const std::vector<Row>& rows, double scale) {
  refuse_misaligned(rows);
  const DeviceGuard guard(device_);
  run_rows(rows, 0, rows.size(), false, nullptr, scale, stream_);
}

void CudaExecutor::measure(const std::vector<Row>&, double) {
  throw std::logic_error("there is no kernel for sums of squares");
}

void CudaExecutor::step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
                        bool one_by_one) {
  if (int64_t(rows.size()) > slot_count_) {
    throw std::invalid_argument("a step of " + std::to_string(rows.size()) + " rows has memory for the scalars of " +
                                std::to_string(slot_count_));
  }
  refuse_misaligned(rows);
  if (factors_.found_inf && std::any_of(rows.begin(), rows.end(), counted_on_host)) {
    throw std::invalid_argument("found_inf on the device needs the counts of updates there: the host would count on");
  }
  const DeviceGuard guard(device_);
  run_counts(rows, hypers, slots_, scale, coefficient, factors_, stream_);
  if (!one_by_one) return run_rows(rows, 0, rows.size(), true, slots_, scale, stream_);
  for (size_t i = 0; i < rows.size(); ++i) run_rows(rows, i, i + 1, true, slots_, scale, stream_);
}

void cuda_scatter_rows(int device, uint64_t stream, const ScatterJob& job) {
  for (auto [place, dtype] : {std::pair<const void*, DType>(job.accum, job.accum_dtype), {job.grad, job.grad_dtype}}) {
    refuse_misaligned(place, dtype);
  }
  if (job.tokens == 0 || job.width == 0) return;
  const DeviceGuard guard(device);
  launch_scatter(job, reinterpret_cast<cudaStream_t>(stream));
}

std::string why_no_cuda(int device) {
  int count = 0, driver = 0;
  const auto text = [](cudaError_t error) {
    return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  };
  if (cudaDriverGetVersion(&driver) != cudaSuccess || !driver) {
    return "there is no NVIDIA driver: install one, or use backend 'cpu' with CPU tensors";
  }
  if (const cudaError_t error = cudaGetDeviceCount(&count)) {
    return "CUDA finds no device (" + text(error) + "; the driver is for CUDA " + std::to_string(driver / 1000) + "." +
           std::to_string(driver % 1000 / 10) + "): update the driver, or check CUDA_VISIBLE_DEVICES";
  }
  if (device >= count) return "there is no device " + std::to_string(device) + " among " + std::to_string(count);
  const DeviceGuard guard(device);
  if (const cudaError_t error = try_kernels()) {
    int major = 0, minor = 0;
    FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    FA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    cudaGetLastError();  // or the next check would find this one
    return "device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
           std::to_string(minor) + ", and the kernels were built for " FA_CUDA_ARCHS " (" + text(error) +
           "): install fused_accum again with FUSED_ACCUM_CUDA_ARCHS=" + std::to_string(major) + std::to_string(minor);
  }
  return "";
}

}  // namespace fa
