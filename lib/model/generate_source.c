/* SPDX-License-Identifier: Apache-2.0 */
/* generate_source.c -- sources of a generator with an encoder: what the decoder reads of them, slot by slot.
 *
 * A source runs once, through a graph as long as it or longer, whose keys and values for each layer of the decoder are then
 * copied to the slot.  Graphs of the decoder read them there, up to the length of the source. */
#include <inttypes.h>

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
    char *memory; /* layer by layer, slot by slot, context rows */
    size_t bytes, row_bytes, slot_bytes, layer_bytes;
    int64_t *length; /* of each slot's source */
    /* lm_model.cross_hi of the graphs of prompts, and of those that decode, which have a beginning of it */
    lm_mirror seen[CHUNKS + 1];
};

/* ---- life ---- */

static lm_code open_graph(lm_generator *g, const lm_loaded *w, lm_dtype dtype, int64_t rows,
                          lm_exec *share, encoder_graph *s, lm_err *e)
{
    const size_t ids = (size_t)rows * sizeof(int32_t), both = ids + sizeof(int32_t);
    size_t bytes = 0;
    lm_build build = { .mode = LM_MODE_EVAL,
                       .batch = 1,
                       .seq = 1,
                       .source = rows,
                       .encode = true,
                       .precision = { .low = dtype },
                       .backend = g->b };
    lm_loaded_build(w, &build);
    if (lm_model_build(&w->config, &build, &s->m, e) ||
        lm_exec_new_sharing(s->m->graph, g->b, s->m->memory, (int)w->config.layers, share, &s->x,
                            e))
        return e->code;
    size_t at[3] = { generator_share(&bytes, 1, ids), generator_share(&bytes, 1, ids),
                     generator_share(&bytes, 1, both) };
    if (lm_mirror_new(g->b, bytes, "a source", &s->inputs, e))
        return e->code;
    if (lm_rotary_new(s->m, g->b, &s->constants, e))
        return e->code;
    s->ids = generator_room(s->inputs.host, at[0]);
    s->hi = generator_room(s->inputs.host, at[1]);
    lm_exec_bind(s->x, s->m->source, generator_room(s->inputs.dev, at[0]));
    lm_exec_bind(s->x, s->m->source_hi, generator_room(s->inputs.dev, at[1]));
    lm_exec_bind(s->x, s->m->cross_hi, generator_room(s->inputs.dev, at[2]));
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

static lm_code make_seen(lm_generator *g, lm_err *e)
{
    for (int i = 0; i <= CHUNKS; i++) {
        const lm_model *m = i < CHUNKS ? g->prefill[i].m : generator_model(g);
        size_t n = (size_t)(m->build.batch * (m->build.source + m->build.seq));
        if (lm_mirror_new(g->b, n * sizeof(int32_t), "a batch", &g->source->seen[i], e))
            return e->code;
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
        open_graphs(g, w, dtype, e) || make_seen(g, e))
        return e->code;
    const lm_tensor *t = &s->graph[0].m->graph->value[s->graph[0].m->memory[0]].t;
    s->row_bytes = lm_plain_bytes(t->dtype, t->dim[1]);
    if (!lm_mul_ok(s->row_bytes, (size_t)g->context, &s->slot_bytes) ||
        !lm_mul_ok(s->slot_bytes, (size_t)g->batch, &s->layer_bytes) ||
        !lm_mul_ok(s->layer_bytes, (size_t)c->layers, &s->bytes))
        return lm_fail(e, LM_ELIMIT, "sources", NULL, "their size cannot be counted");
    return g->b->alloc(g->b, s->bytes, "keys and values of sources", (void **)&s->memory, e);
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
    for (int i = 0; i <= CHUNKS; i++)
        lm_mirror_fini(&s->seen[i]);
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
    return s ? rows * (double)s->row_bytes * (double)generator_model(g)->config.layers : 0;
}

/* ---- what graphs read ---- */

void generator_source_bind(const lm_generator *g, const row_graph *r, int64_t slot)
{
    const generator_source *s = g->source;
    const lm_model *m = r->m;
    int i = 0;
    while (i < CHUNKS && r != &g->prefill[i])
        i++;
    for (int64_t l = 0; l < m->config.layers; l++)
        lm_exec_bind(r->x, m->memory[l],
                     s->memory + (size_t)l * s->layer_bytes + (size_t)slot * s->slot_bytes);
    lm_exec_bind(r->x, m->cross_hi, s->seen[i].dev);
}

/* Sequence k of a graph with n rows each sees so much of its source. */
static void set_seen(const lm_generator *g, lm_mirror *to, int64_t k, int64_t n, int64_t length)
{
    int32_t *hi = (int32_t *)to->host + k * (g->context + n);
    for (int64_t i = 0; i < g->context + n; i++)
        hi[i] = i < g->context ? 0 : (int32_t)length;
}

lm_code generator_source_prompt(lm_generator *g, const row_graph *r, int64_t slot, lm_err *e)
{
    const int i = (int)(r - g->prefill);
    lm_mirror *to = &g->source->seen[i];
    generator_source_bind(g, r, slot);
    set_seen(g, to, 0, r->m->build.seq, g->source->length[slot]);
    return lm_mirror_push(to, to->bytes, NULL, e);
}

/* The slot's source for steps of decoding. */
static lm_code set_length(lm_generator *g, int64_t slot, int64_t length, lm_err *e)
{
    lm_mirror *to = &g->source->seen[CHUNKS];
    g->source->length[slot] = length;
    set_seen(g, to, slot, 1, length);
    return lm_mirror_push(to, to->bytes, NULL, e);
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
        if (g->b->copy(g->b, s->memory + (size_t)l * s->layer_bytes + (size_t)slot * s->slot_bytes,
                       lm_exec_data(r->x, r->m->memory[l]), (size_t)rows * s->row_bytes, g->b->main,
                       e))
            return e->code;
    return set_length(g, slot, n, e);
}

lm_code generator_source_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    generator_source *s = g->source;
    for (int64_t l = 0; l < generator_model(g)->config.layers; l++) {
        char *at = s->memory + (size_t)l * s->layer_bytes;
        if (g->b->copy(g->b, at + (size_t)to * s->slot_bytes, at + (size_t)from * s->slot_bytes,
                       (size_t)s->length[from] * s->row_bytes, g->b->main, e))
            return e->code;
    }
    return set_length(g, to, s->length[from], e);
}
