/* SPDX-License-Identifier: Apache-2.0 */
/* error.c -- failures of the CUDA runtime as lm_err. */
#include <errno.h>

#include "graph/cuda/cuda.h"

static lm_code report_answer(cuda_backend *c, cudaError_t answer, const char *doing,
                             const char *todo, lm_err *e)
{
    errno = 0; /* the reason is the driver's, not the system's */
    return lm_fail(e, LM_EIO, c->name, todo, "%s: %s (%s)", doing, cudaGetErrorString(answer),
                   cudaGetErrorName(answer));
}

static lm_code report_lost(cuda_backend *c, const char *doing, lm_err *e)
{
    cudaError_t why = (cudaError_t)atomic_load(&c->lost);

    return report_answer(
        c, why, doing,
        why == cudaErrorMemoryAllocation /* for a kernel's code or stack */
            ? "leave more of the device's memory free: use a smaller batch or shorter "
              "sequences"
            : "run again from what was saved; 'dmesg' and 'nvidia-smi' may tell more",
        e);
}

lm_code cuda_enter(cuda_backend *c, lm_err *e)
{
    if (atomic_load(&c->lost))
        return report_lost(c, "the device is lost", e);
    if (c->ended.code) {
        *e = c->ended;
        return e->code;
    }
    return cuda_did(c, cudaSetDevice(c->index), "the device failed", e);
}

/* What a recording does not take spoils the recording alone. */
static bool of_recording(cudaError_t answer)
{
    return answer >= cudaErrorStreamCaptureUnsupported && answer <= cudaErrorCapturedEvent;
}

lm_code cuda_did(cuda_backend *c, cudaError_t answer, const char *doing, lm_err *e)
{
    int none = cudaSuccess;

    if (answer == cudaSuccess)
        answer = cudaGetLastError();
    if (answer == cudaSuccess)
        return LM_OK;
    if (of_recording(answer))
        return cuda_refused(c, answer, doing, e);
    (void)cudaGetLastError();
    atomic_compare_exchange_strong(&c->lost, &none, (int)answer);
    return report_lost(c, doing, e);
}

lm_code cuda_refused(cuda_backend *c, cudaError_t answer, const char *doing, lm_err *e)
{
    (void)cudaGetLastError();
    return report_answer(c, answer, doing, NULL, e);
}

void cuda_quiet(cudaError_t answer)
{
    if (answer != cudaSuccess)
        (void)cudaGetLastError();
}
