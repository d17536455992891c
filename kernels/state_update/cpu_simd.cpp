// A few rows of one head's state: read once, advanced, written where they lie, and summed against C.
//
// Numbers are rounded to the element type of x where the torch form, and with it transformers, rounds: Mamba-1 has
// the whole recurrence in fp32, Mamba-2 rounds what enters the state. Only the order of the last sum differs, and
// that a product and a sum may be one instruction.

#include "cpu.h"

#include "rounding.h"
#include "vector.h"

namespace kvgroups::KVGROUPS_ISA {

namespace {

// Where a task is, and its numbers as floats, padded to whole vectors.
struct Rows {
  const UpdateCall& call;
  int64_t request, head, first, count;
  float *B, *C, *entering, *A;  // (N,) each
  float x[NUM_ROWS], step[NUM_ROWS], decay[NUM_ROWS], result[NUM_ROWS];
  bool is_step_shared;   // one step size in all rows
  bool is_decay_shared;  // one decay in all columns of a row

  // Rows `first` .. of an operand by request, head and row, or by request and channel.
  INLINE void of_request(const Operand& operand, float* to) const {
    read(operand, call.has_heads ? request : 0, call.has_heads ? head : request, first, count, to);
  }
  INLINE void of_head(const Operand& operand, float* to) const { read(operand, 0, head, first, count, to); }
};

template <typename Element>
void prepare(Rows& rows) {
  const UpdateCall& call = rows.call;
  int64_t group = call.has_heads ? rows.head / (call.num_heads / call.num_groups) : rows.request;
  int64_t request = call.has_heads ? rows.request : 0;
  read(call.B, request, group, 0, call.state_size, rows.B);
  read(call.C, request, group, 0, call.state_size, rows.C);
  rows.of_request(call.x, rows.x);
  rows.of_request(call.dt, rows.step);
  float bias[NUM_ROWS], A[NUM_ROWS];
  if (call.dt_bias.data) rows.of_head(call.dt_bias, bias);
  Operand by_row = call.A;  // its first column, the rows last
  by_row.strides[2] = call.A.strides[1], by_row.strides[1] = call.A.strides[0];
  rows.is_decay_shared = call.A.strides[2] == 0 || call.state_size == 1;
  if (rows.is_decay_shared) rows.of_head(by_row, A);
  for (int64_t row = 0; row < rows.count; row += WIDTH) {
    Vector step = load(rows.step + row);
    if (call.dt_bias.data) step = rounded<Element>(step + rounded<Element>(load(bias + row)));
    if (call.has_softplus) step = rounded<Element>(softplus(step));
    store(rows.step + row, step);
    if (rows.is_decay_shared) store(rows.decay + row, exponential(step * load(A + row)));
  }
  rows.is_step_shared = call.dt.strides[2] == 0 && (!call.dt_bias.data || call.dt_bias.strides[2] == 0);
}

// The decays' exponents of a row, by column.
INLINE const float* A_of(const Rows& rows, int64_t row) {
  const Operand& A = rows.call.A;
  if (A.element_type == FLOAT32 && A.strides[2] == 1)
    return (const float*)A.data + rows.head * A.strides[0] + (rows.first + row) * A.strides[1];
  read(A, rows.head, rows.first + row, 0, rows.call.state_size, rows.A);
  return rows.A;
}

// One row of the state on; returns its products with C, by lane. `State` may be narrower than what is summed.
template <typename Element, typename State, bool HAS_HEADS, bool IS_DECAY_SHARED>
INLINE Vector advance(Rows& rows, int64_t row, State* state) {
  const int64_t size = rows.call.state_size;
  const float step = rows.step[row], x = rows.x[row];
  const float* A = IS_DECAY_SHARED ? nullptr : A_of(rows, row);
  if (HAS_HEADS && (row == 0 || !rows.is_step_shared))
    for (int64_t column = 0; column < size; column += WIDTH)
      store(rows.entering + column, rounded<Element>(load(rows.B + column) * step));
  Vector total = {}, decay = Vector{} + rows.decay[row];
  for (int64_t column = 0; column < size; column += WIDTH) {
    const int count = size - column < WIDTH ? (int)(size - column) : WIDTH;
    const bool is_whole = count == WIDTH;
    if (!IS_DECAY_SHARED)
      decay = exponential((is_whole ? load(A + column) : to_floats((const Float32*)A + column, count)) * step);
    Vector entering = HAS_HEADS ? rounded<Element>(load(rows.entering + column) * x) : load(rows.B + column) * (step * x);
    Vector next = (is_whole ? to_floats(state + column) : to_floats(state + column, count)) * decay + entering;
    from_floats(next, state + column, count);
    total += rounded<Element>(next) * load(rows.C + column);
  }
  return total;
}

template <typename Element, typename State, bool HAS_HEADS, bool IS_DECAY_SHARED>
void advance_rows(Rows& rows, State* state) {
  for (int64_t row = 0; row < rows.count; row += WIDTH) {
    Vector totals[WIDTH] = {};
    for (int64_t lane = 0; lane < WIDTH && row + lane < rows.count; ++lane, state += rows.call.row_stride)
      totals[lane] = advance<Element, State, HAS_HEADS, IS_DECAY_SHARED>(rows, row + lane, state);
    store(rows.result + row, sums(totals));
  }
}

// Skip connection and gate, rounded step by step, and the output.
template <typename Element>
void finish(const Rows& rows, Element* output) {
  const UpdateCall& call = rows.call;
  float D[NUM_ROWS], z[NUM_ROWS];
  if (call.D.data) rows.of_head(call.D, D);
  if (call.z.data) rows.of_request(call.z, z);
  for (int64_t row = 0; row < rows.count; row += WIDTH) {
    Vector result = rounded<Element>(load(rows.result + row));
    if (call.D.data) result = rounded<Element>(result + rounded<Element>(load(D + row) * load(rows.x + row)));
    if (call.z.data) result = rounded<Element>(result * rounded<Element>(silu(load(z + row))));
    from_floats(result, output + row, rows.count - row < WIDTH ? (int)(rows.count - row) : WIDTH);
  }
}

template <typename Element, typename State>
void update(Rows& rows, int64_t slot) {
  const UpdateCall& call = rows.call;
  prepare<Element>(rows);
  State* state = (State*)call.states + slot * call.slot_stride + rows.head * call.head_stride + rows.first * call.row_stride;
  auto advance = !call.has_heads       ? advance_rows<Element, State, false, false>
                 : rows.is_decay_shared ? advance_rows<Element, State, true, true>
                                        : advance_rows<Element, State, true, false>;
  advance(rows, state);
  finish(rows, (Element*)call.output + (rows.request * call.num_heads + rows.head) * call.head_dim + rows.first);
}

// States are in fp32, or as x.
template <typename Element>
void update_states(Rows& rows, int64_t slot) {
  (rows.call.state_type == FLOAT32 ? update<Element, Float32> : update<Element, Element>)(rows, slot);
}

}  // namespace

void update_rows(const UpdateCall& call, int64_t request, int64_t slot, int64_t head, int64_t first, float* scratch) {
  int64_t rest = call.head_dim - first, size = padded(call.state_size);
  Rows rows{call, request, head, first, rest < NUM_ROWS ? rest : NUM_ROWS,
            scratch, scratch + size, scratch + 2 * size, scratch + 3 * size};
  auto run = call.x.element_type == FLOAT32    ? update_states<Float32>
             : call.x.element_type == BFLOAT16 ? update_states<BFloat16>
                                               : update_states<Float16>;
  run(rows, slot);
}

}  // namespace kvgroups::KVGROUPS_ISA
