/* SPDX-License-Identifier: Apache-2.0 */
/* arch.h -- architectures: the properties of each model_type.
 *
 * An architecture is one file arch_NAME.c with one lm_arch: the keys of its config.json, the reader
 * that turns them into an lm_config, the names of its tensors here and in GGUF, and its keys in
 * GGUF.  The builder (decoder.c), conversion (lib/convert), checks of names and presets read that
 * entry; no other file refers to an architecture by name, except for file formats of one
 * architecture (llm.c, llama2.c).  A new architecture is a file and a line in arch.c. */
#ifndef LM_MODEL_ARCH_H
#define LM_MODEL_ARCH_H

#include "format/folder.h"
#include "model/config.h"

/* The part of a tensor in a model. */
typedef enum {
    LM_PART_EMBED = 1,
    LM_PART_POSITION,
    LM_PART_TYPES, /* of tokens, [types,width] */
    LM_PART_EMBED_NORM,
    LM_PART_OUTPUT_NORM,
    LM_PART_POOLER, /* of the first row, for LM_PART_PAIR */
    LM_PART_OUTPUT, /* from here to the layers: of the head, and without `root` in their names */
    LM_PART_HEAD_DENSE,
    LM_PART_HEAD_NORM,
    LM_PART_HEAD_BIAS, /* [vocab]; its name has no suffix */
    LM_PART_PAIR,      /* [2,width]: the second text of a pair follows, or not */
    /* of a layer, from here on */
    LM_PART_ATTN_NORM,
    LM_PART_Q,
    LM_PART_K,
    LM_PART_V,
    LM_PART_QKV, /* all three in one */
    LM_PART_Q_NORM,
    LM_PART_K_NORM,
    LM_PART_DELTA_IN, /* of a layer with a state: queries, keys, values and gates, key head by key head */
    LM_PART_DELTA_GATES, /* its corrections and decays, likewise */
    LM_PART_DELTA_QKV,   /* or each in a tensor of its own: queries, keys and values, */
    LM_PART_DELTA_Z,     /* gates, */
    LM_PART_DELTA_B,     /* corrections */
    LM_PART_DELTA_A,     /* and decays */
    LM_PART_DELTA_CONV,  /* [channels,1,taps] */
    LM_PART_DELTA_LOG,   /* [value heads]; its name has no suffix, */
    LM_PART_DELTA_DT,    /* nor has that of this */
    LM_PART_DELTA_NORM,
    LM_PART_DELTA_OUT,
    LM_PART_Q_A, /* of latent attention: down to a rank, */
    LM_PART_Q_A_NORM,
    LM_PART_Q_B,         /* and up to the heads of queries */
    LM_PART_KV_A,        /* latents, then the rotated part of keys */
    LM_PART_KV_A_NORM,   /* of latents */
    LM_PART_KV_B,        /* of each head content of keys, then values */
    LM_PART_LINEAR_GATE, /* of retention: what weighs the results of heads, */
    LM_PART_LINEAR_NORM, /* and their norm [head_dim] */
    LM_PART_ATTN_OUT,
    LM_PART_SINKS, /* [heads]; its name has no suffix */
    LM_PART_ATTN_POST_NORM,
    LM_PART_MLP_NORM,
    LM_PART_GATE,
    LM_PART_UP,
    LM_PART_DOWN,
    LM_PART_ROUTER,
    LM_PART_ROUTER_NOISE, /* [experts,width]: of the deviations of its noise (lm_moe.noisy) */
    LM_PART_EXPERT_GATE,  /* of each expert; '#' in their names stands for its number */
    LM_PART_EXPERT_UP,
    LM_PART_EXPERT_DOWN,
    LM_PART_STACK_IN, /* of all experts of a layer: gates and ups by turns; no suffix, biases "_bias" */
    LM_PART_STACK_OUT,
    LM_PART_SHARED_GATE,
    LM_PART_SHARED_UP,
    LM_PART_SHARED_DOWN,
    LM_PART_SHARED_SWITCH, /* [1,width]: what weighs the shared expert */
    LM_PART_ROUTER_BIAS,   /* [experts]; its name has no suffix */
    LM_PART_MLP_POST_NORM,
    LM_PART_RELATIVE, /* [buckets,heads] of layer 0: biases of scores by distance, for all layers */
    LM_PART_CROSS_NORM, /* of attention to what the encoder made, */
    LM_PART_CROSS_Q,
    LM_PART_CROSS_K,
    LM_PART_CROSS_V,
    LM_PART_CROSS_OUT,
    /* of a module that predicts a token further on, beside its layer (lm_config.ahead) */
    LM_PART_AHEAD_EMBED, /* files hold the embedding and the head again for each module */
    LM_PART_AHEAD_TOKEN_NORM,
    LM_PART_AHEAD_STATE_NORM,
    LM_PART_AHEAD_JOIN, /* of both, side by side, to the width */
    LM_PART_AHEAD_NORM, /* in front of the head */
    LM_PART_AHEAD_HEAD,
} lm_part;

/* Its names without prefix and suffix: "self_attn.q_proj" for
 * model.layers.3.self_attn.q_proj.weight, "attn_q" for blk.3.attn_q.weight, "mlp.experts.#.up_proj" for the
 * experts' model.layers.3.mlp.experts.0.up_proj.weight and so on.  "attn_k_b,attn_v_b": GGUF has two tensors
 * (convert/pieces.h).  "": GGUF does not have the part. */
typedef struct {
    lm_part part; /* 0 ends a table */
    const char *hf, *gguf;
} lm_tensor_name;

/* How a key of config.json follows from a GGUF file. */
typedef enum {
    LM_KEY_INT = 1,  /* the number under `gguf` */
    LM_KEY_REAL,     /* the same for a float */
    LM_KEY_TEXT,     /* the text `gguf` itself */
    LM_KEY_HAS,      /* is there a tensor `gguf`? */
    LM_KEY_HEAD_DIM, /* width of a head, which several keys of GGUF say */
    LM_KEY_WINDOW,   /* sliding window, and layer_types for a pattern other than gguf_pattern */
    LM_KEY_SCALAR,   /* query_pre_attn_scalar, which follows from the sizes there */
    LM_KEY_ROPE, /* rope_theta, rope_scaling; `times`: the default base of two tables with one base */
    LM_KEY_TRUE,         /* true in every file: what llama.cpp computes */
    LM_KEY_SHARE,        /* the number under `gguf` divided by key `like` */
    LM_KEY_PARTIAL_ROPE, /* the part of a head that is rotated, where that may be less than all */
    LM_KEY_EXPERT_FFN,   /* width of an expert; absent: feed_forward_length / expert_used_count */
    LM_KEY_LATENT,       /* the sizes of latent attention */
    LM_KEY_SCORED,       /* DeepSeek's experts: shared ones, scores, groups, first layers without */
    LM_KEY_STACKS,       /* T5: the kind of MLP, and what no file but T5's is */
    LM_KEY_SECTIONS,     /* positions on several axes, and modules that predict tokens further on */
    LM_KEY_MASKED,       /* BERT: kinds of tokens, and a class without a head */
} lm_key_kind;

/* Of an optional number that is absent, the value is `times` that of key `like`, which stands before it;
 * without `like`, it is `times` itself. */
typedef struct {
    const char *hf; /* key of config.json; NULL ends a table */
    const char *gguf;
    lm_key_kind kind;
    bool optional;
    const char *like;
    double times;
    bool unless_like; /* config.json does not get the key where it has that value */
} lm_gguf_key;

/* The axes of positions in GGUF. */
#define LM_GGUF_SECTIONS "rope.dimension_sections"

struct lm_arch {
    const char *name;       /* model_type */
    const char *class_name; /* of "architectures" */
    const char *
        pairs_class; /* the same of a model with a head of pairs (lm_config.pairs); NULL: has none */
    const char *gguf;        /* general.architecture; "": not converted */
    const char *const *keys; /* of config.json with a meaning, ended by NULL */
    bool tied;               /* default of tie_word_embeddings */
    lm_code (*read)(const json_t *o, const char *where, lm_config *c, lm_err *e);

    const char *root, *layers; /* in front of names outside the layers, and of a layer's number */
    const char *
        ahead; /* in front of the names of the only module that predicts a token further on, and of "layers.0." in its
                        * layer; NULL: modules have names of layers behind those of the model */
    bool rootless;                 /* published files leave `root` out */
    const lm_tensor_name *tensors; /* in the order of their files */
    /* tensors of all experts of a layer, with suffix (fused.h); NULL: none */
    const lm_tensor_name *fused;
    const char *const *buffers; /* ends of names: tables in its files that are recomputed; ended
                                    * by NULL */
    /* names that begin so are no part of the model, ended by NULL; NULL: none do */
    const char *const *passed_over;
    bool old_norms;      /* old files call weight and bias of norms gamma and beta */
    bool conv1d;         /* weights of layers are [in, out] */
    bool residual_init;  /* projections to the residual stream start at std / sqrt(2 layers) */
    bool branch_dropout; /* embeddings and branches have dropout, not only attention */

    /* Standard deviation of fresh weights of a part; NULL: that of the config for all. */
    double (*std)(const lm_config *c, lm_part part);

    /* that of mixtures whose experts are its MLPs (mixture.h); NULL: none */
    const lm_arch *mixture;

    const lm_gguf_key *gguf_keys;
    const char *gguf_stack;       /* in front of "blk." there; NULL: nothing */
    bool gguf_pairs;              /* rows of q and k lie there pair by pair (convert/names.h) */
    bool gguf_tiled;              /* value heads of layers with states lie there across key heads */
    bool gguf_head_dim;           /* head_dim is always written to config.json */
    bool gguf_tied;               /* llama.cpp has no head beside the embedding, */
    bool gguf_head;               /* or requires one */
    bool gguf_square;             /* llama.cpp requires heads * head_dim to be the width */
    const lm_arch *gguf_windowed; /* its GGUF is one of this architecture if it has a window */
    bool gguf_windows;            /* llama.cpp obeys sliding windows, */
    /* and each gguf_pattern-th layer has none unless a key says otherwise */
    int64_t gguf_pattern;
    /* with so many layers, llama.cpp scales scores by 1/sqrt(width / heads), not 1/sqrt(head_dim) */
    int64_t gguf_wide_layers;
    bool gguf_out_bias; /* llama.cpp reads a bias of attn_output */
    /* the bounds of YaRN's ramp are not rounded, which its files cannot tell */
    bool gguf_untruncated;
    bool gguf_normalise; /* llama.cpp lets the weights of a token's experts add up to 1 */
};

extern const lm_arch lm_arch_gpt2, lm_arch_llama, lm_arch_mistral, lm_arch_qwen2, lm_arch_qwen3,
    lm_arch_olmo2, lm_arch_olmo3, lm_arch_gemma2, lm_arch_gemma3, lm_arch_mixtral,
    lm_arch_qwen2_moe, lm_arch_qwen3_moe, lm_arch_dots1, lm_arch_qwen3_next, lm_arch_qwen3_5,
    lm_arch_gpt_oss, lm_arch_deepseek_v2, lm_arch_deepseek_v3, lm_arch_bert, lm_arch_bloom,
    lm_arch_t5, lm_arch_hybrid;

/* Keys of the object block_sparse_attention of lm_hybrid, ended by NULL. */
extern const char *const lm_block_sparse_keys[];
extern const char *const lm_linear_attention_keys[];

/* Entry i of the list, NULL behind the last. */
const lm_arch *lm_arch_at(int i);
/* By model_type; NULL: unknown. */
const lm_arch *lm_arch_find(const char *model_type);
/* "gpt2, llama and mistral are known": a phrase for errors.  `gguf`: with GGUF's names. */
enum { LM_ARCH_LIST = 256 };
const char *lm_arch_list(bool gguf, char out[LM_ARCH_LIST]);
/* The scale of the scores of such a model in llama.cpp. */
double lm_arch_gguf_scale(const lm_arch *a, int64_t layers, int64_t width, int64_t heads,
                          int64_t head_dim);
/* True if rows of a part are looked up: of tokens, positions or types. */
static inline bool lm_part_is_embedding(lm_part part)
{
    return part == LM_PART_EMBED || part == LM_PART_POSITION || part == LM_PART_TYPES;
}
/* True if a part is the weight of a norm. */
bool lm_part_is_norm(lm_part part);
/* True if norm weights of that part are stored as what 1 is added to, in such a model. */
bool lm_part_plus_one(const lm_config *c, lm_part part);
/* True if the part's name is all of its tensor's name. */
bool lm_part_is_bare(lm_part part);
/* The row of a part, NULL if the architecture has none. */
const lm_tensor_name *lm_arch_part(const lm_arch *a, lm_part part);

/* ---- The tensors of a model ---- */

enum { LM_TENSOR_NAME = 96 };

/* Orders of elements in GGUF: see convert/names.h. */
typedef enum {
    LM_ORDER_SAME,
    LM_ORDER_ROPE,
    LM_ORDER_QKV,
    LM_ORDER_CONV1D,
    LM_ORDER_TILED,
    LM_ORDER_TILED_COLS
} lm_element_order;

typedef struct {
    char gguf[LM_TENSOR_NAME], hf[LM_TENSOR_NAME];
    int ndim; /* 1 or 2; 3 with a 1 between (LM_PART_DELTA_CONV), which GGUF leaves out, or of stacks */
    int64_t dim[3]; /* as in Hugging Face's files */
    lm_element_order order;
    lm_part part;
    bool bias;
    int64_t layer;   /* -1: outside the layers */
    int64_t expert;  /* of the parts of experts, otherwise 0 */
    int64_t experts; /* of the parts of experts: how many the layer has; otherwise 0 */
    /* LM_ORDER_ROPE, LM_ORDER_QKV: number of heads in the rows; LM_ORDER_TILED*: of value heads */
    int64_t heads;
    int64_t groups,
        lead;      /* LM_ORDER_TILED*: number of key heads, and of rows in front of the former */
    bool plus_one; /* GGUF stores 1 + the number */
    bool exponent; /* GGUF stores -exp(the number) */
} lm_model_tensor;

/* The number of a layer in the names below: of a module under lm_arch.ahead it is LM_LAYER_AHEAD. */
enum { LM_LAYER_AHEAD = -2 };
int64_t lm_config_named_layer(const lm_config *c, int64_t layer);
/* Hugging Face's name of a part, "model.layers.3.self_attn.q_proj.weight" (layer -1: outside the layers), and
 * its middle, "layers.3.self_attn.q_proj".  The architecture has the part.  Of parts of experts the first is that of
 * expert 0, the middle has '#' in place of its number. */
const char *lm_tensor_hf_name(const lm_arch *a, lm_part part, int64_t layer, bool bias,
                              char out[LM_TENSOR_NAME]);
const char *lm_expert_hf_name(const lm_arch *a, lm_part part, int64_t layer, int64_t expert,
                              bool bias, char out[LM_TENSOR_NAME]);
const char *lm_tensor_stem(const lm_arch *a, lm_part part, int64_t layer, char out[LM_TENSOR_NAME]);
/* True if GGUF has the part. */
bool lm_part_in_gguf(const lm_arch *a, lm_part part);
/* GGUF's, "blk.3.attn_q.weight"; "": files there have no such tensor. */
const char *lm_tensor_gguf_name(const lm_arch *a, lm_part part, int64_t layer, bool bias,
                                char out[LM_TENSOR_NAME]);
/* Call `see` for each tensor of a model, in the order of its layers, until it fails. */
lm_code lm_model_tensors_walk(const lm_config *c,
                              lm_code (*see)(void *ctx, const lm_model_tensor *t), void *ctx);
/* The same for the modules that predict tokens further on, without the copies of embedding and head. */
lm_code lm_ahead_tensors_walk(const lm_config *c,
                              lm_code (*see)(void *ctx, const lm_model_tensor *t), void *ctx);
/* True if files hold the part of a module although it is that of the model. */
static inline bool lm_part_is_copy(lm_part part)
{
    return part == LM_PART_AHEAD_EMBED || part == LM_PART_AHEAD_HEAD;
}
/* True if a part is one of several experts. */
static inline bool lm_part_is_expert(lm_part part)
{
    return part >= LM_PART_EXPERT_GATE && part <= LM_PART_EXPERT_DOWN;
}
/* True if a tensor of the part holds the matrices of all experts. */
static inline bool lm_part_is_stack(lm_part part)
{
    return part == LM_PART_STACK_IN || part == LM_PART_STACK_OUT;
}
/* Matrices of a part of layer l: the experts, or 1. */
int64_t lm_part_count(const lm_config *c, lm_part part, int64_t l);
/* Rows and columns of a part of layer l (of one expert): y = w x has as many as rows; columns 0: a vector.  False: the
 * model has no such tensor. */
bool lm_part_shape(const lm_config *c, lm_part part, int64_t l, int64_t dim[2]);
bool lm_part_biased(const lm_config *c, lm_part part, int64_t l);
/* The layer in the name of a tensor of a module that predicts tokens further on; -1: it is none of c's. */
int64_t lm_ahead_layer(const lm_config *c, const char *name);
/* The same where the config may have no such modules, or one that is not read: Qwen3.5's, or Qwen3-Next's without a key. */
bool lm_config_is_ahead(const lm_config *c, const char *name);
/* Set a config's number of these modules to 0, where it has one: its tensors are left out.  Fails: LM_ELIMIT. */
lm_code lm_config_drop_ahead(json_t *config, lm_err *e);
/* True if `name` is the matrix of a router's noise, if the config asks for it or not; and set the config to ask for none.
 * Fails: LM_ELIMIT. */
bool lm_arch_is_noise(const lm_arch *a, const char *name);
lm_code lm_config_drop_noise(json_t *config, lm_err *e);
/* True if `name` is that of a tensor that files hold again for a module; *of: LM_PART_EMBED or LM_PART_OUTPUT, of which it
 * is the copy. */
bool lm_ahead_is_copy(const lm_config *c, const char *name, lm_part *of);
/* True if `name` is the head, and the model has none beside its embedding; or the bias of such a head under its second
 * name. */
bool lm_config_ties(const lm_config *c, const char *name);
/* What the tensors of a model say and its config does not.  The head of a T5 whose config ties it without scaling what it
 * reads is tied if there is no tensor of a head: of transformers' folders with that config, those of a new model have none,
 * and those of a published one have one.  A model has a module under lm_arch.ahead if there are tensors of it. */
void lm_config_see(lm_config *c, const lm_model_source *src);
/* True if `name` is a tensor of another head, of a module that predicts tokens further on (lm_arch.passed_over,
 * lm_config.ahead), or of the noise of a router. */
bool lm_config_passes_over(const lm_config *c, const char *name);

/* ---- Names of tensors in Hugging Face's files of any model ---- */

/* The architecture of a config.json; NULL: unknown, or no config. */
const lm_arch *lm_arch_of(const json_t *config);
/* True if `name` is a tensor of that part in some architecture, under any prefix:
 * "model.embed_tokens.weight" and "language_model.model.embed_tokens.weight" for LM_PART_EMBED.
 * suffix: "weight" or "bias". */
bool lm_arch_names(lm_part part, const char *suffix, const char *name);
/* True if `name` contains the name of that part in some architecture: for models of an unknown one,
 * as "final_norm.weight" for LM_PART_OUTPUT_NORM. */
bool lm_arch_resembles(lm_part part, const char *name);
/* The head's weight; a NULL (unknown): the name that it has in every architecture. */
const char *lm_arch_head(const lm_arch *a, char out[LM_TENSOR_NAME]);
/* True if files of the architecture have this weight as [in, out]; a NULL: false.  The last part of
 * the name decides, as a module of cross attention has it too. */
bool lm_arch_turns(const lm_arch *a, const char *name);
/* `name` without the root of an architecture ("model.", "transformer."), if it begins with one. */
const char *lm_arch_rootless(const char *name);
/* The name of today of a tensor: of an architecture with old_norms, ".weight" for ".gamma" and ".bias" for ".beta" at its
 * end; otherwise `name` itself. */
const char *lm_arch_present_name(const lm_arch *a, const char *name, char out[LM_TENSOR_NAME]);
/* True if a tensor of this name is a buffer: a table that is recomputed when the model is built,
 * and that other formats do not have (attn.bias, rotary_emb.inv_freq).  a NULL: in any
 * architecture. */
bool lm_arch_is_buffer(const lm_arch *a, const char *name);
/* 'k' or 'v' if `name` is that of FP8 scales of the cache, as checkpoints for servers have them
 * ("model.layers.3.self_attn.k_scale", ".k_proj.k_scale"); *layer: 3.  Otherwise 0. */
int lm_arch_kv_scale(const char *name, int64_t *layer);

#endif
