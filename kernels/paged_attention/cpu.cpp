// Attention over pages: a step is cut into tiles of queries and these into spans of keys; threads take them one by
// one.
//
// How a request is cut depends on its own length and on the heads alone, and its spans are joined in their order. So
// its output is the same, bit for bit, in any batch and on any number of threads.

#include "cpu.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "runtime.h"

namespace kvgroups {

namespace {

// Queries of one request. Its spans are `first_span .. first_span + num_spans - 1`; their partials begin at
// `partials`, unless there is one span only, whose partial is joined at once.
struct QueryTile { int64_t first_span, num_spans, num_rows, partials; };

struct Plan {
  std::vector<Span> spans;
  std::vector<int64_t> tile_of;  // by span, a place in `tiles`
  std::vector<QueryTile> tiles;
  int64_t num_partial_floats = 0, max_rows = 0, num_products = 0, num_left = 0;
};

int64_t at(const char* indices, int64_t is_64_bit, int64_t i) {
  return is_64_bit ? ((const int64_t*)indices)[i] : ((const int32_t*)indices)[i];
}

int64_t query_start(const AttentionCall& call, int64_t i) {
  return at(call.query_start_loc, call.query_start_is_64_bit, i);
}

int64_t kv_start(const AttentionCall& call, int64_t i) {
  return call.kv_start_loc ? at(call.kv_start_loc, call.kv_start_is_64_bit, i) : query_start(call, i);
}

// Whether start locations ascend from 0 or more to no more than the tokens there are: what lies beside them is not ours.
bool lie_within(const AttentionCall& call, int64_t (*start_of)(const AttentionCall&, int64_t), int64_t num_tokens) {
  int64_t last = 0;
  for (int64_t i = 0; i <= call.num_reqs; ++i) {
    int64_t start = start_of(call, i);
    if (start < last || start > num_tokens) return false;
    last = start;
  }
  return true;
}

int64_t quotient_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// How a request is cut: into tiles of so many queries, and these into so many spans of keys, or more if it is short.
struct Cut { int64_t tile, num_spans; bool is_short; };

Cut cut_request(const AttentionCall& call, int64_t num_queries, int64_t num_keys) {
  int64_t shared = call.num_heads / call.num_kv_heads;
  int64_t max_tile = std::max(MIN_TILE_QUERIES, shared ? MAX_TILE_ROWS / shared : 0);
  int64_t num_tiles = quotient_up(num_queries, max_tile);
  // Threads want some tasks to share. Spans give them for little, and where keys are few, smaller tiles do: each of
  // these reads all keys.
  int64_t most = std::max<int64_t>(1, num_queries * shared / num_tiles / MIN_TILE_ROWS);
  int64_t num_parts = most > 1 ? quotient_up(MIN_TASKS, num_tiles * call.num_kv_heads) : 1;
  int64_t num_spans = std::clamp<int64_t>(num_keys / MIN_SHARED_SPAN, 1, num_parts);
  num_tiles *= std::min(most, quotient_up(num_parts, num_spans));
  return {quotient_up(num_queries, num_tiles), num_spans, num_queries <= max_tile};
}

// Cut a tile of queries into spans of keys. A tile of a long request is cut no further than it must be: partials of a long
// prompt on a long history would take more memory than its keys.
void cut_tile(Plan& plan, const AttentionCall& call, Span whole, const Cut& how) {
  int64_t num_rows = whole.num_queries * (call.num_heads / call.num_kv_heads), length = whole.end - whole.begin;
  // More keys where there are more rows: what is joined in the end stays small beside what is read.
  int64_t longest = how.is_short ? MIN_SPAN * quotient_up(num_rows, ROWS_PER_SPAN) : length;
  int64_t count = length > 0 ? quotient_up(length, longest) : 1;
  count = std::max(count, std::min(how.num_spans, length / MIN_SHARED_SPAN));
  plan.tiles.push_back({(int64_t)plan.spans.size(), count, num_rows, plan.num_partial_floats});
  // Between tiles of keys: what is left of one costs nearly as much as a whole one.
  auto border = [&](int64_t n) { return whole.begin + quotient_up(length, TILE) * n / count * TILE; };
  for (int64_t n = 0; n < count; ++n) {
    Span span = whole;
    span.begin = border(n);
    span.end = n + 1 < count ? border(n + 1) : whole.end;
    plan.spans.push_back(span);
    plan.tile_of.push_back((int64_t)plan.tiles.size() - 1);
  }
  if (count > 1) plan.num_partial_floats += count * call.num_kv_heads * partial_size(num_rows, call.dim_v);
  plan.max_rows = num_rows > plan.max_rows ? num_rows : plan.max_rows;
  plan.num_products += length > 0 ? length * num_rows : 0;
}

// Cut the requests; those with too many queries are counted and left.
Plan cut(const AttentionCall& call) {
  Plan plan;
  if (call.num_heads == 0) return plan;
  for (int64_t i = 0; i < call.num_reqs; ++i) {
    int64_t first_query = query_start(call, i), num_queries = query_start(call, i + 1) - first_query;
    int64_t first_key = kv_start(call, i), num_keys = kv_start(call, i + 1) - first_key;
    if (num_queries > call.max_queries) ++plan.num_left;
    if (num_queries <= 0 || num_queries > call.max_queries) continue;
    int64_t computed = at(call.num_computed_tokens, call.num_computed_is_64_bit, i);
    // Right-aligned: the last query sits on the last key. A query before every key sees nothing.
    int64_t position = computed + num_keys - num_queries;
    Cut how = cut_request(call, num_queries, position + num_queries - first_visible(call, position));
    // From the last tile on, which sees the most keys: what takes long is not to begin last.
    for (int64_t query = (num_queries - 1) / how.tile * how.tile; query >= 0; query -= how.tile) {
      int64_t count = std::min(how.tile, num_queries - query), first = position + query;
      Span whole = {i, first_query + query, count, first, first_key, computed, first_visible(call, first), first + count};
      cut_tile(plan, call, whole, how);
    }
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
  std::vector<std::atomic<int64_t>> done;  // spans of a tile and KV head

  Job(const AttentionCall& call, const Plan& plan, float* partials)
      : call(call), plan(plan), partials(partials), done(plan.tiles.size() * call.num_kv_heads) {}

  Partial partial(const QueryTile& tile, int64_t kv_head, int64_t n) const {
    return in(partials + tile.partials +
                  (kv_head * tile.num_spans + n) * partial_size(tile.num_rows, call.dim_v), tile.num_rows);
  }

  static Partial in(float* floats, int64_t num_rows) {
    return {floats, floats + padded(num_rows), floats + 2 * padded(num_rows)};
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
    int64_t own_size = scratch_size(plan.max_rows, call.dim);
    Floats scratch(own_size + PADDING + partial_size(plan.max_rows, call.dim_v));
    std::vector<Partial> parts;
    int64_t num_tasks = (int64_t)plan.spans.size() * call.num_kv_heads;
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      int64_t n = task / call.num_kv_heads, kv_head = task % call.num_kv_heads;
      const Span& span = plan.spans[n];
      const QueryTile& tile = plan.tiles[plan.tile_of[n]];
      Partial own = tile.num_spans > 1 ? partial(tile, kv_head, n - tile.first_span)
                                       : in(scratch.aligned + padded(own_size), tile.num_rows);
      if (!attend(span, kv_head, scratch.aligned, own)) failed = true;
      if (++done[plan.tile_of[n] * call.num_kv_heads + kv_head] < tile.num_spans) continue;
      parts.clear();  // this was the last of its spans
      for (int64_t i = 0; i < tile.num_spans; ++i) parts.push_back(tile.num_spans > 1 ? partial(tile, kv_head, i) : own);
      finish(span, kv_head, parts);
    }
  }
};

// Below this many products of a query's and a key's elements, or of a weight and a value's, a thread is not worth
// waking.
constexpr int64_t MIN_PRODUCTS_PER_THREAD = 1 << 17;

}  // namespace

}  // namespace kvgroups

// Tokens behind the last request.
static void clear_padding(const kvgroups::AttentionCall& call) {
  using namespace kvgroups;
  int64_t stop = query_start(call, call.num_reqs), size = call.element_type == FLOAT32 ? 4 : 2;
  int64_t first = stop * call.num_heads, end = call.num_query_tokens * call.num_heads;
  if (first == end) return;  // perhaps there is no output at all
  memset(call.output + first * call.dim_v * size, 0, (end - first) * call.dim_v * size);
  for (int64_t i = first; call.lse && i < end; ++i) call.lse[i] = -INFINITY;
}

// The number of requests left to the caller; -1 if a table names a block that does not exist, and -2 or -3 if queries or
// keys start where there are none, in which case nothing has been written.
EXPORTED int64_t kvgroups_paged_attention(const kvgroups::AttentionCall* call_) {
  using namespace kvgroups;
  const AttentionCall& call = *call_;
  if (!lie_within(call, query_start, call.num_query_tokens)) return -2;
  if (!lie_within(call, kv_start, call.num_key_tokens)) return -3;
  Plan plan = cut(call);
  Floats partials(plan.num_partial_floats);
  Job job(call, plan, partials.aligned);
  int64_t products = plan.num_products * call.num_kv_heads * (call.dim + call.dim_v);
  int64_t useful = 1 + products / MIN_PRODUCTS_PER_THREAD, tasks = (int64_t)plan.spans.size() * call.num_kv_heads;
  int64_t num_threads = call.num_threads;
  if (useful < num_threads) num_threads = useful;
  if (tasks < num_threads) num_threads = tasks;
  clear_padding(call);
  run_on_threads(num_threads, [](void* job) { ((Job*)job)->work(); }, &job);
  return job.failed ? -1 : plan.num_left;
}
