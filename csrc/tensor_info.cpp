#include "tensor_info.h"

#include <cstring>
#include <set>
#include <utility>
#include <vector>

namespace fa {
namespace {

constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4;
constexpr int32_t kCuda = 2;

bool dtype_from(uint8_t code, int bits, DType& out) {
  if (code == kBfloat && bits == 16) return out = DType::bf16, true;
  if (code == kInt && bits == 16) return out = DType::i16, true;
  if (code != kFloat) return false;
  if (bits == 32) return out = DType::f32, true;
  if (bits == 16) return out = DType::f16, true;
  if (bits == 64) return out = DType::f64, true;
  return false;
}

bool read_by_exchange(PyObject* tensor, TensorInfo& info) {
  DLTensor t;
  if (!view_tensor(tensor, t) || t.dtype.lanes != 1 || !dtype_from(t.dtype.code, t.dtype.bits, info.dtype)) return false;
  info.data = static_cast<char*>(t.data) + t.byte_offset;
  info.ndim = t.ndim;
  info.sizes = t.shape;
  info.strides = t.strides;
  info.place = {t.device.device_type, t.device.device_id};
  return true;
}

// A lasting copy of a shape; there are few different ones in a program.
const int64_t* kept(std::vector<int64_t> shape) {
  static std::set<std::vector<int64_t>> all;  // nodes stay in place
  return all.insert(std::move(shape)).first->data();
}

bool append_integers(PyObject* sequence, std::vector<int64_t>& to) {
  Object tuple(sequence ? PySequence_Tuple(sequence) : nullptr);
  if (!tuple) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.get()); ++i) {
    to.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.get(), i)));
  }
  return !PyErr_Occurred();
}

bool read_by_attributes(PyObject* tensor, TensorInfo& info) {
  Object dtype(PyObject_GetAttrString(tensor, "dtype"));
  Object name(dtype ? PyObject_Str(dtype.get()) : nullptr);
  Object sizes(PyObject_GetAttrString(tensor, "shape"));
  Object strides(PyObject_CallMethod(tensor, "stride", nullptr));
  Object data(PyObject_CallMethod(tensor, "data_ptr", nullptr));
  Object on_cpu(PyObject_GetAttrString(tensor, "is_cpu"));
  Object on_cuda(PyObject_GetAttrString(tensor, "is_cuda"));
  Object index(PyObject_CallMethod(tensor, "get_device", nullptr));
  const char* text = name ? PyUnicode_AsUTF8(name.get()) : nullptr;
  std::vector<int64_t> size_list, stride_list;
  const bool read = text && data && on_cpu && on_cuda && index && append_integers(sizes.get(), size_list) &&
                    append_integers(strides.get(), stride_list);
  if (!read) return PyErr_Clear(), false;
  if (!std::strcmp(text, "torch.float32")) info.dtype = DType::f32;
  else if (!std::strcmp(text, "torch.bfloat16")) info.dtype = DType::bf16;
  else if (!std::strcmp(text, "torch.float16")) info.dtype = DType::f16;
  else if (!std::strcmp(text, "torch.float64")) info.dtype = DType::f64;
  else if (!std::strcmp(text, "torch.int16")) info.dtype = DType::i16;
  else return false;
  info.data = PyLong_AsVoidPtr(data.get());
  info.ndim = static_cast<int>(size_list.size());
  info.sizes = kept(std::move(size_list));
  info.strides = kept(std::move(stride_list));
  info.place = Place();
  if (on_cpu.get() == Py_True) info.place = kCpu;
  if (on_cuda.get() == Py_True) info.place = {kCuda, int32_t(PyLong_AsLong(index.get()))};
  return true;
}

}  // namespace

void TensorAttribute::bind(PyObject* tensor_class) {
  accessors_ = nullptr;
  Object descriptor(PyObject_GetAttr(tensor_class, name_));
  if (!descriptor) return PyErr_Clear();
  if (Py_TYPE(descriptor.get()) != &PyGetSetDescr_Type) return;
  accessors_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor.get())->d_getset;  // static in libtorch_python
}

PyObject* TensorAttribute::get(PyObject* tensor) const {
  return accessors_ ? accessors_->get(tensor, accessors_->closure) : PyObject_GetAttr(tensor, name_);
}

int TensorAttribute::set(PyObject* tensor, PyObject* value) const {
  return accessors_ && accessors_->set ? accessors_->set(tensor, value, accessors_->closure)
                                       : PyObject_SetAttr(tensor, name_, value);
}

TensorAttributes& tensor_attributes() {
  static TensorAttributes all;
  return all;
}

void set_tensor_class(PyObject* tensor_class, Way best) {
  tensor_attributes().grad.bind(tensor_class);
  tensor_attributes().requires_grad.bind(tensor_class);
  tensor_attributes().version.bind(tensor_class);
  bind_exchange(tensor_class, best);
}

bool read_tensor(PyObject* tensor, TensorInfo& info) {
  if (!(way_taken() == Way::attributes ? read_by_attributes(tensor, info) : read_by_exchange(tensor, info))) return false;
  info.numel = 1;
  for (int d = 0; d < info.ndim; ++d) info.numel *= info.sizes[d];
  return info.data || info.numel == 0;
}

bool same_sizes(const TensorInfo& a, const TensorInfo& b) {
  return a.ndim == b.ndim && !std::memcmp(a.sizes, b.sizes, size_t(a.ndim) * sizeof(int64_t));
}

bool same_strides(const TensorInfo& a, const TensorInfo& b) {
  for (int d = 0; d < a.ndim; ++d) {
    if (a.strides[d] != b.strides[d] && a.sizes[d] != 1) return false;
  }
  return true;
}

bool same_elements(const TensorInfo& a, const TensorInfo& b) {
  return a.data == b.data && a.dtype == b.dtype && same_sizes(a, b) && same_strides(a, b);
}

bool is_row_major(const TensorInfo& t) {
  int64_t expected = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] != 1 && t.strides[d] != expected) return t.numel == 0;
    expected *= t.sizes[d];
  }
  return true;
}

bool is_dense(const TensorInfo& t) {
  if (is_row_major(t)) return true;
  // Any order of dimensions: each stride must be the product of the sizes of those with smaller strides.
  std::vector<bool> used(size_t(t.ndim), false);
  int64_t expected = 1;
  for (int placed = 0; placed < t.ndim; ++placed) {
    int next = -1;
    for (int d = 0; d < t.ndim && next < 0; ++d) {
      if (!used[size_t(d)] && (t.sizes[d] == 1 || t.strides[d] == expected)) next = d;
    }
    if (next < 0) return false;
    used[size_t(next)] = true;
    expected *= t.sizes[next];
  }
  return true;
}

}  // namespace fa
