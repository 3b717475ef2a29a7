/* SPDX-License-Identifier: Apache-2.0 */
/* generate_policy.c -- the tokens that the caches of a generator keep: room, selection after a prompt, and the rows
 * that new tokens replace. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "model/cache_about.h"
#include "model/generate_keep.h"
#include "numeric/code_rows.h"

static const char where[] = "kv cache";

/* ---- room ---- */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Tokens of a prompt of n that a layer keeps.  Layers with a window are not counted, nor limited. */
static int64_t budget_of(const generator_keep *k, int64_t layer, int64_t n)
{
    return lm_kv_policy_budget(k->p, n, k->layer[layer].number, k->limited);
}

/* Tokens of a head after a prompt of n and its new tokens. */
static int64_t most_rows(const generator_keep *k, int64_t layer, int64_t n)
{
    int64_t budget = budget_of(k, layer, n);
    return least(lm_kv_policy_most(k->p, n, budget), budget + least(k->most_new, k->context - n));
}

static int64_t room_of(const generator_keep *k, int64_t layer)
{
    int64_t room = 1;
    for (int64_t n = 1; n <= k->context; n++) {
        int64_t rows = most_rows(k, layer, n);
        room = rows > room ? rows : room;
    }
    return room + lm_kv_policy_replaces(
                      k->p); /* a row for the new token beside the one that it replaces */
}

/* A policy drops tokens of the layer: it has no window, and no state instead of tokens. */
static bool drops(const lm_layer *y)
{
    return !y->window && !lm_layer_has_state(y);
}

/* The first layer of which tokens are dropped: ranked ones are the same in all of these. */
static const kept_layer *first_kept(const generator_keep *k)
{
    int64_t l = 0;
    while (!k->rows[l])
        l++;
    return &k->layer[l];
}

lm_code generator_keep_new(const lm_generator_opts *o, const lm_config *c, generator_keep **out,
                           lm_err *e)
{
    generator_keep *k;
    *out = NULL;
    if (!o->kv || !o->kv->policy)
        return LM_OK;
    const lm_kv_policy *p = o->kv->policy;
    if (p->ranked && o->context > c->max_positions && p->sinks + p->window >= c->max_positions)
        return lm_fail(e, LM_EUSAGE, o->kv->text, "choose a smaller window",
                       "%" PRId64 " tokens stay, and the model has %" PRId64 " positions",
                       p->sinks + p->window, c->max_positions);
    if (lm_alloc_n(&k, 1, sizeof *k, "a policy", e))
        return e->code;
    *out = k;
    *k = (generator_keep){ .p = o->kv->policy,
                           .layers = c->layers,
                           .batch = o->batch,
                           .context = o->context,
                           .most_new = o->most_new > 0 ? o->most_new : o->context };
    size_t layers = (size_t)c->layers, slots = (size_t)o->batch;
    if (lm_alloc_n(&k->rows, layers, sizeof *k->rows, "layers of a policy", e) ||
        lm_alloc_n(&k->layer, layers, sizeof *k->layer, "layers of a policy", e) ||
        lm_alloc_n(&k->n, slots, sizeof *k->n, "slots", e) ||
        lm_alloc_n(&k->pending, slots, sizeof *k->pending, "slots", e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++) {
        k->layer[l].number = k->limited;
        k->limited += drops(&c->layer[l]);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        k->rows[l] = drops(&c->layer[l]) ? room_of(k, l) : 0;
        k->layer[l].heads = lm_cache_shape_of(&c->layer[l]).kv_heads;
        if (k->layer[l].heads > k->most_heads)
            k->most_heads = k->layer[l].heads;
    }
    return LM_OK;
}

const int64_t *generator_kept(const generator_keep *k)
{
    return k ? k->rows : NULL;
}

size_t generator_keep_bytes(const generator_keep *k)
{
    return k ? k->cache_bytes : 0;
}

size_t generator_keep_scratch(const generator_keep *k)
{
    const keep_encoder *c = &k->encode;
    return k->mass.bytes + k->prompt.bytes + c->numbers.bytes + c->weight.bytes + c->row_bytes +
           c->work_bytes;
}

int64_t lm_generator_kept(const lm_generator *g, size_t *bytes)
{
    int64_t most = 0;
    for (int64_t l = 0; g->keep && l < g->keep->layers; l++)
        most = g->keep->rows[l] > most ? g->keep->rows[l] : most;
    *bytes = generator_keep_bytes(g->keep);
    return most;
}

/* ---- allocation ---- */

static lm_code open_layer(lm_generator *g, int64_t l, size_t *mass, size_t *prompt, lm_err *e)
{
    generator_keep *k = g->keep;
    kept_layer *y = &k->layer[l];
    const lm_build *b = &generator_model(g)->build;
    if (!k->rows[l])
        return LM_OK;
    y->room = lm_b_kept_pages(b, l) * b->kv->page;
    size_t slots = (size_t)k->batch, heads = (size_t)y->heads;
    y->mass = generator_share(mass, slots * heads * (size_t)(y->room + 1), sizeof(float));
    y->prompt = generator_share(prompt, heads * (size_t)k->context, sizeof(float));
    return lm_alloc_n(&y->used, slots, sizeof *y->used, "slots", e) ||
                   lm_alloc_n(&y->at, slots * heads * (size_t)y->room, sizeof *y->at, "positions",
                              e) ||
                   lm_alloc_n(&y->last, slots * heads, sizeof *y->last, "rows", e)
               ? e->code
               : LM_OK;
}

lm_code generator_keep_count(lm_generator *g, lm_err *e)
{
    generator_keep *k = g->keep;
    const lm_model *m = g->prefill[0].m;
    if (lm_alloc_n(&k->cache_at, (size_t)m->n_caches, sizeof *k->cache_at, "caches", e))
        return e->code;
    for (int i = 0; i < m->n_caches && k->p->kind != LM_KV_STAY; i++)
        if (k->rows[m->cache[i].layer])
            k->cache_at[i] = generator_share(
                &k->cache_bytes, lm_stored_bytes(&m->graph->value[m->cache[i].value].t), 1);
    return LM_OK;
}

lm_code generator_keep_open(lm_generator *g, lm_err *e)
{
    generator_keep *k = g->keep;
    size_t mass = 0, prompt = 0, n = (size_t)k->context;
    for (int64_t l = 0; l < k->layers; l++)
        if (open_layer(g, l, &mass, &prompt, e))
            return e->code;
    bool masses = k->p->kind == LM_KV_H2O || k->p->kind == LM_KV_RANDOM;
    if ((k->cache_bytes &&
         g->b->alloc(g->b, k->cache_bytes, "the cache of prompts", (void **)&k->cache, e)) ||
        (masses && mass && lm_mirror_new(g->b, mass, "masses", &k->mass, e)) ||
        (lm_kv_policy_weighs(k->p) && prompt &&
         lm_mirror_new(g->b, prompt, "masses of a prompt", &k->prompt, e)) ||
        lm_mirror_new(g->b, sizeof(int32_t), "a position", &k->from, e) ||
        lm_alloc_n(&k->keep, n, sizeof *k->keep, "tokens", e) ||
        lm_alloc_n(&k->work, 2 * n, sizeof *k->work, "tokens", e) ||
        lm_alloc_n(&k->random, n, sizeof *k->random, "tokens", e))
        return e->code;
    return generator_encode_open(g, e);
}

void generator_keep_free(lm_generator *g)
{
    generator_keep *k = g->keep;
    if (!k)
        return;
    generator_encode_close(g);
    for (int64_t l = 0; k->layer && l < k->layers; l++) {
        lm_free(k->layer[l].used);
        lm_free(k->layer[l].at);
        lm_free(k->layer[l].last);
    }
    if (k->cache)
        g->b->free(g->b, k->cache, k->cache_bytes);
    lm_mirror_fini(&k->mass);
    lm_mirror_fini(&k->prompt);
    lm_mirror_fini(&k->from);
    lm_free(k->cache_at);
    lm_free(k->keep);
    lm_free(k->work);
    lm_free(k->random);
    lm_free(k->layer);
    lm_free(k->rows);
    lm_free(k->n);
    lm_free(k->pending);
    lm_free(k);
    g->keep = NULL;
}

/* ---- graphs ---- */

lm_code generator_keep_inputs(const lm_generator *g, lm_model *m, lm_exec *x, keep_inputs *out,
                              lm_err *e)
{
    const generator_keep *k = g->keep;
    int64_t rows = m->build.batch;
    size_t bytes = 0;
    if (lm_alloc_n(&out->used, (size_t)k->layers, sizeof *out->used, "inputs", e) ||
        lm_alloc_n(&out->row, (size_t)k->layers, sizeof *out->row, "inputs", e))
        return e->code;
    for (int64_t l = 0; l < k->layers; l++) {
        generator_share(&bytes, (size_t)rows, sizeof(int32_t));
        generator_share(&bytes, (size_t)(rows * k->layer[l].heads), sizeof(int32_t));
    }
    out->n_ranks = m->ranks >= 0 ? m->graph->value[m->ranks].t.dim[1] : 0;
    size_t ranks = generator_share(&bytes, (size_t)(rows * out->n_ranks), sizeof(int32_t));
    if (lm_mirror_new(g->b, bytes, "rows of caches", &out->inputs, e))
        return e->code;
    if (out->n_ranks) {
        out->ranks = generator_room(out->inputs.host, ranks);
        lm_exec_bind(x, m->ranks, generator_room(out->inputs.dev, ranks));
    }
    bytes = 0;
    for (int64_t l = 0; l < k->layers; l++) {
        const lm_kept_layer *y = &m->kept[l];
        size_t used = generator_share(&bytes, (size_t)rows, sizeof(int32_t));
        size_t row = generator_share(&bytes, (size_t)(rows * k->layer[l].heads), sizeof(int32_t));
        out->used[l] = generator_room(out->inputs.host, used);
        out->row[l] = generator_room(out->inputs.host, row);
        if (y->used >= 0) {
            lm_exec_bind(x, y->used, generator_room(out->inputs.dev, used));
            lm_exec_bind(x, y->table, g->numbers.dev);
        }
        if (y->row >= 0)
            lm_exec_bind(x, y->row, generator_room(out->inputs.dev, row));
        if (y->mass >= 0)
            lm_exec_bind(x, y->mass, generator_room(k->mass.dev, k->layer[l].mass));
    }
    return LM_OK;
}

void generator_keep_inputs_fini(keep_inputs *in)
{
    lm_mirror_fini(&in->inputs);
    lm_free(in->used);
    lm_free(in->row);
}

void generator_keep_bind(const lm_generator *g, lm_model *m, lm_exec *x, int64_t slot)
{
    const generator_keep *k = g->keep;
    for (int i = 0; i < m->n_caches; i++) {
        const lm_cache_state *c = &m->cache[i];
        const slot_cache *y = &g->caches[lm_model_cache(generator_model(g), c->layer, c->kind)];
        lm_exec_bind(x, c->value,
                     k->rows[c->layer] ? k->cache + k->cache_at[i]
                                       : g->cache + y->at + (size_t)slot * y->slot_bytes);
    }
    for (int64_t l = 0; l < k->layers; l++) {
        if (m->kept[l].mass >= 0)
            lm_exec_bind(x, m->kept[l].mass, generator_room(k->prompt.dev, k->layer[l].prompt));
        if (m->kept[l].table >= 0)
            lm_exec_bind(x, m->kept[l].table, g->numbers.dev);
    }
    if (m->from >= 0)
        lm_exec_bind(x, m->from, k->from.dev);
}

/* ---- prompts ---- */

lm_code generator_keep_begin(lm_generator *g, int64_t slot, int64_t n, lm_err *e)
{
    generator_keep *k = g->keep;
    bool newest = k->p->kind == LM_KV_SNAPKV && n > k->p->window;
    if (k->p->kind == LM_KV_STAY)
        return lm_fail(e, LM_EUSAGE, where, "continue a saved cache",
                       "it has no place for a prompt of its own");
    k->n[slot] = n;
    k->dropped = 0;
    k->pending[slot] = false;
    if (!k->prompt.bytes)
        return LM_OK;
    if (generator_wait_for_last(g, e))
        return e->code;
    memset(k->prompt.host, 0, k->prompt.bytes);
    *(int32_t *)k->from.host = newest ? (int32_t)(n - k->p->window) : 0;
    return lm_mirror_push(&k->prompt, k->prompt.bytes, NULL, e) ||
                   lm_mirror_push(&k->from, k->from.bytes, NULL, e)
               ? e->code
               : LM_OK;
}

int64_t generator_keep_dropped(const generator_keep *k)
{
    return k->dropped;
}

/* Rows [from, to) of each head of the cache of prompts to rows at and on. */
static lm_code move_rows(lm_generator *g, int64_t from, int64_t to, int64_t at, lm_err *e)
{
    const lm_model *m = g->prefill[0].m;
    for (int i = 0; i < m->n_caches; i++) {
        const lm_tensor *t = &m->graph->value[m->cache[i].value].t;
        size_t row = lm_plain_bytes(t->dtype, t->dim[3]);
        if (!g->keep->rows[m->cache[i].layer])
            continue;
        for (int64_t h = 0; h < t->dim[1]; h++) {
            char *head = g->keep->cache + g->keep->cache_at[i] + (size_t)(h * t->dim[2]) * row;
            if (g->b->copy(g->b, head + (size_t)at * row, head + (size_t)from * row,
                           (size_t)(to - from) * row, g->b->main, e))
                return e->code;
        }
    }
    return LM_OK;
}

lm_code generator_keep_room(lm_generator *g, int64_t slot, int64_t *rows, lm_err *e)
{
    generator_keep *k = g->keep;
    int64_t held = g->used[slot] - k->dropped, first = k->p->sinks, last = k->p->window;
    if (k->p->ranked && held == g->positions) {
        /* in pieces that do not overlap */
        int64_t drop = held - first - last;
        for (int64_t at = first; at < first + last; at += drop) {
            int64_t n = least(drop, first + last - at);
            if (move_rows(g, at + drop, at + drop + n, at, e))
                return e->code;
        }
        k->dropped += drop;
        held -= drop;
    }
    *rows = least(*rows, g->positions - held);
    return LM_OK;
}

int64_t generator_keep_rank(const lm_generator *g, int64_t slot)
{
    const generator_keep *k = g->keep;
    return k->p->ranked ? first_kept(k)->used[slot] : g->used[slot];
}

float *generator_prompt_mass(const generator_keep *k, int64_t layer, int64_t head)
{
    return (float *)generator_room(k->prompt.host, k->layer[layer].prompt) + head * k->context;
}

float *generator_kept_mass(const generator_keep *k, int64_t layer, int64_t slot, int64_t head)
{
    const kept_layer *y = &k->layer[layer];
    return (float *)generator_room(k->mass.host, y->mass) +
           (slot * y->heads + head) * (y->room + 1);
}

int32_t *generator_kept_positions(const kept_layer *y, int64_t slot, int64_t head)
{
    return y->at + (slot * y->heads + head) * y->room;
}

/* The tokens that a head keeps: their positions and masses. */
static void select_head(generator_keep *k, int64_t layer, int64_t slot, int64_t head,
                        int64_t budget)
{
    kept_layer *y = &k->layer[layer];
    int64_t n = k->n[slot], i = 0;
    int32_t *at = generator_kept_positions(y, slot, head);
    const float *mass = NULL;
    if (k->p->kind == LM_KV_RANDOM) {
        lm_kv_random_masses(k->p->seed, layer, head, 0, n, k->random);
        mass = k->random;
    } else if (lm_kv_policy_weighs(k->p)) {
        mass = generator_prompt_mass(k, layer, head);
    }
    lm_kv_policy_select(k->p, budget, n, mass, k->keep, k->work);
    for (int64_t j = 0; j < n; j++)
        if (k->keep[j])
            at[i++] = (int32_t)j;
    if (!k->mass.bytes)
        return;
    float *to = generator_kept_mass(k, layer, slot, head);
    memset(to, 0, (size_t)(y->room + 1) * sizeof *to);
    for (i = 0; i < budget; i++)
        to[i] = mass[at[i]];
}

lm_code generator_keep_prompt(lm_generator *g, int64_t slot, lm_err *e)
{
    generator_keep *k = g->keep;
    if ((k->prompt.bytes && lm_mirror_pull(&k->prompt, k->prompt.bytes, NULL, e)) ||
        generator_wait_for_last(g, e))
        return e->code;
    for (int64_t l = 0; l < k->layers; l++) {
        if (!k->rows[l])
            continue;
        int64_t budget = budget_of(k, l, k->n[slot]);
        if (k->p->kind == LM_KV_MERGE) {
            if (generator_encode_merged(g, slot, l, &budget, e))
                return e->code;
        } else {
            for (int64_t h = 0; h < k->layer[l].heads; h++)
                select_head(k, l, slot, h, budget);
            if (generator_encode_rows(g, slot, l, budget, e))
                return e->code;
        }
        k->layer[l].used[slot] = budget;
    }
    return k->mass.bytes ? lm_mirror_push(&k->mass, k->mass.bytes, NULL, e) : LM_OK;
}

/* ---- steps ---- */

/* The token of the last step takes the place that was chosen for it; its mass came behind those of all rows. */
static void place_last_token(generator_keep *k, int64_t layer, int64_t slot, int64_t position)
{
    kept_layer *y = &k->layer[layer];
    int64_t used = y->used[slot], next = used;
    for (int64_t h = 0; h < y->heads; h++) {
        int64_t row = y->last[slot * y->heads + h];
        generator_kept_positions(y, slot, h)[row] = (int32_t)position;
        next = row == used ? used + 1 : used;
        if (!k->mass.bytes)
            continue;
        float *mass = generator_kept_mass(k, layer, slot, h), fresh = mass[used];
        if (k->p->kind == LM_KV_RANDOM)
            lm_kv_random_masses(k->p->seed, layer, h, position, 1, &fresh);
        mass[used] = 0;
        mass[row] = fresh;
    }
    y->used[slot] = next;
}

/* Choose the rows of the new token at `position`. */
static lm_code choose_rows(generator_keep *k, int64_t layer, int64_t slot, int64_t position,
                           int32_t *used, int32_t *row, lm_err *e)
{
    kept_layer *y = &k->layer[layer];
    int64_t n = k->n[slot], rows = y->used[slot];
    int64_t most = lm_kv_policy_most(k->p, n, budget_of(k, layer, n));
    if (rows < most && rows >= y->room)
        return lm_fail(e, LM_EUSAGE, where, "allow more new tokens",
                       "%" PRId64 " tokens are the capacity of layer %" PRId64, y->room, layer);
    *used = (int32_t)rows;
    for (int64_t h = 0; h < y->heads; h++) {
        int64_t at = rows;
        if (rows >= most)
            at = lm_kv_policy_evict(k->p, n, position, rows, generator_kept_positions(y, slot, h),
                                    k->mass.bytes ? generator_kept_mass(k, layer, slot, h) : NULL);
        if (at < 0)
            return lm_fail(e, LM_EFORMAT, where, NULL, "layer %" PRId64 " has no row to replace",
                           layer); /* only in a saved cache that is not what the policy leaves */
        row[h] = y->last[slot * y->heads + h] = (int32_t)at;
    }
    return LM_OK;
}

/* The rank of each row of a slot: the first tokens, and as many as follow up to the newest. */
static void write_ranks(const lm_generator *g, int64_t slot, int32_t *rank)
{
    const generator_keep *k = g->keep;
    int64_t rows = first_kept(k)->used[slot], gone = g->used[slot] - rows;
    const int32_t *at = generator_kept_positions(first_kept(k), slot, 0);
    for (int64_t i = 0; i < rows; i++)
        rank[i] = (int32_t)(at[i] < k->p->sinks ? at[i] : at[i] - gone);
}

static lm_code step_slot(lm_generator *g, keep_inputs *in, int64_t slot, bool on, lm_err *e)
{
    generator_keep *k = g->keep;
    int64_t position = g->used[slot];
    for (int64_t l = 0; l < k->layers; l++) {
        int32_t *row = in->row[l] + slot * k->layer[l].heads;
        if (!k->rows[l])
            continue;
        in->used[l][slot] = 0;
        memset(row, 0, (size_t)k->layer[l].heads * sizeof *row);
        if (on && k->pending[slot])
            place_last_token(k, l, slot, position - 1);
        if (on && choose_rows(k, l, slot, position, &in->used[l][slot], row, e))
            return e->code;
    }
    if (on && in->ranks)
        write_ranks(g, slot, in->ranks + slot * in->n_ranks);
    if (on)
        k->pending[slot] = true;
    return LM_OK;
}

lm_code generator_keep_step(lm_generator *g, keep_inputs *in, const int32_t *next, int64_t rows,
                            lm_err *e)
{
    generator_keep *k = g->keep;
    bool moved = k->p->kind == LM_KV_H2O; /* masses that the backend adds up */
    if (moved && k->mass.dev != k->mass.host &&
        (lm_mirror_pull(&k->mass, k->mass.bytes, NULL, e) || generator_wait_for_last(g, e)))
        return e->code;
    for (int64_t i = 0; i < rows; i++)
        if (step_slot(g, in, i, next[i] >= 0, e))
            return e->code;
    return moved ? lm_mirror_push(&k->mass, k->mass.bytes, NULL, e) : LM_OK;
}

lm_code generator_keep_finish(lm_generator *g, int64_t slot, lm_err *e)
{
    generator_keep *k = g->keep;
    bool moved = k->p->kind == LM_KV_H2O;
    if (moved && k->mass.dev != k->mass.host && lm_mirror_pull(&k->mass, k->mass.bytes, NULL, e))
        return e->code;
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int64_t l = 0; l < k->layers && k->pending[slot]; l++)
        if (k->rows[l])
            place_last_token(k, l, slot, g->used[slot] - 1);
    k->pending[slot] = false;
    return moved ? lm_mirror_push(&k->mass, k->mass.bytes, NULL, e) : LM_OK;
}

/* ---- slots ---- */

lm_code generator_keep_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    generator_keep *k = g->keep;
    if (k->p->kind == LM_KV_H2O && k->mass.dev != k->mass.host &&
        (lm_mirror_pull(&k->mass, k->mass.bytes, NULL, e) || generator_wait_for_last(g, e)))
        return e->code;
    for (int64_t l = 0; l < k->layers; l++) {
        kept_layer *y = &k->layer[l];
        if (!k->rows[l])
            continue;
        y->used[to] = y->used[from];
        memcpy(y->last + to * y->heads, y->last + from * y->heads,
               (size_t)y->heads * sizeof *y->last);
        for (int64_t h = 0; h < y->heads; h++) {
            memcpy(generator_kept_positions(y, to, h), generator_kept_positions(y, from, h),
                   (size_t)y->room * sizeof *y->at);
            if (k->mass.bytes)
                memcpy(generator_kept_mass(k, l, to, h), generator_kept_mass(k, l, from, h),
                       (size_t)(y->room + 1) * sizeof(float));
        }
    }
    k->n[to] = k->n[from];
    k->pending[to] = k->pending[from];
    return k->p->kind == LM_KV_H2O ? lm_mirror_push(&k->mass, k->mass.bytes, NULL, e) : LM_OK;
}

int64_t generator_keep_prompt_tokens(const lm_generator *g, int64_t slot)
{
    return g->keep->n[slot];
}

int64_t generator_keep_used(const lm_generator *g, int64_t slot, int64_t layer)
{
    const generator_keep *k = g->keep;
    const kept_layer *y = &k->layer[layer];
    if (!k->rows[layer])
        return g->used[slot];
    return y->used[slot] + (k->pending[slot] && y->last[slot * y->heads] == y->used[slot]);
}

const int32_t *generator_keep_positions(const lm_generator *g, int64_t slot, int64_t layer,
                                        int64_t head, int64_t *n)
{
    *n = g->keep->layer[layer].used[slot];
    return generator_kept_positions(&g->keep->layer[layer], slot, head);
}
