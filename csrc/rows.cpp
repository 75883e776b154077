#include "rows.h"

#include <algorithm>
#include <cmath>

namespace fa {

Hyper::Hyper(py::tuple values) {
  const auto number = [&](Py_ssize_t i) {
    const double value = PyFloat_AsDouble(PyTuple_GetItem(values.ptr(), i));
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  };
  lr = number(0);
  beta1 = number(1);
  beta2 = number(2);
  eps = number(3);
  weight_decay = number(4);
  maximize = number(5) != 0;
  amsgrad = number(6) != 0;
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

StepRows::StepRows(const std::vector<Hyper>& hypers, double scale, double coefficient, size_t expected)
    : hypers_(hypers), scale_(scale), coefficient_(coefficient) {
  rows_.reserve(expected);
}

const Row& StepRows::add(const Entry& e, bool has_accum, DType accum_dtype) {
  const Hyper& hyper = hypers_.at(size_t(e.group));
  const double t = e.step_is_double ? *static_cast<double*>(e.step_data) += 1
                                    : double(*static_cast<float*>(e.step_data) += 1);
  if (e.group != group_before_ || t != t_before_) scalars_.push_back(hyper.scalars(t, scale_, coefficient_));
  group_before_ = e.group;
  t_before_ = t;
  Row row;
  row.has_grad = e.has_grad();
  row.has_accum = has_accum;
  row.amsgrad = hyper.amsgrad;
  row.accum_dtype = e.p.dtype == DType::f64 ? DType::f64 : accum_dtype;
  row.scalars = &scalars_.back();
  fill(row, e, true);
  rows_.push_back(row);
  return rows_.back();
}

void StepRows::run(bool one_by_one, int threads) const {
  py::gil_scoped_release release;
  if (one_by_one) {
    for (const Row& row : rows_) cpu_step(&row, 1, threads);
  } else {
    cpu_step(rows_.data(), int64_t(rows_.size()), threads);
  }
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
