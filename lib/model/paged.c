/* SPDX-License-Identifier: Apache-2.0 */
/* paged.c -- graphs of ragged rows over pages, and their steps. */
#include "model/paged_impl.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "kv/spec.h"
#include "model/build.h"
#include "numeric/code_rows.h"

/* ---- graphs ---- */

static lm_code make_inputs(const lm_paged *g, bucket *s, lm_err *e)
{
    const size_t n = (size_t)s->rows, b = (size_t)s->m->build.batch;
    const size_t count[INPUTS] = { n, n, b, b, b + 1, b, b * (size_t)g->width, b, b, n };
    const lm_vid value[INPUTS] = {
        s->m->tokens, s->m->pos,   s->m->used, s->m->fresh, s->m->first,
        s->m->kind,   s->m->table, s->m->rows, s->m->slot,  s->m->chosen
    };
    int32_t **host[INPUTS] = { &s->tokens, &s->pos,   &s->used, &s->fresh, &s->first,
                               &s->kind,   &s->table, &s->last, &s->slot,  &s->chosen };
    size_t at[INPUTS], bytes = 0;
    for (int i = 0; i < INPUTS; i++) {
        at[i] = bytes;
        bytes += (count[i] * sizeof(int32_t) + 63) / 64 * 64;
    }
    if (lm_mirror_new(g->b, bytes, "rows of a step", &s->inputs, e))
        return e->code;
    memset(s->inputs.host, 0, bytes);
    for (int i = 0; i < INPUTS; i++) {
        *host[i] = (int32_t *)(void *)((char *)s->inputs.host + at[i]);
        if (value[i] >= 0) /* no slots without tails, no choice without adapters */
            lm_exec_bind(s->x, value[i], (char *)s->inputs.dev + at[i]);
    }
    return LM_OK;
}

static lm_code build_model(const lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o,
                           int64_t sequences, int64_t rows, lm_backend *b, lm_model **out,
                           lm_err *e)
{
    lm_build build = o->like ? o->like->build : (lm_build){ .precision = { .low = dtype } };
    build.mode = LM_MODE_GENERATE;
    build.batch = sequences;
    build.seq = 0;
    build.cache = o->context;
    build.rows = rows;
    build.pages = o->pages;
    build.page = o->page;
    build.kv = o->kv;
    build.state_codes = o->state_codes;
    build.slots = (o->slots ? o->slots : o->sequences) + o->snapshots;
    build.documents = build.dropout = build.halves = false;
    build.entropy = LM_ENTROPY_NONE;
    build.like = o->like;
    build.backend = b;
    build.panels = !w->store || w->store->in_panels;
    if (!o->like)
        lm_loaded_build(w, &build);
    return lm_model_build(&w->config, &build, out, e);
}

static lm_code open_bucket(lm_paged *g, const lm_loaded *w, lm_exec *share, bucket *s, lm_err *e)
{
    /* of few rows, fewer logits */
    int64_t sequences = g->sequences < s->rows ? g->sequences : s->rows;
    if (build_model(w, g->dtype, &g->o, sequences, s->rows, g->b, &s->m, e) ||
        lm_exec_new_sharing(s->m->graph, g->b, &s->m->logits, 1, share, &s->x, e))
        return e->code;
    return make_inputs(g, s, e);
}

/* 16, 32, ... and the most rows; the largest first, whose arena the others share, or with `share` that one. */
static lm_code open_buckets(lm_paged *g, const lm_loaded *w, lm_exec *share, paged_graphs *all,
                            lm_err *e)
{
    int64_t most = g->o.rows > FEWEST ? g->o.rows : FEWEST;
    int n = 0;
    for (int64_t rows = FEWEST; rows < most && n < MOST_BUCKETS - 1; rows *= 2)
        all->bucket[n++].rows = rows;
    all->bucket[n++].rows = most;
    g->n_buckets = n;
    for (int i = n - 1; i >= 0; i--) {
        lm_exec *with = i < n - 1 && !share ? all->bucket[n - 1].x : share;
        if (open_bucket(g, w, with, &all->bucket[i], e))
            return e->code;
    }
    return LM_OK;
}

/* An entry for the graphs of another model. */
static lm_code new_graphs(lm_paged *g, paged_graphs **out, lm_err *e)
{
    if (lm_grow(&g->of, &g->cap_models, (size_t)g->n_models + 1, sizeof *g->of, "models", e) ||
        lm_alloc_n(out, 1, sizeof **out, "graphs of a model", e))
        return e->code;
    g->of[g->n_models++] = *out;
    return LM_OK;
}

/* The next number is that of the newest graphs, in which its rows choose `chosen`. */
static lm_code add_number(lm_paged *g, int32_t chosen, lm_err *e)
{
    if (lm_grow(&g->number, &g->cap_numbers, g->n_numbers + 1, sizeof *g->number, "models", e))
        return e->code;
    g->number[g->n_numbers++] = (paged_number){ g->n_models - 1, chosen };
    return LM_OK;
}

/* Bytes of cache i, and of a page or a tail of it. */
static size_t cache_bytes(const lm_model *m, int i)
{
    return lm_stored_bytes(&m->graph->value[m->cache[i].value].t);
}

static size_t piece_bytes(const lm_model *m, int i)
{
    return cache_bytes(m, i) / (size_t)m->graph->value[m->cache[i].value].t.dim[0];
}

static lm_code make_pages(lm_paged *g, lm_err *e)
{
    const lm_model *m = paged_model(g);
    if (lm_alloc_n(&g->at, (size_t)m->n_caches, sizeof *g->at, "caches", e))
        return e->code;
    for (int i = 0; i < m->n_caches; i++) {
        g->at[i] = g->bytes;
        if (__builtin_add_overflow(g->bytes, (cache_bytes(m, i) + 63) / 64 * 64, &g->bytes))
            return lm_fail(e, LM_ELIMIT, "pages", NULL, "their size cannot be counted");
    }
    return g->b->alloc(g->b, g->bytes, "pages of caches", (void **)&g->pages, e);
}

/* The weights, tables and caches that the graphs read. */
static lm_code bind_graphs(lm_paged *g, lm_loaded *w, paged_graphs *all, lm_err *e)
{
    const lm_model *m = all->bucket[g->n_buckets - 1].m;
    if ((!w->store && lm_loaded_weights(w, m, g->b, e)) || lm_rotary_new(m, g->b, &all->rope, e))
        return e->code;
    for (int i = 0; i < g->n_buckets; i++) {
        const bucket *s = &all->bucket[i];
        lm_store_bind(w->store, s->m, s->x);
        lm_rotary_bind(&all->rope, s->m, s->x);
        for (int k = 0; k < s->m->n_caches; k++)
            lm_exec_bind(s->x, s->m->cache[k].value, g->pages + g->at[k]);
    }
    return LM_OK;
}

static lm_code open_all(lm_paged *g, lm_loaded *w, lm_err *e)
{
    paged_graphs *all;
    if (new_graphs(g, &all, e) || open_buckets(g, w, NULL, all, e) || make_pages(g, e) ||
        bind_graphs(g, w, all, e) || paged_make_chooser(g, e))
        return e->code;
    for (int k = 0; k <= (w->adapter ? w->adapter->joined : 0); k++)
        if (add_number(g, k, e))
            return e->code;
    return g->o.down
               ? lm_page_code_new(paged_model(g), g->o.page, g->o.down, g->b->cpu, &g->code, e)
               : LM_OK;
}

static size_t joined_bytes(const lm_paged *g)
{
    return (size_t)g->sequences * (size_t)lm_paged_vocab(g) * sizeof(float);
}

lm_code lm_paged_add(lm_paged *g, lm_loaded *w, int64_t *number, lm_err *e)
{
    paged_graphs *all;
    if ((!g->group &&
         lm_alloc_n(&g->group, (size_t)g->sequences, sizeof *g->group, "parts of a step", e)) ||
        (!g->joined && g->b->alloc(g->b, joined_bytes(g), "logits", (void **)&g->joined, e)) ||
        new_graphs(g, &all, e) || add_number(g, 0, e))
        return e->code;
    *number = (int64_t)g->n_numbers - 1;
    return open_buckets(g, w, g->of[0]->bucket[g->n_buckets - 1].x, all, e) ||
                   bind_graphs(g, w, all, e)
               ? e->code
               : LM_OK;
}

static lm_code check_opts(const lm_loaded *w, const lm_paged_opts *o, lm_err *e)
{
    if (o->page < 1 || o->page % LM_PAGE_UNIT)
        return lm_fail(e, LM_EUSAGE, "page", NULL, "%" PRId64 " tokens: not a multiple of %d",
                       o->page, LM_PAGE_UNIT);
    if (o->pages < 1 || o->rows < 1 || o->sequences < 1 || o->context < 1)
        return lm_fail(e, LM_EUSAGE, "pages", NULL, "there is no room for a sequence");
    if (o->kv && o->kv->policy)
        return lm_fail(e, LM_EUSAGE, "kv cache", "leave the policy out, or the pages",
                       "tokens cannot be dropped from pages that texts share");
    return lm_config_check_context(&w->config, o->context, e);
}

/* Of all caches that are paged, or not. */
static size_t sum_of_pieces(const lm_model *m, bool paged)
{
    size_t all = 0;
    for (int i = 0; i < m->n_caches; i++)
        all += m->cache[i].paged == paged ? piece_bytes(m, i) : 0;
    return all;
}

lm_code lm_paged_measure(const lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                         lm_paged_sizes *out, lm_err *e)
{
    lm_model *m = NULL;
    if (check_opts(w, o, e) || build_model(w, dtype, o, FEWEST, FEWEST, b, &m, e))
        return e->code;
    out->page = out->below = sum_of_pieces(m, true);
    out->tail = sum_of_pieces(m, false);
    out->weights = w->store ? 0 : lm_loaded_bytes(m);
    lm_page_code *code = NULL;
    if (o->down && !lm_page_code_new(m, o->page, o->down, b->cpu, &code, e))
        out->below = lm_page_code_bytes(code);
    lm_page_code_free(code);
    lm_model_free(m);
    return e->code;
}

lm_code lm_paged_new(lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                     lm_paged **out, lm_err *e)
{
    lm_paged *g = NULL;
    *out = NULL;
    if (check_opts(w, o, e) || lm_alloc_n(&g, 1, sizeof *g, "a generator", e))
        return e->code;
    g->b = b;
    g->dtype = dtype;
    g->o = *o;
    g->sequences = o->sequences > FEWEST ? o->sequences : FEWEST;
    g->width = (o->context + o->page - 1) / o->page;
    if (lm_cache_formats_on(o->kv, &w->config, b, &g->formats, e)) {
        lm_paged_free(g);
        return e->code;
    }
    g->o.kv = g->formats.plan;
    if (open_all(g, w, e)) {
        lm_paged_free(g);
        return e->code;
    }
    *out = g;
    return LM_OK;
}

static void free_graphs(const lm_paged *g, paged_graphs *all)
{
    for (int i = 0; i < g->n_buckets; i++) {
        lm_exec_free(all->bucket[i].x);
        lm_model_free(all->bucket[i].m);
        lm_mirror_fini(&all->bucket[i].inputs);
    }
    lm_rotary_fini(&all->rope);
    lm_free(all);
}

void lm_paged_free(lm_paged *g)
{
    lm_err ignored = { 0 };
    if (!g)
        return;
    g->b->sync(g->b, g->b->main, &ignored); /* after a failure, work may still be queued */
    paged_forget_recordings(g);
    if (g->joined)
        g->b->free(g->b, g->joined, joined_bytes(g));
    for (int64_t k = g->n_models;
         k-- > 0;) /* the largest of the first, whose arena they share, last */
        free_graphs(g, g->of[k]);
    if (g->pages)
        g->b->free(g->b, g->pages, g->bytes);
    paged_drop_chooser(g);
    lm_free(g->of);
    lm_free(g->number);
    lm_free(g->group);
    lm_page_code_free(g->code);
    lm_cache_formats_fini(&g->formats);
    lm_free(g->at);
    lm_free(g);
}

/* ---- steps ---- */

/* Write the rows of part i from `row` on. */
static void put_part(const lm_paged *g, bucket *s, const lm_paged_part *p, int64_t i, int64_t row)
{
    int64_t pages = (p->used + p->n + g->o.page - 1) / g->o.page;
    for (int64_t k = 0; k < p->n; k++) {
        s->tokens[row + k] = (int32_t)p->ids[k];
        s->pos[row + k] = (int32_t)(p->used + k);
        s->chosen[row + k] = g->number[p->model].chosen;
    }
    s->used[i] = (int32_t)p->used;
    s->fresh[i] = (int32_t)p->n;
    s->kind[i] = (int32_t)p->kind;
    s->first[i] = (int32_t)row;
    s->last[i] = (int32_t)(row + p->n - 1);
    s->slot[i] = (int32_t)p->slot;
    memcpy(s->table + i * g->width, p->table, (size_t)pages * sizeof *s->table);
}

/* Write the rows that belong to no sequence, and the sequences without rows. */
static void put_rest(bucket *s, int64_t n, int64_t row)
{
    int64_t sequences = s->m->build.batch;
    for (int64_t k = row; k < s->rows; k++)
        s->tokens[k] = s->pos[k] = s->chosen[k] = 0;
    for (int64_t i = n; i <= sequences; i++)
        s->first[i] = (int32_t)row;
    for (int64_t i = n; i < sequences; i++)
        s->used[i] = s->fresh[i] = s->last[i] = s->kind[i] = s->slot[i] = 0;
}

static lm_code check_parts(const lm_paged *g, const lm_paged_part *part, int64_t n, int64_t *rows,
                           lm_err *e)
{
    const int64_t most = g->of[0]->bucket[g->n_buckets - 1].rows;
    *rows = 0;
    for (int64_t i = 0; i < n; i++) {
        *rows += part[i].n;
        if (part[i].model < 0 || part[i].model >= (int64_t)g->n_numbers)
            return lm_fail(e, LM_EUSAGE, "step", NULL, "there is no model %" PRId64, part[i].model);
        if (part[i].n < 1 || (part[i].kind == LM_ROWS_TOKEN && part[i].n > 1) || part[i].used < 0 ||
            part[i].n > g->o.context || part[i].used > g->o.context - part[i].n)
            return lm_fail(e, LM_EUSAGE, "step", NULL,
                           "%" PRId64 " row%s behind %" PRId64 " of a context of %" PRId64,
                           part[i].n, lm_plural(part[i].n), part[i].used, g->o.context);
    }
    if (n < 1 || n > g->sequences || *rows > most)
        return lm_fail(e, LM_EUSAGE, "step", NULL,
                       "%" PRId64 " part%s of %" PRId64 " rows; there is room for %" PRId64
                       " of %" PRId64,
                       n, lm_plural(n), *rows, g->sequences, most);
    return LM_OK;
}

static int64_t graphs_of(const lm_paged *g, const lm_paged_part *p)
{
    return g->number[p->model].graphs;
}

/* Run parts of the same graphs; row i of *logits is that of part i. */
static lm_code run_parts(lm_paged *g, const lm_paged_part *part, int64_t n, int64_t rows,
                         float **logits, lm_err *e)
{
    bucket *s = g->of[graphs_of(g, part)]->bucket;
    int64_t row = 0;
    while (s->rows < rows)
        s++;
    for (int64_t i = 0; i < n; row += part[i++].n)
        put_part(g, s, &part[i], i, row);
    put_rest(s, n, row);
    if (paged_run(g, s, e))
        return e->code;
    *logits = lm_exec_data(s->x, s->m->logits);
    return LM_OK;
}

/* The logits of a group's parts, those of `graphs`, to the rows of the step: neighbours at once. */
static lm_code join_logits(lm_paged *g, const lm_paged_part *part, int64_t graphs, int64_t n_parts,
                           const float *logits, lm_err *e)
{
    const int64_t vocab = lm_paged_vocab(g);
    for (int64_t i = 0, row = 0, n; i < n_parts; i += n) {
        for (n = 0; i + n < n_parts && graphs_of(g, &part[i + n]) == graphs; n++)
            ;
        if (n && g->b->copy(g->b, g->joined + i * vocab, logits + row * vocab,
                            (size_t)(n * vocab) * sizeof *logits, g->b->main, e))
            return e->code;
        row += n;
        n += !n;
    }
    return LM_OK;
}

/* Parts of several graphs: those of each one together. */
static lm_code run_groups(lm_paged *g, const lm_paged_part *part, int64_t n, lm_err *e)
{
    for (int64_t k = 0; k < g->n_models; k++) {
        int64_t count = 0, rows = 0;
        float *logits;
        for (int64_t i = 0; i < n; i++)
            if (graphs_of(g, &part[i]) == k) {
                g->group[count++] = part[i];
                rows += part[i].n;
            }
        if (count && (run_parts(g, g->group, count, rows, &logits, e) ||
                      join_logits(g, part, k, n, logits, e)))
            return e->code;
    }
    g->logits = g->joined;
    return LM_OK;
}

lm_code lm_paged_step(lm_paged *g, const lm_paged_part *part, int64_t n, const float **logits,
                      lm_err *e)
{
    int64_t rows, same = 1;
    if (check_parts(g, part, n, &rows, e))
        return e->code;
    while (same < n && graphs_of(g, &part[same]) == graphs_of(g, part))
        same++;
    if (g->b->sync(g->b, g->b->main, e) || /* it has read the inputs of the last step */
        (same == n ? run_parts(g, part, n, rows, &g->logits, e) : run_groups(g, part, n, e)))
        return e->code;
    g->n_parts = n;
    if (logits)
        *logits = g->logits;
    return LM_OK;
}

lm_code lm_paged_copy_tail(lm_paged *g, int64_t from, int64_t to, lm_err *e)
{
    const lm_model *m = paged_model(g);
    for (int i = 0; i < m->n_caches; i++) {
        size_t n = piece_bytes(m, i);
        char *x = g->pages + g->at[i];
        if (!m->cache[i].paged &&
            g->b->copy(g->b, x + (size_t)to * n, x + (size_t)from * n, n, g->b->main, e))
            return e->code;
    }
    return LM_OK;
}

int lm_paged_pieces(const lm_paged *g, int64_t at, struct iovec *out)
{
    const lm_model *m = paged_model(g);
    int n = 0;
    for (int i = 0; i < m->n_caches; i++) {
        size_t bytes = piece_bytes(m, i);
        if (m->cache[i].paged && out)
            out[n] = (struct iovec){ g->pages + g->at[i] + (size_t)at * bytes, bytes };
        n += m->cache[i].paged;
    }
    return n;
}

bool lm_paged_coded(const lm_paged *g)
{
    const lm_model *m = paged_model(g);
    for (int64_t l = 0; l < m->config.layers; l++)
        if (lm_b_coded(&m->build, l))
            return true;
    return false;
}

int64_t lm_paged_lag(const lm_paged *g)
{
    int64_t most = 0;
    for (int64_t i = 0; g->o.kv && i < 2 * g->o.kv->layers; i++) {
        const lm_kv_side *s = &g->o.kv->side[i];
        if (s->format && s->residual > most)
            most = s->residual;
    }
    return most;
}

lm_code lm_paged_outlook(const lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                         size_t *bytes, lm_err *e)
{
    const int64_t rows = o->rows > FEWEST ? o->rows : FEWEST,
                  sequences = o->sequences > FEWEST ? o->sequences : FEWEST;
    lm_model *m = NULL;
    lm_plan plan = { 0 };
    if (check_opts(w, o, e) || build_model(w, dtype, o, sequences, rows, b, &m, e))
        return e->code;
    if (!lm_plan_make(m->graph, b, &m->logits, 1, &plan, e))
        *bytes = plan.bytes + sum_of_pieces(m, true) * (size_t)o->pages +
                 sum_of_pieces(m, false) * (size_t)m->build.slots;
    lm_plan_fini(&plan);
    lm_model_free(m);
    return e->code;
}

lm_backend *lm_paged_backend(const lm_paged *g)
{
    return g->b;
}

lm_page_code *lm_paged_code(const lm_paged *g)
{
    return g->code;
}

const lm_paged_opts *lm_paged_options(const lm_paged *g)
{
    return &g->o;
}

int64_t lm_paged_vocab(const lm_paged *g)
{
    return paged_model(g)->config.vocab;
}

size_t lm_paged_page_bytes(const lm_paged *g)
{
    return sum_of_pieces(paged_model(g), true);
}

size_t lm_paged_tail_bytes(const lm_paged *g)
{
    return sum_of_pieces(paged_model(g), false);
}

size_t lm_paged_bytes(const lm_paged *g)
{
    return g->bytes;
}

size_t lm_paged_arena(const lm_paged *g)
{
    size_t sum = 0;
    for (int64_t k = 0; k < g->n_models; k++)
        for (int i = 0; i < g->n_buckets; i++)
            sum += lm_exec_bytes(g->of[k]->bucket[i].x);
    return sum;
}
