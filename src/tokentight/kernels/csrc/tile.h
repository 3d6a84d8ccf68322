/* The register tile under the matrix product and both halves of attention:
 *   acc[r][v] = fma(x[r][k], w[k][v], acc[r][v]) for k = 0 .. K-1, one chain per output.
 * R rows by NV vectors, R * NV <= 12 so that AVX2's sixteen registers hold it. Vectors come in
 * panels of two; panels lie `panel` weights apart, and `step` weights separate k from k + 1.
 * `fetch` asks for the line `ahead` bytes on: 1 into the first-level cache, 2 into the second. */
#ifndef TT_TILE_H
#define TT_TILE_H

#include "vec.h"

TT_INLINE vf tt_weight(const void *w, size_t i, int bf16) {
  return bf16 ? vload_bf16((const uint16_t *)w + i) : vload((const float *)w + i);
}

TT_INLINE void fma_tile(const int R, const int NV, const int bf16, const int fetch,
                        const ptrdiff_t ahead, const float *x,
                        size_t ldx, const void *w, size_t step, size_t panel, float *acc,
                        size_t ld_acc, size_t acc_panel, size_t K) {
  vf a[12];
#pragma GCC unroll 12
  for (int i = 0; i < R * NV; i++) {
    int r = i / NV, v = i % NV;
    a[i] = vload(acc + (size_t)r * ld_acc + (size_t)(v / 2) * acc_panel + (size_t)(v % 2) * 8);
  }
  for (size_t k = 0; k < K; k++) {
    if (fetch) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v += 2) {
        size_t i = (size_t)(v / 2) * panel + k * step;
        const char *line = (const char *)w + i * (bf16 ? 2 : 4) + ahead;
        if (fetch == 1) __builtin_prefetch(line, 0, 3);
        else __builtin_prefetch(line, 0, 2);
      }
    }
    if (R <= NV) {
      vf xs[6];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) xs[r] = vset1(x[(size_t)r * ldx + k]);
#pragma GCC unroll 12
      for (int v = 0; v < NV; v++) {
        vf wv = tt_weight(w, (size_t)(v / 2) * panel + k * step + (size_t)(v % 2) * 8, bf16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) a[r * NV + v] = vfma(xs[r], wv, a[r * NV + v]);
      }
    } else {
      vf ws[2];
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++)
        ws[v] = tt_weight(w, (size_t)(v / 2) * panel + k * step + (size_t)(v % 2) * 8, bf16);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        vf xv = vset1(x[(size_t)r * ldx + k]);
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) a[r * NV + v] = vfma(xv, ws[v], a[r * NV + v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R * NV; i++) {
    int r = i / NV, v = i % NV;
    vstore(acc + (size_t)r * ld_acc + (size_t)(v / 2) * acc_panel + (size_t)(v % 2) * 8, a[i]);
  }
}

/* Rows go in tiles of at most six, as equal as can be: 8 is 4 + 4, not 6 + 2. */
TT_INLINE int64_t tt_tile_rows(int64_t rows_left) {
  int64_t tiles = (rows_left + 5) / 6;
  return (rows_left + tiles - 1) / tiles;
}

#endif
