/* generate.c -- prefill and decoding over shared caches. */
#include "model/generate.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "model/weights.h"

/* One graph and its inputs. */
typedef struct {
    lm_model *m;
    lm_exec *x;
    int32_t *tokens, *pos, *used, *fresh, *rows;
} stage;

enum { CHUNKS = 3 };
static const int64_t chunk_rows[CHUNKS] = { 256, 64, 8 };

struct lm_generator {
    lm_backend *b;
    int64_t batch, context;
    stage prefill[CHUNKS],
        decode;    /* a chunk as long as the context comes in place of longer ones */
    int64_t *used; /* of each slot */
    char *cache;   /* all layers: keys, then values */
    size_t cache_bytes, layer_bytes, slot_bytes;
    lm_rotary rope;
};

static lm_code open_stage(lm_generator *g, const lm_loaded *w, lm_dtype dtype, int64_t batch,
                          int64_t seq, lm_exec *share, stage *s, lm_err *e)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = batch,
                             .seq = seq,
                             .cache = g->context,
                             .precision = { .low = dtype } };
    size_t n = (size_t)(batch * seq), b = (size_t)batch;
    if (lm_model_build(&w->config, &build, &s->m, e) ||
        lm_exec_new_sharing(s->m->graph, g->b, &s->m->logits, 1, share, &s->x, e) ||
        lm_alloc_n(&s->tokens, n, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&s->pos, n, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&s->used, b, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&s->fresh, b, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&s->rows, b, sizeof(int32_t), "a batch", e))
        return e->code;
    lm_exec_bind(s->x, s->m->tokens, s->tokens);
    lm_exec_bind(s->x, s->m->pos, s->pos);
    lm_exec_bind(s->x, s->m->used, s->used);
    lm_exec_bind(s->x, s->m->fresh, s->fresh);
    lm_exec_bind(s->x, s->m->rows, s->rows);
    return LM_OK;
}

static void close_stage(stage *s)
{
    lm_exec_free(s->x);
    lm_model_free(s->m);
    lm_free(s->tokens);
    lm_free(s->pos);
    lm_free(s->used);
    lm_free(s->fresh);
    lm_free(s->rows);
}

/* Let the stage see the caches from `slot` on. */
static void bind_caches(const lm_generator *g, const stage *s, int64_t slot)
{
    for (int64_t l = 0; l < s->m->config.layers; l++) {
        char *k = g->cache + (size_t)(2 * l) * g->layer_bytes + (size_t)slot * g->slot_bytes;
        lm_exec_bind(s->x, s->m->kcache[l], k);
        lm_exec_bind(s->x, s->m->vcache[l], k + g->layer_bytes);
    }
}

static lm_code make_caches(lm_generator *g, lm_err *e)
{
    const lm_model *m = g->decode.m;
    const lm_tensor *t = &m->graph->value[m->kcache[0]].t;
    g->slot_bytes = (size_t)(t->dim[1] * t->dim[2] * t->dim[3]) * lm_dtype_size(t->dtype);
    if (!lm_mul_ok(g->slot_bytes, (size_t)g->batch, &g->layer_bytes) ||
        !lm_mul_ok(g->layer_bytes, 2 * (size_t)m->config.layers, &g->cache_bytes))
        return lm_fail(e, LM_ELIMIT, "caches", NULL, "their size cannot be counted");
    return lm_block_alloc((void **)&g->cache, g->cache_bytes, "key/value caches", e);
}

static lm_code open_all(lm_generator *g, lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    /* the largest arena first: the others live in it */
    for (int i = 0; i < CHUNKS; i++) {
        int64_t rows = chunk_rows[i] < g->context ? chunk_rows[i] : g->context;
        if (open_stage(g, w, dtype, 1, rows, i ? g->prefill[0].x : NULL, &g->prefill[i], e))
            return e->code;
    }
    if (open_stage(g, w, dtype, g->batch, 1, g->prefill[0].x, &g->decode, e) || make_caches(g, e) ||
        (!w->block && lm_loaded_weights(w, g->decode.m, g->b, e)) ||
        lm_alloc_n(&g->used, (size_t)g->batch, sizeof *g->used, "slots", e) ||
        lm_rotary_new(g->decode.m, g->b, &g->rope, e))
        return e->code;
    for (int i = 0; i <= CHUNKS; i++) {
        const stage *s = i < CHUNKS ? &g->prefill[i] : &g->decode;
        lm_loaded_bind(w, s->m, s->x);
        lm_rotary_bind(&g->rope, s->m, s->x);
    }
    bind_caches(g, &g->decode, 0);
    return LM_OK;
}

lm_code lm_generator_new(lm_loaded *w, lm_dtype dtype, int64_t batch, int64_t context,
                         lm_backend *b, lm_generator **out, lm_err *e)
{
    lm_generator *g = NULL;
    *out = NULL;
    if (context > w->config.max_positions)
        return lm_fail(e, LM_EUSAGE, "context", "use a shorter one",
                       "%" PRId64 " positions, but the model was made for %" PRId64, context,
                       w->config.max_positions);
    if (lm_alloc_n(&g, 1, sizeof *g, "a generator", e))
        return e->code;
    g->b = b;
    g->batch = batch;
    g->context = context;
    if (open_all(g, w, dtype, e)) {
        lm_generator_free(g);
        return e->code;
    }
    *out = g;
    return LM_OK;
}

void lm_generator_free(lm_generator *g)
{
    if (!g)
        return;
    close_stage(&g->decode);
    for (int i = CHUNKS - 1; i >= 0; i--)
        close_stage(&g->prefill[i]);
    lm_block_free(g->cache, g->cache_bytes);
    lm_free(g->used);
    lm_rotary_fini(&g->rope);
    lm_free(g);
}

/* The next rows of a prompt, `n` of them real, through a stage of its own size. */
static lm_code run_chunk(lm_generator *g, stage *s, int64_t slot, const uint32_t *ids, int64_t n,
                         lm_err *e)
{
    const lm_step step = { 0 };
    for (int64_t i = 0; i < s->m->build.seq; i++) {
        s->tokens[i] = i < n ? (int32_t)ids[i] : 0;
        s->pos[i] = i < n ? (int32_t)(g->used[slot] + i) : 0;
    }
    s->used[0] = (int32_t)g->used[slot];
    s->fresh[0] = (int32_t)n;
    s->rows[0] = (int32_t)(n - 1);
    g->used[slot] += n;
    return lm_exec_run(s->x, &step, e);
}

lm_code lm_generator_prompt(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e)
{
    stage *s = NULL;
    if (n < 1 || n > g->context)
        return lm_fail(e, LM_EUSAGE, "prompt", "shorten it",
                       "%" PRId64 " tokens, the context holds %" PRId64, n, g->context);
    g->used[slot] = 0;
    for (int64_t at = 0, take; at < n; at += take) {
        int i = CHUNKS - 1; /* the smallest that holds the rest, else the largest */
        while (i > 0 && g->prefill[i].m->build.seq < n - at)
            i--;
        s = &g->prefill[i];
        take = n - at < s->m->build.seq ? n - at : s->m->build.seq;
        bind_caches(g, s, slot);
        if (run_chunk(g, s, slot, ids + at, take, e))
            return e->code;
    }
    *logits = lm_exec_data(s->x, s->m->logits);
    return LM_OK;
}

lm_code lm_generator_decode(lm_generator *g, const int32_t *next, const float **logits, lm_err *e)
{
    const lm_step step = { 0 };
    stage *s = &g->decode;
    for (int64_t i = 0; i < g->batch; i++) {
        bool on = next[i] >= 0;
        if (on && g->used[i] >= g->context)
            return lm_fail(e, LM_EUSAGE, "context", "give a longer one",
                           "%" PRId64 " tokens are all it holds", g->context);
        s->tokens[i] = on ? next[i] : 0;
        s->pos[i] = on ? (int32_t)g->used[i] : 0;
        s->used[i] = on ? (int32_t)g->used[i] : 0;
        s->fresh[i] = on;
        s->rows[i] = (int32_t)i;
        g->used[i] += on;
    }
    if (lm_exec_run(s->x, &step, e))
        return e->code;
    *logits = lm_exec_data(s->x, s->m->logits);
    return LM_OK;
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
    return g->decode.m->config.vocab;
}

int64_t lm_generator_used(const lm_generator *g, int64_t slot)
{
    return g->used[slot];
}

double lm_generator_step_bytes(const lm_generator *g)
{
    const lm_model *m = g->decode.m;
    const lm_config *c = &m->config;
    double bytes = 0, row = (double)g->slot_bytes / (double)g->context;
    for (int i = 0; i < m->n_params; i++) {
        const lm_tensor *t = &m->graph->value[m->param[i].value].t;
        bytes += (double)m->param[i].count * (double)lm_dtype_size(t->dtype);
    }
    /* tables of which only rows are looked up: an embedding that is not the head, and learned
     * positions */
    int64_t looked_up = (c->tied ? 0 : c->vocab) + (c->arch == LM_ARCH_GPT2 ? c->max_positions : 0);
    const lm_tensor *embed = &m->graph->value[m->param[0].value].t;
    bytes -= (double)(looked_up * c->width) * (double)lm_dtype_size(embed->dtype);
    for (int64_t i = 0; i < g->batch; i++)
        bytes += 2 * (double)c->layers * row * (double)g->used[i];
    return bytes;
}

size_t lm_generator_cache_bytes(const lm_generator *g)
{
    return g->cache_bytes;
}

lm_exec *lm_generator_exec(lm_generator *g)
{
    return g->decode.x;
}
