/* SPDX-License-Identifier: Apache-2.0 */
/* generate_draft.c -- steps with drafts: modules that predict tokens further on propose some, the model runs them together,
 * and its distributions decide how many stay (arXiv:2211.17192, arXiv:2302.01318).
 *
 * Row r of the cache of module k is that of the state of row r of the module before it (0: of the model) and token r + k + 1
 * (arXiv:2412.19437, section 2.2).  Of a slot whose caches have U rows, the last k + 1 of module k wait for tokens that were
 * not known: token U, which is appended now, and drafts.  So module k runs these rows, on states of module k - 1 that were made
 * just now, except for the first, which waits in prior[k], and draws draft k.  Behind the last module further drafts are its
 * own, on its own states in their place.  The model then runs the token and the drafts, and the modules behind it
 * (LM_AHEAD_RUNS), which fill the rows whose tokens stay.  Rows of rejected drafts stay in the caches, where the next step
 * overwrites them: those of module k are among its last k + 1.  A text of fewer rows, and a step that is to have fewer drafts
 * than there are modules, leave rows of the later ones as they were: their drafts are worse for it, the tokens that stay are
 * not.  Tokens are drawn and compared on the host.
 *
 * A state of all tokens (kernels/delta.h) has no rows that the next step could overwrite.  Where a draft is rejected, states
 * are put back as they were before the model ran, which then runs the rows that stay once more. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "model/generate_impl.h"

static int64_t rows_of_step(const lm_generator *g)
{
    return g->draft->n + 1;
}

int64_t lm_generator_drafts(const lm_generator *g)
{
    return g->draft ? g->draft->n : 0;
}

/* ---- life ---- */

static lm_code check(const lm_generator *g, const lm_config *c, int64_t n, lm_err *e)
{
    if (!c->ahead)
        return lm_fail(e, LM_EUSAGE, "drafts", "leave them out",
                       "the model has no modules that predict tokens further on");
    if (g->kv)
        return lm_fail(e, LM_EUSAGE, "drafts", "leave one of them out",
                       "caches are coded, which rejected tokens would change");
    if (g->state_codes) /* a step codes them once, behind all its rows */
        return lm_fail(e, LM_EUSAGE, "drafts", "leave one of them out",
                       "states are coded, once a token without drafts and once a step with them");
    return n < 1 || n >= g->context
               ? lm_fail(e, LM_EUSAGE, "drafts", "draft fewer",
                         "%" PRId64 " tokens a step in a context of %" PRId64, n, g->context)
               : LM_OK;
}

lm_code generator_draft_new(lm_generator *g, const lm_loaded *w, int64_t n, lm_err *e)
{
    if (check(g, &w->config, n, e) || lm_alloc_n(&g->draft, 1, sizeof *g->draft, "drafts", e))
        return e->code;
    g->draft->n = n;
    g->draft->modules = n < w->config.ahead ? n : w->config.ahead;
    return LM_OK;
}

/* A row, or for the work of kernels a call, of one sequence. */
static lm_call call_of(const lm_generator *g, const char *name, const lm_sample_attr *o,
                       lm_tensor in[8], lm_tensor out[2], const lm_kernel **k)
{
    const lm_tensor row = lm_shape2(LM_DTYPE_F32, 1, lm_generator_vocab(g)),
                    id = lm_shape1(LM_DTYPE_I32, 1), real = lm_shape1(LM_DTYPE_F64, 1),
                    seen = lm_shape2(LM_DTYPE_I32, 1, g->context);
    const lm_tensor all[8] = { row, seen, id, real, id, id, row, real };
    memcpy(in, all, sizeof all);
    out[0] = id;
    out[1] = real;
    *k = lm_cpu_kernel(name, LM_DTYPE_F32, LM_CPU_REF);
    return (lm_call){ .attr = o, .in = in, .n_in = 8, .out = out, .n_out = 2 };
}

static size_t work_of(const lm_generator *g, const char *name)
{
    static const lm_sample_attr any = { .temperature = 1, .top_p = 1, .repetition_penalty = 2 };
    lm_tensor in[8], out[2];
    const lm_kernel *k;
    const lm_call c = call_of(g, name, &any, in, out, &k);
    return (k->work(&c, 1) + 63) / 64 * 64;
}

/* Bytes of what module k reads of a slot. */
static size_t prior_bytes(const generator_draft *d, int64_t k)
{
    return (size_t)(k + 1) * d->row_bytes;
}

/* True if rows behind those of the last of several modules are drafted. */
static bool goes_on(const generator_draft *d)
{
    return d->modules > 1 && d->n > d->modules;
}

/* Rows that a text does not have are zeros. */
static lm_code make_states(lm_generator *g, lm_err *e)
{
    generator_draft *d = g->draft;
    const size_t B = (size_t)g->batch;
    for (int64_t k = 0; k < d->modules; k++) {
        const size_t bytes = B * prior_bytes(d, k);
        if (g->b->alloc(g->b, bytes, "states for drafts", (void **)&d->prior[k], e) ||
            g->b->zero(g->b, d->prior[k], bytes, g->b->main, e))
            return e->code;
    }
    return goes_on(d)
               ? g->b->alloc(g->b, B * d->row_bytes, "states for drafts", (void **)&d->own, e)
               : LM_OK;
}

/* Bytes of the states of all tokens, of all slots. */
static size_t saved_bytes(const lm_generator *g)
{
    size_t sum = 0;
    for (int i = 0; i < generator_model(g)->n_caches; i++)
        sum += g->caches[i].fixed ? (size_t)g->batch * g->caches[i].slot_bytes : 0;
    return sum;
}

static lm_code make_memory(lm_generator *g, lm_err *e)
{
    generator_draft *d = g->draft;
    const lm_model *m = generator_model(g);
    const size_t B = (size_t)g->batch, N = (size_t)d->n, V = (size_t)m->config.vocab;
    const size_t a = work_of(g, "sample"), b = work_of(g, "sample_accept");
    d->row_bytes = (size_t)m->config.width * lm_dtype_size(m->build.precision.low);
    d->work_bytes = a > b ? a : b;
    if (saved_bytes(g) &&
        g->b->alloc(g->b, saved_bytes(g), "states of layers before a step", (void **)&d->saved, e))
        return e->code;
    return make_states(g, e) || lm_alloc_n(&d->q, N * B * V, sizeof *d->q, "logits of drafts", e) ||
                   (!g->b->host_memory &&
                    lm_alloc_n(&d->p, B * (N + 1) * V, sizeof *d->p, "logits", e)) ||
                   lm_alloc_n(&d->ids, B * (N + 1), sizeof *d->ids, "drafts", e) ||
                   lm_alloc_n(&d->count, B, sizeof *d->count, "drafts", e) ||
                   lm_alloc_n(&d->fresh, B, sizeof *d->fresh, "drafts", e) ||
                   lm_alloc_n(&d->logprob, B * (N + 1), sizeof *d->logprob, "drafts", e) ||
                   lm_alloc_n(&d->work, d->work_bytes * B, 1, "drafts", e)
               ? e->code
               : LM_OK;
}

size_t generator_draft_bytes(const lm_generator *g)
{
    const generator_draft *d = g->draft;
    if (!d)
        return 0;
    const size_t B = (size_t)g->batch, N = (size_t)d->n, V = (size_t)lm_generator_vocab(g);
    const size_t logits = N + (g->b->host_memory ? 0 : N + 1);
    size_t sum = saved_bytes(g) + B * (d->work_bytes + logits * V * sizeof(float));
    sum += goes_on(d) ? B * d->row_bytes : 0;
    for (int64_t k = 0; k < d->modules; k++)
        sum += B * prior_bytes(d, k);
    for (int i = 0; i < g->n_decode; i++) {
        for (int64_t k = 0; k < d->modules; k++)
            sum += lm_exec_bytes(d->draft[k][i].x);
        sum += goes_on(d) ? lm_exec_bytes(d->again[i].x) : 0;
    }
    return sum;
}

/* A graph of module k on `seq` rows of each slot, which reads the states `prior`. */
static lm_code open_module(lm_generator *g, const lm_loaded *w, lm_dtype dtype, int64_t batch,
                           int64_t k, int64_t seq, char *prior, row_graph *s, lm_err *e)
{
    const graph_kind kind = {
        .batch = batch, .seq = seq, .ahead = LM_AHEAD_DRAFTS, .module = k, .share = g->prefill[0].x
    };
    if (generator_open_graph(g, w, dtype, &kind, s, e))
        return e->code;
    lm_store_bind_part(w->store, generator_model(g), s->m, s->x);
    lm_rotary_bind(&g->rope, s->m, s->x);
    lm_exec_bind(s->x, s->m->prior, prior);
    for (int n = 0; n < s->m->n_caches; n++) {
        const lm_cache_state *c = &s->m->cache[n];
        const int of = lm_model_cache(generator_model(g), c->layer, c->kind);
        lm_exec_bind(s->x, c->value, g->cache + g->caches[of].at);
    }
    return LM_OK;
}

lm_code generator_draft_open(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e)
{
    generator_draft *d = g->draft;
    if (make_memory(g, e))
        return e->code;
    for (int i = 0; i < g->n_decode; i++) {
        const int64_t rows = g->decode[i].rows;
        for (int64_t k = 0; k < d->modules; k++)
            if (open_module(g, w, dtype, rows, k, k + 1, d->prior[k], &d->draft[k][i], e))
                return e->code;
        if (goes_on(d) &&
            open_module(g, w, dtype, rows, d->modules - 1, 1, d->own, &d->again[i], e))
            return e->code;
    }
    return LM_OK;
}

void generator_draft_free(lm_generator *g)
{
    generator_draft *d = g->draft;
    if (!d)
        return;
    for (int i = 0; i < g->n_decode; i++) {
        for (int64_t k = 0; k < d->modules; k++)
            generator_close_graph(&d->draft[k][i]);
        generator_close_graph(&d->again[i]);
    }
    for (int64_t k = 0; k < d->modules; k++)
        if (d->prior[k])
            g->b->free(g->b, d->prior[k], (size_t)g->batch * prior_bytes(d, k));
    if (d->saved)
        g->b->free(g->b, d->saved, saved_bytes(g));
    if (d->own)
        g->b->free(g->b, d->own, (size_t)g->batch * d->row_bytes);
    lm_free(d->q);
    lm_free(d->p);
    lm_free(d->ids);
    lm_free(d->count);
    lm_free(d->fresh);
    lm_free(d->logprob);
    lm_free(d->work);
    lm_free(d);
    g->draft = NULL;
}

/* ---- states ---- */

/* Row `at` of the states that module k reads of a slot. */
static char *prior_row(const generator_draft *d, int64_t k, int64_t slot, int64_t at)
{
    return d->prior[k] + (size_t)slot * prior_bytes(d, k) + (size_t)at * d->row_bytes;
}

/* Copy `rows` states of a graph, from row `row` of all slots on. */
static lm_code copy_states(const lm_generator *g, char *to, const row_graph *s, lm_vid states,
                           int64_t row, int64_t rows, lm_err *e)
{
    const size_t size = g->draft->row_bytes;
    const char *from = lm_exec_data(s->x, states);
    return g->b->copy(g->b, to, from + (size_t)row * size, (size_t)rows * size, g->b->main, e);
}

/* Of a graph whose row `first` is the first of a slot: keep what waits for the next step, in which `n` more rows of it have
 * their tokens, and is a row of these: the states that the modules read first. */
static lm_code keep_first(lm_generator *g, const row_graph *s, int64_t slot, int64_t first,
                          int64_t n, int64_t rows, lm_err *e)
{
    generator_draft *d = g->draft;
    for (int64_t k = 0; k < d->modules; k++) {
        const int64_t row = n - k - 1;
        const lm_vid states = k ? s->m->ahead_states[k - 1] : s->m->states;
        if (row >= 0 && row < rows &&
            copy_states(g, prior_row(d, k, slot, 0), s, states, first + row, 1, e))
            return e->code;
    }
    return LM_OK;
}

lm_code generator_draft_prompt(lm_generator *g, const row_graph *s, int64_t slot, int64_t n,
                               int64_t left, lm_err *e)
{
    return keep_first(g, s, slot, 0, left, n, e);
}

lm_code generator_draft_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    const generator_draft *d = g->draft;
    for (int64_t k = 0; k < d->modules; k++)
        if (g->b->copy(g->b, prior_row(d, k, to, 0), prior_row(d, k, from, 0), prior_bytes(d, k),
                       g->b->main, e))
            return e->code;
    return LM_OK;
}

/* ---- a step ---- */

/* What all parts of a step share. */
typedef struct {
    lm_generator *g;
    const lm_draft_ask *ask;
    const lm_sample_attr *o;
    decode_width *d;
    int width;      /* its number */
    int64_t j;      /* the draft that is made now, */
    row_graph *run; /* and by what */
    const float *p; /* [rows,N+1,V] */
} step_of;

static int32_t *seen_of(const lm_generator *g, int64_t slot)
{
    return (int32_t *)g->choice.seen.host + slot * g->context;
}

static float *draft_logits(const step_of *s, int64_t j, int64_t slot)
{
    const lm_generator *g = s->g;
    return g->draft->q + (j * g->batch + slot) * lm_generator_vocab(g);
}

/* Set what both kernels read: logits x behind the n tokens of the slot's sequence, and a draw; the results go to *id and
 * *logprob. */
static void ask_row(const step_of *s, int64_t slot, const float *x, int64_t n, const double *u,
                    int32_t number[2], int32_t *id, double *logprob, lm_call *c, lm_tensor in[8],
                    lm_tensor out[2])
{
    const lm_generator *g = s->g;
    number[0] = (int32_t)n;
    number[1] = 1;
    in[0].data = (void *)(uintptr_t)x;
    in[1].data = seen_of(g, slot);
    in[2].data = number;
    in[3].data = (void *)(uintptr_t)u;
    in[4].data = number + 1;
    if (!(s->o->repetition_penalty < 1 || s->o->repetition_penalty > 1))
        in[1] = in[2] = (lm_tensor){ 0 };
    out[0].data = id;
    out[1].data = logprob;
    if (!logprob)
        out[1] = (lm_tensor){ 0 };
    c->work = g->draft->work + (size_t)slot * g->draft->work_bytes;
}

static int32_t choose(const step_of *s, int64_t slot, const float *x, int64_t n, const double *u,
                      double *logprob)
{
    lm_tensor in[8], out[2];
    const lm_kernel *k;
    int32_t number[2], id = -1;
    lm_call c = call_of(s->g, "sample", s->o, in, out, &k);
    ask_row(s, slot, x, n, u, number, &id, logprob, &c, in, out);
    c.n_in = 5;
    k->run(&c);
    return id;
}

/* Of draft j of the slot: the token at its place. */
static int32_t accept(const step_of *s, int64_t slot, int64_t j, const float *x, int64_t n,
                      int32_t drafted, double *logprob)
{
    const lm_generator *g = s->g;
    lm_tensor in[8], out[2];
    const lm_kernel *k;
    int32_t number[2], id = -1;
    lm_call c = call_of(g, "sample_accept", s->o, in, out, &k);
    ask_row(s, slot, x, n, &s->ask->last[slot * (g->draft->n + 1) + j], number, &id, logprob, &c,
            in, out);
    in[5].data = &drafted;
    in[6].data = draft_logits(s, j, slot);
    in[7].data = (void *)(uintptr_t)&s->ask->accept[slot * g->draft->n + j];
    k->run(&c);
    return id;
}

/* Draw draft j of slots [begin, end); the sequence ends with the drafts before. */
static void draw_drafts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const step_of *s = ctx;
    lm_generator *g = s->g;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        const int64_t j = s->j, n = g->used[i] + 1 + j;
        if (!s->run->fresh[i])
            continue;
        const int32_t id =
            choose(s, i, draft_logits(s, j, i), n, &s->ask->draft[i * g->draft->n + j], NULL);
        g->draft->fresh[i] += id >= 0; /* a module without numbers drafts nothing */
        if (id >= 0)
            seen_of(g, i)[n] = id;
    }
}

/* Write the rows of draft s->j of a slot, if it is to have one: of module j, or of the last one, one more. */
static bool ask_module(const step_of *s, int64_t i)
{
    const lm_generator *g = s->g;
    const generator_draft *d = g->draft;
    row_graph *r = s->run;
    const int64_t T = r->m->build.seq, j = s->j, used = g->used[i];
    const int64_t first = j < d->modules ? used - T : used + j - d->modules;
    const bool on =
        s->ask->next[i] >= 0 && j < s->ask->most[i] && d->fresh[i] == j + 1 && first >= 0;
    for (int64_t t = 0; t < T; t++) {
        r->tokens[i * T + t] = on ? seen_of(g, i)[used + j - (T - 1) + t] : 0;
        r->pos[i * T + t] = on ? (int32_t)(first + t) : 0;
    }
    r->used[i] = on ? (int32_t)first : 0;
    r->fresh[i] = on ? (int32_t)T : 0;
    r->rows[i] = (int32_t)(i * T + T - 1);
    return on;
}

/* Keep the states of a module that ran, for the next one, or for itself. */
static lm_code take_states(const step_of *s, int64_t i, lm_err *e)
{
    const lm_generator *g = s->g;
    const generator_draft *d = g->draft;
    const row_graph *r = s->run;
    const int64_t T = r->m->build.seq;
    if (s->j + 1 < d->modules)
        return copy_states(g, prior_row(d, s->j + 1, i, 1), r, r->m->states, i * T, T, e);
    char *to = d->modules > 1 ? d->own + (size_t)i * d->row_bytes : prior_row(d, 0, i, 0);
    return s->j + 1 < d->n ? copy_states(g, to, r, r->m->states, i * T + T - 1, 1, e) : LM_OK;
}

/* Draft s->j of all slots that want one. */
static lm_code draft(step_of *s, bool *any, lm_err *e)
{
    lm_generator *g = s->g;
    generator_draft *d = g->draft;
    const int64_t last = d->modules - 1;
    row_graph *r =
        s->j > last && last ? &d->again[s->width] : &d->draft[s->j < last ? s->j : last][s->width];
    const size_t vocab = (size_t)lm_generator_vocab(g);
    s->run = r;
    *any = false;
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int64_t i = 0; i < s->d->rows; i++)
        *any |= ask_module(s, i);
    if (!*any)
        return LM_OK;
    if (generator_put_graph(r, e) ||
        g->b->copy(g->b, draft_logits(s, s->j, 0), lm_exec_data(r->x, r->m->logits),
                   (size_t)s->d->rows * vocab * sizeof(float), g->b->main, e))
        return e->code;
    for (int64_t i = 0; i < s->d->rows; i++)
        if (r->fresh[i] && take_states(s, i, e))
            return e->code;
    if (generator_wait_for_last(g, e))
        return e->code;
    lm_par_for(g->b->par, s->d->rows, 1, draw_drafts, s);
    return LM_OK;
}

/* The token and its drafts, through the model. */
static lm_code verify(step_of *s, lm_err *e)
{
    lm_generator *g = s->g;
    row_graph *r = &s->d->s;
    const int64_t T = rows_of_step(g), vocab = lm_generator_vocab(g);
    for (int64_t i = 0; i < s->d->rows; i++) {
        const int64_t n = s->ask->next[i] >= 0 ? g->draft->fresh[i] : 0;
        for (int64_t t = 0; t < T; t++) {
            const int64_t at = i * T + t;
            r->tokens[at] = t < n ? seen_of(g, i)[g->used[i] + t] : 0;
            for (int k = 0; k < r->n_ahead; k++)
                r->ahead[k][at] = t + k + 1 < n ? seen_of(g, i)[g->used[i] + t + k + 1] : 0;
            r->pos[at] = t < n ? (int32_t)(g->used[i] + t) : 0;
        }
        r->used[i] = n ? (int32_t)g->used[i] : 0;
        r->fresh[i] = (int32_t)n;
        r->rows[i] = (int32_t)i;
    }
    if (generator_put_graph(r, e))
        return e->code;
    s->p = lm_exec_data(r->x, r->m->logits);
    if (g->draft->p) {
        if (g->b->copy(g->b, g->draft->p, s->p, (size_t)(s->d->rows * T * vocab) * sizeof(float),
                       g->b->main, e))
            return e->code;
        s->p = g->draft->p;
    }
    return generator_wait_for_last(g, e);
}

/* Decide over the drafts of slots [begin, end). */
static void decide(void *ctx, int64_t begin, int64_t end, int worker)
{
    const step_of *s = ctx;
    lm_generator *g = s->g;
    generator_draft *d = g->draft;
    const int64_t T = rows_of_step(g), vocab = lm_generator_vocab(g);
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int32_t *ids = d->ids + i * T;
        int64_t j = 0;
        bool stays = s->ask->next[i] >= 0;
        d->count[i] = 0;
        for (; stays; j++) {
            const float *x = s->p + (i * T + j) * vocab;
            const int64_t n = g->used[i] + 1 + j;
            double *logprob = s->ask->logprobs ? &d->logprob[i * T + j] : NULL;
            const bool drafted = j + 1 < d->fresh[i];
            const int32_t was = drafted ? seen_of(g, i)[n] : -1;
            ids[j] = drafted ? accept(s, i, j, x, n, was, logprob)
                             : choose(s, i, x, n, &s->ask->last[i * T + j], logprob);
            stays = drafted && ids[j] == was;
            d->count[i]++;
        }
    }
}

/* ---- states of all tokens ---- */

/* Copy those of slots [from, to) away, or back. */
static lm_code move_states(const lm_generator *g, int64_t from, int64_t to, bool back, lm_err *e)
{
    char *saved = g->draft->saved;
    for (int i = 0; i < generator_model(g)->n_caches; i++) {
        const slot_cache *y = &g->caches[i];
        if (!y->fixed)
            continue;
        const size_t at = (size_t)from * y->slot_bytes, bytes = (size_t)(to - from) * y->slot_bytes;
        char *own = g->cache + y->at + at;
        if (g->b->copy(g->b, back ? own : saved + at, back ? saved + at : own, bytes, g->b->main,
                       e))
            return e->code;
        saved += (size_t)g->batch * y->slot_bytes;
    }
    return LM_OK;
}

/* Of slots with rejected drafts: the states before the step, and the rows that stay through the model once more. */
static lm_code run_again(step_of *s, lm_err *e)
{
    lm_generator *g = s->g;
    const generator_draft *d = g->draft;
    row_graph *r = &s->d->s;
    bool any = false;
    for (int64_t i = 0; i < s->d->rows; i++) {
        const bool again = s->ask->next[i] >= 0 && d->count[i] < d->fresh[i];
        if (again && move_states(g, i, i + 1, true, e))
            return e->code;
        any |= again;
    }
    if (!any)
        return LM_OK;
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int64_t i = 0; i < s->d->rows; i++)
        r->fresh[i] = s->ask->next[i] >= 0 && d->count[i] < d->fresh[i] ? d->count[i] : 0;
    return generator_put_graph(r, e);
}

/* What the modules read first in the next step: of rows of this one, or of those that they ran before it. */
static lm_code keep_waiting(const step_of *s, int64_t i, lm_err *e)
{
    lm_generator *g = s->g;
    const generator_draft *d = g->draft;
    const int64_t n = d->count[i], T = rows_of_step(g);
    for (int64_t k = n; k < d->modules; k++)
        if (g->b->copy(g->b, prior_row(d, k, i, 0), prior_row(d, k, i, n), d->row_bytes, g->b->main,
                       e))
            return e->code;
    return keep_first(g, &s->d->s, i, i * T, n, n, e);
}

lm_code lm_generator_speculate(lm_generator *g, const lm_draft_ask *ask, const lm_sample_attr *o,
                               lm_draft_answer *out, lm_err *e)
{
    generator_draft *d = g->draft;
    decode_width *w = generator_width_of(g, ask->next);
    step_of s = { .g = g, .ask = ask, .o = o, .d = w, .width = (int)(w - g->decode) };
    bool any = true;
    for (int64_t i = 0; i < w->rows; i++) {
        d->fresh[i] = ask->next[i] >= 0;
        if (ask->next[i] < 0)
            continue;
        if (g->used[i] + ask->most[i] >= g->context)
            return lm_fail(e, LM_EUSAGE, "context", "give a longer one",
                           "%" PRId64 " tokens are its capacity", g->context);
        seen_of(g, i)[g->used[i]] = ask->next[i];
    }
    g->b->range(g->b, "decode");
    lm_code rc = LM_OK;
    for (; s.j < d->n && any && !rc; s.j++)
        rc = draft(&s, &any, e);
    rc = rc || !d->saved ? rc : move_states(g, 0, w->rows, false, e);
    rc = rc ? rc : verify(&s, e);
    g->b->range(g->b, NULL);
    if (rc)
        return rc;
    lm_par_for(g->b->par, w->rows, 1, decide, &s);
    for (int64_t i = 0; i < w->rows; i++) {
        if (ask->next[i] < 0)
            continue;
        g->used[i] += d->count[i];
        if (keep_waiting(&s, i, e))
            return e->code;
    }
    if (d->saved && run_again(&s, e))
        return e->code;
    for (int64_t i = 0; i < w->rows; i++)
        d->fresh[i] -= ask->next[i] >= 0; /* the drafts */
    g->last = &w->s;
    g->last_slot = 0;
    *out = (lm_draft_answer){ d->ids, ask->logprobs ? d->logprob : NULL, d->count, d->fresh };
    return LM_OK;
}
