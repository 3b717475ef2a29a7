/* SPDX-License-Identifier: Apache-2.0 */
/* backend.c -- opening a CUDA device as a backend, and closing it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "graph/cuda/cuda.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/cuda/code_kind.h"

enum { OLDEST = 80 }; /* the first compute capability that the module has code for */

/* What NVIDIA recommends for Hopper; older cards need less. */
#define WORKSPACE ((size_t)32 << 20)

static const char *const level_names[] = { "plain", "tensor", "tf32" };

static const lm_kernel *kernel(lm_backend *b, const char *op, lm_dtype act)
{
    return lm_cuda_kernel(op, act, cuda_of(b)->level);
}

static bool joins(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    const lm_kernel *k = kernel(b, op, act);
    lm_call here = *c;

    here.stream = b->main; /* what serves is a question of the card, too */
    return k && (!k->work || k->work(&here, b->threads) != SIZE_MAX);
}

static bool codes(lm_backend *b, const char *op, int operand, lm_dtype act, const lm_format *f)
{
    static const struct {
        const char *op;
        int operand;
    } table[] = { { "linear", 1 },        { "linear_dx", 1 },  { "embed", 1 },
                  { "head_stats", 1 },    { "head_grad", 1 },  { "head_loss", 1 },
                  { "widen", 0 },         { "divergence", 3 }, { "divergence_grad", 3 },
                  { "grouped_linear", 1 } };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(op, table[i].op) && operand == table[i].operand)
            return kernel(b, op, act) && lm_code_kind_of(f) != LM_CODE_KINDS;
    return false;
}

static double peak_flops(lm_backend *b, lm_dtype act)
{
    const cuda_backend *c = cuda_of(b);

    return cuda_peak(c->model, c->sms, act, c->level == LM_CUDA_TF32);
}

static const char *shortfall(lm_backend *b)
{
    cuda_backend *c = cuda_of(b);
    lm_lt_counts n;

    lm_cuda_lt_counts(b->main, &n);
    snprintf(c->shortfall, sizeof c->shortfall,
             "cuBLASLt served %lld shapes of products, not %lld others, which plain kernels made, "
             "and %lld only without the function or sums behind them",
             (long long)(n.shapes - n.unserved_shapes - n.refused_shapes),
             (long long)n.unserved_shapes, (long long)n.refused_shapes);
    return n.unserved_shapes || n.refused_shapes ? c->shortfall : NULL;
}

/* Every card that the module has code for has tensor cores; how much they would give is the ratio of
 * published peaks. */
static const char *advice(lm_backend *b)
{
    cuda_backend *c = cuda_of(b);
    double plain = cuda_peak(c->model, c->sms, LM_DTYPE_F32, false),
           tf32 = cuda_peak(c->model, c->sms, LM_DTYPE_F32, true),
           half = cuda_peak(c->model, c->sms, LM_DTYPE_BF16, false);
    char bf16[32] = "several", f32[32] = "several";

    if (c->level != LM_CUDA_PLAIN || !c->by_default)
        return NULL;
    if (plain > 0) {
        snprintf(bf16, sizeof bf16, "up to %.1f", half / plain);
        snprintf(f32, sizeof f32, "up to %.1f", tf32 / plain);
    }
    snprintf(
        c->advice, sizeof c->advice,
        "plain kernels, the default, leave its tensor cores idle: LM_CUDA=tensor makes products of "
        "bf16 "
        "%s times as fast, LM_CUDA=tf32 also those of f32, rounded, %s times; LM_CUDA=plain keeps "
        "things as they are (lmutils(7), DEVICES)",
        bf16, f32);
    return c->advice;
}

static void close_device(lm_backend *b)
{
    cuda_backend *c = cuda_of(b);

    cuda_groups_end(c); /* those that are left are of a failure: nothing waits for them */
    while (c->streams)
        b->stream_free(b, &c->streams->s); /* waits for what is on it */
    lm_cuda_lt_free(c->lt);
    lm_free(c);
}

static lm_code parse_level(const char *s, lm_cuda_level *out, lm_err *e)
{
    *out = LM_CUDA_DEFAULT;
    if (!s)
        return LM_OK;
    for (int i = 0; i < 3; i++) {
        if (!strcmp(s, level_names[i])) {
            *out = (lm_cuda_level)i;
            return LM_OK;
        }
    }
    return lm_fail(e, LM_EUSAGE, "kernels of a CUDA device", "choose from plain, tensor, tf32",
                   "unknown path '%s'", s);
}

/* "13.0" of 13000; "none" where no driver is. */
static const char *version(int n, char text[16])
{
    if (n <= 0)
        return "none";
    snprintf(text, 16, "%d.%d", n / 1000, n % 1000 / 10);
    return text;
}

static lm_code find_device(cuda_backend *c, lm_err *e)
{
    int driver = 0, runtime = 0, n = 0;
    char a[16], b[16];
    cudaError_t answer = cudaGetDeviceCount(&n);

    if (answer || n == 0) {
        cuda_quiet(answer);
        cuda_quiet(cudaDriverGetVersion(&driver));
        cuda_quiet(cudaRuntimeGetVersion(&runtime));
        errno = 0;
        return lm_fail(e, LM_EIO, c->name,
                       answer == cudaErrorInsufficientDriver && driver > 0
                           ? "install a newer driver, or use the cpu"
                           : "see that 'nvidia-smi' lists a GPU, or use the cpu",
                       "no usable GPU: %s (driver %s, runtime %s)",
                       cudaGetErrorString(answer ? answer : cudaErrorNoDevice), version(driver, a),
                       version(runtime, b));
    }
    if (c->index < n)
        return LM_OK;
    errno = 0;
    if (n == 1)
        return lm_fail(e, LM_EIO, c->name, NULL, "this machine has one CUDA device: cuda:0");
    return lm_fail(e, LM_EIO, c->name, NULL, "this machine has %d CUDA devices: cuda:0 to cuda:%d",
                   n, n - 1);
}

/* The runtime creates its context here: this fails on a device that another process holds
 * exclusively, or that is broken. */
static lm_code claim(cuda_backend *c, lm_err *e)
{
    cudaError_t answer = cudaSetDevice(c->index);

    return answer ? cuda_refused(c, answer, "the device cannot be used", e) : LM_OK;
}

static lm_code describe(cuda_backend *c, lm_err *e)
{
    struct cudaDeviceProp p;
    int driver = 0, runtime = 0;
    char a[16], b[16];

    if (cuda_did(c, cudaGetDeviceProperties(&p, c->index), "asking what the device is", e))
        return e->code;
    cuda_quiet(cudaDriverGetVersion(&driver));
    cuda_quiet(cudaRuntimeGetVersion(&runtime));
    c->sms = p.multiProcessorCount;
    c->cc = p.major * 10 + p.minor;
    c->shared_max = p.sharedMemPerBlockOptin;
    snprintf(c->model, sizeof c->model, "%.*s", (int)sizeof c->model - 1, p.name);
    snprintf(c->device, sizeof c->device, "%.100s, sm_%d, %d SMs, %.1f GiB, driver %s, runtime %s",
             c->model, c->cc, c->sms, (double)p.totalGlobalMem / ((size_t)1 << 30),
             version(driver, a), version(runtime, b));
    if (c->cc >= OLDEST)
        return LM_OK;
    errno = 0;
    return lm_fail(e, LM_EIO, c->name, NULL, "%s has compute capability %d.%d, %d.%d is needed",
                   c->model, p.major, p.minor, OLDEST / 10, OLDEST % 10);
}

/* cuBLASLt and the line that says which kernels there are. */
static lm_code ready_products(cuda_backend *c, lm_err *e)
{
    size_t v;

    if (c->level == LM_CUDA_PLAIN) {
        snprintf(c->detail, sizeof c->detail, "plain");
        return LM_OK;
    }
    if (lm_cuda_lt_new(WORKSPACE, c->deterministic, &c->lt, e))
        return e->code;
    v = lm_cuda_lt_version(c->lt);
    snprintf(c->detail, sizeof c->detail, "%s (cuBLASLt %zu.%zu.%zu, mma)", level_names[c->level],
             v / 10000, v % 10000 / 100, v % 100);
    return LM_OK;
}

static lm_code open_device(const lm_backend_opts *o, lm_backend **out, lm_err *e);

static lm_code behind(lm_backend *b, int n, lm_backend **out, lm_err *e)
{
    const cuda_backend *c = cuda_of(b);
    char name[32];

    snprintf(name, sizeof name, "cuda:%d", c->index + n);
    return open_device(&(lm_backend_opts){ .device = name,
                                           .kernels = c->by_default ? NULL : level_names[c->level],
                                           .deterministic = c->deterministic },
                       out, e);
}

static lm_code open_device(const lm_backend_opts *o, lm_backend **out, lm_err *e)
{
    const char *colon = strchr(o->device, ':');
    lm_cuda_level level;
    cuda_backend *c = NULL;
    lm_stream *first;
    lm_code rc = parse_level(o->kernels, &level, e);

    *out = NULL;
    if (rc || (rc = lm_alloc_n(&c, 1, sizeof *c, "a backend", e)))
        return rc;
    c->index = colon ? atoi(colon + 1) : 0;
    c->level = level;
    c->deterministic = o->deterministic;
    c->by_default = !o->kernels;
    snprintf(c->name, sizeof c->name, "cuda:%d", c->index);
    c->b = (lm_backend){ .name = c->name,
                         .behind = behind,
                         .device = c->device,
                         .detail = c->detail,
                         .kernel = kernel,
                         .codes = codes,
                         .joins = joins,
                         .peak_flops = peak_flops,
                         .shortfall = shortfall,
                         .advice = advice,
                         .close = close_device };
    cuda_fill_memory(&c->b);
    cuda_fill_order(&c->b);
    cuda_fill_time(&c->b);
    cuda_fill_record(&c->b);
    cuda_fill_groups(&c->b);
    rc = find_device(c, e);
    rc = rc ? rc : claim(c, e);
    rc = rc ? rc : describe(c, e);
    rc = rc ? rc : ready_products(c, e);
    rc = rc ? rc : c->b.stream_new(&c->b, &first, e);
    if (rc) {
        close_device(&c->b);
        return rc;
    }
    c->b.threads = c->sms;
    *out = &c->b;
    return LM_OK;
}

extern __attribute__((visibility("default"))) const lm_module lm_module_cuda;
const lm_module lm_module_cuda = {
    .head = { .version = LM_VERSION, .size = sizeof(lm_backend), .contracts = LM_CONTRACTS },
    .open = open_device
};
