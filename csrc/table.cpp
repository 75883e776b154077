#include "table.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fa {
namespace {

// Attribute names, interned once.
struct Names {
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

// `owned`, which Python has just returned.
py::object checked(PyObject* owned) {
  if (!owned) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(owned);
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

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

// Operands of one row: in one linear pass where all have the same dense strides, else each by its own.
void fill(Row& row, const Entry& e, bool steps) {
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

bool read_step(Entry& e, const TensorInfo& step) {
  e.step_data = step.data;
  e.step_is_double = step.dtype == DType::f64;
  return step.numel == 1 && step.on_cpu && (step.dtype == DType::f32 || step.dtype == DType::f64);
}

// Rows of one step; adding one counts its update.
struct StepRows {
  const std::vector<Hyper>& hypers;
  double scale, coefficient;
  std::vector<Row> rows;
  int group_before = -1;
  double t_before = 0;
  StepScalars<double> scalars{};

  void add(const Entry& e, bool has_accum, DType accum_dtype) {
    const Hyper& hyper = hypers.at(size_t(e.group));
    const double t = e.step_is_double ? *static_cast<double*>(e.step_data) += 1
                                      : double(*static_cast<float*>(e.step_data) += 1);
    if (e.group != group_before || t != t_before) scalars = hyper.scalars(t, scale, coefficient);
    group_before = e.group;
    t_before = t;
    Row row;
    row.has_grad = e.has_grad();
    row.has_accum = has_accum;
    row.amsgrad = hyper.amsgrad;
    row.accum_dtype = e.p.dtype == DType::f64 ? DType::f64 : accum_dtype;
    row.scalars = scalars;
    fill(row, e, true);
    rows.push_back(row);
  }

  void run(bool one_by_one, int threads) const {
    py::gil_scoped_release release;
    if (one_by_one) {
      for (const Row& row : rows) cpu_step(&row, 1, threads);
    } else {
      cpu_step(rows.data(), int64_t(rows.size()), threads);
    }
  }
};

// Whether parameters share memory; they are then updated one after the other, as torch does.
bool overlap(const std::vector<Entry>& entries) {
  std::vector<std::pair<char*, char*>> spans;  // first byte, one past the last
  for (const Entry& e : entries) {
    if (!e.p.data || !e.p.numel) continue;
    int64_t last = 0;
    for (int d = 0; d < e.p.ndim; ++d) last += (e.p.sizes[d] - 1) * e.p.strides[d];
    char* first = static_cast<char*>(e.p.data);
    spans.emplace_back(first, first + (last + 1) * int64_t(size_of(e.p.dtype)));
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return true;
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

void Table::accept(py::object type) {
  for (const py::object& known : accepted_) {
    if (known.is(type)) return;
  }
  accepted_.push_back(std::move(type));
}

bool Table::plain(PyObject* tensor) const {
  for (const py::object& type : accepted_) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.ptr()) return true;
  }
  return false;
}

bool Table::readable(const py::object& tensor, TensorInfo& info) const {
  return plain(tensor.ptr()) && read_tensor(tensor.ptr(), info) && info.on_cpu;
}

// Whether a lazily negated tensor could look like t: torch makes those as views of every other element, so that one
// with several elements cannot be row-major to the letter. Spares a call for every ordinary gradient.
bool may_be_negated(const TensorInfo& t) {
  int64_t expected = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.strides[d] != expected) return true;
    expected *= t.sizes[d];
  }
  return t.numel == 1;
}

bool Table::usable_gradient(const Entry& e) const {
  if (is_true(checked(tensor_attributes().requires_grad.get(e.grad.ptr())))) return false;
  if (!may_be_negated(e.g)) return true;
  return !is_true(checked(PyObject_CallMethodNoArgs(e.grad.ptr(), names().is_neg)));
}

std::pair<Py_ssize_t, Py_ssize_t> Table::collect(py::list accums, py::bytearray present, py::bytearray dtypes,
                                                 bool buffers) {
  Py_ssize_t found = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!plain(e.param.ptr())) return {found, Py_ssize_t(i)};
    e.grad = checked(tensor_attributes().grad.get(e.param.ptr()));
    const bool has_grad = !e.grad.is_none();
    const bool has_accum = bytes_of(present)[i] != 0;
    if (!has_grad && !has_accum) continue;
    found += has_grad;
    const std::pair<Py_ssize_t, Py_ssize_t> attention(found, Py_ssize_t(i));
    if (has_grad && !(readable(e.grad, e.g) && usable_gradient(e))) return attention;
    PyObject* accum = PyList_GET_ITEM(accums.ptr(), Py_ssize_t(i));
    if (accum != e.accum.ptr()) {  // ours, and never moved: read once
      e.accum = py::reinterpret_borrow<py::object>(accum);
      if (accum != Py_None && !readable(e.accum, e.a)) return attention;
    }
    if (buffers && accum == Py_None) return attention;
    const DType dtype_then = static_cast<DType>(bytes_of(dtypes)[i]);
    // A gradient like the parameter the buffer was made for: so is the parameter, and only a step reads it.
    if (buffers && has_grad && e.g.dtype == dtype_then && same_sizes(e.g, e.a)) continue;
    if (!readable(e.param, e.p) || has_internal_overlap(e.p)) return attention;
    if (has_grad && !same_sizes(e.g, e.p)) return attention;
    if ((has_accum || buffers) && (dtype_then != e.p.dtype || !same_sizes(e.a, e.p))) return attention;
  }
  return {found, kAllRight};
}

void Table::accumulate(py::bytearray present, double scale, int threads) {
  std::vector<Row> rows;
  rows.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.has_grad()) continue;
    Row row;
    row.has_grad = true;
    row.has_accum = bytes_of(present)[i] != 0;
    fill(row, e, false);
    rows.push_back(row);
  }
  {
    py::gil_scoped_release release;
    cpu_accumulate(rows.data(), int64_t(rows.size()), scale, threads);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].has_grad()) bytes_of(present)[i] = 1;
  }
  drop_gradients();  // nobody else sees the buffers: their version counters stay
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
  return !e.step.is_none() && readable(e.step, step) && read_step(e, step);
}

// The state of each parameter, found without hashing where `state` lists parameters in the table's order.
class StateWalk {
 public:
  explicit StateWalk(PyObject* state) : state_(state) { advance(); }

  PyObject* find(PyObject* param) {  // borrowed; null when there is none
    while (key_ && key_ != param) advance();
    if (!key_) {
      PyObject* own = PyDict_GetItemWithError(state_, param);
      if (!own && PyErr_Occurred()) throw py::error_already_set();
      return own;
    }
    PyObject* own = value_;
    advance();
    return own;
  }

 private:
  void advance() {
    if (!PyDict_Next(state_, &position_, &key_, &value_)) key_ = nullptr;
  }

  PyObject* state_;
  PyObject* key_ = nullptr;
  PyObject* value_ = nullptr;
  Py_ssize_t position_ = 0;
};

Py_ssize_t Table::prepare(py::dict state, const std::vector<Hyper>& hypers, py::bytearray present) {
  StateWalk walk(state.ptr());
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    e.steps = e.has_grad() || bytes_of(present)[i] != 0;
    if (!e.steps) continue;
    if (!read_state(e, walk.find(e.param.ptr()), hypers.at(size_t(e.group)))) return Py_ssize_t(i);
  }
  return kAllRight;
}

bool Table::parameters_overlap() {
  bool moved = false;
  for (Entry& e : entries_) {
    if (!e.steps || e.param_data_seen == e.p.data) continue;
    e.param_data_seen = e.p.data;
    moved = true;
  }
  if (moved) overlap_ = overlap(entries_);
  return overlap_;
}

void Table::step(const std::vector<Hyper>& hypers, py::bytearray present, int accum_dtype, double scale,
                 double coefficient, int threads) {
  StepRows step{hypers, scale, coefficient};
  step.rows.reserve(entries_.size());
  std::vector<PyObject*> written;  // the buffers' version counters stay: nobody else sees them
  written.reserve(entries_.size() * 5);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    step.add(e, bytes_of(present)[i] != 0, static_cast<DType>(accum_dtype));
    for (const py::object* tensor : {&e.param, &e.exp_avg, &e.exp_avg_sq, &e.step}) written.push_back(tensor->ptr());
    if (step.rows.back().amsgrad) written.push_back(e.max_exp_avg_sq.ptr());
  }
  step.run(parameters_overlap(), threads);
  std::fill_n(bytes_of(present), entries_.size(), 0);
  drop_gradients();
  py::tuple tensors(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    Py_INCREF(written[i]);
    PyTuple_SET_ITEM(tensors.ptr(), Py_ssize_t(i), written[i]);
  }
  increment_version_(tensors);
}

void Table::drop_gradients() {
  for (Entry& e : entries_) {
    if (!e.has_grad()) continue;
    if (tensor_attributes().grad.set(e.param.ptr(), Py_None) != 0) throw py::error_already_set();
  }
  release();
}

void Table::release() {
  for (Entry& e : entries_) e.grad = py::object();
}

namespace {

void read_item(const py::list& list, size_t i, py::object& object, TensorInfo& info, const char* what) {
  object = list[i];
  if (object.is_none()) return;
  if (!read_tensor(object.ptr(), info) || !info.on_cpu) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(i) + " is not a CPU tensor of a supported dtype");
  }
}

}  // namespace

void accumulate_lists(py::list accums, py::list grads, const std::vector<bool>& first, double scale, int threads) {
  std::vector<Entry> entries(accums.size());
  std::vector<Row> rows(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    read_item(accums, i, entries[i].accum, entries[i].a, "accum");
    read_item(grads, i, entries[i].grad, entries[i].g, "grad");
    rows[i].has_grad = true;
    rows[i].has_accum = !first.at(i);
    fill(rows[i], entries[i], false);
  }
  py::gil_scoped_release release;
  cpu_accumulate(rows.data(), int64_t(rows.size()), scale, threads);
}

void step_lists(py::list params, py::list grads, py::list accums, py::list exp_avgs, py::list exp_avg_sqs,
                py::list max_exp_avg_sqs, py::list steps, const std::vector<int>& groups,
                const std::vector<Hyper>& hypers, const std::vector<int>& accum_dtypes, double scale,
                double coefficient, int threads) {
  std::vector<Entry> entries(params.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& e = entries[i];
    TensorInfo step;
    e.group = groups.at(i);
    read_item(params, i, e.param, e.p, "parameter");
    read_item(grads, i, e.grad, e.g, "grad");
    read_item(accums, i, e.accum, e.a, "accum");
    read_item(exp_avgs, i, e.exp_avg, e.m, "exp_avg");
    read_item(exp_avg_sqs, i, e.exp_avg_sq, e.v, "exp_avg_sq");
    read_item(max_exp_avg_sqs, i, e.max_exp_avg_sq, e.v_max, "max_exp_avg_sq");
    read_item(steps, i, e.step, step, "step");
    if (!read_step(e, step)) throw std::invalid_argument("step " + std::to_string(i) + " is not one float32 or float64");
  }
  StepRows rows{hypers, scale, coefficient};
  rows.rows.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    rows.add(entries[i], !entries[i].accum.is_none(), static_cast<DType>(accum_dtypes.at(i)));
  }
  rows.run(overlap(entries), threads);
}

}  // namespace fa
