// The little of Python's C interface that is used throughout: owned references, errors as exceptions, the GIL.
//
// pybind11 would do as well, but to compile its headers takes twice as long as all that is in shared.cpp.
#pragma once

#include <Python.h>

#include <exception>
#include <stdexcept>
#include <utility>

namespace fa {

// Thrown where a Python error is set.
struct PythonError : std::exception {
  const char* what() const noexcept override { return "a Python error is set"; }
};

// An owned reference, or null.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object_(owned) {}
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  static Object borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Object(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  bool is_none() const { return object_ == Py_None; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// `owned`, which Python has just returned; throws its error.
inline Object checked(PyObject* owned) {
  if (!owned) throw PythonError();
  return Object(owned);
}

class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ReleaseGil(const ReleaseGil&) = delete;
  ~ReleaseGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Arguments that are known to be of a type, borrowed for a call.
struct List {
  static constexpr const char* kType = "list";
  static bool holds(PyObject* object) { return PyList_Check(object); }

  PyObject* object;

  size_t size() const { return size_t(PyList_GET_SIZE(object)); }
  PyObject* operator[](size_t i) const {  // borrowed
    PyObject* item = PyList_GetItem(object, Py_ssize_t(i));
    if (!item) throw PythonError();
    return item;
  }
};
struct ByteArray {
  static constexpr const char* kType = "bytearray";
  static bool holds(PyObject* object) { return PyByteArray_Check(object); }

  PyObject* object;

  char& operator[](size_t i) const {
    if (i >= size_t(PyByteArray_GET_SIZE(object))) throw std::out_of_range("bytearray index out of range");
    return PyByteArray_AS_STRING(object)[i];
  }
};
struct Dict {
  static constexpr const char* kType = "dict";
  static bool holds(PyObject* object) { return PyDict_Check(object); }

  PyObject* object;
};
struct Tuple {
  static constexpr const char* kType = "tuple";
  static bool holds(PyObject* object) { return PyTuple_Check(object); }

  PyObject* object;
};

}  // namespace fa
