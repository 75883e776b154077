// Rows of a call to launches of CUDA kernels: by dtypes and flags, as many rows in one launch as a table holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels.h"
#include "kernels.h"

namespace fa {

// Runs rows on one device and stream, in order with what is in the stream; waits for nothing. The device that was
// current is current again afterwards.
class CudaExecutor : public Executor {
 public:
  // What a step reads from device memory, as addresses; 0: nothing.
  struct Factors {
    uint64_t found_inf = 0;  // float32: not 0: no update, the window is dropped
    uint64_t clip = 0;       // float64: multiplies the coefficient
    uint64_t counts = 0;     // a float64 for every row: contributions that its buffer holds
    uint64_t scale = 0;      // DeviceScale: instead of the calls' scale, of accumulations too
  };

  // Device memory, as addresses, which no other stream uses at the same time.
  struct Scratch {
    uint64_t slots = 0;  // for the ScalarSlot of every row of a step
    int64_t slot_count = 0;
    uint64_t squares = 0;  // for doubles, squares_for(rows, elements) of them, where sums of squares are wanted
    int64_t square_count = 0;
  };

  CudaExecutor(int device, uint64_t stream, Scratch scratch, Factors factors);

  static int64_t squares_for(int64_t rows, int64_t elements);

  void accumulate(const std::vector<Row>& rows, double scale) override;
  void measure(const std::vector<Row>& rows, double scale) override;
  void step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
            bool one_by_one) override;
  // rows must ascend and have an order; those outside the buffer add nothing.
  void scatter_rows(const ScatterJob& job) override;

 private:
  double* room_for_squares(const std::vector<Row>& rows) const;  // throws unless there is enough of it

  const DeviceScale* device_scale() const;

  const int device_;
  const cudaStream_t stream_;
  const Scratch scratch_;
  const Factors factors_;
};

// "" where the kernels run on `device` of this machine, else what CUDA says, and its versions.
std::string why_no_cuda(int device);

}  // namespace fa
