// This step's keys and values into their slots, token by token.

#include <stdint.h>
#include <string.h>

#include "runtime.h"

namespace {

// From rows of (tokens, heads) to rows of (blocks, heads, tokens), in bytes.
struct Strides {
  int64_t from_token, from_head, to_block, to_head, to_token, size;
};

// Filled by cpu_impl.py: eight bytes a field, in this order.
struct WriteCall {
  const char *key, *value;
  char *key_cache, *value_cache;
  const int64_t* slots;
  Strides key_strides, value_strides;
  int64_t num_tokens, num_heads, num_blocks, block_size;
};

// One token's heads into their block.
void write(const char* from, char* to, const Strides& strides, int64_t num_heads) {
  for (int64_t head = 0; head < num_heads; ++head)
    memcpy(to + head * strides.to_head, from + head * strides.from_head, strides.size);
}

}  // namespace

// 0, or -1 if a slot lies beyond the last block; then nothing has been written.
EXPORTED int64_t kvgroups_write_kv(const WriteCall* call) {
  for (int64_t token = 0; token < call->num_tokens; ++token)
    if (call->slots[token] >= call->num_blocks * call->block_size) return -1;
  for (int64_t token = 0; token < call->num_tokens; ++token) {
    int64_t slot = call->slots[token];
    if (slot < call->block_size) continue;  // -1, and the null block, which nobody writes
    int64_t block = slot / call->block_size, offset = slot % call->block_size;
    const Strides &keys = call->key_strides, &values = call->value_strides;
    write(call->key + token * keys.from_token, call->key_cache + block * keys.to_block + offset * keys.to_token, keys,
          call->num_heads);
    write(call->value + token * values.from_token,
          call->value_cache + block * values.to_block + offset * values.to_token, values, call->num_heads);
  }
  return 0;
}
