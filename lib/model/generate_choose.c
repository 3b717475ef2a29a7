/* SPDX-License-Identifier: Apache-2.0 */
/* generate_choose.c -- the next token of each slot, chosen in the memory of its logits. */
#include "base/mem.h"
#include "model/generate_impl.h"

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

lm_code generator_make_chooser(lm_generator *g, lm_err *e)
{
    static const lm_sample_attr any = { 1, 0, 1, 0, 1 };
    chooser *c = &g->choice;
    lm_backend *b = g->b;
    size_t n = (size_t)g->batch, ask = 0, answer = 0;
    size_t u = generator_share(&ask, n, sizeof(double)),
           on = generator_share(&ask, n, sizeof(int32_t));
    size_t seen = generator_share(&ask, n, sizeof(int32_t)),
           p = generator_share(&answer, n, sizeof(double));
    size_t token = generator_share(&answer, n, sizeof(int32_t));
    c->kernel = b->kernel(b, "sample", LM_DTYPE_F32);
    if (!c->kernel)
        return lm_fail(e, LM_EUSAGE, b->name, NULL, "has no kernel \"sample\"");
    if (lm_mirror_new(b, ask, "draws", &c->ask, e) ||
        lm_mirror_new(b, answer, "chosen tokens", &c->answer, e) ||
        lm_mirror_new(b, n * (size_t)g->context * sizeof(int32_t), "tokens", &c->seen, e) ||
        lm_alloc_n(&c->sent, n, sizeof *c->sent, "slots", e))
        return e->code;
    c->u = generator_room(c->ask.host, u);
    c->on = generator_room(c->ask.host, on);
    c->n_seen = generator_room(c->ask.host, seen);
    c->logprob = generator_room(c->answer.host, p);
    c->token = generator_room(c->answer.host, token);
    for (int i = 0; c->kernel->work && i < g->n_decode; i++) { /* one row is among the widths */
        sample_call s;
        describe(g, 0, g->decode[i].rows, &any, &s);
        size_t bytes = c->kernel->work(&s.call, b->threads);
        c->work_bytes = bytes > c->work_bytes ? bytes : c->work_bytes;
    }
    return c->work_bytes ? b->alloc(b, c->work_bytes, "choosing tokens", &c->work, e) : LM_OK;
}

void generator_drop_chooser(lm_generator *g)
{
    chooser *c = &g->choice;
    if (c->work)
        g->b->free(g->b, c->work, c->work_bytes);
    lm_mirror_fini(&c->ask);
    lm_mirror_fini(&c->answer);
    lm_mirror_fini(&c->seen);
    lm_free(c->sent);
}

/* Copy ids that the backend does not have yet. */
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

lm_code generator_ask(lm_generator *g, const lm_choice *what, const double *u, lm_err *e)
{
    chooser *c = &g->choice;
    /* The backend read these inputs before the last choice was complete, so the host may write
     * them. */
    for (int64_t i = 0; i < g->last->m->build.batch; i++) {
        int64_t slot = g->last_slot + i;
        c->on[slot] = g->last->fresh[i] > 0;
        c->u[slot] = u[slot];
        c->n_seen[slot] = (int32_t)g->used[slot];
        if (c->on[slot] && what->how.repetition_penalty != 1 && send_seen(g, slot, e))
            return e->code;
    }
    return LM_OK;
}

lm_code generator_put_choice(lm_generator *g, const lm_choice *what, lm_err *e)
{
    chooser *c = &g->choice;
    sample_call s;
    describe(g, g->last_slot, g->last->m->build.batch, &what->how, &s);
    s.in[0].data = lm_exec_data(g->last->x, g->last->m->logits);
    if (what->how.repetition_penalty == 1)
        s.in[1] = s.in[2] = (lm_tensor){ 0 };
    if (!what->logprob)
        s.out[1] = (lm_tensor){ 0 };
    if (lm_mirror_push(&c->ask, c->ask.bytes, NULL, e))
        return e->code;
    c->kernel->run(&s.call);
    return lm_mirror_pull(&c->answer, c->answer.bytes, NULL, e);
}

lm_code generator_answer(lm_generator *g, const int32_t **ids, const double **logprob, lm_err *e)
{
    if (g->b->sync(g->b, g->b->main, e))
        return e->code;
    *ids = g->choice.token;
    if (logprob)
        *logprob = g->choice.logprob;
    return LM_OK;
}

lm_code lm_generator_choose(lm_generator *g, const lm_sample_attr *o, const double *u,
                            const int32_t **ids, const double **logprob, lm_err *e)
{
    const lm_choice what = { *o, logprob != NULL };
    return generator_ask(g, &what, u, e) || generator_put_choice(g, &what, e)
               ? e->code
               : generator_answer(g, ids, logprob, e);
}
