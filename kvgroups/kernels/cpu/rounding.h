// Numbers of any element type read as floats, rounded as that type would round them, and written.
//
// Arithmetic is in fp32. Where torch would have stored an intermediate result in 16 bits, `rounded` makes of it
// the number that it would have read back.

#pragma once

#include "operand.h"
#include "vector.h"

namespace kvgroups::KVGROUPS_ISA {

template <typename Element>
INLINE Vector rounded(Vector value);

template <>
INLINE Vector rounded<Float32>(Vector value) { return value; }

template <>
INLINE Vector rounded<BFloat16>(Vector value) {
  Bits bits = reinterpret<Bits>(value);
  Vector nearest = reinterpret<Vector>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  return select(value == value, nearest, Vector{} + __builtin_nanf(""));
}

template <>
INLINE Vector rounded<Float16>(Vector value) {
  Bits bits = reinterpret<Bits>(value), magnitude = bits & 0x7fffffff;
  Bits normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000;
  Vector size = select(reinterpret<Vector>(magnitude) < 65520.0f, reinterpret<Vector>(normal), Vector{} + __builtin_inff());
  // Subnormal: the sum lines the bits up and rounds them to even.
  size = select(reinterpret<Vector>(magnitude) < 0x1p-14f, reinterpret<Vector>(magnitude) + 0.5f - 0.5f, size);
  Vector nearest = reinterpret<Vector>(reinterpret<Bits>(size) | (bits & 0x80000000));
  return select(value == value, nearest, Vector{} + __builtin_nanf(""));
}

INLINE void from_floats(Vector value, Float32* to) { memcpy(to, &value, sizeof value); }

INLINE void from_floats(Vector value, BFloat16* to) {
  Shorts bits = __builtin_convertvector(reinterpret<Bits>(rounded<BFloat16>(value)) >> 16, Shorts);
  memcpy(to, &bits, sizeof bits);
}

INLINE void from_floats(Vector value, Float16* to) {
  Bits bits = reinterpret<Bits>(rounded<Float16>(value)), magnitude = bits & 0x7fffffff;
  Bits subnormal = reinterpret<Bits>(reinterpret<Vector>(magnitude) + 0.5f) - 0x3f000000;
  Bits is_subnormal = (Bits)(magnitude < 0x38800000), is_special = (Bits)(magnitude >= 0x7f800000);
  Bits special = 0x7c00 | (magnitude >> 13 & 0x200);
  Bits normal = (magnitude - 0x38000000) >> 13;
  Bits half = (is_subnormal & subnormal) | (is_special & special) | (~is_subnormal & ~is_special & normal);
  Shorts shorts = __builtin_convertvector(half | (bits >> 16 & 0x8000), Shorts);
  memcpy(to, &shorts, sizeof shorts);
}

// The first `count` <= WIDTH of them.
template <typename Element>
INLINE void from_floats(Vector value, Element* to, int count) {
  if (count == WIDTH) return from_floats(value, to);
  Element padded[WIDTH];
  from_floats(value, padded);
  memcpy(to, padded, count * sizeof(Element));
}

// `count` numbers, `stride` elements apart, as floats; then zeros up to whole vectors.
template <typename Element>
INLINE void read_run(const Element* from, int64_t stride, int64_t count, float* to) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; i += WIDTH)
      store(to + i, count - i < WIDTH ? to_floats(from + i, (int)(count - i)) : to_floats(from + i));
    return;
  }
  for (int64_t i = 0; i < count; i += WIDTH) {
    Element lanes[WIDTH] = {};
    for (int64_t lane = 0; lane < WIDTH && i + lane < count; ++lane) lanes[lane] = from[(i + lane) * stride];
    store(to + i, to_floats(lanes));
  }
}

// Numbers k .. k + count - 1 of the operand's last dimension, at [i, j].
INLINE void read(const Operand& operand, int64_t i, int64_t j, int64_t k, int64_t count, float* to) {
  int64_t at = i * operand.strides[0] + j * operand.strides[1] + k * operand.strides[2], stride = operand.strides[2];
  if (operand.element_type == FLOAT32) read_run((const Float32*)operand.data + at, stride, count, to);
  if (operand.element_type == BFLOAT16) read_run((const BFloat16*)operand.data + at, stride, count, to);
  if (operand.element_type == FLOAT16) read_run((const Float16*)operand.data + at, stride, count, to);
}

}  // namespace kvgroups::KVGROUPS_ISA
