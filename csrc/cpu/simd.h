// Vectors of fp32 for the instruction set that this file is compiled for, with loads and stores of fp32, bf16 and fp16.
//
// Everything lives in a namespace named after the set: the same source is linked several times into one library, and
// a shared inline function could otherwise be taken from a translation unit that uses instructions this processor
// lacks. For the same reason kernels use no inline functions of the standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../ops.h"

#ifndef VLLM_ISA
#error "VLLM_ISA must name the instruction set (see CMakeLists.txt)"
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace vllm_native {
namespace VLLM_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float to_float(float value) { return value; }
static inline float to_float(BFloat16 value) { return float_of_bits(uint32_t(value.bits) << 16); }
static inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  // Scaling by 2^112 moves the exponent's bias from 15 to 127 and makes subnormals right as well.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * float_of_bits(0x77800000)));
}

static inline void from_float(float value, float* out) { *out = value; }
static inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    out->bits = uint16_t((bits >> 16) | 0x40);  // keep a NaN a NaN
    return;
  }
  out->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // nearest, ties to even
}
static inline void from_float(float value, Float16* out) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out->bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to infinity
    out->bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal or zero: let the adder round
    const float shifted = float_of_bits(magnitude) + float_of_bits(0x3f000000);
    out->bits = uint16_t(sign | (bits_of_float(shifted) - 0x3f000000));
  } else {
    const uint32_t odd = (magnitude >> 13) & 1;
    out->bits = uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
  }
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512F__)

struct Vec {
  static constexpr int64_t kLanes = 16;
  __m512 v;
};

static inline Vec vec_set(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec vec_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec vec_load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline Vec vec_load(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void vec_store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
static inline void vec_store(BFloat16* p, Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
}
static inline void vec_store(Float16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec vec_fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec vec_min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec vec_max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec vec_round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Vec vec_scale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
static inline float vec_sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
static inline void vec_sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int64_t kLanes = 8;
  __m256 v;
};

static inline Vec vec_set(float x) { return {_mm256_set1_ps(x)}; }
static inline Vec vec_load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline Vec vec_load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
static inline Vec vec_load(const Float16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline void vec_store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
static inline void vec_store(BFloat16* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
static inline void vec_store(Float16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Vec vec_fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec vec_min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline Vec vec_max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline Vec vec_round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Vec vec_scale2(Vec a, Vec n) {
  // n is whole and at least -126 here, see vec_exp.
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
static inline float vec_sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  half = _mm_add_ss(half, _mm_shuffle_ps(half, half, 1));
  return _mm_cvtss_f32(half);
}
static inline void vec_sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

#else

// Plain loops of a fixed length: correct everywhere, and compilers turn them into whatever the baseline offers.
struct Vec {
  static constexpr int64_t kLanes = 8;
  float v[kLanes];
};

template <typename F>
static inline Vec vec_each(F f) {
  Vec r;
  for (int64_t i = 0; i < Vec::kLanes; ++i) r.v[i] = f(i);
  return r;
}
static inline Vec vec_set(float x) {
  return vec_each([&](int64_t) { return x; });
}
template <typename T>
static inline Vec vec_load(const T* p) {
  return vec_each([&](int64_t i) { return to_float(p[i]); });
}
template <typename T>
static inline void vec_store(T* p, const Vec& a) {
  for (int64_t i = 0; i < Vec::kLanes; ++i) from_float(a.v[i], p + i);
}
static inline Vec operator+(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] + b.v[i]; });
}
static inline Vec operator-(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] - b.v[i]; });
}
static inline Vec operator*(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] * b.v[i]; });
}
static inline Vec operator/(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] / b.v[i]; });
}
static inline Vec vec_fma(const Vec& a, const Vec& b, const Vec& c) {
  return vec_each([&](int64_t i) { return a.v[i] * b.v[i] + c.v[i]; });
}
static inline Vec vec_min(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
static inline Vec vec_max(const Vec& a, const Vec& b) {
  return vec_each([&](int64_t i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
static inline Vec vec_round(const Vec& a) {
  return vec_each([&](int64_t i) { return rintf(a.v[i]); });
}
static inline Vec vec_scale2(const Vec& a, const Vec& n) {
  return vec_each([&](int64_t i) { return a.v[i] * float_of_bits(uint32_t(int32_t(n.v[i]) + 127) << 23); });
}
static inline float vec_sum(const Vec& a) {
  float sum = 0;
  for (int64_t i = 0; i < Vec::kLanes; ++i) sum += a.v[i];
  return sum;
}
static inline void vec_sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
  out[0] = vec_sum(a), out[1] = vec_sum(b), out[2] = vec_sum(c), out[3] = vec_sum(d);
}

#endif

// exp(x) to about 2e-7 relative. Below -87 the result is about 1e-38 instead of a smaller number or zero.
// vec_min and vec_max return their second operand if either is NaN, so a NaN passes through.
static inline Vec vec_exp(Vec x) {
  x = vec_min(vec_set(88.0f), vec_max(vec_set(-87.0f), x));
  const Vec n = vec_round(x * vec_set(1.44269504088896341f));
  Vec r = vec_fma(n, vec_set(-0.693359375f), x);
  r = vec_fma(n, vec_set(2.12194440e-4f), r);
  Vec p = vec_set(1.9875691500e-4f);
  p = vec_fma(p, r, vec_set(1.3981999507e-3f));
  p = vec_fma(p, r, vec_set(8.3334519073e-3f));
  p = vec_fma(p, r, vec_set(4.1665795894e-2f));
  p = vec_fma(p, r, vec_set(1.6666665459e-1f));
  p = vec_fma(p, r, vec_set(5.0000001201e-1f));
  p = vec_fma(p, r * r, r + vec_set(1.0f));
  return vec_scale2(p, n);
}

static inline float exp_one(float x) {
  float out[Vec::kLanes];
  vec_store(out, vec_exp(vec_set(x)));
  return out[0];
}

// The first `count` (< kLanes) elements, the rest zero.
template <typename T>
static inline Vec vec_load_part(const T* p, int64_t count) {
  float buffer[Vec::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = to_float(p[i]);
  return vec_load(buffer);
}
template <typename T>
static inline void vec_store_part(T* p, Vec a, int64_t count) {
  float buffer[Vec::kLanes];
  vec_store(buffer, a);
  for (int64_t i = 0; i < count; ++i) from_float(buffer[i], p + i);
}

// Calls `body` with a value of the element type of `dtype`.
template <typename Body>
static inline void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      body(float{});
      break;
    case DType::kBFloat16:
      body(BFloat16{});
      break;
    case DType::kFloat16:
      body(Float16{});
      break;
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
