/* Paged attention. Per block and kv head, keys lie as panels of 16 positions, [position / 16][dim][16],
 * and values as [position][dim]. Scores are chains over dims with positions in the lanes, outputs are
 * chains over positions with dims in the lanes, and the softmax runs online over tiles of 16
 * absolute positions: a token's bits depend on its query, its position and the KV before it alone. */
#include <stdlib.h>

#include "pool.h"
#include "rowwise.h"
#include "tile.h"

#define TILE 16
#define AHEAD_TILES 2
#define ITEM_ROWS 48 /* (token, query head) rows that share one walk over the KV */

typedef struct {
  const float *qkv, *cos, *sin, *q_norm, *k_norm;
  const int32_t *positions;
  const int64_t *slots;
  float *q, *keys, *values;
  int64_t heads, kv_heads, dim, block_size, tokens, tokens_per_item;
  float eps;
} rope_args;

static void rotate(const float *in, const float *norm, const float *cos, const float *sin, float *out,
                   size_t dim, float eps) {
  size_t half = dim / 2;
  if (norm) {
    tt_norm_row(in, norm, out, dim, eps);
    in = out;
  }
  for (size_t i = 0; i < half; i += 8) {
    size_t n = half - i;
    vf a = vload_part(in + i, n, 0.0f), b = vload_part(in + half + i, n, 0.0f);
    vf c = vload_part(cos + i, n, 0.0f), s = vload_part(sin + i, n, 0.0f);
    vf lo = vsub(vmul(a, c), vmul(b, s)), hi = vadd(vmul(b, c), vmul(a, s));
    vstore_part(out + i, lo, n);
    vstore_part(out + half + i, hi, n);
  }
}

static void rope_item(void *context, int64_t item) {
  const rope_args *a = context;
  size_t dim = (size_t)a->dim, heads = (size_t)a->heads, kv_heads = (size_t)a->kv_heads;
  size_t bs = (size_t)a->block_size;
  int64_t last = (item + 1) * a->tokens_per_item;
  if (last > a->tokens) last = a->tokens;
  for (int64_t t = item * a->tokens_per_item; t < last; t++) {
    const float *row = a->qkv + (size_t)t * (heads + 2 * kv_heads) * dim;
    const float *cos = a->cos + (size_t)a->positions[t] * (dim / 2);
    const float *sin = a->sin + (size_t)a->positions[t] * (dim / 2);
    for (size_t h = 0; h < heads; h++)
      rotate(row + h * dim, a->q_norm, cos, sin, a->q + ((size_t)t * heads + h) * dim, dim, a->eps);
    size_t block = (size_t)a->slots[t] / bs, offset = (size_t)a->slots[t] % bs;
    for (size_t h = 0; h < kv_heads; h++) {
      float key[512];
      rotate(row + (heads + h) * dim, a->k_norm, cos, sin, key, dim, a->eps);
      size_t base = (block * kv_heads + h) * bs * dim;
      float *k = a->keys + base + offset / TILE * TILE * dim + offset % TILE;
      for (size_t d = 0; d < dim; d++) k[d * TILE] = key[d];
      memcpy(a->values + base + offset * dim, row + (heads + kv_heads + h) * dim, dim * sizeof(float));
    }
  }
}

/* Splits q, k, v; optional per-head norm; RoPE; k and v to their slots. Returns the index of the first
 * token whose position or slot lies outside, having written nothing, or -1. */
int64_t tt_rope_and_cache(tt_pool *pool, const float *qkv, const int32_t *positions,
                          const int64_t *slots, const float *cos, const float *sin,
                          const float *q_norm, const float *k_norm, float *q, float *keys,
                          float *values, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                          int64_t block_size, int64_t num_blocks, int64_t max_positions, float eps) {
  for (int64_t t = 0; t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= max_positions || slots[t] < 0 ||
        slots[t] >= num_blocks * block_size)
      return t;
  rope_args a = {.qkv = qkv, .cos = cos, .sin = sin, .q_norm = q_norm, .k_norm = k_norm,
                 .positions = positions, .slots = slots, .q = q, .keys = keys, .values = values,
                 .heads = heads, .kv_heads = kv_heads, .dim = dim, .block_size = block_size,
                 .tokens = tokens, .tokens_per_item = 8, .eps = eps};
  tt_pool_run(pool, rope_item, &a, (tokens + 7) / 8);
  return -1;
}

typedef struct {
  const float *q, *keys, *values;
  const int32_t *positions, *query_starts, *block_tables;
  const int64_t *item_starts; /* [rows + 1]: items of row r are item_starts[r] .. item_starts[r + 1] - 1 */
  float *out;
  int64_t rows, table_width, heads, kv_heads, dim, block_size, window;
  float scale;
} attention_args;

#define SCORES(R)                                                                      \
  case R:                                                                              \
    fma_tile(R, 2, 0, 2, ahead, q, dim, keys, TILE, 0, scores, TILE, 0, dim);                 \
    break;

static void score_tile(int64_t rows, const float *q, size_t dim, const float *keys, ptrdiff_t ahead,
                       float *scores) {
  for (int64_t i = 0; i < rows * TILE; i++) scores[i] = 0.0f;
  switch (rows) { SCORES(1) SCORES(2) SCORES(3) SCORES(4) SCORES(5) SCORES(6) }
}

#define OUTPUTS(R)                                                                             \
  case R:                                                                                      \
    for (; d + 16 <= dim; d += 16)                                                             \
      fma_tile(R, 2, 0, 2, ahead, p, TILE, values + d, dim, 0, acc + d, dim, 0, count);               \
    for (; d < dim; d += 8)                                                                    \
      fma_tile(R, 1, 0, 0, 0, p, TILE, values + d, dim, 0, acc + d, dim, 0, count);               \
    break;

static void output_tile(int64_t rows, const float *p, const float *values, ptrdiff_t ahead, float *acc,
                        size_t dim, size_t count) {
  size_t d = 0;
  switch (rows) { OUTPUTS(1) OUTPUTS(2) OUTPUTS(3) OUTPUTS(4) OUTPUTS(5) OUTPUTS(6) }
}

/* One row's step of the online softmax over lanes [start, end) of a tile: scores become weights. */
static void softmax_step(float *scores, int start, int end, float scale, float *max, float *sum,
                         float *acc, size_t dim) {
  vf s0 = vmul(vload(scores), vset1(scale)), s1 = vmul(vload(scores + 8), vset1(scale));
  if (start > 0 || end < TILE) {
    vstore(scores, s0);
    vstore(scores + 8, s1);
    for (int j = 0; j < TILE; j++)
      if (j < start || j >= end) scores[j] = -INFINITY;
    s0 = vload(scores);
    s1 = vload(scores + 8);
  }
  float top = vhmax(vmax(s0, s1));
  if (top > *max) {
    float fade = exp1(*max - top);
    *max = top;
    *sum *= fade;
    for (size_t d = 0; d < dim; d += 8) vstore(acc + d, vmul(vload(acc + d), vset1(fade)));
  }
  vf p0 = vexp(vsub(s0, vset1(*max))), p1 = vexp(vsub(s1, vset1(*max)));
  *sum += vhsum(vadd(p0, p1));
  vstore(scores, p0);
  vstore(scores + 8, p1);
}

/* Where the tile at absolute position `base` starts, in keys and in values alike. */
static size_t tile_offset(const attention_args *a, const int32_t *table, int64_t base, int64_t head) {
  size_t block = (size_t)table[base / a->block_size], offset = (size_t)(base % a->block_size);
  size_t dim = (size_t)a->dim, bs = (size_t)a->block_size;
  return (block * (size_t)a->kv_heads + (size_t)head) * bs * dim + offset * dim;
}

static void attention_item(void *context, int64_t item) {
  const attention_args *a = context;
  int64_t row = 0, high = a->rows;
  while (high - row > 1) { /* the last row whose first item is not past this one */
    int64_t middle = (row + high) / 2;
    if (a->item_starts[middle] <= item) row = middle;
    else high = middle;
  }
  int64_t group = a->heads / a->kv_heads, in_row = item - a->item_starts[row];
  int64_t head = in_row % a->kv_heads, first = in_row / a->kv_heads * ITEM_ROWS;
  int64_t token0 = a->query_starts[row], tokens = a->query_starts[row + 1] - token0;
  int64_t count = tokens * group - first < ITEM_ROWS ? tokens * group - first : ITEM_ROWS;
  size_t dim = (size_t)a->dim;

  float q[ITEM_ROWS * dim], acc[ITEM_ROWS * dim], scores[6 * TILE];
  float max[ITEM_ROWS], sum[ITEM_ROWS];
  int64_t low[ITEM_ROWS], last[ITEM_ROWS];
  for (int64_t i = 0; i < count; i++) {
    int64_t t = token0 + (first + i) / group, h = head * group + (first + i) % group;
    memcpy(q + (size_t)i * dim, a->q + (size_t)(t * a->heads + h) * dim, dim * sizeof(float));
    memset(acc + (size_t)i * dim, 0, dim * sizeof(float));
    max[i] = -INFINITY;
    sum[i] = 0.0f;
    last[i] = a->positions[t];
    low[i] = a->window > 0 && last[i] >= a->window ? last[i] - a->window + 1 : 0;
  }

  const int32_t *table = a->block_tables + (size_t)row * (size_t)a->table_width;
  for (int64_t base = low[0] / TILE * TILE; base <= last[count - 1]; base += TILE) {
    size_t at = tile_offset(a, table, base, head);
    const float *keys = a->keys + at, *values = a->values + at;
    int64_t next = base + AHEAD_TILES * TILE; /* asked for while this tile is computed */
    if (next > last[count - 1]) next = base;
    size_t next_at = tile_offset(a, table, next, head);
    ptrdiff_t ahead = ((ptrdiff_t)next_at - (ptrdiff_t)at) * (ptrdiff_t)sizeof(float);
    for (int64_t i = 0, n; i < count; i += n) {
      n = tt_tile_rows(count - i);
      if (last[i + n - 1] < base || low[i] >= base + TILE) continue;
      score_tile(n, q + (size_t)i * dim, dim, keys, i ? 0 : ahead, scores);
      int whole = 1;
      int starts[6], ends[6];
      for (int64_t r = 0; r < n; r++) {
        int64_t start = low[i + r] - base, end = last[i + r] + 1 - base;
        starts[r] = start < 0 ? 0 : start > TILE ? TILE : (int)start;
        ends[r] = end < 0 ? 0 : end > TILE ? TILE : (int)end;
        whole &= starts[r] == 0 && ends[r] == TILE;
        if (starts[r] < ends[r])
          softmax_step(scores + r * TILE, starts[r], ends[r], a->scale, max + i + r, sum + i + r,
                       acc + (size_t)(i + r) * dim, dim);
      }
      if (whole) {
        output_tile(n, scores, values, i ? 0 : ahead, acc + (size_t)i * dim, dim, TILE);
        continue;
      }
      for (int64_t r = 0; r < n; r++) /* only valid positions enter a chain: 0 * NaN is not 0 */
        if (starts[r] < ends[r])
          output_tile(1, scores + r * TILE + starts[r], values + (size_t)starts[r] * dim, 0,
                      acc + (size_t)(i + r) * dim, dim, (size_t)(ends[r] - starts[r]));
    }
  }
  for (int64_t i = 0; i < count; i++) {
    int64_t t = token0 + (first + i) / group, h = head * group + (first + i) % group;
    float *out = a->out + (size_t)(t * a->heads + h) * dim;
    for (size_t d = 0; d < dim; d += 8)
      vstore(out + d, vdiv(vload(acc + (size_t)i * dim + d), vset1(sum[i])));
  }
}

/* Returns -1, or the first row whose tokens, positions or blocks are inconsistent (nothing written),
 * or -2 when memory ran out. `window` 0 means all earlier positions. */
int64_t tt_attention(tt_pool *pool, const float *q, const int32_t *positions,
                     const int32_t *query_starts, const int32_t *context_lens,
                     const int32_t *block_tables, const float *keys, const float *values, float *out,
                     int64_t tokens, int64_t rows, int64_t table_width, int64_t heads,
                     int64_t kv_heads, int64_t dim, int64_t block_size, int64_t num_blocks,
                     int64_t window, float scale) {
  int64_t *item_starts = malloc((size_t)(rows + 1) * sizeof(int64_t));
  if (!item_starts) return -2;
  int64_t group = heads / kv_heads, bad = -1;
  item_starts[0] = 0;
  for (int64_t r = 0; r < rows && bad < 0; r++) {
    int64_t first = query_starts[r], end = query_starts[r + 1], length = context_lens[r];
    if (first < 0 || end < first || end > tokens || length < end - first) {
      bad = r;
      break;
    }
    for (int64_t t = first; t < end; t++)
      if (positions[t] != length - (end - t)) bad = r;
    int64_t low = window > 0 && length - (end - first) >= window ? length - (end - first) - window + 1 : 0;
    if ((length + block_size - 1) / block_size > table_width) bad = r;
    else if (end > first)
      for (int64_t b = low / block_size; b * block_size < length; b++) {
        int32_t block = block_tables[r * table_width + b];
        if (block < 0 || block >= num_blocks) bad = r;
      }
    item_starts[r + 1] =
        item_starts[r] + ((end - first) * group + ITEM_ROWS - 1) / ITEM_ROWS * kv_heads;
  }
  if (bad < 0) {
    attention_args a = {.q = q, .keys = keys, .values = values, .positions = positions,
                        .query_starts = query_starts, .block_tables = block_tables,
                        .item_starts = item_starts, .out = out, .rows = rows,
                        .table_width = table_width, .heads = heads, .kv_heads = kv_heads, .dim = dim,
                        .block_size = block_size, .window = window, .scale = scale};
    tt_pool_run(pool, attention_item, &a, item_starts[rows]);
  }
  free(item_starts);
  return bad;
}
