#include "runtime.h"

#include <dlfcn.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <thread>
#include <vector>

#include "operand.h"

namespace kvgroups {

namespace {

typedef void (*Parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

// PyTorch's own OpenMP, looked up rather than linked: a second runtime would bring a second team of threads,
// and the two would spin against each other.
Parallel openmp() {
  static const Parallel found = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  return found;
}

#if defined(__x86_64__)
// Whether the operating system saves the tiles of AMX: bits 17 and 18 of the register that lists what it saves.
bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a >> 17 & 3) == 3;
}
#endif

}  // namespace

void run_on_threads(int64_t num_threads, void (*work)(void*), void* data) {
  if (num_threads <= 1) {
    work(data);
  } else if (openmp()) {
    openmp()(work, data, (unsigned)num_threads, 0);
  } else {
    std::vector<std::thread> others;
    for (int64_t i = 1; i < num_threads; ++i) others.emplace_back(work, data);
    work(data);
    for (std::thread& other : others) other.join();
  }
}

}  // namespace kvgroups

// Raised whenever an argument of an exported function changes: a library left over from before is not called.
EXPORTED int64_t kvgroups_interface() { return 9; }

EXPORTED int64_t kvgroups_has_openmp() { return kvgroups::openmp() != nullptr; }

// The best instruction set that this library was built for and this processor has.
EXPORTED int64_t kvgroups_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return kvgroups::AVX512;
  unsigned a, b, c, d;
  bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) return kvgroups::AVX2;
  return kvgroups::NO_ISA;
#elif defined(__aarch64__)
  return kvgroups::NEON;
#else
  return kvgroups::NO_ISA;
#endif
}

// The 16-bit types of which PyTorch multiplies matrices several times faster than fp32 vectors do: bit n is ElementType
// n. On x86 those are the types that AMX multiplies.
EXPORTED int64_t kvgroups_fast_matrix_types() {
  using namespace kvgroups;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!has_tiles() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1)) return 0;  // AMX-TILE
  int64_t types = d >> 22 & 1 ? 1 << BFLOAT16 : 0;                                           // AMX-BF16
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 21 & 1) types |= 1 << FLOAT16;         // AMX-FP16
  return types;
#else
  return 1 << BFLOAT16 | 1 << FLOAT16;  // not measured on Arm
#endif
}
