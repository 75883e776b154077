#include "exchange.h"

#include <dlfcn.h>

#include <cstring>
#include <type_traits>

#include "tensor_info.h"

namespace fa {
namespace {

struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
};

PyTypeObject* tensor_type = nullptr;
const ExchangeApi* api = nullptr;

// Functions of libtorch, of `const at::Tensor&`; they may throw. Null where there is none, or it is not to be used.
void (*view_function)(const void* tensor, DLTensor* out, bool read_only) = nullptr;  // at::toDLPackNonOwning
void (*view_before_2_14)(const void* tensor, DLTensor* out) = nullptr;
void (*bump_function)(const void* tensor) = nullptr;                 // torch::autograd::impl::bump_version
bool (*negated_function)(const void* tensor) = nullptr;              // at::native::is_neg
bool view_verified = false, bump_verified = false;

// The at::Tensor of a Python tensor.
const void* inner(PyObject* tensor) { return reinterpret_cast<const char*>(tensor) + sizeof(PyObject); }

bool is_tensor(PyObject* object) {
  return Py_TYPE(object) == tensor_type || PyType_IsSubtype(Py_TYPE(object), tensor_type);
}

bool view_directly(PyObject* tensor, DLTensor& view) {
  try {
    view_function ? view_function(inner(tensor), &view, false) : view_before_2_14(inner(tensor), &view);
    return true;
  } catch (...) {
    return false;
  }
}

bool same(const DLTensor& a, const DLTensor& b) {
  return a.data == b.data && a.device.device_type == b.device.device_type && a.device.device_id == b.device.device_id &&
         a.ndim == b.ndim && !std::memcmp(&a.dtype, &b.dtype, sizeof a.dtype) && a.shape == b.shape &&
         a.strides == b.strides && a.byte_offset == b.byte_offset;
}

// Whether what `inner` gives of a tensor, whose view by the API is `view`, is its at::Tensor.
bool begins_with_tensor(PyObject* tensor, const DLTensor& view) {
  Object address(PyObject_GetAttrString(tensor, "_cdata"));  // of the TensorImpl, all that an at::Tensor holds
  void* impl = address ? PyLong_AsVoidPtr(address.get()) : nullptr;
  PyErr_Clear();
  DLTensor direct;
  return impl && !std::memcmp(inner(tensor), &impl, sizeof impl) && view_directly(tensor, direct) && same(direct, view);
}

long long version_of(PyObject* tensor) {
  Object version(tensor_attributes().version.get(tensor));
  const long long number = version ? PyLong_AsLongLong(version.get()) : -1;
  PyErr_Clear();
  return number;
}

}  // namespace

void bind_exchange(PyObject* tensor_class, Way best) {
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor_class);
  api = nullptr;
  view_function = nullptr;
  view_before_2_14 = nullptr;
  bump_function = nullptr;
  negated_function = nullptr;
  view_verified = bump_verified = false;
  if (best == Way::attributes) return;
  Object capsule(PyObject_GetAttrString(tensor_class, "__dlpack_c_exchange_api__"));
  if (!capsule) return PyErr_Clear();
  auto* found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  if (!found) return PyErr_Clear();
  if (found->major != 1 || !found->tensor_from_object) return;
  api = found;
  if (best == Way::exchange) return;
  Dl_info torch;
  if (!dladdr(reinterpret_cast<void*>(api->tensor_from_object), &torch)) return;
  void* library = dlopen(torch.dli_fname, RTLD_LAZY | RTLD_NOLOAD);  // it, and what it has loaded; never closed
  if (!library) return;
  const auto symbol = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
  };
  symbol(view_function, "_ZN2at17toDLPackNonOwningERKNS_6TensorEP8DLTensorb");
  symbol(view_before_2_14, "_ZN2at17toDLPackNonOwningERKNS_6TensorEP8DLTensor");
  if (!view_function && !view_before_2_14) return;
  symbol(bump_function, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  symbol(negated_function, "_ZN2at6native6is_negERKNS_6TensorE");
}

Way way_taken() { return view_verified ? Way::libtorch : api ? Way::exchange : Way::attributes; }

bool counts_versions() { return bump_verified; }

bool view_tensor(PyObject* tensor, DLTensor& view) {
  if (view_verified && is_tensor(tensor)) return view_directly(tensor, view);
  if (api->tensor_from_object(tensor, &view) != 0) return PyErr_Clear(), false;
  if ((view_function || view_before_2_14) && Py_TYPE(tensor) == tensor_type) {  // a subclass may have its own `_cdata`
    view_verified = begins_with_tensor(tensor, view);
    if (!view_verified) {
      view_function = nullptr;
      view_before_2_14 = nullptr;
    }
  }
  return true;
}

bool is_negated(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  if (negated_function && view_verified && is_tensor(tensor)) return negated_function(inner(tensor));
  Object answer(PyObject_CallMethodNoArgs(tensor, name));
  PyErr_Clear();
  return answer.get() != Py_False;
}

bool bump_version(PyObject* tensor) {
  if (!bump_function || !view_verified || !is_tensor(tensor)) return false;
  if (!bump_verified && Py_TYPE(tensor) != tensor_type) return false;
  const long long before = bump_verified ? 0 : version_of(tensor);
  try {
    bump_function(inner(tensor));
  } catch (...) {
    return false;
  }
  if (bump_verified) return true;
  bump_verified = version_of(tensor) == before + 1;
  if (!bump_verified) bump_function = nullptr;
  return bump_verified;
}

}  // namespace fa
