/* SPDX-License-Identifier: Apache-2.0 */
/* rotary.c -- a rotary table, made once. */
#include "model/rotary.h"

#include <string.h>

#include "base/mem.h"

lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *r, lm_err *e)
{
    *r = (lm_rotary){ .b = b };
    if (m->rope == LM_NONE)
        return LM_OK;
    float *host = NULL;
    size_t n = (size_t)(m->rope_rows * m->config.head_dim), bytes = n * sizeof *r->data;
    if (b->alloc(b, bytes, "a rotary table", (void **)&r->data, e))
        return e->code;
    r->bytes = bytes;
    if (b->host_memory) {
        lm_rope_table(&m->config, m->rope_rows, r->data);
        return LM_OK;
    }
    lm_code rc = lm_alloc_n(&host, n, sizeof *host, "a rotary table", e);
    if (!rc) {
        lm_rope_table(&m->config, m->rope_rows, host);
        rc = b->copy(b, r->data, host, bytes, b->main, e);
    }
    if (!rc)
        rc = b->sync(b, b->main, e);
    lm_free(host);
    if (rc)
        lm_rotary_fini(r);
    return rc;
}

void lm_rotary_bind(const lm_rotary *r, const lm_model *m, lm_exec *x)
{
    if (m->rope != LM_NONE)
        lm_exec_bind(x, m->rope, r->data);
}

void lm_rotary_fini(lm_rotary *r)
{
    if (r->data)
        r->b->free(r->b, r->data, r->bytes);
    memset(r, 0, sizeof *r);
}
