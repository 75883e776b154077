#include "table.h"

#include <algorithm>
#include <stdexcept>

#include "exchange.h"

namespace fa {

Table::Table(List params, std::vector<int> groups, Object increment_version, Place place,
             std::vector<uint32_t> indices, int weights, uint64_t seed)
    : entries_(params.size()),
      increment_version_(std::move(increment_version)),
      place_(place),
      precision_{static_cast<Weights>(weights), seed} {
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].param = Object::borrowed(params[i]);
    entries_[i].group = groups.at(i);
    entries_[i].index = indices.at(i);
  }
}

void Table::accept(PyObject* type) {
  for (const Object& known : accepted_) {
    if (known.get() == type) return;
  }
  accepted_.push_back(Object::borrowed(type));
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

// Counts up the versions of what an update of a row has written: not of buffers, unless they are p.grad too (nobody
// else sees them), and not of counts of updates, which no graph saves. Those that are left to torch's own function are
// added to `left`.
static void count_versions(const Entry& e, const Row& row, std::vector<PyObject*>& left) {
  const auto count = [&](const Object& tensor) {
    if (!bump_version(tensor.get())) left.push_back(tensor.get());
  };
  count(e.param);
  count(e.exp_avg);
  count(e.exp_avg_sq);
  if (row.amsgrad) count(e.max_exp_avg_sq);
  if (has_master(row.weights)) count(e.master);
  if (e.aliased) count(e.grad);
}

void Table::increment_versions(const std::vector<PyObject*>& tensors) const {
  if (tensors.empty()) return;
  const Object list = checked(PyList_New(Py_ssize_t(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(list.get(), Py_ssize_t(i), Object::borrowed(tensors[i]).release());
  }
  checked(PyObject_CallOneArg(increment_version_.get(), list.get()));
}

bool Table::step_one(size_t row, List accums, ByteArray present, ByteArray dtypes, Dict state,
                     const std::vector<Hyper>& hypers, int accum_dtype, double coefficient, Executor& executor,
                     PyObject* stream) {
  Entry& e = entries_.at(row);
  char& held = present[row];
  Py_ssize_t found = 0;
  if (!collect_row(e, accums[row], held,
                   static_cast<DType>(dtypes[row]), false, found)) return false;
  if (!found && !held) return true;
  const Hyper& hyper = hypers.at(size_t(e.group));
  PyObject* own = PyDict_GetItemWithError(state.object, e.param.get());
  if (!own && PyErr_Occurred()) throw PythonError();
  if (!read_state(e, own, hyper)) return false;
  std::vector<Row> rows{step_row(e, hyper, held != 0, static_cast<DType>(accum_dtype), precision_)};
  write([&] { executor.step(rows, hypers, 1.0, coefficient, false); });
  std::vector<PyObject*> left;
  count_versions(e, rows[0], left);
  increment_versions(left);
  if (stream != Py_None && e.has_grad()) record_stream(e, stream);
  if (tensor_attributes().grad.set(e.param.get(), Py_None) != 0) throw PythonError();
  e.grad = Object();
  progress_ = Progress::stepped;
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

std::vector<size_t> Table::sum_up(ByteArray present, double scale, int accum_dtype, Executor& executor,
                                  PyObject* stream, ByteArray known, uintptr_t squares) {
  double* const places = reinterpret_cast<double*>(squares);
  const auto place = [&](size_t i) { return places ? places + i : nullptr; };
  std::vector<size_t> taking_part, added;
  std::vector<Row> additions, measurements;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    taking_part.push_back(i);
    if (e.has_grad() && present[i]) {
      added.push_back(i);
      additions.push_back(accumulation(e, true, place(i)));
    } else if (places && !(present[i] == 1 && known[i])) {
      measurements.push_back(measurement(e, accum_dtype, place(i)));
    }
  }
  if (!additions.empty()) write([&] { executor.accumulate(additions, scale); });
  for (size_t i : added) {
    Entry& e = entries_[i];
    known[i] = places != nullptr;
    if (stream != Py_None) record_stream(e, stream);
    if (tensor_attributes().grad.set(e.param.get(), Py_None) != 0) throw PythonError();
    e.grad = Object();
  }
  if (!additions.empty()) progress_ = Progress::taken;
  if (!measurements.empty()) {
    ReleaseGil release;
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
  ReleaseGil release;
  executor.measure(rows, scale);
  return measured;
}

void Table::accumulate(ByteArray present, double scale, Executor& executor, PyObject* stream,
                       ByteArray known, uintptr_t squares) {
  double* const places = reinterpret_cast<double*>(squares);
  rows_.clear();
  rows_.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (e.has_grad()) rows_.push_back(accumulation(e, present[i] != 0, places ? places + i : nullptr));
  }
  write([&] { executor.accumulate(rows_, scale); });
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].has_grad()) continue;
    present[i] = 1;
    known[i] = places != nullptr;
  }
  record_gradients(stream);
  drop_gradients();  // nobody else sees the buffers: their version counters stay
}

bool Table::parameters_overlap() {
  bool moved = false;
  for (Entry& e : entries_) {
    if (e.steps && note_span(e)) moved = true;
  }
  if (moved) overlap_ = overlap(entries_);
  return overlap_;
}

void Table::step(const std::vector<Hyper>& hypers, ByteArray present, int accum_dtype, double scale,
                 double coefficient, Executor& executor, PyObject* stream) {
  rows_.clear();
  rows_.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (!e.steps) continue;
    rows_.push_back(step_row(e, hypers[size_t(e.group)], present[i] != 0, static_cast<DType>(accum_dtype),
                             precision_));
  }
  const bool one_by_one = parameters_overlap();
  write([&] { executor.step(rows_, hypers, scale, coefficient, one_by_one); });
  for (size_t i = 0; i < entries_.size(); ++i) present[i] = 0;
  std::vector<PyObject*> left;
  const Row* row = rows_.data();
  for (const Entry& e : entries_) {
    if (e.steps) count_versions(e, *row++, left);
  }
  increment_versions(left);
  record_gradients(stream);
  drop_gradients();
  progress_ = Progress::stepped;
}

void Table::record_stream(const Entry& e, PyObject* stream) {
  static PyObject* const name = PyUnicode_InternFromString("record_stream");
  checked(PyObject_CallMethodObjArgs(e.grad.get(), name, stream, nullptr));
}

void Table::record_gradients(PyObject* stream) {
  if (stream == Py_None) return;
  for (const Entry& e : entries_) {
    if (e.has_grad()) record_stream(e, stream);
  }
}

void Table::drop_gradients() {
  if (progress_ == Progress::none) progress_ = Progress::writing;
  for (Entry& e : entries_) {
    if (!e.grad || e.grad.is_none()) continue;
    if (tensor_attributes().grad.set(e.param.get(), Py_None) != 0) throw PythonError();
  }
  release();
  progress_ = Progress::taken;
}

int Table::traverse(visitproc visit, void* arg) const {
  Py_VISIT(increment_version_.get());
  for (const Object& type : accepted_) Py_VISIT(type.get());
  for (const Entry& e : entries_) {
    const Object* const all[] = {&e.param,      &e.grad,           &e.accum, &e.exp_avg,
                                 &e.exp_avg_sq, &e.max_exp_avg_sq, &e.step,  &e.master};
    for (const Object* one : all) Py_VISIT(one->get());
  }
  return 0;
}

void Table::release() {
  for (Entry& e : entries_) e.grad = Object();
}

}  // namespace fa
