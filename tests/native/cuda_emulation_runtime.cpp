// The CUDA runtime with fake devices and streams; what is launched is done when the launch returns.
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "cuda_emulation_control.h"
#include "cuda_emulation_state.h"

struct CUstream_st {
  int device, number;
};

namespace cuda_emulation {

bool steps_on_device = false;

namespace {

struct Runtime {
  std::mutex mutex;
  int devices = 4, streams = 0;
  uint64_t seed = 1;
  unsigned sample = 1;
  std::set<cudaStream_t> known_streams;
  std::map<std::string, std::pair<int, int>> failing;  // call: (error, calls before it)
  std::string log, shown;
} runtime;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// One call of the runtime: its error, which is the planned one where a test planned one.
class Call {
 public:
  explicit Call(const char* name) : lock_(runtime.mutex) {
    const auto planned = runtime.failing.find(name);
    if (planned != runtime.failing.end() && planned->second.second-- == 0) {
      error_ = cudaError_t(planned->second.first);
      runtime.failing.erase(planned);
    }
    require(runtime.devices > 0, cudaErrorNoDevice);
  }

  // Whether to go on.
  bool require(bool right, cudaError_t otherwise) {
    if (error_ == cudaSuccess && !right) error_ = otherwise;
    return error_ == cudaSuccess;
  }
  bool require_device(int device) { return require(device >= 0 && device < runtime.devices, cudaErrorInvalidDevice); }

  cudaError_t end() const {
    if (error_ != cudaSuccess) last_error = error_;
    return error_;
  }

 private:
  std::lock_guard<std::mutex> lock_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace

std::string demangled(const char* name) {
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  const std::string text = plain ? plain : name;
  std::free(plain);
  return text;
}

void launch(const std::type_info& kind, const Launch& launch) {
  Call call("launch");
  call.require(launch.grid && launch.grid <= 0x7fffffffu && launch.block && launch.block <= 1024 &&
                   launch.block % 32 == 0 && launch.parameter_bytes <= 32764,
               cudaErrorInvalidConfiguration);
  const cudaStream_t stream = launch.stream;
  const bool known = !stream || runtime.known_streams.count(stream);
  // As CUDA has it, a stream must belong to the current device.
  call.require(known && (!stream || stream->device == current_device), cudaErrorInvalidResourceHandle);
  if (call.end() != cudaSuccess) return;
  const std::string tab = "\t", kernel = demangled(kind.name());
  runtime.log += kernel + tab + std::to_string(current_device) + tab + std::to_string(stream ? stream->number : 0) +
                 tab + std::to_string(launch.grid) + tab + std::to_string(launch.block) + "\n";
  launch_begins(kernel.c_str());
  run_blocks(launch, runtime.seed, runtime.sample);
}

}  // namespace cuda_emulation

using cuda_emulation::Call;
using cuda_emulation::current_device;
using cuda_emulation::last_error;
using cuda_emulation::runtime;

cudaError_t cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount");
  *count = runtime.devices;
  return call.end();
}

cudaError_t cudaGetDevice(int* device) {
  Call call("cudaGetDevice");
  if (call.require(true, cudaSuccess)) *device = current_device;
  return call.end();
}

cudaError_t cudaSetDevice(int device) {
  Call call("cudaSetDevice");
  if (call.require_device(device)) current_device = device;
  return call.end();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call("cudaDeviceGetAttribute");
  if (call.require_device(device)) *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return call.end();
}

cudaError_t cudaDriverGetVersion(int* version) {
  Call call("cudaDriverGetVersion");
  *version = runtime.devices ? 13000 : 0;
  return call.end();
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  Call call("cudaFuncGetAttributes");
  if (call.require(true, cudaSuccess)) *attributes = {90, 90, 1024, 32};
  return call.end();
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
  }
  return "unrecognized error code";
}

// ---- for tests ---------------------------------------------------------------------------------------------------

void fa_emulation_seed(uint64_t seed) { runtime.seed = seed; }

void fa_emulation_sample_blocks(unsigned n) { runtime.sample = n; }

uint64_t fa_emulation_stream(int device) {
  auto* stream = new CUstream_st{device, ++runtime.streams};
  runtime.known_streams.insert(stream);
  return reinterpret_cast<uint64_t>(stream);
}

void fa_emulation_steps_on_device(int on) { cuda_emulation::steps_on_device = on != 0; }
int fa_emulation_device() { return current_device; }
void fa_emulation_set_device(int device) { current_device = device; }
void fa_emulation_device_count(int count) { runtime.devices = count; }

const char* fa_emulation_log() {
  runtime.shown = runtime.log;
  runtime.log.clear();
  return runtime.shown.c_str();
}

void fa_emulation_fail(const char* call, int error, int after) { runtime.failing[call] = {error, after}; }
void fa_emulation_plan_nothing() { runtime.failing.clear(); }
