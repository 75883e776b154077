// The launch table of one bucket of CPU parameters, kept between calls: one native call collects and validates the
// gradients of all rows, one more launches the kernels, clears what was consumed and bumps version counters.
//
// The table never raises for an unusual tensor: it stops before anything has changed and returns the row's number,
// and Python (fused_accum/backends/cpu.py) repairs it or raises the error that names it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "kernels.h"
#include "tensor_info.h"

namespace fa {

namespace py = pybind11;

// One group's hyper-parameters, in the order of Hyper in fused_accum/state.py.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize, amsgrad;

  explicit Hyper(py::handle tuple);
  StepScalars<double> scalars(double t, double scale, double coefficient) const;
};

// One parameter's tensors as Python objects and as read.
struct Entry {
  py::object param, grad, accum, exp_avg, exp_avg_sq, max_exp_avg_sq, step;  // null or None where there is none
  TensorInfo p, g, a, m, v, v_max;
  int group = 0;
  void* step_data = nullptr;
  bool step_is_double = false;
  bool steps = false;  // takes part in the coming step
  void* param_data_seen = nullptr;

  bool has_grad() const { return grad && !grad.is_none(); }
};

class Table {
 public:
  static constexpr Py_ssize_t kAllRight = -1;

  // params: list of tensors; groups: index of each into the hypers; increment_version: torch's function.
  Table(py::list params, std::vector<int> groups, py::object increment_version);

  // Types whose instances are read directly, beside torch.Tensor and torch.nn.Parameter.
  void accept(py::object type);

  // Reads p.grad of every row. accums: tensors or None; present: bytearray; dtypes: bytearray, each parameter's dtype
  // when its buffer was made; buffers: whether rows with a gradient need a buffer.
  // Returns (gradients found, row that needs attention or kAllRight).
  std::pair<Py_ssize_t, Py_ssize_t> collect(py::list accums, py::bytearray present, py::bytearray dtypes, bool buffers);

  // (1) for what collect found; sets those p.grad to None.
  void accumulate(py::bytearray present, double scale, int threads);

  // Reads the state of every row with a contribution. Returns the row that needs attention or kAllRight.
  Py_ssize_t prepare(py::dict state, const std::vector<Hyper>& hypers, py::bytearray present);

  // (2) to (6) for what collect and prepare found. accum_dtype: the sum's, for all but float64 parameters.
  void step(const std::vector<Hyper>& hypers, py::bytearray present, int accum_dtype, double scale, double coefficient,
            int threads);

  void drop_gradients();
  void release();

 private:
  bool plain(PyObject* tensor) const;
  bool readable(const py::object& tensor, TensorInfo& info) const;
  bool usable_gradient(const Entry& entry) const;
  bool read_state(Entry& entry, PyObject* state, const Hyper& hyper) const;
  bool parameters_overlap();

  std::vector<Entry> entries_;
  std::vector<py::object> accepted_;
  py::object increment_version_;
  bool overlap_ = false;
};

// The same kernels on lists of tensors, None where a row has none; no gradient is consumed, no counter bumped.
// Throws std::invalid_argument for a tensor that cannot be read, before anything has changed.
void accumulate_lists(py::list accums, py::list grads, const std::vector<bool>& first, double scale, int threads);
void step_lists(py::list params, py::list grads, py::list accums, py::list exp_avgs, py::list exp_avg_sqs,
                py::list max_exp_avg_sqs, py::list steps, const std::vector<int>& groups,
                const std::vector<Hyper>& hypers, const std::vector<int>& accum_dtypes, double scale,
                double coefficient, int threads);

}  // namespace fa
