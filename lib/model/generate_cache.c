/* SPDX-License-Identifier: Apache-2.0 */
/* generate_cache.c -- copies between the slots of a generator and images. */
#include "model/generate_cache.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/kv_code.h"
#include "kernels/linear.h"
#include "model/build.h"
#include "model/cache_about.h"
#include "model/generate_impl.h"

/* ---- The memory of a slot ---- */

/* A cache of a slot on the host: the backend's own memory, or a copy. */
typedef struct {
    char *host, *dev;
    size_t bytes;
} slot_memory;

/* The memory of `tokens` tokens of cache i; put: it will be overwritten. */
static lm_code open_memory(lm_generator *g, int i, int64_t slot, int64_t tokens, bool put,
                           slot_memory *out, lm_err *e)
{
    const slot_cache *y = &g->caches[i];
    *out = (slot_memory){ .dev = g->cache + y->at + (size_t)slot * y->slot_bytes,
                          .bytes = y->slot_bytes };
    if (y->page)
        out->bytes = (size_t)((tokens + y->page - 1) / y->page) * y->piece_bytes;
    if (g->b->host_memory) {
        out->host = out->dev;
        return LM_OK;
    }
    if (lm_alloc_n(&out->host, out->bytes, 1, "a copy of a cache", e))
        return e->code;
    if (put)
        return LM_OK;
    return g->b->copy(g->b, out->host, out->dev, out->bytes, g->b->main, e)
               ? e->code
               : g->b->sync(g->b, g->b->main, e);
}

/* written: to the backend. */
static lm_code close_memory(lm_generator *g, slot_memory *m, bool written, lm_err *e)
{
    lm_code rc = LM_OK;
    if (m->host == m->dev)
        return LM_OK;
    if (written) {
        rc = g->b->copy(g->b, m->dev, m->host, m->bytes, g->b->main, e);
        rc = rc ? rc : g->b->sync(g->b, g->b->main, e);
    }
    lm_free(m->host);
    return rc;
}

/* Copy rows [first, first + n) of a plain part of an image to or from a slot. */
static lm_code copy_rows(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t part,
                         int64_t first, int64_t n, bool put, lm_err *e)
{
    lm_cache_kind kind = part % 2 ? LM_CACHE_VALUES : LM_CACHE_KEYS;
    const slot_cache *y = &g->caches[lm_model_cache(generator_model(g), part / 2, kind)];
    size_t row = y->piece_bytes / (size_t)g->context;
    char *dev = g->cache + y->at + (size_t)slot * y->slot_bytes + (size_t)first * row;
    char *host = (char *)m->content.part[part].data[LM_KV_PLAIN] + (size_t)first * row;
    for (int64_t h = 0; h < y->heads && n; h++) {
        char *a = dev + (size_t)h * y->piece_bytes, *b = host + (size_t)(h * m->about.tokens) * row;
        if (g->b->copy(g->b, put ? a : b, put ? b : a, (size_t)n * row, g->b->main, e))
            return e->code;
    }
    return LM_OK;
}

/* Plain latents: a row of a slot is a latent and the rotated part, two parts of an image. */
static lm_code copy_latents(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t layer,
                            bool put, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    const size_t size = lm_dtype_size(a->act),
                 row[2] = { (size_t)a->head_dim[layer] * size, (size_t)a->latent[layer] * size };
    const int i = lm_model_cache(generator_model(g), layer, LM_CACHE_KEYS);
    slot_memory memory;
    lm_code rc = open_memory(g, i, slot, a->tokens, put, &memory, e);
    char *at = memory.host;
    for (int64_t t = 0; t < a->tokens && !rc; t++)
        for (int side = 0; side < 2; side++) {
            char *x =
                (char *)m->content.part[2 * layer + side].data[LM_KV_PLAIN] + (size_t)t * row[side];
            memcpy(put ? at : x, put ? x : at, row[side]);
            at += row[side];
        }
    lm_err ignored = { 0 };
    lm_code end = close_memory(g, &memory, put && !rc, rc ? &ignored : e);
    return rc ? rc : end;
}

/* The state of a layer that is kept as codes, in memory of the host, to or from numbers. */
static void copy_coded_state(const lm_generator *g, const lm_tensor *t, char *at, bool put,
                             float *x)
{
    const lm_kv_code_kernels *k = lm_kv_code_at(g->b->cpu);
    const int64_t D = t->dim[2], E = t->dim[3];
    const size_t bytes = lm_kv_page_bytes(t->kv, D, E);
    for (int64_t h = 0; h < t->dim[1]; h++, at += bytes, x += D * E)
        if (put)
            k->encode(t->kv, D, E, h, x, E, 0, D, NULL, at);
        else
            k->decode(t->kv, D, E, h, at, 0, D, x, E);
}

/* The state of a layer, and the rows in front of its convolution if it has one. */
static lm_code copy_state(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t layer,
                          bool put, lm_err *e)
{
    static const lm_cache_kind kind[2] = { LM_CACHE_STATE, LM_CACHE_CONV_TAIL };
    void *const data[2] = { m->content.state[layer], m->content.conv[layer] };
    for (int i = 0; i < 2; i++) {
        const int k = lm_model_cache(generator_model(g), layer, kind[i]);
        if (k < 0) /* linear attention has no convolution */
            continue;
        const slot_cache *y = &g->caches[k];
        const lm_tensor *t =
            &generator_model(g)->graph->value[generator_model(g)->cache[k].value].t;
        char *at = g->cache + y->at + (size_t)slot * y->slot_bytes;
        if (t->kv)
            copy_coded_state(g, t, at, put, data[i]);
        else if (g->b->copy(g->b, put ? at : data[i], put ? data[i] : at, y->slot_bytes, g->b->main,
                            e))
            return e->code;
    }
    return g->b->sync(g->b, g->b->main, e);
}

/* Copy part `part` of an image to or from a slot. */
static lm_code copy_part(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t part,
                         bool put, lm_par *par, lm_err *e)
{
    const lm_model *of = generator_model(g);
    bool values = part % 2;
    if (lm_kv_about_has_state(&m->about, part / 2))
        return values ? LM_OK : copy_state(g, slot, m, part / 2, put, e);
    if (m->about.latent && m->about.latent[part / 2] && !lm_b_coded(&of->build, part / 2))
        return values ? LM_OK : copy_latents(g, slot, m, part / 2, put, e);
    int pages = lm_model_cache(of, part / 2, values ? LM_CACHE_VALUES : LM_CACHE_KEYS);
    int tail = lm_model_cache(of, part / 2, values ? LM_CACHE_VALUE_TAIL : LM_CACHE_KEY_TAIL);
    lm_kv_shape s = lm_kv_about_shape(&m->about, part);
    slot_memory a = { 0 }, b = { 0 };
    lm_kv_part own = { 0 };
    const lm_kv_part *p = &m->content.part[part];
    const int32_t *order = m->about.ordered ? m->content.order[part / 2] : NULL;
    if (!g->b->host_memory && !g->caches[pages].page)
        return copy_rows(g, slot, m, part, 0, s.n, put, e) ? e->code
                                                           : g->b->sync(g->b, g->b->main, e);
    lm_code rc = open_memory(g, pages, slot, s.n, put, &a, e);
    if (!rc && tail >= 0)
        rc = open_memory(g, tail, slot, s.n, put, &b, e);
    if (!rc && order) {
        rc = lm_kv_part_init(&s, &own, e);
        rc = rc || !put ? rc : lm_kv_part_reorder(&s, p, order, true, &own, e);
    }
    if (!rc) {
        const lm_kv_memory memory = { .pages = a.host, .tail = b.host, .room = g->context };
        lm_kv_shape there = s;
        there.page = g->caches[pages].page;
        rc = put ? lm_kv_part_put(&there, order ? &own : p, &memory, g->b->cpu, par, e)
                 : lm_kv_part_get(&there, &memory, order ? &own : p, g->b->cpu, par, e);
        rc = rc || put || !order ? rc : lm_kv_part_reorder(&s, &own, order, false, p, e);
    }
    lm_kv_part_fini(&own);
    lm_err ignored = { 0 };
    lm_code end = close_memory(g, &a, put && !rc, rc ? &ignored : e);
    rc = rc ? rc : end;
    end = close_memory(g, &b, put && !rc, rc ? &ignored : e);
    return rc ? rc : end;
}

/* ---- Saving ---- */

static void fill_tokens(const lm_generator *g, int64_t slot, lm_kv_image *m)
{
    memcpy(m->content.ids, (int32_t *)g->choice.seen.host + slot * g->context,
           (size_t)m->about.tokens * sizeof(int32_t));
    for (int64_t i = 0; i < m->about.tokens && !m->about.rows; i++)
        m->content.positions[i] = (int32_t)i;
}

/* The tokens that a policy kept, and what it goes by. */
static lm_code about_kept(lm_generator *g, int64_t slot, lm_kv_about *a, int64_t **rows, lm_err *e)
{
    if (!g->keep)
        return LM_OK;
    const lm_kv_policy *p = g->kv->policy;
    if (a->state)
        return lm_fail(e, LM_EUSAGE, "cache", "leave the policy out",
                       "files have no place for dropped tokens beside states of layers");
    if (generator_keep_finish(g, slot, e) ||
        lm_alloc_n(rows, (size_t)a->layers, sizeof **rows, "layers of a cache", e))
        return e->code;
    for (int64_t l = 0; l < a->layers; l++)
        (*rows)[l] = generator_keep_used(g, slot, l);
    a->rows = *rows;
    if (p->kind != LM_KV_STAY)
        a->policy = g->kv->text;
    a->prompt = generator_keep_prompt_tokens(g, slot);
    a->ordered = lm_kv_policy_replaces(p);
    a->weighed = p->kind == LM_KV_H2O;
    return LM_OK;
}

lm_code lm_generator_save(lm_generator *g, int64_t slot, const lm_kv_about *about, lm_par *par,
                          lm_kv_image **out, lm_err *e)
{
    lm_kv_about a = *about;
    int64_t *rows = NULL;
    *out = NULL;
    a.tokens = g->used[slot];
    a.form = g->kv ? g->kv->side : NULL;
    a.page = g->kv ? g->kv->page : 0;
    a.spec = g->kv ? g->kv->text : NULL;
    lm_code rc = generator_wait_for_last(g, e);
    rc = rc ? rc : about_kept(g, slot, &a, &rows, e);
    rc = rc ? rc : lm_kv_image_new(&a, out, e);
    lm_free(rows);
    if (rc)
        return rc;
    fill_tokens(g, slot, *out);
    if (g->keep)
        rc = generator_keep_describe(g, slot, *out, e);
    for (int64_t i = 0; i < 2 * a.layers && !rc; i++)
        rc = copy_part(g, slot, *out, i, false, par, e);
    if (rc) {
        lm_kv_image_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- Continuing ---- */

static bool has_same_forms(const lm_generator *g, const lm_kv_about *a)
{
    static const lm_kv_side plain;
    const lm_config *c = &generator_model(g)->config;
    bool same = a->layers == c->layers;
    for (int64_t i = 0; i < 2 * a->layers && same; i++) {
        const lm_cache_shape y = lm_cache_shape_of(&c->layer[i / 2]);
        const int64_t dim = i % 2 && y.rotary ? y.rotary : y.head_dim;
        same = a->kv_heads[i / 2] == y.kv_heads && lm_kv_about_dim(a, i) == dim &&
               (a->state ? a->state[i / 2] : 0) == y.state &&
               (a->conv ? a->conv[i / 2] : 0) == y.conv &&
               lm_kv_same_form(a->form ? &a->form[i] : &plain, g->kv ? &g->kv->side[i] : &plain,
                               y.kv_heads, dim);
    }
    return same;
}

static lm_code check_image(const lm_generator *g, const lm_kv_image *m, int64_t n, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    bool at = !a->rows;
    if (g->keep && generator_keep_check(g, m, n, e))
        return e->code;
    for (int64_t i = 0; i < a->tokens && at; i++)
        at = m->content.positions[i] == i;
    if (!has_same_forms(g, a))
        return lm_fail(e, LM_EUSAGE, "cache", NULL, "it has other layers or forms than the model");
    if (!at && !g->keep)
        return lm_fail(e, LM_EUSAGE, "cache", NULL,
                       "tokens were dropped from it, so it cannot be continued");
    if (a->tokens + n > g->context)
        return lm_fail(e, LM_EUSAGE, "cache", "give a larger context",
                       "it has %lld tokens, and %lld follow; the context holds %lld",
                       (long long)a->tokens, (long long)n, (long long)g->context);
    return LM_OK;
}

static bool has_tails(const lm_generator *g)
{
    bool any = false;
    for (int64_t i = 0; i < 2 * (g->kv ? g->kv->layers : 0); i++)
        any = any || (g->kv->side[i].format && g->kv->side[i].residual);
    return any;
}

static bool is_coded(const lm_generator *g)
{
    bool any = false;
    for (int64_t i = 0; i < 2 * (g->kv ? g->kv->layers : 0); i++)
        any = any || g->kv->side[i].format;
    return any;
}

/* The least multiple of LM_KV_CHUNK that ends a page. */
static int64_t cut_of(const lm_generator *g)
{
    int64_t cut = LM_KV_CHUNK;
    while (g->kv && cut % g->kv->page)
        cut += LM_KV_CHUNK;
    return cut;
}

/* The rows of an image that stay when n tokens follow.  A row of a prompt depends on the other rows of its chunk
 * where these are few (kernels/linear.h), and where rows of other chunks are read as codes. */
static int64_t rows_kept(const lm_generator *g, const lm_kv_about *a, int64_t n)
{
    int64_t cut = is_coded(g) ? cut_of(g) : LM_KV_CHUNK, over = a->tokens % cut;
    if (a->has_next || has_tails(g) || a->state) /* a state is that behind all tokens */
        return a->tokens;
    if (is_coded(g))
        return a->tokens - (over || n ? over : cut);
    return a->tokens - (over && over <= LM_GEMM_SMALL_M ? over : !n);
}

int64_t lm_generator_rows_behind(const lm_generator *g, const lm_kv_about *a, int64_t n)
{
    int64_t rows = a->tokens - rows_kept(g, a, n) + a->has_next + n;
    return (rows + 7) / 8 * 8;
}

/* ---- Computing instead of loading ---- */

bool lm_generator_computes(const lm_generator *g)
{
    const lm_config *c = &generator_model(g)->config;
    bool rows = !g->keep && !is_coded(g) && !lm_config_has_states(c);
    for (int64_t l = 0; l < c->layers && rows; l++)
        rows = c->layer[l].attention != LM_ATTENTION_LATENT;
    return rows;
}

lm_code lm_generator_row_seconds(lm_generator *g, int64_t slot, double most, double *seconds,
                                 lm_err *e)
{
    static const int64_t count[2] = { 8, 64 };
    uint32_t ids[64];
    int64_t vocab = lm_generator_vocab(g);
    lm_code rc = LM_OK;
    *seconds = 0;
    for (int64_t i = 0; i < 64; i++)
        ids[i] = (uint32_t)(i % vocab);
    for (int i = 0; i < 2 && !rc; i++) {
        int64_t n = count[i] < g->context ? count[i] : g->context;
        if (i && (double)n * *seconds > most)
            break;
        double begin = lm_now();
        rc = lm_generator_prompt(g, slot, ids, n, NULL, e);
        rc = rc ? rc : generator_wait_for_last(g, e);
        *seconds = (lm_now() - begin) / (double)n;
    }
    g->used[slot] = 0;
    return rc;
}

lm_code lm_generator_compute(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t first,
                             int64_t n, lm_err *e)
{
    int64_t have = g->used[slot] <= first ? g->used[slot] : 0, parts = 2 * m->about.layers;
    lm_code rc = generator_wait_for_last(g, e);
    for (int64_t i = 0; i < parts && !rc; i++)
        rc = copy_rows(g, slot, m, i, have, first - have, true, e);
    if (rc)
        return rc;
    g->used[slot] = first;
    g->choice.sent[slot] = 0;
    rc = lm_generator_extend(g, slot, (const uint32_t *)m->content.ids + first, n, NULL, e);
    for (int64_t i = 0; i < parts && !rc; i++)
        rc = copy_rows(g, slot, m, i, first, n, false, e);
    return rc ? rc : generator_wait_for_last(g, e);
}

/* ---- Running ---- */

/* Run the token that an image names as the next one. */
static lm_code decode_next(lm_generator *g, int64_t slot, int32_t id, lm_err *e)
{
    int32_t *next;
    if (lm_alloc_n(&next, (size_t)g->batch, sizeof *next, "slots", e))
        return e->code;
    for (int64_t i = 0; i < g->batch; i++)
        next[i] = i == slot ? id : -1;
    lm_code rc = lm_generator_decode(g, next, NULL, e);
    lm_free(next);
    return rc;
}

/* Run tokens one by one behind a cache from which tokens were dropped: as tokens that are generated. */
static lm_code decode_all(lm_generator *g, int64_t slot, const lm_kv_about *a, const uint32_t *ids,
                          int64_t n, lm_err *e)
{
    lm_code rc = a->has_next ? decode_next(g, slot, a->next, e) : LM_OK;
    for (int64_t i = 0; i < n && !rc; i++)
        rc = decode_next(g, slot, (int32_t)ids[i], e);
    return rc;
}

/* Run the tokens of m from row `kept` on, and ids behind them. */
static lm_code run_rest(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t kept,
                        const uint32_t *ids, int64_t n, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    uint32_t *all;
    int64_t k = 0;
    if (lm_alloc_n(&all, (size_t)(a->tokens - kept + 1 + n), sizeof *all, "tokens", e))
        return e->code;
    for (int64_t i = kept; i < a->tokens; i++)
        all[k++] = (uint32_t)m->content.ids[i];
    if (a->has_next)
        all[k++] = (uint32_t)a->next;
    for (int64_t i = 0; i < n; i++)
        all[k++] = ids[i];
    lm_code rc = lm_generator_extend(g, slot, all, k, NULL, e);
    lm_free(all);
    return rc;
}

lm_code lm_generator_resume(lm_generator *g, int64_t slot, const lm_kv_image *m,
                            const uint32_t *ids, int64_t n, lm_par *par, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    int64_t kept = g->keep ? a->tokens : rows_kept(g, a, n);
    if (check_image(g, m, n + a->has_next, e) || generator_wait_for_last(g, e))
        return e->code;
    if (!n && !a->has_next && kept == a->tokens)
        return lm_fail(e, LM_EUSAGE, "cache", "give a prompt to append",
                       "it ends with a prompt, and its newest rows cannot be computed again");
    for (int64_t i = 0; i < 2 * a->layers && kept; i++)
        if (copy_part(g, slot, m, i, true, par, e))
            return e->code;
    memcpy((int32_t *)g->choice.seen.host + slot * g->context, m->content.ids,
           (size_t)kept * sizeof(int32_t));
    g->choice.sent[slot] = 0;
    g->used[slot] = kept;
    if (g->keep)
        return generator_keep_take(g, slot, m, e) ? e->code : decode_all(g, slot, a, ids, n, e);
    return !n && a->has_next ? decode_next(g, slot, a->next, e)
                             : run_rest(g, slot, m, kept, ids, n, e);
}
