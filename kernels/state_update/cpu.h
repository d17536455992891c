// One token a request through the recurrence of Mamba-1 or Mamba-2.
//
// Mamba-1 is one head of as many rows as it has channels. P is a head's width: so many rows has its state, and each
// is contiguous.

#pragma once

#include <stdint.h>

#include "operand.h"

namespace kvgroups {

// Filled by cpu_impl.py: eight bytes a field, in this order.
struct UpdateCall {
  char* states;
  int64_t state_type, slot_stride, head_stride, row_stride;  // elements
  Slots slots;
  char* output;           // (requests, heads, P), contiguous, the element type of x
  Operand x, dt, z;       // by request, head, row, or for Mamba-1 by request, channel; z is null or the gate
  Operand A;              // by head, row, column, or by channel, column
  Operand B, C;           // by request, group, column, or by request, column
  Operand D, dt_bias;     // by head, row, or by channel; null or not
  int64_t has_heads;      // Mamba-2
  int64_t num_requests, num_slots, num_heads, num_groups, head_dim, state_size, has_softplus;
  int64_t num_threads, isa;
};

constexpr int64_t NUM_ROWS = 64;  // rows that a thread takes at once

// Floats that `update_rows` wants for itself: B, C, what enters and a row of A.
static inline int64_t update_scratch_size(int64_t state_size) { return 4 * padded(state_size); }

#define KVGROUPS_DECLARE_UPDATE(isa)                                                                          \
  namespace isa {                                                                                             \
  void update_rows(const UpdateCall&, int64_t request, int64_t slot, int64_t head, int64_t row, float* scratch); \
  }

#if defined(__x86_64__)
KVGROUPS_DECLARE_UPDATE(avx2)
KVGROUPS_DECLARE_UPDATE(avx512)
#elif defined(__aarch64__)
KVGROUPS_DECLARE_UPDATE(neon)
#endif

}  // namespace kvgroups
