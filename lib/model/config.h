/* SPDX-License-Identifier: Apache-2.0 */
/* config.h -- a model's hyper-parameters: read from a Hugging Face config.json, and checked.
 *
 * A config is a core for the whole model, and a descriptor for each layer.  The reader of the
 * architecture (arch.h) fills both.  An unknown model_type, a missing key or a contradiction is
 * LM_EUSAGE that names the key.  Keys that change the computation in an unsupported way (another
 * activation, another rope_type, quantization_config) are refused, not ignored. */
#ifndef LM_MODEL_CONFIG_H
#define LM_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "kernels/attention.h"
#include "kernels/linear_attention.h"
#include "kernels/norm.h"

typedef struct lm_arch lm_arch;             /* arch.h */
const char *lm_arch_name(const lm_arch *a); /* model_type: "gpt2", "llama", ... */

typedef enum {
    LM_ROPE_DEFAULT,
    LM_ROPE_LINEAR,
    LM_ROPE_DYNAMIC, /* NTK */
    LM_ROPE_LLAMA3,
    LM_ROPE_YARN,
} lm_rope_type;

/* A rotary table. */
typedef struct {
    lm_rope_type type;
    int64_t dim; /* numbers of a head that are rotated: the width of the heads that read it */
    double theta, factor;
    double low_freq, high_freq;             /* llama3 */
    double beta_fast, beta_slow, attention; /* yarn; attention 0: derived from factor */
    double mscale, mscale_all_dim;          /* yarn; 0: absent */
    bool truncate;                          /* yarn */
    int64_t original;                       /* original_max_position_embeddings; 0: absent */
} lm_rope_config;

typedef enum {
    LM_QK_PLAIN,
    LM_QK_NORM_HEAD, /* RMSNorm of each head of queries and keys before the rotation */
    LM_QK_NORM_ROW,  /* RMSNorm over all heads at once */
} lm_qk_norm;

typedef enum {
    LM_MLP_GELU,       /* down(gelu(up x)), with the approximation by tanh */
    LM_MLP_GELU_EXACT, /* with the error function */
    LM_MLP_RELU,       /* down(max(up x, 0)) */
    LM_MLP_SWIGLU,     /* down(silu(gate x) * up x) */
    LM_MLP_GEGLU,      /* down(gelu(gate x) * up x), with the approximation by tanh */
    LM_MLP_CLAMPED,    /* gpt-oss: gates and ups by turns, with bounds (kernels/expert.h) */
} lm_mlp;
#define lm_mlp_gated(mlp) ((mlp) >= LM_MLP_SWIGLU)

/* The experts of a layer, and how a token's are chosen (kernels/route.h).  experts 0: the layer has one MLP. */
typedef struct {
    int64_t experts, chosen; /* chosen: experts of a token */
    int64_t ffn;             /* width of an expert */
    int64_t shared;          /* width of the expert that all tokens go through; 0: none */
    bool shared_gate;        /* its output is weighed by sigmoid(w x) */
    bool normalise;          /* weights of the chosen experts add up to 1 */
    bool sigmoid;            /* scores are sigmoid(z), not softmax(z) */
    /* choices are by score + a bias of each expert, which follows its load, not a gradient */
    bool score_bias;
    bool router_bias; /* logits have a bias that trains */
    bool stacked; /* a tensor of the file holds the matrices of all experts, each as [in, out] */
    bool biased;  /* products of experts have biases */
    double limit, alpha;         /* of LM_MLP_CLAMPED */
    double scale;                /* of the weights */
    int64_t groups, kept_groups; /* experts are chosen from the best groups; groups 1: from all */
    bool group_max;  /* a group is as good as its best expert, not as its two best together */
    double aux_coef; /* of the balance loss that the config asks of a training; 0: none */
    double jitter;   /* of the router's input, that the config asks of a training; 0: none */
    /* In training, logits have noise whose deviations are softplus(w x) + noise_least, with a matrix w of their own
     * (arXiv:1701.06538, equation 4). */
    bool noisy;
    double noise_least;
} lm_moe;

/* What a layer has for attention. */
typedef enum {
    LM_ATTENTION_HEADS,  /* queries, keys and values by three products */
    LM_ATTENTION_DELTA,  /* a state of fixed size (kernels/delta.h) */
    LM_ATTENTION_LATENT, /* keys and values from one latent of a token (kernels/latent.h) */
    LM_ATTENTION_LINEAR, /* the three products, and a state of fixed size (kernels/linear_attention.h) */
} lm_attention_kind;

/* How much a key weighs for a query, with attention to heads. */
typedef enum {
    LM_WEIGH_SOFTMAX,
    LM_WEIGH_GAUSSIAN, /* exp(-|q - k|^2 / (2 sqrt D)), which nothing divides (kernels/gaussian.h), */
    LM_WEIGH_GAUSSIAN_NORM, /* or the sum of the row */
} lm_weigh;

/* Sizes of a layer with a state: value heads, query and key heads, and the rows that its convolution mixes. */
typedef struct {
    int64_t heads, key_heads, key_dim, value_dim, taps;
} lm_delta_sizes;

/* Of linear attention.  With LM_FEATURE_IDENTITY (retention), results are normalised by head and weighed by the SiLU of
 * another product. */
typedef struct {
    lm_feature feature;
    bool decay;
} lm_linear_form;

/* Sizes of latent attention.  A head of queries and keys has content, then a rotated part, which all heads of
 * keys share. */
typedef struct {
    int64_t q_rank;  /* of the product that makes queries; 0: one product */
    int64_t kv_rank; /* numbers of a latent */
    int64_t nope_dim, rope_dim, value_dim;
    bool pairs; /* rotated numbers are neighbours, not half a head apart */
} lm_latent;

typedef struct {
    lm_attention_kind attention;
    lm_weigh weigh;
    int64_t heads, kv_heads, head_dim; /* latent: as attention reads its expanded rows */
    lm_delta_sizes delta;
    lm_latent latent;
    lm_linear_form linear;
    /* results of attention are weighed by sigmoids, which the product of queries makes too */
    bool out_gate;
    int64_t rotary; /* numbers of a head that are rotated; 0: all */
    int64_t window; /* keys that a query attends to, itself included; 0: all */
    /* blocks of keys, some of which a query sees; size 0: all keys */
    lm_attention_blocks blocks;
    double scale;       /* scale of the scores */
    double soft_cap;    /* soft cap of the scores, cap * tanh(score / cap); 0: none */
    int rope;           /* index of the rotary table; -1: none */
    bool bidirectional; /* a token sees those behind it too: an encoder */
    lm_qk_norm qk_norm;
    bool qkv_bias, out_bias;
    bool alibi; /* biases by distance with a slope for each head (lm_alibi_table) */
    /* rows of the product are the query, key and value of one head after another's */
    bool qkv_by_head;
    bool sinks; /* each head has a logit without a key (kernels/attention.h) */
    lm_mlp mlp;
    int64_t ffn; /* of the MLP of a layer without experts */
    bool mlp_bias;
    lm_moe moe;
    int64_t buckets; /* biases by distance (kernels/attention.h); 0: none */
    int64_t far;     /* the distance from which all share the last one */
    bool cross;      /* attends to what the encoder made, too */
    /* norms of each branch: of its input, of its result before the addition */
    bool norm_before, norm_after;
    /* or of the sum, which is the residual stream from there on; then the model has no last norm */
    bool norm_sum;
} lm_layer;

enum { LM_MOST_ROPES = 2, LM_MOST_AHEAD = 8 };

typedef struct lm_config {
    const lm_arch *arch;
    int64_t vocab, width, layers, max_positions;
    /* modules that predict tokens further on, with a layer each, behind those of the model */
    int64_t ahead;
    lm_norm_kind norm;
    double norm_eps;
    bool norm_plus_one; /* norms multiply by 1 + weight */
    double init_std;
    int64_t types;   /* kinds of tokens, whose embeddings are added; 0: none */
    bool embed_norm; /* a norm of the embeddings */
    /* in front of a tied head: a product, the MLP's activation and a norm; the head has a bias */
    bool head_transform;
    bool pairs; /* a head that tells whether the second text of a pair follows the first (BERT) */
    double embed_scale; /* factor of embeddings, rounded to their type; 1: none */
    double logit_cap;   /* soft cap of the logits, cap * tanh(logit / cap); 0: none */
    bool tied;          /* lm_head shares the embedding */
    /* numbers that the head gives a text (...ForSequenceClassification); 0: a language model */
    int64_t scores;
    double out_scale; /* factor of what the head reads; 0: none */
    double drop_embed, drop_resid, drop_attn;
    double drop_mlp;  /* inside MLPs, and behind the last norm */
    int64_t bos, pad; /* -1: none */
    int64_t *eos;     /* in the order of the config, each once and below the vocabulary */
    int n_eos;
    lm_rope_config rope[LM_MOST_ROPES];
    int ropes;       /* 0: learned positions, or biases by distance in all layers */
    lm_layer *layer; /* [layers + ahead] */
    /* Of an encoder-decoder the encoder: its layers and last norm, with the same embedding, in front of those of this
     * config, which are the decoder's.  NULL: none. */
    struct lm_config *encoder;
    int64_t start; /* with an encoder: the token that the decoder begins with */
} lm_config;

lm_code lm_config_read(const json_t *obj, const char *where, lm_config *out, lm_err *e);
void lm_config_fini(lm_config *c);
/* Change a language model's config, read and as JSON, to that of a model with one score, as Hugging Face writes it: its
 * class, num_labels, and a pad_token_id.  Nothing if it has scores already.  Fails: LM_ELIMIT. */
lm_code lm_config_make_scores(lm_config *c, json_t *o, lm_err *e);
/* Change a model's config, read and as JSON, to that of one with a head of pairs, or without.  Fails: LM_EUSAGE, at `where`,
 * if the architecture has no such head; LM_ELIMIT. */
lm_code lm_config_set_pairs(lm_config *c, json_t *o, bool pairs, const char *where, lm_err *e);
/* Set all rates that an architecture has. */
void lm_config_set_dropout(lm_config *c, double rate);
/* Check that no layer of linear attention, which has no weights of pairs, has attention dropout; what: what set the rate.
 * Fails: LM_EUSAGE. */
lm_code lm_config_check_dropout(const lm_config *c, const char *where, const char *what, lm_err *e);
/* Layers of encoder and decoder together. */
int64_t lm_config_all_layers(const lm_config *c);
/* Layers, those of the modules that predict tokens further on included. */
static inline int64_t lm_config_depth(const lm_config *c)
{
    return c->layers + c->ahead;
}
/* The first eos id, -1 if there is none. */
int64_t lm_config_eos(const lm_config *c);
/* The widest window of any layer, 0 if no layer has a window. */
int64_t lm_config_window(const lm_config *c);
/* The windows of all layers, each once, in the order of the layers; returns how many there are.  Configs have at most two
 * (sliding_window and gaussian_window of lm_hybrid); others than the first LM_MOST_WINDOWS are left out. */
enum { LM_MOST_WINDOWS = 2 };
int lm_config_windows(const lm_config *c, int64_t window[LM_MOST_WINDOWS]);
/* True if a layer keeps a state of fixed size, not keys and values; and if any layer does. */
static inline bool lm_layer_has_state(const lm_layer *y)
{
    return y->attention == LM_ATTENTION_DELTA || y->attention == LM_ATTENTION_LINEAR;
}
bool lm_config_has_states(const lm_config *c);
/* True if routers learn noise (lm_moe.noisy). */
bool lm_config_learns_noise(const lm_config *c);
/* True if a layer has queries, keys and values by a product each. */
static inline bool lm_layer_has_heads(const lm_layer *y)
{
    return y->attention == LM_ATTENTION_HEADS || y->attention == LM_ATTENTION_LINEAR;
}
/* True if a layer is bidirectional: the model predicts tokens between others, not the next one. */
bool lm_config_bidirectional(const lm_config *c);
/* LM_EUSAGE, at `where`, for such a model: todo says what is for it. */
lm_code lm_config_check_causal(const lm_config *c, const char *where, const char *todo, lm_err *e);
/* True if embeddings of positions are added to those of tokens. */
bool lm_config_has_positions(const lm_config *c);
/* Numbers of a head that are rotated. */
int64_t lm_layer_rotary(const lm_layer *y);
/* LM_EUSAGE for a context of more tokens than the model has positions. */
lm_code lm_config_check_context(const lm_config *c, int64_t context, lm_err *e);

/* LM_EUSAGE, at `where`, for a model with an encoder, which `what` cannot have: "adapters". */
lm_code lm_config_check_alone(const lm_config *c, const char *where, const char *what, lm_err *e);

/* LM_EUSAGE, at `where`, if a layer has no keys and values of heads, which caches keep elsewhere. */
lm_code lm_config_check_heads(const lm_config *c, const char *where, lm_err *e);
/* LM_EUSAGE, at `where`, for a model whose caches have no place in files: with an encoder, or with columns behind the numbers
 * of cached keys (kernels/gaussian.h). */
lm_code lm_config_check_stored(const lm_config *c, const char *where, lm_err *e);
/* The same for codes, which states of linear attention do not have either. */
lm_code lm_config_check_coded(const lm_config *c, const char *where, lm_err *e);

/* True if all layers have keys and values of heads: no latents, no states. */
bool lm_config_all_heads(const lm_config *c);

/* True if all layers have the sizes, biases, norms, MLP and soft cap of layer 0, as files require that hold
 * one number for all layers; windows, rotary tables and scales may differ. */
bool lm_config_alike(const lm_config *c);

/* Number of parameters (tied tensors once), and those that take part in matrix products (N of the
 * FLOP formula: no looked-up embedding rows, a head counted whether tied or not, chosen experts only). */
int64_t lm_config_params(const lm_config *c);
int64_t lm_config_matmul_params(const lm_config *c);
/* Those of the modules that predict tokens further on, which the others do not count. */
int64_t lm_config_ahead_params(const lm_config *c);
/* Parameters that one token meets: of experts those that are chosen. */
int64_t lm_config_active_params(const lm_config *c);
/* FLOPs of forward and backward per token: 6 N + 12 L H D T (PaLM, appendix B; no causal discount).
 */
double lm_config_train_flops(const lm_config *c, int64_t seq);
/* FLOPs of forward and backward of `tokens` tokens with the products of attention for the visible
 * pairs of a query and a key: `pairs` in layers without window, near[i] in those with window i of
 * lm_config_windows.  6 N tokens + 12 H D times the pairs of all layers: the formula above with T^2 pairs a sequence. */
double lm_config_pair_flops(const lm_config *c, double tokens, double pairs,
                            const double near[LM_MOST_WINDOWS]);

/* Numbers of a value of a head, and of a query and a key as attention reads them. */
int64_t lm_layer_value_dim(const lm_layer *y);
int64_t lm_layer_key_dim(const lm_layer *y);

/* YaRN's factor of rotated numbers for a scaling by `factor`: 1 + k ln(factor) / 10 (arXiv:2309.00071, section 3.4, with
 * DeepSeek's k). */
double lm_rope_mscale(double factor, double k);
/* The factor of the rotated numbers of a table of type yarn, as its config or YaRN has it. */
double lm_rope_yarn_factor(const lm_rope_config *r);

/* Biases of ALiBi (arXiv:2108.12409) for `heads` heads in the form of kernels/attention.h, [heads, positions]: of
 * distances 1 - positions to 0.  Slopes are those of the paper; where heads are no power of two, those of the power below,
 * then every other one of the power above. */
void lm_alibi_table(int64_t heads, int64_t positions, float *out);
/* Rows 0..positions-1 of rotary table `table` in the form of kernels/rope.h, [positions, dim]. */
void lm_rope_table(const lm_config *c, int table, int64_t positions, float *out);

/* The first `rows` rows of that table. */
void lm_rope_rows(const lm_config *c, int table, int64_t positions, int64_t rows, float *out);

#endif
