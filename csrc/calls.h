// C++ functions and classes as Python's: arguments are read and results made by their C++ types.
//
//   PyMethodDef functions[] = {bound<&f>("f"), {}};       // takes positional arguments only
//   add_type<&make_t>(module, "module.T", methods);       // std::unique_ptr<T> make_t(...) is T's constructor
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "executor.h"
#include "objects.h"

namespace fa {

// Sets the Python error for the C++ exception that is being handled.
void set_python_error();

// Throws a TypeError: `wanted` was expected.
[[noreturn]] void refuse_argument(PyObject* object, const char* wanted);

// A T that Python owns.
template <class T>
struct Instance {
  PyObject_HEAD
  T* value;
  static inline PyTypeObject* type = nullptr;
};

// Whether a T owns Python objects and shows them: int T::traverse(visitproc, void*) const.
template <class T, class = void>
constexpr bool is_traversed = false;
template <class T>
constexpr bool is_traversed<T, std::void_t<decltype(&T::traverse)>> = true;

// -- arguments: From<T>::of(object) is a T or a T& ------------------------------------------------------------------

template <class T, class = void>
struct From {
  static T& of(PyObject* object) {
    if (Py_TYPE(object) != Instance<T>::type) refuse_argument(object, Instance<T>::type->tp_name);
    return *reinterpret_cast<Instance<T>*>(object)->value;
  }
};

template <class T>
struct From<T, std::enable_if_t<std::is_integral_v<T>>> {
  static T of(PyObject* object) {
    using Wide = std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>;
    Wide value;
    if constexpr (std::is_signed_v<T>) value = PyLong_AsLongLong(object);
    else value = PyLong_AsUnsignedLongLong(object);
    if (value == Wide(-1) && PyErr_Occurred()) throw PythonError();
    if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
      PyErr_SetString(PyExc_OverflowError, "the integer is too large");
      throw PythonError();
    }
    return T(value);
  }
};

template <>
struct From<bool> {
  static bool of(PyObject* object) {
    const int truth = PyObject_IsTrue(object);
    if (truth < 0) throw PythonError();
    return truth != 0;
  }
};

template <>
struct From<double> {
  static double of(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }
};

template <>
struct From<const char*> {
  static const char* of(PyObject* object) {
    if (!PyUnicode_Check(object)) refuse_argument(object, "str");
    const char* text = PyUnicode_AsUTF8(object);
    if (!text) throw PythonError();
    return text;
  }
};

template <>
struct From<PyObject*> {
  static PyObject* of(PyObject* object) { return object; }
};

// List, ByteArray, Dict, Tuple.
template <class T>
struct From<T, std::void_t<decltype(T::kType)>> {
  static T of(PyObject* object) {
    if (!T::holds(object)) refuse_argument(object, T::kType);
    return {object};
  }
};

template <class T>
struct From<std::vector<T>> {
  static std::vector<T> of(PyObject* object) {
    const Object items = checked(PySequence_Fast(object, "a sequence was expected"));
    std::vector<T> all;
    all.reserve(size_t(PySequence_Fast_GET_SIZE(items.get())));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
      all.push_back(From<T>::of(PySequence_Fast_GET_ITEM(items.get(), i)));
    }
    return all;
  }
};

// A last argument that may be left out.
template <class T>
struct From<std::optional<T>> {
  static std::optional<T> of(PyObject* object) { return object ? std::optional<T>(From<T>::of(object)) : std::nullopt; }
};
template <class T>
constexpr bool is_optional = false;
template <class T>
constexpr bool is_optional<std::optional<T>> = true;

// The capsule of any native module's executor.
template <>
struct From<Executor> {
  static Executor& of(PyObject* object) {
    if (!PyCapsule_IsValid(object, executor_name())) refuse_argument(object, executor_name());
    return *static_cast<Executor*>(PyCapsule_GetPointer(object, executor_name()));
  }
};

// -- results: a new reference, or null with a Python error ------------------------------------------------------------

inline PyObject* to_python(PyObject* owned) { return owned; }
inline PyObject* to_python(const char* text) { return PyUnicode_FromString(text); }

template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
PyObject* to_python(T number) {
  if constexpr (std::is_same_v<T, bool>) return PyBool_FromLong(number);
  else if constexpr (std::is_signed_v<T>) return PyLong_FromLongLong(number);
  else return PyLong_FromUnsignedLongLong(number);
}

template <class A, class B>
PyObject* to_python(const std::pair<A, B>& both) {
  return Py_BuildValue("NN", to_python(both.first), to_python(both.second));
}

template <class T>
PyObject* to_python(const std::vector<T>& all) {
  Object list(PyList_New(Py_ssize_t(all.size())));
  for (size_t i = 0; list && i < all.size(); ++i) {
    PyObject* item = to_python(all[i]);
    if (!item) return nullptr;
    PyList_SET_ITEM(list.get(), Py_ssize_t(i), item);
  }
  return list.release();
}

template <class T>
PyObject* to_python(std::unique_ptr<T> value) {
  Instance<T>* self;
  if constexpr (is_traversed<T>) self = PyObject_GC_New(Instance<T>, Instance<T>::type);
  else self = PyObject_New(Instance<T>, Instance<T>::type);
  if (!self) return nullptr;
  self->value = value.release();
  if constexpr (is_traversed<T>) PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

// -- calls ------------------------------------------------------------------------------------------------------------

template <class R, class... A, class F, size_t... I>
PyObject* call(F f, PyObject* const* args, Py_ssize_t count, std::index_sequence<I...>) {
  constexpr Py_ssize_t most = sizeof...(A), least = most - (Py_ssize_t(0) + ... + is_optional<A>);
  if (count < least || count > most) {
    return PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", most, count);
  }
  try {
    const auto argument = [&](size_t i) { return Py_ssize_t(i) < count ? args[i] : nullptr; };
    (void)argument;  // of a function without any
    if constexpr (std::is_void_v<R>) {
      f(From<std::decay_t<A>>::of(argument(I))...);
      Py_RETURN_NONE;
    } else {
      return to_python(f(From<std::decay_t<A>>::of(argument(I))...));
    }
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <auto F>
struct Bound;

template <class R, class... A, R (*F)(A...)>
struct Bound<F> {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return fa::call<R, A...>(F, args, count, std::index_sequence_for<A...>());
  }
};

template <class T, class R, class... A, class Method>
PyObject* call_method(Method method, PyObject* self, PyObject* const* args, Py_ssize_t count) {
  T& value = *reinterpret_cast<Instance<T>*>(self)->value;
  const auto f = [&](auto&&... all) -> R { return (value.*method)(std::forward<decltype(all)>(all)...); };
  return call<R, A...>(f, args, count, std::index_sequence_for<A...>());
}

template <class T, class R, class... A, R (T::*F)(A...)>
struct Bound<F> {
  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return call_method<T, R, A...>(F, self, args, count);
  }
};

template <class T, class R, class... A, R (T::*F)(A...) const>
struct Bound<F> {
  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return call_method<T, R, A...>(F, self, args, count);
  }
};

template <auto F>
PyMethodDef bound(const char* name, const char* doc = nullptr) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Bound<F>::call)), METH_FASTCALL, doc};
}

// -- classes ----------------------------------------------------------------------------------------------------------

template <auto Make>
PyObject* construct(PyTypeObject*, PyObject* args, PyObject* keywords) {
  if (keywords && PyDict_GET_SIZE(keywords)) {
    PyErr_SetString(PyExc_TypeError, "no keyword arguments are taken");
    return nullptr;
  }
  return Bound<Make>::call(nullptr, reinterpret_cast<PyTupleObject*>(args)->ob_item, PyTuple_GET_SIZE(args));
}

template <class T>
void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if constexpr (is_traversed<T>) PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Instance<T>*>(self)->value;
  if constexpr (is_traversed<T>) PyObject_GC_Del(self);
  else PyObject_Free(self);
  Py_DECREF(type);
}

template <class T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return reinterpret_cast<Instance<T>*>(self)->value->traverse(visit, arg);
}

// Adds a class to a module: `name` with the module's, `methods` ending in {}, both kept. Throws a Python error.
template <auto Make, class T, class... A>
void add_type(PyObject* module, const char* name, PyMethodDef* methods, std::unique_ptr<T> (*)(A...)) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(construct<Make>)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(destroy<T>)},
                         {Py_tp_methods, methods},
                         {0, nullptr},
                         {0, nullptr}};
  if constexpr (is_traversed<T>) slots[3] = {Py_tp_traverse, reinterpret_cast<void*>(traverse<T>)};
  PyType_Spec spec = {name, sizeof(Instance<T>), 0,
                      Py_TPFLAGS_DEFAULT | (is_traversed<T> ? Py_TPFLAGS_HAVE_GC : 0), slots};
  Instance<T>::type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
  if (PyModule_AddType(module, Instance<T>::type)) throw PythonError();
}
template <auto Make>
void add_type(PyObject* module, const char* name, PyMethodDef* methods) {
  add_type<Make>(module, name, methods, Make);
}

}  // namespace fa
