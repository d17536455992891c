// One token a request through a causal convolution: threads take some channels of all requests at a time.

#include "cpu.h"

#include <string.h>

#include <atomic>
#include <vector>

#include "runtime.h"

namespace kvgroups {

namespace {

struct Job {
  const ConvolutionCall& call;
  std::atomic<int64_t> next{0};

  void work() {
    std::vector<float> scratch(scratch_size(call.width));
    for (int64_t channel; (channel = next.fetch_add(NUM_CHANNELS)) < call.num_channels;) {
#if defined(__x86_64__)
      (call.isa == AVX512 ? avx512::convolve_channels : avx2::convolve_channels)(call, channel, scratch.data());
#elif defined(__aarch64__)
      neon::convolve_channels(call, channel, scratch.data());
#endif
    }
  }
};

// Below this many elements of the states a thread is not worth waking.
constexpr int64_t MIN_ELEMENTS_PER_THREAD = 1 << 15;

}  // namespace

}  // namespace kvgroups

// 0, or -1 if a slot does not exist; then nothing has been written.
EXPORTED int64_t kvgroups_causal_conv1d_update(const kvgroups::ConvolutionCall* call) {
  using namespace kvgroups;
  for (int64_t request = 0; request < call->num_requests; ++request)
    if (call->slots[request] < 0 || call->slots[request] >= call->num_slots) return -1;
  int64_t row = call->num_channels * size_of(call->x.element_type);
  for (int64_t request = 0; request < call->num_requests; ++request)
    if (call->slots[request] == 0) memset(call->output + request * row, 0, row);
  int64_t useful = 1 + call->num_requests * call->num_channels * call->width / MIN_ELEMENTS_PER_THREAD;
  int64_t num_threads = call->num_threads < useful ? call->num_threads : useful;
  int64_t tasks = (call->num_channels + NUM_CHANNELS - 1) / NUM_CHANNELS;
  Job job{*call};
  run_on_threads(num_threads < tasks ? num_threads : tasks, [](void* job) { ((Job*)job)->work(); }, &job);
  return 0;
}
