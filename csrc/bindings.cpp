// fused_accum._C: tables of tensors, which any executor runs, and that for the CPU.
#include <new>
#include <stdexcept>
#include <utility>

#include "calls.h"
#include "exchange.h"
#include "hook.h"
#include "product.h"
#include "table.h"

namespace fa {

void set_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an error of unknown type");
  }
}

void refuse_argument(PyObject* object, const char* wanted) {
  PyErr_Format(PyExc_TypeError, "%s was expected, not %s", wanted, Py_TYPE(object)->tp_name);
  throw PythonError();
}

namespace {

// -- instruction sets -------------------------------------------------------------------------------------------------

const char* cpu_isa() { return cpu_kernels().name; }

PyObject* cpu_isas() {
  Object isas = checked(PyDict_New());
  for (const char* isa : kCpuIsas) {
    const Object why_not = checked(PyUnicode_FromString(why_not_cpu_isa(isa)));
    if (PyDict_SetItemString(isas.get(), isa, why_not.get())) throw PythonError();
  }
  return isas.release();
}

PyObject* cpu(int threads) { return executor_capsule(std::make_unique<CpuExecutor>(threads)); }

// -- tensors ----------------------------------------------------------------------------------------------------------

void bind_tensor_class(PyObject* cls, std::optional<int> best) {
  set_tensor_class(cls, best ? static_cast<Way>(*best) : Way::libtorch);
}

int way() { return static_cast<int>(way_taken()); }

// See ScatterJob. accum and grad: matrices, row after row, with rows of one length; rows and order: addresses of as
// many int64 as grad has rows, order may be 0.
void scatter_rows(PyObject* accum, uintptr_t rows, uintptr_t order, PyObject* grad, int64_t skip, Executor& executor,
                  Place place) {
  TensorInfo a, g;
  for (auto [tensor, info] : {std::pair(accum, &a), std::pair(grad, &g)}) {
    const bool usable =
        read_tensor(tensor, *info) && info->dtype != DType::i16 && info->ndim == 2 && is_row_major(*info);
    if (!usable) throw std::invalid_argument("accum and grad must be contiguous matrices of a supported dtype");
  }
  if (a.sizes[1] != g.sizes[1]) throw std::invalid_argument("accum and grad must have rows of one length");
  if (!(a.place == place && g.place == place)) {
    throw std::invalid_argument("accum and grad must be on the device of this backend");
  }
  ScatterJob job;
  job.accum = static_cast<char*>(a.data);
  job.grad = static_cast<const char*>(g.data);
  job.rows = reinterpret_cast<const int64_t*>(rows);
  job.order = reinterpret_cast<const int64_t*>(order);
  job.tokens = g.sizes[0];
  job.width = g.sizes[1];
  job.row_count = a.sizes[0];
  job.skip = skip;
  job.accum_dtype = a.dtype;
  job.grad_dtype = g.dtype;
  ReleaseGil release;
  executor.scatter_rows(job);
}

// Whether `t` is a matrix whose elements of a row lie one after the other: a tensor as an operand of a product.
bool read_operand(PyObject* tensor, TensorInfo& t) {
  return read_tensor(tensor, t) && t.place == kCpu && t.ndim == 2 && (t.sizes[1] < 2 || t.strides[1] == 1);
}

// buffer += left^T right, see cpu_add_product; false, with nothing done, for tensors that it is not for.
bool add_product(PyObject* buffer, PyObject* left, PyObject* right, bool first, int threads) {
  TensorInfo b, l, r;
  if (!read_operand(buffer, b) || !read_operand(left, l) || !read_operand(right, r)) return false;
  if (b.dtype != DType::f32 || !is_row_major(b) || l.dtype != r.dtype || size_of(l.dtype) > 4 || l.dtype == DType::i16) {
    return false;
  }
  const int64_t tokens = l.sizes[0];
  if (!tokens || r.sizes[0] != tokens || l.sizes[1] != b.sizes[0] || r.sizes[1] != b.sizes[1]) return false;
  ReleaseGil release;
  cpu_add_product(static_cast<float*>(b.data), b.sizes[0], b.sizes[1], {l.data, l.dtype}, l.strides[0],
                  {r.data, r.dtype}, r.strides[0], tokens, first, threads);
  return true;
}

// -- what a table is made of ------------------------------------------------------------------------------------------

std::unique_ptr<Place> make_place(int type, int index) { return std::make_unique<Place>(Place{type, index}); }

// device_lr: an address.
std::unique_ptr<Hyper> make_hyper(Tuple values, std::optional<uint64_t> device_lr, std::optional<bool> lr_is_double) {
  return std::make_unique<Hyper>(hyper_from(values, device_lr.value_or(0), lr_is_double.value_or(false)));
}

std::unique_ptr<Table> make_table(List params, std::vector<int> groups, PyObject* increment_version, Place place,
                                  std::vector<uint32_t> indices, int weights, uint64_t seed) {
  return std::make_unique<Table>(params, std::move(groups), Object::borrowed(increment_version), place,
                                 std::move(indices), weights, seed);
}

PyMethodDef no_methods[] = {{}};
PyMethodDef table_methods[] = {bound<&Table::accept>("accept"),
                               bound<&Table::collect>("collect"),
                               bound<&Table::gradients>("gradients"),
                               bound<&Table::stepping>("stepping"),
                               bound<&Table::sizes>("sizes"),
                               bound<&Table::accumulate>("accumulate"),
                               bound<&Table::sum_up>("sum_up"),
                               bound<&Table::measure_gradients>("measure_gradients"),
                               bound<&Table::prepare>("prepare"),
                               bound<&Table::step>("step"),
                               bound<&Table::step_one>("step_row"),
                               bound<&Table::drop_gradients>("drop_gradients"),
                               bound<&Table::release>("release"),
                               bound<&Table::progress>("progress"),
                               {}};
PyMethodDef functions[] = {bound<cpu_isa>("cpu_isa", "The CPU instruction set in use."),
                           bound<use_cpu_isa>("use_cpu_isa"),
                           bound<cpu_isas>("cpu_isas", "Every CPU instruction set: \"\" where it can be used, else why not."),
                           bound<cpu>("Cpu", "An executor for the CPU, of as many threads."),
                           bound<bind_tensor_class>("set_tensor_class"),
                           bound<way>("way_taken"),
                           bound<counts_versions>("counts_versions"),
                           bound<hook_types>("hook_types"),
                           bound<same_objects>("same_objects"),
                           bound<scatter_rows>("scatter_rows"),
                           bound<has_product>("has_product"),
                           bound<add_product>("add_product"),
                           bound<accumulate_lists>("accumulate_lists"),
                           bound<step_lists>("step_lists"),
                           {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "Native kernels of fused_accum; knows no torch.", -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fa

PyMODINIT_FUNC PyInit__C() {
  fa::Object module(PyModule_Create(&fa::definition));
  if (!module) return nullptr;
  try {
    fa::add_type<fa::make_place>(module.get(), "fused_accum._C.Place", fa::no_methods);
    fa::add_type<fa::make_hyper>(module.get(), "fused_accum._C.Hyper", fa::no_methods);
    fa::add_type<fa::make_table>(module.get(), "fused_accum._C.Table", fa::table_methods);
  } catch (...) {
    fa::set_python_error();
    return nullptr;
  }
  if (PyModule_AddIntConstant(module.get(), "TERM_TOKENS", fa::kTermTokens)) return nullptr;
  return module.release();
}
