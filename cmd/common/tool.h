/* SPDX-License-Identifier: Apache-2.0 */
/* tool.h -- the command line that all tools share: one option table feeds parsing, --help,
 * completion, --print-config and the check against the man page.
 *
 * A tool fills an lm_tool, calls lm_begin (which leaves for --help, --version, --completion=SHELL
 * and misuse), does its work with library calls, prints each failure once with lm_complain, and
 * returns lm_end.  The only code that prints, exits or reads the environment is in this folder. */
#ifndef LM_CMD_TOOL_H
#define LM_CMD_TOOL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/cpu.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/par.h"
#include "base/progress.h"
#include "comm/comm.h"
#include "format/bundle.h"
#include "format/provenance.h"

typedef enum {
    LM_OPT_END,
    LM_OPT_GROUP,   /* a heading in --help */
    LM_OPT_FLAG,    /* bool; --x and --no-x */
    LM_OPT_COUNT,   /* int64_t with k M B T */
    LM_OPT_BYTES,   /* int64_t with K M G T (binary) */
    LM_OPT_TIME,    /* double seconds, s m h */
    LM_OPT_REAL,    /* double */
    LM_OPT_STR,     /* const char * */
    LM_OPT_CHOICE,  /* const char *, one of a NULL-terminated list */
    LM_OPT_DEVICE,  /* const char *, a device's name; the list is for completion */
    LM_OPT_LIST,    /* lm_strs: may be given again and again */
    LM_OPT_LEVEL,   /* int64_t; --x N and, for one option of a tool, -N */
    LM_OPT_ALSO,    /* names of the option above in other programs */
    LM_OPT_INSTEAD, /* names of options of other programs that are refused with advice */
} lm_opt_kind;

typedef struct {
    const char **v;
    int n;
} lm_strs;

typedef struct {
    lm_opt_kind kind;
    char letter;      /* 0 = long only */
    const char *name; /* without dashes; heading text for LM_OPT_GROUP */
    void *dst;
    const char *value; /* placeholder in --help: "N", "FILE" */
    double min, max;   /* for numbers, inclusive */
    const char *const *choices;
    const char *help; /* one line, with the default in [brackets] */
} lm_opt;

/* Constructors check the type of the destination at compile time. */
#define LM_GROUP(title)                                      \
    {                                                        \
        LM_OPT_GROUP, 0, title, NULL, NULL, 0, 0, NULL, NULL \
    }
#define LM_FLAG(c, nm, d, h)                                         \
    {                                                                \
        LM_OPT_FLAG, c, nm, 1 ? (d) : (bool *)0, NULL, 0, 0, NULL, h \
    }
#define LM_COUNT(c, nm, d, v, lo, hi, h)                                \
    {                                                                   \
        LM_OPT_COUNT, c, nm, 1 ? (d) : (int64_t *)0, v, lo, hi, NULL, h \
    }
#define LM_BYTES(c, nm, d, v, lo, hi, h)                                \
    {                                                                   \
        LM_OPT_BYTES, c, nm, 1 ? (d) : (int64_t *)0, v, lo, hi, NULL, h \
    }
#define LM_TIME(c, nm, d, v, lo, hi, h)                               \
    {                                                                 \
        LM_OPT_TIME, c, nm, 1 ? (d) : (double *)0, v, lo, hi, NULL, h \
    }
#define LM_REAL(c, nm, d, v, lo, hi, h)                               \
    {                                                                 \
        LM_OPT_REAL, c, nm, 1 ? (d) : (double *)0, v, lo, hi, NULL, h \
    }
#define LM_STR(c, nm, d, v, h)                                          \
    {                                                                   \
        LM_OPT_STR, c, nm, 1 ? (d) : (const char **)0, v, 0, 0, NULL, h \
    }
/* With a list for completion; other text is taken, too. */
#define LM_STR_OF(c, nm, d, v, list, h)                                 \
    {                                                                   \
        LM_OPT_STR, c, nm, 1 ? (d) : (const char **)0, v, 0, 0, list, h \
    }
#define LM_CHOICE(c, nm, d, v, list, h)                                    \
    {                                                                      \
        LM_OPT_CHOICE, c, nm, 1 ? (d) : (const char **)0, v, 0, 0, list, h \
    }
#define LM_LIST(c, nm, d, v, h)                                      \
    {                                                                \
        LM_OPT_LIST, c, nm, 1 ? (d) : (lm_strs *)0, v, 0, 0, NULL, h \
    }
#define LM_LEVEL(nm, d, v, lo, hi, h)                                   \
    {                                                                   \
        LM_OPT_LEVEL, 0, nm, 1 ? (d) : (int64_t *)0, v, lo, hi, NULL, h \
    }
/* Names of the option above in other programs, separated by spaces; '_' is read as '-'. */
#define LM_ALSO(names)                                      \
    {                                                       \
        LM_OPT_ALSO, 0, names, NULL, NULL, 0, 0, NULL, NULL \
    }
/* A flag of other programs that sets the option above to `value`: --bf16 is --dtype bf16. */
#define LM_ALSO_AS(names, value)                             \
    {                                                        \
        LM_OPT_ALSO, 0, names, NULL, value, 0, 0, NULL, NULL \
    }
/* Names without an equivalent option: refused, with the advice `todo`. */
#define LM_INSTEAD(names, todo)                                \
    {                                                          \
        LM_OPT_INSTEAD, 0, names, NULL, NULL, 0, 0, NULL, todo \
    }
#define LM_END                                            \
    {                                                     \
        LM_OPT_END, 0, NULL, NULL, NULL, 0, 0, NULL, NULL \
    }

/* Common options of a tool besides -h --help --version -v -q, --[no-]progress, --config and
 * --print-config, which all tools have.  Options without effect are not accepted. */
enum {
    LM_USE_OUTPUT = 1,    /* -o, -f */
    LM_USE_THREADS = 2,   /* -j */
    LM_USE_SEED = 4,      /* --seed */
    LM_USE_JSON = 8,      /* --json */
    LM_USE_DEVICE = 16,   /* --device; opened by lm_open_backend (device.h) */
    LM_USE_DRY_RUN = 32,  /* --dry-run */
    LM_USE_METRICS = 64,  /* --metrics DEST */
    LM_USE_HISTORY = 128, /* --[no-]history; obeyed by lm_tool_step */
    LM_USE_RANKS = 256,   /* may be one of several ranks (ranks.h) */
};

/* The kind of output of -o, for lm_refuse_ending. */
typedef enum {
    LM_MAKES_TEXT,   /* one file */
    LM_MAKES_FOLDER, /* a folder of shards, a run */
    LM_MAKES_MODEL,  /* a folder, a tar, a .safetensors, an .lmz */
    LM_MAKES_LMZ,
    LM_MAKES_GGUF,
    LM_MAKES_BIN,
    LM_MAKES_OTHER, /* the tool checks it itself */
} lm_product;

typedef struct {
    const char *name, *args, *brief; /* args: "[FILE ...]"; brief: one sentence, lower case */
    const lm_opt *opts;
    unsigned use;           /* LM_USE_* */
    int min_args, max_args; /* operands; max -1 = any; with min 0 and filter set, none = "-" */
    bool filter;
    /* options that name further outputs, or do not change the product; NULL-terminated; may be NULL */
    const char *const *side;
    const char *alias;           /* "Tj": -T is another letter for -j; pairs, may be NULL */
    const char *const *examples; /* two command lines for --help, NULL-terminated */
    /* True for a --config file that is not one of options: the tool then reads t->config itself. */
    bool (*takes_config)(const char *path);
    /* help of --config if it accepts more than options; NULL: the usual text */
    const char *config_help;

    /* Options that the file of --plan, an option of the tool, may hold; NULL-terminated; NULL: the tool has no --plan. */
    const char *const *plans;

    /* Filled by lm_begin. */
    int argc;
    char **argv;        /* operands only */
    const char *output; /* -o, NULL when not given */
    bool force, json, dry_run;
    int threads;
    int64_t seed;
    bool seed_given;
    const char *device, *metrics;
    const char *config; /* a file that takes_config accepted; NULL: none */
    const char *tmpdir; /* LM_TMPDIR, NULL when not set */
    int verbosity;      /* an lm_log_level, 0: no messages; LM_LOG_NOTICE by default */
    lm_cpu_level cpu;   /* LM_CPU, bounded by the machine */
    int status;         /* exit status so far */
    lm_comm *comm;      /* all processes that were started together; NULL: this one alone */
    lm_comm
        *all_ranks;  /* when comm has become that of the first of them (lm_ranks_keep): all; NULL */
    bool rests;      /* this one is not among the first */
    int rank, ranks; /* among them, as the launcher says (ranks 0: several); alone: 0 of 1 */
    int ranks_here;  /* with comm: of this machine, */
    int rank_here;   /* of which this is that one, from 0, */
    int ranks_sharing; /* and those that may use the same cores */
    lm_product makes;  /* by which lm_begin refuses names of -o */
    bool lasting;      /* see lm_outlast_readers */
    char **full_argv;  /* as given */
    int full_argc;
    /* For provenance: the given options, by name in the order of the table, and the operands;
     * without those that do not affect the product (-j, -v, -q) or only name it (-o, -f). */
    char **told_argv;
    int told_argc;
    lm_sink sink; /* for library calls: &tool->sink */
} lm_tool;

void lm_begin(lm_tool *t, int argc, char **argv);
/* True if this option (long name) was given on the command line or in --config.  A file of
 * --print-config holds every option, and lists the given ones under "given". */
bool lm_given(const lm_tool *t, const char *name);
/* The first option in the order of the table that was given and is not among these (NULL-terminated); NULL: all are. */
const char *lm_given_besides(const lm_tool *t, const char *const *names);
/* Add options to told_argv that were not given, with their present values: what follows from silent ones and changes the
 * product.  Call it before lm_tool_step, whose result borrows told_argv.  names: long ones, NULL-terminated. */
lm_code lm_tell_too(lm_tool *t, const char *const *names, lm_err *e);
/* Append the values of all options to `out`, as a JSON object for --config. */
lm_code lm_options_save(lm_buf *out, lm_err *e);
/* Append the values of lm_tool.plans, as the member "plan" that --plan reads: see plan(5). */
void lm_options_plan(lm_jw *w);
/* Set options that were not given from saved ones, by their names or by those of LM_ALSO, which older versions may have
 * saved; unknown keys, and those in `except` (NULL-terminated, may be NULL), are ignored.  `saved` must outlive the options'
 * use. */
lm_code lm_options_resume(const json_t *saved, const char *const *except, const char *where,
                          lm_err *e);
/* For a tool with a lasting product, called before it is made: from then on the loss of the reader
 * of standard output causes one warning, and SIGUSR1 requests a checkpoint.  Otherwise either ends
 * the tool at once and silently. */
void lm_outlast_readers(lm_tool *t);
/* The text of a --config file ("-": standard input), at most 16 MiB, appended to `out`; repeatable,
 * also for a pipe. */
lm_code lm_config_text(const char *path, lm_buf *out, lm_err *e);
/* Print the failure once, remember the worst exit status, clear *e.  LM_EBUG aborts. */
void lm_complain(lm_tool *t, lm_err *e);
/* The same where the work goes on.  Other ranks find the same failure: the first one prints it, and they do not end. */
void lm_complain_beside(lm_tool *t, lm_err *e);
/* A usage failure found after parsing: prints, exits 2. */
_Noreturn void lm_misuse(lm_tool *t, const char *where, const char *todo, const char *what, ...)
    LM_PRINTF(4, 5);
/* This run as a step of a product's history; the caller adds the inputs.  With --no-history a step
 * for which no history is written. */
lm_history_step lm_tool_step(const lm_tool *t);
/* Exits like lm_misuse when the output ("-", NULL: standard output) is this input or a file of it
 * (in a folder those of a model, an adapter or token shards; for the name of a dataset its shards),
 * or the folder of the input.  Standard output is checked for any output, because a shell may have
 * redirected it to an input. */
void lm_refuse_same(lm_tool *t, const char *output, const char *input);
/* The same for an operand that may be text: a folder or a pattern stands for its text files. */
void lm_refuse_text(lm_tool *t, const char *output, const char *operand);
/* Exits like lm_misuse when the output, which need not exist yet, is the folder `input` or lies in
 * it, at any depth; inputs other than folders, and standard output, are ignored. */
void lm_refuse_inside(lm_tool *t, const char *output, const char *input);
/* Exits like lm_misuse when two inputs are one stream, such as - and /dev/stdin: the operands, the
 * --config file and the n paths of `more`, of which NULL ones are skipped. */
void lm_refuse_twice(lm_tool *t, const char *const *more, int n);
/* Exits like lm_misuse when the output (may be NULL) is one of the links in the folder of a run
 * (run/config.json -> latest/config.json): writing follows links. */
void lm_refuse_run_link(lm_tool *t, const char *output);
/* Exits like lm_misuse when the output (may be NULL) has the ending of a format that this kind of
 * product does not have: m.zip would become a folder, x.jsonl.gz plain text.  Existing folders,
 * pipes and devices are accepted by any name. */
void lm_refuse_ending(lm_tool *t, const char *output, lm_product makes);
/* How this tool reads and writes models: spooled in LM_TMPDIR, coded on `par` (may be NULL). */
lm_bundle_opts lm_tool_bundle(lm_tool *t, lm_par *par);
/* A text of the library in the words of the running tool: its options instead of the quantities
 * that the library names.  lm_complain and the lines that the library logs apply it themselves.
 * Returns `out`, which is another place than `text`. */
const char *lm_advice_shown(const char *text, char *out, size_t size);
void lm_say(lm_tool *t, lm_log_level level, const char *fmt, ...) LM_PRINTF(3, 4);
/* Print the text that a library call with the result rc made, and after it `end`; nothing after a
 * failure.  Frees the text and returns rc. */
lm_code lm_print_text(lm_code rc, lm_buf *text, const char *end);
/* Status 3, "the answer is no". */
void lm_answer_no(lm_tool *t);
/* Flush and check stdout, remove temporaries, re-raise a pending signal, return the exit code. */
int lm_end(lm_tool *t);

#endif
