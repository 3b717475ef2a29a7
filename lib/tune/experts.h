/* SPDX-License-Identifier: Apache-2.0 */
/* experts.h -- LoRA of parameters that hold the weights of all experts of a layer
 * (target_parameters of PEFT).
 *
 * A parameter P [E,out,in] of the module M gets lora_A [E r,in], whose row e r + k is row k of
 * expert e, and lora_B [out,r E], whose column k E + e is column k of expert e: W_e' = W_e + s B_e
 * A_e.  Several parameters of one module nest, the first that is wrapped innermost: tensors
 * M.base_layer.lora_A.weight belong to it, M.lora_A.weight to the last.  PEFT wraps in the order in
 * which the module declares its parameters, of which files know nothing: pairs are given to
 * parameters by their shapes, and by the known order where several fit.
 *
 * Parameters in files of models: one tensor [E,out,in]; or [E,in,out] (gpt-oss); or a matrix for
 * each expert, as transformers saves Qwen's and DeepSeek's (M.e.gate_proj, up_proj, down_proj) and
 * Mixtral's (w1, w3, w2 of block_sparse_moe), where gate_up_proj is the rows of the gate and then
 * those of up.  Source: huggingface/peft tuners/lora/layer.py (ParamWrapper),
 * tuners/tuners_utils.py (_inject_parameters); huggingface/transformers conversion_mapping.py. */
#ifndef LM_TUNE_EXPERTS_H
#define LM_TUNE_EXPERTS_H

#include "format/safetensors.h"
#include "tune/modules.h"

/* A tensor of the base that holds a part of a parameter. */
typedef struct {
    const lm_st_tensor *base;
    int64_t expert;    /* of a matrix [rows,in]; -1: a tensor of all experts */
    int64_t row, rows; /* of `out` that it holds */
} lm_tune_slice;

/* A parameter of the base. */
typedef struct {
    const char *module, *name; /* "model.layers.0.mlp.experts"; "gate_up_proj" */
    const char *key;           /* "model.layers.0.mlp.experts.gate_up_proj" */
    int64_t experts, out, in;
    bool turned; /* its tensor is [E,in,out] */
    lm_tune_slice *slice;
    size_t n;
} lm_tune_stack;

/* A parameter that an adapter changes. */
typedef struct {
    lm_tune_stack stack;
    const lm_st_tensor *a, *b;
    int64_t rank; /* of an expert */
    double scale;
    bool by_order; /* shapes fit several parameters */
} lm_tune_param;

/* The parameter `name` of a module of the base; *found false: it has none.  Strings and slices are
 * of `arena`. */
lm_code lm_tune_stack_find(const lm_tune_bases *b, const char *module, const char *name,
                           lm_arena *arena, lm_tune_stack *out, bool *found, lm_err *e);
/* Its place in the order in which modules declare their parameters; those of unknown names are
 * alike. */
int lm_tune_stack_order(const char *name);
/* True if a tensor of the base is a parameter of all experts: of three dimensions, behind
 * ".experts.". */
bool lm_tune_stack_is(const lm_st_tensor *t);

/* Factors of an expert, in double: left [out,rank], without the scale, right [rank,in].  Fails:
 * LM_EIO, LM_ELIMIT. */
lm_code lm_tune_param_expert(const lm_st *st, const lm_tune_param *p, int64_t expert, double *left,
                             double *right, lm_err *e);

#endif
