/* SPDX-License-Identifier: Apache-2.0 */
/* record.c -- CUDA graphs, made by capturing a stream. */
#include "base/mem.h"
#include "graph/cuda/cuda.h"

struct lm_recording {
    cudaGraphExec_t exec;
    size_t nodes;
};

size_t lm_cuda_recording_nodes(const lm_recording *r)
{
    return r->nodes;
}

static lm_code record_begin(lm_backend *b, lm_stream *s, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cudaError_t answer;

    if (cuda_enter(c, e))
        return e->code;
    /* of this thread: another one may allocate meanwhile */
    answer =
        cudaStreamBeginCapture(cuda_stream_of(b, s)->s.handle, cudaStreamCaptureModeThreadLocal);
    return answer ? cuda_refused(c, answer, "beginning a recording", e) : LM_OK;
}

static void recording_release(lm_backend *b, lm_recording *r)
{
    if (!r)
        return;
    cuda_quiet(cudaSetDevice(cuda_of(b)->index));
    if (r->exec)
        cuda_quiet(cudaGraphExecDestroy(r->exec));
    lm_free(r);
}

/* The device is none the worse for a recording that failed. */
static lm_code record_end(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cudaGraph_t graph = NULL;
    cudaError_t answer = cudaStreamEndCapture(cuda_stream_of(b, s)->s.handle, &graph);
    lm_code rc = LM_OK;

    *out = NULL;
    if (answer || !graph)
        rc = cuda_refused(c, answer ? answer : cudaErrorStreamCaptureInvalidated,
                          "recording a stream", e);
    rc = rc ? rc : lm_alloc_n(out, 1, sizeof **out, "a recording", e);
    if (!rc && (answer = cudaGraphInstantiate(&(*out)->exec, graph, 0)))
        rc = cuda_refused(c, answer, "making a recording ready", e);
    if (!rc)
        cuda_quiet(cudaGraphGetNodes(graph, NULL, &(*out)->nodes));
    if (graph)
        cuda_quiet(cudaGraphDestroy(graph));
    if (rc && *out) {
        recording_release(b, *out);
        *out = NULL;
    }
    return rc;
}

static lm_code replay(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e)
{
    cuda_backend *c = cuda_of(b);

    if (cuda_enter(c, e))
        return e->code;
    return cuda_did(c, cudaGraphLaunch(r->exec, cuda_stream_of(b, s)->s.handle),
                    "replaying a recording", e);
}

void cuda_fill_record(lm_backend *b)
{
    b->record_begin = record_begin;
    b->record_end = record_end;
    b->replay = replay;
    b->recording_free = recording_release;
}
