/* SPDX-License-Identifier: Apache-2.0 */
/* lora_impl.h -- an adapter, shared by the parts of its reader.  Private to lib/merge. */
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
    char *name; /* shape of the base's tensor, in the adapter */
    double scale;
    bool embedding;
    bool turned;     /* the base's matrix is [in, out]; set by bind */
    const char *own; /* name in the result of a tensor that the base does not store; set by bind */
    bool skipped;    /* equal to the embedding, to which it remains tied */
} lm_lora_change;

struct lm_lora {
    char *path, *base;
    json_t *config;
    lm_bundle *files;
    lm_st *st;
    lm_lora_change *change;
    size_t n, cap;
    bool transposed, dora, untied;
};

const lm_lora_change *lm_lora_change_on(const lm_lora *l, const lm_st_tensor *t);

/* The base's tensor; names in files may lack the first part, or have one more. */
const lm_st_tensor *lm_lora_find(const lm_model_source *base, const char *name);
/* lora_tied.c: which changes concern the embedding `tied` or the head, and which of them apply. */
lm_code lm_lora_untie(lm_lora *l, const lm_model_source *base, const lm_st_tensor *tied, lm_err *e);

#endif
