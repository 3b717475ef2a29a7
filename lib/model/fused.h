/* SPDX-License-Identifier: Apache-2.0 */
/* fused.h -- tensors that hold a part of all experts of a layer.
 *
 * transformers 5 computes with them, and saves them where save_original_format is false:
 *   gate_up_proj  [experts, 2 ffn, width]: of each expert the rows of the gate, then those of up
 *   down_proj     [experts, width, ffn]
 * Published folders have a matrix for each expert.  The entry of an architecture (lm_arch.fused) says which of its
 * parts have such a name: the order of a tensor is never guessed from its shape.  Source: huggingface/transformers
 * conversion_mapping.py. */
#ifndef LM_MODEL_FUSED_H
#define LM_MODEL_FUSED_H

#include "format/safetensors.h"
#include "model/arch.h"

typedef struct {
    lm_part part[2]; /* of each expert, one behind the other */
    int parts;
    int64_t layer, experts; /* experts 1: one tensor under another name */
    int ndim;
    int64_t dim[3];
} lm_fused;

/* False: it is not one of them. */
bool lm_fused_find(const lm_config *c, const char *name, lm_fused *out);
/* LM_EUSAGE if t does not have the shape that the config requires. */
lm_code lm_fused_check(const lm_fused *f, const lm_st_tensor *t, const char *file, lm_err *e);
/* The tensors in it, all of one size, in the order of its elements. */
static inline int64_t lm_fused_count(const lm_fused *f)
{
    return f->experts * f->parts;
}
/* The published name of tensor k, and its part. */
lm_part lm_fused_name(const lm_config *c, const lm_fused *f, int64_t k, char out[LM_TENSOR_NAME]);

#endif
