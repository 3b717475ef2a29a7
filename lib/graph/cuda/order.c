/* SPDX-License-Identifier: Apache-2.0 */
/* order.c -- streams, what waits for what, and step numbers. */
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "graph/cuda/cuda.h"

/* Step numbers, then tickets. */
enum { TICKETS_AT = 256, DEVICE_BYTES = TICKETS_AT + LM_CUDA_TICKETS * sizeof(unsigned) };
_Static_assert(sizeof(lm_step) <= TICKETS_AT, "tickets lie behind the step numbers");

static void stream_release(lm_backend *b, lm_stream *s)
{
    cuda_backend *c = cuda_of(b);
    cuda_stream *x = (cuda_stream *)s, **at = &c->streams;

    if (!x)
        return;
    while (*at && *at != x)
        at = &(*at)->next;
    if (*at)
        *at = x->next;
    cuda_quiet(cudaSetDevice(c->index));
    if (x->s.handle) {
        cuda_quiet(cudaStreamSynchronize(x->s.handle));
        cuda_quiet(cudaStreamDestroy(x->s.handle));
    }
    if (x->here)
        cuda_quiet(cudaEventDestroy(x->here));
    for (int i = 0; i < STEP_ENTRIES; i++)
        if (x->sent[i])
            cuda_quiet(cudaEventDestroy(x->sent[i]));
    b->free(b, (void *)x->s.step, DEVICE_BYTES);
    b->host_free(b, x->entries, STEP_ENTRIES * sizeof(lm_step));
    lm_free(x);
}

static lm_code make_events(cuda_backend *c, cuda_stream *x, lm_err *e)
{
    lm_code rc =
        cuda_did(c, cudaEventCreateWithFlags(&x->here, cudaEventDisableTiming), "events", e);

    for (int i = 0; i < STEP_ENTRIES && !rc; i++)
        rc =
            cuda_did(c, cudaEventCreateWithFlags(&x->sent[i], cudaEventDisableTiming), "events", e);
    return rc;
}

static lm_code stream_new(lm_backend *b, lm_stream **out, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cuda_stream *x = NULL;
    void *entries = NULL, *step = NULL;

    *out = NULL;
    if (cuda_enter(c, e) || lm_alloc_n(&x, 1, sizeof *x, "a stream", e))
        return e->code;
    x->s = (lm_stream){ .lt = b->main ? NULL : c->lt, /* its workspace serves one stream */
                        .sms = c->sms,
                        .cc = c->cc,
                        .shared_max = c->shared_max,
                        .level = c->level,
                        .deterministic = c->deterministic };
    x->next = c->streams;
    c->streams = x;
    if (!cuda_did(c, cudaStreamCreateWithFlags(&x->s.handle, cudaStreamNonBlocking), "a stream",
                  e)) {
        b->main = b->main ? b->main : &x->s;
        if (!make_events(c, x, e) &&
            !b->host_alloc(b, STEP_ENTRIES * sizeof(lm_step), "step numbers", &entries, e))
            b->alloc(b, DEVICE_BYTES, "step numbers", &step, e);
    }
    x->entries = entries;
    x->s.step = step;
    x->s.tickets = step ? (unsigned *)((char *)step + TICKETS_AT) : NULL;
    if (!step) {
        b->main = b->main == &x->s ? NULL : b->main;
        stream_release(b, &x->s);
        return e->code;
    }
    *out = &x->s;
    return LM_OK;
}

static lm_code follow(lm_backend *b, lm_stream *s, lm_stream *first, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cuda_stream *x = cuda_stream_of(b, s), *y = cuda_stream_of(b, first);

    if (x == y || cuda_enter(c, e) ||
        cuda_did(c, cudaEventRecord(y->here, y->s.handle), "ordering streams", e))
        return e->code;
    return cuda_did(c, cudaStreamWaitEvent(x->s.handle, y->here, 0), "ordering streams", e);
}

/* Of work that may depend on other ranks.  At first the host asks without a pause, as short work is soon done. */
static lm_code poll(cuda_backend *c, cudaStream_t s, cudaEvent_t event, const char *doing,
                    lm_err *e)
{
    enum { EAGER = 2000, EVERY = 64 };
    const lm_backend *b = &c->b;
    const double began = lm_now();

    for (int i = 0;; i++) {
        cudaError_t answer = event ? cudaEventQuery(event) : cudaStreamQuery(s);
        if (answer != cudaErrorNotReady)
            return cuda_groups_look(c, e) ? e->code : cuda_did(c, answer, doing, e);
        if (i % EVERY == EVERY - 1 &&
            (cuda_groups_look(c, e) || (b->watch && b->watch(b->watch_ctx, lm_now() - began, e))))
            break;
        if (i > EAGER)
            usleep(50);
    }
    cuda_groups_end(c);
    c->ended = *e;
    return e->code;
}

lm_code cuda_await(cuda_backend *c, cudaStream_t s, cudaEvent_t event, const char *doing, lm_err *e)
{
    if (c->groups)
        return poll(c, s, event, doing, e);
    return cuda_did(c, event ? cudaEventSynchronize(event) : cudaStreamSynchronize(s), doing, e);
}

static lm_code wait_for(lm_backend *b, lm_stream *s, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    lm_code rc = cuda_enter(c, e);

    if (s && !rc)
        return cuda_await(c, cuda_stream_of(b, s)->s.handle, NULL, "the device failed", e);
    for (cuda_stream *x = c->streams; x && !rc; x = x->next)
        rc = cuda_await(c, x->s.handle, NULL, "the device failed", e);
    return rc;
}

bool cuda_recording(const cuda_stream *x)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

    cuda_quiet(cudaStreamIsCapturing(x->s.handle, &status));
    return status != cudaStreamCaptureStatusNone;
}

/* In a recording the numbers are not put down: they are those of the replay. */
static lm_code step(lm_backend *b, const lm_step *step, lm_stream *s, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cuda_stream *x = cuda_stream_of(b, s);
    int entry = (int)(x->steps % STEP_ENTRIES);
    lm_code rc = cuda_enter(c, e);

    if (rc || cuda_recording(x))
        return rc;
    if (x->steps >= STEP_ENTRIES)
        rc = cuda_await(c, NULL, x->sent[entry], "the device failed", e);
    if (rc)
        return rc;
    x->entries[entry] = *step;
    rc = cuda_did(c,
                  cudaMemcpyAsync((void *)x->s.step, &x->entries[entry], sizeof *step,
                                  cudaMemcpyHostToDevice, x->s.handle),
                  "sending step numbers", e);
    if (!rc)
        rc = cuda_did(c, cudaEventRecord(x->sent[entry], x->s.handle), "sending step numbers", e);
    x->steps += !rc;
    return rc;
}

void cuda_fill_order(lm_backend *b)
{
    b->stream_new = stream_new;
    b->stream_free = stream_release;
    b->follow = follow;
    b->sync = wait_for;
    b->step = step;
}
