/* SPDX-License-Identifier: Apache-2.0 */
/* page_code.c -- codes of pages, a cache at a time. */
#include "model/page_code.h"

#include <string.h>

#include "base/mem.h"
#include "kernels/kv_code.h"
#include "numeric/code_rows.h"

/* A page of one cache: [heads, page, dim] numbers, or codes that stay as they are. */
typedef struct {
    const lm_kv_side *side; /* NULL: they stay */
    lm_dtype type;
    int64_t heads, dim;
    size_t plain, head, bytes; /* of the page; of a head and of all in codes */
} piece_form;

struct lm_page_code {
    const lm_kv_code_kernels *k;
    piece_form *form;
    int n;
    int64_t page;
    size_t bytes;
    float *work; /* [page, dim] */
};

static lm_code check_side(const lm_kv_plan *p, const lm_kv_side *s, lm_err *e)
{
    if (!s->residual && !s->sinks && s->outliers < 0 && !s->format->outliers && !s->pre_rope &&
        lm_kv_step(s->format, p->page) == 1)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, p->text, "choose int8, int4, fp8 or a block kind such as q8_0",
                   "pages that move are coded by methods that code each token by itself");
}

static lm_code form_of(const lm_page_code *c, const lm_model *m, const lm_cache_state *cache,
                       const lm_kv_plan *plan, piece_form *f, lm_err *e)
{
    const lm_tensor *t = &m->graph->value[cache->value].t;
    const lm_kv_side *s = &plan->side[2 * cache->layer + (cache->kind == LM_CACHE_VALUES)];
    *f = (piece_form){ .type = t->dtype, .heads = t->dim[1], .dim = t->dim[3] };
    f->plain = f->bytes = lm_stored_bytes(t) / (size_t)t->dim[0];
    if (t->kv || !s->format)
        return LM_OK;
    if (m->config.layer[cache->layer].weigh != LM_WEIGH_SOFTMAX)
        return lm_fail(e, LM_EUSAGE, plan->text, "leave it out",
                       "layer %lld has Gaussian attention, whose keys have no coded form",
                       (long long)cache->layer);
    if (check_side(plan, s, e))
        return e->code;
    f->side = s;
    f->head = lm_kv_page_bytes(s->format, c->page, f->dim);
    if (f->head == SIZE_MAX)
        return lm_fail(e, LM_EUSAGE, plan->text, NULL, "cannot code heads of %lld numbers",
                       (long long)f->dim);
    f->bytes = (f->head * (size_t)f->heads + 63) / 64 * 64;
    return LM_OK;
}

static lm_code open_forms(lm_page_code *c, const lm_model *m, const lm_kv_plan *plan, lm_err *e)
{
    bool any = false;
    int64_t most = 0;
    if (plan->policy)
        return lm_fail(e, LM_EUSAGE, plan->text, NULL, "a policy drops tokens, it does not code");
    if (lm_alloc_n(&c->form, (size_t)m->n_caches, sizeof *c->form, "forms of pages", e))
        return e->code;
    for (int i = 0; i < m->n_caches; i++) {
        piece_form *f = &c->form[c->n];
        if (!m->cache[i].paged)
            continue;
        if (form_of(c, m, &m->cache[i], plan, f, e))
            return e->code;
        any |= f->side != NULL;
        most = f->dim > most ? f->dim : most;
        c->bytes += (f->bytes + 63) / 64 * 64;
        c->n++;
    }
    if (!any)
        return lm_fail(e, LM_EUSAGE, plan->text, "leave it out",
                       "codes nothing that is not stored so already");
    return lm_alloc_n(&c->work, (size_t)(c->page * most), sizeof *c->work, "a page", e);
}

lm_code lm_page_code_new(const lm_model *m, int64_t page, const lm_kv_plan *plan, lm_cpu_level cpu,
                         lm_page_code **out, lm_err *e)
{
    lm_page_code *c = NULL;
    *out = NULL;
    if (lm_alloc_n(&c, 1, sizeof *c, "forms of pages", e))
        return e->code;
    c->k = lm_kv_code_at(cpu);
    c->page = page;
    if (open_forms(c, m, plan, e)) {
        lm_page_code_free(c);
        return e->code;
    }
    *out = c;
    return LM_OK;
}

void lm_page_code_free(lm_page_code *c)
{
    if (!c)
        return;
    lm_free(c->form);
    lm_free(c->work);
    lm_free(c);
}

size_t lm_page_code_bytes(const lm_page_code *c)
{
    return c->bytes;
}

void lm_page_encode(lm_page_code *c, const struct iovec *piece, char *to)
{
    for (const piece_form *f = c->form; f < c->form + c->n; f++, piece++) {
        const char *x = piece->iov_base;
        const int64_t T = c->page, D = f->dim;
        if (!f->side) {
            memcpy(to, x, f->plain);
        } else {
            memset(to, 0, f->bytes);
            for (int64_t h = 0; h < f->heads; h++) {
                c->k->load(f->type, f->side->rotate, D, x + (size_t)h * f->plain / (size_t)f->heads,
                           T, c->work);
                c->k->encode(f->side->format, T, D, h, c->work, D, 0, T, NULL,
                             to + (size_t)h * f->head);
            }
        }
        to += (f->bytes + 63) / 64 * 64;
    }
}

void lm_page_decode(lm_page_code *c, const char *from, const struct iovec *piece)
{
    for (const piece_form *f = c->form; f < c->form + c->n; f++, piece++) {
        char *x = piece->iov_base;
        const int64_t T = c->page, D = f->dim;
        if (!f->side)
            memcpy(x, from, f->plain);
        for (int64_t h = 0; f->side && h < f->heads; h++) {
            c->k->decode(f->side->format, T, D, h, from + (size_t)h * f->head, 0, T, c->work, D);
            c->k->store(f->type, f->side->rotate, D, c->work, T,
                        x + (size_t)h * f->plain / (size_t)f->heads);
        }
        from += (f->bytes + 63) / 64 * 64;
    }
}
