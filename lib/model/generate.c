/* generate.c -- prefill and decoding over shared caches. */
#include "model/generate.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "graph/mirror.h"
#include "model/weights.h"

/* One graph and its inputs: mirrors, of which the host's side is written. */
typedef struct {
    lm_model *m;
    lm_exec *x;
    lm_mirror inputs;
    int32_t *tokens, *pos, *used, *fresh, *rows;
} stage;

/* The choice of tokens: for each slot what the kernel asks and answers. */
typedef struct {
    lm_mirror ask, answer, seen;
    double *u, *logprob;
    int32_t *on, *n_seen, *token;
    int64_t *sent; /* ids of `seen` that the backend has */
    const lm_kernel *kernel;
    void *work;
    size_t work_bytes;
} chooser;

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
    chooser choice;
    lm_recording *recorded; /* of decoding */
    bool ran, as_it_is;     /* decoding has run once; it is not to be recorded */
    lm_err refused;         /* why the backend did not record it */
    stage *last;            /* what ran last, */
    int64_t last_slot;      /* and the first slot of its rows */
};

/* n numbers of `size` bytes at *at of a room that is being divided. */
static size_t part(size_t *at, size_t n, size_t size)
{
    size_t here = *at;
    *at += (n * size + 63) / 64 * 64;
    return here;
}

static void *room_at(void *base, size_t bytes)
{
    return (char *)base + bytes;
}

static lm_code make_inputs(stage *s, lm_backend *backend, size_t n, size_t b, lm_err *e)
{
    size_t bytes = 0, at[5];
    const size_t count[5] = { n, n, b, b, b };
    const lm_vid value[5] = { s->m->tokens, s->m->pos, s->m->used, s->m->fresh, s->m->rows };
    int32_t **host[5] = { &s->tokens, &s->pos, &s->used, &s->fresh, &s->rows };
    for (int i = 0; i < 5; i++)
        at[i] = part(&bytes, count[i], sizeof(int32_t));
    if (lm_mirror_new(backend, bytes, "a batch", &s->inputs, e))
        return e->code;
    for (int i = 0; i < 5; i++) {
        *host[i] = room_at(s->inputs.host, at[i]);
        lm_exec_bind(s->x, value[i], room_at(s->inputs.dev, at[i]));
    }
    return LM_OK;
}

static lm_code open_stage(lm_generator *g, const lm_loaded *w, lm_dtype dtype, int64_t batch,
                          int64_t seq, lm_exec *share, stage *s, lm_err *e)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = batch,
                             .seq = seq,
                             .cache = g->context,
                             .precision = { .low = dtype },
                             .backend = g->b };
    if (lm_model_build(&w->config, &build, &s->m, e) ||
        lm_exec_new_sharing(s->m->graph, g->b, &s->m->logits, 1, share, &s->x, e))
        return e->code;
    return make_inputs(s, g->b, (size_t)(batch * seq), (size_t)batch, e);
}

static void close_stage(stage *s)
{
    lm_exec_free(s->x);
    lm_model_free(s->m);
    lm_mirror_fini(&s->inputs);
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

/* A device too small for weights and caches is told from their sizes, before anything is loaded. */
static lm_code check_room(const lm_generator *g, bool loaded, lm_err *e)
{
    size_t left, all, weights = loaded ? 0 : lm_loaded_bytes(g->decode.m);
    size_t a_position = g->cache_bytes / (size_t)g->context;
    char w[32], c[32], l[32], t[32], todo[80] = "use a smaller model or another device";
    if (g->b->host_memory)
        return LM_OK;
    if (g->b->memory(g->b, &left, &all, e))
        return e->code;
    size_t usable = left - left / 64; /* kernels bring code and stacks when they first run */
    if (weights < usable && g->cache_bytes <= usable - weights)
        return LM_OK;
    size_t for_caches =
        weights < usable ? (usable - weights) / 16 * 15 : 0; /* and something else */
    if (for_caches >= 64 * a_position)
        snprintf(todo, sizeof todo, "--context %zu fits, or give a smaller --batch-size",
                 for_caches / a_position / 64 * 64);
    return lm_fail(e, LM_ELIMIT, g->b->name, todo,
                   "weights take %s, caches of %" PRId64 " times %" PRId64
                   " tokens %s; %s of %s are free",
                   lm_show_bytes((double)weights, w), g->batch, g->context,
                   lm_show_bytes((double)g->cache_bytes, c), lm_show_bytes((double)left, l),
                   lm_show_bytes((double)all, t));
}

static lm_code make_caches(lm_generator *g, bool loaded, lm_err *e)
{
    const lm_model *m = g->decode.m;
    const lm_tensor *t = &m->graph->value[m->kcache[0]].t;
    g->slot_bytes = (size_t)(t->dim[1] * t->dim[2] * t->dim[3]) * lm_dtype_size(t->dtype);
    if (!lm_mul_ok(g->slot_bytes, (size_t)g->batch, &g->layer_bytes) ||
        !lm_mul_ok(g->layer_bytes, 2 * (size_t)m->config.layers, &g->cache_bytes))
        return lm_fail(e, LM_ELIMIT, "caches", NULL, "their size cannot be counted");
    if (check_room(g, loaded, e))
        return e->code;
    return g->b->alloc(g->b, g->cache_bytes, "key/value caches", (void **)&g->cache, e);
}

/* ---- choosing tokens ---- */

/* The call for rows of slots from `slot` on. */
typedef struct {
    lm_tensor in[5], out[2];
    lm_call call;
} sample_call;

static void describe(const lm_generator *g, int64_t slot, int64_t rows, const lm_sample_attr *o,
                     sample_call *s)
{
    const chooser *c = &g->choice;
    const lm_tensor of_rows[3] = { lm_shape1(LM_DTYPE_I32, rows), lm_shape1(LM_DTYPE_F64, rows),
                                   lm_shape2(LM_DTYPE_I32, rows, g->context) };
    const char *ask = c->ask.dev, *answer = c->answer.dev;
    const char *ask_host = c->ask.host, *answer_host = c->answer.host;
    *s = (sample_call){
        .in = { lm_shape2(LM_DTYPE_F32, rows, lm_generator_vocab(g)), of_rows[2], of_rows[0],
                of_rows[1], of_rows[0] },
        .out = { of_rows[0], of_rows[1] },
        .call = { .attr = o,
                  .n_in = 5,
                  .n_out = 2,
                  .work = c->work,
                  .par = g->b->par,
                  .stream = g->b->main },
    };
    s->call.in = s->in;
    s->call.out = s->out;
    s->in[1].data = (int32_t *)c->seen.dev + slot * g->context;
    s->in[2].data = (void *)(ask + ((char *)(c->n_seen + slot) - ask_host));
    s->in[3].data = (void *)(ask + ((char *)(c->u + slot) - ask_host));
    s->in[4].data = (void *)(ask + ((char *)(c->on + slot) - ask_host));
    s->out[0].data = (void *)(answer + ((char *)(c->token + slot) - answer_host));
    s->out[1].data = (void *)(answer + ((char *)(c->logprob + slot) - answer_host));
}

static lm_code make_chooser(lm_generator *g, lm_err *e)
{
    static const lm_sample_attr any = { 1, 0, 1, 0, 1 };
    chooser *c = &g->choice;
    lm_backend *b = g->b;
    size_t n = (size_t)g->batch, ask = 0, answer = 0;
    size_t u = part(&ask, n, sizeof(double)), on = part(&ask, n, sizeof(int32_t));
    size_t seen = part(&ask, n, sizeof(int32_t)), p = part(&answer, n, sizeof(double));
    size_t token = part(&answer, n, sizeof(int32_t));
    c->kernel = b->kernel(b, "sample", LM_DTYPE_F32);
    if (!c->kernel)
        return lm_fail(e, LM_EUSAGE, b->name, NULL, "has no kernel \"sample\"");
    if (lm_mirror_new(b, ask, "draws", &c->ask, e) ||
        lm_mirror_new(b, answer, "chosen tokens", &c->answer, e) ||
        lm_mirror_new(b, n * (size_t)g->context * sizeof(int32_t), "tokens", &c->seen, e) ||
        lm_alloc_n(&c->sent, n, sizeof *c->sent, "slots", e))
        return e->code;
    c->u = room_at(c->ask.host, u);
    c->on = room_at(c->ask.host, on);
    c->n_seen = room_at(c->ask.host, seen);
    c->logprob = room_at(c->answer.host, p);
    c->token = room_at(c->answer.host, token);
    for (int64_t rows = 1; c->kernel->work; rows = g->batch) {
        sample_call s;
        describe(g, 0, rows, &any, &s);
        size_t bytes = c->kernel->work(&s.call, b->threads);
        c->work_bytes = bytes > c->work_bytes ? bytes : c->work_bytes;
        if (rows == g->batch)
            break;
    }
    return c->work_bytes ? b->alloc(b, c->work_bytes, "choosing tokens", &c->work, e) : LM_OK;
}

static void drop_chooser(lm_generator *g)
{
    chooser *c = &g->choice;
    if (c->work)
        g->b->free(g->b, c->work, c->work_bytes);
    lm_mirror_fini(&c->ask);
    lm_mirror_fini(&c->answer);
    lm_mirror_fini(&c->seen);
    lm_free(c->sent);
}

/* Ids that the backend does not know yet. */
static lm_code send_seen(lm_generator *g, int64_t slot, lm_err *e)
{
    chooser *c = &g->choice;
    int64_t from = slot * g->context + c->sent[slot], n = g->used[slot] - c->sent[slot];
    c->sent[slot] = g->used[slot];
    if (c->seen.dev == c->seen.host || n <= 0)
        return LM_OK;
    return g->b->copy(g->b, (int32_t *)c->seen.dev + from, (int32_t *)c->seen.host + from,
                      (size_t)n * sizeof(int32_t), g->b->main, e);
}

lm_code lm_generator_choose(lm_generator *g, const lm_sample_attr *o, const double *u,
                            const int32_t **ids, const double **logprob, lm_err *e)
{
    chooser *c = &g->choice;
    int64_t rows = g->last->m->build.batch;
    sample_call s;
    /* What the host writes here was read before the last choice came back. */
    for (int64_t i = 0; i < rows; i++) {
        int64_t slot = g->last_slot + i;
        c->on[slot] = g->last->fresh[i] > 0;
        c->u[slot] = u[slot];
        c->n_seen[slot] = (int32_t)g->used[slot];
        if (c->on[slot] && o->repetition_penalty != 1 && send_seen(g, slot, e))
            return e->code;
    }
    describe(g, g->last_slot, rows, o, &s);
    s.in[0].data = lm_exec_data(g->last->x, g->last->m->logits);
    if (o->repetition_penalty == 1)
        s.in[1] = s.in[2] = (lm_tensor){ 0 };
    if (!logprob)
        s.out[1] = (lm_tensor){ 0 };
    if (lm_mirror_push(&c->ask, c->ask.bytes, NULL, e))
        return e->code;
    c->kernel->run(&s.call);
    if (lm_mirror_pull(&c->answer, c->answer.bytes, NULL, e) || g->b->sync(g->b, g->b->main, e))
        return e->code;
    *ids = c->token;
    if (logprob)
        *logprob = c->logprob;
    return LM_OK;
}

/* ---- life ---- */

static lm_code open_all(lm_generator *g, lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    /* the largest arena first: the others live in it */
    for (int i = 0; i < CHUNKS; i++) {
        int64_t rows = chunk_rows[i] < g->context ? chunk_rows[i] : g->context;
        if (open_stage(g, w, dtype, 1, rows, i ? g->prefill[0].x : NULL, &g->prefill[i], e))
            return e->code;
    }
    if (open_stage(g, w, dtype, g->batch, 1, g->prefill[0].x, &g->decode, e) ||
        make_caches(g, w->block != NULL, e) ||
        (!w->block && lm_loaded_weights(w, g->decode.m, g->b, e)) ||
        lm_alloc_n(&g->used, (size_t)g->batch, sizeof *g->used, "slots", e) ||
        lm_rotary_new(g->decode.m, g->b, &g->rope, e) || make_chooser(g, e))
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
    lm_err ignored = { 0 };
    if (!g)
        return;
    g->b->sync(g->b, g->b->main, &ignored); /* after a failure work may be left */
    if (g->recorded)
        g->b->recording_free(g->b, g->recorded);
    close_stage(&g->decode);
    for (int i = CHUNKS - 1; i >= 0; i--)
        close_stage(&g->prefill[i]);
    if (g->cache)
        g->b->free(g->b, g->cache, g->cache_bytes);
    drop_chooser(g);
    lm_free(g->used);
    lm_rotary_fini(&g->rope);
    lm_free(g);
}

/* ---- running ---- */

/* Before the host writes the inputs again. */
static lm_code wait_for_last(lm_generator *g, lm_err *e)
{
    return g->b->sync(g->b, g->b->main, e);
}

static lm_code run_graph(stage *s, lm_err *e)
{
    const lm_step step = { 0 };
    return lm_exec_run(s->x, &step, e);
}

/* Decoding is the same list of kernels each time: from the second run on a recording of it, where
 * the backend has such a thing and nobody takes the time of single nodes. */
static void record_decoding(lm_generator *g)
{
    lm_err *refused = &g->refused, second = { 0 };
    lm_backend *b = g->b;
    lm_exec_span timed;
    g->as_it_is = !b->replay || lm_exec_span_at(g->decode.x, 0, &timed);
    if (g->as_it_is)
        return;
    if (!b->record_begin(b, b->main, refused)) {
        run_graph(&g->decode, refused);
        if (b->record_end(b, b->main, &g->recorded, &second) && !refused->code)
            *refused = second;
    }
    g->as_it_is = refused->code != LM_OK;
}

static lm_code run_stage(lm_generator *g, stage *s, int64_t slot, lm_err *e)
{
    bool decoding = s == &g->decode;
    lm_code rc;
    g->last = s;
    g->last_slot = slot;
    if (lm_mirror_push(&s->inputs, s->inputs.bytes, NULL, e))
        return e->code;
    if (decoding && g->ran && !g->recorded && !g->as_it_is)
        record_decoding(g);
    g->ran |= decoding;
    g->b->range(g->b, decoding ? "decode" : "prompt");
    rc = decoding && g->recorded && !g->as_it_is ? g->b->replay(g->b, g->recorded, g->b->main, e)
                                                 : run_graph(s, e);
    g->b->range(g->b, NULL);
    return rc;
}

/* The next rows of a prompt, `n` of them real, through a stage of its own size. */
static lm_code run_chunk(lm_generator *g, stage *s, int64_t slot, const uint32_t *ids, int64_t n,
                         lm_err *e)
{
    int32_t *seen = (int32_t *)g->choice.seen.host + slot * g->context + g->used[slot];
    if (wait_for_last(g, e))
        return e->code;
    for (int64_t i = 0; i < s->m->build.seq; i++) {
        s->tokens[i] = i < n ? (int32_t)ids[i] : 0;
        s->pos[i] = i < n ? (int32_t)(g->used[slot] + i) : 0;
    }
    for (int64_t i = 0; i < n; i++)
        seen[i] = (int32_t)ids[i];
    s->used[0] = (int32_t)g->used[slot];
    s->fresh[0] = (int32_t)n;
    s->rows[0] = (int32_t)(n - 1);
    g->used[slot] += n;
    return run_stage(g, s, slot, e);
}

lm_code lm_generator_prompt(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e)
{
    stage *s = NULL;
    if (n < 1 || n > g->context)
        return lm_fail(e, LM_EUSAGE, "prompt", "shorten it",
                       "%" PRId64 " tokens, the context holds %" PRId64, n, g->context);
    g->used[slot] = g->choice.sent[slot] = 0;
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
    if (logits)
        *logits = lm_exec_data(s->x, s->m->logits);
    return LM_OK;
}

lm_code lm_generator_decode(lm_generator *g, const int32_t *next, const float **logits, lm_err *e)
{
    stage *s = &g->decode;
    if (wait_for_last(g, e))
        return e->code;
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
        if (on)
            ((int32_t *)g->choice.seen.host)[i * g->context + g->used[i]] = next[i];
        g->used[i] += on;
    }
    if (run_stage(g, s, 0, e))
        return e->code;
    if (logits)
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

const char *lm_generator_unrecorded(const lm_generator *g)
{
    return g->refused.code ? g->refused.what : NULL;
}

size_t lm_generator_cache_bytes(const lm_generator *g)
{
    return g->cache_bytes;
}

lm_exec *lm_generator_exec(lm_generator *g)
{
    return g->decode.x;
}
