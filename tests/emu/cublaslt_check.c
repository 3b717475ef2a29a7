/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_check.c -- the products that cuBLASLt accepts: types, sizes, pitches, epilogues,
 * pointers.  FP8 follows the documentation for compute capability 9.0. */
#include "cublaslt_impl.h"

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

static bool layout_sane(const lt_layout *l)
{
    uint64_t least = l->order == CUBLASLT_ORDER_ROW ? l->cols : l->rows;
    return l->rows > 0 && l->cols > 0 && l->ld > 0 && (uint64_t)l->ld >= least && l->batch > 0 &&
           (l->order == CUBLASLT_ORDER_COL || l->order == CUBLASLT_ORDER_ROW);
}

static bool modes_fit(const lt_product *p)
{
    int vec = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    int block = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, a = p->mode_a, b = p->mode_b;
    return (a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && a == b) ||
           (a == vec && (b == vec || b == block)) || (a == block && b == vec);
}

/* FP8: the first factor transposed, the second not; rows in memory are multiples of 16 bytes. */
static cublasStatus_t check_fp8(const lt_product *p, const lt_layout *a, const lt_layout *b,
                                const lt_layout *c, const lt_layout *d)
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
cublasStatus_t emu_lt_check(const lt_product *p, const lt_layout *a, const lt_layout *b,
                            const lt_layout *c, const lt_layout *d)
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
    /* Auxiliary matrices beside D, which are stored by columns, are accessed in units of 16
     * bytes. */
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

/* ---- pointers ---- */

/* Bytes from the first element of a batch of matrices to the end of the last. */
static size_t extent(const lt_layout *l)
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

/* Bytes of the i-th of A, B, C, D, bias and auxiliary matrix; for the last two without the strides
 * of a batch. */
static size_t bytes_at(const lt_task *t, int i)
{
    const lt_layout *l[] = { &t->a, &t->b, &t->c, &t->d };
    uint64_t outer = t->p.epilogue & CUBLASLT_EPILOGUE_BGRADB ? t->d.cols : t->d.rows;

    if (i < 4)
        return extent(l[i]);
    if (i == 4)
        return outer * type_size(t->p.bias_type >= 0 ? t->p.bias_type : t->d.type);
    return (size_t)((int64_t)(t->d.cols - 1) * t->p.aux_ld + (int64_t)t->d.rows) *
           type_size(t->d.type);
}

bool emu_lt_pointers_sane(const lt_task *t)
{
    const lt_choice *chosen = &t->chosen;
    static const char *const names[] = { "A", "B", "C", "D", "bias", "auxiliary" };
    const void *all[] = { t->at_a,
                          t->at_b,
                          t->at_c,
                          t->at_d,
                          wants_bias(t->p.epilogue) ? t->p.bias : NULL,
                          wants_aux(t->p.epilogue) ? t->p.aux : NULL };
    const lt_layout *l[] = { &t->a, &t->b, &t->c, &t->d };
    for (int i = 0; i < 6; i++) {
        if (!all[i])
            continue;
        uintptr_t every = (uintptr_t)all[i]; /* and of a batch's other matrices */
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
