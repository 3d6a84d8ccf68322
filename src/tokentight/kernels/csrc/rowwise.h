#ifndef TT_ROWWISE_H
#define TT_ROWWISE_H

#include "vec.h"

/* out = x / sqrt(mean(x^2) + eps) * weight for one row of n: sixteen running sums, a fixed tree. */
TT_INLINE void tt_norm_row(const float *x, const float *weight, float *out, size_t n, float eps) {
  vf s0 = vzero(), s1 = vzero();
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    vf a = vload(x + i), b = vload(x + i + 8);
    s0 = vfma(a, a, s0);
    s1 = vfma(b, b, s1);
  }
  for (; i < n; i += 8) {
    vf a = vload_part(x + i, n - i, 0.0f);
    s0 = vfma(a, a, s0);
  }
  float mean = vhsum(vadd(s0, s1)) / (float)n;
  vf scale = vset1(1.0f / sqrtf(mean + eps));
  for (i = 0; i < n; i += 8) {
    vf a = vmul(vload_part(x + i, n - i, 0.0f), scale);
    vstore_part(out + i, vmul(a, vload_part(weight + i, n - i, 0.0f)), n - i);
  }
}

#endif
