/* SPDX-License-Identifier: Apache-2.0 */
/* update.h -- optimisers as rules that append nodes, and the graph of an update.
 *
 * An optimiser is one file, lib/train/optim/NAME.c: a table of hyper-parameters, the numbers of a
 * step (rates, bias corrections) as a function of the hyper-parameters, and a rule that is called
 * for each tensor of the model and appends the nodes of its step.  The rest is the same for all of
 * them: clipping, groups with different rules, states in checkpoints, copies of the parameters in
 * BF16, steps in which nothing may be written.
 *
 * A rule receives the tensors of files (q, k and v, not the packed parameter of the graph), in
 * their orientation in memory: a linear weight is [out, in].  All are views of flat blocks, so that
 * consecutive nodes of one elementwise operator become one node over the block (lm_pass_merge): a
 * rule that is one such node per tensor costs one pass over memory for any number of tensors.
 *
 *   adamw    in = { t->grad, lm_update_sumsq(u), lm_update_watch(u), lm_update_numbers(u) }
 *            out = { t->param, m, v, t->low or t->packed }
 *
 * States are declared with lm_update_state: F32 of the parameter's shape, vectors, bases, codes.
 * They are initially zero; lm_update_at_start begins nodes that set other values.  Activations
 * (outputs given as LM_NONE) live within one step and share the memory of the training graph. */
#ifndef LM_TRAIN_UPDATE_H
#define LM_TRAIN_UPDATE_H

#include "base/hyper.h"
#include "convert/names.h"
#include "graph/graph.h"
#include "model/store.h"

/* ---- an optimiser ---- */

enum { LM_OPTIM_HYPERS = 16, LM_OPTIM_NUMBERS = 8 }; /* at most */

typedef struct lm_update lm_update;
typedef struct lm_update_tensor lm_update_tensor;

typedef struct lm_optim {
    const char *name, *about;
    double rate;           /* the run's peak rate by default */
    bool averages;         /* what it shows is an average, which stands for a rate that falls */
    const lm_hyper *hyper; /* h[i] of the functions below is the value of hyper[i] */
    /* True if these determine the rates of its steps, regardless of the run's.  NULL: no. */
    bool (*own_rate)(const double *h);
    /* The share of a matrix that decay removes in a step, per rate, when decay is a part of the gradient that a
     * momentum adds up.  NULL: decay is not such a part. */
    double (*shrinks)(const double *h);
    /* Hyper-parameters that exclude each other; NULL: none.  Fails: LM_EUSAGE. */
    lm_code (*check)(const double *h, lm_err *e);
    /* The numbers of step t (from 0) with the rate lr; NULL: one number, lr. */
    int n_numbers;
    void (*numbers)(const double *h, double lr, int64_t t, double *out);
    const char *const *number; /* their names in formulas; NULL: the first is lr */
    /* Append the step of *t.  Fails: LM_EUSAGE when the rule does not support such a tensor. */
    lm_code (*update)(lm_update *u, const lm_update_tensor *t, lm_err *e);
} lm_optim;

/* The i-th optimiser, NULL past the last; by name in any case, NULL if unknown. */
const lm_optim *lm_optim_at(int i);
const lm_optim *lm_optim_find(const char *name);
extern const char *const lm_optim_names[]; /* NULL-terminated */
int lm_optim_numbers(const lm_optim *o);
/* The index of a hyper-parameter; -1: the optimiser has none of that name. */
int lm_optim_hyper(const lm_optim *o, const char *name);
/* The optimisers that have it, "sgd, lion"; returns `out`. */
const char *lm_optims_with(const char *hyper, char *out, size_t size);

/* An optimiser with its hyper-parameters, for the tensors that `match` selects. */
typedef struct {
    const lm_optim *optim;
    double hyper[LM_OPTIM_HYPERS];
    double rate; /* its learning rate as a multiple of the run's: 1 */
    /* > 0: an average of the parameters with this decay, which is evaluated and published */
    double ema;
} lm_optim_use;
/* With the values of its table, without average. */
lm_optim_use lm_optim_default(const lm_optim *o);

/* ---- the arguments of a rule ---- */

struct lm_update_tensor {
    const char *name; /* published: "model.layers.0.self_attn.q_proj.weight" */
    lm_tensor shape;  /* F32, in memory's orientation */
    bool transposed;  /* a matrix that files store as [in, out] */
    bool decay;       /* weight decay applies */
    lm_part part;     /* its part */
    bool bias;
    int64_t layer; /* -1: outside the layers */
    /* q, k, v and their packed form: its rows are heads x head_dim (all three's together); 0: others */
    int64_t heads, head_dim;
    const lm_cut *cut; /* `shape` is the part of one rank of several; NULL: the whole tensor */
    /* what its gradient is an addend of along each axis, until the norm's part of the list adds it up */
    const lm_sums *sums;
    int64_t offset; /* elements before it in the block of parameters */
    int64_t whole;  /* elements of the whole tensor */
    int64_t
        unit; /* ranks along dp may have parts of it that end at multiples of so many rows; 0: they may not */
    int64_t norm_at; /* blocks of the norms before its own (lm_update_opts.norm_blocks) */
    int index;       /* number of the tensor in the model */
    int use;         /* number of its lm_optim_use */

    lm_vid param, grad; /* of `shape` */
    /* The copy in BF16, or LM_NONE.  A rule may write it as an output of its last node; when it does
     * not, a cast is appended. */
    lm_vid low;
    /* If it is in panels (kernels/panels.h), it is `packed`, for rules whose operator writes panels, and low is
     * LM_NONE; a node `panels` is appended for the others. */
    bool panels;
    lm_vid packed;
};

/* The graph to append to. */
lm_graph *lm_update_graph(const lm_update *u);
/* The rule being called. */
const lm_optim_use *lm_update_use(const lm_update *u);
/* One of its hyper-parameters, which must be in its table. */
double lm_update_hyper(const lm_update *u, const char *name);
/* Its numbers of the step, F64 [n_numbers]. */
lm_vid lm_update_numbers(const lm_update *u);
/* The decay of its average at the step, F64 [1]. */
lm_vid lm_update_average_keeps(const lm_update *u);
/* The step's numbers of lm_update_beside, F64 [n_numbers]. */
lm_vid lm_update_beside_numbers(const lm_update *u);
/* F32 or I32 numbers that stay, in memory of the trainer; they are copied.  Equal ones become one value. */
lm_code lm_update_const(lm_update *u, lm_tensor shape, const void *number, lm_vid *out, lm_err *e);

/* An OPT value that is kept between steps and in checkpoints, there as NAME.TENSOR.  Initially
 * zero.  A state of t's shape is stored in files in t's orientation there; others unchanged.
 * Called once for each name and tensor. */
lm_code lm_update_state(lm_update *u, const lm_update_tensor *t, const char *name, lm_tensor shape,
                        lm_vid *out, lm_err *e);

/* ---- clipping, and steps in which nothing may be written ---- Every node that writes a parameter
 * or a state must not change it when the sum of the gradients' squares or of the losses is not
 * finite, and clip: g' = g * scale, then bounded by +-value. */
lm_vid lm_update_sumsq(const lm_update *u); /* F64 [1]: of all gradients together */
lm_vid lm_update_watch(const lm_update *u); /* F64 [1]: the loss */
lm_vid
lm_update_scale(const lm_update *u); /* F64 [1]: the factor by norm; NaN: nothing may be written */
double
lm_update_clip_norm(const lm_update *u); /* for operators that read sumsq and watch; 0: none */
double lm_update_clip_value(const lm_update *u); /* 0: none */

/* ---- when nodes run ---- Nodes appended from here on, up to lm_update_always or the end of the
 * rule's call, run only then.  Values computed there are read only there, except states and
 * parameters. */
/* Steps t are counted from 0, without those that have no tokens to train on.
 * At steps with t % period == offset, and with `first` also at step 0; period 0: only at that one. */
lm_code lm_update_every(lm_update *u, int64_t period, int64_t offset, bool first, lm_err *e);
/* Once, before the first step of a fresh run (parameters have their values): for states that do not
 * start at zero. */
void lm_update_at_start(lm_update *u);
/* Before an evaluation or a checkpoint: these nodes write to t->param the value that is evaluated
 * and published instead (an average).  The trainer restores the parameter afterwards, to the bit,
 * and checkpoints hold it too, as "param.TENSOR". */
void lm_update_to_show(lm_update *u);
/* Before the gradients are summed, at steps that have tokens: these nodes may add to t->grad. */
void lm_update_to_penalise(lm_update *u);
void lm_update_always(lm_update *u);

/* ---- beside the optimisers ---- */

/* Nodes that the training of an adapter adds to an update: terms of the loss that depend on parameters alone, and what it
 * keeps about them. */
typedef struct {
    void *ctx;
    int n_numbers;
    /* The numbers of step t, from 0. */
    void (*numbers)(void *ctx, int64_t t, double *out);
    /* Append nodes, behind the step of *t. */
    lm_code (*tensor)(void *ctx, lm_update *u, const lm_update_tensor *t, lm_err *e);
    /* Checkpoints have the parameters among the states too, because the adapter's file has less */
    bool twice;
} lm_update_beside;

/* ---- building the graph of an update ---- */

typedef struct {
    const lm_optim_use *use;
    int n_use;
    double clip_norm, clip_value; /* 0: none */
    int64_t block, trained;       /* elements of the block of parameters; of those of gradients */
    bool low;                     /* there is a block of copies in BF16 */
    lm_space space;               /* of all values */
    const lm_mesh *mesh;          /* of a model in parts (lm_build.mesh); borrowed; NULL: none */
    /* Norms are sums of squares over blocks of LM_SUM_BLOCK elements of each tensor of the whole model, whose number this is:
     * added in its order, they have the same bits whichever rank has which of them.  0: those of the tensors given, one
     * behind another, whose `whole` and `norm_at` are then set here. */
    int64_t norm_blocks;
    /* The ranks of the mesh along dp share the steps (ZeRO, arXiv:1910.02054): each has a contiguous range of the block of
     * parameters, with its states.  Ranges end at borders of tensors, and of rules whose nodes are of single elements at
     * borders of rows, too.  The list is that of one rank; before it gradients are sums in its range, after it parameters are
     * new there alone.  States have the places that they have without. */
    bool zero;
    const lm_update_beside *beside; /* borrowed; NULL: none */
    /* elements 0, stride, ... of parameters and gradients; 0: none */
    int64_t sample_stride, samples;
} lm_update_opts;

/* Parts of the list, in this order. */
typedef enum {
    LM_UPDATE_START,   /* lm_update_at_start */
    LM_UPDATE_PENALTY, /* lm_update_to_penalise */
    /* with a mesh gradients that are addends are summed; sums of the gradients' squares, and other nodes that only read */
    LM_UPDATE_NORM,
    LM_UPDATE_BEFORE, /* samples of parameters and gradients */
    LM_UPDATE_STEP,   /* the rules' nodes */
    LM_UPDATE_AFTER,  /* samples of parameters */
    LM_UPDATE_SHOW,   /* lm_update_to_show, and copies in BF16 of what it made */
    LM_UPDATE_CHECK,  /* sum of squares of the parameters */
    LM_UPDATE_PARTS,
} lm_update_part;

typedef struct {
    lm_vid param, grad, low;     /* the blocks; low: LM_NONE if there are no copies */
    lm_vid numbers;              /* INPUT F64: of all uses, one after another */
    lm_vid loss;                 /* INPUT F64 [1] */
    lm_vid sumsq, weights;       /* STATE F64 [1]: of gradients and of parameters */
    lm_vid before, grads, after; /* STATE F32 [samples], or LM_NONE */
} lm_update_values;

/* t: the n tensors that train, in the order of their offsets; their values are created here. */
lm_code lm_update_build(const lm_update_opts *o, const lm_update_tensor *t, int n, lm_update **out,
                        lm_err *e);
void lm_update_free(lm_update *u);
/* The tensors of a model that train, in that order, and lm_update_opts.norm_blocks.  The caller frees *out (lm_free). */
lm_code lm_update_tensors(const lm_model *m, lm_update_tensor **out, int *n, int64_t *norm_blocks,
                          lm_err *e);

/* Nodes [first, last) of a part. */
void lm_update_part_at(const lm_update *u, lm_update_part p, size_t *first, size_t *last);
const lm_update_values *lm_update_value(const lm_update *u);
/* With `zero`: rank r along dp has elements [bound[r], bound[r + 1]) of the block of parameters; and what this rank has, by
 * tensor of the model.  NULL without. */
const int64_t *lm_update_bounds(const lm_update *u);
const lm_store_own *lm_update_own(const lm_update *u);
/* The number of the first sample that is rank r's; of the number of ranks: that of all samples. */
int64_t lm_update_first_sample(const lm_update *u, int r);
/* The states, as the store keeps them: block k is value state[k]. */
int lm_update_states(const lm_update *u, const lm_store_state **state, const lm_vid **value);
/* Constants: the numbers of a value; NULL: memory that nodes write before they read it. */
typedef struct {
    lm_vid value;
    void *number;
    size_t bytes;
} lm_update_constant;
int lm_update_constants(const lm_update *u, const lm_update_constant **out);
/* The count of a step's numbers, and the numbers. */
int lm_update_n_numbers(const lm_update *u);
void lm_update_numbers_at(const lm_update *u, double lr, int64_t t, double *out);
/* The conditions that hold at step t, for lm_exec_run_part; and true if they are always the same. */
const bool *lm_update_due(lm_update *u, int64_t t);
bool lm_update_is_steady(const lm_update *u);
/* True if a rule shows other values than the parameters (lm_update_to_show). */
bool lm_update_shows(const lm_update *u);

#endif
