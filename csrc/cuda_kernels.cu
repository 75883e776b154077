// All CUDA kernels as one compilation: nvcc reads CUDA's headers five times for each.
#include "cuda_accumulate.cu"
#include "cuda_scatter.cu"
#include "cuda_step.cu"
#include "cuda_strided.cu"
