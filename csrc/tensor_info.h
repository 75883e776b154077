// What a launch needs to know of a torch tensor, read without torch's headers.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "dtypes.h"

namespace fa {

struct TensorInfo {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  const int64_t* sizes = nullptr;    // they live as long as the tensor, or in `own`
  const int64_t* strides = nullptr;  // in elements
  int64_t numel = 0;
  bool on_cpu = false;
  std::vector<int64_t> own;
};

// Must be called once, with torch.Tensor, before read_tensor. Uses the DLPack C exchange API of the class where it
// has one (about 50 ns a tensor), else the tensor's Python attributes.
void set_tensor_class(PyObject* tensor_class);
bool has_exchange_api();

// False, with no Python error set, for a tensor that has no plain elements of a supported dtype.
bool read_tensor(PyObject* tensor, TensorInfo& info);

// Same sizes; and, for operands of one row, whether both list their elements in the same dense order.
bool same_sizes(const TensorInfo& a, const TensorInfo& b);
bool is_dense(const TensorInfo& t);
bool same_strides(const TensorInfo& a, const TensorInfo& b);

}  // namespace fa
