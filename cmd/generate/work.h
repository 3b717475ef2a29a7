/* SPDX-License-Identifier: Apache-2.0 */
/* work.h -- generate: its options, and what its parts share.
 *
 * Each part has one subject and one file: the options, defaults from the model's files (defaults.c), --kv
 * (kv.c), what is read (prompts.c), what is written (answers.c); generate.c has the order of the work. */
#ifndef LM_CMD_GENERATE_WORK_H
#define LM_CMD_GENERATE_WORK_H

#include "common/adapter.h"
#include "common/sharing.h"
#include "common/tool.h"
#include "format/input.h"
#include "kv/file_llama.h"
#include "model/cache_plan.h"
#include "model/complete.h"
#include "model/generation.h"
#include "model/paged.h"
#include "model/serve.h"
#include "tune/join.h"

/* Of --serve-batch; 0, NULL: not given. */
typedef struct {
    int64_t batch, memory, host; /* texts; bytes */
    const char *disk;
    const char *dir; /* its parts */
    const char *down;
    int64_t disk_bytes;
} generate_serve_options;

/* Of chats; NULL: not given. */
typedef struct {
    bool talk;
    const char *template, *vars, *system;
} generate_chat_options;

/* Of caches in files; NULL, 0: not given. */
typedef struct {
    const char *save, *load;
    bool unverified;
    double deadline; /* seconds */
} generate_cache_options;

typedef struct {
    lm_strs prompt, stop, adapter;
    const char *use_adapter; /* NULL: the model alone */
    const char *tokenizer, *dtype, *weights_in;
    int64_t max_new, top_k, context, batch, samples;
    double temperature, top_p, min_p, penalty; /* these, max_new and top_k: -1 if not given */
    bool echo, ignore_eos, special, skip_special, logprobs, generation, check_tokenizer;
    bool any_order;
    const char *kv;     /* NULL: plain */
    const char *states; /* NULL: F32 */
    bool list_kv;
    const char *mesh;  /* NULL: one process */
    const char *draft; /* NULL: none */
    int64_t drafts;    /* tokens of a step */
    generate_serve_options serve;
    generate_cache_options cache;
    generate_chat_options chat;
} generate_options;

typedef struct generate_chat generate_chat;

extern lm_tool tool;
extern generate_options opt;

/* An adapter with a name, and the model with it. */
typedef struct {
    const char *name; /* as given, in front of '=' */
    size_t name_len;
    lm_tune_use use;
    lm_loaded model;   /* borrows all but its store */
    lm_generator *gen; /* NULL: no prompt asked for it yet */
    int64_t number;    /* of its graphs with --serve-batch */
} generate_adapter;

/* Everything that main owns. */
typedef struct {
    lm_loaded model;
    lm_tune_use adapter;     /* without a name */
    generate_adapter *named; /* others, */
    lm_join *join;           /* those of them that share graphs; NULL: none */
    int n_named;
    generate_adapter *usual;  /* of --use-adapter; NULL: the model alone */
    generate_adapter *wanted; /* that of the prompt that was read; NULL: the model alone */
    const lm_loaded *now;     /* with which `gen` generates */
    lm_generator *base_gen;   /* of the model alone; NULL: `gen` is */
    int64_t asked;            /* prompts that were read */
    bool held;                /* the prompt that was read waits for its adapter */
    lm_tokenizer *tok;
    lm_tok_scratch *scratch;
    lm_par *par;
    lm_backend *backend;
    lm_sharing sharing;   /* --mesh */
    lm_cache_plan caches; /* of --kv */
    lm_cache_plan down;   /* of --kv-down */
    lm_cache_plan states; /* of --states */
    lm_generator *gen;    /* NULL with --serve-batch: */
    lm_paged *paged;
    lm_serve_room room;
    lm_serve_stats kv;
    lm_metrics *metrics; /* of --serve-batch, NULL: not asked for */
    lm_input *in;        /* NULL: -p */
    lm_doc doc;
    lm_ids ids, start;    /* start: what the decoder beside an encoder begins with */
    int at;               /* next one of -p */
    lm_buf line, text_of; /* an answer; the prompt of a record */
    lm_out *out;
    FILE *to;
    bool text, live; /* plain text; to a terminal */
    size_t shown;
    lm_generation generation;
    int64_t context, full, batch; /* batch: slots of a generator */
    generate_chat *chat;          /* the template and what was said; NULL: -p */
    lm_complete_stats st;
    lm_kv_file *cache; /* of --load-cache, NULL: not given; or, with --unverified: */
    lm_kv_llama *state;
    lm_kv_image *image;   /* what it holds */
    lm_kv_plan plan;      /* its forms, */
    lm_kv_side *plain;    /* and those of a cache without; */
    lm_kv_policy stay;    /* with dropped tokens: this policy */
    double begin, ready;  /* lm_now() at the start; seconds until the first token; 0: not yet */
    int64_t first_tokens; /* of the first -p */
    lm_dtype type;        /* of activations */
    uint32_t last;        /* the last token of the text, */
    int64_t tokens;       /* and how many it has */
} generate_work;

/* ---- defaults.c ---- */

/* Set options that were not given from the model's files, otherwise to our own defaults. */
lm_code generate_defaults(generate_work *w, lm_err *e);

/* ---- adapters.c ---- */

/* Refuse what cannot be combined. */
void generate_check_adapters(void);
/* True if prompts choose among adapters with names. */
bool generate_has_names(void);
lm_code generate_open_adapters(generate_work *w, lm_err *e);
/* With --serve-batch: graphs for each adapter. */
lm_code generate_serve_adapters(generate_work *w, lm_err *e);
/* The model with the adapter of the prompt that was read. */
const lm_loaded *generate_model(const generate_work *w);
/* Set `wanted` to the adapter of that name; "": to the model alone.  Fails: LM_EUSAGE for a name that was not given. */
lm_code generate_want_adapter(generate_work *w, const char *name, size_t len, lm_err *e);
/* The same for the adapter that a record names, or the usual one. */
lm_code generate_asks_adapter(generate_work *w, const char *line, size_t len, lm_err *e);
/* True if it is another one than generates now, and has to wait for its turn; and let it generate. */
bool generate_is_other(const generate_work *w);
lm_code generate_turn_to(generate_work *w, lm_err *e);
void generate_close_adapters(generate_work *w);
/* generate.c: a generator like the first. */
lm_code generate_new_generator(generate_work *w, lm_loaded *model, lm_generator **out, lm_err *e);

/* ---- draft.c ---- */

/* Refuse what cannot be combined with drafts. */
void generate_check_draft(void);
void generate_say_drafts(const generate_work *w);

/* ---- kv.c ---- */

/* --list-kv. */
lm_code generate_list_kv(lm_err *e);
/* Refuse what is no specification, before anything is read. */
void generate_check_kv(void);
/* Bind --kv to the model that computes in `type`. */
lm_code generate_open_kv(generate_work *w, lm_dtype type, lm_err *e);
void generate_say_kv(const generate_work *w);
void generate_say_states(const generate_work *w);
/* The option in the place that a failure to bind its specification, or to build with it, names. */
void generate_name_spec(const char *option, lm_err *e);
/* The memory that was allocated beside the weights. */
void generate_say_memory(const generate_work *w);

/* ---- prompts.c ---- */

/* The files of prompts; *n is 0 with -p. */
const char *const *generate_files(int *n);
lm_code generate_open_prompts(generate_work *w, lm_err *e);
/* The capacity needed: known for -p, otherwise 2048 tokens. */
lm_code generate_choose_context(generate_work *w, lm_err *e);
/* Of a model with an encoder, the hook of lm_complete_run that begins a text: ctx is the work. */
lm_code generate_begin_source(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids,
                              int64_t n, lm_err *e);
/* Append the virtual tokens of the adapter, which stand in front of a prompt. */
lm_code generate_add_virtual(const generate_work *w, lm_ids *ids, lm_err *e);
/* The hook of lm_complete_run: ctx is the work. */
lm_code generate_next(void *ctx, lm_completion *c, bool *got, lm_err *e);

/* ---- answers.c ---- */

/* Hooks of lm_complete_run: text that became final, and a whole answer. */
lm_code generate_show(void *ctx, lm_completion *c, lm_err *e);
lm_code generate_finish(void *ctx, lm_completion *c, lm_err *e);
/* The hook for a text whose logits are not numbers: its answer is the error, and the exit status will be 4. */
lm_code generate_fail(void *ctx, lm_completion *c, lm_err *why, lm_err *e);
/* Write the answer of a line that cannot be a prompt, and complain; the exit status will be 1. */
lm_code generate_refuse_line(generate_work *w, lm_completion *c, bool object, lm_err *why,
                             lm_err *e);
lm_code generate_write(generate_work *w, const char *text, size_t len, lm_err *e);
/* One line of speed, behind warnings that concern all answers. */
void generate_summary(const generate_work *w);

#endif
