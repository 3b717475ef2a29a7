/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code.h -- codes of caches outside of a model's graph, for files, conversions and pages below the device: encoding,
 * decoding, the order of files, the rotation of heads.
 *
 * The level is selected by the caller, as for a backend.  Every level gives the bits of the definition
 * (numeric/kv_format.h, numeric/kv_rows.h), so it decides about time alone.  Functions have no state: they may run in
 * several threads on different pages. */
#ifndef LM_KERNELS_KV_CODE_H
#define LM_KERNELS_KV_CODE_H

#include "base/cpu.h"
#include "numeric/kv_rows.h"

typedef struct {
    /* lm_kv_encode, lm_kv_decode. */
    void (*encode)(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const float *x,
                   int64_t pitch, int64_t at, int64_t n, const float *range, void *page);
    void (*decode)(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const void *page,
                   int64_t at, int64_t n, float *y, int64_t pitch);
    /* lm_kv_rows_get, lm_kv_rows_put. */
    void (*get)(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                const void *const *page, const lm_kv_rows *out);
    void (*put)(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                const lm_kv_rows *rows, void *const *page);
    /* Rows x [n,D] from F32, F16 or BF16 to F32 and back; with `rotate` times the orthonormal Hadamard matrix
     * (kernels/kv.h, head_rotate) and rounded to the type. */
    void (*load)(lm_dtype act, bool rotate, int64_t D, const void *x, int64_t n, float *y);
    void (*store)(lm_dtype act, bool rotate, int64_t D, const float *x, int64_t n, void *y);
} lm_kv_code_kernels;

/* The kernels of the highest level <= max. */
const lm_kv_code_kernels *lm_kv_code_at(lm_cpu_level max);

extern const lm_kv_code_kernels lm_kv_code_ref, lm_kv_code_avx2, lm_kv_code_avx512;

#endif
