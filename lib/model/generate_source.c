/* SPDX-License-Identifier: Apache-2.0 */
/* generate_source.c -- sources of a generator with an encoder: what the decoder reads of them, slot by slot.
 *
 * A source runs once, through a graph as long as it or longer, whose keys and values for each layer of the decoder are then
 * copied to the slot, head by head.  Graphs of the decoder read them there as a cache that does not grow. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/generate_impl.h"

enum { ENCODERS = 4 };

/* One that encodes a source of so many rows at most. */
typedef struct {
    lm_model *m;
    lm_exec *x;
    lm_mirror inputs;
    int32_t *ids, *hi;
    lm_rotary constants;
} encoder_graph;

struct generator_source {
    encoder_graph graph[ENCODERS]; /* the longest first, whose arena the others share */
    int n;
    char *memory; /* [layers][2][batch][heads][context][D]: keys, then values of a layer */
    int64_t heads;
    size_t bytes, row_bytes, head_bytes, slot_bytes, side_bytes; /* row_bytes: of a head */
    int64_t *length;                                             /* of each slot's source */
    lm_mirror seen; /* the same: lm_model.source_used */
};

/* ---- life ---- */

static lm_code open_graph(lm_generator *g, const lm_loaded *w, lm_dtype dtype, int64_t rows,
                          lm_exec *share, encoder_graph *s, lm_err *e)
{
    const size_t ids = (size_t)rows * sizeof(int32_t);
    size_t bytes = 0;
    lm_build build = { .mode = LM_MODE_EVAL,
                       .batch = 1,
                       .seq = 1,
                       .source = rows,
                       .encode = true,
                       .precision = { .low = dtype },
                       .backend = g->b };
    lm_loaded_build(w, &build);
    build.like = build.mesh ? generator_model(g) : NULL;
    if (lm_model_build(&w->config, &build, &s->m, e) ||
        lm_exec_new_sharing(s->m->graph, g->b, s->m->memory, (int)(2 * w->config.layers), share,
                            &s->x, e))
        return e->code;
    size_t at[2] = { generator_share(&bytes, 1, ids), generator_share(&bytes, 1, ids) };
    if (lm_mirror_new(g->b, bytes, "a source", &s->inputs, e))
        return e->code;
    if (lm_rotary_new(s->m, g->b, &s->constants, e))
        return e->code;
    s->ids = generator_room(s->inputs.host, at[0]);
    s->hi = generator_room(s->inputs.host, at[1]);
    lm_exec_bind(s->x, s->m->source, generator_room(s->inputs.dev, at[0]));
    lm_exec_bind(s->x, s->m->source_hi, generator_room(s->inputs.dev, at[1]));
    return LM_OK;
}

static lm_code open_graphs(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    static const int64_t rows[ENCODERS - 1] = { 1024, 256, 64 };
    generator_source *s = g->source;
    for (int i = 0; i < ENCODERS; i++) {
        int64_t n = i ? rows[i - 1] : g->context;
        if (i && n >= g->context)
            continue;
        if (open_graph(g, w, dtype, n, s->n ? s->graph[0].x : g->prefill[0].x, &s->graph[s->n], e))
            return e->code;
        s->n++;
    }
    return LM_OK;
}

lm_code generator_source_open(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    const lm_config *c = &w->config;
    generator_source *s = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "an encoder", e))
        return e->code;
    g->source = s;
    if (lm_alloc_n(&s->length, (size_t)g->batch, sizeof *s->length, "slots", e) ||
        open_graphs(g, w, dtype, e) ||
        lm_mirror_new(g->b, (size_t)g->batch * sizeof(int32_t), "a batch", &s->seen, e))
        return e->code;
    memset(s->seen.host, 0, s->seen.bytes); /* slots without a source see nothing */
    const lm_tensor *t = &s->graph[0].m->graph->value[s->graph[0].m->memory[0]].t;
    s->heads = t->dim[1];
    s->row_bytes = lm_plain_bytes(t->dtype, t->dim[3]);
    if (!lm_mul_ok(s->row_bytes, (size_t)g->context, &s->head_bytes) ||
        !lm_mul_ok(s->head_bytes, (size_t)s->heads, &s->slot_bytes) ||
        !lm_mul_ok(s->slot_bytes, (size_t)g->batch, &s->side_bytes) ||
        !lm_mul_ok(s->side_bytes, (size_t)(2 * c->layers), &s->bytes))
        return lm_fail(e, LM_ELIMIT, "sources", NULL, "their size cannot be counted");
    return g->b->alloc(g->b, s->bytes, "keys and values of sources", (void **)&s->memory, e) ||
                   lm_mirror_push(&s->seen, s->seen.bytes, NULL, e)
               ? e->code
               : LM_OK;
}

void generator_source_free(lm_generator *g)
{
    generator_source *s = g->source;
    if (!s)
        return;
    for (int i = ENCODERS - 1; i >= 0; i--) { /* one that did not open has parts too */
        lm_exec_free(s->graph[i].x);
        lm_model_free(s->graph[i].m);
        lm_mirror_fini(&s->graph[i].inputs);
        lm_rotary_fini(&s->graph[i].constants);
    }
    lm_mirror_fini(&s->seen);
    if (s->memory)
        g->b->free(g->b, s->memory, s->bytes);
    lm_free(s->length);
    lm_free(s);
    g->source = NULL;
}

void generator_source_bind_store(lm_generator *g, const lm_store *store)
{
    generator_source *s = g->source;
    for (int i = 0; i < s->n; i++) {
        lm_store_bind(store, s->graph[i].m, s->graph[i].x);
        lm_rotary_bind(&s->graph[i].constants, s->graph[i].m, s->graph[i].x);
    }
}

size_t generator_source_bytes(const lm_generator *g)
{
    return g->source ? g->source->bytes : 0;
}

double generator_source_bytes_read(const lm_generator *g)
{
    const generator_source *s = g->source;
    double rows = 0;
    for (int64_t i = 0; s && i < g->batch; i++)
        rows += (double)s->length[i];
    return s ? rows * (double)(s->row_bytes * (size_t)s->heads) *
                   (double)(2 * generator_model(g)->config.layers)
             : 0;
}

size_t generator_source_work_bytes(const lm_generator *g)
{
    size_t sum = 0;
    for (int i = 0; g->source && i < g->source->n; i++)
        sum += lm_exec_bytes(g->source->graph[i].x) + g->source->graph[i].inputs.bytes;
    return sum;
}

/* ---- what graphs read ---- */

/* Keys or values of a slot for a layer: side 0 or 1. */
static char *slot_memory(const generator_source *s, int64_t layer, int side, int64_t slot)
{
    return s->memory + (size_t)(2 * layer + side) * s->side_bytes + (size_t)slot * s->slot_bytes;
}

void generator_source_bind(const lm_generator *g, const row_graph *r, int64_t slot)
{
    const generator_source *s = g->source;
    const lm_model *m = r->m;
    for (int64_t l = 0; l < m->config.layers; l++)
        for (int side = 0; side < 2; side++)
            lm_exec_bind(r->x, m->memory[2 * l + side], slot_memory(s, l, side, slot));
    lm_exec_bind(r->x, m->source_used, (int32_t *)s->seen.dev + slot);
}

/* The slot sees so much of its memory. */
static lm_code set_length(lm_generator *g, int64_t slot, int64_t length, lm_err *e)
{
    generator_source *s = g->source;
    s->length[slot] = length;
    ((int32_t *)s->seen.host)[slot] = (int32_t)length;
    return lm_mirror_push(&s->seen, s->seen.bytes, NULL, e);
}

/* n rows of each head of `from`, `pitch` bytes apart, to a slot. */
static lm_code copy_heads(lm_generator *g, int64_t layer, int side, int64_t slot, const char *from,
                          size_t pitch, int64_t n, lm_err *e)
{
    const generator_source *s = g->source;
    char *to = slot_memory(s, layer, side, slot);
    for (int64_t h = 0; h < s->heads; h++)
        if (g->b->copy(g->b, to + (size_t)h * s->head_bytes, from + (size_t)h * pitch,
                       (size_t)n * s->row_bytes, g->b->main, e))
            return e->code;
    return LM_OK;
}

/* ---- sources ---- */

lm_code lm_generator_encode(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            lm_err *e)
{
    generator_source *s = g->source;
    const lm_step step = { 0 };
    if (!s)
        return lm_fail(e, LM_EUSAGE, "source", NULL, "the model has no encoder");
    if (n < 1 || n > g->context)
        return lm_fail(e, LM_EUSAGE, "prompt", "shorten it",
                       "%" PRId64 " token%s, the context holds %" PRId64, n, lm_plural(n),
                       g->context);
    encoder_graph *r = &s->graph[s->n - 1];
    while (r->m->build.source < n)
        r--;
    if (generator_wait_for_last(g, e))
        return e->code;
    const int64_t rows = r->m->build.source;
    for (int64_t i = 0; i < rows; i++) {
        r->ids[i] = i < n ? (int32_t)ids[i] : 0;
        r->hi[i] = (int32_t)n;
    }
    if (lm_mirror_push(&r->inputs, r->inputs.bytes, NULL, e) || lm_exec_run(r->x, &step, e))
        return e->code;
    for (int64_t l = 0; l < r->m->config.layers; l++)
        for (int side = 0; side < 2; side++)
            if (copy_heads(g, l, side, slot, lm_exec_data(r->x, r->m->memory[2 * l + side]),
                           (size_t)rows * s->row_bytes, n, e))
                return e->code;
    return set_length(g, slot, n, e);
}

lm_code generator_source_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    generator_source *s = g->source;
    for (int64_t l = 0; l < generator_model(g)->config.layers; l++)
        for (int side = 0; side < 2; side++)
            if (copy_heads(g, l, side, to, slot_memory(s, l, side, from), s->head_bytes,
                           s->length[from], e))
                return e->code;
    return set_length(g, to, s->length[from], e);
}
