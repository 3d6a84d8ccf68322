/* Eight float lanes. Every operation is one correctly rounded IEEE operation per lane, so the AVX2
 * and the portable variant give the same bits. Comparisons pick operands as `a > b ? a : b`. */
#ifndef TT_VEC_H
#define TT_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TT_INLINE static inline __attribute__((always_inline))
#define TT_LANES 8

#if !defined(TT_PORTABLE) && defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
typedef __m256 vf;

TT_INLINE vf vzero(void) { return _mm256_setzero_ps(); }
TT_INLINE vf vset1(float a) { return _mm256_set1_ps(a); }
TT_INLINE vf vload(const float *p) { return _mm256_loadu_ps(p); }
TT_INLINE void vstore(float *p, vf a) { _mm256_storeu_ps(p, a); }
TT_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
TT_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
TT_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
TT_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
TT_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
TT_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
TT_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
TT_INLINE vf vload_bf16(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
/* 2^n for the integer held in the low mantissa bits of `shifted` = n + 1.5 * 2^23, halved twice:
 * returns 2^(n >> 1) in *half and 2^(n - (n >> 1)) as the result, so that subnormal results and
 * overflow round once. */
TT_INLINE vf vexp2_parts(vf shifted, vf *half) {
  __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000));
  __m256i h = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, h), bias = _mm256_set1_epi32(127);
  *half = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(h, bias), 23));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}
TT_INLINE float vhsum(vf a) {
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 u = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
TT_INLINE float vhmax(vf a) {
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 u = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(u, _mm_movehdup_ps(u)));
}

#else

typedef struct {
  float v[TT_LANES];
} vf;

#define TT_EACH for (int i = 0; i < TT_LANES; i++)
TT_INLINE vf vset1(float a) { vf r; TT_EACH r.v[i] = a; return r; }
TT_INLINE vf vzero(void) { return vset1(0.0f); }
TT_INLINE vf vload(const float *p) { vf r; memcpy(r.v, p, sizeof r.v); return r; }
TT_INLINE void vstore(float *p, vf a) { memcpy(p, a.v, sizeof a.v); }
TT_INLINE vf vadd(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
TT_INLINE vf vsub(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
TT_INLINE vf vmul(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
TT_INLINE vf vdiv(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
TT_INLINE vf vmax(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
TT_INLINE vf vmin(vf a, vf b) { vf r; TT_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
TT_INLINE vf vfma(vf a, vf b, vf c) {
  vf r;
  TT_EACH r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}
TT_INLINE vf vload_bf16(const uint16_t *p) {
  vf r;
  uint32_t bits[TT_LANES];
  TT_EACH bits[i] = (uint32_t)p[i] << 16;
  memcpy(r.v, bits, sizeof bits);
  return r;
}
TT_INLINE vf vexp2_parts(vf shifted, vf *half) {
  vf r;
  TT_EACH {
    uint32_t bits, h, rest;
    memcpy(&bits, &shifted.v[i], 4);
    int32_t n = (int32_t)(bits - 0x4B400000u), nh = n >> 1;
    h = (uint32_t)(nh + 127) << 23;
    rest = (uint32_t)(n - nh + 127) << 23;
    memcpy(&half->v[i], &h, 4);
    memcpy(&r.v[i], &rest, 4);
  }
  return r;
}
TT_INLINE float vhsum(vf a) {
  const float *v = a.v;
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
TT_INLINE float tt_max1(float a, float b) { return a > b ? a : b; }
TT_INLINE float vhmax(vf a) {
  const float *v = a.v;
  float t0 = tt_max1(v[0], v[4]), t1 = tt_max1(v[1], v[5]);
  float t2 = tt_max1(v[2], v[6]), t3 = tt_max1(v[3], v[7]);
  return tt_max1(tt_max1(t0, t2), tt_max1(t1, t3));
}

#endif

/* The first `n` lanes (n <= 8), the others `fill`: the same arithmetic serves a row's tail. */
TT_INLINE vf vload_part(const float *p, size_t n, float fill) {
  if (n >= TT_LANES) return vload(p);
  float lanes[TT_LANES];
  for (size_t i = 0; i < TT_LANES; i++) lanes[i] = i < n ? p[i] : fill;
  return vload(lanes);
}
TT_INLINE void vstore_part(float *p, vf a, size_t n) {
  if (n >= TT_LANES) {
    vstore(p, a);
    return;
  }
  float lanes[TT_LANES];
  vstore(lanes, a);
  memcpy(p, lanes, n * sizeof(float));
}

/* e^x: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial of degree 7 in r by Horner, two-step
 * scaling. Below -104 it is 0 (so is e^-inf), above 88.73 it is +inf, NaN stays NaN. */
TT_INLINE vf vexp(vf x) {
  const vf shift = vset1(12582912.0f);
  x = vmin(vset1(89.0f), vmax(vset1(-104.0f), x));
  vf shifted = vfma(x, vset1(1.44269504088896341f), shift);
  vf n = vsub(shifted, shift);
  vf r = vfma(n, vset1(-0.693145751953125f), x);
  r = vfma(n, vset1(-1.42860682030941723e-6f), r);
  vf p = vset1(1.0f / 5040.0f);
  p = vfma(p, r, vset1(1.0f / 720.0f));
  p = vfma(p, r, vset1(1.0f / 120.0f));
  p = vfma(p, r, vset1(1.0f / 24.0f));
  p = vfma(p, r, vset1(1.0f / 6.0f));
  p = vfma(p, r, vset1(0.5f));
  p = vfma(p, r, vset1(1.0f));
  p = vfma(p, r, vset1(1.0f));
  vf half, rest = vexp2_parts(shifted, &half);
  return vmul(vmul(p, half), rest);
}
TT_INLINE float exp1(float x) {
  float lanes[TT_LANES];
  vstore(lanes, vexp(vset1(x)));
  return lanes[0];
}

/* ln x for finite normal x > 0: x = m 2^e with m in [sqrt(1/2), sqrt(2)), 2 artanh((m-1)/(m+1)). */
static inline double log1(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  int64_t e = (int64_t)(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  double s = (m - 1.0) / (m + 1.0), s2 = s * s, sum = 0.0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * s2 + 1.0 / (double)k;
  return (double)e * 0.69314718055994530942 + 2.0 * s * sum;
}

#endif
