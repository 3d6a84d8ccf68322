/* A small thread pool. The calling thread takes part; items are claimed one by one, so which thread
 * computes an item is left open, and no result may depend on it. */
#ifndef TT_POOL_H
#define TT_POOL_H

#include <stdint.h>

typedef struct tt_pool tt_pool;
typedef void (*tt_job)(void *context, int64_t item);

void tt_pool_run(tt_pool *pool, tt_job job, void *context, int64_t num_items);
int tt_pool_threads(const tt_pool *pool);

#endif
