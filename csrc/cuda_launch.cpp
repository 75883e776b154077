#include "cuda_launch.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda_batches.h"
#include "cuda_check.h"

#ifndef FA_CUDA_ARCHS  // what setup.py compiled the kernels for
#define FA_CUDA_ARCHS "no architecture"
#endif

namespace fa {
namespace {

// Makes a device current while in scope; throws NotBegun where that fails.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) try {
    FA_CUDA_CHECK(cudaGetDevice(&before_));
    if (device == before_) return;
    FA_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  } catch (const std::runtime_error& error) {
    throw NotBegun(error.what());
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

#if defined(FA_CUDA_EMULATION)
using cuda_emulation::steps_on_device;
#else
constexpr bool steps_on_device = false;  // all of them, because a test says so
#endif

bool counted_on_host(const Row& row) { return row.step_on_host && !steps_on_device; }

// Counts an update of every row and makes its scalars.
void run_counts(const std::vector<Row>& rows, const std::vector<Hyper>& hypers, ScalarSlot* slots, double scale,
                double coefficient, const CudaExecutor::Factors& factors, cudaStream_t stream) {
  const auto table = std::make_unique<LargeCounts>();
  table->slots = slots;
  table->scale = scale;
  table->coefficient = coefficient;
  table->found_inf = reinterpret_cast<const float*>(factors.found_inf);
  table->clip = reinterpret_cast<const double*>(factors.clip);
  table->counts = reinterpret_cast<const double*>(factors.counts);
  table->device_scale = reinterpret_cast<const DeviceScale*>(factors.scale);
  std::vector<int> places(hypers.size(), -1);  // of groups in the table
  int groups = 0;
  const auto flush = [&] {
    if (table->count) launch_counts(*table, stream);
    table->slots += table->count;
    if (table->counts) table->counts += table->count;
    table->count = 0;
    std::fill(places.begin(), places.end(), -1);
    groups = 0;
  };
  for (const Row& row : rows) {
    int* place = &places[size_t(row.group)];
    if (table->count == LargeCounts::kCapacity || (*place < 0 && groups == LargeCounts::kGroups)) flush();
    if (*place < 0) {
      *place = groups++;
      table->groups[*place] = hypers[size_t(row.group)];
    }
    const int i = table->count++;
    const bool on_host = counted_on_host(row);
    table->group[i] = static_cast<uint8_t>(*place);
    table->kind[i] = uint8_t((row.step_is_double ? kStepIsDouble : 0) | (on_host ? kStepOnHost : 0) |
                             (row.param.dtype == DType::f64 ? kSlotIsDouble : 0) | (row.has_grad ? kHasGrad : 0) |
                             (row.has_accum ? kHasAccum : 0));
    table->step[i] = row.step;
    table->parameter[i] = row.randomness.parameter;
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

void throw_cuda_error(cudaError_t error, const char* expression, const char* file, int line) {
  cudaGetLastError();  // or the check of the next launch would find this one
  throw std::runtime_error(std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ") from " +
                           expression + " at " + file + ":" + std::to_string(line));
}

CudaExecutor::CudaExecutor(int device, uint64_t stream, Scratch scratch, Factors factors)
    : device_(device), stream_(reinterpret_cast<cudaStream_t>(stream)), scratch_(scratch), factors_(factors) {}

const DeviceScale* CudaExecutor::device_scale() const { return reinterpret_cast<const DeviceScale*>(factors_.scale); }

int64_t CudaExecutor::squares_for(int64_t rows, int64_t elements) {
  return elements / kSquaresBlock + rows * kSquaresOfBlock;
}

double* CudaExecutor::room_for_squares(const std::vector<Row>& rows) const {
  int64_t needed = 0;
  for (const Row& row : rows) needed += row.squares ? blocks_of(row) * kSquaresOfBlock : 0;
  if (needed > scratch_.square_count) {
    throw std::invalid_argument("sums of squares that need memory for " + std::to_string(needed) + " have it for " +
                                std::to_string(scratch_.square_count));
  }
  return reinterpret_cast<double*>(scratch_.squares);
}

void CudaExecutor::accumulate(const std::vector<Row>& rows, double scale) {
  refuse_misaligned(rows);
  BlockSquares squares(room_for_squares(rows));
  const DeviceGuard guard(device_);
  run_rows(rows, 0, rows.size(), false, nullptr, {scale, device_scale()}, squares, stream_);
}

void CudaExecutor::measure(const std::vector<Row>& rows, double scale) {
  refuse_misaligned(rows);
  BlockSquares squares(room_for_squares(rows));
  std::vector<Row> sums, gradients;  // accumulations that write nothing; what a buffer holds is a gradient of scale 1
  for (const Row& row : rows) {
    Row source = row;
    if (!row.has_grad) source.grad = row.accum;
    source.accum = {nullptr, row.accum_dtype, nullptr};
    source.has_grad = true;
    source.has_accum = false;
    (row.has_grad ? gradients : sums).push_back(source);
  }
  const DeviceGuard guard(device_);
  run_rows(sums, 0, sums.size(), false, nullptr, {1.0}, squares, stream_);
  run_rows(gradients, 0, gradients.size(), false, nullptr, {scale, device_scale()}, squares, stream_);
}

void CudaExecutor::step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
                        bool one_by_one) {
  if (int64_t(rows.size()) > scratch_.slot_count) {
    throw std::invalid_argument("a step of " + std::to_string(rows.size()) + " rows has memory for the scalars of " +
                                std::to_string(scratch_.slot_count));
  }
  refuse_misaligned(rows);
  const bool may_skip = factors_.found_inf || factors_.scale || factors_.counts;
  if (may_skip && std::any_of(rows.begin(), rows.end(), counted_on_host)) {
    throw std::invalid_argument("what the device decides to skip needs the counts of updates there: the host would "
                                "count on");
  }
  auto* const slots = reinterpret_cast<ScalarSlot*>(scratch_.slots);
  BlockSquares squares(nullptr);
  const DeviceGuard guard(device_);
  run_counts(rows, hypers, slots, scale, coefficient, factors_, stream_);
  const size_t together = one_by_one ? 1 : rows.size();
  for (size_t i = 0; i < rows.size(); i += together) {
    run_rows(rows, i, i + together, true, slots, {scale}, squares, stream_);  // the slots have the device's
  }
}

void CudaExecutor::scatter_rows(const ScatterJob& job) {
  if ((job.accum_dtype == DType::f64) != (job.grad_dtype == DType::f64)) {
    throw std::invalid_argument("accum and grad must both be float64, or neither");
  }
  refuse_misaligned(job.accum, job.accum_dtype);
  refuse_misaligned(job.grad, job.grad_dtype);
  if (job.tokens == 0 || job.width == 0) return;
  const DeviceGuard guard(device_);
  launch_scatter(job, stream_);
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
