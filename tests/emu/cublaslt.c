/* cublaslt.c -- cuBLASLt's matrix product, from its documented meaning, in plain F32 on the host.
 *
 * D = epilogue(alpha op(A) op(B) + beta C), column-major.  A chosen algorithm remembers the
 * alignments that it was chosen for, those of the bias and auxiliary pointers too, and a product
 * that does not keep to them is refused with a line of text: a GPU would fault or be slow.  Sums go
 * over k in order.  FP8 is held to what the documentation says of compute capability 9.0. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cublasLt.h"
#include "emu_impl.h"
#include "numeric/dtype.h"

#pragma GCC optimize("O3")

typedef struct {
    int32_t type, order;
    uint64_t rows, cols;
    int64_t ld, batch_stride;
    int32_t batch;
} layout;

typedef struct {
    int32_t compute, scale, pointer_mode, ta, tb, aux_type, bias_type;
    uint32_t epilogue;
    char *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride;
    const float *scale_a, *scale_b;
    int32_t sms, mode_a, mode_b;
    int8_t fast;
} product;

typedef struct {
    uint64_t workspace;
    uint32_t search, reduction, align[4]; /* of A, B, C, D */
    float waves;
    uint64_t impl;
} preference;

typedef struct {
    uint64_t magic, workspace;
    uint16_t align[6]; /* of A, B, C, D, bias, aux */
} choice;

enum { MAGIC = 0x6c746d6d, ALIGN_DEFAULT = 256 };

_Static_assert(sizeof(layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
_Static_assert(sizeof(product) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
_Static_assert(sizeof(preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
_Static_assert(sizeof(choice) <= sizeof(cublasLtMatmulAlgo_t), "fits");

struct cublasLtContext {
    int device;
};

/* ---- descriptors ---- */

size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return cublasLtGetStatusName(status);
}

static void *fresh(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort();
    return p;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    emu_enter();
    bool dead = emu_leave(cudaSuccess) != cudaSuccess;
    *handle = dead ? NULL : fresh(sizeof **handle);
    return dead ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    *out = fresh(sizeof **out);
    *(layout *)*out = (layout){ .type = type, .rows = rows, .cols = cols, .ld = ld, .batch = 1 };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}

typedef struct {
    int attr;
    size_t offset, bytes;
} field;
#define FIELD(attr, type, member)                                 \
    {                                                             \
        attr, offsetof(type, member), sizeof(((type *)0)->member) \
    }

static cublasStatus_t set_field(void *object, const field *fields, size_t n, int attr,
                                const void *buf, size_t bytes)
{
    for (size_t i = 0; i < n; i++) {
        if (fields[i].attr != attr)
            continue;
        if (!object || !buf || bytes != fields[i].bytes)
            return CUBLAS_STATUS_INVALID_VALUE;
        memcpy((char *)object + fields[i].offset, buf, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    emu_say("cuBLASLt: attribute %d is not known to the emulation", attr);
    return CUBLAS_STATUS_INVALID_VALUE;
}
#define SET_FIELD(object, fields) \
    set_field(object, fields, sizeof fields / sizeof *fields, (int)attr, buf, bytes)

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *buf, size_t bytes)
{
    static const field fields[] = {
        FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, layout, type),
        FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, layout, order),
        FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, layout, rows),
        FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, layout, cols),
        FIELD(CUBLASLT_MATRIX_LAYOUT_LD, layout, ld),
        FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, layout, batch),
        FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout, batch_stride),
    };
    return SET_FIELD(l, fields);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *desc = fresh(sizeof **desc);
    *(product *)*desc = (product){
        .compute = (int32_t)compute,
        .scale = (int32_t)scale,
        .aux_type = -1,
        .bias_type = -1,
        .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
    };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attr, const void *buf,
                                              size_t bytes)
{
    static const field fields[] = {
        FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, product, compute),
        FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, product, scale),
        FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, product, pointer_mode),
        FIELD(CUBLASLT_MATMUL_DESC_TRANSA, product, ta),
        FIELD(CUBLASLT_MATMUL_DESC_TRANSB, product, tb),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, product, epilogue),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product, bias),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, product, bias_stride),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, product, bias_type),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product, aux),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product, aux_ld),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, product, aux_stride),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, product, aux_type),
        FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, product, sms),
        FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product, scale_a),
        FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product, scale_b),
        FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, product, mode_a),
        FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, product, mode_b),
        FIELD(CUBLASLT_MATMUL_DESC_FAST_ACCUM, product, fast),
    };
    return SET_FIELD(desc, fields);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref)
{
    *pref = fresh(sizeof **pref);
    *(preference *)*pref =
        (preference){ .reduction = CUBLASLT_REDUCTION_SCHEME_MASK,
                      .align = { ALIGN_DEFAULT, ALIGN_DEFAULT, ALIGN_DEFAULT, ALIGN_DEFAULT } };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref)
{
    free(pref);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *buf, size_t bytes)
{
    static const field fields[] = {
        FIELD(CUBLASLT_MATMUL_PREF_SEARCH_MODE, preference, search),
        FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, preference, workspace),
        FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, preference, reduction),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, preference, align[0]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, preference, align[1]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, preference, align[2]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, preference, align[3]),
        FIELD(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, preference, waves),
        FIELD(CUBLASLT_MATMUL_PREF_IMPL_MASK, preference, impl),
    };
    return SET_FIELD(pref, fields);
}

/* ---- what is allowed ---- */

static bool is_fp8(int type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static size_t type_size(int type)
{
    return type == CUDA_R_32F                          ? 4
           : type == CUDA_R_16F || type == CUDA_R_16BF ? 2
           : is_fp8(type)                              ? 1
                                                       : 0;
}

static bool epilogue_known(uint32_t e)
{
    static const uint32_t known[] = {
        CUBLASLT_EPILOGUE_DEFAULT,       CUBLASLT_EPILOGUE_RELU,   CUBLASLT_EPILOGUE_BIAS,
        CUBLASLT_EPILOGUE_RELU_BIAS,     CUBLASLT_EPILOGUE_GELU,   CUBLASLT_EPILOGUE_GELU_AUX,
        CUBLASLT_EPILOGUE_GELU_BIAS,     CUBLASLT_EPILOGUE_DGELU,  CUBLASLT_EPILOGUE_BGRADA,
        CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_BGRADB, CUBLASLT_EPILOGUE_DGELU_BGRAD,
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] == e)
            return true;
    return false;
}

static bool wants_bias(uint32_t e)
{
    return (e & (CUBLASLT_EPILOGUE_BIAS | 16 | CUBLASLT_EPILOGUE_BGRADA |
                 CUBLASLT_EPILOGUE_BGRADB)) != 0;
}
static bool wants_aux(uint32_t e)
{
    return (e & 128) != 0;
}

static bool layout_sane(const layout *l)
{
    uint64_t least = l->order == CUBLASLT_ORDER_ROW ? l->cols : l->rows;
    return l->rows > 0 && l->cols > 0 && l->ld > 0 && (uint64_t)l->ld >= least && l->batch > 0 &&
           (l->order == CUBLASLT_ORDER_COL || l->order == CUBLASLT_ORDER_ROW);
}

enum { SCALE_SIDE = 128 }; /* of a block that has a scale */

static bool by_blocks(const product *p)
{
    return p->mode_a != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

static bool modes_fit(const product *p)
{
    int vec = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    int block = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, a = p->mode_a, b = p->mode_b;
    return (a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && a == b) ||
           (a == vec && (b == vec || b == block)) || (a == block && b == vec);
}

/* FP8: the first factor transposed, the second not; what lies in memory in rows of 16 bytes. */
static cublasStatus_t check_fp8(const product *p, const layout *a, const layout *b, const layout *c,
                                const layout *d)
{
    bool narrow = d->type == CUDA_R_16BF || d->type == CUDA_R_16F;
    int bias = p->bias_type >= 0 ? p->bias_type : d->type;
    size_t size = type_size(d->type);
    uint64_t k = a->rows, m = d->rows, n = d->cols;

    if (!is_fp8(a->type) || !is_fp8(b->type) ||
        (a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2) ||
        (!narrow && d->type != CUDA_R_32F) || c->type != d->type || !p->ta || p->tb ||
        p->compute != CUBLAS_COMPUTE_32F || p->scale != CUDA_R_32F ||
        (p->epilogue & ~(uint32_t)CUBLASLT_EPILOGUE_BIAS) > CUBLASLT_EPILOGUE_DEFAULT ||
        (wants_bias(p->epilogue) && bias != (narrow ? d->type : CUDA_R_16BF)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (k % 16 || m * size % 16 || a->ld % 16 || b->ld % 16 || (size_t)d->ld * size % 16 ||
        (size_t)c->ld * size % 16)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!modes_fit(p) || (by_blocks(p) && (m % 4 || n % 4)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (by_blocks(p) &&
        (!p->scale_a || !p->scale_b || (uintptr_t)p->scale_a % 16 || (uintptr_t)p->scale_b % 16))
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

/* Types: factors alike; the result of the same type or F32; factors of TF32 are F32. */
static cublasStatus_t check(const product *p, const layout *a, const layout *b, const layout *c,
                            const layout *d)
{
    if (!p || !a || !b || !c || !d || !layout_sane(a) || !layout_sane(b) || !layout_sane(c) ||
        !layout_sane(d))
        return CUBLAS_STATUS_INVALID_VALUE;
    uint64_t m = p->ta ? a->cols : a->rows, k = p->ta ? a->rows : a->cols;
    uint64_t k2 = p->tb ? b->cols : b->rows, n = p->tb ? b->rows : b->cols;
    if (k != k2 || d->rows != m || d->cols != n || c->rows != m || c->cols != n ||
        a->batch != d->batch || b->batch != d->batch || c->batch != d->batch)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (wants_aux(p->epilogue) &&
        (!p->aux || p->aux_ld < (int64_t)m || p->aux_ld % 8 || (d->batch > 1 && p->aux_stride % 8)))
        return CUBLAS_STATUS_INVALID_VALUE;
    /* Rows of 16 bytes are read and written of what lies beside D, which is stored by columns. */
    if ((wants_aux(p->epilogue) && (uintptr_t)p->aux % 16) ||
        (p->epilogue != CUBLASLT_EPILOGUE_DEFAULT && d->order == CUBLASLT_ORDER_ROW))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(a->type) || is_fp8(b->type))
        return check_fp8(p, a, b, c, d);
    if (p->scale_a || p->scale_b || p->mode_a || p->mode_b)
        return CUBLAS_STATUS_INVALID_VALUE;
    bool tf32 = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (p->scale != CUDA_R_32F || !type_size(a->type) || a->type != b->type || c->type != d->type ||
        (d->type != a->type && d->type != CUDA_R_32F) || (tf32 && a->type != CUDA_R_32F) ||
        !epilogue_known(p->epilogue) ||
        (p->compute != CUBLAS_COMPUTE_32F && p->compute != CUBLAS_COMPUTE_32F_PEDANTIC && !tf32))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((p->bias_type >= 0 && p->bias_type != d->type) ||
        (p->aux_type >= 0 && p->aux_type != d->type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

static uint16_t alignment_of(const void *p)
{
    uint16_t most = 256;
    while (most > 1 && (uintptr_t)p % most)
        most /= 2;
    return most;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t pref, int most,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    const product *p = (const product *)desc;
    const preference *f = (const preference *)pref;
    const layout *l[4] = { (layout *)a, (layout *)b, (layout *)c, (layout *)d };
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (most < 1 || !results || !found || !f)
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    cublasStatus_t code = check(p, l[0], l[1], l[2], l[3]);
    if (code)
        return code;
    for (int i = 0; i < 4; i++) {
        size_t size = type_size(l[i]->type);
        if (f->align[i] < size)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (is_fp8(l[0]->type) && f->align[i] % 16)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (emu_set.picky == 1 && ((size_t)l[i]->ld * size % 16 || f->align[i] % 16))
            return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (emu_set.picky == 2 && (p->epilogue & ~(uint32_t)CUBLASLT_EPILOGUE_BIAS) > 1)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    choice chosen = { .magic = MAGIC, .workspace = f->workspace < 4096 ? 0 : 4096 };
    for (int i = 0; i < 4; i++)
        chosen.align[i] = (uint16_t)(f->align[i] > 16 ? 16 : f->align[i]);
    for (int i = 4; i < 6; i++) {
        uint16_t have = alignment_of(i == 4 ? p->bias : p->aux);
        chosen.align[i] = have > 16 ? 16 : have;
    }
    memset(&results[0], 0, sizeof results[0]);
    memcpy(&results[0].algo, &chosen, sizeof chosen);
    results[0].workspaceSize = chosen.workspace;
    results[0].wavesCount = 1;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the product ---- */

typedef struct {
    product p;
    layout a, b, c, d;
    const char *at_a, *at_b, *at_c;
    char *at_d;
    const float *alpha_at, *beta_at; /* on the device; else: */
    float alpha, beta;
    unsigned char *workspace;
    size_t workspace_bytes;
    choice chosen;
} task;

static float load(const char *base, int type, int64_t i)
{
    if (type == CUDA_R_32F)
        return ((const float *)base)[i];
    if (is_fp8(type))
        return (type == CUDA_R_8F_E4M3 ? lm_f8e4m3_to_f32
                                       : lm_f8e5m2_to_f32)(((const uint8_t *)base)[i]);
    uint16_t h = ((const uint16_t *)base)[i];
    return type == CUDA_R_16F ? lm_f16_to_f32(h) : lm_bf16_to_f32(h);
}
static void store(char *base, int type, int64_t i, float x)
{
    if (type == CUDA_R_32F)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = type == CUDA_R_16F ? lm_f32_to_f16(x) : lm_f32_to_bf16(x);
}

static int64_t place(const layout *l, int64_t row, int64_t col)
{
    return l->order == CUBLASLT_ORDER_ROW ? row * l->ld + col : col * l->ld + row;
}

/* 10 bits of mantissa, to nearest, ties to even. */
static float to_tf32(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7f800000u) != 0x7f800000u)
        u = (u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &u, 4);
    return x;
}

/* op(X) [outer, k] as [k][outer] when `by_k`, else as [outer][k]. */
static float *factor(const char *at, const layout *l, bool swap, bool by_k, int64_t outer,
                     int64_t k, bool tf32)
{
    float *x = malloc((size_t)outer * (size_t)k * sizeof *x);
    if (!x)
        abort();
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < k; i++) {
            float v = load(at, l->type, swap ? place(l, i, o) : place(l, o, i));
            x[by_k ? i * outer + o : o * k + i] = tf32 ? to_tf32(v) : v;
        }
    return x;
}

/* As a GPU's approximate instruction: 11 bits. */
static float tanh_of(float x)
{
    int e;
    float m = frexpf(tanhf(x), &e);
    return ldexpf(roundf(m * 2048) / 2048, e);
}

static float gelu(float x)
{
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1 + tanh_of(u));
}
static float gelu_slope(float x)
{
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x), t = tanh_of(u);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608028654f * (1 + 0.134145f * x * x);
}

/* One element through the epilogue. */
static float finish(const product *p, const layout *d, int64_t i, int64_t j, const char *bias,
                    char *aux, float x)
{
    uint32_t e = p->epilogue;
    int64_t at = j * p->aux_ld + i;
    if (e & CUBLASLT_EPILOGUE_BIAS)
        x += load(bias, p->bias_type >= 0 ? p->bias_type : d->type, i);
    if (e & CUBLASLT_EPILOGUE_RELU)
        x = x > 0 || x != x ? x : 0;
    if (e & CUBLASLT_EPILOGUE_GELU) {
        if (wants_aux(e))
            store(aux, d->type, at, x);
        x = gelu(x);
    }
    if (e & 64)
        x *= gelu_slope(load(aux, d->type, at));
    return x;
}

static void sums_of_factor(const float *x, bool by_k, int64_t outer, int64_t k, char *bias,
                           int type)
{
    for (int64_t o = 0; o < outer; o++) {
        float sum = 0;
        for (int64_t i = 0; i < k; i++)
            sum += x[by_k ? i * outer + o : o * k + i];
        store(bias, type, o, sum);
    }
}

/* The scale of an operand's row `outer` in block `block` of k; outers, blocks: how many. */
static float scale_of(const float *scale, int mode, int64_t outer, int64_t outers, int64_t block,
                      int64_t blocks)
{
    if (!scale)
        return 1;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F)
        return scale[block * outers + outer];
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)
        return scale[outer / SCALE_SIDE * ((blocks + 3) / 4 * 4) + block];
    return *scale;
}

/* A column of op(A) op(B), scales and all: each block of k by itself, then times its scales. */
static void sum_column(const product *p, const float *a, const float *b, int64_t m, int64_t n,
                       int64_t k, int64_t j, float *part, float *sum)
{
    bool scaled = p->scale_a || p->scale_b;
    int64_t step = by_blocks(p) ? SCALE_SIDE : k, blocks = (k + step - 1) / step;

    memset(sum, 0, (size_t)m * sizeof *sum);
    for (int64_t q = 0; q < blocks; q++) {
        int64_t end = (q + 1) * step < k ? (q + 1) * step : k;
        float *to = scaled ? part : sum;
        if (scaled)
            memset(part, 0, (size_t)m * sizeof *part);
        for (int64_t l = q * step; l < end; l++) {
            const float *column = a + l * m;
            float y = b[j * k + l];
            for (int64_t i = 0; i < m; i++)
                to[i] += column[i] * y;
        }
        float right = scale_of(p->scale_b, p->mode_b, j, n, q, blocks);
        for (int64_t i = 0; scaled && i < m; i++)
            sum[i] += part[i] * (scale_of(p->scale_a, p->mode_a, i, m, q, blocks) * right);
    }
}

static void run_one(const task *t, int64_t batch, float alpha, float beta)
{
    const product *p = &t->p;
    int64_t m = (int64_t)t->d.rows, n = (int64_t)t->d.cols;
    int64_t k = (int64_t)(p->ta ? t->a.rows : t->a.cols);
    bool tf32 = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    size_t out = type_size(t->d.type);
    int64_t a_at = (int64_t)type_size(t->a.type) * batch * t->a.batch_stride;
    int64_t b_at = (int64_t)type_size(t->b.type) * batch * t->b.batch_stride;
    float *a = factor(t->at_a + a_at, &t->a, p->ta, true, m, k, tf32);
    float *b = factor(t->at_b + b_at, &t->b, !p->tb, false, n, k, tf32);
    const char *c = t->at_c ? t->at_c + (int64_t)out * batch * t->c.batch_stride : NULL;
    char *d = t->at_d + (int64_t)out * batch * t->d.batch_stride;
    char *bias = p->bias ? p->bias + (int64_t)out * batch * p->bias_stride : NULL;
    char *aux = p->aux ? p->aux + (int64_t)out * batch * p->aux_stride : NULL;
    float *sum = fresh((size_t)m * sizeof *sum), *rows = fresh((size_t)m * sizeof *rows);
    float *part = fresh((size_t)m * sizeof *part);
    for (int64_t j = 0; j < n; j++) {
        sum_column(p, a, b, m, n, k, j, part, sum);
        for (int64_t i = 0; i < m; i++) {
            float x = alpha * sum[i];
            if (beta != 0)
                x += beta * load(c, t->c.type, place(&t->c, i, j));
            x = finish(p, &t->d, i, j, bias, aux, x);
            rows[i] += x;
            store(d, t->d.type, place(&t->d, i, j), x);
        }
    }
    if (p->epilogue & CUBLASLT_EPILOGUE_BGRADA)
        sums_of_factor(a, true, m, k, bias, t->d.type);
    if (p->epilogue & CUBLASLT_EPILOGUE_BGRADB)
        sums_of_factor(b, false, n, k, bias, t->d.type);
    if (p->epilogue & 16)
        for (int64_t i = 0; i < m; i++)
            store(bias, t->d.type, i, rows[i]);
    free(a);
    free(b);
    free(sum);
    free(rows);
    free(part);
}

static void run_product(void *data)
{
    const task *t = data;
    if (!emu_kernel_begins("cublasLtMatmul"))
        return;
    float alpha = t->alpha_at ? *t->alpha_at : t->alpha;
    float beta = t->beta_at ? *t->beta_at : t->beta;
    if (t->chosen.workspace) /* nobody else's while this runs */
        memset(t->workspace, 0xff, t->chosen.workspace);
    for (int64_t i = 0; i < t->d.batch; i++)
        run_one(t, i, alpha, beta);
    emu_memory_check("cublasLtMatmul");
}

/* Bytes from the first element of a batch of matrices to behind the last. */
static size_t extent(const layout *l)
{
    int64_t last = place(l, (int64_t)l->rows - 1, (int64_t)l->cols - 1);
    return (size_t)(last + 1 + (l->batch - 1) * l->batch_stride) * type_size(l->type);
}

/* Scales of an operand of `outers` rows and depth k. */
static bool scales_fit(const float *scale, int mode, uint64_t outers, uint64_t k)
{
    size_t blocks = (k + SCALE_SIDE - 1) / SCALE_SIDE;
    size_t n = mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? blocks * outers
               : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                   ? (blocks + 3) / 4 * 4 * ((outers + SCALE_SIDE - 1) / SCALE_SIDE)
                   : 1;
    return !scale || emu_memory_fits(scale, n * sizeof *scale);
}

/* Bytes of what the i-th of A, B, C, D, bias and auxiliary matrix points to; of the last two, the
 * strides of a batch apart. */
static size_t bytes_at(const task *t, int i)
{
    const layout *l[] = { &t->a, &t->b, &t->c, &t->d };
    uint64_t outer = t->p.epilogue & CUBLASLT_EPILOGUE_BGRADB ? t->d.cols : t->d.rows;

    if (i < 4)
        return extent(l[i]);
    if (i == 4)
        return outer * type_size(t->p.bias_type >= 0 ? t->p.bias_type : t->d.type);
    return (size_t)((int64_t)(t->d.cols - 1) * t->p.aux_ld + (int64_t)t->d.rows) *
           type_size(t->d.type);
}

static bool pointers_sane(const task *t, const choice *chosen)
{
    static const char *const names[] = { "A", "B", "C", "D", "bias", "auxiliary" };
    const void *all[] = { t->at_a,
                          t->at_b,
                          t->at_c,
                          t->at_d,
                          wants_bias(t->p.epilogue) ? t->p.bias : NULL,
                          wants_aux(t->p.epilogue) ? t->p.aux : NULL };
    const layout *l[] = { &t->a, &t->b, &t->c, &t->d };
    for (int i = 0; i < 6; i++) {
        if (!all[i])
            continue;
        uintptr_t every = (uintptr_t)all[i]; /* and where the other matrices of a batch are */
        if (i < 4 && l[i]->batch > 1)
            every |= (uintptr_t)l[i]->batch_stride * type_size(l[i]->type);
        if (every % chosen->align[i]) {
            emu_say("cuBLASLt: pointer %s (%p) is not aligned to the %d bytes that the algorithm "
                    "was chosen for",
                    names[i], all[i], chosen->align[i]);
            return false;
        }
        if (!emu_memory_fits(all[i], bytes_at(t, i)) ||
            (emu_set.strict && !emu_memory_known(all[i]))) {
            emu_say("cuBLASLt: matrix %s at %p leaves its allocation", names[i], all[i]);
            return false;
        }
    }
    uint64_t k = t->p.ta ? t->a.rows : t->a.cols;
    if (!scales_fit(t->p.scale_a, t->p.mode_a, t->d.rows, k) ||
        !scales_fit(t->p.scale_b, t->p.mode_b, t->d.cols, k)) {
        emu_say("cuBLASLt: scales leave their allocation");
        return false;
    }
    return true;
}

static cublasStatus_t start(const task *t, bool c_used, cudaStream_t stream)
{
    const choice *chosen = &t->chosen;
    cublasStatus_t code = check(&t->p, &t->a, &t->b, &t->c, &t->d);
    if (code)
        return code;
    if (!t->at_a || !t->at_b || !t->at_d || (c_used && !t->at_c) ||
        (wants_bias(t->p.epilogue) && !t->p.bias))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (chosen->magic != MAGIC || chosen->workspace > t->workspace_bytes ||
        (chosen->workspace && (!t->workspace || (uintptr_t)t->workspace % 16)))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (t->at_c == t->at_d && c_used && memcmp(&t->c, &t->d, sizeof t->c) != 0)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!pointers_sane(t, chosen))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return emu_put(stream, run_product, NULL, t, sizeof *t) ? CUBLAS_STATUS_EXECUTION_FAILED
                                                            : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    task t;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!desc || !alpha || !beta || !a_layout || !b_layout || !c_layout || !d_layout || !algo)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(&t, 0, sizeof t);
    memcpy(&t.p, desc, sizeof t.p);
    memcpy(&t.a, a_layout, sizeof t.a);
    memcpy(&t.b, b_layout, sizeof t.b);
    memcpy(&t.c, c_layout, sizeof t.c);
    memcpy(&t.d, d_layout, sizeof t.d);
    t.at_a = a, t.at_b = b, t.at_c = c, t.at_d = d;
    t.workspace = workspace, t.workspace_bytes = workspace_bytes;
    memcpy(&t.chosen, algo, sizeof t.chosen);
    bool host = t.p.pointer_mode == CUBLASLT_POINTER_MODE_HOST;
    if (host) {
        memcpy(&t.alpha, alpha, 4);
        memcpy(&t.beta, beta, 4);
    } else {
        t.alpha_at = alpha, t.beta_at = beta;
    }
    emu_enter();
    cublasStatus_t code = start(&t, !host || t.beta != 0, stream);
    return emu_leave(cudaSuccess) ? CUBLAS_STATUS_EXECUTION_FAILED : code;
}
