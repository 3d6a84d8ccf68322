#include "rowwise.h"
#include "pool.h"

#define GRAIN 16384 /* elements below which a second thread costs more than it brings */
#define SUM_BLOCK 256

typedef struct {
  const float *x, *weight;
  float *residual, *out;
  int64_t *index;
  int64_t rows, n, rows_per_item;
  float eps;
  void (*row)(const void *args, int64_t row);
} row_args;

static void row_item(void *context, int64_t item) {
  const row_args *a = context;
  int64_t first = item * a->rows_per_item, last = first + a->rows_per_item;
  if (last > a->rows) last = a->rows;
  for (int64_t row = first; row < last; row++) a->row(a, row);
}

static void run_rows(tt_pool *pool, row_args *a) {
  a->rows_per_item = (GRAIN + a->n - 1) / a->n;
  tt_pool_run(pool, row_item, a, (a->rows + a->rows_per_item - 1) / a->rows_per_item);
}

static void norm_row(const void *context, int64_t row) {
  const row_args *a = context;
  size_t n = (size_t)a->n, at = (size_t)row * n;
  tt_norm_row(a->x + at, a->weight, a->out + at, n, a->eps);
}

static void add_norm_row(const void *context, int64_t row) {
  const row_args *a = context;
  size_t n = (size_t)a->n, at = (size_t)row * n;
  float *residual = a->residual + at;
  for (size_t i = 0; i < n; i += 8) {
    vf sum = vadd(vload_part(residual + i, n - i, 0.0f), vload_part(a->x + at + i, n - i, 0.0f));
    vstore_part(residual + i, sum, n - i);
  }
  tt_norm_row(residual, a->weight, a->out + at, n, a->eps);
}

void tt_rms_norm(tt_pool *pool, const float *x, const float *weight, float *out, int64_t rows,
                 int64_t n, float eps) {
  row_args a = {.x = x, .weight = weight, .out = out, .rows = rows, .n = n, .eps = eps, .row = norm_row};
  run_rows(pool, &a);
}

void tt_add_rms_norm(tt_pool *pool, const float *x, float *residual, const float *weight, float *out,
                     int64_t rows, int64_t n, float eps) {
  row_args a = {.x = x, .residual = residual, .weight = weight, .out = out,
                .rows = rows, .n = n, .eps = eps, .row = add_norm_row};
  run_rows(pool, &a);
}

static void silu_row(const void *context, int64_t row) {
  const row_args *a = context;
  size_t n = (size_t)a->n;
  const float *gate = a->x + (size_t)row * 2 * n, *up = gate + n;
  float *out = a->out + (size_t)row * n;
  const vf one = vset1(1.0f), zero = vzero();
  for (size_t i = 0; i < n; i += 8) {
    vf g = vload_part(gate + i, n - i, 0.0f), u = vload_part(up + i, n - i, 0.0f);
    vf silu = vdiv(g, vadd(one, vexp(vsub(zero, g))));
    vstore_part(out + i, vmul(silu, u), n - i);
  }
}

/* silu(gate) * up: gate_up [rows, 2 n] to out [rows, n]. */
void tt_silu_mul(tt_pool *pool, const float *gate_up, float *out, int64_t rows, int64_t n) {
  row_args a = {.x = gate_up, .out = out, .rows = rows, .n = n, .row = silu_row};
  run_rows(pool, &a);
}

static float row_max(const float *x, size_t n) {
  vf best = vset1(-INFINITY);
  for (size_t i = 0; i < n; i += 8) best = vmax(vload_part(x + i, n - i, -INFINITY), best);
  return vhmax(best);
}

static void argmax_row(const void *context, int64_t row) {
  const row_args *a = context;
  size_t n = (size_t)a->n;
  const float *x = a->x + (size_t)row * n;
  float best = row_max(x, n);
  size_t i = 0;
  while (i < n && !(x[i] == best)) i++;
  a->index[row] = i < n ? (int64_t)i : 0;
}

void tt_argmax(tt_pool *pool, const float *x, int64_t *index, int64_t rows, int64_t n) {
  row_args a = {.x = x, .index = index, .rows = rows, .n = n, .row = argmax_row};
  run_rows(pool, &a);
}

/* sum(exp(x - max)), blocks of 256 summed in float32 lanes, the blocks in float64. `out` may be NULL. */
static double exp_sum(const float *x, size_t n, float max, float *out) {
  double total = 0.0;
  for (size_t start = 0; start < n; start += SUM_BLOCK) {
    size_t end = start + SUM_BLOCK < n ? start + SUM_BLOCK : n;
    vf sum = vzero();
    for (size_t i = start; i < end; i += 8) {
      vf e = vexp(vsub(vload_part(x + i, end - i, -INFINITY), vset1(max)));
      if (out) vstore_part(out + i, e, end - i);
      sum = vadd(sum, e);
    }
    total += (double)vhsum(sum);
  }
  return total;
}

static void logsumexp_row(const void *context, int64_t row) {
  const row_args *a = context;
  const float *x = a->x + (size_t)row * (size_t)a->n;
  float max = row_max(x, (size_t)a->n);
  if (max == -INFINITY || max == INFINITY) {
    a->out[row] = max;
    return;
  }
  double sum = exp_sum(x, (size_t)a->n, max, NULL);
  a->out[row] = sum == sum ? (float)((double)max + log1(sum)) : (float)sum;
}

void tt_logsumexp(tt_pool *pool, const float *x, float *out, int64_t rows, int64_t n) {
  row_args a = {.x = x, .out = out, .rows = rows, .n = n, .row = logsumexp_row};
  run_rows(pool, &a);
}

static void softmax_row(const void *context, int64_t row) {
  const row_args *a = context;
  size_t n = (size_t)a->n;
  const float *x = a->x + (size_t)row * n;
  float *out = a->out + (size_t)row * n;
  vf sum = vset1((float)exp_sum(x, n, row_max(x, n), out));
  for (size_t i = 0; i < n; i += 8)
    vstore_part(out + i, vdiv(vload_part(out + i, n - i, 0.0f), sum), n - i);
}

void tt_softmax(tt_pool *pool, const float *x, float *out, int64_t rows, int64_t n) {
  row_args a = {.x = x, .out = out, .rows = rows, .n = n, .row = softmax_row};
  run_rows(pool, &a);
}

static void exp_item(void *context, int64_t row) {
  const row_args *a = context;
  size_t at = (size_t)row * SUM_BLOCK, n = (size_t)a->n;
  for (size_t i = at; i < n && i < at + SUM_BLOCK; i += 8)
    vstore_part(a->out + i, vexp(vload_part(a->x + i, n - i, 0.0f)), n - i);
}

/* e^x elementwise, for tests of its accuracy. */
void tt_exp(tt_pool *pool, const float *x, float *out, int64_t n) {
  row_args a = {.x = x, .out = out, .n = n};
  tt_pool_run(pool, exp_item, &a, (n + SUM_BLOCK - 1) / SUM_BLOCK);
}
