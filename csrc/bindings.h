// What the native modules have in common for Python: tables, and the kernels as functions on lists of tensors.
// Classes are local to their module, of which there may be several in a process.
#pragma once

#include <pybind11/pybind11.h>

#include "kernels.h"
#include "table.h"
#include "tensor_info.h"

namespace py = pybind11;

namespace fa {

void bind_tables(py::module_& m);

}  // namespace fa
