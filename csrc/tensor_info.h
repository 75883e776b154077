// What a launch needs to know of a torch tensor, read without torch's headers.
#pragma once

#include <Python.h>

#include <cstdint>

#include "dtypes.h"
#include "exchange.h"

namespace fa {

// Where a tensor lies, as DLPack names it: type 1 is the CPU, 2 CUDA; 0 is none of them.
struct Place {
  int32_t type = 0, index = 0;

  bool operator==(const Place& other) const { return type == other.type && index == other.index; }
};
constexpr Place kCpu{1, 0};

struct TensorInfo {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  Place place;
  const int64_t* sizes = nullptr;    // these live as long as the tensor, unresized
  const int64_t* strides = nullptr;  // in elements
  int64_t numel = 0;
};

// One attribute of torch.Tensor, read and written through its C accessors where the class has them: without the
// attribute look-up, which costs as much as the access. For instances of torch.Tensor and torch.nn.Parameter proper.
class TensorAttribute {
 public:
  explicit TensorAttribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  void bind(PyObject* tensor_class);
  PyObject* get(PyObject* tensor) const;              // a new reference, or null with a Python error
  int set(PyObject* tensor, PyObject* value) const;   // 0, or -1 with a Python error

 private:
  PyObject* name_;
  PyGetSetDef* accessors_ = nullptr;
};

struct TensorAttributes {
  TensorAttribute grad{"grad"}, requires_grad{"requires_grad"}, version{"_version"};
};
TensorAttributes& tensor_attributes();

// Must be called once, with torch.Tensor, before read_tensor; `best` as bind_exchange's.
void set_tensor_class(PyObject* tensor_class, Way best);

// False, with no Python error set, for a tensor that has no plain elements of a supported dtype; int16 is read too, as
// DType::i16.
bool read_tensor(PyObject* tensor, TensorInfo& info);

// Same sizes; and, for operands of one row, whether both list their elements in the same dense order.
bool same_sizes(const TensorInfo& a, const TensorInfo& b);
bool is_dense(const TensorInfo& t);
bool is_row_major(const TensorInfo& t);
bool same_strides(const TensorInfo& a, const TensorInfo& b);

// Whether one is the other under another name: not, say, its transpose, which begins at the same place.
bool same_elements(const TensorInfo& a, const TensorInfo& b);

}  // namespace fa
