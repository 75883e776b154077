// Every CUDA call is checked; an error throws, with the expression and its place.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda_port.h"

namespace fa {

inline void throw_unless_success(cudaError_t error, const char* expression, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the check of the next launch would find this one
  throw std::runtime_error(std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ") from " +
                           expression + " at " + file + ":" + std::to_string(line));
}

}  // namespace fa

#define FA_CUDA_CHECK(expression) ::fa::throw_unless_success((expression), #expression, __FILE__, __LINE__)
