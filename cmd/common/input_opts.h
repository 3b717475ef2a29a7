/* SPDX-License-Identifier: Apache-2.0 */
/* input_opts.h -- the options of tools that read documents: clean-data, train-tokenizer, shard-data,
 * eval-model. */
#ifndef LM_CMD_INPUT_OPTS_H
#define LM_CMD_INPUT_OPTS_H

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "common/tool.h"
#include "format/input.h"

typedef struct {
    const char *format, *split, *separator, *utf8;
    lm_strs field;
    int64_t max_document;
    bool skip_bad;
    lm_input_bad bad; /* skipped by --skip-bad */
} lm_input_args;

#define LM_INPUT_ARGS_DEFAULT                                                               \
    {                                                                                       \
        .format = "auto", .split = "file", .utf8 = "fail", .max_document = (int64_t)4 << 30 \
    }

static const char *const lm_input_formats[] = { "auto", "jsonl", "text", NULL };
static const char *const lm_input_splits[] = { "file", "blank", NULL };
static const char *const lm_input_utf8[] = { "fail", "skip", "replace", NULL };

/* Rows of an option table; `a` is an lm_input_args. */
#define LM_INPUT_OPTIONS(a)                                                                 \
    LM_INPUT_OPTIONS_OF(a, lm_input_formats, "auto, jsonl or text [auto]", lm_input_splits, \
                        "plain text: a document is a file, or ends at a blank line [file]")
/* The same for tools whose --input-format and --split have other members, which read as AUTO and
 * LM_SPLIT_NONE here. */
#define LM_INPUT_OPTIONS_OF(a, formats, format_help, splits, split_help)                    \
    LM_CHOICE(0, "input-format", &(a).format, "KIND", formats, format_help),                \
        LM_LIST(0, "field", &(a).field, "KEY",                                              \
                "JSONL: key of the text, or A.B; several are joined [text]"),               \
        LM_ALSO("text-column text-field text-key json-key"),                                \
        LM_CHOICE(0, "split", &(a).split, "WAY", splits, split_help),                       \
        LM_STR(0, "separator", &(a).separator, "STRING", "plain text: cut at each STRING"), \
        LM_CHOICE(0, "utf8", &(a).utf8, "WAY", lm_input_utf8,                               \
                  "invalid UTF-8: fail, skip the document, or replace it [fail]"),          \
        LM_BYTES(0, "max-document", &(a).max_document, "BYTES", 1, 1e15,                    \
                 "refuse documents larger than this [4G]"),                                 \
        LM_FLAG(0, "skip-bad", &(a).skip_bad,                                               \
                "skip bad records and damaged parts, and count them [no]")

static inline lm_input_opts lm_input_args_read(lm_input_args *a)
{
    return (lm_input_opts){
        .kind = a->format[0] == 'j'   ? LM_INPUT_JSONL
                : a->format[0] == 't' ? LM_INPUT_TEXT
                                      : LM_INPUT_AUTO,
        .utf8 = a->utf8[0] == 's'   ? LM_UTF8_SKIP
                : a->utf8[0] == 'r' ? LM_UTF8_REPLACE
                                    : LM_UTF8_FAIL,
        .split = a->separator                     ? LM_SPLIT_STRING
                 : strcmp(a->split, "blank") == 0 ? LM_SPLIT_BLANK
                                                  : LM_SPLIT_NONE,
        .separator = a->separator,
        .field = a->field.v,
        .fields = a->field.n,
        .max_doc = (size_t)a->max_document,
        .bad = a->skip_bad ? &a->bad : NULL,
    };
}

/* Exits like lm_misuse when an option for text does not have its default: `data` are not text. */
static inline void lm_input_args_idle(lm_tool *tool, const lm_input_args *a, const char *data)
{
    const struct {
        bool set;
        const char *option;
    } idle[] = { { a->field.n > 0, "--field" },
                 { strcmp(a->split, "blank") == 0, "--split" },
                 { a->separator != NULL, "--separator" },
                 { strcmp(a->utf8, "fail") != 0, "--utf8" },
                 { a->max_document != (int64_t)4 << 30, "--max-document" },
                 { a->skip_bad, "--skip-bad" } };
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++)
        if (idle[i].set)
            lm_misuse(tool, idle[i].option, "leave it out", "it applies to text only, not to %s",
                      data);
}

/* Exits like lm_misuse when the output is one of the input files, or lies in an input folder, where
 * later runs would read it as text. */
static inline void lm_input_args_refuse(lm_tool *tool, const lm_input *in, const char *output)
{
    const lm_input_files *f = lm_input_file_list(in);
    for (size_t i = 0; i < f->n; i++)
        lm_refuse_same(tool, output, f->path[i]);
    for (int i = 0; i < tool->argc; i++)
        lm_refuse_inside(tool, output, tool->argv[i]);
}

/* Report the parts that --skip-bad skipped. */
static inline void lm_input_args_warn(lm_tool *tool, const lm_input_args *a)
{
    const lm_input_bad *b = &a->bad;
    const lm_err *first = b->parts ? &b->part : &b->record;
    if (b->records || b->parts)
        lm_say(tool, LM_LOG_WARN,
               "skipped %lld bad record%s and %lld damaged part%s; the first: %s: %s",
               (long long)b->records, lm_plural(b->records), (long long)b->parts,
               lm_plural(b->parts), first->where, first->what);
}

#endif
