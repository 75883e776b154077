// What tests see of the emulation, through ctypes (tests/cuda_emulated.py).
#pragma once

#include <cstdint>

#define FA_EMULATION_API extern "C" __attribute__((visibility("default")))

// The order of blocks and threads; 0: as they are numbered.
FA_EMULATION_API void fa_emulation_seed(uint64_t seed);

// Devices are 0 to count - 1; each host thread has a current one, at first 0.
FA_EMULATION_API void fa_emulation_device_count(int count);
FA_EMULATION_API int fa_emulation_device();
FA_EMULATION_API void fa_emulation_set_device(int device);
FA_EMULATION_API uint64_t fa_emulation_stream(int device);  // a new one, as a cudaStream_t

// Whether counts of updates are treated as if they were on the device, although they are CPU tensors as all others.
FA_EMULATION_API void fa_emulation_steps_on_device(int on);

// What was launched since the last call, a line each: type of the kernel's parameter, device, number of the stream
// (0: the device's default, then as fa_emulation_stream made them), grid, block; separated by tabs.
FA_EMULATION_API const char* fa_emulation_log();

// `call` ("cudaSetDevice", "launch", ...) returns `error` the next time but `after`, and does nothing then.
FA_EMULATION_API void fa_emulation_fail(const char* call, int error, int after);
FA_EMULATION_API void fa_emulation_plan_nothing();

// Which blocks run: 1: all; n: the first 64, the last 64, and every n-th.
FA_EMULATION_API void fa_emulation_sample_blocks(unsigned n);

// Whether a race ends the launch with an error.
FA_EMULATION_API void fa_emulation_check_races(int on);

// Memory that kernels may touch but that is only recorded: reads give zeros, writes are dropped. Returns its number.
FA_EMULATION_API int fa_emulation_add_phantom(uint64_t address, uint64_t bytes, uint64_t bytes_per_element);
// Elements read (0) or written (1), or writes to an element that had been written before (2).
FA_EMULATION_API uint64_t fa_emulation_phantom_count(int phantom, int kind);
FA_EMULATION_API int fa_emulation_phantom_was_written(int phantom, uint64_t element);
FA_EMULATION_API void fa_emulation_clear_phantoms();
