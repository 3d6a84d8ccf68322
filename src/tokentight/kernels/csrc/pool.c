#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* How often a thread looks again before it sleeps: tens of microseconds, long enough to bridge two
 * kernel calls of one step, short enough that idle pools leave the CPUs to others. */
#define TT_SPINS 1500
#define TT_STACK_BYTES (2u << 20)
#define TT_OPEN ((uint64_t)1 << 16)
#define TT_ACTIVE (TT_OPEN - 1)
#define TT_EPOCH ((uint64_t)1 << 17)

struct tt_pool {
  int num_workers;
  pthread_t *threads;
  /* Job number, whether it may still be joined, and how many workers are in it. A worker that
   * wakes up late finds the job closed and is not waited for. */
  _Atomic uint64_t state;
  _Atomic int64_t next;
  _Atomic int sleeping, caller_sleeps, stop;
  int64_t num_items;
  tt_job job;
  void *context;
  pthread_mutex_t lock, callers;
  pthread_cond_t wake, done;
};

static void relax(void) {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Rounding and subnormals as IEEE says, whatever mode the calling thread is in. */
static unsigned default_rounding(void) {
#if defined(__SSE2__)
  unsigned old = _mm_getcsr();
  _mm_setcsr(0x1F80);
  return old;
#else
  return 0;
#endif
}

static void restore_rounding(unsigned old) {
#if defined(__SSE2__)
  _mm_setcsr(old);
#else
  (void)old;
#endif
}

static void work(tt_pool *pool) {
  for (;;) {
    int64_t item = atomic_fetch_add(&pool->next, 1);
    if (item >= pool->num_items) return;
    pool->job(pool->context, item);
  }
}

static int has_news(tt_pool *pool, uint64_t seen) {
  uint64_t state = atomic_load(&pool->state);
  return ((state & TT_OPEN) && state / TT_EPOCH != seen) || atomic_load(&pool->stop);
}

static void *worker_main(void *argument) {
  tt_pool *pool = argument;
  uint64_t seen = 0;
  default_rounding();
  for (;;) {
    for (int i = 0; i < TT_SPINS && !has_news(pool, seen); i++) relax();
    if (!has_news(pool, seen)) {
      pthread_mutex_lock(&pool->lock);
      atomic_fetch_add(&pool->sleeping, 1);
      while (!has_news(pool, seen)) pthread_cond_wait(&pool->wake, &pool->lock);
      atomic_fetch_sub(&pool->sleeping, 1);
      pthread_mutex_unlock(&pool->lock);
    }
    if (atomic_load(&pool->stop)) return NULL;
    uint64_t state = atomic_load(&pool->state);
    if (!(state & TT_OPEN) || state / TT_EPOCH == seen) continue;
    if (!atomic_compare_exchange_strong(&pool->state, &state, state + 1)) continue;
    seen = state / TT_EPOCH;
    work(pool);
    state = atomic_fetch_sub(&pool->state, 1) - 1;
    if (!(state & (TT_OPEN | TT_ACTIVE)) && atomic_load(&pool->caller_sleeps)) {
      pthread_mutex_lock(&pool->lock);
      pthread_cond_signal(&pool->done);
      pthread_mutex_unlock(&pool->lock);
    }
  }
}

void tt_pool_destroy(tt_pool *pool);

/* `cpus[i]` pins worker thread i + 1 (thread 0 is the caller's); NULL pins nothing. NULL on failure. */
tt_pool *tt_pool_create(int num_threads, const int *cpus) {
  tt_pool *pool = calloc(1, sizeof *pool);
  if (!pool) return NULL;
  pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
  if (!pool->threads) {
    free(pool);
    return NULL;
  }
  pthread_mutex_init(&pool->lock, NULL);
  pthread_mutex_init(&pool->callers, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->done, NULL);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, TT_STACK_BYTES);
  int failed = 0;
  for (int i = 0; i + 1 < num_threads && !failed; i++) {
    failed = pthread_create(&pool->threads[i], &attributes, worker_main, pool);
    if (failed) break;
    pool->num_workers++;
#if defined(__linux__)
    if (cpus) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[i], &set);
      failed = pthread_setaffinity_np(pool->threads[i], sizeof set, &set);
    }
#else
    (void)cpus;
#endif
  }
  pthread_attr_destroy(&attributes);
  if (failed) {
    tt_pool_destroy(pool);
    return NULL;
  }
  return pool;
}

void tt_pool_destroy(tt_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  atomic_store(&pool->stop, 1);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->lock);
  for (int i = 0; i < pool->num_workers; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->wake);
  pthread_cond_destroy(&pool->done);
  pthread_mutex_destroy(&pool->lock);
  pthread_mutex_destroy(&pool->callers);
  free(pool->threads);
  free(pool);
}

int tt_pool_threads(const tt_pool *pool) { return pool->num_workers + 1; }

void tt_pool_run(tt_pool *pool, tt_job job, void *context, int64_t num_items) {
  unsigned rounding = default_rounding();
  if (pool->num_workers == 0 || num_items <= 1) {
    for (int64_t item = 0; item < num_items; item++) job(context, item);
    restore_rounding(rounding);
    return;
  }
  pthread_mutex_lock(&pool->callers);
  pool->job = job;
  pool->context = context;
  pool->num_items = num_items;
  atomic_store(&pool->next, 0);
  uint64_t epoch = atomic_load(&pool->state) / TT_EPOCH + 1;
  atomic_store(&pool->state, epoch * TT_EPOCH + TT_OPEN);
  if (atomic_load(&pool->sleeping)) {
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
  }
  work(pool);
  atomic_fetch_and(&pool->state, ~TT_OPEN);
  for (int i = 0; i < TT_SPINS && (atomic_load(&pool->state) & TT_ACTIVE); i++) relax();
  if (atomic_load(&pool->state) & TT_ACTIVE) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, 1);
    while (atomic_load(&pool->state) & TT_ACTIVE) pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->caller_sleeps, 0);
    pthread_mutex_unlock(&pool->lock);
  }
  pthread_mutex_unlock(&pool->callers);
  restore_rounding(rounding);
}
