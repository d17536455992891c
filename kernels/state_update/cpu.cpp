// One token a request through the recurrence: threads take a few rows of a head at a time.

#include "cpu.h"

#include <string.h>

#include <atomic>
#include <vector>

#include "runtime.h"

namespace kvgroups {

namespace {

struct Job {
  const UpdateCall& call;
  int64_t pieces;  // of a head
  std::atomic<int64_t> next{0};

  void work() {
    std::vector<float> scratch(update_scratch_size(call.state_size));
    int64_t num_tasks = call.num_requests * call.num_heads * pieces;
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      int64_t row = task % pieces * NUM_ROWS, head = task / pieces % call.num_heads;
      int64_t request = task / pieces / call.num_heads, slot = call.slots[request];
      if (slot == 0) continue;  // padding
#if defined(__x86_64__)
      auto update = call.isa == AVX512 ? avx512::update_rows : avx2::update_rows;
      update(call, request, slot, head, row, scratch.data());
#elif defined(__aarch64__)
      neon::update_rows(call, request, slot, head, row, scratch.data());
#endif
    }
  }
};

// Below this many elements of the states a thread is not worth waking.
constexpr int64_t MIN_ELEMENTS_PER_THREAD = 1 << 14;

}  // namespace

}  // namespace kvgroups

// 0, or -1 if a slot does not exist; then nothing has been written.
EXPORTED int64_t kvgroups_state_update(const kvgroups::UpdateCall* call) {
  using namespace kvgroups;
  Job job{*call, (call->head_dim + NUM_ROWS - 1) / NUM_ROWS};
  for (int64_t request = 0; request < call->num_requests; ++request)
    if (call->slots[request] < 0 || call->slots[request] >= call->num_slots) return -1;
  int64_t size = call->num_heads * call->head_dim, row = size * size_of(call->x.element_type);
  for (int64_t request = 0; request < call->num_requests; ++request)
    if (call->slots[request] == 0) memset(call->output + request * row, 0, row);
  int64_t useful = 1 + call->num_requests * size * call->state_size / MIN_ELEMENTS_PER_THREAD;
  int64_t tasks = call->num_requests * call->num_heads * job.pieces;
  int64_t num_threads = call->num_threads < useful ? call->num_threads : useful;
  run_on_threads(num_threads < tasks ? num_threads : tasks, [](void* job) { ((Job*)job)->work(); }, &job);
  return 0;
}
