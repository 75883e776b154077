// Accesses: races between threads and between blocks, and memory that is recorded instead of touched.
#include <array>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "cuda_emulation_control.h"
#include "cuda_emulation_state.h"

namespace cuda_emulation {

bool watching = false;

namespace {

// One touch of a byte. Two in one launch are in order if one thread makes them or, in one block, a barrier lies between.
struct Touch {
  uint32_t launch = 0, block = 0, thread = 0, epoch = 0;
};

struct Byte {
  Touch write, reads[2];  // the last reads of two different threads
};

constexpr size_t kPage = 4096, kMostPages = 1000;
using Page = std::array<Byte, kPage>;

// A bit for every element, in memory that is only taken where bits are set.
class Bits {
 public:
  explicit Bits(uint64_t count) : words_(static_cast<uint64_t*>(std::calloc(count / 64 + 1, 8)), &std::free) {
    if (!words_) std::abort();
  }
  bool operator[](uint64_t i) const { return words_.get()[i / 64] >> i % 64 & 1; }
  uint64_t count() const { return count_; }

  // Whether it was not set before.
  bool set(uint64_t i) {
    if ((*this)[i]) return false;
    words_.get()[i / 64] |= uint64_t(1) << i % 64;
    return ++count_ != 0;
  }

 private:
  std::unique_ptr<uint64_t, void (*)(void*)> words_;
  uint64_t count_ = 0;
};

struct Phantom {
  uintptr_t begin, end;
  size_t element;
  Bits read, written;
  uint64_t written_again = 0;
};

struct Recorder {
  bool races = false;
  std::string kernel;
  uint32_t launch = 0;
  uint32_t epoch = 0;  // of the running block; one more at every barrier
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
  std::vector<Phantom> phantoms;
} recorder;

Byte& byte_at(uintptr_t address) {
  std::unique_ptr<Page>& page = recorder.pages[address / kPage];
  if (!page) page = std::make_unique<Page>();
  return (*page)[address % kPage];
}

bool collide(const Touch& before, const Touch& now) {
  if (before.launch != now.launch) return false;
  return before.block != now.block || (before.thread != now.thread && before.epoch == now.epoch);
}

std::string report(uintptr_t address, const char* first, const Touch& before, const char* second,
                   const Touch& now) {
  std::ostringstream text;
  text << "race in a kernel of " << recorder.kernel << ": memory at 0x" << std::hex << address << std::dec << " is " << first
       << " by thread " << before.thread << " of block " << before.block << " and " << second << " by thread "
       << now.thread << " of block " << now.block << ", and nothing orders them";
  return text.str();
}

void check_races(uintptr_t address, size_t bytes, Access access) {
  const Touch now{recorder.launch, blockIdx.x, threadIdx.x, recorder.epoch};
  Byte* const first = &byte_at(address);  // an aligned access stays in its page
  for (uintptr_t at = address; at < address + bytes; ++at) {
    Byte& byte = first[at - address];
    if (access == Access::read) {
      if (collide(byte.write, now)) fail(report(at, "written", byte.write, "read", now));
      if (collide(byte.reads[0], now)) byte.reads[1] = byte.reads[0];
      byte.reads[0] = now;
      continue;
    }
    if (collide(byte.write, now)) fail(report(at, "written", byte.write, "written", now));
    for (const Touch& read : byte.reads) {
      if (collide(read, now)) fail(report(at, "read", read, "written", now));
    }
    byte.write = now;
  }
}

// False where [address, address + bytes) is not in the phantom.
bool note_phantom(Phantom& phantom, uintptr_t address, size_t bytes, Access access) {
  if (address >= phantom.end || address + bytes <= phantom.begin) return false;
  if (address < phantom.begin || address + bytes > phantom.end) fail("an access that leaves a recorded memory");
  const uint64_t first = (address - phantom.begin) / phantom.element;
  const uint64_t last = (address + bytes - 1 - phantom.begin) / phantom.element;
  for (uint64_t i = first; i <= last; ++i) {
    if (access == Access::read) phantom.read.set(i);
    else if (!phantom.written.set(i)) ++phantom.written_again;
  }
  return true;
}

void decide_whether_to_watch() { watching = recorder.races || !recorder.phantoms.empty(); }

}  // namespace

bool note(const void* pointer, size_t bytes, Access access) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  for (Phantom& phantom : recorder.phantoms) {
    if (note_phantom(phantom, address, bytes, access)) return false;
  }
  if (recorder.races) check_races(address, bytes, access);
  return true;
}

void launch_begins(const char* kernel) {
  recorder.kernel = kernel;
  ++recorder.launch;
  if (recorder.pages.size() > kMostPages) recorder.pages.clear();  // of launches that are over
}

void block_begins() { ++recorder.epoch; }
void block_barrier_passed() { ++recorder.epoch; }

void memory_is_new(const void* address, size_t bytes) {
  if (!recorder.races) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = begin; at < begin + bytes; ++at) byte_at(at) = Byte();
}

}  // namespace cuda_emulation

// ---- for tests ---------------------------------------------------------------------------------------------------

using namespace cuda_emulation;

void fa_emulation_check_races(int on) {
  recorder.races = on != 0;
  recorder.pages.clear();
  decide_whether_to_watch();
}

int fa_emulation_add_phantom(uint64_t address, uint64_t bytes, uint64_t element) {
  const uint64_t count = bytes / element;
  recorder.phantoms.push_back({address, address + bytes, element, Bits(count), Bits(count)});
  decide_whether_to_watch();
  return int(recorder.phantoms.size()) - 1;
}

uint64_t fa_emulation_phantom_count(int which, int kind) {
  const Phantom& phantom = recorder.phantoms.at(size_t(which));
  return kind == 0 ? phantom.read.count() : kind == 1 ? phantom.written.count() : phantom.written_again;
}

int fa_emulation_phantom_was_written(int which, uint64_t element) {
  return recorder.phantoms.at(size_t(which)).written[element];
}

void fa_emulation_clear_phantoms() {
  recorder.phantoms.clear();
  decide_whether_to_watch();
}
