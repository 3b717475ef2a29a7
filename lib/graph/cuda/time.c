/* SPDX-License-Identifier: Apache-2.0 */
/* time.c -- marks in time by events, and ranges for the profiler. */
#include <nvtx3/nvToolsExt.h>

#include "base/mem.h"
#include "graph/cuda/cuda.h"

struct lm_marks {
    int n;
    cudaEvent_t at[];
};

static void marks_release(lm_backend *b, lm_marks *m)
{
    cuda_quiet(cudaSetDevice(cuda_of(b)->index));
    for (int i = 0; m && i < m->n; i++)
        if (m->at[i])
            cuda_quiet(cudaEventDestroy(m->at[i]));
    lm_free(m);
}

static lm_code marks_new(lm_backend *b, int n, lm_marks **out, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    size_t bytes = sizeof **out + (size_t)n * sizeof(cudaEvent_t);
    lm_code rc = cuda_enter(c, e);

    *out = NULL;
    rc = rc ? rc : lm_alloc_n(out, 1, bytes, "marks in time", e);
    if (!rc)
        (*out)->n = n;
    for (int i = 0; i < n && !rc; i++)
        rc = cuda_did(c, cudaEventCreateWithFlags(&(*out)->at[i], cudaEventDefault),
                      "marks in time", e);
    if (rc) {
        marks_release(b, *out);
        *out = NULL;
    }
    return rc;
}

static void mark(lm_backend *b, lm_marks *m, int i, lm_stream *s)
{
    lm_err unseen = { 0 }; /* it stays, and sync tells */

    if (!cuda_enter(cuda_of(b), &unseen))
        cuda_did(cuda_of(b), cudaEventRecord(m->at[i], cuda_stream_of(b, s)->s.handle),
                 "marking a time", &unseen);
}

static lm_code marks_read(lm_backend *b, lm_marks *m, int n, double *seconds, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    lm_code rc = cuda_enter(c, e);

    for (int i = 0; i < n && !rc; i++) {
        float ms = 0;

        rc = cuda_await(c, NULL, m->at[i], "the device failed", e);
        if (!rc)
            rc = cuda_did(c, cudaEventElapsedTime(&ms, m->at[0], m->at[i]), "reading a time", e);
        seconds[i] = ms * 1e-3;
    }
    return rc;
}

static void range(lm_backend *b, const char *name)
{
    (void)b;
    if (name)
        nvtxRangePushA(name);
    else
        nvtxRangePop();
}

void cuda_fill_time(lm_backend *b)
{
    b->marks_new = marks_new;
    b->marks_free = marks_release;
    b->mark = mark;
    b->marks_read = marks_read;
    b->range = range;
}
