// CUDA kernels of one micro-batch. The math is in adamw_math.h; here are loops, loads and stores.
//
// A block works on one chunk of one row. Where all tensors of a row are aligned to 16 bytes, a thread moves 16 bytes
// at a time, several loads before any arithmetic, so that they are under way together; what is left over, and rows
// that are not aligned, go element by element.
#include "cuda_squares.h"

namespace fa {
namespace {

// Whether a contribution is added to what the buffer holds, or is the first and written.
struct Adds {
  static constexpr bool adds = true;

  template <class Table> explicit __device__ Adds(const Table&) {}
};
struct Writes {
  static constexpr bool adds = false;

  template <class Table> explicit __device__ Writes(const Table&) {}
};
// The same as the launch says: one kernel for both, where the dtypes are rare.
struct AddsOrWrites {
  const bool adds;

  template <class Table> explicit __device__ AddsOrWrites(const Table& table) : adds(table.has_accum) {}
};

// Whether the pieces of a loop's last round may be fewer, each asked for, which spares a second loop for the rest.
// Common dtypes have that loop: nothing is asked in the first.
template <class How> constexpr bool kGuarded = std::is_same_v<How, AddsOrWrites>;

// (1) on kCount elements in each of kPieces places that are `apart` elements from each other; of `left` elements alone,
// if guarded. `keep`, given the number of a piece and the sums as the buffer holds them, is for sums of squares; without
// a buffer they alone are wanted.
template <class T, class G, class A, bool kSquares, int kCount, int kPieces, class How, class Keep>
__device__ __forceinline__ void accumulate_pieces(const How& how, const char* grad, char* accum, DType grad_dtype,
                                                  DType accum_dtype, const Scale<T>& scale, int apart, int left,
                                                  bool writes, Keep keep) {
  typename G::template Raw<kCount> g[kPieces];
  typename A::template Raw<kCount> a[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    if (kGuarded<How> && k * apart >= left) break;
    g[k] = G::template load<kCount>(G::at(const_cast<char*>(grad), k * apart, grad_dtype), grad_dtype);
    if (how.adds) a[k] = A::template load<kCount>(A::at(accum, k * apart, accum_dtype), accum_dtype);
  }
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    if (kGuarded<How> && k * apart >= left) break;
    T x[kCount], sum[kCount] = {};
    G::template decode<T, kCount>(g[k], grad_dtype, x);
    if (how.adds) A::template decode<T, kCount>(a[k], accum_dtype, sum);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if ((!how.adds || kSquares) && scale.nothing) sum[j] = how.adds ? sum[j] : T(0);
      else sum[j] = how.adds ? add_contribution(sum[j], scale.value, x[j]) : first_contribution(scale.value, x[j]);
    }
    const auto stored = A::template encode<T, kCount>(sum, accum_dtype);
    if (!kSquares || writes) A::template store<kCount>(A::at(accum, k * apart, accum_dtype), stored, accum_dtype);
    if constexpr (kSquares) {
      A::template decode<T, kCount>(stored, accum_dtype, sum);
      keep(k, sum);
    }
  }
}

template <int k> using Int = std::integral_constant<int, k>;

template <class T, class G, class A, class How, bool kSquares, class Table>
__global__ void __launch_bounds__(kThreads, 4) accumulate_rows(FA_PARAMETER(Table) table) {
  const How how(table);
  const Part part = part_of_block(table);
  char* const* data = table.data[part.row];
  const DType grad_dtype = table.dtypes[kGrad], accum_dtype = table.dtypes[kAccum];
  const char* grad = G::at(data[kGrad], part.start, grad_dtype);
  char* accum = A::at(data[kAccum], part.start, accum_dtype);
  const Scale<T> scale(table);
  if (how.adds && !kSquares && scale.nothing) return;  // here, where it costs no register
  const bool writes = !kSquares || data[kAccum];
  typename Shared<T>::Unit* units = nullptr;
  if constexpr (kSquares) {
    using Unit = typename Shared<T>::Unit;
    FA_SHARED(Unit, shared, Shared<T>::kUnits);
    units = shared;
  }

  constexpr int kCount = kWidestOf<G, A>;
  constexpr int kPieces = int(kChunkElements) / kCount / kThreads > 2 ? 4 : 2;
  const bool aligned = (reinterpret_cast<uintptr_t>(data[kGrad]) | reinterpret_cast<uintptr_t>(data[kAccum])) % 16 == 0;
  const int thread = int(threadIdx.x);
  const auto pieces = [&](int i, int end, auto count, auto number) {
    using Count = decltype(count);
    const int apart = Count::value * kThreads;
    accumulate_pieces<T, G, A, kSquares, Count::value, decltype(number)::value>(
        how, G::at(const_cast<char*>(grad), i, grad_dtype), A::at(accum, i, accum_dtype), grad_dtype, accum_dtype,
        scale, apart, end - i, writes,
        [&](int k, const T (&sum)[Count::value]) { Shared<T>::store(units, i + k * apart, sum); });
  };
  int done = 0;
  if (aligned) {
    constexpr int kTogether = kCount * kPieces * kThreads;
    if constexpr (!kGuarded<How>) {
#pragma unroll 1
      for (; done + kTogether <= part.count; done += kTogether) {
        pieces(done + thread * kCount, 0, Int<kCount>(), Int<kPieces>());
      }
    }
    constexpr int kRest = kGuarded<How> ? kPieces : 1;
    const int end = part.count / kCount * kCount;
#pragma unroll 1
    for (int i = done + thread * kCount; i < end; i += kCount * kRest * kThreads) {
      pieces(i, end, Int<kCount>(), Int<kRest>());
    }
    done = end;
  }
#pragma unroll 1
  for (int i = done + thread; i < part.count; i += kThreads) pieces(i, part.count, Int<1>(), Int<1>());
  if constexpr (kSquares) store_squares<T>(units, part.count, table.squares + int64_t(blockIdx.x) * kSums);
}

// Calls f with the storages of gradient and buffer and the arithmetic's dtype.
template <class F>
bool with_sum_storages(DType grad, DType accum, F f) {
  if (accum == DType::f64 && grad == DType::f64) return f(As<double>(), As<double>(), double()), true;
  if (accum == DType::f64 || grad == DType::f64) return false;
  if (accum == DType::f32 && grad == DType::f32) return f(As<float>(), As<float>(), float()), true;
  if (accum == DType::f32 && grad == DType::bf16) return f(As<bf16>(), As<float>(), float()), true;
  return f(AsLaunched(), AsLaunched(), float()), true;
}

}  // namespace

bool can_accumulate(const KernelKey& key) {
  return with_sum_storages(key.dtypes[kGrad], key.dtypes[kAccum], [](auto...) {});
}

void launch_accumulate(const KernelKey& key, const LargeTable& table, unsigned blocks, cudaStream_t stream) {
  with_sum_storages(key.dtypes[kGrad], key.dtypes[kAccum], [&](auto g, auto a, auto wide) {
    using G = decltype(g);
    using A = decltype(a);
    using T = decltype(wide);
    const auto accumulate = [&](auto how) {
      using How = typename decltype(how)::type;
      if (key.squares) return launch(&accumulate_rows<T, G, A, How, true, LargeTable>, table, blocks, stream);
      if constexpr (kCommon<G>) {
        if (table.count <= SmallTable::kCapacity) {
          return launch(&accumulate_rows<T, G, A, How, false, SmallTable>, SmallTable(table), blocks, stream);
        }
      }
      launch(&accumulate_rows<T, G, A, How, false, LargeTable>, table, blocks, stream);
    };
    if constexpr (!kCommon<G>) accumulate(Named<AddsOrWrites>());
    else if (key.has_accum) accumulate(Named<Adds>());
    else accumulate(Named<Writes>());
  });
}

}  // namespace fa
