#include "cpu_pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fa {
namespace {

unsigned floating_point_mode() {
#if defined(__SSE2__)
  return _mm_getcsr();
#else
  return 0;
#endif
}

void set_floating_point_mode(unsigned mode) {
#if defined(__SSE2__)
  _mm_setcsr(mode);
#else
  (void)mode;
#endif
}

struct Job {
  void (*run)(void*, int64_t);
  void* context;
  int64_t chunks;
  unsigned mode;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) run(context, chunk);
  }
};

class Pool {
 public:
  std::mutex in_use;  // held for the length of a job

  void run(Job& job, int helpers) {
    helpers = grow(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      tickets_ = helpers;
      active_ = 0;
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    tickets_ = 0;  // a worker not awake by now is not needed
    job_ = nullptr;
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  // Starts workers up to `helpers`; returns how many there are (fewer where the system refuses a thread).
  int grow(int helpers) {
    while (workers_ < helpers) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        break;
      }
      ++workers_;
    }
    return helpers < workers_ ? helpers : workers_;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return tickets_ > 0; });
      --tickets_;
      ++active_;
      Job* job = job_;
      lock.unlock();
      set_floating_point_mode(job->mode);
      job->work();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int tickets_ = 0;  // workers still to join the job
  int active_ = 0;   // workers in it
  int workers_ = 0;
};

// Never destroyed: workers may outlive main(). A forked child has none of the threads, and the parent's locks may be
// held in it: it gets a pool of its own.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

using OpenMP = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

bool forked = false;
const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// Runs a function on torch's own threads, where torch brings GNU OpenMP (its symbols are global then); else null.
// They spin for some milliseconds after every torch operation, and threads of ours would have to share the cores with
// them: a first write just after a.add_(b) then runs at 0.66 of that operation's bandwidth instead of 0.84. Not in a
// forked child, where GNU OpenMP waits forever for threads that only the parent had.
OpenMP torch_threads() {
  static const OpenMP found = reinterpret_cast<OpenMP>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked ? nullptr : found;
}

}  // namespace

void parallel_chunks(int64_t chunks, int threads, void (*run)(void*, int64_t), void* context) {
  Job job{run, context, chunks, floating_point_mode()};
  if (chunks < 2 || threads < 2) return job.work();
  if (OpenMP run_on_team = torch_threads()) {
    auto work = [](void* of) {
      Job& job = *static_cast<Job*>(of);
      const unsigned own = floating_point_mode();
      set_floating_point_mode(job.mode);
      job.work();
      set_floating_point_mode(own);
    };
    return run_on_team(work, &job, unsigned(threads), 0);  // all of them: those of a smaller team would end the others
  }
  Pool& workers = the_pool();
  std::unique_lock<std::mutex> alone(workers.in_use, std::try_to_lock);
  if (!alone) return job.work();
  workers.run(job, int(chunks < threads ? chunks : threads) - 1);
}

}  // namespace fa
