// Reading torch tensors and counting their versions up by way of torch's own C++, where this torch has it.
//
// torch's DLPack C exchange API reads a tensor, but most of its time goes into a counted reference, for which torch
// takes the GIL once more. The function of libtorch behind it borrows: so it is called itself, on the at::Tensor that a
// Python tensor begins with. That it does is not taken for granted: the first plain tensor, read both ways, decides.
#pragma once

#include <cstdint>

#include "objects.h"

namespace fa {

// The part of DLPack's C ABI (dlpack.h, version 1.3) that is used here.
struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// From the slowest to the fastest: by Python attributes, by the exchange API, by libtorch's functions.
enum class Way { attributes, exchange, libtorch };

// Must be called once, with torch.Tensor, before what follows. `best`: the fastest way that may be taken.
void bind_exchange(PyObject* tensor_class, Way best);

// How tensors are read: libtorch only once that has been found to be right; and whether versions are counted up so.
Way way_taken();
bool counts_versions();

// Not for Way::attributes. False, with no Python error set, for what is no tensor with memory. Borrows of `tensor`.
bool view_tensor(PyObject* tensor, DLTensor& view);

// Whether the tensor's elements are to be read with the other sign (torch.Tensor.is_neg), or that cannot be told.
bool is_negated(PyObject* tensor);

// Counts the tensor's version up; false where that is left to torch.autograd.graph.increment_version.
bool bump_version(PyObject* tensor);

}  // namespace fa
