// Executors as Python has them: capsules, so that those of one native module run rows for the tables of another.
#pragma once

#include <Python.h>

#include <memory>
#include <string>

#include "kernels.h"

namespace fa {

// Of the capsules. Modules that do not agree about rows, because only one was built anew, refuse each other's.
inline const char* executor_name() {
  static const auto* const name =  // never destroyed: capsules may outlive what is
      new std::string("fused_accum.Executor of rows of " + std::to_string(sizeof(Row)) + " bytes");
  return name->c_str();
}

// A new reference, or null with a Python error.
inline PyObject* executor_capsule(std::unique_ptr<Executor> executor) {
  PyObject* capsule = PyCapsule_New(executor.get(), executor_name(), [](PyObject* self) {
    delete static_cast<Executor*>(PyCapsule_GetPointer(self, executor_name()));
  });
  if (capsule) executor.release();
  return capsule;
}

}  // namespace fa
