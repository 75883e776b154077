// fused_accum._C: what Python sees of the native code for the CPU.
#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of fused_accum; knows no torch.";

  m.def("cpu_isa", [] { return fa::cpu_kernels().name; }, "The CPU instruction set in use.");
  m.def("use_cpu_isa", &fa::use_cpu_isa, py::arg("name"));
  m.def("cpu_isas", [] {
    py::dict isas;
    for (const char* isa : fa::kCpuIsas) isas[isa] = fa::why_not_cpu_isa(isa);
    return isas;
  }, "Every CPU instruction set: \"\" where it can be used, else why not.");

  fa::bind_tables(m);
  py::class_<fa::CpuExecutor, fa::Executor>(m, "Cpu", py::module_local()).def(py::init<int>(), py::arg("threads"));
  m.def("same_objects", &fa::same_objects);
  m.def("scatter_rows", &fa::scatter_rows);
}
