/* SPDX-License-Identifier: Apache-2.0 */
/* shard-data -- text to shuffled, split token shards.  See man/man1/shard-data.1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/input_opts.h"
#include "common/tool.h"
#include "text/shard_set.h"

enum { MAX_EPOCHS = 4 };

static struct {
    lm_input_args in;
    const char *tokenizer, *format, *eos_token;
    lm_strs weight;
    const char *chat_template, *loss_on, *map;
    bool chat, eos, special, shuffle, check_tokenizer;
    double val_fraction, max_epochs;
    int64_t tokens, shard_tokens, eos_id, vocab;
} opt = { .in = LM_INPUT_ARGS_DEFAULT,
          .format = "megatron",
          .loss_on = "auto",
          .eos = true,
          .shuffle = true,
          .check_tokenizer = true,
          .max_epochs = MAX_EPOCHS,
          .eos_id = -1 };

static const char *const formats[] = { "megatron", "llmc", "nanogpt", NULL };
static const char *const inputs[] = {
    "auto", "jsonl", "text", "megatron", "llmc", "nanogpt", NULL
};
static const char *const splits[] = { "file", "blank", "contiguous", NULL };

static const lm_opt options[] = {
    LM_GROUP("Tokens"),
    LM_STR('t', "tokenizer", &opt.tokenizer, "PATH",
           "tokenizer.json, or a folder that holds one; without it the inputs are shards"),
    LM_FLAG(0, "eos", &opt.eos, "set an end-of-text id between documents [yes]"),
    LM_ALSO("append-eod"),
    LM_STR(0, "eos-token", &opt.eos_token, "TEXT", "its token [the tokenizer's]"),
    LM_COUNT(0, "eos-id", &opt.eos_id, "ID", 0, 2e9, "its id, where shards are read"),
    LM_FLAG(0, "add-special", &opt.special,
            "apply the tokenizer's post-processor to each text [no]"),
    LM_COUNT(0, "vocab-size", &opt.vocab, "N", 1, 2e9,
             "ids are below N [the tokenizer's; of shards the largest id + 1]"),
    LM_GROUP("Records (messages, prompt and completion, ...)"),
    LM_FLAG(0, "chat", &opt.chat, "read records; write loss marks beside the ids [no]"),
    LM_STR(0, "chat-template", &opt.chat_template, "NAME|FILE",
           "Jinja, or alpaca chatml exaone llama3 mistral [the tokenizer's]"),
    LM_CHOICE(0, "loss-on", &opt.loss_on, "WHAT", lm_loss_on_names,
              "all; assistant: its turns; last; completion; auto [auto]"),
    LM_STR(0, "map", &opt.map, "KEY=COLUMN", "names of columns: prompt=question,completion=answer"),
    LM_GROUP("Selection"),
    LM_REAL(0, "val-fraction", &opt.val_fraction, "X", 0, 0.999,
            "share of the documents that is held out as 'val' [0]"),
    LM_ALSO("val-ratio validation-fraction"),
    LM_FLAG(0, "shuffle", &opt.shuffle, "write documents in a random order [yes]"),
    LM_LIST('w', "weight", &opt.weight, "X",
            "weight of this input, in the order of the inputs; or write FILE:X"),
    LM_COUNT('n', "tokens", &opt.tokens, "N", 1, 9e15, "write about N ids into 'train' [all]"),
    LM_REAL(0, "max-epochs", &opt.max_epochs, "X", 1, 1e6,
            "with --tokens: most passes over an input [4]"),
    LM_GROUP("Output (-o is a folder)"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats, "megatron, llmc or nanogpt [megatron]"),
    LM_COUNT(0, "shard-tokens", &opt.shard_tokens, "N", 1, 2147483647,
             "llmc, nanogpt: ids in a shard [one shard]"),
    LM_GROUP("Input"),
    LM_INPUT_OPTIONS_OF(
        opt.in, inputs, "auto; of text jsonl, text; of shards megatron, llmc, nanogpt [auto]",
        splits, "file; blank: text ends at blank lines; contiguous: hold out ends [file]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse shards made with different tokenizers [yes]"),
    LM_END
};

static const char *const examples[] = {
    "shard-data -t tok/tokenizer.json --val-fraction 0.01 -o data/ clean.jsonl",
    "shard-data --chat -t m/ -o data/ chat.jsonl", NULL
};

static lm_tool tool = {
    .name = "shard-data",
    .args = "FILE[:WEIGHT] ...",
    .brief = "turn text into shuffled, indexed token shards",
    .opts = options,
    .makes = LM_MAKES_FOLDER,
    .use = LM_USE_HISTORY | LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON,
    .min_args = 1,
    .max_args = -1,
    .examples = examples,
};

/* The operands: paths without their weights. */
static char **path;
static double *weight; /* NULL when not given */

static double weight_of(const char *where, const char *s)
{
    double v;
    if (!lm_parse_double(s, &v) || !(v >= 0) || v > 1e15)
        lm_misuse(&tool, where, "give a number such as 0.7", "'%s' is not a weight", s);
    return v;
}

/* "a.jsonl:0.7" has a weight, unless a file has this name. */
static bool split_operand(const char *arg, char *copy, double *out)
{
    double ignored;
    char *colon = strrchr(copy, ':');
    if (!colon || lm_path_exists(arg) || !lm_parse_double(colon + 1, &ignored))
        return false;
    *out = weight_of(arg, colon + 1);
    *colon = 0;
    return true;
}

static lm_code read_operands(lm_err *e)
{
    int given = 0;
    lm_code rc = lm_alloc_n(&path, (size_t)tool.argc, sizeof *path, "paths", e);
    if (!rc)
        rc = lm_alloc_n(&weight, (size_t)tool.argc, sizeof *weight, "weights", e);
    for (int i = 0; i < tool.argc && !rc; i++) {
        rc = lm_strdup(&path[i], tool.argv[i], e);
        given += !rc && split_operand(tool.argv[i], path[i], &weight[i]);
    }
    if (rc)
        return rc;
    if (opt.weight.n && (given || opt.weight.n != tool.argc))
        lm_misuse(&tool, "--weight", "give one weight for each input", "%d weight%s for %d input%s",
                  opt.weight.n + given, lm_plural(opt.weight.n + given), tool.argc,
                  lm_plural(tool.argc));
    for (int i = 0; i < opt.weight.n; i++, given++)
        weight[i] = weight_of("--weight", opt.weight.v[i]);
    if (given && given != tool.argc)
        lm_misuse(&tool, "weights", "give one weight for each input", "%d weight%s for %d input%s",
                  given, lm_plural(given), tool.argc, lm_plural(tool.argc));
    if (!given) {
        lm_free(weight);
        weight = NULL;
    }
    return LM_OK;
}

static lm_text_record_map map;

static lm_shard_opts request(void)
{
    int loss_on = 0;
    while (strcmp(lm_loss_on_names[loss_on], opt.loss_on) != 0)
        loss_on++;
    return (lm_shard_opts){
        .path = (const char *const *)path,
        .weight = weight,
        .n = tool.argc,
        .tokenizer = opt.tokenizer,
        .in = lm_input_args_read(&opt.in),
        .from = lm_tokens_kind_find(opt.in.format),
        .check_tokenizer = opt.check_tokenizer,
        .eos = opt.eos,
        .eos_token = opt.eos_token,
        .eos_id = opt.eos_id,
        .add_special = opt.special,
        .records = opt.chat,
        .chat_template = opt.chat_template,
        .loss_on = (lm_loss_on)loss_on,
        .map = map.n ? &map : NULL,
        .vocab = opt.vocab,
        .val_fraction = opt.val_fraction,
        .contiguous = strcmp(opt.in.split, "contiguous") == 0,
        .shuffle = opt.shuffle,
        .seed = (uint64_t)tool.seed,
        .tokens = opt.tokens,
        .max_epochs = opt.max_epochs,
        .kind = lm_tokens_kind_find(opt.format),
        .shard_tokens = opt.shard_tokens,
        .output = tool.output,
        .force = tool.force,
        .step = lm_tool_step(&tool),
        .sink = &tool.sink,
    };
}

static void say_summary(const lm_shard_set *s, double seconds)
{
    char a[32], b[32], c[32];
    lm_say(&tool, LM_LOG_NOTICE,
           "%s tokens in %lld document%s to %s, %s tokens in %lld document%s held out",
           lm_show_count((double)s->tokens[0], a), (long long)s->docs[0], lm_plural(s->docs[0]),
           tool.output, lm_show_count((double)s->tokens[1], b), (long long)s->docs[1],
           lm_plural(s->docs[1]));
    lm_input_args_warn(&tool, &opt.in);
    if (s->read.skipped)
        lm_say(&tool, LM_LOG_WARN, "%lld document%s skipped for invalid UTF-8",
               (long long)s->read.skipped, lm_plural(s->read.skipped));
    if (opt.chat)
        lm_say(&tool, LM_LOG_NOTICE, "%.1f %% of the tokens train",
               100 * (double)s->read.trained / (double)(s->tokens[0] + s->tokens[1]));
    if (s->read.silent)
        lm_say(&tool, LM_LOG_WARN, "%lld record%s left out: no token of %s trains",
               (long long)s->read.silent, lm_plural((uint64_t)s->read.silent),
               s->read.silent == 1 ? "it" : "them");
    if (opt.val_fraction > 0 && !s->docs[LM_SPLIT_VAL])
        lm_say(&tool, LM_LOG_WARN,
               "none of %lld document%s is in the validation split: 'val' is not written",
               (long long)s->read.documents, lm_plural((uint64_t)s->read.documents));
    lm_say(&tool, LM_LOG_INFO, "%.2f s, %s tokens/s, %s/s of text", seconds,
           lm_show_count((double)(s->tokens[0] + s->tokens[1]) / seconds, a),
           lm_show_bytes((double)s->read.bytes / seconds, c));
}

static void refuse_text(const char *input)
{
    lm_refuse_text(&tool, "-", input);
    if (opt.tokenizer)
        lm_refuse_inside(&tool, tool.output, input);
}

/* For an operand with a weight, only its path is checked. */
static lm_code check_streams(lm_err *e)
{
    const char **all = NULL;
    lm_code rc = lm_alloc_n(&all, (size_t)tool.argc + 1, sizeof *all, "paths", e);
    for (int i = 0; i < tool.argc && !rc; i++)
        all[i] = strcmp(path[i], tool.argv[i]) ? path[i] : NULL;
    if (!rc) {
        all[tool.argc] = opt.tokenizer;
        lm_refuse_twice(&tool, all, tool.argc + 1);
    }
    lm_free(all);
    return rc;
}

static lm_code shard(lm_err *e)
{
    lm_par *par = NULL;
    lm_buf meta = { 0 };
    lm_shard_set set;
    double start = lm_now();
    lm_code rc = read_operands(e);
    if (!rc)
        rc = check_streams(e);
    for (int i = 0; i < tool.argc && !rc; i++) /* lm_shard_set_make checks the folder */
        refuse_text(path[i]);
    if (opt.tokenizer)
        lm_refuse_same(&tool, "-", opt.tokenizer);
    if (!rc && opt.map)
        rc = lm_text_record_map_add(&map, opt.map, e);
    const lm_shard_opts o = request();
    if (!rc)
        rc = lm_par_new(&par, tool.threads, e);
    if (!rc)
        rc = lm_shard_set_make(&o, par, &set, &meta, e);
    if (!rc && meta.len) {
        if (tool.json)
            fwrite(meta.data, 1, meta.len, stdout);
        say_summary(&set, lm_now() - start);
    }
    lm_buf_fini(&meta);
    lm_par_free(par);
    return rc;
}

/* Text needs a tokenizer, token datasets do not use one.  Options without effect are refused too,
 * except at their defaults, because a saved config holds every option. */
static void refuse_idle(void)
{
    bool shards = lm_tokens_kind_find(opt.in.format) != LM_TOKENS_AUTO;
    if (opt.tokenizer && shards)
        lm_misuse(&tool, "--input-format", "leave --tokenizer out: ids are copied unchanged",
                  "%s names token datasets, --tokenizer is for text", opt.in.format);
    if (!opt.tokenizer && !shards && strcmp(opt.in.format, "auto") != 0)
        lm_misuse(&tool, "--input-format", "name one with --tokenizer", "%s needs a tokenizer",
                  opt.in.format);
    if (!opt.tokenizer)
        lm_input_args_idle(&tool, &opt.in, "token datasets");
    if (!opt.tokenizer && (opt.eos_token || opt.special))
        lm_misuse(&tool, opt.special ? "--add-special" : "--eos-token",
                  opt.special ? "leave it out" : "give --eos-id", "there is no --tokenizer");
    if (opt.chat && !opt.tokenizer)
        lm_misuse(&tool, "--chat", "give --tokenizer", "records need a tokenizer");
    if (opt.chat && (opt.in.field.n || opt.special || strcmp(opt.in.split, "file")))
        lm_misuse(&tool,
                  opt.in.field.n ? "--field"
                  : opt.special  ? "--add-special"
                                 : "--split",
                  opt.in.field.n ? "rename columns with --map" : "leave it out",
                  "serves plain texts, not --chat");
    if (!opt.chat && (opt.chat_template || opt.map || strcmp(opt.loss_on, "auto")))
        lm_misuse(&tool,
                  opt.chat_template ? "--chat-template"
                  : opt.map         ? "--map"
                                    : "--loss-on",
                  "add --chat", "serves records only");
    if (!opt.tokens && opt.max_epochs != MAX_EPOCHS)
        lm_misuse(&tool, "--max-epochs", "add --tokens", "without it no input is used twice");
    if (opt.shard_tokens && lm_tokens_kind_find(opt.format) == LM_TOKENS_MEGATRON)
        lm_misuse(&tool, "--shard-tokens", "choose --format llmc or nanogpt",
                  "a Megatron dataset is one file");
    if (opt.in.separator && strcmp(opt.in.split, "blank") == 0)
        lm_misuse(&tool, "--separator", "leave out one of them",
                  "--split blank cuts at other places");
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };

    lm_begin(&tool, argc, argv);
    if (!tool.output || strcmp(tool.output, "-") == 0)
        lm_misuse(&tool, "-o", "name the folder with -o FOLDER", "an output folder is needed");
    if (strcmp(opt.in.split, "contiguous") == 0 && opt.val_fraction <= 0)
        lm_misuse(&tool, "--split contiguous", "add --val-fraction 0.1, or another fraction",
                  "no part is held out");
    refuse_idle();
    if (shard(&err))
        lm_complain(&tool, &err);
    for (int i = 0; path && i < tool.argc; i++)
        lm_free(path[i]);
    lm_free(path);
    lm_free(weight);
    lm_text_record_map_fini(&map);
    return lm_end(&tool);
}
