/* SPDX-License-Identifier: Apache-2.0 */
/* rotary.c -- rotary tables, computed once. */
#include "model/rotary.h"

#include <string.h>

#include "base/mem.h"

size_t lm_rotary_bytes(const lm_model *m)
{
    int64_t n = 0;
    for (int i = 0; i < m->config.ropes; i++)
        n += m->rope_rows * m->config.rope[i].dim;
    return lm_plain_bytes(LM_DTYPE_F32, n);
}

static void fill(const lm_model *m, float *to)
{
    for (int i = 0; i < m->config.ropes; i++) {
        lm_rope_table(&m->config, i, m->rope_rows, to);
        to += m->rope_rows * m->config.rope[i].dim;
    }
}

lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *r, lm_err *e)
{
    *r = (lm_rotary){ .b = b };
    float *host = NULL;
    size_t bytes = lm_rotary_bytes(m);
    if (!bytes)
        return LM_OK;
    if (b->alloc(b, bytes, "a rotary table", (void **)&r->data, e))
        return e->code;
    r->bytes = bytes;
    if (b->host_memory) {
        fill(m, r->data);
        return LM_OK;
    }
    lm_code rc = lm_alloc_n(&host, bytes / sizeof *host, sizeof *host, "a rotary table", e);
    if (!rc) {
        fill(m, host);
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
    float *at = r->data;
    for (int i = 0; i < m->config.ropes; i++) {
        lm_exec_bind(x, m->rope[i], at);
        at += m->rope_rows * m->config.rope[i].dim;
    }
}

void lm_rotary_fini(lm_rotary *r)
{
    if (r->data)
        r->b->free(r->b, r->data, r->bytes);
    memset(r, 0, sizeof *r);
}
