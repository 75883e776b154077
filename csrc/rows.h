// From tensors to rows of a launch: what Table and the list functions share.
#pragma once

#include <vector>

#include "kernels.h"
#include "objects.h"
#include "tensor_info.h"

namespace fa {

// In the order of Hyper in fused_accum/state.py. device_lr: an address, or 0.
Hyper hyper_from(Tuple values, uint64_t device_lr, bool device_lr_is_double);

// What 16-bit parameters keep beside them.
struct Precision {
  Weights weights = Weights::plain;
  uint64_t seed = 0;

  // For a parameter of `dtype`.
  Weights of(DType dtype) const { return dtype == DType::bf16 || dtype == DType::f16 ? weights : Weights::plain; }
};

// One parameter's tensors as Python objects and as read.
struct Entry {
  Object param, grad, accum, exp_avg, exp_avg_sq, max_exp_avg_sq, step;  // null or None where there is none
  Object master;
  TensorInfo p, g, a, m, v, v_max, w;
  int group = 0;
  uint32_t index = 0;  // among all parameters of the optimizer
  void* step_data = nullptr;
  bool step_is_double = false, step_on_host = true;
  bool steps = false;    // takes part in the coming step
  bool aliased = false;  // grad is the buffer itself: its content, nothing still to be added
  const char *first = nullptr, *end = nullptr;  // the parameter's memory when it last took part in a step

  bool has_grad() const { return grad && !grad.is_none() && !aliased; }
};

// Sets a row's operands and sizes; `steps`: those of an update too, not only of an accumulation. In one linear pass
// where all tensors have the same dense strides, else each by its own.
void fill(Row& row, const Entry& entry, bool steps);

// Takes the place of a per-parameter count of updates; false unless it is one float32 or float64.
bool read_step(Entry& entry, const TensorInfo& step);

// A row of an update.
Row step_row(const Entry& entry, const Hyper& hyper, bool has_accum, DType accum_dtype, const Precision& precision);

// Notes where the parameter lies now; returns whether it lay elsewhere, or nowhere, before.
bool note_span(Entry& entry);

// Whether noted parameters share memory; they are then updated one after the other, as torch does.
bool overlap(const std::vector<Entry>& entries);

// Whether two lists of lists hold the very same objects, in the same places.
bool same_objects(List lists, List others);

// The same kernels on lists of tensors, None where a row has none; no gradient is consumed, no counter bumped.
// Counts of updates may lie on the CPU. Throws std::invalid_argument for a tensor that cannot be read or does not lie
// at `place`, before anything has changed.
void accumulate_lists(List accums, List grads, const std::vector<bool>& first, double scale,
                      Executor& executor, Place place);
void step_lists(List params, List grads, List accums, List exp_avgs, List exp_avg_sqs,
                List max_exp_avg_sqs, List steps, const std::vector<int>& groups,
                const std::vector<Hyper>& hypers, const std::vector<int>& accum_dtypes, double scale,
                double coefficient, Executor& executor, Place place, List masters,
                const std::vector<uint32_t>& indices, int weights, uint64_t seed);

}  // namespace fa
