// fused_accum._C: what Python sees of the native code.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels.h"
#include "table.h"
#include "tensor_info.h"

namespace py = pybind11;
using fa::Hyper;
using fa::Table;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of fused_accum; knows no torch.";

  m.def("set_tensor_class", [](py::object cls) { fa::set_tensor_class(cls.ptr()); });
  m.def("has_exchange_api", &fa::has_exchange_api);

  m.def("cpu_isa", [] { return fa::cpu_kernels().name; }, "The CPU instruction set in use.");
  m.def("use_cpu_isa", &fa::use_cpu_isa, py::arg("name"));
  m.def("cpu_isas", [] {
    py::dict isas;
    for (const char* isa : fa::kCpuIsas) isas[isa] = fa::why_not_cpu_isa(isa);
    return isas;
  }, "Every CPU instruction set: \"\" where it can be used, else why not.");

  m.def("same_objects", &fa::same_objects);

  py::class_<Hyper>(m, "Hyper").def(py::init<py::tuple>());

  py::class_<Table>(m, "Table")
      .def(py::init<py::list, std::vector<int>, py::object>())
      .def("accept", &Table::accept)
      .def("collect", &Table::collect)
      .def("accumulate", &Table::accumulate)
      .def("prepare", &Table::prepare)
      .def("step", &Table::step)
      .def("step_row", &Table::step_row)
      .def("drop_gradients", &Table::drop_gradients)
      .def("release", &Table::release);

  m.def("accumulate_lists", &fa::accumulate_lists);
  m.def("step_lists", &fa::step_lists);
  m.def("scatter_rows", &fa::scatter_rows);
}
