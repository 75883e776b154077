#include "table.h"

#include <algorithm>
#include <cmath>

namespace fa {
namespace {

// Attribute names, interned once.
struct Names {
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* step = PyUnicode_InternFromString("step");
  PyObject* exp_avg = PyUnicode_InternFromString("exp_avg");
  PyObject* exp_avg_sq = PyUnicode_InternFromString("exp_avg_sq");
  PyObject* max_exp_avg_sq = PyUnicode_InternFromString("max_exp_avg_sq");
};

const Names& names() {
  static const Names all;
  return all;
}

py::object attribute(const py::object& of, PyObject* name) {
  PyObject* value = PyObject_GetAttr(of.ptr(), name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool is_true(py::object value) { return value.ptr() == Py_True; }

py::object item(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value ? py::reinterpret_borrow<py::object>(value) : py::none();
}

char* bytes_of(const py::bytearray& array) { return PyByteArray_AS_STRING(array.ptr()); }

bool has_internal_overlap(const TensorInfo& t) {
  for (int d = 0; d < t.ndim; ++d) {
    if (t.strides[d] == 0 && t.sizes[d] > 1) return true;
  }
  return false;
}

}  // namespace

Hyper::Hyper(py::handle tuple) {
  auto at = [&](int i) { return tuple.attr("__getitem__")(i); };
  lr = at(0).cast<double>();
  beta1 = at(1).cast<double>();
  beta2 = at(2).cast<double>();
  eps = at(3).cast<double>();
  weight_decay = at(4).cast<double>();
  maximize = at(5).cast<bool>();
  amsgrad = at(6).cast<bool>();
}

StepScalars<double> Hyper::scalars(double t, double scale, double coefficient) const {
  StepScalars<double> s;
  s.scale = scale;
  s.coefficient = maximize ? -coefficient : coefficient;
  s.decay = 1 - lr * weight_decay;
  s.one_minus_beta1 = 1 - beta1;
  s.minus_beta1 = -beta1;
  s.beta2 = beta2;
  s.one_minus_beta2 = 1 - beta2;
  s.minus_step_size = -lr / (1 - std::pow(beta1, t));
  s.inverse_sqrt_bias_correction2 = 1 / std::sqrt(1 - std::pow(beta2, t));
  s.eps = eps;
  return s;
}

Table::Table(py::list params, std::vector<int> groups, py::object increment_version)
    : entries_(params.size()), increment_version_(std::move(increment_version)) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].param = params[i];
    entries_[i].group = groups.at(i);
  }
}

void Table::accept(py::object type) { accepted_.push_back(std::move(type)); }

bool Table::plain(PyObject* tensor) const {
  for (const py::object& type : accepted_) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.ptr()) return true;
  }
  return false;
}

bool Table::readable(const py::object& tensor, TensorInfo& info) const {
  return plain(tensor.ptr()) && read_tensor(tensor.ptr(), info) && info.on_cpu;
}

bool Table::usable_gradient(const Entry& e) const {
  if (!same_sizes(e.g, e.p) || is_true(attribute(e.grad, names().requires_grad))) return false;
  PyObject* negated = PyObject_CallMethodNoArgs(e.grad.ptr(), names().is_neg);
  if (!negated) throw py::error_already_set();
  return !is_true(py::reinterpret_steal<py::object>(negated));
}

std::pair<Py_ssize_t, Py_ssize_t> Table::collect(py::list accums, py::bytearray present, py::bytearray dtypes,
                                                 bool buffers) {
  Py_ssize_t found = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    e.grad = attribute(e.param, names().grad);
    const bool has_grad = !e.grad.is_none();
    const bool has_accum = bytes_of(present)[i] != 0;
    if (!has_grad && !has_accum) continue;
    found += has_grad;
    const std::pair<Py_ssize_t, Py_ssize_t> attention(found, Py_ssize_t(i));
    if (!readable(e.param, e.p) || has_internal_overlap(e.p)) return attention;
    if (has_grad && !(readable(e.grad, e.g) && usable_gradient(e))) return attention;
    PyObject* accum = PyList_GET_ITEM(accums.ptr(), Py_ssize_t(i));
    if (accum != e.accum.ptr()) {  // ours, and never moved: read once
      e.accum = py::reinterpret_borrow<py::object>(accum);
      if (accum != Py_None && !readable(e.accum, e.a)) return attention;
    }
    if (!has_accum && !buffers) continue;
    if (accum == Py_None || !same_sizes(e.a, e.p) || bytes_of(dtypes)[i] != char(e.p.dtype)) return attention;
  }
  return {found, kAllRight};
}

// Operands of one row: in one linear pass where all have the same dense strides, else each by its own.
void Table::fill(Row& row, const Entry& e, bool steps) const {
  struct Part {
    Operand* operand;
    const TensorInfo* info;
  };
  const Part parts[] = {{row.has_grad ? &row.grad : nullptr, &e.g},
                        {row.has_accum || !steps ? &row.accum : nullptr, &e.a},
                        {steps ? &row.param : nullptr, &e.p},
                        {steps ? &row.exp_avg : nullptr, &e.m},
                        {steps ? &row.exp_avg_sq : nullptr, &e.v},
                        {steps && row.amsgrad ? &row.max_exp_avg_sq : nullptr, &e.v_max}};
  const TensorInfo& model = steps ? e.p : e.a;
  bool linear = is_dense(model);
  for (const Part& part : parts) {
    if (!part.operand) continue;
    part.operand->data = part.info->data;
    part.operand->dtype = part.info->dtype;
    linear = linear && same_strides(*part.info, model);
  }
  row.numel = model.numel;
  row.ndim = model.ndim;
  row.sizes = model.sizes;
  for (const Part& part : parts) {
    if (part.operand) part.operand->strides = linear ? nullptr : part.info->strides;
  }
}

void Table::bump(const std::vector<PyObject*>& written) const {
  py::tuple tensors(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    PyTuple_SET_ITEM(tensors.ptr(), Py_ssize_t(i), py::reinterpret_borrow<py::object>(written[i]).release().ptr());
  }
  increment_version_(tensors);
}

void Table::accumulate(py::bytearray present, double scale, int threads) {
  std::vector<Row> rows;
  std::vector<PyObject*> written;
  rows.reserve(entries_.size());
  written.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.grad || e.grad.is_none()) continue;
    Row row;
    row.has_grad = true;
    row.has_accum = bytes_of(present)[i] != 0;
    fill(row, e, false);
    rows.push_back(row);
    written.push_back(e.accum.ptr());
  }
  {
    py::gil_scoped_release release;
    cpu_accumulate(rows.data(), int64_t(rows.size()), scale, threads);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].grad && !entries_[i].grad.is_none()) bytes_of(present)[i] = 1;
  }
  drop_gradients();
  bump(written);
}

bool Table::read_state(Entry& e, PyObject* state, const Hyper& hyper) const {
  if (!state || !PyDict_Check(state)) return false;
  auto moment = [&](py::object& tensor, TensorInfo& info, PyObject* name) {
    tensor = item(state, name);
    return !tensor.is_none() && readable(tensor, info) && same_sizes(info, e.p) && !has_internal_overlap(info);
  };
  if (!moment(e.exp_avg, e.m, names().exp_avg) || !moment(e.exp_avg_sq, e.v, names().exp_avg_sq)) return false;
  if (hyper.amsgrad && !moment(e.max_exp_avg_sq, e.v_max, names().max_exp_avg_sq)) return false;
  TensorInfo step;
  e.step = item(state, names().step);
  if (e.step.is_none() || !readable(e.step, step) || step.numel != 1) return false;
  e.step_data = step.data;
  e.step_is_double = step.dtype == DType::f64;
  return step.dtype == DType::f32 || step.dtype == DType::f64;
}

Py_ssize_t Table::prepare(py::dict state, const std::vector<Hyper>& hypers, py::bytearray present) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    e.steps = (e.grad && !e.grad.is_none()) || bytes_of(present)[i] != 0;
    if (!e.steps) continue;
    PyObject* own = PyDict_GetItemWithError(state.ptr(), e.param.ptr());
    if (!own && PyErr_Occurred()) throw py::error_already_set();
    if (!read_state(e, own, hypers.at(size_t(e.group)))) return Py_ssize_t(i);
  }
  return kAllRight;
}

bool Table::parameters_overlap() {
  bool same = true;
  for (Entry& e : entries_) {
    if (!e.steps || e.param_data_seen == e.p.data) continue;
    e.param_data_seen = e.p.data;
    same = false;
  }
  if (same) return overlap_;
  std::vector<std::pair<char*, char*>> spans;  // first byte, one past the last
  for (const Entry& e : entries_) {
    if (!e.param_data_seen) continue;
    if (!e.p.numel) continue;
    int64_t last = 0;
    for (int d = 0; d < e.p.ndim; ++d) last += (e.p.sizes[d] - 1) * e.p.strides[d];
    char* first = static_cast<char*>(e.p.data);
    spans.emplace_back(first, first + (last + 1) * int64_t(size_of(e.p.dtype)));
  }
  std::sort(spans.begin(), spans.end());
  overlap_ = false;
  for (size_t i = 1; i < spans.size(); ++i) overlap_ = overlap_ || spans[i].first < spans[i - 1].second;
  return overlap_;
}

void Table::step(const std::vector<Hyper>& hypers, py::bytearray present, int accum_dtype, double scale,
                 double coefficient, int threads) {
  std::vector<Row> rows;
  std::vector<PyObject*> written;
  rows.reserve(entries_.size());
  written.reserve(entries_.size() * 6);
  int group_before = -1;
  double t_before = 0;
  StepScalars<double> scalars{};
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!e.steps) continue;
    const Hyper& hyper = hypers.at(size_t(e.group));
    double t;
    if (e.step_is_double) {
      t = *static_cast<double*>(e.step_data) += 1;
    } else {
      t = *static_cast<float*>(e.step_data) += 1;
    }
    if (e.group != group_before || t != t_before) scalars = hyper.scalars(t, scale, coefficient);
    group_before = e.group;
    t_before = t;

    Row row;
    row.has_grad = !e.grad.is_none();
    row.has_accum = bytes_of(present)[i] != 0;
    row.amsgrad = hyper.amsgrad;
    row.accum_dtype = e.p.dtype == DType::f64 ? DType::f64 : static_cast<DType>(accum_dtype);
    row.scalars = scalars;
    fill(row, e, true);
    rows.push_back(row);
    for (const py::object* tensor : {&e.param, &e.exp_avg, &e.exp_avg_sq, &e.step}) written.push_back(tensor->ptr());
    if (row.amsgrad) written.push_back(e.max_exp_avg_sq.ptr());
    if (row.has_accum) written.push_back(e.accum.ptr());
  }
  const bool one_by_one = parameters_overlap();  // as torch updates them, one after the other
  {
    py::gil_scoped_release release;
    if (one_by_one) {
      for (const Row& row : rows) cpu_step(&row, 1, threads);
    } else {
      cpu_step(rows.data(), int64_t(rows.size()), threads);
    }
  }
  std::fill_n(bytes_of(present), entries_.size(), 0);
  drop_gradients();
  bump(written);
}

void Table::drop_gradients() {
  for (Entry& e : entries_) {
    if (!e.grad || e.grad.is_none()) continue;
    if (PyObject_SetAttr(e.param.ptr(), names().grad, Py_None) != 0) throw py::error_already_set();
  }
  release();
}

void Table::release() {
  for (Entry& e : entries_) e.grad = py::object();
}

}  // namespace fa
