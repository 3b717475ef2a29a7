/* SPDX-License-Identifier: Apache-2.0 */
/* generate_source.c -- sources of a generator with an encoder: what the decoder reads of them, slot by slot.
 *
 * A source runs once, through a graph as long as it or longer, whose keys and values for each layer of the decoder are then
 * copied to the slot, head by head; where caches are coded the graph writes the slot's pages itself.  Graphs of the decoder
 * read them there as a cache that does not grow. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/build.h"
#include "model/generate_impl.h"
#include "numeric/code_rows.h"

enum { ENCODERS = 4 };

/* One that encodes a source of so many rows at most. */
typedef struct {
    lm_model *m;
    lm_exec *x;
    lm_mirror inputs;
    int32_t *ids, *hi, *used, *fresh; /* the last two: of pages; used is 0 */
    lm_rotary constants;
} encoder_graph;

/* A part of what a layer reads (lm_model.memory), of all slots.  The layer lacks this part if its bytes
 * are 0. */
typedef struct {
    size_t at, slot_bytes;
    double token_bytes; /* of all heads, of a tail 0 */
    bool coded;         /* written by the graph that encodes */
} source_part;

struct generator_source {
    encoder_graph graph[ENCODERS]; /* the longest first, whose arena the others share */
    int n;
    source_part *part; /* [layers][LM_MEMORY], in `memory` */
    char *memory;
    size_t bytes;
    int64_t *length; /* of each slot's source */
    lm_mirror seen;  /* the same: lm_model.source_used */
};

/* ---- life ---- */

static int64_t parts_of(const lm_model *m)
{
    return LM_MEMORY * m->config.layers;
}

/* Part i of the model's memory is kept between runs, not made by one. */
static bool is_state(const lm_model *m, int64_t i)
{
    return m->memory[i] >= 0 && m->graph->value[m->memory[i]].role == LM_ROLE_STATE;
}

static lm_code open_exec(lm_generator *g, encoder_graph *s, lm_exec *share, lm_err *e)
{
    lm_vid *made;
    int n;
    if (lm_model_memory_made(s->m, &made, &n, e))
        return e->code;
    lm_code rc = lm_exec_new_sharing(s->m->graph, g->b, made, n, share, &s->x, e);
    lm_free(made);
    return rc;
}

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
                       .kv = g->formats.plan,
                       .backend = g->b };
    lm_loaded_build(w, &build);
    build.like = build.mesh ? generator_model(g) : NULL;
    if (lm_model_build(&w->config, &build, &s->m, e) || open_exec(g, s, share, e))
        return e->code;
    const size_t at[4] = { generator_share(&bytes, 1, ids), generator_share(&bytes, 1, ids),
                           generator_share(&bytes, 1, sizeof(int32_t)),
                           generator_share(&bytes, 1, sizeof(int32_t)) };
    const lm_vid value[4] = { s->m->source, s->m->source_hi, s->m->used, s->m->fresh };
    int32_t **const host[4] = { &s->ids, &s->hi, &s->used, &s->fresh };
    if (lm_mirror_new(g->b, bytes, "a source", &s->inputs, e))
        return e->code;
    if (lm_rotary_new(s->m, g->b, &s->constants, e))
        return e->code;
    for (int i = 0; i < 4; i++) {
        *host[i] = generator_room(s->inputs.host, at[i]);
        if (value[i] >= 0)
            lm_exec_bind(s->x, value[i], generator_room(s->inputs.dev, at[i]));
    }
    if (s->m->table >= 0)
        lm_exec_bind(s->x, s->m->table, g->numbers.dev);
    if (s->m->slot >= 0)
        lm_exec_bind(s->x, s->m->slot, g->numbers.dev);
    *s->used = 0;
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

/* Where a part of all slots lies. */
static lm_code place_part(const lm_generator *g, int64_t i, source_part *p, size_t *bytes,
                          lm_err *e)
{
    const lm_model *m = generator_model(g);
    if (m->memory[i] < 0)
        return LM_OK;
    const lm_tensor *t = &m->graph->value[m->memory[i]].t;
    const size_t all = lm_stored_bytes(t);
    if (all == SIZE_MAX || *bytes > SIZE_MAX - all - 63)
        return lm_fail(e, LM_ELIMIT, "sources", NULL, "their size cannot be counted");
    *p = (source_part){ .at = *bytes,
                        .slot_bytes = all / (size_t)g->batch,
                        .coded = lm_b_coded(&m->build, i / LM_MEMORY) };
    if (i % LM_MEMORY < 2)
        p->token_bytes = (double)all / (double)(t->dim[0] * t->dim[2]);
    *bytes += (all + 63) / 64 * 64;
    return LM_OK;
}

static lm_code make_memory(lm_generator *g, lm_err *e)
{
    generator_source *s = g->source;
    const int64_t n = parts_of(generator_model(g));
    if (lm_alloc_n(&s->part, (size_t)n, sizeof *s->part, "an encoder", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        if (place_part(g, i, &s->part[i], &s->bytes, e))
            return e->code;
    return g->b->alloc(g->b, s->bytes, "keys and values of sources", (void **)&s->memory, e);
}

lm_code generator_source_open(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    generator_source *s = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "an encoder", e))
        return e->code;
    g->source = s;
    if (lm_alloc_n(&s->length, (size_t)g->batch, sizeof *s->length, "slots", e) ||
        open_graphs(g, w, dtype, e) ||
        lm_mirror_new(g->b, (size_t)g->batch * sizeof(int32_t), "a batch", &s->seen, e))
        return e->code;
    memset(s->seen.host, 0, s->seen.bytes); /* slots without a source see nothing */
    return make_memory(g, e) || lm_mirror_push(&s->seen, s->seen.bytes, NULL, e) ? e->code : LM_OK;
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
    lm_free(s->part);
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
    double rows = 0, row = 0;
    for (int64_t i = 0; s && i < g->batch; i++)
        rows += (double)s->length[i];
    for (int64_t i = 0; s && i < parts_of(generator_model(g)); i++)
        row += s->part[i].token_bytes;
    return rows * row;
}

size_t generator_source_work_bytes(const lm_generator *g)
{
    size_t sum = 0;
    for (int i = 0; g->source && i < g->source->n; i++)
        sum += lm_exec_bytes(g->source->graph[i].x) + g->source->graph[i].inputs.bytes;
    return sum;
}

/* ---- what graphs read ---- */

static char *slot_part(const generator_source *s, int64_t i, int64_t slot)
{
    return s->memory + s->part[i].at + (size_t)slot * s->part[i].slot_bytes;
}

/* Bind the parts of a graph that are kept, those of slots from this one on. */
static void bind_parts(const generator_source *s, const lm_model *m, lm_exec *x, int64_t slot)
{
    for (int64_t i = 0; i < parts_of(m); i++)
        if (is_state(m, i))
            lm_exec_bind(x, m->memory[i], slot_part(s, i, slot));
}

void generator_source_bind(const lm_generator *g, const row_graph *r, int64_t slot)
{
    const generator_source *s = g->source;
    bind_parts(s, r->m, r->x, slot);
    lm_exec_bind(r->x, r->m->source_used, (int32_t *)s->seen.dev + slot);
}

/* The slot sees so much of its memory. */
static lm_code set_length(lm_generator *g, int64_t slot, int64_t length, lm_err *e)
{
    generator_source *s = g->source;
    s->length[slot] = length;
    ((int32_t *)s->seen.host)[slot] = (int32_t)length;
    return lm_mirror_push(&s->seen, s->seen.bytes, NULL, e);
}

static int64_t heads_of(const lm_generator *g, int64_t i)
{
    const lm_model *m = generator_model(g);
    return m->graph->value[m->memory[i]].t.dim[1];
}

/* n rows of each head of part i, `pitch` bytes from head to head, to a slot. */
static lm_code copy_heads(lm_generator *g, int64_t i, int64_t slot, const char *from, size_t pitch,
                          int64_t n, lm_err *e)
{
    const generator_source *s = g->source;
    const int64_t heads = heads_of(g, i);
    const size_t head = s->part[i].slot_bytes / (size_t)heads, row = head / (size_t)g->context;
    char *to = slot_part(s, i, slot);
    for (int64_t h = 0; h < heads; h++)
        if (g->b->copy(g->b, to + (size_t)h * head, from + (size_t)h * pitch, (size_t)n * row,
                       g->b->main, e))
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
    *r->fresh = (int32_t)n;
    bind_parts(s, r->m, r->x, slot);
    if (lm_mirror_push(&r->inputs, r->inputs.bytes, NULL, e) || lm_exec_run(r->x, &step, e))
        return e->code;
    for (int64_t i = 0; i < parts_of(r->m); i++) {
        const lm_vid v = r->m->memory[i];
        if (v < 0 || is_state(r->m, i))
            continue;
        const lm_tensor *t = &r->m->graph->value[v].t;
        if (copy_heads(g, i, slot, lm_exec_data(r->x, v),
                       (size_t)rows * lm_plain_bytes(t->dtype, t->dim[3]), n, e))
            return e->code;
    }
    return set_length(g, slot, n, e);
}

lm_code generator_source_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    generator_source *s = g->source;
    for (int64_t i = 0; i < parts_of(generator_model(g)); i++) {
        const source_part *p = &s->part[i];
        const char *at = slot_part(s, i, from);
        if (!p->slot_bytes)
            continue;
        if (p->coded ? g->b->copy(g->b, slot_part(s, i, to), at, p->slot_bytes, g->b->main, e)
                     : copy_heads(g, i, to, at, p->slot_bytes / (size_t)heads_of(g, i),
                                  s->length[from], e))
            return e->code;
    }
    return set_length(g, to, s->length[from], e);
}
