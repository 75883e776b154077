// fused_accum._C: what Python sees of the native code for the CPU.
#include <stdexcept>

#include "bindings.h"
#include "scatter.h"

namespace fa {
namespace {

// accum[index[t]] += grad[t], see cpu_scatter_rows: both tensors of two contiguous dimensions; index: address of int64.
void scatter_rows(py::object accum, uintptr_t index, py::object grad, int64_t skip, int threads) {
  TensorInfo a, g;
  for (auto [tensor, info] : {std::pair(&accum, &a), std::pair(&grad, &g)}) {
    const bool usable = read_tensor(tensor->ptr(), *info) && info->place == kCpu && info->ndim == 2 &&
                        (info->numel == 0 || (info->strides[1] == 1 || info->sizes[1] == 1)) &&
                        (info->numel == 0 || info->sizes[0] == 1 || info->strides[0] == info->sizes[1]);
    if (!usable) throw std::invalid_argument("accum and grad must be contiguous CPU matrices of a supported dtype");
  }
  if (a.sizes[1] != g.sizes[1]) throw std::invalid_argument("accum and grad must have rows of one length");
  py::gil_scoped_release release;
  cpu_scatter_rows(a.data, a.dtype, a.sizes[0], reinterpret_cast<const int64_t*>(index), g.data, g.dtype, g.sizes[0],
                   g.sizes[1], skip, threads);
}

}  // namespace
}  // namespace fa

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
