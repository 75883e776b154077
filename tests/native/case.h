// A row of a launch table with tensors of its own, for the driver: every tensor in an allocation that ends with its
// last reachable element, so that sanitizers see any step beyond it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "reference.h"

using fa::DType;
using fa::Operand;
using fa::Row;

inline std::mt19937 random_engine(1);
inline long checks = 0;

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline double random_value() {
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> magnitude(-7, 3);
  return std::ldexp(normal(random_engine), magnitude(random_engine));
}

enum class Layout { dense, misaligned_element, misaligned_byte, stepped, transposed, expanded };

// A supply of random elements of a dtype, as bytes.
inline std::vector<char> supply_of(DType dtype) {
  std::vector<char> bytes(257 * fa::size_of(dtype));
  for (size_t i = 0; i < 257; ++i) reference::store(dtype, &bytes[i * fa::size_of(dtype)], random_value());
  return bytes;
}

inline const char* random_element(DType dtype) {
  static const std::vector<char> supplies[] = {supply_of(DType::f32), supply_of(DType::bf16), supply_of(DType::f16),
                                               supply_of(DType::f64)};
  return &supplies[int(dtype)][random_engine() % 257 * fa::size_of(dtype)];
}

// A tensor in an allocation of its own; its last reachable element ends the allocation.
class Tensor {
 public:
  Tensor(DType dtype, const std::vector<int64_t>& sizes, Layout layout, bool non_negative = false)
      : dtype_(dtype), layout_(layout) {
    const size_t item = fa::size_of(dtype);
    int64_t numel = 1, last = 0, step = layout == Layout::stepped ? 2 : layout == Layout::expanded ? 0 : 1;
    for (int64_t n : sizes) numel *= n;
    strides_.assign(sizes.size(), 0);
    for (size_t k = 0; k < sizes.size(); ++k) {
      const size_t d = layout == Layout::transposed ? k : sizes.size() - 1 - k;
      strides_[d] = step;
      step *= sizes[d];
    }
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides_[d];
    const size_t offset = layout == Layout::misaligned_element ? item : layout == Layout::misaligned_byte ? 1 : 0;
    size_ = numel ? offset + size_t(last + 1) * item : offset;
    memory_.reset(static_cast<char*>(std::malloc(size_ ? size_ : 1)));
    data_ = memory_.get() + offset;
    std::memset(memory_.get(), 0x5a, size_);
    for (int64_t i = 0; numel && i <= last; ++i) {
      char* to = at(i);
      std::memcpy(to, random_element(dtype), item);
      if (non_negative) to[item - 1] = char(to[item - 1] & 0x7f);
    }
  }

  bool strided() const {
    return layout_ == Layout::stepped || layout_ == Layout::transposed || layout_ == Layout::expanded;
  }
  Operand operand(bool with_strides) const { return {data_, dtype_, with_strides ? strides_.data() : nullptr}; }

  std::vector<char> bytes() const { return std::vector<char>(memory_.get(), memory_.get() + size_); }
  char* at(int64_t place) { return data_ + size_t(place) * fa::size_of(dtype_); }
  const char* memory() const { return memory_.get(); }
  DType dtype() const { return dtype_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  DType dtype_;
  Layout layout_;
  std::vector<int64_t> strides_;
  size_t size_ = 0;
  std::unique_ptr<char, Free> memory_;
  char* data_ = nullptr;
};

struct Options {
  std::vector<int64_t> sizes;
  DType param = DType::f32, grad = DType::f32, accum = DType::f32, state = DType::f32;
  Layout param_layout = Layout::dense, grad_layout = Layout::dense;
  bool has_grad = true, has_accum = true, amsgrad = false;
};

// A row with all its tensors, and what their memory must hold once a kernel has run.
class Case {
 public:
  Row row;

  explicit Case(const Options& o) : sizes_(o.sizes) {
    const DType sum = o.param == DType::f64 ? DType::f64 : o.accum;
    tensors_.emplace_back(o.param, sizes_, o.param_layout);
    tensors_.emplace_back(o.grad, sizes_, o.grad_layout);
    tensors_.emplace_back(sum, sizes_, o.param_layout);
    tensors_.emplace_back(o.state, sizes_, o.param_layout);
    tensors_.emplace_back(o.state, sizes_, o.param_layout, true);
    tensors_.emplace_back(o.state, sizes_, o.param_layout, true);
    // As in a launch table: where one operand has strides all have.
    const bool strided = tensors_[kParam].strided() || tensors_[kGrad].strided();
    for (int k = 0; k < kTensors; ++k) *operand(k) = tensors_[k].operand(strided);
    row.numel = 1;
    for (int64_t n : sizes_) row.numel *= n;
    row.ndim = int(sizes_.size());
    row.sizes = sizes_.data();
    row.has_grad = o.has_grad;
    row.has_accum = o.has_accum;
    row.amsgrad = o.amsgrad;
    row.accum_dtype = sum;
    static const fa::StepScalars<double> scalars = {0.3, -0.7, 0.95, 0.1, -0.9, 0.99, 0.01, -0.5, 7.1, 1e-3};
    row.scalars = &scalars;
  }

  void expect_accumulate(double scale) {
    remember();
    for (int64_t i = 0; i < row.numel; ++i) {
      expect(kAccum, i, in_double() ? reference::sum<double>(row, i, scale, row.accum_dtype)
                                    : reference::sum<float>(row, i, float(scale), row.accum_dtype));
    }
  }

  void expect_step() {
    remember();
    for (int64_t i = 0; i < row.numel; ++i) {
      const reference::Updated u = in_double() ? reference::updated<double>(row, i) : reference::updated<float>(row, i);
      expect(kParam, i, u.param);
      expect(kExpAvg, i, u.exp_avg);
      expect(kExpAvgSq, i, u.exp_avg_sq);
      if (row.amsgrad) expect(kMaxExpAvgSq, i, u.max_exp_avg_sq);
      if (row.has_accum) expect(kAccum, i, 0);
    }
  }

  void check(const char* what) const {
    static const char* names[] = {"param", "grad", "accum", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    for (int k = 0; k < kTensors; ++k) {
      const std::vector<char> now = tensors_[k].bytes();
      if (now == expected_[k]) continue;
      size_t at = 0;
      while (now[at] == expected_[k][at]) ++at;
      std::string dtypes;
      for (const Tensor& t : tensors_) dtypes += " " + std::to_string(int(t.dtype()));
      fail(std::string(what) + ": " + names[k] + " differs at byte " + std::to_string(at) + " of " +
           std::to_string(now.size()) + "; " + std::to_string(row.numel) + " elements, dtypes" + dtypes +
           ", instruction set " + fa::cpu_kernels().name);
    }
    ++checks;
  }

 private:
  enum { kParam, kGrad, kAccum, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kTensors };

  Operand* operand(int k) {
    Operand* all[] = {&row.param, &row.grad, &row.accum, &row.exp_avg, &row.exp_avg_sq, &row.max_exp_avg_sq};
    return all[k];
  }

  bool in_double() const { return row.param.dtype == DType::f64; }

  void remember() {
    for (int k = 0; k < kTensors; ++k) expected_[k] = tensors_[k].bytes();
  }

  void expect(int k, int64_t i, double x) {
    Tensor& t = tensors_[size_t(k)];
    reference::store(t.dtype(), &expected_[k][size_t(t.at(reference::place(row, *operand(k), i)) - t.memory())], x);
  }

  std::vector<int64_t> sizes_;
  std::vector<Tensor> tensors_;
  std::vector<char> expected_[kTensors];
};
