// One token a request through a causal convolution, in place on slots.
//
// K is the width: a state is the last K inputs of each channel, oldest first, in one piece of memory.

#pragma once

#include <stdint.h>

#include "operand.h"

namespace kvgroups {

// Filled by cpu_impl.py: eight bytes a field, in this order. All numbers have one element type.
struct ConvolutionCall {
  char* states;
  int64_t slot_stride;  // elements
  Slots slots;
  char* output;         // (requests, channels), contiguous
  Operand x;            // by request, channel
  Operand weight;       // by channel, tap
  Operand bias;         // by channel; null or not
  int64_t num_requests, num_slots, num_channels, width, has_silu;
  int64_t num_threads, isa;
};

constexpr int64_t NUM_CHANNELS = 256;  // that a thread takes at once

// Floats that `convolve_channels` wants for itself: weights by tap, states, inputs, bias.
static inline int64_t scratch_size(int64_t width) { return NUM_CHANNELS * (2 * width + 2) + PADDING; }

#define KVGROUPS_DECLARE_CONVOLUTION(isa) \
  namespace isa { void convolve_channels(const ConvolutionCall&, int64_t first_channel, float* scratch); }

#if defined(__x86_64__)
KVGROUPS_DECLARE_CONVOLUTION(avx2)
KVGROUPS_DECLARE_CONVOLUTION(avx512)
#elif defined(__aarch64__)
KVGROUPS_DECLARE_CONVOLUTION(neon)
#endif

}  // namespace kvgroups
