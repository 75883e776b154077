// fused_accum._C_cuda: what Python sees of the native code for CUDA. Imports where there is no driver.
//
// Built with FA_CUDA_EMULATION, the same sources run on CPU tensors as if they were on a device: DEVICE_TYPE is "cpu",
// so that fused_accum/backends/cuda.py takes those, at Place(1, 0), under any device number and stream.
#include "bindings.h"
#include "cuda_launch.h"

namespace fa {
namespace {

// See Backend.scatter_rows and ScatterJob; rows and order: addresses of as many int64 as grad has rows.
void scatter_rows(py::object accum, uintptr_t rows, uintptr_t order, py::object grad, int64_t skip, int device,
                  uint64_t stream) {
  const Matrices m(accum, grad);
  if ((m.accum.dtype == DType::f64) != (m.grad.dtype == DType::f64)) {
    throw std::invalid_argument("accum and grad must both be float64, or neither");
  }
  ScatterJob job;
  job.accum = static_cast<char*>(m.accum.data);
  job.grad = static_cast<const char*>(m.grad.data);
  job.rows = reinterpret_cast<const int64_t*>(rows);
  job.order = reinterpret_cast<const int64_t*>(order);
  job.tokens = m.grad.sizes[0];
  job.width = m.grad.sizes[1];
  job.row_count = m.accum.sizes[0];
  job.skip = skip;
  job.accum_dtype = m.accum.dtype;
  job.grad_dtype = m.grad.dtype;
  cuda_scatter_rows(device, stream, job);
}

}  // namespace
}  // namespace fa

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() = "CUDA kernels of fused_accum; knows no torch.";
  fa::bind_tables(m);
  m.def("why_not", &fa::why_no_cuda, py::arg("device"));
#if defined(FA_CUDA_EMULATION)
  m.attr("DEVICE_TYPE") = "cpu";
#else
  m.attr("DEVICE_TYPE") = "cuda";
#endif
  m.attr("SLOT_BYTES") = sizeof(fa::ScalarSlot);
  m.def("squares_for", &fa::CudaExecutor::squares_for, py::arg("rows"), py::arg("elements"));
  m.def("scatter_rows", &fa::scatter_rows);
  py::class_<fa::CudaExecutor, fa::Executor>(m, "Cuda", py::module_local())
      .def(py::init([](int device, uint64_t stream, uint64_t slots, int64_t slot_count, uint64_t found_inf,
                       uint64_t clip, uint64_t counts, uint64_t scale, uint64_t squares, int64_t square_count) {
             return std::make_unique<fa::CudaExecutor>(
                 device, stream, fa::CudaExecutor::Scratch{slots, slot_count, squares, square_count},
                 fa::CudaExecutor::Factors{found_inf, clip, counts, scale});
           }),
           py::arg("device"), py::arg("stream"), py::arg("slots") = 0, py::arg("slot_count") = 0,
           py::arg("found_inf") = 0, py::arg("clip") = 0, py::arg("counts") = 0, py::arg("scale") = 0,
           py::arg("squares") = 0, py::arg("square_count") = 0);
}
