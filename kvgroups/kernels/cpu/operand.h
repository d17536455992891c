// Tensors as Python hands them over: numbers of any element type, strided anyhow.

#pragma once

#include <stdint.h>

namespace kvgroups {

enum ElementType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

static inline int64_t size_of(int64_t element_type) { return element_type == FLOAT32 ? 4 : 2; }

// Filled by cpu_operand.py. Strides are in elements, and 0 where a number is shared; data is null if there is none.
struct Operand { const char* data; int64_t element_type, strides[3]; };

struct Slots {
  const char* data;
  int64_t are_64_bit;
  int64_t operator[](int64_t i) const {
    return are_64_bit ? ((const int64_t*)data)[i] : ((const int32_t*)data)[i];
  }
};

// Rows of floats are padded to this, which every vector width divides.
constexpr int64_t PADDING = 16;

static inline int64_t padded(int64_t size) { return (size + PADDING - 1) / PADDING * PADDING; }

}  // namespace kvgroups
