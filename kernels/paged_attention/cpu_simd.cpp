// Attention of the rows of one KV head over one span of keys, wherever they lie.
//
// A key and a value are found by pointers, so pages, rings and the step's own tokens are alike. Tokens that no
// query may see are not in the list, and to a query that sees part of a tile only that part is added: nothing that
// is masked can spoil a sum.

#include "cpu.h"
#include "rounding.h"
#include "vector.h"

namespace kvgroups::KVGROUPS_ISA {

namespace {

constexpr int ROWS = 4;                            // rows that share a loaded key or value
constexpr int SUMS = HAS_32_REGISTERS ? 16 : 8;    // sums in registers at once
constexpr int MAX_KEYS = SUMS;                     // keys in hand at once, if there is one row
constexpr int COLUMNS = SUMS / ROWS;               // vectors of transposed keys in hand at once
constexpr int64_t SCORES = TILE + MAX_KEYS;        // from one row's scores to the next's

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }

// Sums in registers for each of COUNT rows.
template <int COUNT>
constexpr int SUMS_OF_ROW = SUMS / (COUNT == 3 ? 4 : COUNT);

template <typename Element>
struct Keys {
  int64_t count = 0;
  int64_t positions[MAX_LISTED];
  const Element* keys[MAX_LISTED + MAX_KEYS];  // the last is repeated, to fill a group
  const Element* values[MAX_LISTED + MAX_KEYS];

  INLINE void add(int64_t position, const Element* key, const Element* value) {
    positions[count] = position;
    keys[count] = key;
    values[count++] = value;
  }

  // The place of the first key at `position` or later, between two places.
  INLINE int64_t place(int64_t position, int64_t from, int64_t to) const {
    if (from == to) return to;
    if (positions[to - 1] - positions[from] == to - 1 - from) {  // no gap, which a null block leaves
      int64_t place = from + position - positions[from];
      return place < from ? from : place > to ? to : place;
    }
    while (from < to && positions[from] < position) ++from;
    return from;
  }
};

// The keys of a span; false if the table names a block that does not exist.
template <typename Element>
bool list_keys(const AttentionCall& call, const Span& span, int64_t kv_head, Keys<Element>& list) {
  const Element* key_pages = (const Element*)call.key_pages + kv_head * call.key_page_strides.head;
  const Element* value_pages = (const Element*)call.value_pages + kv_head * call.value_page_strides.head;
  const int32_t* row = call.block_table + span.request * call.block_table_stride;
  int64_t position = span.begin, stored = span.end < span.num_computed ? span.end : span.num_computed;
  while (position < stored) {
    int64_t logical_block = position / call.block_size, offset = position % call.block_size;
    int64_t stop = position + call.block_size - offset < stored ? position + call.block_size - offset : stored;
    int64_t column = call.ring_blocks ? logical_block % call.ring_blocks : logical_block;
    int64_t block = column < call.block_table_width ? row[column] : 0;
    if (block < 0 || block >= call.num_blocks) return false;
    if (block != 0) {
      const Element* key = key_pages + block * call.key_page_strides.block;
      const Element* value = value_pages + block * call.value_page_strides.block;
      for (int64_t at = position; at < stop; ++at, ++offset)
        list.add(at, key + offset * call.key_page_strides.token, value + offset * call.value_page_strides.token);
    }
    position = stop;
  }
  const Element* key = (const Element*)call.key + kv_head * call.key_strides.head;
  const Element* value = (const Element*)call.value + kv_head * call.value_strides.head;
  for (; position < span.end; ++position) {
    int64_t token = span.key_start + position - span.num_computed;
    list.add(position, key + token * call.key_strides.token, value + token * call.value_strides.token);
  }
  for (int i = 0; list.count && i < MAX_KEYS; ++i) {
    list.keys[list.count + i] = list.keys[list.count - 1];
    list.values[list.count + i] = list.values[list.count - 1];
  }
  return true;
}

template <typename Element>
INLINE Vector piece(const Element* from, int64_t column, int64_t width) {
  return column + WIDTH <= width ? to_floats(from + column) : to_floats(from + column, (int)(width - column));
}

// VECTORS vectors of columns, in pairs if there are two or more; 0 vectors: the last `rest` columns. Pairs have an order of
// their own, and queries, transposed keys and sums of values keep it until the output is written.
template <int VECTORS, typename Element>
INLINE void read_columns(const Element* from, int64_t rest, Vector* floats) {
  if constexpr (VECTORS == 0) {
    floats[0] = to_floats(from, (int)rest);
  } else if constexpr (VECTORS == 1) {
    floats[0] = to_floats(from);
  } else {
    for (int c = 0; c < VECTORS; c += 2) {
      Pair pair = to_pair(from + c * WIDTH);
      floats[c] = pair.first;
      floats[c + 1] = pair.second;
    }
  }
}

// Add the products of COUNT rows and KEYS keys over some columns; those of row r and key k are at r * KEYS + k. Two keys
// at once share what is loaded of the queries.
template <int COUNT, int KEYS, int VECTORS, typename Element>
INLINE void add_products(const float* queries, int64_t stride, const Element* const* keys,
                         const Element* const* upcoming, int64_t column, int64_t rest, Vector* products) {
  constexpr int WIDE = VECTORS ? VECTORS : 1;
  UNROLL for (int k = 0; k < KEYS; k += 2) {
    Vector floats[2][WIDE];
    UNROLL for (int i = 0; i < 2; ++i) {
      if (upcoming) prefetch(upcoming[k + i] + column, VECTORS * WIDTH * sizeof(Element));
      read_columns<VECTORS>(keys[k + i] + column, rest, floats[i]);
    }
    UNROLL for (int c = 0; c < WIDE; ++c)
      UNROLL for (int r = 0; r < COUNT; ++r) {
        Vector query = load(queries + r * stride + column + c * WIDTH);
        products[r * KEYS + k] += query * floats[0][c];
        products[r * KEYS + k + 1] += query * floats[1][c];
      }
  }
}

// Keys of a tile, counted from its first.
struct Range {
  int64_t from, to;
  bool is_empty() const { return from >= to; }
};

// What some rows see of a tile: each, any of them, and all of them.
struct Seen {
  Range each[ROWS], any, all;

  static INLINE Seen alike(Range range) {
    Seen seen;
    for (Range& each : seen.each) each = range;
    seen.any = seen.all = range;
    return seen;
  }

  INLINE void join(int64_t count) {
    any = {TILE, 0}, all = {0, TILE};
    for (int64_t r = 0; r < count; ++r) {
      if (!each[r].is_empty()) any = {min(any.from, each[r].from), max(any.to, each[r].to)};
      all = {max(all.from, each[r].from), min(all.to, each[r].to)};
    }
    if (all.is_empty()) all = {any.from, any.from};
  }
};

// Scores of COUNT rows and the keys from .. to - 1 of a tile.
template <int COUNT, typename Element>
INLINE void score(const AttentionCall& call, const float* queries, const Element* const* keys,
                  const Element* const* upcoming, float* scores, int64_t from, int64_t to) {
  constexpr int KEYS = SUMS_OF_ROW<COUNT>;
  const int64_t dim = call.dim, stride = padded(dim);
  for (int64_t i = from; i < to; i += KEYS) {
    Vector products[SUMS] = {};
    const Element* const* soon = upcoming ? upcoming + i : nullptr;
    int64_t column = 0;
    for (; column + 2 * WIDTH <= dim; column += 2 * WIDTH)
      add_products<COUNT, KEYS, 2>(queries, stride, keys + i, soon, column, 0, products);
    for (; column + WIDTH <= dim; column += WIDTH)
      add_products<COUNT, KEYS, 1>(queries, stride, keys + i, soon, column, 0, products);
    if (column < dim) add_products<COUNT, KEYS, 0>(queries, stride, keys + i, soon, column, dim - column, products);
    float summed[SUMS];
    for (int n = 0; n < SUMS; n += WIDTH) store(summed + n, sums(products + n));
    for (int r = 0; r < COUNT; ++r) memcpy(scores + r * SCORES + i, summed + r * KEYS, KEYS * sizeof(float));
  }
}

// Transpose the columns of WIDTH keys that do better as pairs, as those of bfloat16 do; returns how many those are.
template <typename Element>
INLINE int64_t transpose_pairs(const Element* const*, const Element* const*, float*, int64_t) { return 0; }

INLINE int64_t transpose_pairs(const BFloat16* const* keys, const BFloat16* const* upcoming, float* columns, int64_t dim) {
  int64_t column = 0;
  for (; column + 2 * WIDTH <= dim; column += 2 * WIDTH) {
    Vector square[WIDTH];
    for (int i = 0; i < WIDTH; ++i) {
      __builtin_prefetch(upcoming[i] + column, 0, 2);
      square[i] = unaligned<Vector>(keys[i] + column);
    }
    transpose_square(square);
    for (int i = 0; i < WIDTH; ++i) {
      Pair pair = to_pair((const BFloat16*)&square[i]);
      store(columns + (column + i) * TILE, pair.first);
      store(columns + (column + WIDTH + i) * TILE, pair.second);
    }
  }
  return column;
}

// The keys of a tile, one column after another, so that a vector holds a column of consecutive keys.
template <typename Element>
void transpose(const Element* const* keys, const Element* const* upcoming, float* columns, int64_t count, int64_t dim) {
  for (int64_t key = 0; key < count; key += WIDTH) {  // the list's last keys are repeated, to fill a group
    int64_t column = transpose_pairs(keys + key, upcoming + key, columns + key, dim);
    for (; column < dim; column += WIDTH) {
      Vector square[WIDTH];
      for (int i = 0; i < WIDTH; ++i) {
        __builtin_prefetch(upcoming[key + i] + column, 0, 2);
        square[i] = piece(keys[key + i], column, dim);
      }
      transpose_square(square);
      for (int i = 0; i < WIDTH && column + i < dim; ++i) store(columns + (column + i) * TILE + key, square[i]);
    }
  }
}

// `score` for VECTORS vectors of keys that were transposed.
template <int COUNT, int VECTORS>
INLINE void score_vectors(const float* queries, const float* columns, float* scores, int64_t dim) {
  Vector products[COUNT][VECTORS] = {};
  for (int64_t column = 0; column < dim; ++column) {
    Vector keys[VECTORS];
    for (int k = 0; k < VECTORS; ++k) keys[k] = load(columns + column * TILE + k * WIDTH);
    for (int r = 0; r < COUNT; ++r)
      for (int k = 0; k < VECTORS; ++k) products[r][k] += keys[k] * queries[r * padded(dim) + column];
  }
  for (int r = 0; r < COUNT; ++r)
    for (int k = 0; k < VECTORS; ++k) store(scores + r * SCORES + k * WIDTH, products[r][k]);
}

// `score` for keys that were transposed: no sums over the lanes of a vector.
template <int COUNT>
INLINE void score_transposed(const float* queries, const float* columns, float* scores, int64_t from, int64_t to,
                             int64_t dim) {
  int64_t key = from / WIDTH * WIDTH;
  for (; key + (COLUMNS - 1) * WIDTH < to; key += COLUMNS * WIDTH)
    score_vectors<COUNT, COLUMNS>(queries, columns + key, scores + key, dim);
  for (; key < to; key += WIDTH) score_vectors<COUNT, 1>(queries, columns + key, scores + key, dim);
}

// The scores of keys that a row does not see become -inf, in the vectors that begin at from .. to - 1.
INLINE void hide(float* scores, int64_t from, int64_t to, Range seen) {
  for (int64_t i = from; i < to; i += WIDTH) {
    if (i >= seen.from && i + WIDTH <= seen.to) continue;
    Integers key = lanes() + (int32_t)i, is_seen = (key >= (int32_t)seen.from) & (key < (int32_t)seen.to);
    store(scores + i, select(is_seen, load(scores + i), Vector{} - __builtin_inff()));
  }
}

// Scores of one row become weights, those of keys that it does not see 0, in all vectors that hold a key of `any`. Returns
// the factor by which earlier sums shrink.
INLINE float weigh(float* scores, Range any, Range seen, double softcap, float& peak, float& total) {
  if (seen.is_empty()) return 1;
  int64_t from = any.from / WIDTH * WIDTH, to = any.to;
  if (softcap != 0) {
    for (int64_t i = from; i < to; i += WIDTH)
      store(scores + i, hyperbolic_tangent(load(scores + i) / (float)softcap) * (float)softcap);
  }
  if (seen.from > from || seen.to < to || to % WIDTH) hide(scores, from, to, seen);
  Vector highest = load(scores + from);
  for (int64_t i = from + WIDTH; i < to; i += WIDTH) {
    Vector more = load(scores + i);
    highest = select(more > highest, more, highest);
  }
  // Not -inf, which a row has that has seen nothing: less itself, it would spoil the sums of one whose first scores are -inf.
  float new_peak = peak > -__FLT_MAX__ ? peak : -__FLT_MAX__;
  for (int i = 0; i < WIDTH; ++i) new_peak = highest[i] > new_peak ? highest[i] : new_peak;
  Vector weights = {};
  for (int64_t i = from; i < to; i += WIDTH) {
    Vector weight = exponential(load(scores + i) - new_peak);
    store(scores + i, weight);
    weights += weight;
  }
  float fade = exponential(Vector{} + (peak - new_peak))[0];
  total = total * fade + sum(weights);
  peak = new_peak;
  return fade;
}

// Add the weighted values to COUNT rows: some columns of `read_columns`.
template <int COUNT, int WIDE, typename Element>
INLINE void add_columns(const AttentionCall& call, const float* weights, const Element* const* values,
                        const Element* const* upcoming, float* weighted, const float* fades, int64_t column,
                        int64_t from, int64_t to) {
  constexpr int VECTORS = WIDE ? WIDE : 1;
  const int64_t dim = call.dim_v, stride = padded(dim);
  Vector sums[COUNT][VECTORS];
  for (int r = 0; r < COUNT; ++r)
    for (int c = 0; c < VECTORS; ++c) sums[r][c] = load(weighted + r * stride + column + c * WIDTH) * fades[r];
  for (int64_t i = from; i < to; ++i) {
    if (upcoming) prefetch(upcoming[i] + column, VECTORS * WIDTH * sizeof(Element));
    Vector floats[VECTORS];
    read_columns<WIDE>(values[i] + column, dim - column, floats);
    for (int r = 0; r < COUNT; ++r)
      for (int c = 0; c < VECTORS; ++c) sums[r][c] += floats[c] * weights[r * SCORES + i];
  }
  for (int r = 0; r < COUNT; ++r)
    for (int c = 0; c < VECTORS; ++c) store(weighted + r * stride + column + c * WIDTH, sums[r][c]);
}

// Add the weighted values to COUNT rows, from `column` on: WIDE vectors at once, and then half as many.
template <int COUNT, int WIDE, typename Element>
INLINE void add_values(const AttentionCall& call, const float* weights, const Element* const* values,
                       const Element* const* upcoming, float* weighted, const float* fades, int64_t column,
                       int64_t from, int64_t to) {
  for (; column + WIDE * WIDTH <= call.dim_v; column += WIDE * WIDTH)
    add_columns<COUNT, WIDE>(call, weights, values, upcoming, weighted, fades, column, from, to);
  if constexpr (WIDE > 1)
    add_values<COUNT, WIDE / 2>(call, weights, values, upcoming, weighted, fades, column, from, to);
  else if (column < call.dim_v)
    add_columns<COUNT, 0>(call, weights, values, upcoming, weighted, fades, column, from, to);
}

// Add to each of some rows the values that not all of them see.
template <typename Element>
__attribute__((noinline)) void add_own_values(const AttentionCall& call, const float* weights,
                                              const Element* const* values, float* weighted, const Seen& seen,
                                              int64_t count) {
  const Element* const* none = nullptr;
  const float whole = 1;
  for (int64_t r = 0; r < count; ++r, weights += SCORES, weighted += padded(call.dim_v)) {
    Range before = {seen.each[r].from, min(seen.each[r].to, seen.all.from)};
    Range after = {max(seen.each[r].from, seen.all.to), seen.each[r].to};
    for (Range own : {before, after})
      if (!own.is_empty()) add_values<1, SUMS_OF_ROW<1>>(call, weights, values, none, weighted, &whole, 0, own.from, own.to);
  }
}

// COUNT rows from `row` on over the tile of keys that begins at `tile`. They share the values that all of them see; to
// a row that sees more, those are added by themselves.
template <int COUNT, typename Element>
void attend_rows(const AttentionCall& call, const float* queries, const Keys<Element>& list, const float* columns,
                 float* scores, Partial partial, int64_t row, int64_t tile, const Seen& seen, bool is_first) {
  const Element* const* values = list.values + tile;
  const float* rows = queries + row * padded(call.dim);
  const Range any = seen.any, all = seen.all;
  if (columns)
    score_transposed<COUNT>(rows, columns, scores, any.from, any.to, call.dim);
  else
    score<COUNT>(call, rows, list.keys + tile, is_first ? values : nullptr, scores, any.from, any.to);
  float fades[COUNT];
  for (int r = 0; r < COUNT; ++r)
    fades[r] = weigh(scores + r * SCORES, any, seen.each[r], call.softcap, partial.peak[row + r], partial.total[row + r]);
  float* weighted = partial.weighted + row * padded(call.dim_v);
  // The next tile's keys come in while this one's values are added. Past the end of the list: nothing.
  bool has_next = is_first && tile + TILE + all.to <= list.count;
  const Element* const* upcoming = has_next ? list.keys + tile + TILE : nullptr;
  add_values<COUNT, SUMS_OF_ROW<COUNT>>(call, scores, values, upcoming, weighted, fades, 0, all.from, all.to);
  if (any.from < all.from || any.to > all.to) add_own_values(call, scores, values, weighted, seen, COUNT);
}

// The queries of one KV head as rows of fp32, scaled: all heads of the first query, then of the second, ...
template <typename Element>
void scale_queries(const AttentionCall& call, const Span& span, int64_t kv_head, float* rows) {
  int64_t shared = call.num_heads / call.num_kv_heads;
  for (int64_t query = 0; query < span.num_queries; ++query) {
    for (int64_t head = 0; head < shared; ++head, rows += padded(call.dim)) {
      const Element* from = (const Element*)call.query +
                            (span.query_start + query) * call.query_strides.token +
                            (kv_head * shared + head) * call.query_strides.head;
      int64_t column = 0;
      for (; column + 2 * WIDTH <= call.dim; column += 2 * WIDTH) {
        Pair pair = to_pair(from + column);
        store(rows + column, pair.first * (float)call.scale);
        store(rows + column + WIDTH, pair.second * (float)call.scale);
      }
      for (; column < call.dim; column += WIDTH)
        store(rows + column, piece(from, column, call.dim) * (float)call.scale);
    }
  }
}

// What a query sees of a tile.
template <typename Element>
INLINE Range seen_by(const AttentionCall& call, const Span& span, const Keys<Element>& list, int64_t query,
                     int64_t tile, int64_t end) {
  int64_t position = span.first_position + query;
  if (position < 0) return {0, 0};
  int64_t from = list.place(first_visible(call, position), tile, end);
  return {from - tile, list.place(position + 1, from, end) - tile};
}

// The keys of a list, tile by tile.
template <typename Element>
void attend_list(const AttentionCall& call, const Span& span, const Keys<Element>& list, const float* queries,
                 float* scores, float* columns, Partial partial) {
  int64_t shared = call.num_heads / call.num_kv_heads, num_rows = span.num_queries * shared;
  int64_t last_position = span.first_position + span.num_queries - 1;
  for (int64_t tile = 0; tile < list.count; tile += TILE) {
    int64_t end = min(tile + TILE, list.count);
    if (columns) transpose(list.keys + tile, list.values + tile, columns, end - tile, call.dim);
    bool all_see_all = list.positions[tile] >= first_visible(call, last_position) &&
                       list.positions[end - 1] <= span.first_position;
    Seen seen = Seen::alike({0, end - tile});
    bool is_first = true;
    for (int64_t row = 0, query = 0, head = 0; row < num_rows; row += ROWS) {
      int64_t count = min(ROWS, num_rows - row);
      if (!all_see_all) {
        for (int64_t r = 0; r < count; ++r) {
          seen.each[r] = r && head ? seen.each[r - 1] : seen_by(call, span, list, query, tile, end);
          if (++head == shared) head = 0, ++query;
        }
        seen.join(count);
        if (seen.any.is_empty()) continue;
      }
      auto attend = count == 4   ? attend_rows<4, Element>
                    : count == 3 ? attend_rows<3, Element>
                    : count == 2 ? attend_rows<2, Element>
                                 : attend_rows<1, Element>;
      attend(call, queries, list, columns, scores, partial, row, tile, seen, is_first);
      is_first = false;
    }
  }
}

template <typename Element>
bool attend_elements(const AttentionCall& call, const Span& span, int64_t kv_head, float* scratch,
                     Partial partial) {
  int64_t num_rows = span.num_queries * (call.num_heads / call.num_kv_heads);
  float *queries = scratch, *scores = scratch + num_rows * padded(call.dim);
  float* columns = num_rows < MIN_TRANSPOSED_ROWS ? nullptr : scores + ROWS * SCORES;
  for (int64_t row = 0; row < num_rows; ++row) {
    partial.peak[row] = -__builtin_inff();
    partial.total[row] = 0;
  }
  memset(partial.weighted, 0, num_rows * padded(call.dim_v) * sizeof(float));
  scale_queries<Element>(call, span, kv_head, queries);
  Keys<Element> list;
  for (Span part = span; part.begin < span.end; part.begin = part.end) {
    part.end = part.begin + MAX_LISTED < span.end ? part.begin + MAX_LISTED : span.end;
    list.count = 0;
    if (!list_keys(call, part, kv_head, list)) return false;
    attend_list(call, span, list, queries, scores, columns, partial);
  }
  return true;
}

// Join the spans of one KV head, and divide. The peaks are used up.
template <typename Element>
void finish_elements(const AttentionCall& call, const Span& span, int64_t kv_head, const Partial* spans,
                     int64_t num_spans) {
  int64_t shared = call.num_heads / call.num_kv_heads;
  for (int64_t row = 0; row < span.num_queries * shared; ++row) {
    int64_t head = kv_head * shared + row % shared;
    int64_t place = (span.query_start + row / shared) * call.num_heads + head;
    Element* output = (Element*)call.output + place * call.dim_v;
    float peak = -__builtin_inff(), total = 0;
    for (int64_t i = 0; i < num_spans; ++i) peak = spans[i].peak[row] > peak ? spans[i].peak[row] : peak;
    if (peak == -__builtin_inff()) {  // it sees nothing
      memset(output, 0, call.dim_v * sizeof(Element));
      if (call.lse) call.lse[place] = call.sinks ? call.sinks[head] : -__builtin_inff();
      continue;
    }
    if (call.sinks) peak = call.sinks[head] > peak ? call.sinks[head] : peak;
    for (int64_t i = 0; i < num_spans; ++i) {
      spans[i].peak[row] = exponential(Vector{} + (spans[i].peak[row] - peak))[0];
      total += spans[i].total[row] * spans[i].peak[row];
    }
    if (call.sinks) total += exponential(Vector{} + (call.sinks[head] - peak))[0];
    if (call.lse) call.lse[place] = peak + __builtin_logf(total);
    auto joined = [&](int64_t column) {
      Vector sum = {};
      for (int64_t i = 0; i < num_spans; ++i)
        sum += load(spans[i].weighted + row * padded(call.dim_v) + column) * spans[i].peak[row];
      return sum / total;
    };
    int64_t column = 0;
    for (; column + 2 * WIDTH <= call.dim_v; column += 2 * WIDTH)
      from_pair({joined(column), joined(column + WIDTH)}, output + column);
    for (; column < call.dim_v; column += WIDTH)
      from_floats(joined(column), output + column, (int)(call.dim_v - column < WIDTH ? call.dim_v - column : WIDTH));
  }
}

}  // namespace

bool attend_span(const AttentionCall& call, const Span& span, int64_t kv_head, float* scratch, Partial partial) {
  auto attend = call.element_type == FLOAT32    ? attend_elements<Float32>
                : call.element_type == BFLOAT16 ? attend_elements<BFloat16>
                                                : attend_elements<Float16>;
  return attend(call, span, kv_head, scratch, partial);
}

void finish(const AttentionCall& call, const Span& span, int64_t kv_head, const Partial* spans, int64_t num_spans) {
  auto join = call.element_type == FLOAT32    ? finish_elements<Float32>
              : call.element_type == BFLOAT16 ? finish_elements<BFloat16>
                                              : finish_elements<Float16>;
  join(call, span, kv_head, spans, num_spans);
}

}  // namespace kvgroups::KVGROUPS_ISA
