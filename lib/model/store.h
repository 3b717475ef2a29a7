/* SPDX-License-Identifier: Apache-2.0 */
/* store.h -- the memory of all values of a model that outlive one run of its graph.
 *
 * A store is a list of blocks.  A block has one role, one format of the registry and one space (host
 * or device), and contains many parameters, each at its offset, a multiple of 64 elements (of 64
 * bytes in formats without elements of their own).
 *
 *   for training   PARAM    the parameters that train, [0, train_end), in F32 (the master copy), at lm_param.offset
 *                  DERIVED the same in BF16, if the model reads BF16: updated by lm_store_derive, or by the optimiser when
 *                           it writes PARAM;
 *                           weights that only products read may be in panels (lm_tensor.panels), at the same place
 *                  GRAD     their gradients
 *                  OPT      a block for each state of the optimiser, in its layout
 *                  FROZEN   the other parameters, as for use
 *   for use        PARAM    each parameter once, in the format that the model reads, or each tensor of
 *                           it in that of its file (lm_build.codes): a block for each format;
 *                           those that are read in the file are in no block
 *
 * All inputs (tensors of a file, of memory, fresh numbers) pass through one function that converts,
 * transposes and copies, a tensor at a time on all threads; a device receives each through one
 * pinned buffer of the host.  All outputs pass through lm_store_get. */
#ifndef LM_MODEL_STORE_H
#define LM_MODEL_STORE_H

#include "base/par.h"
#include "base/progress.h"
#include "comm/comm.h"
#include "format/folder.h"
#include "graph/exec.h"
#include "model/model.h"
#include "numeric/format.h"

/* A state of an optimiser: one block with an offset for each tensor that has it. */
typedef struct {
    const char *name; /* in checkpoints: "exp_avg" names tensors "exp_avg.<tensor>" */
    lm_dtype format;
    int64_t count; /* elements, padding included */
    struct lm_state_part {
        int tensor;      /* its number in the model */
        int64_t at;      /* elements before it in the block */
        lm_tensor shape; /* in memory */
        bool turned;     /* files store it transposed, like its tensor */
        bool none;       /* another rank has it, like its tensor (lm_cut.none): nothing is here */
        /* one rank has all of it, the owner, though ranks have parts of the tensor: `none` on the others */
        bool owned;
    } * part;
    int n_parts;
} lm_store_state;

/* The rows of a tensor that are one rank's, where ranks with the same part of the model share what trains: rows
 * [row, row + rows) of what lm_slice has of it. */
typedef struct {
    int64_t row, rows;
} lm_store_own;

typedef enum {
    LM_KEPT_PARAM,
    LM_KEPT_DERIVED,
    LM_KEPT_GRAD,
    LM_KEPT_OPT,
    LM_KEPT_FROZEN,
    LM_KEPT_ROLES
} lm_kept;

typedef struct {
    lm_kept role;
    const lm_store_state *state; /* OPT: its state (borrowed) */
    const lm_format *format;     /* of the registry */
    lm_space space;
    int64_t count; /* numbers; padding included if the format is plain */
    size_t bytes;  /* padding included */
    void *data;    /* in memory of the store's backend; initially zero */
    bool borrowed; /* a block of lm_store_opts.base */
    /* With lm_store_opts.own: the bytes of the block that have memory, in ascending order, apart from each other, and their
     * sum; the rest is reserved addresses, and access to it is a fault.  NULL: all of it. */
    struct lm_store_span {
        size_t at, bytes;
    } * kept;
    int n_kept;
    size_t kept_bytes;
} lm_store_block;

enum { LM_STORE_STATES = 32, LM_STORE_FORMATS = 16 };
enum { LM_STORE_BLOCKS = 3 + LM_STORE_STATES + LM_STORE_FORMATS };

/* Where the states of an optimiser are: in memory of the backend; in memory of the host, which kernels of a device reach
 * through the bus; in a file without a name in a folder, mapped, whose pages the system writes out when it needs
 * their memory.  Bits are the same. */
typedef enum { LM_STATES_NEAR, LM_STATES_HOST, LM_STATES_FILE } lm_states_in;

typedef struct {
    bool master; /* for training: what trains in F32, and BF16 derived from it; false: for use */
    bool grads;  /* with `master` only, like the states */
    const lm_store_state *state; /* borrowed for the store's life */
    int n_states;
    lm_states_in states_in;
    const char *states_dir; /* LM_STATES_FILE, on the host alone: the folder (borrowed) */
    /* Not `master`: weights of the checkpoint that this store keeps in the same way are read there, unless they train
     * there.  It must live longer.  NULL: none. */
    const struct lm_store *base;
    /* PARAM may hold shown values instead of the parameters, which are then in GRAD: checkpoints
     * have both (lm_store_write_states) */
    bool shown;
    bool twice; /* PARAM is among the states of checkpoints, too: an adapter's file has less */
    /* `master`, on the host: ranks along dp share what trains (ZeRO).  By tensor of the model (borrowed): of PARAM, where no
     * graph reads it in F32, and of OPT this rank has memory for its own rows alone; it loads these, and writes them to files.
     * NULL: it has everything. */
    const lm_store_own *own;
    bool drops; /* and GRAD gives back memory (lm_store_drop) */
    /* and graphs read gathered copies (graph/gather.h): of all of PARAM and DERIVED it has memory for its own rows alone */
    bool gathered;
    /* of the host, for conversions; NULL: the backend's, which a device does not have */
    lm_par *par;
} lm_store_opts;

typedef struct lm_store {
    const lm_model *model; /* borrowed.  lm_store_bind, _flat, _bytes and _free do not need it. */
    lm_backend *backend;
    lm_par *par;
    lm_store_block block[LM_STORE_BLOCKS];
    int n_blocks;
    bool shown, twice;
    lm_comm *shared; /* lm_store_share */
    lm_comm *
        owners; /* of `own`: the ranks that share what trains, for lm_store_get_whole; borrowed, set by the caller */
    bool in_panels; /* a place is */
    const lm_store_own *own;
    bool drops, gathered;
    struct lm_store_place {
        int block;   /* block of the tensor's own numbers or codes; -1: they are read in the file */
        size_t at;   /* bytes before it there */
        bool panels; /* for products in panels (lm_tensor.panels) */
    } * place;       /* by tensor of the model */
    struct {
        void *data; /* of the host, pinned: a tensor that is copied to a device */
        size_t bytes;
        uint8_t *file; /* of the host: a tensor in the file's shape, to be transposed */
        size_t file_room;
        uint8_t *part; /* of the host: a rank's part of it, for a device */
        size_t part_room;
    } passage;
} lm_store;

/* ---- life ---- */

/* Memory of `b` for the parameters of `m`, a model in any mode.  Fails: LM_ELIMIT. */
lm_code lm_store_new(const lm_model *m, lm_backend *b, const lm_store_opts *o, lm_store **out,
                     lm_err *e);
void lm_store_free(lm_store *s); /* before the backend is closed */
/* Bytes of the blocks of each role that have memory, allocated or not. */
void lm_store_bytes(const lm_store *s, size_t out[LM_KEPT_ROLES]);
lm_code lm_store_outlook(const lm_model *m, const lm_store_opts *o, size_t out[LM_KEPT_ROLES],
                         lm_err *e);
/* The formats of the weights that do not train beside a master copy of the others, and their bytes; returns their number.
 * What is read in a file takes none. */
typedef struct {
    const lm_format *format;
    size_t bytes;
} lm_store_part;
int lm_store_frozen(const lm_model *m, lm_store_part out[LM_STORE_FORMATS]);

/* ---- for graphs ---- */

/* Bind the parameters of `m`, a model of the same config in any mode on the same backend, and its
 * gradients if the store has them.  Weights that one keeps in panels and the other does not (lm_build.panels) stay
 * unbound, and runs of the graph fail. */
void lm_store_bind(const lm_store *s, const lm_model *m, lm_exec *x);
/* The same for a model that has some of the tensors, for use: those of `whole`, for which lm_store_bind holds. */
void lm_store_bind_part(const lm_store *s, const lm_model *whole, const lm_model *m, lm_exec *x);
/* Block number k of a role; NULL if the role has fewer blocks. */
const lm_store_block *lm_store_find(const lm_store *s, lm_kept role, int k);
/* Its numbers, for kernels that process whole blocks. */
void *lm_store_flat(const lm_store *s, lm_kept role, int k);
/* Convert PARAM, of a rank that shares it what it has of it, to DERIVED, on the main stream; does nothing without DERIVED. */
void lm_store_derive(const lm_store *s);
/* Elements [*from, *end) of PARAM that graphs read, from parameter number *i on, which then is that behind them; false: that
 * was the last.  Parameters that lie one behind another are one run. */
bool lm_store_read_run(const lm_store *s, int *i, int64_t *from, int64_t *end);
/* With lm_store_opts.drops: give back the memory of elements [from, end) of GRAD, whole pages of it, which then are 0. */
void lm_store_drop(const lm_store *s, int64_t from, int64_t end);
/* Copy what PARAM has memory for to GRAD, at the same places, or back, on the main stream. */
lm_code lm_store_stash(const lm_store *s, bool back, lm_err *e);

/* ---- input ---- */

/* Check that the source holds exactly the tensors of the model, in their shapes, except those of an adapter.  Fails:
 * LM_EUSAGE when one is missing, has another shape, is unknown to the architecture, or occurs under two names
 * (named). */
lm_code lm_model_check(const lm_model *m, const lm_model_source *src, lm_err *e);
/* Load all tensors of the source; a stream is read to its end.  Fails as lm_model_check. */
lm_code lm_store_load(lm_store *s, lm_model_source *src, lm_err *e);
/* What the stores of several ranks are given by rank 0 alone: from here on its store sends each tensor that it takes in, until
 * `c` is NULL, and the others wait for them, each keeping its part (lm_slice.cut).  Collective; numbers only, no codes.  Both
 * fail as lm_comm_broadcast. */
lm_code lm_store_share(lm_store *s, lm_comm *c, lm_err *e);
lm_code lm_store_receive(lm_store *s, lm_comm *c, lm_err *e);
/* True if all tensors of the checkpoint are those of lm_store_opts.base: none has to be loaded. */
bool lm_store_borrows(const lm_store *s);
/* Load LM_TENSORS_ADAPTER from the file of an adapter, in which they have the names of lm_model_saved; tensors of the
 * checkpoint that train may be missing there, and keep their values.  Fails: LM_EUSAGE when another one is missing,
 * has another shape, or belongs to no tensor of the model; LM_ENUMERIC when a number is not finite. */
lm_code lm_store_load_adapter(lm_store *s, const lm_st *st, lm_err *e);
/* The same for the tensors "k:NAME" of the model, of adapter k of several in one graph. */
lm_code lm_store_load_joined(lm_store *s, int k, const lm_st *st, lm_err *e);
/* All states, "exp_avg.<tensor>": numbers in any float type, codes as they are; the parameters
 * "param.<tensor>" where the file has them or a store of this kind writes them; and those of the training alone,
 * "head.<tensor>".  Fails: LM_EFORMAT when one is missing, or the file has a tensor of another name; averages
 * of parameters that this store does not keep are passed over. */
lm_code lm_store_load_states(lm_store *s, const lm_st *st, lm_err *e);
/* Set tensor i of the model from memory of the host: elements of `dtype` in the file's shape; they are encoded if the
 * store keeps it in codes.  Fails: LM_EBUG for codes that can only be read. */
lm_code lm_store_put(lm_store *s, int i, lm_dtype dtype, const void *data, lm_err *e);
/* Fresh weights from (seed, tensor name, element index in the file's order): the same for any number
 * of threads, backend and layout.  Of an adapter: only those that it declared. */
lm_code lm_store_draw(lm_store *s, lm_tensors which, uint64_t seed, lm_err *e);

/* ---- output ---- */

/* Number of tensors of a block: those of the model, or those that have the state; and false for tensors of the model
 * that are in another block. */
int lm_store_tensors(const lm_store *s, const lm_store_block *k);
bool lm_store_has(const lm_store *s, const lm_store_block *k, int i);
/* True if tensor i is in panels there, as only products read it. */
bool lm_store_in_panels(const lm_store *s, const lm_store_block *k, int i);
/* Elements of tensor i, 0 if another rank has it, of a rank that shares it its own; and copy them, in the block's format and
 * the file's shape, to memory of the host, also from panels. */
int64_t lm_store_count(const lm_store *s, const lm_store_block *k, int i);
lm_code lm_store_get(const lm_store *s, const lm_store_block *k, int i, void *dst, lm_err *e);
/* The same of all ranks' rows together, of a block in F32 in memory of the host.  Collective over `owners`; without them
 * lm_store_get.  Fails as it and lm_comm_all_reduce. */
lm_code lm_store_get_whole(const lm_store *s, const lm_store_block *k, int i, float *dst,
                           lm_err *e);
/* Add tensors of the model to a plan, in `dtype`; those of an adapter by the names of lm_model_saved. */
lm_code lm_model_plan(const lm_model *m, lm_tensors which, lm_dtype dtype, lm_st_plan *plan,
                      lm_err *e);
/* Write the parameters to a folder of that plan (an adapter's: lm_folder_spec.weights), in the folder's order; and the
 * states as
 * optimizer.safetensors, with the parameters as "param.<tensor>" if PARAM holds shown values (they are then in GRAD), or
 * with `twice`, and "head.<tensor>" of the training.  For blocks in memory of the host.  In a folder that several ranks
 * write, each writes its part: of tensors that all have, what is dealt to it, of those that are cut (lm_slice.cut) or shared
 * (lm_store_opts.own), its own. */
lm_code lm_store_write(const lm_store *s, lm_folder *f, lm_err *e);
lm_code lm_store_write_states(const lm_store *s, lm_folder *f, lm_err *e);
/* The tensors of that file. */
lm_code lm_store_plan_states(const lm_store *s, lm_st_plan *plan, lm_err *e);
/* False: there is nothing to write. */
bool lm_store_has_states(const lm_store *s);

/* ---- fresh weights without a store ---- */

/* Elements [from, from + count) of tensor i in the file's shape and order. */
void lm_slice_draw(const lm_model *m, int i, uint64_t seed, lm_par *par, int64_t from,
                   int64_t count, float *dst);
/* All tensors of a folder whose plan is lm_model_plan's, a few megabytes at a time, for any size of
 * the model.  Stops early when lm_stopping(). */
lm_code lm_model_draw(const lm_model *m, uint64_t seed, lm_par *par, lm_folder *f, lm_sink *sink,
                      lm_err *e);

/* Round n elements to BF16 on the pool. */
void lm_round_bf16(const float *src, uint16_t *dst, int64_t n, lm_par *par);

#endif
