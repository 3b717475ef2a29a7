/* SPDX-License-Identifier: Apache-2.0 */
/* build.h -- the parts from which a decoder is built as a graph.  Private to lib/model. */
#ifndef LM_MODEL_BUILD_H
#define LM_MODEL_BUILD_H

#include "kernels/kv_keep.h"
#include "model/adapt.h"

/* A builder: *e keeps the first failure and every later call does nothing, so that a decoder reads
 * as a list of layers. */
struct lm_builder {
    lm_model *m;
    lm_arena *arena; /* owned by the model */
    lm_err *e;
    uint64_t number; /* lm_b_number */
    size_t cap_params, cap_slices, cap_caches, cap_constants, cap_aside;
    int64_t site;         /* counts dropout sites, */
    int64_t adapter_site; /* and those of the adapter */
    void *shared;         /* lm_b_shared */
    bool adapting;        /* a function of the adapter runs: parameters are its own */
    /* while the encoder is built: the config, in whose place the encoder's is */
    const lm_config *whole;
    lm_vid relative; /* of this stack, if its layers have buckets: biases by distance [H,Z] */
    lm_vid encoded;  /* the encoder's states [B*S,C] */
};

/* The fields of a model that are single values, arrays of a fixed size included; returns their number. */
enum { LM_B_VALUES = 37 + LM_MOST_ROPES + 4 * LM_MOST_AHEAD };
int lm_b_values(lm_model *m, lm_vid *out[LM_B_VALUES]);

/* With lm_build.mesh: replace the list by that of this rank, and cut parameters and tensors.  Behind the backward. */
lm_code lm_b_take_part(lm_model *m, lm_err *e);
/* With lm_build.stages: which stages have a parameter, in the whole list: behind the sharding pass not every rank of a stage
 * reads what is added once.  *out [n_params], NULL without stages; the caller frees it. */
typedef struct lm_b_holders lm_b_holders;
lm_code lm_b_find_holders(const lm_model *m, lm_b_holders **out, lm_err *e);
/* Leave out the nodes and tensors of other ranks' stages.  Behind lm_b_take_part. */
lm_code lm_b_take_stages(lm_model *m, const lm_b_holders *of, lm_err *e);

lm_vid lm_b_embed(lm_builder *b, lm_vid ids, lm_vid wte, lm_vid wpe);
/* y = norm(x [+ r]) with the norm of the config; *s receives x + r (x when r is LM_NONE). */
lm_vid lm_b_norm(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias, lm_vid r, lm_vid *s);
/* Norm of queries and keys, rotation, and attention of a layer: of rows that are not rotated, in GENERATE through the
 * cache. */
lm_vid lm_b_head_norm(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid wq, lm_vid wk);
lm_vid lm_b_rope(lm_builder *b, int64_t layer, lm_vid qkv);
/* Rows whose queries, keys and values stand head by head, in the order of kernels/attention.h. */
lm_vid lm_b_part_qkv(lm_builder *b, int64_t layer, lm_vid x);
/* Biases of a layer by distance, and the column of distance 0; LM_NONE without. */
lm_vid lm_b_distances(lm_builder *b, int64_t layer, int64_t *zero);
/* sinks [H] or LM_NONE */
lm_vid lm_b_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks);
/* The latest slice, transposed, holds that many matrices, which the file has in one tensor [matrices, in, out]. */
void lm_b_stack(lm_builder *b, int64_t matrices);
/* A parameter [rows,width] without weight decay that begins as zeros: the tensor `hf`; rows 0: one row, a vector there. */
lm_vid lm_b_bias(lm_builder *b, int64_t rows, int64_t width, const char *name, const char *hf);
/* How a layer attends, but for dropout. */
lm_attention_attr lm_b_attention_attr(const lm_model *m, int64_t layer);
/* max(x, 0), tanh x */
lm_vid lm_b_relu(lm_builder *b, lm_vid x);
lm_vid lm_b_tanh(lm_builder *b, lm_vid x);
/* The activation of an MLP; in a gated one, x has the gates and the other half side by side. */
lm_vid lm_b_mlp(lm_builder *b, lm_mlp mlp, lm_vid x);

/* ---- build_delta.c: what is between the products of a layer ---- */

/* Of rows x that hold gates beside queries: queries, keys and values, and in *gate the gates; o weighed by them. */
lm_vid lm_b_split_gate(lm_builder *b, int64_t layer, lm_vid x, lm_vid *gate);
lm_vid lm_b_gate(lm_builder *b, lm_vid o, lm_vid gate);

/* A layer with a state: the results of its products, and its other parameters. */
typedef struct {
    lm_vid qkvz, ba, conv, a_log, dt, norm;
    /* q, k, v and z, as b and a, stand one behind the other, not key head by key head */
    bool apart;
} lm_delta_parts;
/* What its last product reads. */
lm_vid lm_b_delta(lm_builder *b, int64_t layer, const lm_delta_parts *p);
/* The same of linear attention; gate [N,HD] and norm [D]: of retention, otherwise LM_NONE. */
lm_vid lm_b_linear_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid gate, lm_vid norm);

/* ---- build_latent.c: latent attention (kernels/latent.h) ---- */

/* Its norms of queries' and keys' low ranks. */
lm_vid lm_b_low_norm(lm_builder *b, lm_vid x, lm_vid w);
/* Of kv [N, kv_rank + rope_dim] the latents, and the rotated part of keys before its rotation. */
lm_vid lm_b_latents(lm_builder *b, int64_t layer, lm_vid kv);
lm_vid lm_b_latent_keys(lm_builder *b, int64_t layer, lm_vid kv);
/* True if heads read latents (GENERATE), not what products make of them: an adapter may add to these. */
bool lm_b_absorbs(const lm_builder *b, int64_t layer);
/* Attention of queries q, content `up` of keys and values, and k: not rotated; in GENERATE through caches of keys and
 * values. */
lm_vid lm_b_latent_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid up, lm_vid k);
/* The same through a cache of normalised latents c and rotated k; w: the matrix that makes `up` of c. */
lm_vid lm_b_absorbed_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid c, lm_vid k,
                               lm_vid w);

/* ---- build_experts.c ---- */

/* Logits [N,experts] before and behind the noise that a router learned, and its deviations. */
typedef struct {
    lm_vid clean, noisy, deviation;
} lm_noisy_logits;

/* How the tokens of a layer were routed (kernels/route.h). */
typedef struct {
    lm_vid z, expert, weight, offsets, from, place;
    lm_noisy_logits logits; /* with noise that is learned, in training */
} lm_routed;

/* The parameters of a router: w [experts,C]; of logits, added [1,experts], of choices, bias [experts], and of deviations of
 * noise, noise [experts,C]: each LM_NONE without. */
typedef struct {
    lm_vid w, added, bias, noise;
} lm_router;

/* The router's choice for rows h [N,C]. */
lm_routed lm_b_route(lm_builder *b, int64_t layer, lm_vid h, const lm_router *p);
/* Copies of rows, sorted by expert; products of them with the experts' matrices w, one below another; and the weighted sums
 * of the copies of each row. */
lm_vid lm_b_to_experts(lm_builder *b, const lm_routed *r, lm_vid h);
lm_vid lm_b_grouped(lm_builder *b, const lm_routed *r, lm_vid x, lm_vid w);
/* x + b [experts,M] of the expert of each row; and the activation LM_MLP_CLAMPED of a layer. */
lm_vid lm_b_grouped_bias(lm_builder *b, const lm_routed *r, lm_vid x, lm_vid bias);
lm_vid lm_b_clamped(lm_builder *b, int64_t layer, lm_vid x);
lm_vid lm_b_from_experts(lm_builder *b, const lm_routed *r, lm_vid x);
/* TRAIN: losses of the router of a layer, and what it did (lm_model.routed); behind all layers, the losses together.
 * Nothing in other modes. */
void lm_b_watch_route(lm_builder *b, int64_t layer, const lm_routed *r);
void lm_b_route_losses(lm_builder *b);

/* ---- build_load.c: noise that routers learn, and losses of loads ---- */

/* Logits z of a layer with the noise whose deviations softplus(n) are. */
lm_noisy_logits lm_b_learned_noise(lm_builder *b, int64_t layer, lm_vid z, lm_vid n);
/* The losses of importances and loads of a layer that lm_build.routing asks for, together; LM_NONE: none. */
lm_vid lm_b_load_losses(lm_builder *b, int64_t layer, const lm_routed *r);
/* x [N,C] times sigmoid(gate [N,1]). */
lm_vid lm_b_weigh(lm_builder *b, lm_vid x, lm_vid gate);

lm_vid lm_b_dropout(lm_builder *b, lm_vid x, double p);
/* The score of each row of final states x [N,C]: w is the checkpoint's score.weight [1,C]. */
void lm_b_scores(lm_builder *b, lm_vid x);
/* The value head of a training; graphs that generate have its parameters alone, so that they read the same store. */
void lm_b_value(lm_builder *b, lm_vid x);
/* The loss (TRAIN, EVAL) or the logits of the chosen rows (GENERATE) of final states place->x [N,C]. */
void lm_b_head(lm_builder *b, const lm_adapt_linear *place);

/* ---- build_ahead.c: modules that predict tokens further on ---- */

/* True if the graph has module k, from 0 on. */
bool lm_b_has_ahead(const lm_model *m, int64_t k);
/* Declare what they read besides: for lm_model_build. */
lm_code lm_b_make_ahead(lm_model *m, lm_err *e);
/* The norms of tokens and states, side by side. */
lm_vid lm_b_join(lm_builder *b, lm_vid x, lm_vid y);
/* The loss of module k of what its head reads, with the head's matrix w. */
void lm_b_ahead_loss(lm_builder *b, int64_t k, lm_vid x, lm_vid w);
/* Files have the latest slice again, by the name of that part of each module. */
void lm_b_ahead_copies(lm_builder *b, lm_part part);

/* ---- build_encoder.c: an encoder in front of the decoder ---- */

/* Fails: LM_EUSAGE for what such models do not have; and the inputs of the source. */
lm_code lm_b_check_encoder(const lm_config *c, const lm_build *b, lm_err *e);
lm_code lm_b_source_inputs(lm_model *m, lm_err *e);
/* Between the two, the model's config, rows, tokens and ends are those of the encoder. */
typedef struct {
    lm_config config;
    lm_mode mode;
    int64_t seq;
    lm_vid tokens, lo, hi;
} lm_b_side;
void lm_b_enter_encoder(lm_builder *b, lm_b_side *side);
void lm_b_leave_encoder(lm_builder *b, const lm_b_side *side);
/* Layers in front of those that are built now. */
int64_t lm_b_first_layer(const lm_builder *b);
/* The largest distance with a column of its own in the stack that is built now: no larger one occurs, or gets another bias. */
int64_t lm_b_farthest(const lm_builder *b);
/* Biases of a stack by distance, from its table [buckets,H]. */
lm_vid lm_b_relative(lm_builder *b, lm_vid table);
/* Attention of rows q [B*T,HD] to the keys and values kv [B*S,2KD] of their sources, of which those that this graph keeps
 * in lm_model.memory are read. */
lm_vid lm_b_cross_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid kv);
/* Remove the nodes that memory, logits or caches do not need: all parameters have got their types by them. */
lm_code lm_b_cut_encoder(lm_model *m, lm_err *e);
/* x in another shape; and a part of its rows and columns, from row 0 and column `col` on. */
lm_vid lm_b_seen_as(lm_builder *b, lm_vid x, int64_t rows, int64_t cols);
lm_vid lm_b_part_of(lm_builder *b, lm_vid x, int64_t col, int64_t rows, int64_t cols);
/* x times a number. */
lm_vid lm_b_scale(lm_builder *b, lm_vid x, double factor);

/* ---- build_pairs.c: next-sentence prediction ---- */

/* Declare the labels of pairs; the first row of each sequence of final states x [N,C]. */
lm_vid lm_b_first_rows(lm_builder *b, lm_vid x);
/* The mean loss of pooled rows x [B,C], with the matrix w [2,C] and bias [2] of the head. */
void lm_b_pair_loss(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias);

/* ---- build_adapt.c: calls of the adapter's functions (adapt.h), each LM_NONE without an adapter ---- */

/* True if each module of the place has a parameter and a product of its own. */
bool lm_b_apart(lm_builder *b, const lm_adapt_linear *place);
/* The product of a place, with what the adapter adds. */
lm_vid lm_b_product(lm_builder *b, const lm_adapt_linear *place);
/* The value that goes on in place of that of the place. */
lm_vid lm_b_adapt_grouped(lm_builder *b, const lm_routed *r, int64_t layer, bool down, lm_vid x,
                          lm_vid w);
lm_vid lm_b_adapt_embed(lm_builder *b, const lm_adapt_embed *place);
lm_vid lm_b_adapt_branch(lm_builder *b, const lm_adapt_branch *place);
lm_vid lm_b_adapt_heads(lm_builder *b, const lm_adapt_heads *place);
lm_vid lm_b_adapt_head(lm_builder *b, const lm_adapt_linear *place);
lm_vid lm_b_adapt_logits(lm_builder *b, const lm_adapt_linear *place, lm_vid y);

/* ---- build_cache.c ---- */

/* True if caches of a layer are coded, or tails of one are there (build.kv). */
bool lm_b_coded(const lm_build *b, int64_t layer);
bool lm_b_tailed(const lm_build *b, int64_t layers);
/* True if keys are stored before their rotation. */
bool lm_b_rotates_late(const lm_build *b, int64_t layer);
/* Fails: LM_EUSAGE for caches that this builder, or the backend, cannot make. */
lm_code lm_b_check_cache(const lm_config *c, const lm_build *b, lm_err *e);
/* Declare the cache `word` of a layer; LM_NONE after a failure. */
lm_vid lm_b_cache(lm_builder *b, int64_t layer, lm_cache_kind kind, const char *word,
                  lm_tensor shape);
/* Attention of a layer through its caches, which are declared; rows are rotated, unless the layer rotates late. */
lm_vid lm_b_cached_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks, lm_vid bias,
                             const lm_attention_attr *attr);

/* Sides of a layer that is coded, as operators of coded caches have them. */
lm_kv_attr lm_b_kv_attr(const lm_build *b, int64_t layer, const lm_attention_attr *attr);

/* ---- build_kept.c ---- */

/* True if the policy drops tokens of the layer. */
bool lm_b_kept(const lm_build *b, int64_t layer);
/* True if tokens of such a layer are read at their ranks: keys are stored before the rotation, of prompts too. */
bool lm_b_ranked(const lm_build *b, int64_t layer);
/* True if masses of tokens are added up. */
bool lm_b_weighs(const lm_build *b);
/* Of such a layer: pages of a sequence, and masses of a head. */
int64_t lm_b_kept_pages(const lm_build *b, int64_t layer);
int64_t lm_b_masses(const lm_build *b, int64_t layer);
/* Declare what these layers read. */
lm_code lm_b_make_kept(lm_model *m, lm_err *e);
/* Add the probabilities of the rows of qkv to the masses of the layer. */
lm_vid lm_b_add_masses(lm_builder *b, int64_t layer, const lm_kv_mass_attr *a, lm_vid qkv,
                       lm_vid lse, lm_vid keys, lm_vid ktail);

/* After all parameters are declared: set their offsets in the master copy, and build the index of
 * names. */
lm_code lm_b_place(lm_builder *b);

/* Mark the parameters that are kept in codes (build.codes, build.frozen_format, build.frozen_embed). */
lm_code lm_model_keep_codes(lm_model *m, lm_err *e);
/* Mark the parameters that are kept in codes or panels in `like`, where both have the same ones. */
lm_code lm_model_keep_like(lm_model *m, const lm_model *like, lm_err *e);
/* Mark the other parameters whose readers all read panels (lm_tensor.panels). */
void lm_model_keep_panels(lm_model *m);

/* Append all nodes from the embedding to the head. */
void lm_build_decoder(lm_builder *b);

#endif
