/* SPDX-License-Identifier: Apache-2.0 */
/* rotary.h -- the tables of a model's positions (rotary ones, or ALiBi's) and the constants of its graph, in memory of a
 * backend. */
#ifndef LM_MODEL_ROTARY_H
#define LM_MODEL_ROTARY_H

#include "graph/exec.h"
#include "model/model.h"

/* Filled on the host and copied to the backend once, one table behind the other, then the constants; data is NULL
 * for a model without any. */
typedef struct {
    lm_backend *b; /* borrowed */
    uint8_t *data;
    size_t bytes;
} lm_rotary;

/* Bytes of the tables and constants; of the constants alone; and of the numbers from which these are
 * made, which the model keeps on the host. */
size_t lm_rotary_bytes(const lm_model *m);
size_t lm_rotary_constants(const lm_model *m);
size_t lm_rotary_numbers(const lm_model *m);
lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *out, lm_err *e);
void lm_rotary_bind(const lm_rotary *r, const lm_model *m, lm_exec *x);
void lm_rotary_fini(lm_rotary *r);

#endif
