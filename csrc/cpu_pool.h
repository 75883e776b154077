// Threads for one kind of job, claim chunk numbers until none is left: torch's own where they can be had, else a
// persistent pool.
#pragma once

#include <cstdint>

namespace fa {

// Calls run(context, chunk) once for each chunk in [0, chunks) on up to `threads` threads, the caller among them;
// returns when all are done. `run` must not throw. One job at a time has the pool: a caller that finds it busy does
// its job alone. Workers take the caller's floating-point mode. Usable after fork(): the child starts a pool of its own.
void parallel_chunks(int64_t chunks, int threads, void (*run)(void* context, int64_t chunk), void* context);

// The same for anything that is called with a chunk.
template <class Run>
void in_parallel(int64_t chunks, int threads, const Run& run) {
  void* context = const_cast<Run*>(&run);
  parallel_chunks(chunks, threads, [](void* c, int64_t chunk) { (*static_cast<const Run*>(c))(chunk); }, context);
}

}  // namespace fa
