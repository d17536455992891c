// One call of attention over pages, and the pieces that it is cut into.
//
// Shapes: d dim, g query heads per KV head, t queries of one request; a row is one query of one head.

#pragma once

#include <stdint.h>

#include "operand.h"

namespace kvgroups {

// Functions here are static: each instruction set's build keeps its own.

// Strides in elements: of tokens (tokens, heads, d), and of pages (blocks, heads, tokens, d); d is contiguous.
struct TokenStrides { int64_t token, head; };
struct PageStrides { int64_t block, head, token; };

// Filled by cpu_impl.py: eight bytes a field, in this order. First what differs between calls of one shape.
struct AttentionCall {
  // The tensors of a call in its order.
  const char *query, *key, *value, *key_pages, *value_pages;  // pages are null if no request has history
  const int32_t* block_table;
  const char *query_start_loc, *num_computed_tokens, *kv_start_loc;  // null: keys start where queries do
  const float* sinks;  // (num_heads,) or null

  char* output;  // (num_query_tokens, num_heads, dim_v), contiguous
  float* lse;    // (num_query_tokens, num_heads), contiguous, or null
  int64_t num_threads;

  TokenStrides query_strides, key_strides, value_strides;
  PageStrides key_page_strides, value_page_strides;
  int64_t block_table_stride, block_table_width, num_blocks, block_size, ring_blocks;
  int64_t query_start_is_64_bit, kv_start_is_64_bit, num_computed_is_64_bit;
  int64_t num_reqs, num_query_tokens, num_key_tokens, num_heads, num_kv_heads, dim, dim_v, element_type;
  int64_t window, chunk;  // 0: none
  int64_t max_queries;    // requests with more are left to the caller
  int64_t isa;
  double scale, softcap;  // softcap 0: none
};

// A tile of queries, and part of the keys that it sees: positions begin .. end - 1.
struct Span {
  int64_t request, query_start, num_queries, first_position, key_start, num_computed, begin, end;
};

// Online softmax of all rows of one KV head over one span.
struct Partial {
  float* peak;      // (rows,)
  float* total;     // (rows,)
  float* weighted;  // (rows, padded dim_v)
};

constexpr int64_t MAX_TILE_ROWS = 256;
constexpr int64_t MIN_TILE_QUERIES = 16;
constexpr int64_t MIN_SPAN = 512;
constexpr int64_t ROWS_PER_SPAN = 64;  // a span is MIN_SPAN keys for each started so many rows
constexpr int64_t MIN_TASKS = 4;       // of a request, if tiles keep MIN_TILE_ROWS and spans MIN_SHARED_SPAN
constexpr int64_t MIN_TILE_ROWS = 64;
constexpr int64_t MIN_SHARED_SPAN = 256;
constexpr int64_t MAX_LISTED = 512;    // keys that are looked up at once
constexpr int64_t TILE = 64;           // keys whose scores are in hand at once

// From so many rows on it pays to transpose a tile of keys, which then costs the rows no sums within vectors.
constexpr int64_t MIN_TRANSPOSED_ROWS = 16;

// Floats that `attend_span` wants for itself: the queries, scores of the rows that are in hand, a transposed tile.
static inline int64_t scratch_size(int64_t rows, int64_t dim) {
  return rows * padded(dim) + 4 * (TILE + PADDING) + (rows < MIN_TRANSPOSED_ROWS ? 0 : dim * TILE);
}

// Floats of a partial.
static inline int64_t partial_size(int64_t rows, int64_t dim_v) { return padded(rows) * 2 + rows * padded(dim_v); }

// The lowest position that a query at `position` sees; 0 for one before every key.
static inline int64_t first_visible(const AttentionCall& call, int64_t position) {
  int64_t first = 0;
  if (call.window && position - call.window + 1 > first) first = position - call.window + 1;
  if (call.chunk && position / call.chunk * call.chunk > first) first = position / call.chunk * call.chunk;
  return first;
}

#define KVGROUPS_DECLARE(isa)                                                                                  \
  namespace isa {                                                                                              \
  bool attend_span(const AttentionCall&, const Span&, int64_t kv_head, float* scratch, Partial);               \
  void finish(const AttentionCall&, const Span&, int64_t kv_head, const Partial* spans, int64_t num_spans);    \
  }

#if defined(__x86_64__)
KVGROUPS_DECLARE(avx2)
KVGROUPS_DECLARE(avx512)
#elif defined(__aarch64__)
KVGROUPS_DECLARE(neon)
#endif

}  // namespace kvgroups
