// fused_accum._C: tables of tensors, which any executor runs, and that for the CPU.
#include <stdexcept>

#include "bindings.h"
#include "hook.h"
#include "product.h"

namespace fa {
namespace {

// See ScatterJob; rows and order: addresses of as many int64 as grad has rows, order may be 0.
void scatter_rows(py::object accum, uintptr_t rows, uintptr_t order, py::object grad, int64_t skip, Executor& executor,
                  Place place) {
  const Matrices m(accum, grad);
  if (!(m.accum.place == place)) throw std::invalid_argument("accum and grad must be on the device of this backend");
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
  py::gil_scoped_release release;
  executor.scatter_rows(job);
}

// Whether `t` is a matrix whose elements of a row lie one after the other: a tensor as an operand of a product.
bool read_operand(const py::object& tensor, TensorInfo& t) {
  return read_tensor(tensor.ptr(), t) && t.place == kCpu && t.ndim == 2 && (t.sizes[1] < 2 || t.strides[1] == 1);
}

// buffer += left^T right, see cpu_add_product; false, with nothing done, for tensors that it is not for.
bool add_product(py::object buffer, py::object left, py::object right, bool first, int threads) {
  TensorInfo b, l, r;
  if (!read_operand(buffer, b) || !read_operand(left, l) || !read_operand(right, r)) return false;
  if (b.dtype != DType::f32 || !is_row_major(b) || l.dtype != r.dtype || size_of(l.dtype) > 4 || l.dtype == DType::i16) {
    return false;
  }
  const int64_t tokens = l.sizes[0];
  if (!tokens || r.sizes[0] != tokens || l.sizes[1] != b.sizes[0] || r.sizes[1] != b.sizes[1]) return false;
  py::gil_scoped_release release;
  cpu_add_product(static_cast<float*>(b.data), b.sizes[0], b.sizes[1], {l.data, l.dtype}, l.strides[0],
                  {r.data, r.dtype}, r.strides[0], tokens, first, threads);
  return true;
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
  m.def("Cpu", [](int threads) {
    PyObject* executor = fa::executor_capsule(std::make_unique<fa::CpuExecutor>(threads));
    if (!executor) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(executor);
  }, py::arg("threads"), "An executor for the CPU.");
  m.def("same_objects", &fa::same_objects);
  m.def("scatter_rows", &fa::scatter_rows);
  m.def("has_product", &fa::has_product);
  m.attr("TERM_TOKENS") = fa::kTermTokens;
  m.def("add_product", &fa::add_product);
  m.def("hook_types", [](py::object current_task_id) {
    PyObject* types = fa::hook_types(current_task_id.ptr());
    if (!types) throw py::error_already_set();
    return py::reinterpret_steal<py::tuple>(types);
  }, py::arg("current_task_id"));
}
