/* SPDX-License-Identifier: Apache-2.0 */
/* paged_choose.c -- the next token of each part of a step, chosen in the memory of its logits. */
#include <string.h>

#include "model/paged_impl.h"

/* Rows of `seen` have the whole context. */
static void describe(const lm_paged *g, const lm_sample_attr *o, bool logprob, lm_tensor in[5],
                     lm_tensor out[2], lm_call *call)
{
    const paged_chooser *c = &g->choice;
    const int64_t n = g->sequences;
    const char *ask = c->ask.dev, *answer = c->answer.dev;
    in[0] = lm_shape2(LM_DTYPE_F32, n, lm_paged_vocab(g));
    in[0].data = g->logits;
    in[1] = in[2] = (lm_tensor){ 0 };
    if (o->repetition_penalty != 1) {
        in[1] = lm_shape2(LM_DTYPE_I32, n, g->o.context + 1);
        in[1].data = c->seen.dev;
        in[2] = lm_shape1(LM_DTYPE_I32, n);
        in[2].data = (void *)(uintptr_t)(ask + ((char *)c->n_seen - (char *)c->ask.host));
    }
    in[3] = lm_shape1(LM_DTYPE_F64, n);
    in[3].data = (void *)(uintptr_t)(ask + ((char *)c->u - (char *)c->ask.host));
    in[4] = lm_shape1(LM_DTYPE_I32, n);
    in[4].data = (void *)(uintptr_t)(ask + ((char *)c->on - (char *)c->ask.host));
    out[0] = lm_shape1(LM_DTYPE_I32, n);
    out[0].data = (void *)(uintptr_t)(answer + ((char *)c->token - (char *)c->answer.host));
    out[1] = (lm_tensor){ 0 };
    if (logprob) {
        out[1] = lm_shape1(LM_DTYPE_F64, n);
        out[1].data = (void *)(uintptr_t)(answer + ((char *)c->logprob - (char *)c->answer.host));
    }
    *call = (lm_call){ .attr = o,
                       .in = in,
                       .n_in = 5,
                       .out = out,
                       .n_out = 2,
                       .work = c->work,
                       .par = g->b->par,
                       .stream = g->b->main };
}

static size_t share(size_t *at, size_t n, size_t size)
{
    size_t here = *at;
    *at += (n * size + 63) / 64 * 64;
    return here;
}

lm_code paged_make_chooser(lm_paged *g, lm_err *e)
{
    static const lm_sample_attr any = { 1, 0, 1, 0, 2 };
    paged_chooser *c = &g->choice;
    lm_backend *b = g->b;
    lm_tensor in[5], out[2];
    lm_call call;
    size_t n = (size_t)g->sequences, ask = 0, answer = 0;
    size_t u = share(&ask, n, sizeof(double)), on = share(&ask, n, sizeof(int32_t)),
           seen = share(&ask, n, sizeof(int32_t)), p = share(&answer, n, sizeof(double)),
           token = share(&answer, n, sizeof(int32_t));
    c->kernel = b->kernel(b, "sample", LM_DTYPE_F32);
    if (!c->kernel)
        return lm_fail(e, LM_EUSAGE, b->name, NULL, "has no kernel \"sample\"");
    if (lm_mirror_new(b, ask, "draws", &c->ask, e) ||
        lm_mirror_new(b, answer, "chosen tokens", &c->answer, e) ||
        lm_mirror_new(b, n * (size_t)(g->o.context + 1) * sizeof(int32_t), "tokens", &c->seen, e))
        return e->code;
    c->u = (double *)(void *)((char *)c->ask.host + u);
    c->on = (int32_t *)(void *)((char *)c->ask.host + on);
    c->n_seen = (int32_t *)(void *)((char *)c->ask.host + seen);
    c->logprob = (double *)(void *)((char *)c->answer.host + p);
    c->token = (int32_t *)(void *)((char *)c->answer.host + token);
    describe(g, &any, true, in, out, &call);
    c->work_bytes = c->kernel->work ? c->kernel->work(&call, b->threads) : 0;
    return c->work_bytes ? b->alloc(b, c->work_bytes, "choosing tokens", &c->work, e) : LM_OK;
}

void paged_drop_chooser(lm_paged *g)
{
    paged_chooser *c = &g->choice;
    if (c->work)
        g->b->free(g->b, c->work, c->work_bytes);
    lm_mirror_fini(&c->ask);
    lm_mirror_fini(&c->answer);
    lm_mirror_fini(&c->seen);
}

/* Write the host's inputs; the parts beyond those of the step are off. */
static lm_code put_draws(lm_paged *g, const lm_paged_draw *draw, bool penalty, lm_err *e)
{
    paged_chooser *c = &g->choice;
    const size_t line = (size_t)(g->o.context + 1);
    memset(c->on, 0, (size_t)g->sequences * sizeof *c->on);
    memset(c->u, 0, (size_t)g->sequences * sizeof *c->u);
    for (int64_t i = 0; i < g->n_parts; i++) {
        int32_t *seen = (int32_t *)c->seen.host + (size_t)i * line;
        c->on[i] = draw[i].on;
        c->u[i] = draw[i].u;
        c->n_seen[i] = penalty ? (int32_t)draw[i].n_seen : 0;
        for (int64_t k = 0; penalty && draw[i].on && k < draw[i].n_seen; k++)
            seen[k] = (int32_t)draw[i].seen[k];
    }
    if (penalty && lm_mirror_push(&c->seen, (size_t)g->n_parts * line * sizeof(int32_t), NULL, e))
        return e->code;
    return lm_mirror_push(&c->ask, c->ask.bytes, NULL, e);
}

lm_code lm_paged_choose(lm_paged *g, const lm_sample_attr *o, const lm_paged_draw *draw,
                        const int32_t **ids, const double **logprob, lm_err *e)
{
    paged_chooser *c = &g->choice;
    lm_tensor in[5], out[2];
    lm_call call;
    describe(g, o, logprob != NULL, in, out, &call);
    /* The backend read these inputs before the last choice was complete, so the host may write them. */
    if (put_draws(g, draw, o->repetition_penalty != 1, e))
        return e->code;
    c->kernel->run(&call);
    if (lm_mirror_pull(&c->answer, c->answer.bytes, NULL, e) || g->b->sync(g->b, g->b->main, e))
        return e->code;
    *ids = c->token;
    if (logprob)
        *logprob = c->logprob;
    return LM_OK;
}
