// What a table knows of its rows' tensors: all is read anew in every call, since anything may have been replaced.
#include <utility>

#include "table.h"

namespace fa {
namespace {

// Attribute names, interned once.
struct Names {
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

bool is_true(const Object& value) { return value.get() == Py_True; }

// Makes `kept` the object `borrowed`; false when that is null or None.
bool keep(Object& kept, PyObject* borrowed) {
  if (kept.get() != borrowed) kept = Object::borrowed(borrowed);
  return borrowed && borrowed != Py_None;
}

bool has_internal_overlap(const TensorInfo& t) {
  for (int d = 0; d < t.ndim; ++d) {
    if (t.strides[d] == 0 && t.sizes[d] > 1) return true;
  }
  return false;
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

// The state of each parameter, found without hashing where `state` lists parameters in the table's order.
class StateWalk {
 public:
  explicit StateWalk(PyObject* state) : state_(state) { advance(); }

  PyObject* find(PyObject* param) {  // borrowed; null when there is none
    while (key_ && key_ != param) advance();
    if (!key_) {
      PyObject* own = PyDict_GetItemWithError(state_, param);
      if (!own && PyErr_Occurred()) throw PythonError();
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

}  // namespace

bool Table::plain(PyObject* tensor) const {
  for (const Object& type : accepted_) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.get()) return true;
  }
  return false;
}

bool Table::readable(const Object& tensor, TensorInfo& info) const {
  return plain(tensor.get()) && read_tensor(tensor.get(), info) && info.place == place_ && info.dtype != DType::i16;
}

bool Table::readable_master(const Entry& e, TensorInfo& info) const {
  const bool halves = precision_.weights == Weights::split;
  return !(halves && e.p.dtype != DType::bf16) && plain(e.master.get()) && read_tensor(e.master.get(), info) &&
         info.place == place_ && info.dtype == (halves ? DType::i16 : DType::f32);
}

bool Table::usable_gradient(const Entry& e) const {
  return !is_true(checked(tensor_attributes().requires_grad.get(e.grad.get()))) && !is_negated(e.grad.get());
}

bool Table::collect_row(Entry& e, PyObject* accum, char& held, DType dtype_then, bool buffers, Py_ssize_t& found) {
  if (!plain(e.param.get())) return false;
  e.grad = checked(tensor_attributes().grad.get(e.param.get()));
  e.aliased = false;
  const bool has_grad = !e.grad.is_none();
  if (!has_grad && held == kByGrad) held = 0;
  if (!has_grad && !held) return true;
  found += has_grad;
  if (has_grad && !(readable(e.grad, e.g) && usable_gradient(e))) return false;
  if (accum != e.accum.get()) {  // ours, and never moved: read once
    e.accum = Object::borrowed(accum);
    if (accum != Py_None && !readable(e.accum, e.a)) return false;
  }
  if (has_grad) {
    e.aliased = accum != Py_None && e.a.data && same_elements(e.g, e.a);
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

std::pair<Py_ssize_t, Py_ssize_t> Table::collect(List accums, ByteArray present, ByteArray dtypes,
                                                 bool buffers) {
  progress_ = Progress::none;
  Py_ssize_t found = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const DType dtype_then = static_cast<DType>(dtypes[i]);
    PyObject* accum = accums[i];
    if (!collect_row(entries_[i], accum, present[i], dtype_then, buffers, found)) return {found, Py_ssize_t(i)};
  }
  return {found, kAllRight};
}

bool Table::read_state(Entry& e, PyObject* state, const Hyper& hyper) const {
  if (!state || !PyDict_Check(state)) return false;
  const StateItems items(state);
  if (PyErr_Occurred()) throw PythonError();
  auto moment = [&](Object& kept, TensorInfo& info, PyObject* tensor) {
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

Py_ssize_t Table::prepare(Dict state, const std::vector<Hyper>& hypers, ByteArray present) {
  StateWalk walk(state.object);
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    e.steps = e.has_grad() || present[i] != 0;
    if (!e.steps) continue;
    if (!read_state(e, walk.find(e.param.get()), hypers.at(size_t(e.group)))) return Py_ssize_t(i);
  }
  return kAllRight;
}

}  // namespace fa
