#include "rows.h"

#include <algorithm>

namespace fa {

Hyper hyper_from(Tuple values, uint64_t device_lr, bool device_lr_is_double) {
  const auto number = [&](Py_ssize_t i) {
    PyObject* item = PyTuple_GetItem(values.object, i);
    const double value = item ? PyFloat_AsDouble(item) : -1;
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  };
  return {device_lr ? 0.0 : number(0),
          number(1),
          number(2),
          number(3),
          number(4),
          number(5) != 0,
          number(6) != 0,
          reinterpret_cast<const void*>(device_lr),
          device_lr_is_double};
}

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
                        {steps && row.amsgrad ? &row.max_exp_avg_sq : nullptr, &e.v_max},
                        {steps && has_master(row.weights) ? &row.master : nullptr, &e.w}};
  const TensorInfo& model = steps ? e.p : e.a;
  // Random words go by row-major order, whatever the order in memory.
  bool linear = row.weights == Weights::stochastic ? is_row_major(model) : is_dense(model);
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
  e.step_on_host = step.place == kCpu;
  return step.numel == 1 && (step.dtype == DType::f32 || step.dtype == DType::f64);
}

Row step_row(const Entry& e, const Hyper& hyper, bool has_accum, DType accum_dtype, const Precision& precision) {
  Row row;
  row.has_grad = e.has_grad();
  row.has_accum = has_accum;
  row.amsgrad = hyper.amsgrad;
  row.accum_dtype = e.p.dtype == DType::f64 ? DType::f64 : accum_dtype;
  row.group = e.group;
  row.step = e.step_data;
  row.step_is_double = e.step_is_double;
  row.step_on_host = e.step_on_host;
  row.weights = precision.of(e.p.dtype);
  row.randomness = {precision.seed, e.index, 0};
  fill(row, e, true);
  return row;
}

bool note_span(Entry& e) {
  int64_t last = -1;
  if (e.p.numel) {
    last = 0;
    for (int d = 0; d < e.p.ndim; ++d) last += (e.p.sizes[d] - 1) * e.p.strides[d];
  }
  const char* first = static_cast<const char*>(e.p.data);
  const char* end = first + (last + 1) * int64_t(size_of(e.p.dtype));
  const bool moved = first != e.first || end != e.end;
  e.first = first;
  e.end = end;
  return moved;
}

bool overlap(const std::vector<Entry>& entries) {
  std::vector<std::pair<const char*, const char*>> spans;
  for (const Entry& e : entries) {
    if (e.first != e.end) spans.emplace_back(e.first, e.end);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return true;
  }
  return false;
}

}  // namespace fa
