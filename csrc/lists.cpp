#include <algorithm>
#include <stdexcept>
#include <string>

#include "rows.h"

namespace fa {
namespace {

void read_item(const List& list, size_t i, Object& object, TensorInfo& info, const char* what, Place place,
               bool or_on_cpu = false, bool halves = false) {
  object = Object::borrowed(list[i]);
  if (object.is_none()) return;
  if (!read_tensor(object.get(), info) || !(info.place == place || (or_on_cpu && info.place == kCpu)) ||
      (info.dtype == DType::i16) != halves) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(i) +
                                " is not a tensor of a supported dtype on the device of this backend");
  }
}

}  // namespace

bool same_objects(List lists, List others) {
  if (lists.size() != others.size()) return false;
  for (size_t i = 0; i < lists.size(); ++i) {
    const Object some = checked(PySequence_Fast(lists[i], "a list was expected")), other = checked(PySequence_Fast(others[i], "a list was expected"));
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(some.get());
    if (count != PySequence_Fast_GET_SIZE(other.get())) return false;
    PyObject** const one = PySequence_Fast_ITEMS(some.get());
    if (!std::equal(one, one + count, PySequence_Fast_ITEMS(other.get()))) return false;
  }
  return true;
}

void accumulate_lists(List accums, List grads, const std::vector<bool>& first, double scale,
                      Executor& executor, Place place) {
  std::vector<Entry> entries(accums.size());
  std::vector<Row> rows(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    read_item(accums, i, entries[i].accum, entries[i].a, "accum", place);
    read_item(grads, i, entries[i].grad, entries[i].g, "grad", place);
    rows[i].has_grad = true;
    rows[i].has_accum = !first.at(i);
    fill(rows[i], entries[i], false);
  }
  ReleaseGil release;
  executor.accumulate(rows, scale);
}

void step_lists(List params, List grads, List accums, List exp_avgs, List exp_avg_sqs,
                List max_exp_avg_sqs, List steps, const std::vector<int>& groups,
                const std::vector<Hyper>& hypers, const std::vector<int>& accum_dtypes, double scale,
                double coefficient, Executor& executor, Place place, List masters,
                const std::vector<uint32_t>& indices, int weights, uint64_t seed) {
  const Precision precision{static_cast<Weights>(weights), seed};
  std::vector<Entry> entries(params.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& e = entries[i];
    TensorInfo step;
    e.group = groups.at(i);
    read_item(params, i, e.param, e.p, "parameter", place);
    note_span(e);
    read_item(grads, i, e.grad, e.g, "grad", place);
    read_item(accums, i, e.accum, e.a, "accum", place);
    read_item(exp_avgs, i, e.exp_avg, e.m, "exp_avg", place);
    read_item(exp_avg_sqs, i, e.exp_avg_sq, e.v, "exp_avg_sq", place);
    read_item(max_exp_avg_sqs, i, e.max_exp_avg_sq, e.v_max, "max_exp_avg_sq", place);
    read_item(steps, i, e.step, step, "step", place, true);
    e.index = indices.at(i);
    const Weights kept = precision.of(e.p.dtype);
    if (has_master(kept)) read_item(masters, i, e.master, e.w, "master", place, false, kept == Weights::split);
    if (!read_step(e, step)) throw std::invalid_argument("step " + std::to_string(i) + " is not one float32 or float64");
  }
  std::vector<Row> rows;
  rows.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& e = entries[i];
    rows.push_back(step_row(e, hypers.at(size_t(e.group)), !e.accum.is_none(), static_cast<DType>(accum_dtypes.at(i)),
                            precision));
  }
  const bool one_by_one = overlap(entries);
  ReleaseGil release;
  executor.step(rows, hypers, scale, coefficient, one_by_one);
}

}  // namespace fa
