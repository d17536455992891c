// Attention over pages: a step is cut into spans of keys, threads take them one by one.
//
// How a request is cut depends on its own length alone, and its spans are joined in their order. So its output
// is the same, bit for bit, in any batch and on any number of threads.

#include "cpu.h"

#include <math.h>
#include <string.h>

#include <atomic>
#include <memory>
#include <vector>

#include "runtime.h"

namespace kvgroups {

namespace {

// One request's spans: `first_span .. first_span + num_spans - 1`, and where their partials begin.
struct Request { int64_t first_span, num_spans, num_rows, partials; };

struct Plan {
  std::vector<Span> spans;
  std::vector<int64_t> request_of;  // by span, a place in `requests`
  std::vector<Request> requests;
  int64_t num_partial_floats = 0, max_rows = 0, num_keys = 0, num_left = 0;
};

int64_t at(const char* indices, int64_t is_64_bit, int64_t i) {
  return is_64_bit ? ((const int64_t*)indices)[i] : ((const int32_t*)indices)[i];
}

int64_t query_start(const AttentionCall& call, int64_t i) {
  return at(call.query_start_loc, call.query_start_is_64_bit, i);
}

int64_t kv_start(const AttentionCall& call, int64_t i) { return at(call.kv_start_loc, call.kv_start_is_64_bit, i); }

// Requests with few queries are cut into spans; those with many are counted and left.
Plan cut(const AttentionCall& call) {
  Plan plan;
  for (int64_t i = 0; i < call.num_reqs; ++i) {
    int64_t first_query = query_start(call, i), num_queries = query_start(call, i + 1) - first_query;
    int64_t first_key = kv_start(call, i), num_keys = kv_start(call, i + 1) - first_key;
    if (num_queries > call.max_queries) ++plan.num_left;
    if (num_queries <= 0 || num_queries > call.max_queries) continue;
    int64_t computed = at(call.num_computed_tokens, call.num_computed_is_64_bit, i), end = computed + num_keys;
    // Right-aligned: the last query sits on the last key. A query before every key sees nothing.
    int64_t first_position = end - num_queries;
    int64_t begin = first_visible(call, first_position > 0 ? first_position : 0);
    int64_t length = end - begin, count = length > 0 ? (length + MAX_SPAN - 1) / MAX_SPAN : 1;
    int64_t step = padded((length + count - 1) / count);
    int64_t num_rows = num_queries * (call.num_heads / call.num_kv_heads);
    plan.requests.push_back({(int64_t)plan.spans.size(), count, num_rows, plan.num_partial_floats});
    for (int64_t n = 0; n < count; ++n, begin += step) {
      int64_t stop = begin + step < end ? begin + step : end;
      plan.spans.push_back({i, first_query, num_queries, first_position, first_key, computed, begin, stop});
      plan.request_of.push_back((int64_t)plan.requests.size() - 1);
    }
    plan.num_partial_floats += count * call.num_kv_heads * partial_size(num_rows, call.dim_v);
    plan.max_rows = num_rows > plan.max_rows ? num_rows : plan.max_rows;
    plan.num_keys += length > 0 ? length : 0;
  }
  return plan;
}

struct Floats {
  explicit Floats(int64_t count) : memory(new float[count + PADDING]) {
    aligned = (float*)(((uintptr_t)memory.get() + 63) / 64 * 64);
  }
  std::unique_ptr<float[]> memory;
  float* aligned;
};

struct Job {
  const AttentionCall& call;
  const Plan& plan;
  float* partials;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::atomic<int64_t>> done;  // spans of a request and KV head

  Job(const AttentionCall& call, const Plan& plan, float* partials)
      : call(call), plan(plan), partials(partials), done(plan.requests.size() * call.num_kv_heads) {}

  Partial partial(const Request& request, int64_t kv_head, int64_t n) const {
    float* floats = partials + request.partials +
                    (kv_head * request.num_spans + n) * partial_size(request.num_rows, call.dim_v);
    return {floats, floats + padded(request.num_rows), floats + 2 * padded(request.num_rows)};
  }

  bool attend(const Span& span, int64_t kv_head, float* scratch, Partial partial) const {
#if defined(__x86_64__)
    return call.isa == AVX512 ? avx512::attend_span(call, span, kv_head, scratch, partial)
                              : avx2::attend_span(call, span, kv_head, scratch, partial);
#elif defined(__aarch64__)
    return neon::attend_span(call, span, kv_head, scratch, partial);
#else
    return false;
#endif
  }

  void finish(const Span& span, int64_t kv_head, const std::vector<Partial>& spans) const {
#if defined(__x86_64__)
    call.isa == AVX512 ? avx512::finish(call, span, kv_head, spans.data(), (int64_t)spans.size())
                       : avx2::finish(call, span, kv_head, spans.data(), (int64_t)spans.size());
#elif defined(__aarch64__)
    neon::finish(call, span, kv_head, spans.data(), (int64_t)spans.size());
#endif
  }

  void work() {
    Floats scratch(scratch_size(plan.max_rows, call.dim));
    std::vector<Partial> parts;
    int64_t num_tasks = (int64_t)plan.spans.size() * call.num_kv_heads;
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      int64_t n = task / call.num_kv_heads, kv_head = task % call.num_kv_heads;
      const Span& span = plan.spans[n];
      const Request& request = plan.requests[plan.request_of[n]];
      if (!attend(span, kv_head, scratch.aligned, partial(request, kv_head, n - request.first_span))) failed = true;
      if (++done[plan.request_of[n] * call.num_kv_heads + kv_head] < request.num_spans) continue;
      parts.clear();  // this was the last of its spans
      for (int64_t i = 0; i < request.num_spans; ++i) parts.push_back(partial(request, kv_head, i));
      finish(span, kv_head, parts);
    }
  }
};

// Below this many elements of K and V a thread is not worth waking.
constexpr int64_t MIN_ELEMENTS_PER_THREAD = 1 << 15;

}  // namespace

}  // namespace kvgroups

// Tokens behind the last request.
static void clear_padding(const kvgroups::AttentionCall& call) {
  using namespace kvgroups;
  int64_t stop = query_start(call, call.num_reqs), size = call.element_type == FLOAT32 ? 4 : 2;
  int64_t first = stop * call.num_heads, end = call.num_query_tokens * call.num_heads;
  memset(call.output + first * call.dim_v * size, 0, (end - first) * call.dim_v * size);
  for (int64_t i = first; call.lse && i < end; ++i) call.lse[i] = -INFINITY;
}

// The number of requests left to the caller, or -1 if a table names a block that does not exist.
EXPORTED int64_t kvgroups_paged_attention(const kvgroups::AttentionCall* call_) {
  using namespace kvgroups;
  const AttentionCall& call = *call_;
  Plan plan = cut(call);
  Floats partials(plan.num_partial_floats);
  Job job(call, plan, partials.aligned);
  int64_t elements = plan.num_keys * call.num_kv_heads * (call.dim + call.dim_v);
  int64_t useful = 1 + elements / MIN_ELEMENTS_PER_THREAD, tasks = (int64_t)plan.spans.size() * call.num_kv_heads;
  int64_t num_threads = call.num_threads;
  if (useful < num_threads) num_threads = useful;
  if (tasks < num_threads) num_threads = tasks;
  clear_padding(call);
  run_on_threads(num_threads, [](void* job) { ((Job*)job)->work(); }, &job);
  return job.failed ? -1 : plan.num_left;
}
