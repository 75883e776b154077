// Every CUDA call is checked; an error throws std::runtime_error, with the expression and its place.
#pragma once

#include "cuda_port.h"

namespace fa {

[[noreturn]] void throw_cuda_error(cudaError_t error, const char* expression, const char* file, int line);

}  // namespace fa

#define FA_CUDA_CHECK(expression)                                                      \
  do {                                                                                 \
    if (const cudaError_t error = (expression)) {                                      \
      ::fa::throw_cuda_error(error, #expression, __FILE__, __LINE__);                  \
    }                                                                                  \
  } while (false)
