/* SPDX-License-Identifier: Apache-2.0 */
/* attach_impl.h -- an adapter while it is attached.  Private to lib/tune. */
#ifndef LM_TUNE_ATTACH_IMPL_H
#define LM_TUNE_ATTACH_IMPL_H

#include "tune/attach.h"
#include "tune/rule.h"

/* A module that is changed. */
typedef struct {
    const lm_tune_base *base;
    lm_tune_module module;
    double *hyper;
    int64_t *ids[LM_TUNE_TENSORS]; /* numbers of tensors of indices; module.ids */
} attach_module;

/* Functions of bottlenecks. */
enum { NECK_RELU, NECK_GELU, NECK_GELU_TANH, NECK_SWISH, NECK_FUNCTIONS };

/* A tensor that all modules share, in the graph that is being built. */
typedef struct {
    char suffix[LM_TUNE_SUFFIX];
    lm_vid value;
} attach_shared;

typedef struct attach_kind attach_kind;

struct lm_attach {
    lm_adapt adapt;
    const lm_tune_bases *bases;
    const lm_config *config;
    const json_t *adapter;
    const lm_tune_method *method; /* NULL: a kind without modules */
    attach_module *module;        /* in the order of the base */
    size_t n_modules;
    struct {                   /* virtual tokens */
        int64_t tokens, count; /* of a text; rows of the table, of which it has the first */
        int64_t hidden, layers;
        bool prefix, encoder;
        int64_t lstm; /* layers of the encoder's LSTM; 0: it has none */
        lm_vid table; /* of the graph that is being built */
    } rows;
    struct { /* bottlenecks */
        int64_t width;
        bool attention, mlp, cross;
        bool with_stream; /* reads what the branch gives and the residual stream */
        double scale;
        int act;
    } neck;
    /* Of several adapters in one graph (join.h): what names of tensors begin with, and [N,1], one
     * in the rows of this adapter; "" and LM_NONE: it is alone. */
    char prefix[16];
    lm_vid mask;
    struct {                      /* rows of the embedding */
        const lm_tune_base *base; /* NULL: none */
        const json_t *list;
        bool beside;                  /* a LoRA's */
        lm_vid table, places, change; /* of the graph that is being built */
    } tokens;
    attach_shared shared[LM_TUNE_TENSORS];
    int n_shared;
    uint64_t building; /* the graph that the shared values belong to (lm_b_number) */
};

/* The module of that name, NULL: not changed. */
const attach_module *lm_attach_find(const lm_attach *a, const char *name);
/* Forget what belongs to another graph than the builder's. */
void lm_attach_begin(lm_attach *a, lm_builder *b);
/* Declare the tensors of a module: p[i] of tensor i, LM_NONE for one that is off. */
void lm_attach_declare(lm_attach *a, lm_builder *b, const lm_tune_module *m, lm_vid *p);

/* ---- attach_ids.c ---- */

/* The tensor `t`, number k of the module, which holds indices: the file has it, and rules have its
 * numbers. */
void lm_attach_declare_ids(lm_builder *b, const attach_module *m, const lm_tune_tensor *t, int k);

/* ---- attach_lora.c ---- */

/* True if the module runs as a low-rank path; if its rows have lengths that train (DoRA), which
 * then is a product of its own; if an embedding may have such a path. */
bool lm_attach_is_lora(const lm_attach *a, const attach_module *m);
bool lm_attach_has_lengths(const lm_attach *a, const attach_module *m);
bool lm_attach_embeds(const lm_attach *a, const attach_module *m);
/* False for a module of which AdaLoRA took all ranks away: it has no tensors, and stays as it
 * is. */
bool lm_attach_has_rank(const lm_attach *a, const attach_module *m);
/* The product of the place, with the paths of its modules. */
lm_vid lm_attach_lora(lm_attach *a, lm_builder *b, const lm_adapt_linear *place);
/* Its parts: h of each path, before the product, and their number; and y of the product with what
 * the paths add. */
int lm_attach_lora_down(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                        lm_vid h[LM_ADAPT_MODULES]);
lm_vid lm_attach_lora_up(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                         const lm_vid h[LM_ADAPT_MODULES], lm_vid y);
/* Logits y [N,V] F32 with what the path of the head `m` adds. */
lm_vid lm_attach_lora_logits(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                             const attach_module *m, lm_vid y);
lm_vid lm_attach_lora_embed(lm_attach *a, lm_builder *b, const lm_adapt_embed *place,
                            const attach_module *m);

/* ---- attach_experts.c ---- */

/* True if a configuration has target_parameters; sets the function of the experts. */
bool lm_attach_names_experts(const json_t *adapter);
lm_code lm_attach_experts_set(lm_attach *a, const char *where, lm_err *e);

/* ---- attach_rule.c ---- */

/* The product of a place by the rules of the method. */
lm_vid lm_attach_rules(lm_attach *a, lm_builder *b, const lm_adapt_linear *place);
/* False, with the failure in the builder, where a module of the place would drop what rules do not
 * drop. */
bool lm_attach_may_drop(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place);
/* True if a method changes only results, so that modules can stay one product. */
bool lm_attach_only_output(const lm_attach *a);

/* The rule's constants become the model's; frees what the rule has. */
void lm_attach_end_rule(lm_builder *b, lm_rule *r);

/* ---- attach_head.c ---- */

lm_code lm_attach_head_check(const lm_attach *a, const attach_module *m, const char *where,
                             lm_err *e);
/* Sets the functions of the head, if it is changed or trains rows; after modules and tokens are
 * known. */
void lm_attach_head_set(lm_attach *a);

/* ---- attach_tokens.c ---- */

/* Finds the rows of the embedding that train, if there are some, and checks them. */
lm_code lm_attach_tokens_set(lm_attach *a, const char *where, lm_err *e);
/* The embedding's result x with these rows; and what a head that is tied to it reads. */
lm_vid lm_attach_tokens_embed(lm_attach *a, lm_builder *b, const lm_adapt_embed *place, lm_vid x);
lm_vid lm_attach_tokens_head(void *ctx, lm_builder *b, const lm_adapt_linear *place);

/* ---- attach_virtual.c, attach_bottleneck.c: true if the configuration is of that kind ---- */

/* Declare a tensor of the encoder, within +- bound at first; its numbers, which the caller
 * frees. */
lm_vid lm_attach_encoder_part(lm_builder *b, int ndim, const int64_t *dim, double bound,
                              const char *part);
lm_code lm_attach_read_encoder(const lm_store *s, const char *part, float **out, lm_err *e);
bool lm_attach_virtual_is(const char *peft_type);
lm_code lm_attach_virtual_set(lm_attach *a, const char *where, lm_err *e);
bool lm_attach_bottleneck_is(const json_t *adapter);
lm_code lm_attach_bottleneck_set(lm_attach *a, const char *where, lm_err *e);

/* ---- attach_lstm.c ---- */

/* The states [P,2H] of the encoder's LSTM over the rows x [P,C]; and the same of numbers, whose
 * result takes the place of *x; *width is that of *x. */
lm_vid lm_attach_lstm(const lm_attach *a, lm_builder *b, lm_rule *r, lm_vid x);
lm_code lm_attach_fold_lstm(const lm_attach *a, const lm_store *s, double **x, int64_t *width,
                            lm_err *e);

#endif
