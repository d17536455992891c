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
INLINE Vector rounded<Float16>(Vector value) { return widened(halves(value)); }

INLINE void from_floats(Vector value, Float32* to) { memcpy(to, &value, sizeof value); }

INLINE void from_floats(Vector value, BFloat16* to) {
  Shorts bits = __builtin_convertvector(reinterpret<Bits>(rounded<BFloat16>(value)) >> 16, Shorts);
  memcpy(to, &bits, sizeof bits);
}

INLINE void from_floats(Vector value, Float16* to) {
  Shorts shorts = halves(value);
  memcpy(to, &shorts, sizeof shorts);
}

// What `to_pair` reads.
template <typename Element>
INLINE void from_pair(Pair pair, Element* to) {
  from_floats(pair.first, to);
  from_floats(pair.second, to + WIDTH);
}

INLINE void from_pair(Pair pair, BFloat16* to) {
  Bits even = reinterpret<Bits>(rounded<BFloat16>(pair.first)), odd = reinterpret<Bits>(rounded<BFloat16>(pair.second));
  Bits words = even >> 16 | odd;
  memcpy(to, &words, sizeof words);
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
