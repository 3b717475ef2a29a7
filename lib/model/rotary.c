/* SPDX-License-Identifier: Apache-2.0 */
/* rotary.c -- tables of positions and constants, computed once. */
#include "model/rotary.h"

#include <string.h>

#include "base/mem.h"

static int64_t alibi_count(const lm_model *m)
{
    return m->alibi == LM_NONE ? 0 : lm_tensor_count(&m->graph->value[m->alibi].t);
}

static size_t table_bytes(const lm_model *m)
{
    int64_t n = alibi_count(m);
    for (int i = 0; i < m->config.ropes; i++)
        n += m->rope_rows * m->config.rope[i].dim;
    return lm_plain_bytes(LM_DTYPE_F32, n);
}

static lm_dtype type_of(const lm_model *m, const lm_model_const *c)
{
    return m->graph->value[c->value].t.dtype;
}

/* Each constant begins at a multiple of 64 bytes. */
static size_t const_bytes(const lm_model *m, const lm_model_const *c)
{
    return (lm_plain_bytes(type_of(m, c), c->count) + 63) / 64 * 64;
}

static size_t table_room(const lm_model *m)
{
    return m->n_constants ? (table_bytes(m) + 63) / 64 * 64 : table_bytes(m);
}

size_t lm_rotary_constants(const lm_model *m)
{
    size_t bytes = 0;
    for (int i = 0; i < m->n_constants; i++)
        bytes += const_bytes(m, &m->constant[i]);
    return bytes;
}

size_t lm_rotary_numbers(const lm_model *m)
{
    size_t bytes = 0;
    for (int i = 0; i < m->n_constants; i++)
        bytes += (size_t)m->constant[i].count *
                 (m->constant[i].id ? sizeof *m->constant[i].id : sizeof *m->constant[i].number);
    return bytes;
}

size_t lm_rotary_bytes(const lm_model *m)
{
    return table_room(m) + lm_rotary_constants(m);
}

static void fill(const lm_model *m, uint8_t *to)
{
    float *table = (void *)to;
    for (int i = 0; i < m->config.ropes; i++) {
        lm_rope_table(&m->config, i, m->rope_rows, table);
        table += m->rope_rows * m->config.rope[i].dim;
    }
    if (m->alibi != LM_NONE) {
        const lm_tensor *t = &m->graph->value[m->alibi].t;
        lm_alibi_table(t->dim[0], t->dim[1], table);
    }
    to += table_room(m);
    for (int i = 0; i < m->n_constants; i++) {
        const lm_model_const *c = &m->constant[i];
        if (c->id)
            memcpy(to, c->id, (size_t)c->count * sizeof *c->id);
        else
            lm_convert(LM_DTYPE_F64, c->number, type_of(m, c), to, c->count);
        to += const_bytes(m, c);
    }
}

lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *r, lm_err *e)
{
    *r = (lm_rotary){ .b = b };
    uint8_t *host = NULL;
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
    lm_code rc = lm_alloc_n(&host, bytes, 1, "a rotary table", e);
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
    float *table = (void *)r->data;
    uint8_t *at = r->data;
    for (int i = 0; i < m->config.ropes; i++) {
        lm_exec_bind(x, m->rope[i], table);
        table += m->rope_rows * m->config.rope[i].dim;
    }
    if (m->alibi != LM_NONE)
        lm_exec_bind(x, m->alibi, table);
    at += m->n_constants ? table_room(m) : 0;
    for (int i = 0; i < m->n_constants; i++) {
        lm_exec_bind(x, m->constant[i].value, at);
        at += const_bytes(m, &m->constant[i]);
    }
}

void lm_rotary_fini(lm_rotary *r)
{
    if (r->data)
        r->b->free(r->b, r->data, r->bytes);
    memset(r, 0, sizeof *r);
}
