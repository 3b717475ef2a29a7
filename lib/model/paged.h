/* SPDX-License-Identifier: Apache-2.0 */
/* paged.h -- a model whose caches are pages: steps with rows of many sequences, prompts and new tokens
 * together.
 *
 * The caller knows the sequences and their pages (kv/sched.h); here are the graphs.  There is one for each of
 * a few numbers of rows (buckets: 16, 32, ... and the most), which share weights, pages and one arena; a step
 * runs in the smallest that is enough.  Nothing is allocated after lm_paged_new.
 *
 * The bits of a sequence's logits depend on its tokens alone, and on which of them were rows of prompts: not
 * on other sequences, the order of parts, the pages, the number of sequences, or with plain caches the cuts
 * of prompts. Every product has more rows than LM_GEMM_SMALL_M, so that a row always has the same sums
 * (kernels/linear.h); on the tensor-core path of CUDA these follow the choices of cuBLASLt. */
#ifndef LM_MODEL_PAGED_H
#define LM_MODEL_PAGED_H

#include <sys/uio.h>

#include "kernels/attention.h"
#include "kernels/sample.h"
#include "model/loaded.h"

typedef struct {
    int64_t rows;        /* of a step, at most */
    int64_t sequences;   /* parts of a step, at most */
    int64_t context;     /* tokens of a sequence, at most */
    int64_t page, pages; /* tokens of a page, a multiple of LM_PAGE_UNIT; pages of all sequences */
    /* How caches are stored (lm_build.kv), borrowed; NULL: plain.  page is then kv->page, and parts of
     * prompts end at multiples of LM_KV_CHUNK positions, or with the prompt. */
    const struct lm_kv_plan *kv;
    int64_t slots;     /* tails of sequences; 0: as many as sequences */
    int64_t snapshots; /* tails behind these, of beginnings of prompts that others share */
    /* How pages are coded below the device (page_code.h), borrowed; NULL: they go as they are. */
    const struct lm_kv_plan *down;
    /* The model that trains, whose weights these are, borrowed; NULL: they are those of a model that is
     * loaded for use. Its build, adapters and precision included, and its places of weights hold for these
     * graphs. */
    const lm_model *like;
    const struct lm_kv_plan *state_codes; /* lm_build.state_codes, borrowed; NULL: F32 */
} lm_paged_opts;

/* The next n tokens of a sequence of model `model` (lm_paged_add; 0: the one that g was made for) that has `used` in its
 * pages; kind LM_ROWS_TOKEN: n is 1.  table: the pages of positions 0 to used + n. */
typedef struct {
    const uint32_t *ids;
    int64_t n, used;
    lm_rows_kind kind;
    const int32_t *table;
    int64_t slot;  /* its tail; with caches that have tails */
    int64_t model; /* its number */
} lm_paged_part;

typedef struct lm_paged lm_paged;

/* Build for `w` in `dtype` (F32, BF16), and load its weights if it has none yet, in panels where products
 * read them (kernels/panels.h): then they cannot serve other generators.  w and b are borrowed.  Fails:
 * LM_EUSAGE for a page that is not a multiple of LM_PAGE_UNIT, or a context beyond the positions of the
 * model; as lm_loaded_weights. */
lm_code lm_paged_new(lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                     lm_paged **out, lm_err *e);
void lm_paged_free(lm_paged *g);
/* Models have numbers: 0 is that of lm_paged_new, and where it joins adapters (lm_loaded_adapter), k is adapter k, whose rows
 * are in the same graphs.  Add a model of the same base with another adapter, *number: graphs of its own, in the same pages
 * and arena.  w->base is the store of the first, whose weights it reads.  w is borrowed.  The parts of a step run graphs by
 * graphs, so a step reads the weights of the base once for each model with its own that has parts in it. */
lm_code lm_paged_add(lm_paged *g, lm_loaded *w, int64_t *number, lm_err *e);
/* Bytes of a page, of a page below the device, of a tail, and of the weights that are not loaded yet, without
 * building all of it.  Fails as lm_page_code_new, too. */
typedef struct {
    size_t page, below, tail, weights;
} lm_paged_sizes;
lm_code lm_paged_measure(const lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                         lm_paged_sizes *out, lm_err *e);

/* Bytes of all pages, tails, and activations, before anything is allocated. */
lm_code lm_paged_outlook(const lm_loaded *w, lm_dtype dtype, const lm_paged_opts *o, lm_backend *b,
                         size_t *bytes, lm_err *e);

/* Run a step of n parts.  Row i of *logits [n,V] (may be NULL) is that after the last token of part i;
 * borrowed until the next call, in the backend's memory, and valid after a sync. */
lm_code lm_paged_step(lm_paged *g, const lm_paged_part *part, int64_t n, const float **logits,
                      lm_err *e);
/* The recording that the last step replayed, for tests; NULL: it had none.  Why steps cannot be recorded;
 * NULL: they can, or the backend has no recordings. */
const lm_recording *lm_paged_recorded(const lm_paged *g);
const char *lm_paged_unrecorded(const lm_paged *g);
/* The choice of the token after part i of the last step: whether it is wanted, a draw in [0,1), and the
 * tokens of the sequence so far, for the repetition penalty. */
typedef struct {
    bool on;
    double u;
    const uint32_t *seen;
    int64_t n_seen;
} lm_paged_draw;

/* Choose the tokens after the parts of the last step (kernels/sample.h): (*ids)[i], -1 if the logits are not
 * numbers, and with `logprob` (may be NULL) (*logprob)[i].  May be called again with other draws.  Waits for
 * the backend; both are borrowed until the next call. */
lm_code lm_paged_choose(lm_paged *g, const lm_sample_attr *o, const lm_paged_draw *draw,
                        const int32_t **ids, const double **logprob, lm_err *e);
/* Copy the tail of slot `from` to slot `to`, behind the steps so far. */
lm_code lm_paged_copy_tail(lm_paged *g, int64_t from, int64_t to, lm_err *e);
/* The memory of page `at`: one piece for each paged cache of the model, in the backend's memory.  Returns
 * their number; out may be NULL. */
int lm_paged_pieces(const lm_paged *g, int64_t at, struct iovec *out);

int64_t lm_paged_vocab(const lm_paged *g);
/* True if caches of a layer are coded, or have tails. */
bool lm_paged_coded(const lm_paged *g);
/* Rows in a tail that are coded later, at most: a step writes the pages of as many rows before its own. */
int64_t lm_paged_lag(const lm_paged *g);
lm_backend *lm_paged_backend(const lm_paged *g);
/* The codes of pages below the device; NULL: pages go as they are. */
struct lm_page_code *lm_paged_code(const lm_paged *g);
/* Bytes of a page in all layers, of a tail, and of all pages and tails; the options. */
size_t lm_paged_page_bytes(const lm_paged *g), lm_paged_tail_bytes(const lm_paged *g),
    lm_paged_bytes(const lm_paged *g);
/* Bytes of the activations of all graphs. */
size_t lm_paged_arena(const lm_paged *g);
const lm_paged_opts *lm_paged_options(const lm_paged *g);

#endif
