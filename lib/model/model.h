/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- the graph of a config, and the position of each tensor of a checkpoint in it.
 *
 * A model is a pure function of (config, build options).  Weights that are used together are one
 * graph parameter: q, k and v rows form `qkv` [(H+2K)D, C], gate and up form `gate_up` [2I, C]; a
 * slice gives the rows of a parameter that a named tensor occupies.  Linear weights are [out, in]
 * in the graph; GPT-2's Conv1D tensors are transposed when loaded. */
#ifndef LM_MODEL_MODEL_H
#define LM_MODEL_MODEL_H

#include "format/folder.h"
#include "graph/backend.h"
#include "graph/graph.h"
#include "graph/passes.h"
#include "graph/stage.h"
#include "kernels/route.h"
#include "model/config.h"
#include "numeric/format.h"
#include "numeric/portions.h"

/* Fresh numbers, by lm_slice.std: of that deviation; 0; 1; within -std and std; std itself; logarithms of rates within
 * 0.01 and 16 (of decays, as transformers has them). */
typedef enum {
    LM_INIT_NORMAL,
    LM_INIT_ZEROS,
    LM_INIT_ONES,
    LM_INIT_UNIFORM,
    LM_INIT_FULL,
    LM_INIT_LOG_RATE
} lm_init;

/* The part of a tensor that the graph of one rank of several has: of its matrix in memory, [out, in], the rows or columns
 * that rank `rank` of `ranks` holds of `whole` by `pieces` (lm_portions_at: there may be several ranges, as of GPT-2's packed
 * queries, keys and values). */
typedef struct {
    int ranks; /* 0: all of it */
    int rank;
    int dim; /* 0: rows, 1: columns */
    int64_t whole;
    lm_portions pieces;
    bool
        on; /* instead: rank `owner` has all of it, and the others nothing, as of the tensors of an expert */
    int owner;
    lm_axis axis; /* the ranks are those along it */
    bool none;    /* another stage of a pipeline has the tensor: nothing is here */
    bool counts;  /* of the ranks that share one list and hold the same part, this is the first; */
    bool writes;  /* of all ranks that do: it writes it to files */
} lm_cut;

/* Range number k of the rows or columns that this rank has; false: it has fewer.  They may be empty. */
static inline bool lm_cut_at(const lm_cut *c, int64_t k, lm_range *out)
{
    if (!c->on)
        return lm_portions_at(&c->pieces, c->whole, c->ranks, c->rank, k, out);
    *out = (lm_range){ 0, c->rank == c->owner ? c->whole : 0 };
    return k == 0;
}

/* A tensor of the checkpoint: rows [row, row + rows) of dimension 0 of a parameter. */
typedef struct {
    const char *name; /* Hugging Face's: "model.layers.0.self_attn.q_proj.weight" */
    int param;        /* index into lm_model.param */
    int64_t row, rows;
    lm_cut cut; /* the part of it; rows, and the width of the parameter, are those of the part */
    int ndim;   /* shape in files, of the whole tensor */
    int64_t dim[LM_MAX_DIMS];
    bool transposed; /* a matrix that the file stores as [in, out] */
    int64_t stack;   /* matrices below each other, each of them transposed; 1: one */
    lm_init init;
    double std;
    bool may_lack;   /* a head that a training begins: drawn when the checkpoint lacks it */
    bool of_adapter; /* a tensor of the adapter (lm_build.adapt), not of the checkpoint */
    /* a tensor of the training alone (lm_build.value): it is in no file of the model or the adapter, but beside the
     * optimiser's states */
    bool of_training;
    bool kept;    /* of a module that is kept as it is (LM_AHEAD_KEPT) */
    bool by_load; /* the bias of a router, which follows loads: it has no gradient */
    /* an update changes it.  Of adapters: as declared; of the checkpoint: lm_build.trainable */
    bool trains;
    const char *saved; /* its name in an adapter's file; NULL: by rule (lm_model_saved) */
} lm_slice;

/* A choice of the tensors of a model; those of the training belong to none but NEW.  What an adapter's file holds: its
 * own tensors, and those of the checkpoint that train beside them. */
typedef enum {
    LM_TENSORS_ALL,
    LM_TENSORS_BASE,
    LM_TENSORS_ADAPTER,
    LM_TENSORS_NEW, /* those that may_lack */
} lm_tensors;

static inline bool lm_slice_is(const lm_slice *s, lm_tensors which)
{
    return !s->of_training &&
           (which == LM_TENSORS_ALL ||
            (which == LM_TENSORS_BASE ? !s->of_adapter : s->of_adapter || s->trains));
}

static inline int64_t lm_slice_count(const lm_slice *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->dim[i];
    return n;
}

/* What the gradient of a parameter on one rank of several is an addend of (graph/shard.h): the sum of all ranks', or of those
 * that hold the same elements. */
typedef enum { LM_SUMS_NONE, LM_SUMS_ALL, LM_SUMS_SHARED } lm_sums;

typedef struct {
    lm_vid value;   /* in the graph */
    int64_t count;  /* elements */
    int64_t offset; /* in the master copy (store.h), a multiple of 64 elements */
    bool decay;     /* weight decay applies: matrices yes, vectors no */
    bool trains;    /* its tensors do; false: no gradient, and stored once */
    /* kept as rows of numbers, for a graph on the same store may read it by an operator that knows no codes and no panels */
    bool plain;
    lm_layout part;
    lm_sums sums[LM_AXES]; /* along each axis */
} lm_param;

typedef enum {
    LM_MODE_TRAIN,    /* tokens, targets -> loss [N] and gradients */
    LM_MODE_EVAL,     /* tokens, targets -> loss [N]               */
    LM_MODE_GENERATE, /* tokens of a batch of sequences, KV caches -> logits of chosen rows; T = 1
                         decodes */
} lm_mode;

/* What a graph has of the modules that predict tokens further on (lm_config.ahead). */
typedef enum {
    LM_AHEAD_NONE,
    LM_AHEAD_KEPT, /* their parameters, which no node reads, and which do not train */
    /* TRAIN: a loss of each (DeepSeek-V3, arXiv:2412.19437, section 2.2): module k reads in row i what the head reads of
     * module k - 1 (0: of the model) in it, and the token of row i + k, and predicts that of row i + k + 1.
     * GENERATE: they run behind the model in all rows, which fills their caches, up to one of them; their heads do not. */
    LM_AHEAD_RUNS,
    LM_AHEAD_DRAFTS /* GENERATE: one of them alone, behind states that are an input */
} lm_ahead;

/* What a graph has of the head of pairs (lm_config.pairs). */
typedef enum {
    LM_PAIRS_NONE,
    LM_PAIRS_KEPT, /* its parameters, which no node reads, and which do not train */
    LM_PAIRS_LOSS /* TRAIN: the mean of its losses over the sequences, lm_model.aux, whose labels are lm_model.follows */
} lm_pairs;

/* A model with whose distributions a student's are compared (lm_build.teacher). */
typedef struct {
    const struct lm_model *model; /* built with `states`; it must outlive the student */
    double beta, temperature;     /* of kernels/divergence.h */
} lm_model_teacher;

/* Of the distribution of each row, in nats: -sum p log p, without or with a gradient; -log sum p^2. */
typedef enum {
    LM_ENTROPY_NONE,
    LM_ENTROPY_READ,
    LM_ENTROPY_TRAINS,
    LM_ENTROPY_COLLISION
} lm_entropy;

/* Coefficients of losses that a training adds for the routers of mixtures (kernels/route.h), each of a micro-batch, all of
 * its rows counted; 0: without. */
typedef struct {
    double layer; /* balance of each layer, added over layers (Switch, Megatron) */
    /* of each sequence of a layer, the mean over sequences added over layers (DeepSeek-V3) */
    double sequence;
    /* of all layers together, as transformers has it: the loads and the mean probabilities of all layers, E sum of their
     * products; K where both are even */
    double model;
    double z; /* of the logits, added over layers (ST-MoE) */
    /* of tokens to nodes, of `nodes` each with E / nodes experts, added over layers */
    double affinity;
    int64_t nodes;
    /* Squared coefficients of variation, added over layers (arXiv:1701.06538, section 4 and appendix A): of the experts'
     * sums of weights, and of their smooth loads, for which routers learn their noise (lm_moe.noisy). */
    double importance, load;
} lm_routing_losses;
enum { LM_ROUTING_OF_CONFIG = -1 }; /* `model`: lm_moe.aux_coef */

/* How a training lets routers choose (kernels/route.h); graphs of other modes drop and draw nothing. */
typedef struct {
    double capacity; /* an expert takes ceil(this K N / E) rows of a micro-batch at most; 0: all */
    lm_overflow policy; /* which ones, and what becomes of the others */
    bool pad;           /* rows without assignment fill each expert up to that */
    bool second_random; /* K = 2: the second choice is drawn */
    /* each expert takes as many tokens as its capacity, those with the largest scores */
    bool by_expert;
    /* of the router's input (kernels/noise.h); LM_ROUTING_OF_CONFIG: lm_moe.jitter */
    double jitter;
    double noise; /* of its logits */
    bool low;     /* the router's product runs in the low type, in all modes */
} lm_routing_choice;

typedef struct lm_build {
    lm_mode mode;
    int64_t batch, seq; /* T: rows of each sequence in one run */
    int64_t source;     /* with an encoder: S, rows of each sequence that it reads; 0: T */
    /* EVAL, with an encoder: what decoders read of a source (lm_model.memory), in place of losses */
    bool encode;
    int64_t cache; /* GENERATE: S, positions of the caches; with pages, of a sequence */
    /* GENERATE with pages: `rows` ragged rows of `batch` sequences (kernels/attention.h), and caches of `pages` pages of
     * `page` positions; seq is 0.  rows 0: none of this. */
    int64_t rows, pages, page;
    /* GENERATE: how caches are stored (kv/spec.h), bound to this config in the type of activations; it must outlive the
     * model.  NULL: plain.  Layers that are plain on both sides have caches as without it.  The others have coded
     * pages (kernels/kv.h) of kv->page positions, which `page` then is, too.  Without `rows` each sequence has as many pages
     * of its own as `cache` positions need.  Tails are there for `slots` sequences (`batch` without rows).
     * Prompts must be cut at multiples of LM_KV_CHUNK positions: a row sees rows of its own cut as they were,
     * and those before as they are stored. */
    const struct lm_kv_plan *kv;
    int64_t slots;
    /* GENERATE: likewise states of layers (kernels/delta.h), as keys of heads of as many numbers as a row of a state
     * (model/cache_plan.h).  NULL: F32. */
    const struct lm_kv_plan *state_codes;
    /* With a policy in kv, without `rows`: the tokens of each layer that the caches of a sequence have room for, in pages; 0:
     * the policy leaves the layer alone.  In a graph of prompts (`whole`) these layers have plain caches of all
     * positions instead, and masses of the tokens if the policy reads them. */
    const int64_t *kept;
    bool whole;
    lm_ahead ahead;
    int64_t module; /* GENERATE: the last module that runs, or the one that drafts, from 0 on */
    lm_pairs pairs;
    bool all_rows; /* GENERATE: logits of all rows, not of the last one of each sequence */
    lm_precision precision;
    /* inputs `lo`, and `hi` where a layer is bidirectional, and restarted positions: attention is limited to documents */
    bool documents;
    bool dropout; /* TRAIN: the config's rates apply */
    /* TRAIN: forward and backward are run apart, with seeds that depend on the losses: no operator of one is joined
     * with one of the other */
    bool halves;
    /* TRAIN: activations of the layers are computed again in the backward instead of being kept */
    bool recompute;
    lm_routing_losses routing; /* TRAIN */
    lm_routing_choice choice;  /* TRAIN */
    lm_entropy entropy;        /* TRAIN, EVAL: that of each row's distribution, too */
    /* EVAL: the last states of the rows, which a head would read, in place of losses: for a teacher */
    bool states;
    /* TRAIN, EVAL: the loss of a row is its divergence from this model's distribution, not -log p; rows whose target is
     * negative have none.  The caller binds taught_states and taught_head.  NULL: none. */
    const lm_model_teacher *teacher;
    bool chosen; /* GENERATE: rows choose among adapters (lm_model.chosen) */
    /* TRAIN, EVAL: a number for each row, by a linear head on what the output head reads */
    bool value;
    /* the backend on which it runs: operators are joined if it has kernels for that (op/fuse.h);
     * NULL: not joined */
    lm_backend *backend;
    /* True for tensors of the checkpoint, by published name, that train.  NULL: all. */
    bool (*trainable)(void *ctx, const char *tensor);
    void *ctx;
    /* Matrices that do not train and that this source has in fewer bytes than numbers of the precision take
     * (codes, or F16 and BF16 for F32) are kept so if kernels of the backend read them
     * (lm_tensor.codes), and decoded otherwise.  NULL: all are decoded.  Without `trainable`, all matrices of EVAL and
     * GENERATE. */
    const lm_model_source *codes;
    /* LM_SPACE_FILE: in memory of the host, those codes that can be are read in the mapped file, which must
     * outlive the model; otherwise they are copied */
    lm_space codes_space;
    /* GENERATE, when all products have more than LM_GEMM_SMALL_M rows: weights are kept in panels where products read them so
     * (lm_tensor.panels), as for TRAIN and EVAL. */
    bool panels;
    /* The ranks among which the model is split, and a function that sets the layouts of values along an axis in the list that
     * this axis is to split: this model is the part of one rank, whose list has exchanges (kernels/comm.h) along
     * lm_inner_axes.  NULL: the whole model. */
    const lm_mesh *mesh;
    lm_code (*lay)(const struct lm_build *b, lm_graph *g, lm_axis axis, lm_err *e);
    /* With a mesh that shares experts: memory for the rows of this rank's, in multiples of their mean number; it grows where a
     * run has more (lm_graph_find_rows).  0: LM_EXPERT_ROOM. */
    double expert_room;
    bool lay_rows; /* for `lay`: between the layers, ranks along tp have parts of the rows */
    /* TRAIN, EVAL: with a mesh that has several ranks along pp, their stages; borrowed.  NULL: there is one. */
    const lm_stages *stages;
    /* TRAIN: gradients of a tied embedding and head are two values, whose sum the caller makes of those of several
     * micro-batches: as they are with `stages` */
    bool apart;
    /* Functions that append an adapter (model/adapt.h); they must outlive the call.  NULL: none. */
    const struct lm_adapt *adapt;
    /* Linear weights of layers that do not train, and that the source has in no codes, are encoded to this format when
     * they are loaded, if that is fewer bytes and kernels of the backend read them.  NULL: they are not. */
    const lm_format *frozen_format;
    /* likewise embedding and output head */
    const lm_format *frozen_embed;
    /* A model of the same config and backend whose codes, panels and parts this one has, so that both read one store; with the
     * same adapter, or this one without it.  NULL: chosen for this graph. */
    const struct lm_model *like;
} lm_build;

#define LM_EXPERT_ROOM 1.25 /* lm_build.expert_room, unless it is given */

/* Numbers of a CONST value, given when the graph is built; those of one kind are NULL. */
typedef struct {
    lm_vid value;
    const double *number;
    const int32_t *id;
    int64_t count;
} lm_model_const;

/* A tensor in a file that no value of the graph holds: of an adapter whole numbers (lm_b_aside), or those of a slice once
 * more (lm_b_again), as a model has them too. */
typedef struct {
    const char *name;
    int slice;      /* -1: whole numbers */
    bool of_base;   /* in the files of the model, not of the adapter */
    lm_dtype dtype; /* in the file: I32 or I64 */
    int ndim;
    int64_t dim[LM_MAX_DIMS], count;
    const int64_t *number;
} lm_model_aside;

/* What a cache keeps of the tokens so far.  The kinds behind values are for layers that keep something else. */
typedef enum {
    LM_CACHE_KEYS,   /* a row of D numbers for each position and head */
    LM_CACHE_VALUES, /* the same */
    LM_CACHE_KEY_TAIL, /* the first and the newest of them as numbers, beside coded ones (kernels/kv.h) */
    LM_CACHE_VALUE_TAIL, /* the same */
    LM_CACHE_STATE, /* of a layer that mixes tokens through a state (kernels/delta.h, linear_attention.h): F32, */
    LM_CACHE_CONV_TAIL, /* and the newest rows in front of its convolution (kernels/conv.h) */
} lm_cache_kind;

enum { LM_KV_CHUNK = 256 }; /* positions of a prompt that are run before they are coded */

/* A STATE value that the tokens of a sequence fill. */
typedef struct {
    lm_vid value;
    lm_cache_kind kind;
    int64_t layer;
    /* a row for each position: [B,K,S,D], or pages of S positions [G,K,S,D], coded if t.kv is set; false: a fixed size
     * for each sequence, [B,...] or [slots,...] */
    bool paged;
} lm_cache_state;

/* A layer whose caches keep some tokens (lm_build.kept); each LM_NONE if the layer does not have it. */
typedef struct {
    /* I32 [B], [B,P]: in place of those of all layers; of ranked prompts a table of one page */
    lm_vid used, table;
    lm_vid row;  /* I32 [B,K]: the token that the new one replaces, or the first free row */
    lm_vid mass; /* STATE F32 [B,K,M] (kernels/kv_keep.h), M rows and one for the new token */
} lm_kept_layer;

/* TRAIN: what the router of a layer did; LM_NONE for layers without experts. */
typedef struct {
    lm_vid z, expert; /* [N,E], [N,K]: its logits and choices */
    lm_vid load;      /* F32 [E]: assignments of each expert, dropped ones too */
    lm_vid mean;      /* F32 [E]: the mean probability of each over the rows */
    lm_vid dropped;   /* F32 [1]: number of assignments that were dropped */
} lm_routed_layer;

enum {
    LM_MEMORY = 4
}; /* parts of what a layer reads of a source: keys and values, and their tails */

typedef struct lm_model {
    lm_graph *graph;
    lm_graph *whole
        [LM_INNER_AXES]; /* with build.mesh: the list of all ranks, and those between; otherwise NULL */
    lm_config config; /* borrowed pointers inside */
    lm_build build;
    lm_param *param;
    int n_params;
    lm_slice *slice;
    int n_slices;
    uint32_t *index;   /* of the slices' names: a hash table of 1 + slice, 0: free */
    size_t n_index;    /* a power of two */
    int64_t block;     /* elements of all parameters, padding included: */
    int64_t decay_end; /* those that train, with weight decay first, then */
    int64_t train_end; /* without it: the master copy; then those that do not train */

    lm_vid tokens, targets, pos, lo; /* I32 [N]; LM_NONE if the mode has none */
    lm_vid types; /* I32 [N]: kinds of tokens (lm_config.types); LM_NONE without */
    lm_vid
        follows; /* LM_PAIRS_LOSS: I32 [B], 0: the second text follows the first, 1: it does not */
    lm_vid hi;   /* I32 [N]: the end of what each row sees; LM_NONE if no layer is bidirectional */
    /* With an encoder.  I32: its tokens [B*S]; how many of a sequence are real, for each row of these [B*S], and for its
     * rows and then the decoder's of each sequence [B*(S+T)], where it is 0 for the former; GENERATE: [B]. */
    lm_vid source, source_hi, cross_hi, source_used;
    /* [layers][LM_MEMORY]: of each layer of the decoder keys and values of the source, act [B,K,S,D], and LM_NONE twice; of a
     * layer whose caches are coded (build.kv) their pages, STATE as of kernels/kv.h, and their tails, LM_NONE for a side
     * without. GENERATE reads them as STATE, build.encode makes them; otherwise NULL. */
    lm_vid *memory;
    lm_vid chosen;   /* I32 [N]: with build.chosen, the adapter of each row; 0: none */
    lm_vid scale;    /* TRAIN: F32 [N], the gradients of the losses */
    lm_vid dvalue;   /* TRAIN: F32 [N,1], those of the values */
    lm_vid daux;     /* F32 [1], that of `aux` */
    lm_vid dentropy; /* TRAIN, LM_ENTROPY_TRAINS: F32 [N], those of the entropies */
    lm_vid dahead;   /* TRAIN, LM_AHEAD_RUNS: F32 [N], those of the losses of each module */
    /* LM_AHEAD_RUNS: I32 [N], what module k reads, from 0 on, and TRAIN: what it predicts; negative: no loss */
    lm_vid ahead_tokens[LM_MOST_AHEAD], ahead_targets[LM_MOST_AHEAD];
    lm_vid prior; /* LM_AHEAD_DRAFTS: act [N,C], the states that the module reads */
    /* GENERATE: I32 [B] each; rows: the row of each sequence whose logits are wanted, which T = 1 does not ask */
    lm_vid used, fresh, rows;
    /* ragged rows: I32 [B+1], [B]; `rows` then counts from the first row of all */
    lm_vid first, kind;
    lm_vid table; /* with pages, coded ones too: I32 [B,P] */
    lm_vid slot;  /* with tails or states: I32 [B] */
    lm_vid from;  /* of prompts with masses: I32 [B], the first position whose queries count */
    /* of a policy that is `ranked`: I32 [B,M], the position of each token in the caches */
    lm_vid ranks;
    lm_kept_layer *kept;        /* with build.kept, of each layer */
    lm_vid rope[LM_MOST_ROPES]; /* CONST F32 [positions, dim] of the config's tables; LM_NONE */
    int64_t rope_rows;
    lm_vid alibi;             /* CONST F32 [heads, distances]: lm_alibi_table; LM_NONE */
    lm_model_const *constant; /* of the adapter, and of biases by distance */
    int n_constants;
    lm_model_aside *aside; /* likewise */
    int n_aside;
    lm_cache_state *cache; /* GENERATE: in the order of layers */
    int n_caches;
    lm_vid loss;                      /* F32 [N] */
    lm_vid entropy;                   /* F32 [N], in nats, if lm_build.entropy asks for one */
    lm_vid value;                     /* F32 [N,1], if lm_build.value does */
    lm_vid ahead_loss[LM_MOST_AHEAD]; /* TRAIN, LM_AHEAD_RUNS: F32 [N], of each module */
    lm_vid aux; /* F32 [1]: the losses of lm_build.routing together; LM_NONE without them */
    lm_routed_layer *routed; /* TRAIN, of each layer; NULL: the model has no experts */
    /* act [N,C], what the head reads: with lm_build.states; of the model with LM_AHEAD_RUNS, of the module with
     * LM_AHEAD_DRAFTS */
    lm_vid states;
    lm_vid ahead_states
        [LM_MOST_AHEAD]; /* GENERATE, LM_AHEAD_RUNS: the same of modules behind which another runs */
    lm_vid head; /* with lm_build.states, the matrix [V,C] of the head, which no node reads */
    /* with lm_build.teacher: INPUT [N,D], CONST [U,D], its own */
    lm_vid taught_states, taught_head;
    lm_stage_list *stages; /* with build.stages: those of this rank; otherwise NULL */
    lm_addends addends; /* with build.stages or build.apart: gradients that are sums of several */
    size_t backward;    /* TRAIN: the first node of the backward half */
    lm_vid logits;      /* GENERATE: F32 [B,V]; with all_rows [N,V] */
    lm_vid *grad;       /* TRAIN: GRAD value of each parameter (LM_NONE: frozen) */
} lm_model;

/* Build the graph of `c`: including all passes that the options require.  The config must outlive
 * the model. Fails: LM_EUSAGE for a batch or length that the config does not allow. */
lm_code lm_model_build(const lm_config *c, const lm_build *b, lm_model **out, lm_err *e);
void lm_model_free(lm_model *m);

/* What a forward pass leaves for each row: the values of loss, entropy and value head that the graph has, in
 * `out`.  Returns their number. */
enum { LM_MODEL_ROWS = 3 };
int lm_model_rows(const lm_model *m, lm_vid out[LM_MODEL_ROWS]);
/* The parts of m->memory that a run of a graph with build.encode makes, which the caller frees; others are written to what is
 * bound to them. */
lm_code lm_model_memory_made(const lm_model *m, lm_vid **out, int *n, lm_err *e);

/* The modules that have a loss; and what runs of a GENERATE graph are read for: logits, states if there are any. */
enum { LM_MODEL_READ = 2 + LM_MOST_AHEAD };
int64_t lm_model_losses_ahead(const lm_model *m);
int lm_model_read(const lm_model *m, lm_vid out[LM_MODEL_READ]);

/* Index of the cache of a kind of a layer; -1: the layer has none. */
int lm_model_cache(const lm_model *m, int64_t layer, lm_cache_kind kind);

/* Name of tensor i in an adapter's file: that of an adapter's tensor itself, "base_model.model." and the
 * published name for others, unless `saved` is set. */
const char *lm_model_saved(const lm_model *m, int i, char out[512]);

/* The tensor of that name that only an adapter's file holds; NULL: not in the file. */
const lm_model_aside *lm_model_aside_find(const lm_model *m, const char *name);
/* Index of the slice of that name, -1 if none.  For GPT-2 the prefix "transformer." is optional. */
int lm_model_slice(const lm_model *m, const char *name);
/* True for tensors that checkpoints may hold but that are not parameters here (rotary inv_freq,
 * GPT-2's attention mask buffers, a duplicate of a tied head, FP8 scales of a cache). */
bool lm_model_ignores(const lm_model *m, const char *name);

#endif
