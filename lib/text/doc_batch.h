/* SPDX-License-Identifier: Apache-2.0 */
/* doc_batch.h -- batches of documents for pipelines over lm_input: filled here, processed by any
 * thread, reused.
 *
 * A tool's batch begins with an lm_doc_batch and adds its results for the documents.  The pool
 * reuses returned batches, so that the number of allocations is that of batches in flight, however
 * long the input is.  Private to lib/text. */
#ifndef LM_TEXT_DOC_BATCH_H
#define LM_TEXT_DOC_BATCH_H

#include <pthread.h>

#include "format/input.h"

enum { LM_BATCH_DOCS = 64, LM_BATCH_BYTES = 1 << 20 };

typedef struct lm_doc_batch {
    lm_doc doc[LM_BATCH_DOCS];
    int n;
    struct lm_doc_batch *next; /* for the pool */
} lm_doc_batch;

typedef struct {
    size_t size;               /* bytes of a batch with the tool's part behind the lm_doc_batch */
    void (*fini)(void *batch); /* releases the tool's part; may be NULL */
    pthread_mutex_t lock;      /* `free` argument */
    lm_doc_batch *free;
} lm_doc_pool;

void lm_doc_pool_init(lm_doc_pool *p, size_t size, void (*fini)(void *batch));
void lm_doc_pool_fini(lm_doc_pool *p); /* all batches must have been returned */

/* The next documents of `in`: up to LM_BATCH_DOCS; a batch ends with the document that reaches
 * LM_BATCH_BYTES.  *out is NULL at the end of the input, and when lm_stopping(). */
lm_code lm_doc_pool_read(lm_doc_pool *p, lm_input *in, void *out, lm_err *e);
void lm_doc_pool_give(lm_doc_pool *p, void *batch); /* return it to the pool; any thread */

#endif
