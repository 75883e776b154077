// Tables, and the kernels as functions on lists of tensors, for Python.
#include "bindings.h"

#include <pybind11/stl.h>

namespace fa {

void bind_tables(py::module_& m) {
  m.def("set_tensor_class", [](py::object cls, int way) { set_tensor_class(cls.ptr(), static_cast<Way>(way)); },
        py::arg("cls"), py::arg("way") = static_cast<int>(Way::libtorch));
  m.def("way_taken", [] { return static_cast<int>(way_taken()); });
  m.def("counts_versions", &counts_versions);

  py::class_<Place>(m, "Place")
      .def(py::init([](int type, int index) { return Place{type, index}; }), py::arg("type"), py::arg("index"));
  py::class_<Hyper>(m, "Hyper")
      .def(py::init(&hyper_from), py::arg("hyper"), py::arg("device_lr") = 0, py::arg("device_lr_is_double") = false);

  py::class_<Table>(m, "Table")
      .def(py::init<py::list, std::vector<int>, py::object, Place, std::vector<uint32_t>, int, uint64_t>())
      .def("accept", &Table::accept)
      .def("collect", &Table::collect)
      .def("gradients", &Table::gradients)
      .def("stepping", &Table::stepping)
      .def("sizes", &Table::sizes)
      .def("accumulate", &Table::accumulate)
      .def("sum_up", &Table::sum_up)
      .def("measure_gradients", &Table::measure_gradients)
      .def("prepare", &Table::prepare)
      .def("step", &Table::step)
      .def("step_row", &Table::step_one)
      .def("drop_gradients", &Table::drop_gradients)
      .def("release", &Table::release)
      .def("progress", &Table::progress);

  m.def("accumulate_lists", &accumulate_lists);
  m.def("step_lists", &step_lists);
}

}  // namespace fa
