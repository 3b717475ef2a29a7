/* SPDX-License-Identifier: Apache-2.0 */
/* blaslt.c -- matrix products by cuBLASLt.
 *
 * cuBLASLt is column-major: what is C = A B by rows is C' = B' A' by columns, so the factors change
 * places, their transposes stay, a bias over columns becomes its bias over rows, and sums over our
 * first factor are sums over its second.  A bias and sums have the type of C. */
#include "kernels/cuda/blaslt.h"

#include <cublasLt.h>
#include <errno.h>
#include <string.h>

#ifndef LM_EMU
#include <dlfcn.h>
#endif

#include "base/hash.h"
#include "base/mem.h"
#include "kernels/cuda/stream.h"

/* ---- the library ---- */

#define CALLS(X)                            \
    X(cublasLtCreate)                       \
    X(cublasLtDestroy)                      \
    X(cublasLtGetVersion)                   \
    X(cublasLtMatmul)                       \
    X(cublasLtMatmulAlgoGetHeuristic)       \
    X(cublasLtMatmulDescCreate)             \
    X(cublasLtMatmulDescDestroy)            \
    X(cublasLtMatmulDescSetAttribute)       \
    X(cublasLtMatmulPreferenceCreate)       \
    X(cublasLtMatmulPreferenceDestroy)      \
    X(cublasLtMatmulPreferenceSetAttribute) \
    X(cublasLtMatrixLayoutCreate)           \
    X(cublasLtMatrixLayoutDestroy)          \
    X(cublasLtMatrixLayoutSetAttribute)

typedef struct {
#define MEMBER(name) __typeof__(name) *name;
    CALLS(MEMBER)
#undef MEMBER
} library;

#ifdef LM_EMU
static lm_code open_library(library *l, void **handle, lm_err *e)
{
    (void)e;
    *handle = NULL;
#define FILL(name) l->name = name;
    CALLS(FILL)
#undef FILL
    return LM_OK;
}
static void close_library(void *handle)
{
    (void)handle;
}
#else
#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)
#define LIBRARY    "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

static const char advice[] =
    "install cuBLAS of the CUDA toolkit, name its folder in LD_LIBRARY_PATH, "
    "or choose the plain kernels";

static lm_code open_library(library *l, void **handle, lm_err *e)
{
    errno = 0;
    /* It stays loaded, because its callbacks in the driver would otherwise be invalid. */
    *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!*handle)
        return lm_fail(e, LM_EIO, LIBRARY, advice, "cannot be loaded: %s", dlerror());
#define FILL(name)                              \
    *(void **)&l->name = dlsym(*handle, #name); \
    if (!l->name)                               \
        return lm_fail(e, LM_EIO, LIBRARY, advice, "this version lacks %s", #name);
    CALLS(FILL)
#undef FILL
    return LM_OK;
}
static void close_library(void *handle)
{
    if (handle)
        dlclose(handle);
}
#endif

/* ---- known shapes ---- */

enum { CELLS = 1024, MOST = 512 }; /* at MOST shapes the table starts anew */

/* All bytes count: a key is zeroed before it is filled. */
typedef struct {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t batch, stride_a, stride_b, stride_c;
    int32_t a_type, b_type, cd;
    uint8_t ta, tb, accumulate, tf32, bias;
    uint8_t scaled, a_scaling, b_scaling, formless;
    uint8_t gelu, slope, aux, sums;
    uint8_t align_a, align_b, align_c, align_bias, align_aux; /* log2 of bytes */
} shape_key;

typedef struct {
    bool used, served;
    shape_key key;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} shape;

struct lm_cuda_lt {
    library l;
    void *dl;
    cublasLtHandle_t handle;
    void *workspace;
    size_t workspace_bytes;
    bool deterministic;
    int known;
    lm_lt_counts counts;
    shape table[CELLS];
};

static void shape_clear(const library *l, shape *s)
{
    if (s->product)
        l->cublasLtMatmulDescDestroy(s->product);
    if (s->a)
        l->cublasLtMatrixLayoutDestroy(s->a);
    if (s->b)
        l->cublasLtMatrixLayoutDestroy(s->b);
    if (s->c)
        l->cublasLtMatrixLayoutDestroy(s->c);
    memset(s, 0, sizeof *s);
}

static uint8_t alignment(const void *p)
{
    uint8_t log2 = 0;
    while (p && log2 < 8 && !((uintptr_t)p >> log2 & 1))
        log2++;
    return log2;
}

/* Of all matrices of a batch. */
static uint8_t common_alignment(const void *p, int64_t stride, lm_dtype d)
{
    return alignment((const void *)((uintptr_t)p | (uintptr_t)stride * lm_dtype_size(d)));
}

static bool has_epilogue(const lm_lt_gemm *g)
{
    return g->gelu || g->a_sum;
}

/* The bias pointer of cuBLASLt. */
static const void *vector_of(const lm_lt_gemm *g)
{
    return g->a_sum ? g->a_sum : g->bias;
}

static shape_key key_of(const lm_lt_gemm *g)
{
    shape_key k;

    memset(&k, 0, sizeof k);
    k.m = g->m, k.n = g->n, k.k = g->k;
    k.lda = g->lda, k.ldb = g->ldb, k.ldc = g->ldc;
    if (g->batch > 1) {
        k.batch = g->batch;
        k.stride_a = g->stride_a, k.stride_b = g->stride_b, k.stride_c = g->stride_c;
    }
    k.a_type = g->a_type, k.b_type = g->b_type, k.cd = g->cd;
    k.ta = g->ta, k.tb = g->tb, k.accumulate = g->accumulate;
    k.tf32 = g->tf32, k.bias = g->bias != NULL;
    k.scaled = g->a_scale != NULL;
    k.a_scaling = (uint8_t)g->a_scaling, k.b_scaling = (uint8_t)g->b_scaling;
    k.formless = g->formless;
    k.align_a = common_alignment(g->a, k.stride_a, g->a_type);
    k.align_b = common_alignment(g->b, k.stride_b, g->b_type);
    k.align_c = common_alignment(g->c, k.stride_c, g->cd);
    k.gelu = g->gelu, k.slope = g->slope, k.aux = g->z != NULL, k.sums = g->a_sum != NULL;
    k.align_bias = alignment(vector_of(g));
    k.align_aux = alignment(g->z);
    return k;
}

static cudaDataType_t type_of(lm_dtype d)
{
    switch (d) {
    case LM_DTYPE_F32:
        return CUDA_R_32F;
    case LM_DTYPE_BF16:
        return CUDA_R_16BF;
    case LM_DTYPE_F8E4M3:
        return CUDA_R_8F_E4M3;
    case LM_DTYPE_F8E5M2:
        return CUDA_R_8F_E5M2;
    default:
        return CUDA_R_16F;
    }
}

/* A row-major matrix in cuBLASLt's terms. */
static bool describe_matrix(const library *l, cublasLtMatrixLayout_t *out, lm_dtype d, int64_t rows,
                            int64_t cols, int64_t pitch, int64_t batch, int64_t stride)
{
    int32_t count = (int32_t)batch;

    return !l->cublasLtMatrixLayoutCreate(out, type_of(d), (uint64_t)cols, (uint64_t)rows, pitch) &&
           (batch < 2 ||
            (batch <= INT32_MAX &&
             !l->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                  sizeof count) &&
             !l->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                  &stride, sizeof stride)));
}

static bool product_set(const library *l, shape *s, cublasLtMatmulDescAttributes_t what,
                        const void *value, size_t bytes)
{
    return !l->cublasLtMatmulDescSetAttribute(s->product, what, value, bytes);
}

/* The pointers of a product, which change from call to call of one shape. */
static bool set_pointers(const library *l, shape *s, const lm_lt_gemm *g)
{
    const void *vector = vector_of(g);

    return (!vector ||
            product_set(l, s, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector)) &&
           (!g->z ||
            product_set(l, s, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->z, sizeof g->z)) &&
           (!g->a_scale || /* cuBLASLt's first factor is our second */
            (product_set(l, s, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &g->b_scale,
                         sizeof g->b_scale) &&
             product_set(l, s, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &g->a_scale,
                         sizeof g->a_scale)));
}

#if CUBLAS_VERSION >= 120900
static int32_t scale_mode(lm_fp8_scaling s)
{
    return s == LM_FP8_ROW     ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
           : s == LM_FP8_BLOCK ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                               : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

static bool set_modes(const library *l, shape *s, const lm_lt_gemm *g)
{
    int32_t first = scale_mode(g->b_scaling), second = scale_mode(g->a_scaling);
    return product_set(l, s, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &first, sizeof first) &&
           product_set(l, s, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &second, sizeof second);
}
#else /* before 12.9 there are no scales of blocks */
static bool set_modes(const library *l, shape *s, const lm_lt_gemm *g)
{
    (void)l, (void)s, (void)g;
    return false;
}
#endif

/* Sums are promoted to F32 as they go (no fast accumulation): gradients need the accuracy.  One
 * scale for the whole matrix is also the default of older versions. */
static bool describe_scales(const library *l, shape *s, const lm_lt_gemm *g)
{
    bool blocks = g->a_scaling != LM_FP8_TENSOR || g->b_scaling != LM_FP8_TENSOR;
    return !g->a_scale || !blocks || set_modes(l, s, g);
}

static uint32_t epilogue_of(const lm_lt_gemm *g)
{
    if (g->a_sum)
        return CUBLASLT_EPILOGUE_BGRADB;
    if (g->gelu && g->slope)
        return CUBLASLT_EPILOGUE_DGELU;
    if (g->gelu && g->z)
        return g->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    if (g->gelu)
        return g->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/* The epilogue, and its operands beside C. */
static bool describe_epilogue(const library *l, shape *s, const lm_lt_gemm *g)
{
    uint32_t epilogue = epilogue_of(g);
    int32_t type = (int32_t)type_of(g->cd);

    if (has_epilogue(g) && g->batch > 1)
        return false;
    if (!product_set(l, s, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) ||
        (g->a_sum && (g->cd != LM_DTYPE_F32 ||
                      !product_set(l, s, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type))))
        return false;
    return !g->z ||
           (g->ldc % 8 == 0 && (uintptr_t)g->z % 16 == 0 &&
            product_set(l, s, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &g->ldc, sizeof g->ldc) &&
            product_set(l, s, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &type, sizeof type));
}

/* Describe the product. */
static bool describe(const library *l, shape *s, const lm_lt_gemm *g)
{
    cublasComputeType_t compute =
        g->tf32 && g->a_type == LM_DTYPE_F32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    int32_t first = g->tb ? CUBLAS_OP_T : CUBLAS_OP_N, second = g->ta ? CUBLAS_OP_T : CUBLAS_OP_N;

    return !l->cublasLtMatmulDescCreate(&s->product, compute, CUDA_R_32F) &&
           product_set(l, s, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) &&
           product_set(l, s, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) &&
           describe_epilogue(l, s, g) && describe_scales(l, s, g) && set_pointers(l, s, g) &&
           describe_matrix(l, &s->a, g->a_type, g->ta ? g->k : g->m, g->ta ? g->m : g->k, g->lda,
                           g->batch, g->stride_a) &&
           describe_matrix(l, &s->b, g->b_type, g->tb ? g->n : g->k, g->tb ? g->k : g->n, g->ldb,
                           g->batch, g->stride_b) &&
           describe_matrix(l, &s->c, g->cd, g->m, g->n, g->ldc, g->batch, g->stride_c);
}

static bool preference_set(const library *l, cublasLtMatmulPreference_t p,
                           cublasLtMatmulPreferenceAttributes_t what, uint32_t value)
{
    return !l->cublasLtMatmulPreferenceSetAttribute(p, what, &value, sizeof value);
}

/* The algorithm for it: split sums are joined in F32 in the workspace, never in a narrow output,
 * and never in place when the order of joining must be the same again. */
static bool choose(lm_cuda_lt *lt, shape *s)
{
    const library *l = &lt->l;
    const shape_key *k = &s->key;
    cublasLtMatmulPreference_t p = NULL;
    cublasLtMatmulHeuristicResult_t found;
    uint64_t room = lt->workspace_bytes;
    uint32_t joins = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int n = 0;

    if (!lt->deterministic && k->cd == LM_DTYPE_F32)
        joins |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
    if (l->cublasLtMatmulPreferenceCreate(&p))
        return false;
    bool good =
        !l->cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room,
                                                 sizeof room) &&
        preference_set(l, p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, joins) &&
        /* cuBLASLt's first factor is our second. */
        preference_set(l, p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 1u << k->align_b) &&
        preference_set(l, p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 1u << k->align_a) &&
        preference_set(l, p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 1u << k->align_c) &&
        preference_set(l, p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 1u << k->align_c) &&
        !l->cublasLtMatmulAlgoGetHeuristic(lt->handle, s->product, s->b, s->a, s->c, s->c, p, 1,
                                           &found, &n) &&
        n > 0 && !found.state && found.workspaceSize <= lt->workspace_bytes;
    l->cublasLtMatmulPreferenceDestroy(p);
    if (good)
        s->algo = found.algo;
    return good;
}

static void forget_all(lm_cuda_lt *lt)
{
    for (int i = 0; i < CELLS; i++)
        shape_clear(&lt->l, &lt->table[i]);
    lt->known = 0;
}

static shape *shape_for(lm_cuda_lt *lt, const lm_lt_gemm *g)
{
    shape_key key = key_of(g);
    uint64_t at = lm_hash64(&key, sizeof key, 0);

    for (;; at++) {
        shape *s = &lt->table[at % CELLS];
        if (s->used && !memcmp(&s->key, &key, sizeof key)) {
            lt->counts.hits++;
            return s;
        }
        if (s->used)
            continue;
        if (lt->known == MOST) {
            forget_all(lt);
            return shape_for(lt, g);
        }
        lt->known++;
        lt->counts.shapes++;
        s->used = true;
        s->key = key;
        s->served = !g->formless && describe(&lt->l, s, g) && choose(lt, s);
        if (!s->served)
            *(has_epilogue(g) ? &lt->counts.refused_shapes : &lt->counts.unserved_shapes) += 1;
        return s;
    }
}

/* ---- products ---- */

bool lm_cuda_lt_gemm(lm_cuda_lt *lt, const lm_lt_gemm *g, cudaStream_t stream)
{
    const library *l = &lt->l;
    shape *s = shape_for(lt, g);
    float one = 1, beta = g->accumulate ? 1 : 0;

    bool done =
        s->served && set_pointers(l, s, g) &&
        !l->cublasLtMatmul(lt->handle, s->product, &one, g->b, s->b, g->a, s->a, &beta, g->c, s->c,
                           g->c, s->c, &s->algo, lt->workspace, lt->workspace_bytes, stream);
    if (done)
        return true;
    if (has_epilogue(g)) {
        lt->counts.refused++;
        lt->counts.refused_shapes += s->served;
    } else {
        lt->counts.unserved++;
        lt->counts.unserved_shapes += s->served;
    }
    s->served = false;
    return false;
}

lm_code lm_cuda_lt_new(size_t workspace, bool deterministic, lm_cuda_lt **out, lm_err *e)
{
    lm_cuda_lt *lt = NULL;

    *out = NULL;
    if (lm_alloc_n(&lt, 1, sizeof *lt, "choices of matrix products", e))
        return e->code;
    lt->deterministic = deterministic;
    if (open_library(&lt->l, &lt->dl, e))
        goto fail;
    cublasStatus_t status = lt->l.cublasLtCreate(&lt->handle);
    errno = 0;
    if (status) {
        lm_fail(e, LM_EIO, "cuBLASLt", NULL, "cannot be started: status %d", (int)status);
        goto fail;
    }
    cudaError_t answer = cudaMalloc(&lt->workspace, workspace);
    if (answer) {
        (void)cudaGetLastError(); /* reported here, not by the next call */
        lm_fail(e, LM_ELIMIT, "cuBLASLt", "free memory of the device",
                "no %zu bytes for its workspace: %s", workspace, cudaGetErrorString(answer));
        goto fail;
    }
    lt->workspace_bytes = workspace;
    *out = lt;
    return LM_OK;
fail:
    lm_cuda_lt_free(lt);
    return e->code;
}

void lm_cuda_lt_free(lm_cuda_lt *lt)
{
    if (!lt)
        return;
    forget_all(lt);
    if (lt->workspace)
        (void)cudaFree(lt->workspace);
    if (lt->handle)
        lt->l.cublasLtDestroy(lt->handle);
    close_library(lt->dl);
    lm_free(lt);
}

__attribute__((visibility("default"))) void lm_cuda_lt_counts(const lm_stream *s, lm_lt_counts *out)
{
    *out = s->lt ? s->lt->counts : (lm_lt_counts){ 0 };
}

size_t lm_cuda_lt_version(const lm_cuda_lt *lt)
{
    return lt->l.cublasLtGetVersion();
}
