// What the parts of the emulation know of each other.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda_emulation.h"

namespace cuda_emulation {

// What a kernel did wrong; thrown by the launch.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ends the launch, from within a thread of it, whose stack is given up: it must not own anything.
[[noreturn]] void fail(std::string&& message);

// Runs the blocks, in an order drawn from the seed; throws KernelError. `sample`: see fa_emulation_sample_blocks.
void run_blocks(const Launch& launch, uint64_t seed, unsigned sample);

// The recorder of accesses (cuda_emulation_memory.cpp) is told where it is, and when order comes about.
void launch_begins(const char* kernel);
void block_begins();
void block_barrier_passed();
void memory_is_new(const void* address, size_t bytes);

}  // namespace cuda_emulation
