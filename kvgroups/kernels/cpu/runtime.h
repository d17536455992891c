// What the kernels need to know of the machine: its instruction set, and PyTorch's threads.

#pragma once

#include <stdint.h>

// A function that Python calls; the others are hidden.
#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace kvgroups {

// In the order in which they are preferred; 0 is a processor for which there is no build here.
enum Isa { NO_ISA = 0, NEON = 1, AVX2 = 2, AVX512 = 3 };

// Run `work(data)` on that many threads at once, this one among them. It returns when all have.
void run_on_threads(int64_t num_threads, void (*work)(void*), void* data);

}  // namespace kvgroups
