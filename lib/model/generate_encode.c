/* SPDX-License-Identifier: Apache-2.0 */
/* generate_encode.c -- rows of tokens that stay, out of the cache of prompts into a slot's pages: gathered, rotated and
 * written as new rows are (model/build_cache.c). */
#include <string.h>

#include "base/mem.h"
#include "kernels/kv_keep.h"
#include "kv/merge.h"
#include "model/generate_keep.h"
#include "numeric/code_rows.h"

enum { ROWS = 256 }; /* at once */

/* The operands of a layer, whose first rows are stored in a slot. */
typedef struct {
    lm_kv_gather_attr gather_attr;
    lm_head_rotate_attr rotate_attr;
    lm_kv_attr write_attr;
    lm_tensor gather[6], rows, write[7], out[4];
} encoding;

static lm_tensor value_of(const lm_model *m, int cache, void *data)
{
    lm_tensor t = m->graph->value[m->cache[cache].value].t;
    t.data = data;
    return t;
}

/* A cache of the slot, as that of one sequence. */
static lm_tensor cache_of_slot(const lm_generator *g, int64_t slot, int64_t layer,
                               lm_cache_kind kind)
{
    const lm_model *m = generator_model(g);
    int i = lm_model_cache(m, layer, kind);
    if (i < 0)
        return (lm_tensor){ 0 };
    const slot_cache *y = &g->caches[i];
    lm_tensor t = value_of(m, i, g->cache ? g->cache + y->at + (size_t)slot * y->slot_bytes : NULL);
    t.dim[0] /= g->batch;
    return t;
}

static lm_tensor cache_of_prompt(const lm_generator *g, int64_t layer, lm_cache_kind kind)
{
    const lm_model *m = g->prefill[0].m;
    int i = lm_model_cache(m, layer, kind);
    return value_of(m, i, g->keep->cache + g->keep->cache_at[i]);
}

static lm_tensor integers(int64_t n, void *data)
{
    lm_tensor t = lm_shape1(LM_DTYPE_I32, n);
    t.data = data;
    return t;
}

/* On the backend's side. */
static void *dev_of(const lm_mirror *m, const void *host)
{
    return (char *)m->dev + ((const char *)host - (const char *)m->host);
}

static void describe(const lm_generator *g, int64_t slot, int64_t layer, bool merged, encoding *x)
{
    const keep_encoder *c = &g->keep->encode;
    const lm_model *m = generator_model(g);
    const lm_layer *y = &m->config.layer[layer];
    const lm_kv_side *side = &g->kv->side[2 * layer];
    const bool latent = y->attention == LM_ATTENTION_LATENT;
    int64_t H = y->heads, K = latent ? 1 : y->kv_heads,
            D = latent ? y->latent.kv_rank + y->latent.rope_dim : y->head_dim;
    lm_tensor at = { .dtype = LM_DTYPE_I32, .ndim = 3, .dim = { 1, K, ROWS } }, run = at;
    lm_tensor weight = { .dtype = LM_DTYPE_F32, .ndim = 3, .dim = { 1, K, g->context } };
    lm_dtype act = m->build.precision.low;
    const lm_attention_attr a = { .batch = 1,
                                  .seq = ROWS,
                                  .heads = H,
                                  .kv_heads = K,
                                  .head_dim = D,
                                  .value_dim = latent ? y->latent.kv_rank : 0,
                                  .causal = true };
    at.data = dev_of(&c->numbers, c->at);
    run.data = dev_of(&c->numbers, c->run);
    weight.data = c->weight.dev;
    *x = (encoding){ .gather_attr = { 1, ROWS, H, K, D },
                     .rotate_attr = { H, K, D, false, side[LM_KV_K].rotate, side[LM_KV_V].rotate,
                                      0 },
                     .write_attr = lm_b_kv_attr(&m->build, layer, &a) };
    if (latent) { /* a row has one key behind its queries: the value of rows that have one query less */
        x->gather_attr.heads = H - 1;
        x->rotate_attr = (lm_head_rotate_attr){
            .heads = H + 1, .head_dim = D, .q = side[LM_KV_K].rotate, .part = y->latent.kv_rank
        };
        x->write_attr.latent = true;
    }
    x->rows = lm_shape2(act, ROWS, lm_kv_row_heads(&x->write_attr));
    x->rows.data = c->rows;
    const lm_tensor none = { 0 }, one = integers(1, dev_of(&c->numbers, c->count));
    const lm_tensor gather[6] = { cache_of_prompt(g, layer, LM_CACHE_KEYS),
                                  cache_of_prompt(g, layer,
                                                  latent ? LM_CACHE_KEYS : LM_CACHE_VALUES),
                                  at,
                                  one,
                                  merged ? run : none,
                                  merged ? weight : none };
    memcpy(x->gather, gather, sizeof gather);
    x->out[0] = cache_of_slot(g, slot, layer, LM_CACHE_KEYS);
    x->out[1] = cache_of_slot(g, slot, layer, LM_CACHE_VALUES);
    x->out[2] = cache_of_slot(g, slot, layer, LM_CACHE_KEY_TAIL);
    x->out[3] = cache_of_slot(g, slot, layer, LM_CACHE_VALUE_TAIL);
    lm_tensor table = lm_shape2(LM_DTYPE_I32, 1, x->out[0].dim[0]);
    table.data = g->numbers.dev;
    bool tails = x->out[2].ndim || x->out[3].ndim;
    const lm_tensor write[7] = { x->rows, integers(1, dev_of(&c->numbers, c->used)),  one, none,
                                 table,   tails ? integers(1, g->numbers.dev) : none, none };
    memcpy(x->write, write, sizeof write);
}

/* The three calls; returns false past the last. */
static bool call_at(const lm_generator *g, encoding *x, int i, const lm_kernel **k, lm_call *c)
{
    const keep_encoder *n = &g->keep->encode;
    *c = (lm_call){ .work = n->work, .par = g->b->par, .stream = g->b->main };
    switch (i) {
    case 0:
        *k = n->gather;
        c->attr = &x->gather_attr;
        c->in = x->gather;
        c->n_in = 6;
        c->out = &x->rows;
        c->n_out = 1;
        return true;
    case 1:
        *k = n->rotate;
        c->attr = &x->rotate_attr;
        c->in = c->out = &x->rows;
        c->n_in = c->n_out = 1;
        return true;
    case 2:
        *k = n->write;
        c->attr = &x->write_attr;
        c->in = x->write;
        c->n_in = 7;
        c->out = x->out;
        c->n_out = 4;
        return true;
    default:
        return false;
    }
}

/* ---- allocation ---- */

static lm_code find_kernels(lm_generator *g, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    static const char *const name[3] = { "kv_gather", "head_rotate", "kv_write" };
    const lm_kernel **to[3] = { &c->gather, &c->rotate, &c->write };
    for (int i = 0; i < 3; i++) {
        *to[i] = g->b->kernel(g->b, name[i], generator_model(g)->build.precision.low);
        if (!*to[i])
            return lm_fail(e, LM_EUSAGE, g->b->name, "use no policy for caches, or another device",
                           "has no kernel \"%s\"", name[i]);
    }
    return LM_OK;
}

static lm_code make_numbers(lm_generator *g, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    size_t bytes = 0, n = (size_t)(g->keep->most_heads * ROWS);
    size_t at = generator_share(&bytes, n, sizeof(int32_t));
    size_t run = generator_share(&bytes, n, sizeof(int32_t));
    size_t count = generator_share(&bytes, 1, sizeof(int32_t));
    size_t used = generator_share(&bytes, 1, sizeof(int32_t));
    if (lm_mirror_new(g->b, bytes, "rows that stay", &c->numbers, e))
        return e->code;
    c->at = generator_room(c->numbers.host, at);
    c->run = generator_room(c->numbers.host, run);
    c->count = generator_room(c->numbers.host, count);
    c->used = generator_room(c->numbers.host, used);
    return LM_OK;
}

static lm_code make_merging(lm_generator *g, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    size_t n = (size_t)g->context, most = 0;
    for (int64_t l = 0; l < g->keep->layers; l++) {
        size_t d = (size_t)generator_model(g)->config.layer[l].head_dim;
        most = d > most ? d : most;
    }
    return lm_mirror_new(g->b, (size_t)g->keep->most_heads * n * sizeof(float), "weights of rows",
                         &c->weight, e) ||
                   lm_alloc_n(&c->stored, n * most, sizeof(float), "keys", e) ||
                   lm_alloc_n(&c->key, n * most, sizeof *c->key, "keys", e) ||
                   lm_alloc_n(&c->run_of, n, sizeof *c->run_of, "runs", e) ||
                   lm_alloc_n(&c->first, n * (size_t)g->keep->most_heads, sizeof *c->first, "runs",
                              e) ||
                   lm_alloc_n(&c->joint, n, sizeof *c->joint, "neighbours", e) ||
                   lm_alloc_n(&c->weights, n, sizeof *c->weights, "weights of rows", e)
               ? e->code
               : LM_OK;
}

lm_code generator_encode_open(lm_generator *g, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    bool merged = g->keep->p->kind == LM_KV_MERGE;
    if (find_kernels(g, e) || make_numbers(g, e) || (merged && make_merging(g, e)))
        return e->code;
    for (int64_t l = 0; l < g->keep->layers; l++) {
        encoding x;
        const lm_kernel *k;
        lm_call call;
        if (!g->keep->rows[l])
            continue;
        describe(g, 0, l, merged, &x);
        size_t rows = lm_stored_bytes(&x.rows);
        c->row_bytes = rows > c->row_bytes ? rows : c->row_bytes;
        for (int i = 0; call_at(g, &x, i, &k, &call); i++) {
            size_t work = k->work ? k->work(&call, g->b->threads) : 0;
            c->work_bytes = work > c->work_bytes ? work : c->work_bytes;
        }
    }
    if (c->row_bytes && g->b->alloc(g->b, c->row_bytes, "rows that stay", &c->rows, e))
        return e->code;
    return c->work_bytes ? g->b->alloc(g->b, c->work_bytes, "storing rows", &c->work, e) : LM_OK;
}

void generator_encode_close(lm_generator *g)
{
    keep_encoder *c = &g->keep->encode;
    if (c->rows)
        g->b->free(g->b, c->rows, c->row_bytes);
    if (c->work)
        g->b->free(g->b, c->work, c->work_bytes);
    lm_mirror_fini(&c->numbers);
    lm_mirror_fini(&c->weight);
    lm_free(c->stored);
    lm_free(c->key);
    lm_free(c->run_of);
    lm_free(c->first);
    lm_free(c->joint);
    lm_free(c->weights);
}

/* ---- storing ---- */

/* Rows [from, from + n) of each head, which c->at and c->run name. */
static lm_code put_rows(lm_generator *g, encoding *x, int64_t from, int64_t n, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    const lm_kernel *k;
    lm_call call;
    *c->used = (int32_t)from;
    *c->count = (int32_t)n;
    if (lm_mirror_push(&c->numbers, c->numbers.bytes, NULL, e))
        return e->code;
    for (int i = 0; call_at(g, x, i, &k, &call); i++)
        if (i != 1 || x->rotate_attr.q || x->rotate_attr.k || x->rotate_attr.v)
            k->run(&call);
    return generator_wait_for_last(g, e);
}

lm_code generator_encode_rows(lm_generator *g, int64_t slot, int64_t layer, int64_t n, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    int64_t heads = g->keep->layer[layer].heads, ignored;
    encoding x;
    describe(g, slot, layer, false, &x);
    for (int64_t from = 0; from < n; from += ROWS) {
        int64_t rows = n - from < ROWS ? n - from : ROWS;
        for (int64_t h = 0; h < heads; h++) {
            const int32_t *at = generator_keep_positions(g, slot, layer, h, &ignored) + from;
            for (int64_t i = 0; i < rows; i++)
                c->at[h * ROWS + i] =
                    at[i] - (at[i] < g->keep->p->sinks ? 0 : (int32_t)g->keep->dropped);
        }
        if (put_rows(g, &x, from, rows, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- merging ---- */

/* The keys of a head of the prompt as floats. */
static lm_code read_keys(lm_generator *g, int64_t layer, int64_t head, int64_t n, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    lm_tensor t = cache_of_prompt(g, layer, LM_CACHE_KEYS);
    size_t size = lm_dtype_size(t.dtype);
    int64_t numbers = n * t.dim[3];
    const char *from = (const char *)t.data + (size_t)(head * t.dim[2] * t.dim[3]) * size;
    if (!g->b->host_memory) {
        if (g->b->copy(g->b, c->stored, from, (size_t)numbers * size, g->b->main, e) ||
            generator_wait_for_last(g, e))
            return e->code;
        from = c->stored;
    }
    for (int64_t i = 0; i < numbers; i++)
        c->key[i] = (float)lm_get(t.dtype, from, i);
    return LM_OK;
}

/* Runs of a head of which at least p->keep n are left. */
static int64_t find_runs(const lm_generator *g, const lm_kv_policy *p, int64_t layer, int64_t head,
                         int64_t n)
{
    const generator_keep *k = g->keep;
    const keep_encoder *c = &k->encode;
    int64_t D = generator_model(g)->config.layer[layer].head_dim;
    return lm_kv_merge_runs(p, n, D, c->key, D, generator_prompt_mass(k, layer, head), c->run_of,
                            c->joint, k->keep, k->work);
}

/* The first token of each run, its pivot's position and the weights of its tokens. */
static void weigh_runs(const lm_generator *g, int64_t layer, int64_t head, int64_t n, int32_t *at)
{
    const generator_keep *k = g->keep;
    const keep_encoder *c = &k->encode;
    int64_t D = generator_model(g)->config.layer[layer].head_dim, runs = 0;
    const float *mass = generator_prompt_mass(k, layer, head);
    float *weight = (float *)c->weight.host + head * g->context;
    int32_t *first = c->first + head * g->context;
    for (int64_t i = 0, end; i < n; i = end, runs++) {
        for (end = i + 1; end < n && c->run_of[end] == (int32_t)i; end++)
            ;
        first[runs] = (int32_t)i;
        at[runs] = (int32_t)(i + lm_kv_merge_weights(k->p, end - i, D, c->key + i * D, D, mass + i,
                                                     c->weights));
        for (int64_t j = i; j < end; j++)
            weight[j] = (float)c->weights[j - i];
    }
}

/* All heads keep as many tokens as the one that can merge least. */
static lm_code merge_heads(lm_generator *g, int64_t slot, int64_t layer, int64_t *left, lm_err *e)
{
    generator_keep *k = g->keep;
    kept_layer *y = &k->layer[layer];
    int64_t n = k->n[slot], most = 0;
    lm_kv_policy p = *k->p;
    for (int64_t h = 0; h < y->heads; h++) {
        if (read_keys(g, layer, h, n, e))
            return e->code;
        int64_t runs = find_runs(g, &p, layer, h, n);
        most = runs > most ? runs : most;
    }
    p.keep = ((double)most + 0.5) / (double)n;
    for (int64_t h = 0; h < y->heads; h++) {
        if (read_keys(g, layer, h, n, e))
            return e->code;
        find_runs(g, &p, layer, h, n);
        weigh_runs(g, layer, h, n, y->at + (slot * y->heads + h) * y->room);
    }
    *left = most;
    return lm_mirror_push(&k->encode.weight, k->encode.weight.bytes, NULL, e);
}

lm_code generator_encode_merged(lm_generator *g, int64_t slot, int64_t layer, int64_t *n, lm_err *e)
{
    keep_encoder *c = &g->keep->encode;
    int64_t heads = g->keep->layer[layer].heads, all = g->keep->n[slot];
    encoding x;
    if (merge_heads(g, slot, layer, n, e))
        return e->code;
    describe(g, slot, layer, true, &x);
    for (int64_t from = 0; from < *n; from += ROWS) {
        int64_t rows = *n - from < ROWS ? *n - from : ROWS;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < rows; i++) {
                const int32_t *first = c->first + h * g->context + from + i;
                int64_t end = from + i + 1 < *n ? first[1] : all;
                c->at[h * ROWS + i] = *first;
                c->run[h * ROWS + i] = (int32_t)(end - *first);
            }
        if (put_rows(g, &x, from, rows, e))
            return e->code;
    }
    return LM_OK;
}
