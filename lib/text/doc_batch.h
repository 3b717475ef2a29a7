/* SPDX-License-Identifier: Apache-2.0 */
/* doc_batch.h -- documents by the batch, for pipelines over lm_input: read here, worked on by any thread, used again.
 *
 * A tool's batch begins with an lm_doc_batch and adds what its work makes of the documents; the pool hands such
 * batches out and takes them back, so that a long input costs no more allocations than batches are in flight.
 * Private to lib/text. */
#ifndef LM_TEXT_DOC_BATCH_H
#define LM_TEXT_DOC_BATCH_H

#include <pthread.h>

#include "format/input.h"

enum { LM_BATCH_DOCS = 64, LM_BATCH_BYTES = 1 << 20 };

typedef struct lm_doc_batch {
    lm_doc doc[LM_BATCH_DOCS];
    int n;
    struct lm_doc_batch *next; /* the pool's */
} lm_doc_batch;

typedef struct {
    size_t size;               /* of a batch with what follows the lm_doc_batch */
    void (*fini)(void *batch); /* releases what follows; may be NULL */
    pthread_mutex_t lock;      /* of `free` */
    lm_doc_batch *free;
} lm_doc_pool;

void lm_doc_pool_init(lm_doc_pool *p, size_t size, void (*fini)(void *batch));
void lm_doc_pool_fini(lm_doc_pool *p); /* all batches must be back */

/* The next documents of `in`: up to LM_BATCH_DOCS, and to LM_BATCH_BYTES and a document more.  *out is NULL at the end of
 * the input, and when lm_stopping(). */
lm_code lm_doc_pool_read(lm_doc_pool *p, lm_input *in, void *out, lm_err *e);
void lm_doc_pool_give(lm_doc_pool *p, void *batch); /* back to the pool; any thread */

#endif
