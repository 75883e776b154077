// The contract between callers and kernels: rows of a launch table, and the launches. No torch, no Python.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "scatter.h"
#include "squares.h"
#include "weights.h"

namespace fa {

// One tensor of a row.
struct Operand {
  void* data = nullptr;              // element (0, ..., 0)
  DType dtype = DType::f32;
  const int64_t* strides = nullptr;  // in elements; null: the elements lie one after the other, as in the row's others
};

// One parameter of a launch.
struct Row {
  Operand param, grad, accum, exp_avg, exp_avg_sq, max_exp_avg_sq;
  Operand master;                    // float32, or i16 where the parameter is the other half
  int64_t numel = 0;                 // elements
  int ndim = 0;                      // of sizes and strides, where an operand has strides
  const int64_t* sizes = nullptr;
  bool has_grad = false;             // a micro-batch still to be added
  bool has_accum = false;            // the buffer holds earlier ones: it is read (and, by a step, zeroed)
  bool amsgrad = false;
  DType accum_dtype = DType::f32;    // what the window's sum is rounded to, with or without a buffer
  const StepScalars<double>* scalars = nullptr;  // of a step; rows share them. On a GPU its kernels make them, from:
  int group = 0;                     // whose hyper-parameters
  void* step = nullptr;              // the count of updates, float32 or float64
  bool step_is_double = false;
  bool step_on_host = true;
  double* squares = nullptr;         // where the sum of squares goes, of what accum then holds; null: not wanted
  Weights weights = Weights::plain;
  Randomness randomness;             // of stochastic rounding; the executor sets its step
};

// What an executor throws that has not begun to write. Visible: one module throws it, another catches it.
struct __attribute__((visibility("default"))) NotBegun : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What runs rows somewhere. Everything is checked before; an error throws.
class Executor {
 public:
  virtual ~Executor() = default;

  // accum <- scale*grad where the row has no accum yet, else accum + scale*grad.
  virtual void accumulate(const std::vector<Row>& rows, double scale) = 0;

  // The sum of squares of every row's accum, or of what a first accumulation of its grad would write; reads only.
  virtual void measure(const std::vector<Row>& rows, double scale) = 0;

  // Counts an update of every row and makes it, from its grad, its accum, or both; `one_by_one` where rows share
  // memory that is written.
  virtual void step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
                    bool one_by_one) = 0;

  virtual void scatter_rows(const ScatterJob& job) = 0;
};

class CpuExecutor : public Executor {
 public:
  explicit CpuExecutor(int threads) : threads_(threads) {}
  void accumulate(const std::vector<Row>& rows, double scale) override;
  void measure(const std::vector<Row>& rows, double scale) override;
  void step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
            bool one_by_one) override;
  void scatter_rows(const ScatterJob& job) override;

 private:
  const int threads_;
};

// accum <- scale*grad where the row has no accum yet, else accum + scale*grad. A row's `squares`, where it has a place
// for them, get the sum of squares in one order: the same bits for any threads, instruction set, and other rows.
void cpu_accumulate(const Row* rows, int64_t count, double scale, int threads);

// As Executor::measure.
void cpu_measure(const Row* rows, int64_t count, double scale, int threads);

// One AdamW update of every row from its grad, its accum, or both. Rows must not share memory that is written.
void cpu_step(const Row* rows, int64_t count, int threads);

// A product to be added into a buffer, see product.h, of one block of tokens.
struct Product {
  float* buffer;
  int64_t rows, columns;
  Operand left;
  int64_t left_stride;
  Operand right;
  int64_t right_stride, tokens;
  bool first, past_cache;
  float* panels;  // `right`, as pack_panel lays it out
};

// What one instruction set provides for products; nothing where `chunk` is null.
struct ProductKernels {
  int64_t columns;  // of a panel
  void (*pack_panel)(const Product& p, int64_t panel);
  void (*chunk)(const Product& p, int64_t first_row, int64_t rows, int64_t first_panel, int64_t last_panel);
};

// What one instruction set provides, on elements [begin, end) of one row.
struct CpuKernels {
  const char* name;
  // squares, if not null: gets the sum of squares of every kSquaresBlock elements of what is written; `begin` is then a
  // multiple of that.
  void (*accumulate)(const Row& row, double scale, int64_t begin, int64_t end, bool streaming, double* squares);
  void (*measure)(const Row& row, double scale, int64_t begin, int64_t end, double* squares);
  void (*step)(const Row& row, int64_t begin, int64_t end);
  ProductKernels product;
};

extern const CpuKernels cpu_kernels_baseline;
extern const CpuKernels cpu_kernels_avx2;
extern const CpuKernels cpu_kernels_avx512;

// Instruction sets: the chosen one (FUSED_ACCUM_CPU_ISA, else the best), and why one cannot be used ("" if it can).
const CpuKernels& cpu_kernels();
int64_t last_level_cache_bytes();  // what is bigger is written past the cache, where it is not read
void use_cpu_isa(const char* name);  // throws std::runtime_error
const char* why_not_cpu_isa(const char* name);
constexpr const char* kCpuIsas[] = {"avx512", "avx2", "baseline"};

}  // namespace fa
