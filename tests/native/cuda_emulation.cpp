// Blocks and threads: the order they run in, barriers, shuffles, shared memory.
#include "cuda_emulation.h"

#include <sys/mman.h>

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_emulation_state.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

__thread FakeIndex threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_emulation {
namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4096;
constexpr unsigned kWarp = 32;

// A stack that is left, to return to.
#if defined(__x86_64__)

struct Context {
  void* stack;

  // What is left there, to be taken by the first `to_context`: an address to return to, over six registers.
  void start(char* bottom, size_t bytes, void (*function)()) {
    void** top = reinterpret_cast<void**>(bottom + bytes) - 8;  // `function` finds it as after a call
    for (int i = 0; i < 6; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(function);
    stack = top;
  }
};

// Leaves `from`, goes on in `to`. As swapcontext, which makes two system calls for the mask of signals each time.
extern "C" void fa_to_context(Context* from, const Context* to);
asm(R"(
.pushsection .text
.hidden fa_to_context
.globl fa_to_context
.type fa_to_context, @function
fa_to_context:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size fa_to_context, . - fa_to_context
.popsection
)");

#else

struct Context {
  ucontext_t context;

  void start(char* bottom, size_t bytes, void (*function)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = bottom;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, function, 0);
    context.uc_stack.ss_size = 0;  // of no more use, but to AddressSanitizer, which clears so much at every switch
  }
};

void fa_to_context(Context* from, const Context* to) { swapcontext(&from->context, &to->context); }

#endif

// A stack that runs threads of a block, one after the other, until one of them has to wait.
struct Fiber {
  Context context;
  char* memory;
  void* fake_stack = nullptr;
  unsigned thread = 0;
  bool fresh = true;  // the context must be made: new, or given up in the middle of a thread

  Fiber() {
    memory = static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) std::abort();
  }
  ~Fiber() { munmap(memory, kStack); }
  Fiber(const Fiber&) = delete;
};

// 0, 1, ..., n-1 in an order drawn from a seed, without a list of them.
class Order {
 public:
  Order(uint64_t n, uint64_t seed) : n_(n), factor_(seed ? seed * 0x9e3779b97f4a7c15u % n | 1 : 1), start_(seed) {
    while (std::gcd(factor_, n_) != 1) factor_ += 2;
  }
  uint64_t operator[](uint64_t i) const {
    return uint64_t((static_cast<unsigned __int128>(i) * factor_ + start_) % n_);
  }

 private:
  uint64_t n_, factor_, start_;
};

// Where threads wait for each other.
struct Meeting {
  unsigned arrived = 0, generation = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  Meeting shuffle;
  uint64_t values[2][kWarp];  // of this shuffle and of the one before, which slower threads may still read
};

struct SharedArray {
  void* memory;

  explicit SharedArray(size_t bytes) : memory(std::aligned_alloc(16, (bytes + 15) / 16 * 16)) {
    if (!memory) std::abort();
    std::memset(memory, 0xaa, bytes);
    memory_is_new(memory, bytes);
  }
  ~SharedArray() { std::free(memory); }
  SharedArray(const SharedArray&) = delete;
};

struct Machine {
  Context scheduler;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
  std::vector<std::unique_ptr<Fiber>> all;
  std::vector<Fiber*> idle;
  std::deque<Fiber*> ready;
  Fiber* current = nullptr;
  std::string error;
  const Launch* launch = nullptr;
  const Order* order = nullptr;
  unsigned started = 0, finished = 0;  // threads of the running block
  Meeting barrier;
  std::vector<Warp> warps;
  std::map<const void*, std::unique_ptr<SharedArray>> shared;
};

thread_local Machine machine_of_thread;
__thread Machine* machine;  // the same, in a launch: no guard around every use

void to_scheduler() {
  Fiber* self = machine->current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&self->fake_stack, machine->scheduler_bottom, machine->scheduler_size);
#endif
  fa_to_context(&self->context, &machine->scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->fake_stack, &machine->scheduler_bottom, &machine->scheduler_size);
#endif
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine->scheduler_bottom, &machine->scheduler_size);
#endif
  while (true) {
    while (machine->started < machine->launch->block) {
      machine->current->thread = threadIdx.x = unsigned((*machine->order)[machine->started++]);
      machine->launch->call(machine->launch->context);
      ++machine->finished;
    }
    machine->idle.push_back(machine->current);
    to_scheduler();
  }
}

void resume(Fiber* fiber) {
  machine->current = fiber;
  threadIdx.x = fiber->thread;
  char* bottom = fiber->memory + kGuard;
  if (fiber->fresh) {
    fiber->fresh = false;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(bottom, kStack - kGuard);
#endif
    fiber->context.start(bottom, kStack - kGuard, fiber_main);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&machine->scheduler_fake_stack, bottom, kStack - kGuard);
#endif
  fa_to_context(&machine->scheduler, &fiber->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(machine->scheduler_fake_stack, nullptr, nullptr);
#endif
  machine->current = nullptr;
}

// Waits until `needed` threads are here; returns whether the caller is the last of them.
bool meet(Meeting& meeting, unsigned needed) {
  if (++meeting.arrived == needed) {
    meeting.arrived = 0;
    ++meeting.generation;
    machine->ready.insert(machine->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    return true;
  }
  meeting.waiting.push_back(machine->current);
  to_scheduler();
  return false;
}

void give_up() {
  for (auto& fiber : machine->all) fiber->fresh = true;
  machine->idle.clear();
  for (auto& fiber : machine->all) machine->idle.push_back(fiber.get());
  machine->ready.clear();
}

void run_block() {
  const unsigned threads = machine->launch->block;
  machine->started = machine->finished = 0;
  machine->barrier = Meeting();
  machine->warps.assign(threads / kWarp, Warp());
  while (machine->finished < threads && machine->error.empty()) {
    Fiber* next = nullptr;
    if (!machine->ready.empty()) {
      next = machine->ready.front();
      machine->ready.pop_front();
    } else if (machine->started < threads) {
      if (machine->idle.empty()) {
        machine->all.push_back(std::make_unique<Fiber>());
        machine->idle.push_back(machine->all.back().get());
      }
      next = machine->idle.back();
      machine->idle.pop_back();
    } else {
      unsigned shuffling = 0;
      for (const Warp& warp : machine->warps) shuffling += warp.shuffle.arrived;
      machine->error = "a barrier that not all threads reach: of " + std::to_string(threads) + " threads " +
                      std::to_string(machine->barrier.arrived) + " wait at __syncthreads, " +
                      std::to_string(shuffling) + " at a shuffle, " + std::to_string(machine->finished) + " have ended";
      break;
    }
    resume(next);
  }
}

}  // namespace

void fail(std::string&& message) {
  machine->error = std::move(message);
  to_scheduler();
  std::abort();  // never resumed
}

void misaligned(const void* address, size_t bytes) {
  fail("an access to " + std::to_string(bytes) + " bytes at address " +
       std::to_string(reinterpret_cast<uintptr_t>(address)) + ", which is not aligned to them");
}

uint64_t shuffle_down(uint64_t value, unsigned delta) {
  Warp& warp = machine->warps[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  uint64_t* values = warp.values[warp.shuffle.generation & 1];
  values[lane] = value;
  meet(warp.shuffle, kWarp);
  return values[lane + delta < kWarp ? lane + delta : lane];
}

void* shared(const void* tag, size_t bytes) {
  std::unique_ptr<SharedArray>& array = machine->shared[tag];
  if (!array) array = std::make_unique<SharedArray>(bytes);
  return array->memory;
}

void run_blocks(const Launch& launch, uint64_t seed, unsigned sample) {
  gridDim.x = launch.grid;
  blockDim.x = launch.block;
  const Order of_blocks(launch.grid, seed), of_threads(launch.block, seed);
  machine = &machine_of_thread;
  machine->launch = &launch;
  machine->order = &of_threads;
  std::string().swap(machine->error);  // so that `fail` has nothing to give in exchange
  for (unsigned i = 0; i < launch.grid && machine->error.empty(); ++i) {
    const unsigned block = unsigned(of_blocks[i]);
    if (block >= 64 && block + 64 < launch.grid && block % sample) continue;
    blockIdx.x = block;
    block_begins();
    run_block();
    machine->shared.clear();
  }
  if (machine->error.empty()) return;
  give_up();
  throw KernelError(machine->error);
}

}  // namespace cuda_emulation

void __syncthreads() {
  using namespace cuda_emulation;
  if (meet(machine->barrier, machine->launch->block)) block_barrier_passed();
}
