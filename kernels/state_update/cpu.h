// One token a request through the recurrence of Mamba-2, in fp32.
//
// P is a head's width: so many rows has its state, and each is contiguous.

#pragma once

#include <stdint.h>

namespace kvgroups {

struct Floats3 { const float* data; int64_t strides[3]; };  // elements; 0 where a number is shared

// Filled by cpu_impl.py: eight bytes a field, in this order.
struct UpdateCall {
  float* states;
  int64_t slot_stride, head_stride, row_stride;
  const char* slots;
  int64_t slots_are_64_bit;
  float* output;          // (requests, heads, P), contiguous
  Floats3 x, dt, z;       // by request, head, row; z is null or the gate
  Floats3 A;              // by head, row, column
  Floats3 B, C;           // by request, group, column
  Floats3 D, dt_bias;     // by head, row; null or not
  int64_t num_requests, num_slots, num_heads, num_groups, head_dim, state_size, has_softplus;
  int64_t num_threads, isa;
};

constexpr int64_t NUM_ROWS = 64;  // rows that a thread takes at once

#define KVGROUPS_DECLARE_UPDATE(isa) \
  namespace isa { void update_rows(const UpdateCall&, int64_t request, int64_t slot, int64_t head, int64_t row); }

#if defined(__x86_64__)
KVGROUPS_DECLARE_UPDATE(avx2)
KVGROUPS_DECLARE_UPDATE(avx512)
#elif defined(__aarch64__)
KVGROUPS_DECLARE_UPDATE(neon)
#endif

}  // namespace kvgroups
