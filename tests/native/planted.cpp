// Small kernels, right ones and wrong ones, to test the emulation with: `planted NAME races` runs one
// under 20 orders of blocks and threads, with the check of races.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_emulation_control.h"
#include "cuda_port.h"

namespace fa {
namespace {

constexpr unsigned kBlock = 128, kBlocks = 7, kWarps = kBlock / 32;

struct Job {
  float* to;
  const float* from;
  int64_t numel;
};

int64_t index_of_thread() { return int64_t(blockIdx.x) * kBlock + threadIdx.x; }

// Every block's sum by shuffles and shared memory, as a reduction on a GPU is written.
template <bool kBarrier>
__global__ void __launch_bounds__(kBlock) block_sums(FA_PARAMETER(Job) job) {
  FA_SHARED(float, partial, kWarps);
  const int64_t i = index_of_thread();
  float sum = i < job.numel ? global_load(job.from + i) : 0.0f;
  for (unsigned delta = 16; delta; delta /= 2) sum += __shfl_down_sync(0xffffffffu, sum, delta);
  if (threadIdx.x % 32 == 0) shared_store(&partial[threadIdx.x / 32], sum);
  if (kBarrier) __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (unsigned warp = 0; warp < kWarps; ++warp) total += shared_load(&partial[warp]);
  global_store(job.to + blockIdx.x, total);
}

// The elements of a block, reversed: shared memory that is used twice needs two barriers.
template <bool kSecondBarrier>
__global__ void reverse_twice(FA_PARAMETER(Job) job) {
  FA_SHARED(float, line, kBlock);
  const int64_t i = index_of_thread();
  float value = global_load(job.from + i);
  for (int turn = 0; turn < 2; ++turn) {
    shared_store(&line[threadIdx.x], value);
    __syncthreads();
    value = shared_load(&line[kBlock - 1 - threadIdx.x]);
    if (kSecondBarrier) __syncthreads();
  }
  global_store(job.to + i, value);
}

__global__ void copy_one_too_many(FA_PARAMETER(Job) job) {
  const int64_t i = index_of_thread();
  if (i <= job.numel) global_store(job.to + i, i < job.numel ? global_load(job.from + i) : 0.0f);
}

__global__ void shared_one_too_many(FA_PARAMETER(Job) job) {
  FA_SHARED(float, line, kBlock);
  shared_store(&line[threadIdx.x + 1], 1.0f);
  __syncthreads();
  global_store(job.to + index_of_thread(), shared_load(&line[threadIdx.x]));
}

__global__ void blocks_write_the_same(FA_PARAMETER(Job) job) { global_store(job.to + threadIdx.x, 1.0f); }

__global__ void threads_write_the_same(FA_PARAMETER(Job) job) {
  global_store(job.to + index_of_thread() / 2, 1.0f);
}

__global__ void block_reads_its_neighbours(FA_PARAMETER(Job) job) {
  const int64_t i = index_of_thread();
  global_store(job.to + i, i + kBlock < job.numel ? global_load(job.to + i + kBlock) : 0.0f);
}

__global__ void barrier_for_some(FA_PARAMETER(Job) job) {
  if (threadIdx.x < 64) __syncthreads();
  global_store(job.to + index_of_thread(), 1.0f);
}

__global__ void shuffle_of_half_a_warp(FA_PARAMETER(Job) job) {
  float value = float(threadIdx.x);
  if (threadIdx.x % 32 < 16) value = __shfl_down_sync(0xffffffffu, value, 1u);
  global_store(job.to + index_of_thread(), value);
}

__global__ void misaligned_pair(FA_PARAMETER(Job) job) {
  struct Pair {
    float x, y;
  };
  if (threadIdx.x == 0) global_store(reinterpret_cast<Pair*>(job.to + 1), Pair{1, 2});
}

void expect(bool right, const char* what) {
  if (!right) throw std::logic_error(what);
}

using Kernel = void (*)(FA_PARAMETER(Job));

// Runs the kernel on [0, numel) and, where it is known what comes out, compares.
void run(Kernel kernel, int64_t numel, const std::function<float(int64_t)>& expected = nullptr) {
  std::vector<float> from(numel), to(numel);
  for (int64_t i = 0; i < numel; ++i) from[i] = float(i);
  FA_LAUNCH(kernel, kBlocks, kBlock, 0, nullptr, Job{to.data(), from.data(), numel});
  expect(cudaGetLastError() == cudaSuccess, "the launch failed");
  if (!expected) return;
  for (int64_t i = 0; i < numel; ++i) expect(to[i] == expected(i), "a wrong result");
}

float sum_of_block(int64_t block) {
  float sum = 0;
  for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) sum += float(i);
  return block < kBlocks ? sum : 0.0f;
}

const std::map<std::string, std::function<void()>> all = {
    {"sums", [] { run(block_sums<true>, kBlock * kBlocks, sum_of_block); }},
    {"sums-without-barrier", [] { run(block_sums<false>, kBlock * kBlocks, sum_of_block); }},
    {"reverse",
     [] { run(reverse_twice<true>, kBlock * kBlocks, [](int64_t i) { return float(i); }); }},
    {"reverse-without-barrier", [] { run(reverse_twice<false>, kBlock * kBlocks); }},
    {"out-of-bounds", [] { run(copy_one_too_many, kBlock * kBlocks - 1); }},
    {"shared-out-of-bounds", [] { run(shared_one_too_many, kBlock * kBlocks); }},
    {"blocks-write", [] { run(blocks_write_the_same, kBlock * kBlocks); }},
    {"threads-write", [] { run(threads_write_the_same, kBlock * kBlocks); }},
    {"neighbour", [] { run(block_reads_its_neighbours, kBlock * kBlocks); }},
    {"barrier-for-some", [] { run(barrier_for_some, kBlock * kBlocks); }},
    {"half-a-warp", [] { run(shuffle_of_half_a_warp, kBlock * kBlocks); }},
    {"misaligned", [] { run(misaligned_pair, kBlock * kBlocks); }},
};

}  // namespace
}  // namespace fa

int main(int argc, char** argv) {
  fa_emulation_check_races(argc > 2 && std::string(argv[2]) == "races");
  for (uint64_t seed = 0; seed < 20; ++seed) {  // a launch that failed must leave the next ones alone
    fa_emulation_seed(seed);
    try {
      fa::all.at(argv[1])();
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
      continue;
    }
    std::printf("right\n");
  }
}
