/* SPDX-License-Identifier: Apache-2.0 */
/* test_emu.c -- the emulated GPU that kernels are tested on: its results, and the errors it
 * detects. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cublasLt.h"
#include "emu.h"
#include "numeric/dtype.h"
#include "selftest.h"

#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static cudaStream_t stream;

#define ok(call)  assert_int_equal(call, cudaSuccess)
#define sync_ok() ok(cudaStreamSynchronize(stream))

static int set_up(void **state)
{
    (void)state;
    lm_emu_reset();
    lm_emu_quiet(true);
    lm_emu_order(LM_EMU_FORWARD, 0);
    return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
}

static int tear_down(void **state)
{
    (void)state;
    lm_emu_reset();
    return cudaStreamDestroy(stream);
}

static void *device(size_t bytes)
{
    void *p = NULL;
    ok(cudaMalloc(&p, bytes));
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 256, 0);
    return p;
}

static void fetch(void *to, const void *from, size_t bytes)
{
    ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    sync_ok();
}

/* The device failed with a reason that contains `word`; then it is reset. */
static void assert_gave_up(const char *word)
{
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchFailure); /* it stays */
    assert_non_null(strstr(lm_emu_report(), word));
    lm_emu_reset();
    ok(cudaGetLastError());
}

/* Forward, backward, and five times shuffled. */
static void use_order(int i)
{
    lm_emu_order(i < 2 ? i : LM_EMU_SHUFFLED, (uint64_t)i);
}

/* ---- threads ---- */

static void test_sums_in_every_order(void **state)
{
    (void)state;
    float *x = device(5000 * sizeof *x), *y = device(3 * sizeof *y), host[5000], sums[3];
    for (int i = 0; i < 5000; i++)
        host[i] = (float)i;
    ok(cudaMemcpyAsync(x, host, sizeof host, cudaMemcpyHostToDevice, stream));
    for (int i = 0; i < 7; i++) {
        use_order(i);
        emu_try_sum(x, y, 5000, 3, i % 2 ? 1024 : 96, stream);
        fetch(sums, y, sizeof sums);
        assert_true(sums[0] + sums[1] + sums[2] == 4999.0f * 2500.0f);
    }
    ok(cudaFree(x));
    ok(cudaFree(y));
}

static void test_warp(void **state)
{
    (void)state;
    uint32_t *y = device(32 * 8 * sizeof *y), got[32][8];
    for (int i = 0; i < 7; i++) {
        use_order(i);
        emu_try_warp(y, stream);
        fetch(got, y, sizeof got);
        for (uint32_t lane = 0; lane < 32; lane++) {
            assert_int_equal(got[lane][0], lane * (lane + 1) / 2);
            if (lane % 8 == 0)
                assert_int_equal(got[lane][1], 8 * lane + 28);
            assert_int_equal(got[lane][2], 30);
            assert_int_equal(got[lane][3], 0xaaaaaaaa);
            assert_int_equal(got[lane][4], 2);
            assert_int_equal(got[lane][5], lane < 16 ? 120 : 376);
            assert_int_equal(got[lane][6], 4 * (lane ^ 1) + 1);
            assert_int_equal(got[lane][7], lane < 25 ? lane + 7 : lane);
        }
    }
    ok(cudaFree(y));
}

static void test_votes_of_a_block(void **state)
{
    (void)state;
    int *y = device(3 * sizeof *y), got[3];
    emu_try_votes(y, 77, stream);
    fetch(got, y, sizeof got);
    assert_int_equal(got[0], 38);
    assert_int_equal(got[1], 1);
    assert_int_equal(got[2], 1);
    emu_try_votes(y, 5, stream);
    fetch(got, y, sizeof got);
    assert_int_equal(got[1], 0);
    ok(cudaFree(y));
}

static void test_atomics_and_places(void **state)
{
    (void)state;
    unsigned *y = device(16), got[4];
    int *numbers = device(288 * sizeof *numbers), host[288];
    float half;
    ok(cudaMemsetAsync(y, 0, 16, stream));
    emu_try_atomics(y, 10, stream);
    fetch(got, y, sizeof got);
    memcpy(&half, &got[3], 4);
    assert_int_equal(got[0], 640);
    assert_int_equal(got[1], 63);
    assert_int_equal(got[2], 7);
    assert_true(half == 320.0f);
    emu_try_places(numbers, stream);
    fetch(host, numbers, sizeof host);
    for (int i = 0; i < 288; i++)
        assert_int_equal(host[i], i);
    ok(cudaFree(y));
    ok(cudaFree(numbers));
}

static void test_block_orders(void **state)
{
    (void)state;
    enum { N = 37 };
    int *y = device((N + 2) * sizeof *y), got[7][N + 2];
    for (int i = 0; i < 7; i++) {
        bool seen[N] = { false };
        use_order(i);
        ok(cudaMemsetAsync(y, 0, (N + 2) * sizeof *y, stream));
        emu_try_order(y, N, stream);
        fetch(got[i], y, sizeof got[i]);
        for (int k = 0; k < N; k++) {
            assert_in_range(got[i][k], 0, N - 1);
            seen[got[i][k]] = true;
        }
        for (int k = 0; k < N; k++)
            assert_true(seen[k]);
    }
    for (int k = 0; k < N; k++) {
        assert_int_equal(got[0][k], k);
        assert_int_equal(got[1][k], N - 1 - k);
    }
    assert_int_equal(got[0][N + 1], 31);
    assert_int_equal(got[1][N + 1], 0);
    assert_memory_not_equal(got[2], got[3], sizeof got[2]);
    ok(cudaFree(y));
}

/* Without a barrier another order gives other bits; the correct kernel gives the same bits. */
static void test_orders_reveal_a_race(void **state)
{
    (void)state;
    enum { N = 128 };
    float *y = device(N * sizeof *y), got[7][N];
    for (int racy = 0; racy < 2; racy++) {
        bool differs = false;
        for (int i = 0; i < 7; i++) {
            use_order(i);
            emu_try_rotate(y, N, 5, racy, stream);
            fetch(got[i], y, sizeof got[i]);
            differs |= memcmp(got[0], got[i], sizeof got[i]) != 0;
        }
        assert_int_equal(differs, racy);
        assert_int_equal(memcmp(got[0], got[1], sizeof got[0]) != 0, racy);
        if (!racy)
            for (int i = 0; i < N; i++)
                assert_true(got[0][i] == (float)((i + 5) % N));
    }
    ok(cudaFree(y));
}

/* ---- errors of kernels ---- */

static void test_divergence_is_caught(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        use_order(i);
        emu_try_diverge(64, 40, stream);
        assert_gave_up("kernel diverge");
        for (int barrier = 0; barrier < 2; barrier++) {
            emu_try_half_warp(barrier, stream);
            assert_gave_up("kernel half_warp");
        }
        emu_try_mixed_warp(stream);
        assert_gave_up("different collectives");
    }
    emu_try_diverge(64, 64, stream); /* all of them, or none */
    emu_try_diverge(64, 0, stream);
    sync_ok();
}

static void test_overruns_are_caught(void **state)
{
    (void)state;
    emu_try_shared(100, 100, stream);
    sync_ok();
    if (SANITIZED) /* which stops the program there */
        return;
    emu_try_shared(100, 101, stream);
    assert_gave_up("100 bytes of shared memory");
    emu_try_shared(0, 1, stream);
    assert_gave_up("kernel shared");
    float *y = device(7 * sizeof *y), *after = device(4);
    emu_try_write(y, 6, stream);
    sync_ok();
    for (int64_t at = -1; at < 8; at += 8) {
        emu_try_write(y, at, stream);
        assert_gave_up("kernel write_at");
        ok(cudaMemset(after, 0, 4));
        ok(cudaFree(y));
        lm_emu_reset();
        y = device(7 * sizeof *y);
    }
    y[7] = 1; /* by a thread that is not checked */
    ok(cudaFree(y));
    assert_gave_up("guards are damaged");
    ok(cudaFree(after));
}

static void test_launch_limits(void **state)
{
    (void)state;
    const struct {
        unsigned dim[6];
        cudaError_t code;
    } shapes[] = {
        { { 1, 1, 1, 1024, 1, 1 }, cudaSuccess },
        { { 1, 1, 1, 1025, 1, 1 }, cudaErrorInvalidConfiguration },
        { { 1, 1, 1, 32, 32, 2 }, cudaErrorInvalidConfiguration },
        { { 1, 1, 1, 1, 1, 65 }, cudaErrorInvalidConfiguration },
        { { 0, 1, 1, 32, 1, 1 }, cudaErrorInvalidConfiguration },
        { { 1, 65536, 1, 32, 1, 1 }, cudaErrorInvalidConfiguration },
        { { 1, 1, 65536, 32, 1, 1 }, cudaErrorInvalidConfiguration },
        { { 1, 1, 1, 0, 1, 1 }, cudaErrorInvalidConfiguration },
        { { 65536, 1, 1, 1, 1, 1 }, cudaSuccess },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const unsigned *d = shapes[i].dim;
        emu_try_shape(d[0], d[1], d[2], d[3], d[4], d[5], stream);
        assert_int_equal(cudaPeekAtLastError(), shapes[i].code);
        assert_int_equal(cudaGetLastError(), shapes[i].code);
        ok(cudaGetLastError()); /* unlike a fault, this error is cleared */
    }
    emu_try_shared(48 << 10, 48 << 10, stream);
    ok(cudaGetLastError());
    emu_try_shared((48 << 10) + 1, 1, stream);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    emu_try_shared_allowed(227 << 10, stream);
    sync_ok();
    emu_try_shared_allowed((227 << 10) + 1, stream);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    sync_ok();
}

static void test_strict_pointers(void **state)
{
    (void)state;
    float host[2], *y = device(8);
    lm_emu_strict(true);
    emu_try_write(y, 0, stream);
    ok(cudaGetLastError());
    emu_try_write(host, 0, stream);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    lm_emu_strict(false);
    sync_ok();
    ok(cudaFree(y));
}

/* ---- streams ---- */

static void test_work_is_done_late(void **state)
{
    (void)state;
    float *y = device(400), host[100] = { 0 }, in[100] = { 0 };
    emu_try_fill(y, 3, 100, stream);
    ok(cudaMemcpyAsync(host, y, sizeof host, cudaMemcpyDeviceToHost, stream));
    assert_true(host[0] == 0); /* before any wait */
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    ok(cudaStreamQuery(stream));
    assert_true(host[0] == 3 && host[99] == 3);
    in[0] = 1;
    ok(cudaMemcpyAsync(y, in, sizeof in, cudaMemcpyHostToDevice, stream));
    in[0] = 2; /* too early */
    fetch(host, y, sizeof host);
    assert_true(host[0] == 2);
    lm_emu_eager(true);
    emu_try_fill(y, 4, 100, stream);
    ok(cudaMemcpyAsync(host, y, sizeof host, cudaMemcpyDefault, stream));
    assert_true(host[0] == 4);
    lm_emu_eager(false);
    ok(cudaFree(y));
}

static void test_events_order_streams(void **state)
{
    (void)state;
    cudaStream_t other;
    cudaEvent_t here, there;
    float *y = device(400), host[100] = { 0 }, ms = -1;
    ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&here, cudaEventDisableTiming));
    ok(cudaEventCreateWithFlags(&there, cudaEventDefault));
    ok(cudaStreamWaitEvent(other, here, 0)); /* never recorded: nothing to wait for */

    emu_try_fill(y, 5, 100, stream);
    ok(cudaMemcpyAsync(host, y, 400, cudaMemcpyDefault, other)); /* does not wait */
    ok(cudaStreamSynchronize(other));
    assert_true(host[0] != 5);

    ok(cudaEventRecord(here, stream));
    emu_try_fill(y, 6, 100, stream); /* behind the event */
    ok(cudaStreamWaitEvent(other, here, 0));
    ok(cudaMemcpyAsync(host, y, 400, cudaMemcpyDefault, other));
    ok(cudaEventRecord(there, other));
    assert_int_equal(cudaEventQuery(there), cudaErrorNotReady);
    ok(cudaEventSynchronize(there));
    assert_true(host[0] == 5);
    sync_ok();

    assert_int_equal(cudaEventElapsedTime(&ms, here, there), cudaErrorInvalidResourceHandle);
    cudaEvent_t start;
    ok(cudaEventCreate(&start));
    ok(cudaEventRecord(start, stream));
    assert_int_equal(cudaEventElapsedTime(&ms, there, start), cudaErrorNotReady);
    ok(cudaEventSynchronize(start));
    ok(cudaEventElapsedTime(&ms, there, start));
    assert_true(ms >= 0);
    ok(cudaEventDestroy(start));
    ok(cudaEventDestroy(here));
    ok(cudaEventDestroy(there));
    ok(cudaStreamDestroy(other));
    ok(cudaFree(y));
    cudaGetLastError();
}

static void test_capture_and_replay(void **state)
{
    (void)state;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus status;
    float *y = device(400), host[100];
    ok(cudaMemsetAsync(y, 0, 400, stream));
    sync_ok();
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    ok(cudaStreamIsCapturing(stream, &status));
    assert_int_equal(status, cudaStreamCaptureStatusActive);
    emu_try_next(y, y, 100, stream);
    emu_try_next(y, y, 100, stream);
    ok(cudaStreamEndCapture(stream, &graph));
    fetch(host, y, 400);
    assert_true(host[0] == 0); /* kept, not done */
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++)
        ok(cudaGraphLaunch(exec, stream));
    ok(cudaGraphExecDestroy(exec)); /* work in progress is still completed */
    fetch(host, y, 400);
    assert_true(host[0] == 6 && host[99] == 6);

    /* A wait or an allocation makes the recording fail. */
    void *p = NULL;
    for (int i = 0; i < 2; i++) {
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        emu_try_next(y, y, 100, stream);
        assert_int_equal(i ? cudaMalloc(&p, 8) : cudaStreamSynchronize(stream),
                         cudaErrorStreamCaptureUnsupported);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        assert_null(graph);
    }
    cudaGetLastError();
    fetch(host, y, 400);
    assert_true(host[0] == 6);
    ok(cudaFree(y));
}

static void test_capture_forks_and_joins(void **state)
{
    (void)state;
    cudaStream_t other;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *y = device(400), host[100];
    ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    ok(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    for (int joined = 0; joined < 2; joined++) {
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        emu_try_fill(y, 1, 100, stream);
        ok(cudaEventRecord(fork, stream));
        ok(cudaStreamWaitEvent(other, fork, 0));
        emu_try_next(y, y, 100, other);
        ok(cudaEventRecord(join, other));
        if (joined)
            ok(cudaStreamWaitEvent(stream, join, 0));
        assert_int_equal(cudaStreamEndCapture(stream, &graph),
                         joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
    }
    cudaGetLastError();
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphLaunch(exec, stream));
    fetch(host, y, 400);
    assert_true(host[0] == 2);
    ok(cudaGraphExecDestroy(exec));
    ok(cudaGraphDestroy(graph));
    ok(cudaEventDestroy(fork));
    ok(cudaEventDestroy(join));
    ok(cudaStreamDestroy(other));
    ok(cudaFree(y));
}

/* ---- memory, and its end ---- */

static void test_memory(void **state)
{
    (void)state;
    size_t before, now, total;
    void *p = NULL, *pinned = NULL;
    uint32_t word;
    ok(cudaMemGetInfo(&before, &total));
    assert_true(total >= before);
    assert_int_equal(cudaMalloc(&p, total),
                     before == total ? cudaSuccess : cudaErrorMemoryAllocation);
    cudaFree(p);
    assert_int_equal(cudaMalloc(&p, total + 1), cudaErrorMemoryAllocation);
    assert_null(p);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    ok(cudaGetLastError());
    p = device((size_t)1 << 30); /* cheap: most of it is never touched */
    ok(cudaMemGetInfo(&now, &total));
    assert_int_equal(before - now, (size_t)1 << 30);
    fetch(&word, p, sizeof word);
    assert_int_equal(word, 0xffffffff); /* a NaN where no thread has written */
    assert_int_equal(
        cudaMemcpyAsync(&word, (char *)p + ((size_t)1 << 30) - 2, 4, cudaMemcpyDefault, stream),
        cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpyAsync(p, p, 4, cudaMemcpyHostToDevice, stream),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaFreeHost(p), cudaErrorInvalidValue);
    ok(cudaFree(p));
    ok(cudaFree(NULL));
    ok(cudaMallocHost(&pinned, 100));
    struct cudaPointerAttributes attr;
    ok(cudaPointerGetAttributes(&attr, pinned));
    assert_int_equal(attr.type, cudaMemoryTypeHost);
    ok(cudaFreeHost(pinned));
    ok(cudaMemGetInfo(&now, &total));
    assert_int_equal(now, before);
    cudaGetLastError();
}

static void test_device_is_lost(void **state)
{
    (void)state;
    float *y = device(400), host[100] = { 0 };
    void *p;
    lm_emu_fail(2);
    emu_try_fill(y, 1, 100, stream);
    emu_try_fill(y, 2, 100, stream);
    ok(cudaMemcpyAsync(host, y, 400, cudaMemcpyDefault, stream));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    assert_true(host[0] == 0);
    assert_int_equal(cudaMalloc(&p, 8), cudaErrorLaunchFailure);
    assert_int_equal(cudaMemcpyAsync(host, y, 400, cudaMemcpyDefault, stream),
                     cudaErrorLaunchFailure);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    assert_string_equal(cudaGetErrorString(cudaGetLastError()), "unspecified launch failure");
    ok(cudaFree(y));
    assert_non_null(strstr(lm_emu_report(), "gone"));
}

/* ---- cuBLASLt ---- */

typedef struct {
    cudaDataType_t type, out;
    cublasComputeType_t compute;
    bool ta, tb;
    uint32_t epilogue;
    float alpha, beta;
    int64_t m, n, k;
} lt_case;

static void lt_set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attr, const void *value,
                   size_t bytes)
{
    assert_int_equal(cublasLtMatmulDescSetAttribute(d, attr, value, bytes), CUBLAS_STATUS_SUCCESS);
}

/* One product of small integers, each of which every type holds. */
static cublasStatus_t lt_run(const lt_case *t, const float *a, const float *b, float *d, float *aux,
                             float *bias)
{
    enum { ROOM = 4096 };
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, ld;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    int32_t ta = t->ta, tb = t->tb;
    int64_t aux_ld = (t->m + 7) / 8 * 8, lda = (t->ta ? t->k : t->m) + 3;
    uint64_t room = ROOM;
    lm_dtype type = t->type == CUDA_R_32F   ? LM_DTYPE_F32
                    : t->type == CUDA_R_16F ? LM_DTYPE_F16
                                            : LM_DTYPE_BF16;
    lm_dtype out = t->out == CUDA_R_32F ? LM_DTYPE_F32 : type;
    char *da = device(ROOM), *db = device(ROOM), *dd = device(ROOM), *da_x = device(ROOM);
    char *dbias = device(ROOM), *work = device(ROOM);
    static char buf[ROOM];

    assert_int_equal(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    for (int64_t j = 0; j < (t->ta ? t->m : t->k); j++)
        lm_convert(LM_DTYPE_F32, a + j * (lda - 3), type,
                   buf + (size_t)(j * lda) * lm_dtype_size(type), lda - 3);
    ok(cudaMemcpy(da, buf, ROOM, cudaMemcpyDefault));
    lm_convert(LM_DTYPE_F32, b, type, buf, t->k * t->n);
    ok(cudaMemcpy(db, buf, ROOM, cudaMemcpyDefault));
    lm_convert(LM_DTYPE_F32, d, out, buf, t->m * t->n);
    ok(cudaMemcpy(dd, buf, ROOM, cudaMemcpyDefault));
    lm_convert(LM_DTYPE_F32, aux, out, buf, aux_ld * t->n);
    ok(cudaMemcpy(da_x, buf, ROOM, cudaMemcpyDefault));
    lm_convert(LM_DTYPE_F32, bias, out, buf, t->m > t->n ? t->m : t->n);
    ok(cudaMemcpy(dbias, buf, ROOM, cudaMemcpyDefault));

    cublasLtMatmulDescCreate(&desc, t->compute, CUDA_R_32F);
    lt_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta);
    lt_set(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
    lt_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &t->epilogue, sizeof t->epilogue);
    lt_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &dbias, sizeof dbias);
    lt_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &da_x, sizeof da_x);
    lt_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld);
    assert_int_equal(
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &room, sizeof room),
        CUBLAS_STATUS_INVALID_VALUE);
    cublasLtMatrixLayoutCreate(&la, t->type, (uint64_t)(t->ta ? t->k : t->m),
                               (uint64_t)(t->ta ? t->m : t->k), lda);
    cublasLtMatrixLayoutCreate(&lb, t->type, (uint64_t)(t->tb ? t->n : t->k),
                               (uint64_t)(t->tb ? t->k : t->n), t->tb ? t->n : t->k);
    cublasLtMatrixLayoutCreate(&ld, t->out, (uint64_t)t->m, (uint64_t)t->n, t->m);
    cublasLtMatmulPreferenceCreate(&pref);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room,
                                         sizeof room);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, ld, ld, pref, 1, &found, &n_found);
    if (!status) {
        assert_int_equal(n_found, 1);
        /* Less aligned than it was chosen for. */
        assert_int_equal(cublasLtMatmul(handle, desc, &t->alpha, da + 4, la, db, lb, &t->beta, dd,
                                        ld, dd, ld, &found.algo, work, ROOM, stream),
                         CUBLAS_STATUS_NOT_SUPPORTED);
        status = cublasLtMatmul(handle, desc, &t->alpha, da, la, db, lb, &t->beta, dd, ld, dd, ld,
                                &found.algo, work, ROOM, stream);
    }
    fetch(buf, dd, ROOM);
    lm_convert(out, buf, LM_DTYPE_F32, d, t->m * t->n);
    fetch(buf, da_x, ROOM);
    lm_convert(out, buf, LM_DTYPE_F32, aux, aux_ld * t->n);
    fetch(buf, dbias, ROOM);
    lm_convert(out, buf, LM_DTYPE_F32, bias, t->m > t->n ? t->m : t->n);

    void *all[] = { da, db, dd, da_x, dbias, work };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ok(cudaFree(all[i]));
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(ld);
    cublasLtMatmulPreferenceDestroy(pref);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(handle);
    return status;
}

enum { LT_MAX = 16 };
static float lt_a[LT_MAX * LT_MAX], lt_b[LT_MAX * LT_MAX], lt_d[LT_MAX * LT_MAX],
    lt_aux[LT_MAX * LT_MAX], lt_bias[LT_MAX];

static void lt_fill(void)
{
    for (int i = 0; i < LT_MAX * LT_MAX; i++) {
        lt_a[i] = (float)(i * 7 % 5 - 2);
        lt_b[i] = (float)(i * 3 % 7 - 3);
        lt_d[i] = (float)(i % 4);
        lt_aux[i] = 100;
    }
    for (int i = 0; i < LT_MAX; i++)
        lt_bias[i] = (float)(i - 4);
}

static float lt_dot(const lt_case *t, int64_t i, int64_t j)
{
    float sum = 0;
    for (int64_t l = 0; l < t->k; l++)
        sum +=
            lt_a[t->ta ? i * t->k + l : l * t->m + i] * lt_b[t->tb ? l * t->n + j : j * t->k + l];
    return sum;
}

static void test_lt_products(void **state)
{
    (void)state;
    const cudaDataType_t types[] = { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
    for (int i = 0; i < 48; i++) {
        cudaDataType_t type = types[i / 4 % 3];
        lt_case t = { .type = type,
                      .out = i / 12 % 2 ? CUDA_R_32F : type,
                      .compute = CUBLAS_COMPUTE_32F,
                      .ta = i & 1,
                      .tb = i >> 1 & 1,
                      .epilogue = i >= 24 ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
                      .alpha = 2,
                      .beta = i % 5 == 0 ? 0 : 1,
                      .m = 7,
                      .n = 5,
                      .k = 9 };
        lt_fill();
        assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
        for (int64_t r = 0; r < t.m; r++)
            for (int64_t c = 0; c < t.n; c++) {
                float want = 2 * lt_dot(&t, r, c) + t.beta * (float)((c * t.m + r) % 4) +
                             (i >= 24 ? (float)(r - 4) : 0);
                assert_true(lt_d[c * t.m + r] == want);
            }
    }
}

static void test_lt_epilogues(void **state)
{
    (void)state;
    lt_case t = { .type = CUDA_R_32F,
                  .out = CUDA_R_32F,
                  .compute = CUBLAS_COMPUTE_32F,
                  .epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                  .alpha = 1,
                  .m = 7,
                  .n = 5,
                  .k = 9 };
    lt_fill();
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
    for (int64_t c = 0; c < t.n; c++)
        for (int64_t r = 0; r < t.m; r++) {
            float x = lt_dot(&t, r, c) + (float)(r - 4), y = lt_d[c * t.m + r];
            assert_true(lt_aux[c * 8 + r] == x); /* what goes into it, by its own pitch */
            assert_true(x > 6 ? y == x : x < -6 ? y == 0 : y > -0.2f && y <= (x > 0 ? x : 0));
        }
    assert_true(lt_aux[7] == 100); /* the gap between columns is left alone */

    t.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD;
    lt_fill();
    for (int i = 0; i < LT_MAX * LT_MAX; i++)
        lt_aux[i] = i % 2 ? 20 : 0; /* slopes 1 and a half */
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
    for (int64_t r = 0; r < t.m; r++) {
        float sum = 0;
        for (int64_t c = 0; c < t.n; c++) {
            float want = lt_dot(&t, r, c) * (r % 2 ? 1.0f : 0.5f);
            assert_float_equal(lt_d[c * t.m + r], want, 1e-5f);
            sum += want;
        }
        assert_float_equal(lt_bias[r], sum, 1e-4f);
    }

    for (int second = 0; second < 2; second++) {
        t.epilogue = second ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA;
        lt_fill();
        assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
        for (int64_t i = 0; i < (second ? t.n : t.m); i++) {
            float sum = 0;
            for (int64_t l = 0; l < t.k; l++)
                sum += second ? lt_b[i * t.k + l] : lt_a[l * t.m + i];
            assert_true(lt_bias[i] == sum);
        }
    }
}

static void test_lt_rounds_and_refuses(void **state)
{
    (void)state;
    lt_case t = { .type = CUDA_R_32F,
                  .out = CUDA_R_32F,
                  .compute = CUBLAS_COMPUTE_32F_FAST_TF32,
                  .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                  .alpha = 1,
                  .m = 1,
                  .n = 1,
                  .k = 1 };
    lt_fill();
    lt_a[0] = 1 + 0x1p-10f + 0x1p-12f;
    lt_b[0] = 1;
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
    assert_true(lt_d[0] == 1 + 0x1p-10f);
    t.compute = CUBLAS_COMPUTE_32F;
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
    assert_true(lt_d[0] == lt_a[0]);
    t.type = CUDA_R_16F;
    t.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_NOT_SUPPORTED);
    t.compute = CUBLAS_COMPUTE_32F;
    lm_emu_picky(1);
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_NOT_SUPPORTED);
    lm_emu_picky(0);
    assert_int_equal(lt_run(&t, lt_a, lt_b, lt_d, lt_aux, lt_bias), CUBLAS_STATUS_SUCCESS);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_sums_in_every_order),
        T(test_warp),
        T(test_votes_of_a_block),
        T(test_atomics_and_places),
        T(test_block_orders),
        T(test_orders_reveal_a_race),
        T(test_divergence_is_caught),
        T(test_overruns_are_caught),
        T(test_launch_limits),
        T(test_strict_pointers),
        T(test_work_is_done_late),
        T(test_events_order_streams),
        T(test_capture_and_replay),
        T(test_capture_forks_and_joins),
        T(test_memory),
        T(test_device_is_lost),
        T(test_lt_products),
        T(test_lt_epilogues),
        T(test_lt_rounds_and_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
