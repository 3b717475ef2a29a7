/* SPDX-License-Identifier: Apache-2.0 */
/* fresh.c -- fresh weights, streamed. */
#include "model/fresh.h"

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "model/weights.h"

enum { CHUNK = 1 << 22 }; /* elements: 16 MiB */

typedef struct {
    lm_rng rng;
    const lm_slice *s;
    float *dst;
    int64_t from;
} job;

static void init_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    (void)worker;
    if (j->s->init == LM_INIT_NORMAL)
        for (int64_t i = begin; i < end; i++)
            j->dst[i] = (float)(j->s->std * lm_rng_normal(j->rng, (uint64_t)(j->from + i)));
    else
        for (int64_t i = begin; i < end; i++)
            j->dst[i] = j->s->init == LM_INIT_ONES ? 1.0f : 0.0f;
}

void lm_slice_init(const lm_model *m, int i, uint64_t seed, lm_par *par, int64_t from,
                   int64_t count, float *dst)
{
    const lm_slice *s = &m->slice[i];
    job j = { lm_rng_make(seed, "init", lm_hash_str(s->name)), s, dst, from };
    lm_par_for(par, count, 1 << 14, init_range, &j);
}

lm_code lm_fresh_write(const lm_model *m, uint64_t seed, lm_par *par, lm_folder *f, lm_sink *sink,
                       lm_err *e)
{
    float *buf = NULL;
    double done = 0, total = 0;
    lm_code rc = lm_alloc_n(&buf, CHUNK, sizeof *buf, "fresh weights", e);
    for (int i = 0; i < m->n_params; i++)
        total += (double)m->param[i].count;
    for (const lm_st_tensor *t; !rc && !lm_stopping() && (t = lm_folder_next(f));) {
        int i = lm_model_slice(m, t->name);
        int64_t count = t->count; /* t is gone with the last chunk */
        if (i < 0)
            rc = lm_fail(e, LM_EBUG, t->name, NULL, "is planned but no tensor of the model");
        for (int64_t at = 0; !rc && at < count && !lm_stopping(); at += CHUNK) {
            int64_t n = count - at < CHUNK ? count - at : CHUNK;
            lm_slice_init(m, i, seed, par, at, n, buf);
            rc = lm_folder_write_as(f, LM_DTYPE_F32, buf, n, e);
            lm_progress(sink, "initialise", done += (double)n, total, "parameters", NULL);
        }
    }
    lm_free(buf);
    return rc;
}

lm_code lm_fresh_on(const lm_model *m, uint64_t seed, lm_backend *b, float *block, lm_err *e)
{
    float *drawn = NULL, *turned = NULL;
    size_t room = 0, room_turned = 0;
    lm_code rc = LM_OK;
    if (b->host_memory) {
        lm_weights_init(m, seed, b->par, block);
        return LM_OK;
    }
    for (int i = 0; !rc && i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        int64_t n = s->dim[0] * (s->ndim == 2 ? s->dim[1] : 1);
        const float *from;
        if (lm_grow(&drawn, &room, (size_t)n, sizeof *drawn, "a tensor", e) ||
            (s->transposed &&
             lm_grow(&turned, &room_turned, (size_t)n, sizeof *turned, "a tensor", e))) {
            rc = e->code;
            break;
        }
        lm_slice_init(m, i, seed, NULL, 0, n, drawn);
        if (s->transposed)
            lm_slice_turn(m, i, drawn, turned);
        from = s->transposed ? turned : drawn;
        rc = b->copy(b, block + lm_slice_offset(m, i), from, (size_t)n * sizeof *from, b->main, e)
                 ? e->code
                 : b->sync(b, b->main, e);
    }
    lm_free(drawn);
    lm_free(turned);
    return rc;
}
