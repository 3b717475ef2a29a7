/* SPDX-License-Identifier: Apache-2.0 */
/* doc_batch.c -- see doc_batch.h. */
#include "text/doc_batch.h"

#include "base/mem.h"
#include "base/stop.h"

void lm_doc_pool_init(lm_doc_pool *p, size_t size, void (*fini)(void *batch))
{
    *p = (lm_doc_pool){ .size = size, .fini = fini };
    pthread_mutex_init(&p->lock, NULL);
}

void lm_doc_pool_fini(lm_doc_pool *p)
{
    while (p->free) {
        lm_doc_batch *b = p->free;
        p->free = b->next;
        for (int i = 0; i < LM_BATCH_DOCS; i++)
            lm_doc_fini(&b->doc[i]);
        if (p->fini)
            p->fini(b);
        lm_free(b);
    }
    pthread_mutex_destroy(&p->lock);
}

static lm_code take_batch(lm_doc_pool *p, lm_doc_batch **out, lm_err *e)
{
    pthread_mutex_lock(&p->lock);
    *out = p->free;
    if (*out)
        p->free = (*out)->next;
    pthread_mutex_unlock(&p->lock);
    if (!*out)
        return lm_alloc_n(out, 1, p->size, "a batch of documents", e);
    (*out)->n = 0;
    return LM_OK;
}

lm_code lm_doc_pool_read(lm_doc_pool *p, lm_input *in, void *out, lm_err *e)
{
    lm_doc_batch *b;
    size_t bytes = 0;
    bool got = true;
    *(void **)out = NULL;
    lm_code rc = take_batch(p, &b, e);
    if (rc)
        return rc;
    while (b->n < LM_BATCH_DOCS && bytes < LM_BATCH_BYTES && !lm_stopping()) {
        rc = lm_input_next(in, &b->doc[b->n], &got, e);
        if (rc || !got)
            break;
        bytes += b->doc[b->n++].raw.len;
    }
    if (rc || b->n == 0)
        lm_doc_pool_give(p, b);
    else
        *(void **)out = b;
    return rc;
}

void lm_doc_pool_give(lm_doc_pool *p, void *batch)
{
    lm_doc_batch *b = batch;
    pthread_mutex_lock(&p->lock);
    b->next = p->free;
    p->free = b;
    pthread_mutex_unlock(&p->lock);
}
