/* SPDX-License-Identifier: Apache-2.0 */
/* generate_impl.h -- shared by the generator's files: generate.c builds the graphs and runs
 * prompts, generate_step.c decodes, generate_choose.c chooses tokens from logits, generate_cache.c copies caches to
 * images and back, generate_policy.c and generate_encode.c keep some tokens of a text (generate_keep.h).
 * Private to lib/model. */
#ifndef LM_MODEL_GENERATE_IMPL_H
#define LM_MODEL_GENERATE_IMPL_H

#include "graph/mirror.h"
#include "kv/spec.h"
#include "model/cache_device.h"
#include "model/generate.h"
#include "model/generate_policy.h"
#include "model/rotary.h"

/* The graph for one number of rows, and its inputs: mirrors whose host side is written. */
typedef struct {
    lm_model *m;
    lm_exec *x;
    lm_mirror inputs;
    int32_t *tokens, *pos, *used, *fresh, *rows;
    /* the tokens k + 1 places behind those, with drafts by modules */
    int32_t *ahead[LM_MOST_AHEAD];
    int n_ahead;
    keep_inputs keep; /* of decoding with a policy */
} row_graph;

/* The choice of tokens: inputs and results of the kernel for each slot. */
typedef struct {
    lm_mirror ask, answer, seen;
    double *u, *logprob;
    int32_t *on, *n_seen, *token;
    int64_t *sent; /* ids of `seen` that the backend has */
    const lm_kernel *kernel;
    void *work;
    size_t work_bytes;
} chooser;

enum { CHUNKS = 3, MOST_WIDTHS = 32 };

/* Decoding slots [0, rows). */
typedef struct {
    row_graph s;
    int64_t rows;
    lm_recording *recorded; /* of lm_generator_next with the generator's choice */
    bool ran;               /* a step with this choice has run in this width */
} decode_width;

/* How tokens are chosen. */
typedef struct {
    lm_sample_attr how;
    bool logprob; /* true: log-probabilities are requested too */
} lm_choice;

/* A cache of the model in the generator's memory: those of all slots. */
typedef struct {
    size_t at;         /* offset of the first slot */
    size_t slot_bytes; /* of a slot: a number of pieces, one for each head or page; a tail is one */
    size_t piece_bytes;
    int64_t pieces, heads;
    int64_t page;     /* pages: positions of one.  0: otherwise */
    double row_bytes; /* of a head's row */
    /* a state of all tokens, or a tail of a convolution: a step cannot be taken back by its rows */
    bool fixed;
} slot_cache;

/* Steps with drafts (generate_draft.c). */
typedef struct {
    int64_t n;       /* tokens that are drafted at most */
    int64_t modules; /* that draft one behind the other, at most n */
    /* of module k on k + 1 rows; as lm_generator.decode */
    row_graph draft[LM_MOST_AHEAD][MOST_WIDTHS];
    row_graph again[MOST_WIDTHS]; /* of the last of several modules on one row, if n is larger */
    /* In memory of the backend: of each slot the states that module k reads, act [B,k+1,C], and what it reads in further rows
     * [B,C] */
    char *prior[LM_MOST_AHEAD], *own;
    size_t row_bytes; /* of a state */
    /* of models with states of all tokens: those of all slots before the model ran; NULL */
    char *saved;
    float *q; /* host [N,B,V]: logits of the drafts */
    float *p; /* host [B,N+1,V]: those of the model; NULL: where the graph has them */
    int32_t *ids, *count, *fresh; /* [B,N+1], [B], [B] */
    double *logprob;              /* [B,N+1] */
    char *work;                   /* of the kernels, for each thread */
    size_t work_bytes;
} generator_draft;
typedef struct generator_source generator_source; /* generate_source.c */

struct lm_generator {
    lm_backend *b;
    int64_t batch, context;
    /* that tokens are read at: as many as the context, with ranks at most those of the model */
    int64_t positions;
    const lm_kv_plan *kv;             /* NULL: plain */
    const lm_kv_plan *state_codes;    /* NULL: F32 */
    lm_cache_formats formats;         /* those of kv, for the graphs */
    generator_keep *keep;             /* NULL: all tokens stay */
    generator_draft *draft;           /* NULL: steps have one token */
    generator_source *source;         /* NULL: the model has no encoder */
    row_graph prefill[CHUNKS];        /* a chunk as long as the context replaces longer ones */
    decode_width decode[MOST_WIDTHS]; /* narrowest first; the last holds all slots */
    int n_decode;
    int64_t *used; /* of each slot */
    char *cache;
    size_t cache_bytes;
    slot_cache *caches; /* as lm_model.cache */
    lm_mirror numbers;  /* 0, 1, 2, ...: the pages and tails of slots, which own them for good */
    lm_rotary rope;
    chooser choice;
    lm_choice chosen;
    /* the recording that the last step replayed; NULL: kernels ran separately */
    const lm_recording *replayed;
    bool unrecorded;   /* no step is to be recorded */
    lm_err refused;    /* why the backend refused to record one */
    row_graph *last;   /* the graph that ran last, */
    int64_t last_slot; /* and the first slot of its rows */
};

/* Allocate n numbers of `size` bytes at *at of a memory that is being divided. */
static inline size_t generator_share(size_t *at, size_t n, size_t size)
{
    size_t here = *at;
    *at += (n * size + 63) / 64 * 64;
    return here;
}

static inline void *generator_room(void *base, size_t bytes)
{
    return (char *)base + bytes;
}

/* The width of all slots; its model stands for all where rows do not matter. */
static inline const lm_model *generator_model(const lm_generator *g)
{
    return g->decode[g->n_decode - 1].s.m;
}

/* ---- generate.c ---- */

/* Wait until the backend has read the inputs of the last graph: the host may write them again. */
lm_code generator_wait_for_last(lm_generator *g, lm_err *e);
/* Enqueue the graph on main: its inputs, then its kernels. */
lm_code generator_put_graph(row_graph *s, lm_err *e);

/* Build a graph, and bind weights, tables and, from slot 0 on, caches to it. */
typedef struct {
    int64_t batch, seq;
    bool prompt;
    lm_ahead ahead;
    int64_t module;
    lm_exec *share;
} graph_kind;
lm_code generator_open_graph(lm_generator *g, const lm_loaded *w, lm_dtype dtype,
                             const graph_kind *k, row_graph *s, lm_err *e);
void generator_close_graph(row_graph *s);

/* ---- generate_draft.c: nothing without drafts ---- */

lm_code generator_draft_new(lm_generator *g, const lm_loaded *w, int64_t n, lm_err *e);
/* Behind the other graphs. */
lm_code generator_draft_open(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e);
/* Bytes of their logits, states and graphs. */
size_t generator_draft_bytes(const lm_generator *g);
void generator_draft_free(lm_generator *g);
/* Keep states of the n rows of a prompt that ran last, behind which others follow up to `left` in all; and copy those of a
 * slot to another one. */
lm_code generator_draft_prompt(lm_generator *g, const row_graph *s, int64_t slot, int64_t n,
                               int64_t left, lm_err *e);
lm_code generator_draft_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e);

/* ---- generate_source.c: all for models with an encoder alone ---- */

/* When the other graphs are there, and then the weights. */
lm_code generator_source_open(lm_generator *g, const lm_loaded *w, lm_dtype dtype, lm_err *e);
void generator_source_free(lm_generator *g);
void generator_source_bind_store(lm_generator *g, const lm_store *store);
/* Bytes of what is kept of sources. */
size_t generator_source_bytes(const lm_generator *g);
/* Of the sources of all slots, those that a step of decoding reads. */
double generator_source_bytes_read(const lm_generator *g);
/* Bytes in which sources are encoded, besides the arena of prompts. */
size_t generator_source_work_bytes(const lm_generator *g);
/* Bind the sources from `slot` on to the graph. */
void generator_source_bind(const lm_generator *g, const row_graph *r, int64_t slot);
lm_code generator_source_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e);

/* ---- generate_step.c ---- */

/* The narrowest width that includes the last active slot. */
decode_width *generator_width_of(lm_generator *g, const int32_t *next);

/* The numbers of rows that a generator of `batch` slots decodes: each up to 8, then steps of a third
 * to a half, so that at most a third of the rows rests.  Returns how many were written. */
int generator_widths(int64_t batch, int64_t width[MOST_WIDTHS]);
void generator_forget_recordings(lm_generator *g);

/* ---- generate_choose.c ---- */

lm_code generator_make_chooser(lm_generator *g, lm_err *e);
void generator_drop_chooser(lm_generator *g);
/* Write the host's inputs of the next choice for the slots of the last (or next) graph. */
lm_code generator_ask(lm_generator *g, const lm_choice *c, const double *u, lm_err *e);
/* Enqueue the choice on main: the host's numbers, the kernel, the results.  The same work each
 * time. */
lm_code generator_put_choice(lm_generator *g, const lm_choice *c, lm_err *e);
/* Wait for the results. */
lm_code generator_answer(lm_generator *g, const int32_t **ids, const double **logprob, lm_err *e);

#endif
