// A few rows of one head's state: read once, advanced, written where they lie, and summed against C.

#include <math.h>

#include "cpu.h"
#include "vector.h"

namespace kvgroups::KVGROUPS_ISA {

namespace {

INLINE const float* at(const Floats3& floats, int64_t i, int64_t j, int64_t k) {
  return floats.data + i * floats.strides[0] + j * floats.strides[1] + k * floats.strides[2];
}

float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Columns column .. of a row; `count` < WIDTH of them at its end.
INLINE Vector columns(const float* from, int count) {
  return count == WIDTH ? load(from) : to_floats((const Float32*)from, count);
}

// One row of the state; returns its product with C. A head's decay is one number, or one for each column.
template <bool IS_TIED>
INLINE float advance(float* state, const float* A, const float* B, const float* C, float step, float x, int64_t size) {
  Vector total = {}, decay = exponential(Vector{} + step * A[0]);
  float entering = step * x;
  for (int64_t column = 0; column < size; column += WIDTH) {
    int count = size - column < WIDTH ? (int)(size - column) : WIDTH;
    if (!IS_TIED) decay = exponential(columns(A + column, count) * step);
    Vector next = columns(state + column, count) * decay + columns(B + column, count) * entering;
    memcpy(state + column, &next, count * sizeof(float));
    total += next * columns(C + column, count);
  }
  return sum(total);
}

}  // namespace

void update_rows(const UpdateCall& call, int64_t request, int64_t slot, int64_t head, int64_t row) {
  int64_t group = head / (call.num_heads / call.num_groups), stop = row + NUM_ROWS;
  bool is_tied = call.A.strides[2] == 0 && call.state_size > 1;
  const float *B = at(call.B, request, group, 0), *C = at(call.C, request, group, 0);
  float* state = call.states + slot * call.slot_stride + head * call.head_stride + row * call.row_stride;
  for (; row < stop && row < call.head_dim; ++row, state += call.row_stride) {
    float step = *at(call.dt, request, head, row), x = *at(call.x, request, head, row);
    if (call.dt_bias.data) step += *at(call.dt_bias, head, row, 0);
    if (call.has_softplus) step = softplus(step);
    const float* A = at(call.A, head, row, 0);
    float result = is_tied ? advance<true>(state, A, B, C, step, x, call.state_size)
                           : advance<false>(state, A, B, C, step, x, call.state_size);
    if (call.D.data) result += *at(call.D, head, row, 0) * x;
    if (call.z.data) {
      float gate = *at(call.z, request, head, row);
      result *= gate / (1 + expf(-gate));
    }
    call.output[(request * call.num_heads + head) * call.head_dim + row] = result;
  }
}

}  // namespace kvgroups::KVGROUPS_ISA
