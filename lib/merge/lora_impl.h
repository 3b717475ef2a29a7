/* SPDX-License-Identifier: Apache-2.0 */
/* lora_impl.h -- an adapter as the parts of its reader share it. */
#ifndef LM_MERGE_LORA_IMPL_H
#define LM_MERGE_LORA_IMPL_H

#include "base/json.h"
#include "merge/lora.h"

/* The change of one tensor of the base. */
typedef struct {
    const lm_st_tensor *base; /* set by bind */
    const lm_st_tensor *a, *b, *bias, *whole;
    const lm_st_tensor *magnitude; /* DoRA; NULL: plain */
    const void *whole_data;        /* mapped, or in `kept` */
    char *kept;
    char *name; /* of the base's tensor, as the adapter has it */
    double scale;
    bool embedding;
    bool turned; /* the base's matrix is [in, out]; set by bind */
} lm_lora_change;

struct lm_lora {
    char *path, *base;
    json_t *config;
    lm_bundle *files;
    lm_st *st;
    lm_lora_change *change;
    size_t n, cap;
    bool transposed, dora;
};

const lm_lora_change *lm_lora_change_on(const lm_lora *l, const lm_st_tensor *t);

#endif
