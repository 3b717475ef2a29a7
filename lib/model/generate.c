/* SPDX-License-Identifier: Apache-2.0 */
/* generate.c -- a generator's graphs over shared caches, and prompts. */
#include "model/generate_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "kernels/linear.h"
#include "model/build.h"
#include "numeric/code_rows.h"
#include "op/attention_blocks.h"

static const int64_t chunk_rows[CHUNKS] = { LM_KV_CHUNK, 64, 8 };

static lm_code make_inputs(row_graph *s, lm_backend *backend, size_t n, size_t b, lm_err *e)
{
    enum { OWN = 5, INPUTS = OWN + LM_MOST_AHEAD };
    size_t bytes = 0, at[INPUTS];
    const size_t count[OWN] = { n, n, b, b, b };
    lm_vid value[INPUTS] = { s->m->tokens, s->m->pos, s->m->used, s->m->fresh, s->m->rows };
    int32_t **host[INPUTS] = { &s->tokens, &s->pos, &s->used, &s->fresh, &s->rows };
    for (; s->n_ahead < LM_MOST_AHEAD && s->m->ahead_tokens[s->n_ahead] >= 0; s->n_ahead++) {
        value[OWN + s->n_ahead] = s->m->ahead_tokens[s->n_ahead];
        host[OWN + s->n_ahead] = &s->ahead[s->n_ahead];
    }
    for (int i = 0; i < OWN + s->n_ahead; i++)
        at[i] = generator_share(&bytes, i < OWN ? count[i] : n, sizeof(int32_t));
    if (lm_mirror_new(backend, bytes, "a batch", &s->inputs, e))
        return e->code;
    for (int i = 0; i < OWN + s->n_ahead; i++) {
        *host[i] = generator_room(s->inputs.host, at[i]);
        if (value[i] >= 0)
            lm_exec_bind(s->x, value[i], generator_room(s->inputs.dev, at[i]));
    }
    return LM_OK;
}

lm_code generator_open_graph(lm_generator *g, const lm_loaded *w, lm_dtype dtype,
                             const graph_kind *k, row_graph *s, lm_err *e)
{
    lm_build build = { .mode = LM_MODE_GENERATE,
                       .batch = k->batch,
                       .seq = k->seq,
                       .cache = g->positions,
                       .source = w->config.encoder ? g->context : 0,
                       .precision = { .low = dtype },
                       .kv = g->formats.plan,
                       .state_codes = g->state_codes,
                       .kept = generator_kept(g->keep),
                       .whole = g->keep && k->prompt,
                       .ahead = k->ahead,
                       .module = k->module,
                       .all_rows = k->ahead == LM_AHEAD_RUNS && !k->prompt,
                       .backend = g->b };
    lm_vid read[LM_MODEL_READ];
    lm_loaded_build(w, &build);
    if (build.mesh && s != &g->prefill[0]) /* ranks have the parts of one graph */
        build.like = g->prefill[0].m;
    if (lm_model_build(&w->config, &build, &s->m, e))
        return e->code;
    const int n = lm_model_read(s->m, read);
    if (lm_exec_new_sharing(s->m->graph, g->b, read, n, k->share, &s->x, e))
        return e->code;
    return make_inputs(s, g->b, (size_t)(k->batch * k->seq), (size_t)k->batch, e);
}

void generator_close_graph(row_graph *s)
{
    lm_exec_free(s->x);
    lm_model_free(s->m);
    lm_mirror_fini(&s->inputs);
    generator_keep_inputs_fini(&s->keep);
}

/* Bind the caches from `slot` on to the graph. */
static void bind_caches(const lm_generator *g, const row_graph *s, int64_t slot)
{
    if (s->m->build.whole) {
        generator_keep_bind(g, s->m, s->x, slot);
        return;
    }
    for (int i = 0; i < s->m->n_caches; i++) {
        const slot_cache *y = &g->caches[i];
        lm_exec_bind(s->x, s->m->cache[i].value, g->cache + y->at + (size_t)slot * y->slot_bytes);
    }
}

static void bind_numbers(const lm_generator *g, const row_graph *s)
{
    if (s->m->table >= 0)
        lm_exec_bind(s->x, s->m->table, g->numbers.dev);
    if (s->m->slot >= 0)
        lm_exec_bind(s->x, s->m->slot, g->numbers.dev);
}

/* Detect a device too small for weights and caches by their sizes, before anything is loaded. */
static lm_code check_room(const lm_generator *g, bool loaded, lm_err *e)
{
    size_t left, all, weights = loaded ? 0 : lm_loaded_bytes(generator_model(g));
    size_t caches = lm_generator_cache_bytes(g), a_position = caches / (size_t)g->context;
    char w[32], c[32], l[32], t[32], todo[80] = "use a smaller model or another device";
    if (g->b->host_memory)
        return LM_OK;
    if (g->b->memory(g->b, &left, &all, e))
        return e->code;
    size_t usable = left - left / 64; /* kernels allocate code and stacks at their first run */
    if (weights < usable && caches <= usable - weights)
        return LM_OK;
    size_t for_caches = weights < usable ? (usable - weights) / 16 * 15 : 0; /* and a reserve */
    if (for_caches >= 64 * a_position)
        snprintf(todo, sizeof todo, "a context of %zu fits, or a smaller batch size",
                 for_caches / a_position / 64 * 64);
    return lm_fail(e, LM_ELIMIT, g->b->name, todo,
                   "weights take %s, caches of %" PRId64 " times %" PRId64
                   " token%s %s; %s of %s are free",
                   lm_show_bytes((double)weights, w), g->batch, g->context, lm_plural(g->context),
                   lm_show_bytes((double)caches, c), lm_show_bytes((double)left, l),
                   lm_show_bytes((double)all, t));
}

/* How the cache of a slot is divided: [B, heads, context, width], or beside codes [B P, heads, page, width] and tails
 * [B, heads, rows, width]. */
static slot_cache divide_cache(const lm_generator *g, const lm_cache_state *c, size_t bytes)
{
    const lm_tensor *t = &generator_model(g)->graph->value[c->value].t;
    slot_cache y = { .slot_bytes = bytes,
                     .heads = t->dim[1],
                     .pieces = 1,
                     .fixed = c->kind == LM_CACHE_STATE || c->kind == LM_CACHE_CONV_TAIL };
    if (c->paged && lm_b_coded(&generator_model(g)->build, c->layer)) {
        y.pieces = t->dim[0] / g->batch;
        y.page = t->dim[2];
    } else if (c->paged) {
        y.pieces = t->dim[1];
    }
    y.row_bytes = t->kv ? (double)lm_kv_page_bytes(t->kv, t->dim[2], t->dim[3]) / (double)t->dim[2]
                        : (double)lm_plain_bytes(t->dtype, t->dim[3]);
    y.piece_bytes = bytes / (size_t)y.pieces;
    return y;
}

/* Count the cache of all slots from *at on. */
static lm_code place_cache(const lm_generator *g, const lm_cache_state *c, slot_cache *y,
                           size_t *at, lm_err *e)
{
    size_t all = lm_stored_bytes(&generator_model(g)->graph->value[c->value].t);

    if (all == SIZE_MAX || *at > SIZE_MAX - all - 63)
        return lm_fail(e, LM_ELIMIT, "caches", NULL, "their size cannot be counted");
    *y = divide_cache(g, c, all / (size_t)g->batch);
    y->at = *at;
    *at += (all + 63) / 64 * 64;
    return LM_OK;
}

/* The table of slot b names pages b P to b P + P - 1, its tail is b: both are a beginning of 0, 1, 2, ...  A graph
 * is bound to the caches of its first slot, so that all graphs have the same tables. */
static lm_code make_numbers(lm_generator *g, lm_err *e)
{
    const lm_model *m = generator_model(g);
    int64_t n = m->table < 0 ? 0 : lm_tensor_count(&m->graph->value[m->table].t);
    for (int64_t l = 0; m->kept && l < m->config.layers; l++)
        if (lm_b_kept(&m->build, l) && g->batch * lm_b_kept_pages(&m->build, l) > n)
            n = g->batch * lm_b_kept_pages(&m->build, l);
    if (!n)
        return LM_OK;
    if (lm_mirror_new(g->b, (size_t)n * sizeof(int32_t), "tables of pages", &g->numbers, e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        ((int32_t *)g->numbers.host)[i] = (int32_t)i;
    return lm_mirror_push(&g->numbers, g->numbers.bytes, NULL, e);
}

static lm_code make_caches(lm_generator *g, bool loaded, lm_err *e)
{
    const lm_model *m = generator_model(g);
    if (lm_alloc_n(&g->caches, (size_t)m->n_caches, sizeof *g->caches, "caches", e))
        return e->code;
    for (int i = 0; i < m->n_caches; i++)
        if (place_cache(g, &m->cache[i], &g->caches[i], &g->cache_bytes, e))
            return e->code;
    if ((g->keep && generator_keep_count(g, e)) || check_room(g, loaded, e) ||
        g->b->alloc(g->b, g->cache_bytes, "key/value caches", (void **)&g->cache, e))
        return e->code;
    return make_numbers(g, e);
}

/* ---- life ---- */

/* The widest first: the others share its arena. */
static lm_code open_widths(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    int64_t width[MOST_WIDTHS];
    lm_exec *share = g->prefill[0].x;
    int n = generator_widths(g->batch, width);
    g->n_decode = n;
    for (int i = n - 1; i >= 0; i--) {
        decode_width *d = &g->decode[i];
        d->rows = width[i];
        const graph_kind k = { .batch = d->rows,
                               .seq = 1 + (g->draft ? g->draft->n : 0),
                               .ahead = g->draft ? LM_AHEAD_RUNS : LM_AHEAD_NONE,
                               .module = g->draft ? g->draft->modules - 1 : 0,
                               .share = share };
        if (generator_open_graph(g, w, dtype, &k, &d->s, e))
            return e->code;
        share = i == n - 1 ? d->s.x : share;
    }
    return LM_OK;
}

static lm_code open_all(lm_generator *g, lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    /* the largest arena first: the others share it */
    for (int i = 0; i < CHUNKS; i++) {
        int64_t rows = chunk_rows[i] < g->context ? chunk_rows[i] : g->context;
        const graph_kind k = { .batch = 1,
                               .seq = rows,
                               .prompt = true,
                               .ahead = g->draft ? LM_AHEAD_RUNS : LM_AHEAD_NONE,
                               .module = g->draft ? g->draft->modules - 1 : 0,
                               .share = i ? g->prefill[0].x : NULL };
        if (generator_open_graph(g, w, dtype, &k, &g->prefill[i], e))
            return e->code;
    }
    if (open_widths(g, w, dtype, e) || make_caches(g, w->store != NULL, e) ||
        (g->keep && generator_keep_open(g, e)) ||
        (w->config.encoder && generator_source_open(g, w, dtype, e)) ||
        (!w->store && lm_loaded_weights(w, generator_model(g), g->b, e)) ||
        lm_alloc_n(&g->used, (size_t)g->batch, sizeof *g->used, "slots", e) ||
        lm_rotary_new(generator_model(g), g->b, &g->rope, e) || generator_make_chooser(g, e))
        return e->code;
    if (g->source)
        generator_source_bind_store(g, w->store);
    for (int i = 0; i < CHUNKS + g->n_decode; i++) {
        const row_graph *s = i < CHUNKS ? &g->prefill[i] : &g->decode[i - CHUNKS].s;
        lm_store_bind(w->store, s->m, s->x);
        lm_rotary_bind(&g->rope, s->m, s->x);
        bind_numbers(g, s);
        if (i >= CHUNKS)
            bind_caches(g, s, 0);
        if (i >= CHUNKS && g->source)
            generator_source_bind(g, s, 0);
        if (i >= CHUNKS && g->keep &&
            generator_keep_inputs(g, s->m, s->x, &g->decode[i - CHUNKS].s.keep, e))
            return e->code;
    }
    return g->draft ? generator_draft_open(g, w, dtype, e) : LM_OK;
}

lm_code lm_generator_new(lm_loaded *w, const lm_generator_opts *o, lm_backend *b,
                         lm_generator **out, lm_err *e)
{
    lm_generator *g = NULL;
    *out = NULL;
    bool ranked = o->kv && o->kv->policy && o->kv->policy->ranked;
    if ((!ranked && lm_config_check_context(&w->config, o->context, e)) ||
        lm_alloc_n(&g, 1, sizeof *g, "a generator", e))
        return e->code;
    g->b = b;
    g->batch = o->batch;
    g->context = g->positions = o->context;
    g->kv = o->kv;
    g->state_codes = o->state_codes;
    if (ranked && g->positions > w->config.max_positions)
        g->positions = w->config.max_positions;
    if (lm_cache_formats_on(o->kv, &w->config, b, &g->formats, e) ||
        generator_keep_new(o, &w->config, &g->keep, e) ||
        (o->draft && generator_draft_new(g, w, o->draft, e)) || open_all(g, w, o->dtype, e)) {
        lm_generator_free(g);
        return e->code;
    }
    *out = g;
    return LM_OK;
}

void lm_generator_free(lm_generator *g)
{
    lm_err ignored = { 0 };
    if (!g)
        return;
    g->b->sync(g->b, g->b->main, &ignored); /* after a failure, work may still be queued */
    generator_forget_recordings(g);
    generator_draft_free(g);
    for (int i = 0; i < g->n_decode; i++) /* the widest, whose arena they share, last */
        generator_close_graph(&g->decode[i].s);
    generator_source_free(g);
    for (int i = CHUNKS - 1; i >= 0; i--)
        generator_close_graph(&g->prefill[i]);
    if (g->cache)
        g->b->free(g->b, g->cache, g->cache_bytes);
    generator_keep_free(g);
    generator_drop_chooser(g);
    lm_mirror_fini(&g->numbers);
    lm_free(g->caches);
    lm_free(g->used);
    lm_rotary_fini(&g->rope);
    lm_cache_formats_fini(&g->formats);
    lm_free(g);
}

/* ---- running ---- */

lm_code generator_wait_for_last(lm_generator *g, lm_err *e)
{
    return g->b->sync(g->b, g->b->main, e);
}

lm_code generator_put_graph(row_graph *s, lm_err *e)
{
    const lm_step step = { 0 };
    if (lm_mirror_push(&s->inputs, s->inputs.bytes, NULL, e) ||
        (s->keep.inputs.bytes && lm_mirror_push(&s->keep.inputs, s->keep.inputs.bytes, NULL, e)))
        return e->code;
    return lm_exec_run(s->x, &step, e);
}

/* The next rows of a prompt, `n` of them real and of `left`, through a graph of that size. */
static lm_code run_chunk(lm_generator *g, row_graph *s, int64_t slot, const uint32_t *ids,
                         int64_t n, int64_t left, lm_err *e)
{
    int32_t *seen = (int32_t *)g->choice.seen.host + slot * g->context + g->used[slot];
    int64_t row = g->used[slot] - (g->keep ? generator_keep_dropped(g->keep) : 0);
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int64_t i = 0; i < s->m->build.seq; i++) {
        s->tokens[i] = i < n ? (int32_t)ids[i] : 0;
        s->pos[i] = i < n ? (int32_t)(row + i) : 0;
        for (int k = 0; k < s->n_ahead; k++) /* those behind the end are not known */
            s->ahead[k][i] = i < n && i + k + 1 < left ? (int32_t)ids[i + k + 1] : 0;
    }
    for (int64_t i = 0; i < n; i++)
        seen[i] = (int32_t)ids[i];
    s->used[0] = (int32_t)row;
    s->fresh[0] = (int32_t)n;
    s->rows[0] = (int32_t)(n - 1);
    g->used[slot] += n;
    g->last = s;
    g->last_slot = slot;
    g->b->range(g->b, "prompt");
    lm_code rc = generator_put_graph(s, e);
    g->b->range(g->b, NULL);
    return rc || !g->draft ? rc : generator_draft_prompt(g, s, slot, n, left, e);
}

lm_code lm_generator_extend(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e)
{
    row_graph *s = NULL;
    if (n < 1 || n > g->context - g->used[slot])
        return lm_fail(e, LM_EUSAGE, "prompt", "shorten it",
                       "%" PRId64 " token%s, the context holds %" PRId64, g->used[slot] + n,
                       lm_plural(g->used[slot] + n), g->context);
    if (g->keep && g->used[slot])
        return lm_fail(e, LM_EUSAGE, "prompt", "give all of it at once",
                       "cannot be appended to caches that dropped tokens");
    if (g->keep && generator_keep_begin(g, slot, n, e))
        return e->code;
    for (int64_t at = 0, take; at < n; at += take) {
        int64_t begun = g->used[slot] % LM_KV_CHUNK, cut = LM_KV_CHUNK - begun;
        int i = CHUNKS - 1; /* the smallest that is enough for the rest, otherwise the largest */
        if (g->keep && generator_keep_room(g, slot, &cut, e))
            return e->code;
        take = n - at < cut ? n - at : cut;
        /* a part of a chunk as the whole chunk runs: products of few rows have other bits */
        while (i > 0 &&
               (g->prefill[i].m->build.seq < take ||
                (g->prefill[i].m->build.seq <= LM_GEMM_SMALL_M && begun + take > LM_GEMM_SMALL_M)))
            i--;
        s = &g->prefill[i];
        take = take < s->m->build.seq ? take : s->m->build.seq;
        bind_caches(g, s, slot);
        if (g->source)
            generator_source_bind(g, s, slot);
        if (run_chunk(g, s, slot, ids + at, take, n - at, e))
            return e->code;
    }
    if (g->keep && generator_keep_prompt(g, slot, e))
        return e->code;
    if (logits)
        *logits = lm_exec_data(s->x, s->m->logits);
    return LM_OK;
}

lm_code lm_generator_prompt(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e)
{
    g->used[slot] = g->choice.sent[slot] = 0;
    return lm_generator_extend(g, slot, ids, n, logits, e);
}

int64_t lm_generator_batch(const lm_generator *g)
{
    return g->batch;
}

int64_t lm_generator_context(const lm_generator *g)
{
    return g->context;
}

int64_t lm_generator_vocab(const lm_generator *g)
{
    return generator_model(g)->config.vocab;
}

int64_t lm_generator_used(const lm_generator *g, int64_t slot)
{
    return g->used[slot];
}

int64_t lm_generator_held(const lm_generator *g, int64_t slot, int64_t layer)
{
    return g->keep ? generator_keep_used(g, slot, layer) : g->used[slot];
}

/* Of a sequence of n tokens in cache i: the rows within the window of its layer; of a tail at most its own, of a state all. */
static double cache_bytes_read(const lm_generator *g, int i, int64_t n)
{
    const lm_model *m = generator_model(g);
    const lm_cache_state *c = &m->cache[i];
    int64_t window = m->config.layer[c->layer].window;
    int64_t most = c->paged ? n : m->graph->value[c->value].t.dim[2];
    const slot_cache *y = &g->caches[i];

    if (c->kind == LM_CACHE_STATE || c->kind == LM_CACHE_CONV_TAIL)
        return (double)y->slot_bytes;
    n = n < most ? n : most;
    const lm_layer *x = &m->config.layer[c->layer];
    if (x->blocks.size && n)
        return y->row_bytes * (double)y->heads * lm_attention_block_keys(&x->blocks, x->heads, n);
    return y->row_bytes * (double)y->heads * (double)(window > 0 && window < n ? window : n);
}

static bool is_read(const lm_graph *g, lm_vid v)
{
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_in; i++)
            if (g->node[k].in[i] == v)
                return true;
    return false;
}

double lm_generator_step_bytes(const lm_generator *g)
{
    const lm_model *m = generator_model(g);
    const lm_config *c = &m->config;
    double bytes = generator_source_bytes_read(g);
    for (int i = 0; i < m->n_params; i++) /* an encoder's do not belong to a step */
        if (is_read(m->graph, m->param[i].value))
            bytes += (double)lm_stored_bytes(&m->graph->value[m->param[i].value].t);
    /* tables of which only a few rows are read: an embedding that is not the head, and learned
     * positions */
    int64_t looked_up =
        (c->tied ? 0 : c->vocab) + (lm_config_has_positions(c) ? c->max_positions : 0);
    double whole = (double)lm_stored_bytes(&m->graph->value[m->param[0].value].t);
    bytes -= whole * (double)looked_up / (double)c->vocab;
    for (int k = 0; k < m->n_caches; k++)
        for (int64_t i = 0; i < g->batch; i++)
            bytes += cache_bytes_read(g, k, lm_generator_held(g, i, m->cache[k].layer));
    return bytes;
}

const char *lm_generator_unrecorded(const lm_generator *g)
{
    return g->refused.code ? g->refused.what : NULL;
}

const lm_recording *lm_generator_recorded(const lm_generator *g)
{
    return g->replayed;
}

size_t lm_generator_cache_bytes(const lm_generator *g)
{
    return g->cache_bytes + generator_keep_bytes(g->keep) + generator_source_bytes(g);
}

void lm_generator_plan(const lm_generator *g, lm_generator_memory *out)
{
    *out = (lm_generator_memory){ .caches = g->cache_bytes + generator_source_bytes(g),
                                  .prompts = generator_keep_bytes(g->keep),
                                  .activations = g->choice.work_bytes + generator_draft_bytes(g) +
                                                 generator_source_work_bytes(g),
                                  .policy = g->keep ? generator_keep_scratch(g->keep) : 0 };
    for (int i = 0; i < CHUNKS + g->n_decode; i++)
        out->activations += lm_exec_bytes(i < CHUNKS ? g->prefill[i].x : g->decode[i - CHUNKS].s.x);
}

double lm_generator_token_bytes(const lm_generator *g)
{
    double sum = 0;
    for (int i = 0; i < generator_model(g)->n_caches; i++)
        if (generator_model(g)->cache[i].paged)
            sum += g->caches[i].row_bytes * (double)g->caches[i].heads;
    return sum;
}

size_t lm_generator_tail_bytes(const lm_generator *g)
{
    size_t sum = 0;
    for (int i = 0; i < generator_model(g)->n_caches; i++)
        if (!generator_model(g)->cache[i].paged)
            sum += g->caches[i].slot_bytes;
    return sum;
}

lm_exec *lm_generator_exec(lm_generator *g)
{
    return g->decode[g->n_decode - 1].s.x;
}
