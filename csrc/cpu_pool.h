// A persistent pool of worker threads for one kind of job: claim chunk numbers until none is left.
#pragma once

#include <cstdint>

namespace fa {

// Calls run(context, chunk) once for each chunk in [0, chunks) on up to `threads` threads, the caller among them;
// returns when all are done. `run` must not throw. One job at a time has the workers: a caller that finds them busy
// does its job alone. Workers take the caller's floating-point mode. Usable after fork(): the child starts anew.
void parallel_chunks(int64_t chunks, int threads, void (*run)(void* context, int64_t chunk), void* context);

}  // namespace fa
