// Vectors of floats in the widest registers of the instruction set that a file is compiled for.
//
// Files named *_simd.cpp are compiled once for each instruction set, with KVGROUPS_ISA as the namespace of that
// build. They use no standard containers: an inline function of the standard library, compiled for AVX-512
// here, might be the copy that the linker keeps for everybody.

#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvgroups::KVGROUPS_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
constexpr bool HAS_32_REGISTERS = true;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
constexpr bool HAS_32_REGISTERS = false;
#else
constexpr int WIDTH = 4;
constexpr bool HAS_32_REGISTERS = true;  // NEON
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));

#define INLINE inline __attribute__((always_inline))

// Before a loop over vectors of which there are few: GCC keeps an array in registers only if it unrolls early what runs
// over it.
#define UNROLL _Pragma("GCC unroll 16")

// Elements as they are stored. Arithmetic is in fp32.
struct Float32 { uint32_t bits; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <typename To, typename From>
INLINE To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps its size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Any>
INLINE Any unaligned(const void* from) {
  Any to;
  memcpy(&to, from, sizeof to);
  return to;
}

INLINE Vector load(const float* from) { return unaligned<Vector>(from); }
INLINE void store(float* to, Vector value) { memcpy(to, &value, sizeof value); }

INLINE Vector to_floats(const Float32* from) { return unaligned<Vector>(from); }

INLINE Vector to_floats(const BFloat16* from) {
#if defined(__AVX512F__)  // GCC 12 makes four instructions of the conversion below
  Bits bits = (Bits)_mm512_maskz_cvtepu16_epi32(0xffff, unaligned<__m256i>(from));
#else
  Bits bits = __builtin_convertvector(unaligned<Shorts>(from), Bits);
#endif
  return reinterpret<Vector>(bits << 16);
}

// float16 as floats, and floats to the nearest float16. GCC 12 warns of what is undefined in the forms without a mask.
#if defined(__AVX512F__)
INLINE Vector widened(Shorts shorts) { return (Vector)_mm512_maskz_cvtph_ps(0xffff, (__m256i)shorts); }
INLINE Shorts halves(Vector value) {
  return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__AVX2__)
INLINE Vector widened(Shorts shorts) { return (Vector)_mm256_cvtph_ps((__m128i)shorts); }
INLINE Shorts halves(Vector value) { return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
#else
INLINE Vector widened(Shorts shorts) { return (Vector)vcvt_f32_f16((float16x4_t)shorts); }
INLINE Shorts halves(Vector value) { return (Shorts)vcvt_f16_f32((float32x4_t)value); }
#endif

INLINE Vector to_floats(const Float16* from) { return widened(unaligned<Shorts>(from)); }

// 2 * WIDTH elements, in an order of their own: of bfloat16 the even and the odd ones, which cost one operation each.
struct Pair { Vector first, second; };

template <typename Element>
INLINE Pair to_pair(const Element* from) { return {to_floats(from), to_floats(from + WIDTH)}; }

INLINE Pair to_pair(const BFloat16* from) {
  Bits words = unaligned<Bits>(from);
  return {reinterpret<Vector>(words << 16), reinterpret<Vector>(words & 0xffff0000)};
}

// The first `count` < WIDTH elements, then zeros.
template <typename Element>
INLINE Vector to_floats(const Element* from, int count) {
  Element padded[WIDTH] = {};
  memcpy(padded, from, count * sizeof(Element));
  return to_floats(padded);
}

template <int... index>
INLINE Vector shuffled(Vector a, Vector b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, index...);
#else
  return __builtin_shuffle(a, b, (Integers){index...});
#endif
}

// In each run of 2 * HALF lanes: the two halves of a's, added, and then those of b's.
template <int HALF, int... lane>
INLINE Vector joined(Vector a, Vector b, std::integer_sequence<int, lane...>) {
  return shuffled<(lane % (2 * HALF) < HALF ? lane : WIDTH + lane - HALF)...>(a, b) +
         shuffled<(lane % (2 * HALF) < HALF ? lane + HALF : WIDTH + lane)...>(a, b);
}

// Lane i of the result is the sum of the lanes of vectors[i]. That sum does not depend on the other vectors.
template <int HALF = WIDTH / 2>
INLINE Vector sums(const Vector* vectors) {
  if constexpr (HALF == 0) {
    return vectors[0];
  } else {
    Vector half[HALF];
    for (int i = 0; i < HALF; ++i)
      half[i] = joined<HALF>(vectors[i], vectors[i + HALF], std::make_integer_sequence<int, WIDTH>());
    return sums<HALF / 2>(half);
  }
}

template <int HALF, int... lane>
INLINE Vector folded(Vector vector, std::integer_sequence<int, lane...>) {
  return vector + shuffled<(lane ^ HALF)...>(vector, vector);
}

// The sum of the lanes, added as `sums` adds them.
template <int HALF = WIDTH / 2>
INLINE float sum(Vector vector) {
  if constexpr (HALF == 0) {
    return vector[0];
  } else {
    return sum<HALF / 2>(folded<HALF>(vector, std::make_integer_sequence<int, WIDTH>()));
  }
}

// Of each two vectors HALF apart: the upper halves of the first's runs of 2 * HALF lanes change places with the lower
// halves of the second's.
template <int HALF, int... lane>
INLINE void exchange(Vector& a, Vector& b, std::integer_sequence<int, lane...>) {
  Vector first = shuffled<((lane & HALF) ? WIDTH + lane - HALF : lane)...>(a, b);
  b = shuffled<((lane & HALF) ? WIDTH + lane : lane + HALF)...>(a, b);
  a = first;
}

// Lane j of vector i changes places with lane i of vector j.
template <int HALF = WIDTH / 2>
INLINE void transpose_square(Vector* vectors) {
  if constexpr (HALF > 0) {
    for (int i = 0; i < WIDTH; ++i)
      if (!(i & HALF)) exchange<HALF>(vectors[i], vectors[i + HALF], std::make_integer_sequence<int, WIDTH>());
    transpose_square<HALF / 2>(vectors);
  }
}

template <int... lane>
INLINE Integers numbered(std::integer_sequence<int, lane...>) { return (Integers){lane...}; }

// 0, 1, 2, ...
INLINE Integers lanes() { return numbered(std::make_integer_sequence<int, WIDTH>()); }

INLINE Vector select(Integers where, Vector yes, Vector no) { return where ? yes : no; }

// e to the x, to about one unit in the last place. Below -87 it is 0, and above 88 infinity; NaN stays NaN.
INLINE Vector exponential(Vector x) {
  Vector clamped = select(x < -87.0f, Vector{} - 87.0f, select(x > 88.7f, Vector{} + 88.7f, x));
  Vector shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what is left of the sum are integers
  Vector power = shifted - 12582912.0f;
  Vector rest = clamped - power * 0.693359375f + power * 2.12194440e-4f;
  Vector series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  // In two factors, since 2^128 is no float while e^88.7 is one.
  Integers whole = __builtin_convertvector(power, Integers), half = whole >> 1;
  Vector value = series * reinterpret<Vector>((half + 127) << 23) * reinterpret<Vector>((whole - half + 127) << 23);
  value = select(x < -87.0f, Vector{}, value);
  return select(x > 88.7f, Vector{} + __builtin_inff(), value);
}

// tanh, to a few units in the last place, also near 0, where the quotient would cancel.
INLINE Vector hyperbolic_tangent(Vector x) {
  Vector size = select(x < 0.0f, -x, x), square = x * x;
  Vector series = square * -5.70498872745e-3f + 2.06390887954e-2f;
  series = series * square - 5.37397155531e-2f;
  series = series * square + 1.33314422036e-1f;
  series = series * square - 3.33332819422e-1f;
  series = series * square * x + x;
  Vector quotient = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  return select(size < 0.625f, series, select(x < 0.0f, -quotient, quotient));
}

// The natural logarithm of a normal number, to about one unit in the last place.
INLINE Vector logarithm(Vector x) {
  Bits bits = reinterpret<Bits>(x);
  Vector exponent = __builtin_convertvector((Integers)(bits >> 23) - 126, Vector);
  Vector part = reinterpret<Vector>((bits & 0x007fffff) | 0x3f000000);  // from 1/2 to 1
  Integers is_low = part < 0.707106781f;
  exponent = select(is_low, exponent - 1.0f, exponent);
  Vector rest = select(is_low, part + part, part) - 1.0f, square = rest * rest;
  Vector series = rest * 7.0376836292e-2f - 1.1514610310e-1f;
  series = series * rest + 1.1676998740e-1f;
  series = series * rest - 1.2420140846e-1f;
  series = series * rest + 1.4249322787e-1f;
  series = series * rest - 1.6668057665e-1f;
  series = series * rest + 2.0000714765e-1f;
  series = series * rest - 2.4999993993e-1f;
  series = series * rest + 3.3333331174e-1f;
  series = series * rest * square - exponent * 2.12194440e-4f - square * 0.5f;
  return rest + series + exponent * 0.693359375f;
}

// log(1 + e^x), and x itself from 20 on, as torch has it. The last term is what the sum 1 + e^x rounds away.
INLINE Vector softplus(Vector x) {
  Vector power = exponential(x), sum = 1.0f + power;
  return select(x > 20.0f, x, logarithm(sum) + (power - (sum - 1.0f)) / sum);
}

INLINE Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

// Bring a run of bytes into the second level of cache ahead of its use.
INLINE void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch((const char*)from + byte, 0, 2);
}

}  // namespace kvgroups::KVGROUPS_ISA
