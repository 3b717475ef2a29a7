/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt.c -- the calls of cuBLASLt: handles, descriptors, algorithms, products enqueued on a
 * stream.
 *
 * A chosen algorithm records the alignments that it was chosen for, including those of the bias and
 * auxiliary pointers.  A product with smaller alignments is refused with a message, because a GPU
 * would fault or be slow. */
#include <stdlib.h>
#include <string.h>

#include "cublaslt_impl.h"

enum { MAGIC = 0x6c746d6d, ALIGN_DEFAULT = 256 };

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
    *(lt_layout *)*out =
        (lt_layout){ .type = type, .rows = rows, .cols = cols, .ld = ld, .batch = 1 };
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
        FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, lt_layout, type),
        FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, lt_layout, order),
        FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, lt_layout, rows),
        FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, lt_layout, cols),
        FIELD(CUBLASLT_MATRIX_LAYOUT_LD, lt_layout, ld),
        FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, lt_layout, batch),
        FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, lt_layout, batch_stride),
    };
    return SET_FIELD(l, fields);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *desc = fresh(sizeof **desc);
    *(lt_product *)*desc = (lt_product){
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
        FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, lt_product, compute),
        FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, lt_product, scale),
        FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, lt_product, pointer_mode),
        FIELD(CUBLASLT_MATMUL_DESC_TRANSA, lt_product, ta),
        FIELD(CUBLASLT_MATMUL_DESC_TRANSB, lt_product, tb),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, lt_product, epilogue),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, lt_product, bias),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, lt_product, bias_stride),
        FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, lt_product, bias_type),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, lt_product, aux),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, lt_product, aux_ld),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, lt_product, aux_stride),
        FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, lt_product, aux_type),
        FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, lt_product, sms),
        FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, lt_product, scale_a),
        FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, lt_product, scale_b),
        FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, lt_product, mode_a),
        FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, lt_product, mode_b),
        FIELD(CUBLASLT_MATMUL_DESC_FAST_ACCUM, lt_product, fast),
    };
    return SET_FIELD(desc, fields);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref)
{
    *pref = fresh(sizeof **pref);
    *(lt_preference *)*pref =
        (lt_preference){ .reduction = CUBLASLT_REDUCTION_SCHEME_MASK,
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
        FIELD(CUBLASLT_MATMUL_PREF_SEARCH_MODE, lt_preference, search),
        FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, lt_preference, workspace),
        FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, lt_preference, reduction),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, lt_preference, align[0]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, lt_preference, align[1]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, lt_preference, align[2]),
        FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, lt_preference, align[3]),
        FIELD(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, lt_preference, waves),
        FIELD(CUBLASLT_MATMUL_PREF_IMPL_MASK, lt_preference, impl),
    };
    return SET_FIELD(pref, fields);
}

/* ---- algorithms ---- */

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
    const lt_product *p = (const lt_product *)desc;
    const lt_preference *f = (const lt_preference *)pref;
    const lt_layout *l[4] = { (lt_layout *)a, (lt_layout *)b, (lt_layout *)c, (lt_layout *)d };
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (most < 1 || !results || !found || !f)
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    cublasStatus_t code = emu_lt_check(p, l[0], l[1], l[2], l[3]);
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
    lt_choice chosen = { .magic = MAGIC, .workspace = f->workspace < 4096 ? 0 : 4096 };
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

/* ---- products ---- */

static cublasStatus_t start(const lt_task *t, bool c_used, cudaStream_t stream)
{
    const lt_choice *chosen = &t->chosen;
    cublasStatus_t code = emu_lt_check(&t->p, &t->a, &t->b, &t->c, &t->d);
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
    if (!emu_lt_pointers_sane(t))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return emu_put(stream, emu_lt_run, NULL, t, sizeof *t) ? CUBLAS_STATUS_EXECUTION_FAILED
                                                           : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    lt_task t;
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
