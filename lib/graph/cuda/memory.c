/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- memory of the device, pinned memory of the host, and copies between them. */
#include <string.h>

#include "base/text.h"
#include "graph/cuda/cuda.h"

static lm_code no_room(cuda_backend *c, size_t bytes, const char *purpose, lm_err *e)
{
    size_t unused = 0, total = 0;
    char asked[32], left[32], all[32];

    cuda_quiet(cudaMemGetInfo(&unused, &total));
    return lm_fail(e, LM_ELIMIT, c->name,
                   "use a smaller batch, shorter sequences or a smaller model; nvidia-smi shows "
                   "what else is on the device",
                   "no memory for %s: %s (%zu byte%s) asked for, %s of %s free", purpose,
                   lm_show_bytes((double)bytes, asked), bytes, lm_plural(bytes),
                   lm_show_bytes((double)unused, left), lm_show_bytes((double)total, all));
}

/* Does a thing fail for want of memory only?  Then the device goes on. */
static lm_code allocated(cuda_backend *c, cudaError_t answer, size_t bytes, const char *purpose,
                         lm_err *e)
{
    if (answer != cudaErrorMemoryAllocation)
        return cuda_did(c, answer, "allocating memory", e);
    cuda_quiet(answer);
    return no_room(c, bytes, purpose, e);
}

static lm_code zero(lm_backend *b, void *p, size_t bytes, lm_stream *s, lm_err *e)
{
    cuda_backend *c = cuda_of(b);

    if (!bytes || cuda_enter(c, e))
        return e->code;
    return cuda_did(c, cudaMemsetAsync(p, 0, bytes, cuda_stream_of(b, s)->s.handle), "zeroing", e);
}

static lm_code alloc(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cudaStream_t stream = cuda_stream_of(b, NULL)->s.handle;
    lm_code rc = cuda_enter(c, e);

    *out = NULL;
    bytes += !bytes;
    if (rc || (rc = allocated(c, cudaMalloc(out, bytes), bytes, purpose, e)))
        return rc;
    rc = cuda_did(c, cudaMemsetAsync(*out, 0, bytes, stream), "zeroing new memory", e);
    if (!rc) /* it may be used on another stream at once */
        rc = cuda_await(c, stream, NULL, "zeroing new memory", e);
    if (rc) {
        b->free(b, *out, bytes);
        *out = NULL;
    }
    return rc;
}

static void release(lm_backend *b, void *p, size_t bytes)
{
    (void)bytes;
    if (!p)
        return;
    cuda_quiet(cudaSetDevice(cuda_of(b)->index));
    cuda_quiet(cudaFree(p));
}

static lm_code host_alloc(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e)
{
    cuda_backend *c = cuda_of(b);
    cudaError_t answer;

    *out = NULL;
    if (cuda_enter(c, e))
        return e->code;
    bytes += !bytes;
    answer = cudaHostAlloc(out, bytes, cudaHostAllocPortable);
    if (answer == cudaErrorMemoryAllocation) {
        cuda_quiet(answer);
        return lm_fail(e, LM_ELIMIT, c->name, "free memory of the host, or raise 'ulimit -l'",
                       "no pinned memory of the host for %s: %zu byte%s asked for", purpose, bytes,
                       lm_plural(bytes));
    }
    if (cuda_did(c, answer, "allocating pinned memory", e))
        return e->code;
    memset(*out, 0, bytes);
    return LM_OK;
}

static void host_release(lm_backend *b, void *p, size_t bytes)
{
    (void)bytes;
    if (!p)
        return;
    cuda_quiet(cudaSetDevice(cuda_of(b)->index));
    cuda_quiet(cudaFreeHost(p));
}

static lm_code memory(lm_backend *b, size_t *free_bytes, size_t *total, lm_err *e)
{
    cuda_backend *c = cuda_of(b);

    *free_bytes = *total = 0;
    if (cuda_enter(c, e))
        return e->code;
    return cuda_did(c, cudaMemGetInfo(free_bytes, total), "asking for free memory", e);
}

static lm_code copy(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                    lm_err *e)
{
    cuda_backend *c = cuda_of(b);

    if (!bytes || cuda_enter(c, e))
        return e->code;
    return cuda_did(
        c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, cuda_stream_of(b, s)->s.handle),
        "copying", e);
}

void cuda_fill_memory(lm_backend *b)
{
    b->alloc = alloc;
    b->free = release;
    b->host_alloc = host_alloc;
    b->host_free = host_release;
    b->memory = memory;
    b->zero = zero;
    b->copy = copy;
}
