#include "table.h"

#include <algorithm>
#include <stdexcept>

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
  PyObject* master = PyUnicode_InternFromString("master");
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

// Makes `kept` the object `borrowed`; false when that is null or None.
bool keep(py::object& kept, PyObject* borrowed) {
  if (kept.ptr() != borrowed) kept = py::reinterpret_borrow<py::object>(borrowed);
  return borrowed && borrowed != Py_None;
}

char* bytes_of(const py::bytearray& array) { return PyByteArray_AS_STRING(array.ptr()); }

bool has_internal_overlap(const TensorInfo& t) {
  for (int d = 0; d < t.ndim; ++d) {
    if (t.strides[d] == 0 && t.sizes[d] > 1) return true;
  }
  return false;
}

}  // namespace

Table::Table(py::list params, std::vector<int> groups, py::object increment_version, Place place,
             std::vector<uint32_t> indices, int weights, uint64_t seed)
    : entries_(params.size()),
      increment_version_(std::move(increment_version)),
      place_(place),
      precision_{static_cast<Weights>(weights), seed} {
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].param = params[i];
    entries_[i].group = groups.at(i);
    entries_[i].index = indices.at(i);
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
  return plain(tensor.ptr()) && read_tensor(tensor.ptr(), info) && info.place == place_ && info.dtype != DType::i16;
}

bool Table::readable_master(const Entry& e, TensorInfo& info) const {
  const bool halves = precision_.weights == Weights::split;
  return !(halves && e.p.dtype != DType::bf16) && plain(e.master.ptr()) && read_tensor(e.master.ptr(), info) &&
         info.place == place_ && info.dtype == (halves ? DType::i16 : DType::f32);
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

bool Table::collect_row(Entry& e, PyObject* accum, char& held, DType dtype_then, bool buffers, Py_ssize_t& found) {
  if (!plain(e.param.ptr())) return false;
  e.grad = checked(tensor_attributes().grad.get(e.param.ptr()));
  e.aliased = false;
  const bool has_grad = !e.grad.is_none();
  if (!has_grad && held == kByGrad) held = 0;
  if (!has_grad && !held) return true;
  found += has_grad;
  if (has_grad && !(readable(e.grad, e.g) && usable_gradient(e))) return false;
  if (accum != e.accum.ptr()) {  // ours, and never moved: read once
    e.accum = py::reinterpret_borrow<py::object>(accum);
    if (accum != Py_None && !readable(e.accum, e.a)) return false;
  }
  if (has_grad) {
    e.aliased = accum != Py_None && e.a.data && e.g.data == e.a.data;
    if (e.aliased) held = kByGrad;
    else if (held == kByGrad) held = 0;
  }
  const bool has_accum = held != 0;
  if (buffers && accum == Py_None) return false;
  // A gradient like the parameter the buffer was made for: so is the parameter, and only a step reads it.
  if (buffers && has_grad && e.g.dtype == dtype_then && same_sizes(e.g, e.a)) return true;
  if (!readable(e.param, e.p) || has_internal_overlap(e.p)) return false;
  if (has_grad && !same_sizes(e.g, e.p)) return false;
  return !(has_accum || buffers) || (dtype_then == e.p.dtype && same_sizes(e.a, e.p));
}

std::pair<Py_ssize_t, Py_ssize_t> Table::collect(py::list accums, py::bytearray present, py::bytearray dtypes,
                                                 bool buffers) {
  progress_ = Progress::none;
  Py_ssize_t found = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const DType dtype_then = static_cast<DType>(bytes_of(dtypes)[i]);
    PyObject* accum = PyList_GET_ITEM(accums.ptr(), Py_ssize_t(i));
    if (!collect_row(entries_[i], accum, bytes_of(present)[i], dtype_then, buffers, found)) return {found, Py_ssize_t(i)};
  }
  return {found, kAllRight};
}

std::vector<size_t> Table::gradients() const {
  return rows_where([](const Entry& e) { return e.has_grad(); });
}

std::vector<size_t> Table::stepping() const {
  return rows_where([](const Entry& e) { return e.steps; });
}

std::pair<int64_t, int64_t> Table::sizes() const {
  int64_t elements = 0;
  for (const Entry& e : entries_) elements += std::max(e.g.numel, e.a.numel);
  return {int64_t(entries_.size()), elements};
}

bool Table::step_one(size_t row, py::list accums, py::bytearray present, py::bytearray dtypes, py::dict state,
                     const std::vector<Hyper>& hypers, int accum_dtype, double coefficient, Executor& executor,
                     py::object stream) {
  Entry& e = entries_.at(row);
  char& held = bytes_of(present)[row];
  Py_ssize_t found = 0;
  if (!collect_row(e, PyList_GET_ITEM(accums.ptr(), Py_ssize_t(row)), held,
                   static_cast<DType>(bytes_of(dtypes)[row]), false, found)) return false;
  if (!found && !held) return true;
  const Hyper& hyper = hypers.at(size_t(e.group));
  PyObject* own = PyDict_GetItemWithError(state.ptr(), e.param.ptr());
  if (!own && PyErr_Occurred()) throw py::error_already_set();
  if (!read_state(e, own, hyper)) return false;
  std::vector<Row> rows{step_row(e, hyper, held != 0, static_cast<DType>(accum_dtype), precision_)};
  py::list written;
  for (const py::object* tensor : {&e.param, &e.exp_avg, &e.exp_avg_sq}) written.append(*tensor);
  if (hyper.amsgrad) written.append(e.max_exp_avg_sq);
  if (has_master(rows[0].weights)) written.append(e.master);
  if (e.aliased) written.append(e.grad);
  write([&] { executor.step(rows, hypers, 1.0, coefficient, false); });
  if (!stream.is_none() && e.has_grad()) record_stream(e, stream);
  if (tensor_attributes().grad.set(e.param.ptr(), Py_None) != 0) throw py::error_already_set();
  e.grad = py::object();
  progress_ = Progress::stepped;
  increment_version_(py::tuple(written));
  return true;
}

Row Table::accumulation(const Entry& e, bool has_accum, double* squares) const {
  Row row;
  row.has_grad = true;
  row.has_accum = has_accum;
  row.squares = squares;
  fill(row, e, false);
  return row;
}

Row Table::measurement(const Entry& e, int accum_dtype, double* squares) const {
  Row row;
  row.has_grad = e.has_grad();
  row.has_accum = !row.has_grad;
  row.squares = squares;
  const TensorInfo& source = row.has_grad ? e.g : e.a;
  row.accum_dtype = !row.has_grad ? e.a.dtype : e.p.dtype == DType::f64 ? DType::f64 : static_cast<DType>(accum_dtype);
  // In the order in which a buffer would hold it, which is the parameter's.
  Operand& operand = row.has_grad ? row.grad : row.accum;
  operand.data = source.data;
  operand.dtype = source.dtype;
  operand.strides = is_dense(e.p) && same_strides(source, e.p) ? nullptr : source.strides;
  row.numel = source.numel;
  row.ndim = source.ndim;
  row.sizes = source.sizes;
  return row;
}

std::vector<size_t> Table::sum_up(py::bytearray present, double scale, int accum_dtype, Executor& executor,
                                  py::object stream, py::bytearray known, uintptr_t squares) {
  double* const places = reinterpret_cast<double*>(squares);
  const auto place = [&](size_t i) { return places ? places + i : nullptr; };
  std::vector<size_t> taking_part, added;
  std::vector<Row> additions, measurements;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    taking_part.push_back(i);
    if (e.has_grad() && bytes_of(present)[i]) {
      added.push_back(i);
      additions.push_back(accumulation(e, true, place(i)));
    } else if (places && !(bytes_of(present)[i] == 1 && bytes_of(known)[i])) {
      measurements.push_back(measurement(e, accum_dtype, place(i)));
    }
  }
  if (!additions.empty()) write([&] { executor.accumulate(additions, scale); });
  for (size_t i : added) {
    Entry& e = entries_[i];
    bytes_of(known)[i] = places != nullptr;
    if (!stream.is_none()) record_stream(e, stream);
    if (tensor_attributes().grad.set(e.param.ptr(), Py_None) != 0) throw py::error_already_set();
    e.grad = py::object();
  }
  if (!additions.empty()) progress_ = Progress::taken;
  if (!measurements.empty()) {
    py::gil_scoped_release release;
    executor.measure(measurements, scale);
  }
  return taking_part;
}

std::vector<size_t> Table::measure_gradients(double scale, int accum_dtype, Executor& executor, uintptr_t squares) {
  std::vector<size_t> measured;
  std::vector<Row> rows;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!e.has_grad()) continue;
    // Before an accumulation only buffers have been read. A parameter that cannot be is found there or by prepare.
    if (!readable(e.param, e.p)) throw std::invalid_argument("a parameter cannot be read");
    measured.push_back(i);
    rows.push_back(measurement(e, accum_dtype, reinterpret_cast<double*>(squares) + i));
  }
  py::gil_scoped_release release;
  executor.measure(rows, scale);
  return measured;
}

void Table::accumulate(py::bytearray present, double scale, Executor& executor, py::object stream,
                       py::bytearray known, uintptr_t squares) {
  double* const places = reinterpret_cast<double*>(squares);
  std::vector<Row> rows;
  rows.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (e.has_grad()) rows.push_back(accumulation(e, bytes_of(present)[i] != 0, places ? places + i : nullptr));
  }
  write([&] { executor.accumulate(rows, scale); });
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].has_grad()) continue;
    bytes_of(present)[i] = 1;
    bytes_of(known)[i] = places != nullptr;
  }
  record_gradients(stream);
  drop_gradients();  // nobody else sees the buffers: their version counters stay
}

// A parameter's state by name. Names in Python code are interned, and so are most keys: comparing pointers while going
// through the few entries costs less than looking each up.
struct StateItems {
  PyObject *step = nullptr, *exp_avg = nullptr, *exp_avg_sq = nullptr, *max_exp_avg_sq = nullptr,
           *master = nullptr;  // borrowed

  explicit StateItems(PyObject* state) {
    const std::pair<PyObject*, PyObject**> wanted[] = {{names().step, &step},
                                                       {names().exp_avg, &exp_avg},
                                                       {names().exp_avg_sq, &exp_avg_sq},
                                                       {names().max_exp_avg_sq, &max_exp_avg_sq},
                                                       {names().master, &master}};
    Py_ssize_t position = 0, known = 0;
    PyObject *key, *value;
    while (PyDict_Next(state, &position, &key, &value)) {
      for (const auto& [name, place] : wanted) {
        if (key != name) continue;
        *place = value;
        ++known;
        break;
      }
    }
    if (known == PyDict_GET_SIZE(state)) return;
    for (const auto& [name, place] : wanted) {
      if (!*place) *place = PyDict_GetItemWithError(state, name);
    }
  }
};

bool Table::read_state(Entry& e, PyObject* state, const Hyper& hyper) const {
  if (!state || !PyDict_Check(state)) return false;
  const StateItems items(state);
  if (PyErr_Occurred()) throw py::error_already_set();
  auto moment = [&](py::object& kept, TensorInfo& info, PyObject* tensor) {
    if (!keep(kept, tensor)) return false;
    return readable(kept, info) && same_sizes(info, e.p) && !has_internal_overlap(info);
  };
  if (!moment(e.exp_avg, e.m, items.exp_avg) || !moment(e.exp_avg_sq, e.v, items.exp_avg_sq)) return false;
  if (hyper.amsgrad && !moment(e.max_exp_avg_sq, e.v_max, items.max_exp_avg_sq)) return false;
  if (has_master(precision_.of(e.p.dtype))) {
    if (!keep(e.master, items.master) || !readable_master(e, e.w) || !same_sizes(e.w, e.p) ||
        has_internal_overlap(e.w)) {
      return false;
    }
  }
  TensorInfo step;
  return keep(e.step, items.step) && readable(e.step, step) && read_step(e, step);
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
  // Without buffers, unless they are p.grad too (nobody else sees them), and counts, which no graph saves.
  std::vector<PyObject*> written;
  written.reserve(entries_.size() * 4);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    rows.push_back(step_row(e, hypers[size_t(e.group)], bytes_of(present)[i] != 0, static_cast<DType>(accum_dtype),
                            precision_));
    for (const py::object* tensor : {&e.param, &e.exp_avg, &e.exp_avg_sq}) written.push_back(tensor->ptr());
    if (rows.back().amsgrad) written.push_back(e.max_exp_avg_sq.ptr());
    if (has_master(rows.back().weights)) written.push_back(e.master.ptr());
    if (e.aliased) written.push_back(e.grad.ptr());
  }
  py::tuple tensors(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    Py_INCREF(written[i]);
    PyTuple_SET_ITEM(tensors.ptr(), Py_ssize_t(i), written[i]);
  }
  const bool one_by_one = parameters_overlap();
  write([&] { executor.step(rows, hypers, scale, coefficient, one_by_one); });
  std::fill_n(bytes_of(present), entries_.size(), 0);
  record_gradients(stream);
  drop_gradients();
  progress_ = Progress::stepped;
  increment_version_(tensors);
}

void Table::record_stream(const Entry& e, const py::object& stream) {
  checked(PyObject_CallMethodObjArgs(e.grad.ptr(), names().record_stream, stream.ptr(), nullptr));
}

void Table::record_gradients(const py::object& stream) {
  if (stream.is_none()) return;
  for (const Entry& e : entries_) {
    if (e.has_grad()) record_stream(e, stream);
  }
}

void Table::drop_gradients() {
  if (progress_ == Progress::none) progress_ = Progress::writing;
  for (Entry& e : entries_) {
    if (!e.grad || e.grad.is_none()) continue;
    if (tensor_attributes().grad.set(e.param.ptr(), Py_None) != 0) throw py::error_already_set();
  }
  release();
  progress_ = Progress::taken;
}

void Table::release() {
  for (Entry& e : entries_) e.grad = py::object();
}

}  // namespace fa
