#include "table.h"

#include <algorithm>

namespace fa {
namespace {

// Attribute names, interned once.
struct Names {
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* record_stream = PyUnicode_InternFromString("record_stream");
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

}  // namespace

Table::Table(py::list params, std::vector<int> groups, py::object increment_version, Place place)
    : entries_(params.size()), increment_version_(std::move(increment_version)), place_(place) {
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
  return plain(tensor.ptr()) && read_tensor(tensor.ptr(), info) && info.place == place_;
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

void Table::accumulate(py::bytearray present, double scale, Executor& executor, py::object stream) {
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
    executor.accumulate(rows, scale);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].has_grad()) bytes_of(present)[i] = 1;
  }
  record_gradients(stream);
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
    if (e.steps && note_span(e)) moved = true;
  }
  if (moved) overlap_ = overlap(entries_);
  return overlap_;
}

void Table::step(const std::vector<Hyper>& hypers, py::bytearray present, int accum_dtype, double scale,
                 double coefficient, Executor& executor, py::object stream) {
  std::vector<Row> rows;
  rows.reserve(entries_.size());
  std::vector<PyObject*> written;  // without buffers, which nobody else sees, and counts, which no graph saves
  written.reserve(entries_.size() * 4);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    rows.push_back(step_row(e, hypers[size_t(e.group)], bytes_of(present)[i] != 0, static_cast<DType>(accum_dtype)));
    for (const py::object* tensor : {&e.param, &e.exp_avg, &e.exp_avg_sq}) written.push_back(tensor->ptr());
    if (rows.back().amsgrad) written.push_back(e.max_exp_avg_sq.ptr());
  }
  const bool one_by_one = parameters_overlap();
  {
    py::gil_scoped_release release;
    executor.step(rows, hypers, scale, coefficient, one_by_one);
  }
  std::fill_n(bytes_of(present), entries_.size(), 0);
  record_gradients(stream);
  drop_gradients();
  py::tuple tensors(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    Py_INCREF(written[i]);
    PyTuple_SET_ITEM(tensors.ptr(), Py_ssize_t(i), written[i]);
  }
  increment_version_(tensors);
}

void Table::record_gradients(const py::object& stream) {
  if (stream.is_none()) return;
  for (const Entry& e : entries_) {
    if (e.has_grad()) checked(PyObject_CallMethodObjArgs(e.grad.ptr(), names().record_stream, stream.ptr(), nullptr));
  }
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

}  // namespace fa
