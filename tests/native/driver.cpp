// Runs the CPU core of csrc/ without Python, to be built with sanitizers: every kernel over odd sizes, dtypes,
// layouts, instruction sets and thread counts, against the one-element-at-a-time reference. Exit status 0 when all
// agree bit for bit.
//
// Usage: driver            everything
//        driver threads    what runs on several threads, for ThreadSanitizer (which does not survive fork)
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "products.h"

namespace {

using Cases = std::vector<std::unique_ptr<Case>>;

void run_accumulate(Cases& cases, double scale, int threads) {
  std::vector<Row> rows;
  for (auto& c : cases) {
    c->row.has_grad = true;
    c->expect_accumulate(scale);
    rows.push_back(c->row);
  }
  fa::cpu_accumulate(rows.data(), int64_t(rows.size()), scale, threads);
  for (auto& c : cases) c->check("accumulate");
}

void run_step(Cases& cases, int threads) {
  std::vector<Row> rows;
  for (auto& c : cases) c->expect_step(), rows.push_back(c->row);
  fa::cpu_step(rows.data(), int64_t(rows.size()), threads);
  for (auto& c : cases) c->check("step");
}

Cases one(const Options& o) {
  Cases cases;
  cases.push_back(std::make_unique<Case>(o));
  return cases;
}

void run_both(const Options& o, int threads) {
  auto cases = one(o);
  run_accumulate(cases, 0.37, threads);
  cases = one(o);
  run_step(cases, threads);
}

const DType kDtypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
const Layout kLayouts[] = {Layout::dense,   Layout::misaligned_element, Layout::misaligned_byte,
                           Layout::stepped, Layout::transposed,         Layout::expanded};

void sources(Options o, int threads) {
  for (int source = 1; source < 4; ++source) {
    o.has_grad = source & 1;
    o.has_accum = source & 2;
    run_both(o, threads);
  }
}

void every_size() {
  for (int64_t n : {0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 255, 257, 1023, 1024, 1025, 2049, 32767, 32768, 32769}) {
    Options o;
    o.sizes = {n};
    for (DType dtype : {DType::f32, DType::bf16}) {
      o.param = o.grad = dtype;
      o.amsgrad = n % 2;
      sources(o, 3);
    }
  }
}

void every_dtype() {
  for (DType param : kDtypes) {
    for (DType grad : kDtypes) {
      for (DType accum : {DType::f32, DType::bf16}) {
        for (DType state : {DType::f32, DType::bf16, param}) {
          if (param == DType::f64 && (state != param || accum != DType::f32)) continue;
          Options o;
          o.sizes = {1031};
          o.param = param, o.grad = grad, o.accum = accum, o.state = state;
          for (bool amsgrad : {false, true}) {
            o.amsgrad = amsgrad;
            sources(o, 2);
          }
        }
      }
    }
  }
}

void every_layout() {
  for (Layout param : kLayouts) {
    if (param == Layout::expanded) continue;
    for (Layout grad : kLayouts) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        for (const std::vector<int64_t>& sizes :
             {std::vector<int64_t>{}, {5}, {1, 3}, {37, 61}, {3, 0, 2}, {6, 5, 4, 3}, {2, 3, 2, 3, 2, 3, 2, 3, 2}}) {
          Options o;
          o.sizes = sizes;
          o.param = o.grad = dtype;
          o.param_layout = param, o.grad_layout = grad;
          sources(o, 2);
        }
      }
    }
  }
}

// Rows of all sizes in one launch, with empty ones in every position, on several threads.
void mixed_rows() {
  for (int threads : {1, 2, 3, 7}) {
    for (int shift = 0; shift < 3; ++shift) {
      const int64_t numels[] = {0, 70001, 3, 0, 1, 40000, 64, 0};
      Cases cases;
      for (int k = 0; k < 8; ++k) {
        Options o;
        o.sizes = {numels[(k + shift) % 8]};
        o.param = o.grad = kDtypes[k % 4];
        o.state = o.param == DType::f64 ? DType::f64 : DType::f32;
        o.has_accum = k % 3;
        cases.push_back(std::make_unique<Case>(o));
      }
      run_accumulate(cases, 0.25, threads);
      for (auto& c : cases) c->row.has_accum = true, c->row.has_grad = c->row.numel % 2;
      run_step(cases, threads);
    }
    Cases none;
    run_accumulate(none, 1.0, threads);
    run_step(none, threads);
  }
}

// Stores past the cache start at any address and end anywhere; parts of a row are written by different calls.
void streaming() {
  for (DType accum : kDtypes) {
    for (int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 200, 1000, 1025, 5000}) {
      for (Layout layout : {Layout::dense, Layout::misaligned_element, Layout::misaligned_byte, Layout::stepped}) {
        for (DType grad : {DType::f32, accum}) {
          Options o;
          o.sizes = {n};
          o.param = accum == DType::f64 ? DType::f64 : DType::f32;
          o.grad = grad, o.accum = accum;
          o.param_layout = layout;
          o.has_accum = false;
          for (int64_t cut : {int64_t(0), n / 3, n}) {
            Case c(o);
            c.expect_accumulate(0.5);
            fa::cpu_kernels().accumulate(c.row, 0.5, 0, cut, true, nullptr);
            fa::cpu_kernels().accumulate(c.row, 0.5, cut, n, true, nullptr);
            c.check("streaming accumulate");
          }
        }
      }
    }
  }
}

// Several callers at once: one has the pool, the others work alone.
void concurrent_callers() {
  std::vector<Cases> all(4);
  for (auto& cases : all) {
    for (int64_t n : {50000, 7, 33000}) {
      Options o;
      o.sizes = {n};
      cases.push_back(std::make_unique<Case>(o));
      cases.back()->expect_step();
    }
  }
  std::vector<std::thread> callers;
  for (auto& cases : all) {
    callers.emplace_back([&cases] {
      std::vector<Row> rows;
      for (auto& c : cases) rows.push_back(c->row);
      fa::cpu_step(rows.data(), int64_t(rows.size()), 3);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (auto& cases : all) {
    for (auto& c : cases) c->check("concurrent step");
  }
}

// A child of a process whose pool has run starts threads of its own.
void after_fork() {
  for (int generation = 0; generation < 2; ++generation) {
    const pid_t child = fork();
    if (child == 0) {
      mixed_rows();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) fail("a forked child failed");
    mixed_rows();
  }
}

void names_that_cannot_be_used() {
  for (const char* name : {"sse9", ""}) {
    try {
      fa::use_cpu_isa(name);
    } catch (const std::exception&) {
      continue;
    }
    fail(std::string("use_cpu_isa accepted '") + name + "'");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool threads_only = argc > 1 && std::string(argv[1]) == "threads";
  concurrent_callers();  // first of all: the choice of an instruction set and the start of the pool race here
  for (const char* isa : fa::kCpuIsas) {
    const std::string reason = fa::why_not_cpu_isa(isa);
    if (!reason.empty()) {
      std::printf("%s: not run, %s\n", isa, reason.c_str());
      continue;
    }
    fa::use_cpu_isa(isa);
    const long before = checks;
    mixed_rows();
    concurrent_callers();
    products_on_threads();
    if (!threads_only) {
      every_size();
      every_dtype();
      every_layout();
      streaming();
      products();
    }
    std::printf("%s: %ld rows checked\n", isa, checks - before);
  }
  names_that_cannot_be_used();
  if (!threads_only) after_fork();
  return 0;
}
