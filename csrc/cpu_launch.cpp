// Launches: cut all rows of a call into equal chunks, run them on the pool with the chosen instruction set.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_pool.h"
#include "kernels.h"

namespace fa {
namespace {

constexpr int64_t kChunk = 32768;  // elements; a multiple of any vector and cache line

// The rows of a call as one line of elements, cut into chunks: big tensors are shared, small ones go together.
struct Line {
  const Row* rows;
  int64_t count;
  std::vector<int64_t> start;  // of each row on the line

  // Rows start at multiples of `unit`, and so then do their parts.
  Line(const Row* rows_, int64_t count_, int64_t unit = 1) : rows(rows_), count(count_), start(size_t(count_) + 1) {
    for (int64_t i = 0; i < count; ++i) start[i + 1] = start[i] + (rows[i].numel + unit - 1) / unit * unit;
  }

  int64_t length() const { return start[count]; }

  // Calls visit(row, begin, end, its place on the line) for every part of a row in chunk number `chunk`.
  template <class Visit>
  void visit_chunk(int64_t chunk, Visit visit) const {
    const int64_t from = chunk * kChunk;
    const int64_t to = from + kChunk < length() ? from + kChunk : length();
    int64_t low = 0, high = count;  // the last row that starts at or before `from`
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (start[middle] <= from ? low : high) = middle;
    }
    for (int64_t i = low; i < count && start[i] < to; ++i) {
      const int64_t begin = from > start[i] ? from - start[i] : 0;
      const int64_t end = to - start[i] < rows[i].numel ? to - start[i] : rows[i].numel;
      if (begin < end) visit(rows[i], begin, end, start[i] + begin);
    }
  }

  template <class Visit>
  void run(int threads, Visit visit) const {
    const int64_t chunks = (length() + kChunk - 1) / kChunk;
    in_parallel(chunks, threads, [&](int64_t chunk) { visit_chunk(chunk, visit); });
  }
};

// The sums of squares of a call's rows: of blocks while it runs, then of rows, in the lanes of kSquaresLanes.
class BlockSquares {
 public:
  explicit BlockSquares(const Line& line) : line_(line), sums_(size_t(line.length() / kSquaresBlock)) {}

  double* at(int64_t place) { return sums_.data() + place / kSquaresBlock; }

  void finish() {
    for (int64_t i = 0; i < line_.count; ++i) {
      if (!line_.rows[i].squares) continue;
      const double* blocks = at(line_.start[i]);
      const int64_t count = at(line_.start[i + 1]) - blocks;
      double lanes[kSquaresLanes] = {};
      for (int64_t k = 0; k < count; ++k) lanes[k % kSquaresLanes] += blocks[k];
      int half = kSquaresLanes / 2;
      while (half && half >= count) half /= 2;  // from there on all is 0
      for (; half; half /= 2) {
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
      }
      *line_.rows[i].squares = lanes[0];
    }
  }

 private:
  const Line& line_;
  std::vector<double> sums_;
};

const CpuKernels* compiled(const char* name) {
#if defined(FA_HAVE_AVX512)
  if (!std::strcmp(name, "avx512")) return &cpu_kernels_avx512;
#endif
#if defined(FA_HAVE_AVX2)
  if (!std::strcmp(name, "avx2")) return &cpu_kernels_avx2;
#endif
  if (!std::strcmp(name, "baseline")) return &cpu_kernels_baseline;
  return nullptr;
}

bool machine_has(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512")) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && machine_has("avx2");
  }
  if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !std::strcmp(name, "baseline");
}

std::atomic<const CpuKernels*> chosen{nullptr};

}  // namespace

// What one core reaches; sysconf(_SC_LEVEL3_CACHE_SIZE) gives all of a socket's on some machines.
int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    long kibibytes = 0;
    if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%ldK", &kibibytes) != 1) kibibytes = 0;
      std::fclose(file);
    }
    return kibibytes > 0 ? int64_t(kibibytes) << 10 : int64_t(8) << 20;
  }();
  return bytes;
}

const char* why_not_cpu_isa(const char* name) {
  if (!compiled(name)) return "not compiled into this build";
  return machine_has(name) ? "" : "this processor does not have it";
}

void use_cpu_isa(const char* name) {
  const char* reason = why_not_cpu_isa(name);
  if (*reason) {
    std::string usable;
    for (const char* isa : kCpuIsas) {
      if (!*why_not_cpu_isa(isa)) usable += std::string(usable.empty() ? "" : ", ") + isa;
    }
    throw std::runtime_error("CPU instruction set '" + std::string(name) + "': " + reason +
                             "; set FUSED_ACCUM_CPU_ISA to one of " + usable + ", or unset it");
  }
  chosen = compiled(name);
}

const CpuKernels& cpu_kernels() {
  if (const CpuKernels* kernels = chosen.load()) return *kernels;
  const char* wanted = std::getenv("FUSED_ACCUM_CPU_ISA");
  if (wanted && *wanted) {
    use_cpu_isa(wanted);
    return *chosen.load();
  }
  for (const char* isa : kCpuIsas) {  // the best first; baseline is always there
    if (*why_not_cpu_isa(isa)) continue;
    use_cpu_isa(isa);
    break;
  }
  return *chosen.load();
}

void cpu_accumulate(const Row* rows, int64_t count, double scale, int threads) {
  const CpuKernels& kernels = cpu_kernels();
  int64_t written = 0;
  bool squares = false;
  for (int64_t i = 0; i < count; ++i) {
    squares = squares || rows[i].squares;
    if (!rows[i].has_accum) written += rows[i].numel * int64_t(size_of(rows[i].accum.dtype));
  }
  const bool streaming = written > last_level_cache_bytes() / 2;
  if (!squares) {
    return Line(rows, count).run(threads, [&](const Row& row, int64_t begin, int64_t end, int64_t) {
      kernels.accumulate(row, scale, begin, end, streaming, nullptr);
    });
  }
  const Line line(rows, count, kSquaresBlock);
  BlockSquares sums(line);
  line.run(threads, [&](const Row& row, int64_t begin, int64_t end, int64_t place) {
    kernels.accumulate(row, scale, begin, end, streaming, row.squares ? sums.at(place) : nullptr);
  });
  sums.finish();
}

void cpu_measure(const Row* rows, int64_t count, double scale, int threads) {
  const CpuKernels& kernels = cpu_kernels();
  const Line line(rows, count, kSquaresBlock);
  BlockSquares sums(line);
  line.run(threads, [&](const Row& row, int64_t begin, int64_t end, int64_t place) {
    kernels.measure(row, scale, begin, end, sums.at(place));
  });
  sums.finish();
}

void cpu_step(const Row* rows, int64_t count, int threads) {
  const CpuKernels& kernels = cpu_kernels();
  Line(rows, count).run(threads, [&](const Row& row, int64_t begin, int64_t end, int64_t) {
    kernels.step(row, begin, end);
  });
}

void CpuExecutor::accumulate(const std::vector<Row>& rows, double scale) {
  cpu_accumulate(rows.data(), int64_t(rows.size()), scale, threads_);
}

void CpuExecutor::measure(const std::vector<Row>& rows, double scale) {
  cpu_measure(rows.data(), int64_t(rows.size()), scale, threads_);
}

void CpuExecutor::step(std::vector<Row>& rows, const std::vector<Hyper>& hypers, double scale, double coefficient,
                       bool one_by_one) {
  std::deque<StepScalars<double>> scalars;  // one for every change of group or t; they stay in place
  int group_before = -1;
  double t_before = 0;
  for (Row& row : rows) {
    const double t = row.step_is_double ? *static_cast<double*>(row.step) += 1
                                        : double(*static_cast<float*>(row.step) += 1);
    if (row.group != group_before || t != t_before) {
      scalars.push_back(step_scalars(hypers[size_t(row.group)], t, scale, coefficient));
    }
    group_before = row.group;
    t_before = t;
    row.scalars = &scalars.back();
    row.randomness.step = static_cast<uint32_t>(t);
  }
  if (!one_by_one) return cpu_step(rows.data(), int64_t(rows.size()), threads_);
  for (const Row& row : rows) cpu_step(&row, 1, threads_);
}

}  // namespace fa
