// The launch table of one bucket, parameters of one place, kept between calls: one native call collects and validates the
// gradients of all rows, one more launches the kernels, clears what was consumed and bumps version counters.
// table_reading.cpp has what reads tensors, table.cpp the rest.
//
// The table never raises for an unusual tensor: it stops before anything has changed and returns the row's number,
// and Python (fused_accum/backends/native.py) repairs it or raises the error that names it.
#pragma once

#include <utility>
#include <vector>

#include "rows.h"

namespace fa {

// How far the work on what `collect` found last has come: as PROGRESS in fused_accum/buffers.py.
enum class Progress { none, writing, taken, stepped };

class Table {
 public:
  static constexpr Py_ssize_t kAllRight = -1;
  static constexpr char kByGrad = 2;  // in `present`, as BY_GRAD in fused_accum/buffers.py

  // params: list of tensors; groups: index of each into the hypers; increment_version: torch's function;
  // place: where the tensors are; indices: of each parameter in the optimizer; weights: of 16-bit parameters, as
  // Weights; seed: of stochastic rounding.
  Table(List params, std::vector<int> groups, Object increment_version, Place place,
        std::vector<uint32_t> indices, int weights, uint64_t seed);

  // Types whose instances are read directly, beside torch.Tensor and torch.nn.Parameter.
  void accept(PyObject* type);

  // Reads p.grad of every row. accums: tensors or None; present: bytearray, set to kByGrad where p.grad is the buffer
  // itself and to 0 where it no longer is; dtypes: bytearray, each parameter's dtype when its buffer was made; buffers:
  // whether rows with a gradient need a buffer.
  // Returns (gradients found, row that needs attention or kAllRight).
  std::pair<Py_ssize_t, Py_ssize_t> collect(List accums, ByteArray present, ByteArray dtypes, bool buffers);

  // The rows with a gradient still to be added, and, after prepare, those of the coming step.
  std::vector<size_t> gradients() const;
  std::vector<size_t> stepping() const;

  // Parameters, and how many elements their gradients or buffers had when they were read last.
  std::pair<int64_t, int64_t> sizes() const;

  // (1) for what collect found; sets those p.grad to None. stream: the torch stream the kernels go to, which the
  // allocator of the gradients is told of; None where there is none.
  // squares: address of a double per row, or 0. Where given, it gets the sum of squares of every buffer that was written,
  // and known (bytearray) 1.
  void accumulate(ByteArray present, double scale, Executor& executor, PyObject* stream, ByteArray known,
                  uintptr_t squares);

  // Before a step that needs the whole sum first, after prepare: (1) for rows with a gradient and a contribution, whose
  // p.grad becomes None. Then, where `squares` is given, the sums of squares of all rows with a contribution that are
  // not known: of the buffer, or of scale*grad where the step will read that. Returns the numbers of those rows.
  std::vector<size_t> sum_up(ByteArray present, double scale, int accum_dtype, Executor& executor, PyObject* stream,
                             ByteArray known, uintptr_t squares);

  // The sums of squares of scale*grad, of every row with a gradient still to be added; reads only. Returns their numbers.
  std::vector<size_t> measure_gradients(double scale, int accum_dtype, Executor& executor, uintptr_t squares);

  // Reads the state of every row with a contribution. Returns the row that needs attention or kAllRight.
  Py_ssize_t prepare(Dict state, const std::vector<Hyper>& hypers, ByteArray present);

  // (2) to (6) for what collect and prepare found. accum_dtype: the sum's, for all but float64 parameters.
  void step(const std::vector<Hyper>& hypers, ByteArray present, int accum_dtype, double scale, double coefficient,
            Executor& executor, PyObject* stream);

  // The whole way of one row alone: collect, prepare and step with scale 1. False, with nothing changed but flags in
  // `present`, where the row needs attention.
  bool step_one(size_t row, List accums, ByteArray present, ByteArray dtypes, Dict state,
                const std::vector<Hyper>& hypers, int accum_dtype, double coefficient, Executor& executor,
                PyObject* stream);

  void drop_gradients();
  void release();

  // Shows the collector of reference cycles what is owned. It breaks none: each goes on through a list or a dict.
  int traverse(visitproc visit, void* arg) const;

  // No exception of a signal handler comes between a change and this: both are native. An error of the executor does.
  int progress() const { return static_cast<int>(progress_); }

 private:
  template <class F>
  void write(F launch) {
    progress_ = Progress::writing;
    ReleaseGil release;
    try {
      launch();
    } catch (const NotBegun&) {
      progress_ = Progress::none;
      throw;
    }
  }

  bool collect_row(Entry& entry, PyObject* accum, char& held, DType dtype_then, bool buffers, Py_ssize_t& found);
  bool plain(PyObject* tensor) const;
  bool readable(const Object& tensor, TensorInfo& info) const;
  bool readable_master(const Entry& entry, TensorInfo& info) const;
  bool usable_gradient(const Entry& entry) const;
  bool read_state(Entry& entry, PyObject* state, const Hyper& hyper) const;
  bool parameters_overlap();
  template <class F>
  std::vector<size_t> rows_where(F holds) const {
    std::vector<size_t> rows;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (holds(entries_[i])) rows.push_back(i);
    }
    return rows;
  }
  Row accumulation(const Entry& entry, bool has_accum, double* squares) const;
  Row measurement(const Entry& entry, int accum_dtype, double* squares) const;
  static void record_stream(const Entry& entry, PyObject* stream);
  void record_gradients(PyObject* stream);
  void increment_versions(const std::vector<PyObject*>& tensors) const;  // by torch's function

  std::vector<Entry> entries_;
  std::vector<Row> rows_;  // of the last call; kept for their memory
  std::vector<Object> accepted_;
  Object increment_version_;
  const Place place_;
  const Precision precision_;
  bool overlap_ = false;
  Progress progress_ = Progress::none;
};

}  // namespace fa
