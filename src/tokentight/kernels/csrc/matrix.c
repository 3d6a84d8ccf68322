/* Weights [N, K] lie in panels of 16 outputs, [N / 16][K][16], the last one padded with zeros. */
#define _GNU_SOURCE
#include "pool.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "tile.h"

#define PANEL 16
#define ROW_BLOCK 192  /* at most so many rows share one pass over a panel */
#define K_BLOCK 256    /* a panel's slice of this depth stays in the first-level cache */
#define AHEAD 1024     /* bytes of prefetch while weights come from memory */
#define MEMORY_ROWS 48 /* up to here reading the weights takes about as long as computing */
#define ITEMS_PER_THREAD 4
#define MAX_ITEM_PANELS 8

/* Ask for huge pages under memory not yet touched: weights and KV are read end to end or in far
 * jumps, and small pages cost a page walk every 4 KiB. A refusal changes nothing but speed. */
void tt_prefer_huge_pages(void *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  uintptr_t page = 4095, first = ((uintptr_t)start + page) & ~page;
  uintptr_t end = ((uintptr_t)start + (uintptr_t)bytes) & ~page;
  if (end > first) (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
  (void)start;
  (void)bytes;
#endif
}

typedef struct {
  const void *source;
  void *packed;
  int64_t n, k;
  int bf16;
} pack_args;

static void pack_panel(void *context, int64_t panel) {
  const pack_args *a = context;
  size_t k = (size_t)a->k, base = (size_t)panel * PANEL;
  for (size_t lane = 0; lane < PANEL; lane++) {
    size_t row = base + lane;
    int inside = (int64_t)row < a->n;
    if (a->bf16) {
      uint16_t *to = (uint16_t *)a->packed + base * k + lane;
      const uint16_t *from = (const uint16_t *)a->source + row * k;
      for (size_t i = 0; i < k; i++) to[i * PANEL] = inside ? from[i] : 0;
    } else {
      float *to = (float *)a->packed + base * k + lane;
      const float *from = (const float *)a->source + row * k;
      for (size_t i = 0; i < k; i++) to[i * PANEL] = inside ? from[i] : 0.0f;
    }
  }
}

void tt_pack(tt_pool *pool, const void *source, void *packed, int64_t n, int64_t k, int bf16) {
  pack_args a = {source, packed, n, k, bf16};
  tt_pool_run(pool, pack_panel, &a, (n + PANEL - 1) / PANEL);
}

typedef struct {
  const void *packed;
  const int32_t *tokens;
  float *out;
  int64_t k;
  int bf16;
} embed_args;

static void embed_row(void *context, int64_t t) {
  const embed_args *a = context;
  size_t token = (size_t)a->tokens[t], k = (size_t)a->k;
  size_t base = token / PANEL * PANEL * k + token % PANEL;
  float *out = a->out + (size_t)t * k;
  if (a->bf16) {
    const uint16_t *from = (const uint16_t *)a->packed + base;
    for (size_t i = 0; i < k; i++) {
      uint32_t bits = (uint32_t)from[i * PANEL] << 16;
      memcpy(out + i, &bits, 4);
    }
  } else {
    const float *from = (const float *)a->packed + base;
    for (size_t i = 0; i < k; i++) out[i] = from[i * PANEL];
  }
}

/* Returns the first token id outside [0, n), having written nothing, or -1. */
int64_t tt_embed(tt_pool *pool, const void *packed, const int32_t *tokens, float *out, int64_t count,
                 int64_t n, int64_t k, int bf16) {
  for (int64_t t = 0; t < count; t++)
    if (tokens[t] < 0 || tokens[t] >= n) return t;
  embed_args a = {packed, tokens, out, k, bf16};
  tt_pool_run(pool, embed_row, &a, count);
  return -1;
}

typedef struct {
  const float *x;
  const void *packed;
  const float *bias;
  float *y;
  int64_t m, n, k, rows_per_item, panels_per_item, panel_items;
  int bf16;
} linear_args;

/* One pass of a row tile over `panels` panels; constants so that each case is its own tight loop. */
#define CASE(R, P)                                                                                  \
  case R * 10 + P:                                                                                  \
    if (bf16)                                                                                       \
      fma_tile(R, 2 * P, 1, FETCH, ahead, x, ldx, w, PANEL, panel, acc, PANEL, acc_panel, depth);   \
    else                                                                                            \
      fma_tile(R, 2 * P, 0, FETCH, ahead, x, ldx, w, PANEL, panel, acc, PANEL, acc_panel, depth);   \
    break;
#define TILE_ARGUMENTS                                                                              \
  int64_t rows, int64_t panels, int bf16, const float *x, size_t ldx, const void *w, size_t panel,  \
      float *acc, size_t acc_panel, size_t depth

/* Weights that come from memory: the next lines of the same panels are asked for. */
#define FETCH 1
static void near_tile(TILE_ARGUMENTS) {
  const ptrdiff_t ahead = AHEAD;
  switch (rows * 10 + panels) {
    CASE(1, 4) CASE(1, 3) CASE(1, 2) CASE(1, 1) CASE(2, 2) CASE(2, 1) CASE(3, 2) CASE(3, 1)
    CASE(4, 1) CASE(5, 1) CASE(6, 1)
  }
}
#undef FETCH

/* A slice that another row tile has just brought in: the slice after it is asked for. */
#define FETCH 2
static void next_tile(TILE_ARGUMENTS) {
  const ptrdiff_t ahead = (ptrdiff_t)(depth * PANEL * (bf16 ? 2 : 4));
  switch (rows * 10 + panels) { CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) }
}
#undef FETCH

/* Many rows: computing takes so long that the processor's own prefetching keeps up. */
#define FETCH 0
static void far_tile(TILE_ARGUMENTS) {
  const ptrdiff_t ahead = 0;
  switch (rows * 10 + panels) { CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) }
}
#undef FETCH

/* `panels` adjacent panels, all of them at once when few rows leave registers free, else in turn. */
static void linear_panels(const linear_args *a, int64_t first_row, int64_t rows, int64_t first_panel,
                          int64_t panels) {
  size_t k = (size_t)a->k, ldy = (size_t)a->n, size = a->bf16 ? 2 : 4;
  const float *x = a->x + (size_t)first_row * k;
  const char *w = (const char *)a->packed + (size_t)first_panel * PANEL * k * size;
  float acc[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
  size_t acc_panel = (size_t)rows * PANEL;
  for (size_t i = 0; i < acc_panel * (size_t)panels; i++) acc[i] = 0.0f;
  for (size_t k0 = 0; k0 < k; k0 += K_BLOCK) {
    size_t depth = k - k0 < K_BLOCK ? k - k0 : K_BLOCK;
    const void *wk = w + k0 * PANEL * size;
    for (int64_t row = 0, count; row < rows; row += count) {
      count = tt_tile_rows(rows - row);
      const float *xt = x + (size_t)row * k + k0;
      float *at = acc + row * PANEL;
      if (row == 0) near_tile(count, panels, a->bf16, xt, k, wk, PANEL * k, at, acc_panel, depth);
      else if (rows <= MEMORY_ROWS) next_tile(count, 1, a->bf16, xt, k, wk, 0, at, 0, depth);
      else far_tile(count, 1, a->bf16, xt, k, wk, 0, at, 0, depth);
    }
  }
  for (int64_t p = 0; p < panels; p++) {
    size_t column = (size_t)(first_panel + p) * PANEL;
    size_t width = ldy - column < PANEL ? ldy - column : PANEL;
    size_t left = width < 8 ? width : 8;
    vf b0 = vzero(), b1 = vzero();
    if (a->bias) {
      b0 = vload_part(a->bias + column, left, 0.0f);
      if (width > 8) b1 = vload_part(a->bias + column + 8, width - 8, 0.0f);
    }
    for (int64_t row = 0; row < rows; row++) {
      const float *from = acc + (size_t)p * acc_panel + (size_t)row * PANEL;
      float *to = a->y + (size_t)(first_row + row) * ldy + column;
      vf v0 = vload(from), v1 = vload(from + 8);
      if (a->bias) {
        v0 = vadd(v0, b0);
        v1 = vadd(v1, b1);
      }
      vstore_part(to, v0, left);
      if (width > 8) vstore_part(to + 8, v1, width - 8);
    }
  }
}

static void linear_item(void *context, int64_t item) {
  const linear_args *a = context;
  int64_t panel = item % a->panel_items * a->panels_per_item;
  int64_t end = panel + a->panels_per_item, all = (a->n + PANEL - 1) / PANEL;
  int64_t first_row = item / a->panel_items * a->rows_per_item;
  int64_t rows = a->m - first_row < a->rows_per_item ? a->m - first_row : a->rows_per_item;
  int64_t together = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
  if (end > all) end = all;
  for (; panel < end; panel += together)
    linear_panels(a, first_row, rows, panel, end - panel < together ? end - panel : together);
}

/* y[M, N] = x[M, K] @ weight.T (+ bias): per output one chain of fused multiply-adds over k from 0,
 * then the bias. Blocking over k stores and reloads the running sum, which changes no bit. */
void tt_linear(tt_pool *pool, const float *x, const void *packed, const float *bias, float *y,
               int64_t m, int64_t n, int64_t k, int bf16) {
  int64_t panels = (n + PANEL - 1) / PANEL;
  int64_t per_item = panels / (ITEMS_PER_THREAD * tt_pool_threads(pool)) / 4 * 4;
  if (per_item < 4) per_item = m == 1 ? 4 : 2;
  if (per_item > MAX_ITEM_PANELS) per_item = MAX_ITEM_PANELS;
  int64_t panel_items = (panels + per_item - 1) / per_item;
  int64_t row_items = (m + ROW_BLOCK - 1) / ROW_BLOCK;
  if (row_items == 0) return;
  int64_t rows_per_item = (m + row_items - 1) / row_items;
  linear_args a = {x, packed, bias, y, m, n, k, rows_per_item, per_item, panel_items, bf16};
  tt_pool_run(pool, linear_item, &a, panel_items * row_items);
}
