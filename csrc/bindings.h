// What the files that pybind11 binds have in common.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "executor.h"
#include "table.h"
#include "tensor_info.h"

namespace py = pybind11;

namespace fa {

// Two matrices, row after row, with rows of one length: a buffer, and rows to be added to it.
struct Matrices {
  TensorInfo accum, grad;

  Matrices(const py::object& accum_, const py::object& grad_) {
    for (auto [tensor, info] : {std::pair(&accum_, &accum), std::pair(&grad_, &grad)}) {
      const bool usable = read_tensor(tensor->ptr(), *info) && info->dtype != DType::i16 && info->ndim == 2 &&
                          is_row_major(*info);
      if (!usable) throw std::invalid_argument("accum and grad must be contiguous matrices of a supported dtype");
    }
    if (accum.sizes[1] != grad.sizes[1]) throw std::invalid_argument("accum and grad must have rows of one length");
    if (!(accum.place == grad.place)) throw std::invalid_argument("accum and grad must be on one device");
  }
};

void bind_tables(py::module_& m);

}  // namespace fa

// Arguments `Executor&` are capsules, of any native module.
template <>
struct pybind11::detail::type_caster<fa::Executor> {
  static constexpr auto name = const_name("Executor");
  template <class>
  using cast_op_type = fa::Executor&;

  bool load(handle capsule, bool) {
    if (!PyCapsule_IsValid(capsule.ptr(), fa::executor_name())) return false;
    executor = static_cast<fa::Executor*>(PyCapsule_GetPointer(capsule.ptr(), fa::executor_name()));
    return true;
  }
  operator fa::Executor&() { return *executor; }

  fa::Executor* executor = nullptr;
};
