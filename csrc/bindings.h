// What the native modules have in common for Python: tables, and the kernels as functions on lists of tensors.
// Classes are local to their module, of which there may be several in a process.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>

#include "kernels.h"
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

inline void bind_tables(py::module_& m) {
  m.def("set_tensor_class", [](py::object cls) { set_tensor_class(cls.ptr()); });
  m.def("has_exchange_api", &has_exchange_api);

  py::class_<Place>(m, "Place", py::module_local())
      .def(py::init([](int type, int index) { return Place{type, index}; }), py::arg("type"), py::arg("index"));
  py::class_<Hyper>(m, "Hyper", py::module_local())
      .def(py::init(&hyper_from), py::arg("hyper"), py::arg("device_lr") = 0, py::arg("device_lr_is_double") = false);
  py::class_<Executor>(m, "Executor", py::module_local());

  py::class_<Table>(m, "Table", py::module_local())
      .def(py::init<py::list, std::vector<int>, py::object, Place, std::vector<uint32_t>, int, uint64_t>())
      .def("accept", &Table::accept)
      .def("collect", &Table::collect)
      .def("accumulate", &Table::accumulate)
      .def("sum_up", &Table::sum_up)
      .def("measure_gradients", &Table::measure_gradients)
      .def("prepare", &Table::prepare)
      .def("step", &Table::step)
      .def("step_row", &Table::step_one)
      .def("drop_gradients", &Table::drop_gradients)
      .def("release", &Table::release);

  m.def("accumulate_lists", &accumulate_lists);
  m.def("step_lists", &step_lists);
}

}  // namespace fa
