/* SPDX-License-Identifier: Apache-2.0 */
/* adapt.h -- where adapters enter the graph of a model.
 *
 * An adapter is a table of functions that the builder of a decoder calls at its places (lm_build.adapt): each may append
 * nodes and declare parameters, and says which value goes on.  Without a table, or where a function is NULL or
 * returns LM_NONE, the builder appends what it always does.  The same places are in graphs of every
 * mode, so that what was trained is what generates.
 *
 * Parameters that are declared inside these functions are the adapter's (lm_slice.of_adapter): their tensors have
 * the names of the adapter's file and are not looked for in the base.  All values are F32 while a graph
 * is built; the precision pass retypes them.
 *
 * Virtual tokens are ids from the size of the vocabulary on, in front of a document: the embedding of
 * such an id is zero (plus its learned position), and the adapter gives it a row. */
#ifndef LM_MODEL_ADAPT_H
#define LM_MODEL_ADAPT_H

#include "model/arch.h"
#include "model/model.h"

typedef struct lm_builder lm_builder;

/* ---- places ---- */

/* A matrix of the checkpoint within a parameter. */
typedef struct {
    lm_part part;
    char name[LM_TENSOR_NAME]; /* of its module: "model.layers.0.self_attn.q_proj" */
    int64_t layer;             /* -1: outside the layers */
    int64_t row, rows;         /* of the parameter */
    int64_t in;                /* its columns */
    bool turned;               /* the checkpoint stores [in,out] */
} lm_adapt_module;

enum { LM_ADAPT_MODULES = 3 };

/* y [N,M] = x [N,in] w^T + bias, where w [M,in] holds the modules one below another. */
typedef struct {
    lm_vid x, w, bias; /* bias LM_NONE: none */
    lm_adapt_module module[LM_ADAPT_MODULES];
    int n_modules;
} lm_adapt_linear;

/* The rows of x [R,in], sorted by expert (offsets I32 [experts+1]), times the matrices of their experts: w holds those of all,
 * one below another. */
typedef struct {
    lm_vid x, w, offsets;
    int64_t experts;
    bool down; /* down_proj; else gate and up, of each expert one below the other */
    char module[LM_TENSOR_NAME]; /* as transformers names it: "model.layers.0.mlp.experts" */
} lm_adapt_experts;

/* The embedding of tokens: with an encoder, of those that each stack reads. */
typedef struct {
    bool encoder;
    lm_vid tokens; /* I32 [N] */
    lm_vid table;  /* [V,C] */
    lm_vid x;      /* [N,C]: the rows, scaled, with learned positions */
    double scale;
    lm_adapt_module module; /* not of an encoder's */
} lm_adapt_embed;

/* What a branch adds to the residual stream. */
typedef struct {
    bool encoder; /* of the encoder's stack, which counts its own layers */
    int64_t layer;
    bool mlp;      /* of the MLP; else of attention, */
    bool cross;    /* to what the encoder made */
    lm_vid stream; /* [N,C]: the residual stream without it */
    lm_vid h;      /* [N,C], after a norm that follows the branch and its dropout */
} lm_adapt_branch;

/* Queries, keys and values of a layer, rotated unless its cache rotates late. */
typedef struct {
    bool encoder;
    int64_t layer;
    lm_vid tokens; /* I32 [N] */
    lm_vid qkv;    /* [N,(H+2K)D] */
    bool late;     /* keys are rotated when they are read */
} lm_adapt_heads;

typedef struct lm_adapt {
    void *ctx;
    /* Products: each returns y, or LM_NONE for the plain product. */
    lm_vid (*linear)(void *ctx, lm_builder *b, const lm_adapt_linear *place);
    /* True: each module of the place becomes a parameter and a product of its own, and their results are
     * joined; asked before the parameters are declared (x, w, bias LM_NONE). */
    bool (*apart)(void *ctx, const lm_adapt_linear *place);
    /* Products of experts: y, or LM_NONE for the plain ones. */
    lm_vid (*experts)(void *ctx, lm_builder *b, const lm_adapt_experts *place);
    /* The other places return what goes on in place of x, h, qkv, or LM_NONE. */
    lm_vid (*embed)(void *ctx, lm_builder *b, const lm_adapt_embed *place);
    lm_vid (*branch)(void *ctx, lm_builder *b, const lm_adapt_branch *place);
    lm_vid (*heads)(void *ctx, lm_builder *b, const lm_adapt_heads *place);
    /* The head's matrix, place->w [V,C]: returns the value that takes its place, or LM_NONE. */
    lm_vid (*head)(void *ctx, lm_builder *b, const lm_adapt_linear *place);
    /* In generation: what goes on in place of y [N,V] F32, the logits of the rows place->x, or LM_NONE. */
    lm_vid (*logits)(void *ctx, lm_builder *b, const lm_adapt_linear *place, lm_vid y);
    /* The name, in lm_b_arena, of a tensor of the checkpoint that trains beside the adapter in its file; NULL: by the rule of
     * lm_model_saved. */
    const char *(*saved)(void *ctx, lm_builder *b, const char *tensor);
} lm_adapt;

/* ---- for these functions ---- */

/* The first failure is kept, and every later call does nothing, so that a rule reads as its equation. */
bool lm_b_ok(const lm_builder *b);
lm_graph *lm_b_graph(const lm_builder *b);
lm_model *lm_b_model(const lm_builder *b);
/* A number from 1 on that no other graph of this process has, unlike the address of its model, which may be one of a model
 * that was freed. */
uint64_t lm_b_number(const lm_builder *b);
lm_arena *lm_b_arena(const lm_builder *b);
lm_err *lm_b_err(const lm_builder *b);

/* Declare a parameter of any rank, which consists of the slices declared next; `fmt` names it. */
lm_vid lm_b_param(lm_builder *b, int ndim, const int64_t *dim, const char *fmt, ...)
    LM_PRINTF(4, 5);
/* The next `rows` entries of dimension 0 of the latest parameter are the file's tensor `fmt`;
 * transposed: a matrix that the file stores as [in, out]. */
void lm_b_slice(lm_builder *b, int64_t rows, bool transposed, lm_init init, double std,
                const char *fmt, ...) LM_PRINTF(6, 7);
/* Append a node of which the first output is used. */
lm_vid lm_b_append(lm_builder *b, const lm_op *op, const void *attr, const lm_vid *in);
lm_vid lm_b_linear(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias);
lm_vid lm_b_add(lm_builder *b, lm_vid x, lm_vid y);
/* Numbers of a CONST value, given as doubles or as ids, in the arena: lm_rotary copies them to memory of the
 * backend in the value's type. */
void lm_b_const(lm_builder *b, lm_vid value, const double *number, const int32_t *id,
                int64_t count);
/* A pointer for what functions of the adapter share in one model; NULL at first. */
void **lm_b_shared(lm_builder *b);
/* A tensor of the adapter's file that no value of the graph holds: whole numbers, I32 or I64 in the file, which must outlive
 * the model (indices, which are constants of the graph). */
void lm_b_aside(lm_builder *b, lm_dtype dtype, int ndim, const int64_t *dim, const int64_t *number,
                const char *fmt, ...) LM_PRINTF(6, 7);
/* The file has the latest slice once more, by the name `fmt`, which is not read. */
void lm_b_again(lm_builder *b, const char *fmt, ...) LM_PRINTF(2, 3);
/* True if the graph draws random numbers beside the model: it trains, with dropout.  *site: of the next draws. */
bool lm_b_adapter_draws(lm_builder *b, int64_t *site);
/* x with elements dropped at rate p, counted by a site of its own; x itself where the mode does not train. */
lm_vid lm_b_adapter_dropout(lm_builder *b, lm_vid x, double p);

#endif
