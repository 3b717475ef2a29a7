/* SPDX-License-Identifier: Apache-2.0 */
/* lora_impl.h -- an adapter, shared by the parts of its reader.  Private to lib/merge. */
#ifndef LM_MERGE_LORA_IMPL_H
#define LM_MERGE_LORA_IMPL_H

#include "base/json.h"
#include "merge/lora.h"
#include "tune/apply.h"

/* The change of one tensor of the base. */
typedef struct {
    const lm_st_tensor *base; /* set by bind */
    const lm_st_tensor *a, *b, *bias, *whole;
    const lm_st_tensor *magnitude; /* DoRA; NULL: plain */
    const lm_tune_part *part;      /* of a method other than LoRA: its module; else NULL */
    bool of_bias;                  /* of a part: its bias */
    const lm_tune_param *param;    /* of experts; else NULL */
    const lm_tune_slice *slice;    /* of the parameter: this tensor */
    const void *whole_data;        /* mapped, or in `kept` */
    char *kept;
    char *name; /* shape of the base's tensor, in the adapter */
    double scale;
    bool embedding;
    bool turned;     /* the base's matrix is [in, out]; set by bind */
    const char *own; /* name in the result of a tensor that the base does not store; set by bind */
    bool skipped;    /* equal to the embedding, to which it remains tied */
} lm_lora_change;

/* Whether something is added to the tensor, or makes another of it. */
static inline bool lm_lora_adds(const lm_lora_change *c)
{
    return c->a || c->part || c->param;
}

struct lm_lora {
    char *path, *base;
    lm_tune_folder *folder;
    const json_t *config; /* these three are the folder's */
    lm_bundle *files;
    const lm_st *st;
    lm_tune_bases bases;          /* of methods other than LoRA, after bind */
    const lm_model_source *model; /* the base, for those that read two of its tensors at once */
    lm_lora_change *change;
    size_t n, cap;
    /* An adapter of an embedding that is tied to the head changes the embedding alone: this stands for it in the
     * result, with the bytes of `tied`, which is the head's. */
    lm_st_tensor beside;
    const lm_st_tensor *tied;
    json_t *names;                 /* of changes: their numbers */
    const lm_lora_change **sorted; /* by the address of the base's tensor; made by bind */
    bool transposed, dora, untied, tuned;
};

const lm_lora_change *lm_lora_change_on(const lm_lora *l, const lm_st_tensor *t);

/* lora_tuned.c: methods other than LoRA. */
lm_code lm_lora_bind_parts(lm_lora *l, const lm_model_source *base, lm_err *e);
lm_code lm_lora_add_part(const lm_lora *l, const lm_lora_change *c, const lm_st_tensor *t,
                         const void *w, void *out, lm_par *par, lm_err *e);
/* W' [n,m] = W + s L R in double, L [n,r], R [r,m], rounded once. */
typedef struct {
    const double *l, *r;
    int64_t m, rank;
    double scale;
    const char *w;
    lm_dtype from, into; /* of w, of the base's tensor */
    char *out;           /* of lm_lora_dtype(into) */
    /* DoRA: m / ||W'||, of each row, or of each column where by_column; NULL: none */
    double *factor;
    bool by_column;
} lm_lora_sum;
void lm_lora_sum_rows(const lm_lora_sum *s, int64_t n, lm_par *par);
/* lora_experts.c: parameters of experts. */
lm_code lm_lora_bind_params(lm_lora *l, lm_err *e);
lm_code lm_lora_add_param(const lm_lora *l, const lm_lora_change *c, const lm_st_tensor *t,
                          const void *w, void *out, lm_par *par, lm_err *e);
/* Read a tensor that replaces the base's. */
lm_code lm_lora_hold_whole(lm_lora *l, lm_lora_change *c, lm_err *e);
/* The change of that tensor of the base, made at first. */
lm_code lm_lora_change_of(lm_lora *l, const char *name, size_t len, const char *suffix,
                          lm_lora_change **out, lm_err *e);
lm_code lm_lora_replace(lm_lora *l, const char *name, const lm_st_tensor *t, lm_err *e);
/* lora_tied.c: which changes concern the embedding `tied` or the head, and which of them apply. */
lm_code lm_lora_untie(lm_lora *l, const lm_model_source *base, const lm_st_tensor *tied, lm_err *e);

#endif
