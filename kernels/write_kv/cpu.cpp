// This step's keys and values into their slots, token by token.

#include <stdint.h>
#include <string.h>

#include <initializer_list>

#include "runtime.h"

namespace {

// Rows of (tokens, heads) and where they go in (blocks, heads, tokens); sizes and strides in bytes.
struct Rows {
  const char* from;
  int64_t from_token, from_head;
  char* to;
  int64_t to_block, to_head, to_token, size;
};

// Filled by cpu_impl.py: eight bytes a field, in this order.
struct WriteCall {
  Rows key, value;
  const int64_t* slots;
  int64_t num_tokens, num_heads, num_blocks, block_size;
};

}  // namespace

// 0, or -1 if a slot lies beyond the last block; then nothing has been written.
EXPORTED int64_t kvgroups_write_kv(const WriteCall* call) {
  for (int64_t token = 0; token < call->num_tokens; ++token)
    if (call->slots[token] >= call->num_blocks * call->block_size) return -1;
  for (int64_t token = 0; token < call->num_tokens; ++token) {
    int64_t slot = call->slots[token];
    if (slot < call->block_size) continue;  // -1, and the null block, which nobody writes
    int64_t block = slot / call->block_size, offset = slot % call->block_size;
    for (const Rows* rows : {&call->key, &call->value}) {
      const char* from = rows->from + token * rows->from_token;
      char* to = rows->to + block * rows->to_block + offset * rows->to_token;
      for (int64_t head = 0; head < call->num_heads; ++head)
        memcpy(to + head * rows->to_head, from + head * rows->from_head, rows->size);
    }
  }
  return 0;
}
