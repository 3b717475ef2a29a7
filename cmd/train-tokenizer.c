/* SPDX-License-Identifier: Apache-2.0 */
/* train-tokenizer -- learn a tokenizer.json: byte-level BPE, WordPiece or Unigram.  See man/man1/train-tokenizer.1. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "common/input_opts.h"
#include "common/tool.h"
#include "text/bpe_train.h"

static struct {
    int64_t vocab_size, min_frequency, max_token_bytes;
    int64_t limit_alphabet;
    bool cased;
    const char *model, *pattern;
    lm_strs special;
    lm_input_args input;
} opt = { .vocab_size = 32000,
          .limit_alphabet = 1000,
          .model = "bpe",
          .pattern = "gpt2",
          .input = LM_INPUT_ARGS_DEFAULT };

static const char *const models[] = { "bpe", "wordpiece", "unigram", NULL };

static const lm_opt options[] = {
    LM_GROUP("Vocabulary"),
    LM_CHOICE('m', "model", &opt.model, "NAME", models,
              "bpe, wordpiece (as BERT) or unigram (as T5) [bpe]"),
    LM_COUNT('V', "vocab-size", &opt.vocab_size, "N", 1, 16e6,
             "tokens in all, special ones included [32000]"),
    LM_STR('p', "pattern", &opt.pattern, "NAME",
           "bpe: words: gpt2, llama3, qwen, gpt4, gpt4o or a PCRE2 pattern [gpt2]"),
    LM_LIST('s', "special", &opt.special, "TOKEN",
            "a special token; ids from 0 in the order given [by model]"),
    LM_ALSO("special-token special-tokens"),
    LM_COUNT(0, "min-frequency", &opt.min_frequency, "N", 0, 9e18,
             "never merge what occurs less often [0]"),
    LM_COUNT(0, "max-token-bytes", &opt.max_token_bytes, "N", 0, 1e9,
             "bpe: longest token [0: no bound]"),
    LM_ALSO("max-token-length"),
    LM_FLAG(0, "cased", &opt.cased, "wordpiece: keep capitals and accents"),
    LM_COUNT(0, "limit-alphabet", &opt.limit_alphabet, "N", 0, 1e6,
             "wordpiece: most characters, 0: no bound [1000]"),
    LM_GROUP("Input"),
    LM_INPUT_OPTIONS(opt.input),
    LM_END
};

static const char *const examples[] = {
    "train-tokenizer -V 4096 -p llama3 -o tok/tokenizer.json clean.jsonl",
    "train-tokenizer -V 32k -s '<s>' -s '</s>' a.txt b.tar.zst > tokenizer.json", NULL
};

static lm_tool tool = {
    .name = "train-tokenizer",
    .args = "[FILE ...]",
    .brief = "learn a tokenizer.json from text: BPE, WordPiece or Unigram",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_JSON,
    .max_args = -1,
    .filter = true,
    .examples = examples,
};

/* The outputs.  config: tokenizer_config.json beside the product, from which readers take the
 * special tokens; NULL: not written. */
typedef struct {
    lm_out *json, *config;
} product;

/* True if tokenizer_config.json is written.  Readers use it with a tokenizer of any name beside it.
 * It is not written twice, and that of another tokenizer is kept, with a warning. */
static bool is_config_due(const char *path, const char *config, const lm_buf *text)
{
    lm_buf there = { 0 };
    lm_err ignored = { 0 };
    struct stat st;
    bool due, same;

    if (!strcmp(path, "-") || (!stat(path, &st) && !S_ISREG(st.st_mode)))
        return false;
    due = !lm_path_exists(config);
    same = !due && !lm_file_read(config, 1 << 20, &there, &ignored) && there.len == text->len + 1 &&
           !memcmp(there.data, text->data, text->len);
    lm_buf_fini(&there);
    if (!due && !same)
        lm_say(&tool, LM_LOG_WARN,
               "%s: belongs to another tokenizer, but is also read with %s: use a separate folder "
               "for each",
               config, path);
    return due;
}

/* -f replaces a configuration written by this tool, but not one with additions, such as a chat
 * template. */
static lm_code check_config(const char *path, lm_err *e)
{
    static const char *const own[] = { "tokenizer_class", "clean_up_tokenization_spaces",
                                       "bos_token",       "eos_token",
                                       "pad_token",       "unk_token",
                                       "cls_token",       "sep_token",
                                       "mask_token" };
    json_t *there = NULL, *value;
    const char *key;
    lm_err ignored = { 0 };
    lm_code rc = LM_OK;

    if (!lm_path_exists(path) || lm_json_load(path, 64 << 20, &there, &ignored))
        return LM_OK;
    json_object_foreach(there, key, value)
    {
        bool known = false;
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            known |= !strcmp(key, own[i]);
        if (!known && !rc)
            rc = lm_fail(
                e, LM_EUSAGE, path, "choose another folder, or move it elsewhere",
                "holds '%.100s', which does not belong to the new output and would be lost", key);
    }
    json_decref(there);
    return rc;
}

/* Open the outputs before the work; create a missing folder. */
static lm_code open_product(product *p, const lm_buf *config_text, lm_err *e)
{
    const char *path = tool.output ? tool.output : "-", *base = lm_path_base(path);
    char *dir = NULL, *json = NULL, *config = NULL;
    bool folder = strcmp(path, "-") && (!*base || lm_path_is_dir(path));
    bool pair = folder || !strcmp(base, "tokenizer.json");
    lm_code rc = LM_OK;

    if (base > path)
        rc = lm_asprintf(&dir, e, "%.*s", (int)(base - path), path);
    if (!rc && folder && *base) {
        lm_free(dir);
        rc = lm_strdup(&dir, path, e);
    }
    if (!rc && dir && !lm_path_is_dir(dir))
        rc = lm_mkdir_p(dir, e);
    if (!rc && folder)
        rc = lm_path_join(&json, dir, "tokenizer.json", e);
    if (!rc)
        lm_refuse_run_link(&tool, json);
    if (!rc && dir)
        rc = lm_path_join(&config, dir, "tokenizer_config.json", e);
    else if (!rc)
        rc = lm_strdup(&config, "tokenizer_config.json", e);
    if (!rc && !pair)
        pair = is_config_due(path, config, config_text);
    if (!rc && pair && tool.force)
        rc = check_config(config, e);
    if (!rc)
        rc = lm_out_open(json ? json : path, tool.force, &p->json, e);
    if (!rc && pair)
        rc = lm_out_open(config, tool.force, &p->config, e);
    lm_free(dir);
    lm_free(json);
    lm_free(config);
    return rc;
}

/* Write to disk, but do not rename yet. */
static lm_code write_file(lm_out *o, const lm_buf *text, lm_err *e)
{
    fwrite(text->data, 1, text->len, lm_out_file(o)); /* lm_out_finish detects a failure */
    fputc('\n', lm_out_file(o));
    return lm_out_finish(o, e);
}

static lm_code publish(lm_out **out, lm_err *e)
{
    lm_out *o = *out;

    *out = NULL;
    return lm_out_commit(o, e);
}

static void say_summary(const lm_bpe_train_stats *s, double seconds)
{
    char bytes[32], peak[32];

    if (s->vocab_size < opt.vocab_size)
        lm_say(&tool, LM_LOG_WARN,
               strcmp(opt.model, "unigram")
                   ? "only %lld of %lld tokens: no pair is left to merge"
                   : "only %lld of %lld tokens: no more pieces occur often enough in the text",
               (long long)s->vocab_size, (long long)opt.vocab_size);
    lm_say(&tool, LM_LOG_NOTICE, "%lld token%s from %lld document%s, %s, %lld different word%s",
           (long long)s->vocab_size, lm_plural(s->vocab_size), (long long)s->documents,
           lm_plural(s->documents), lm_show_bytes((double)s->bytes, bytes),
           (long long)s->unique_words, lm_plural(s->unique_words));
    lm_input_args_warn(&tool, &opt.input);
    lm_say(&tool, LM_LOG_INFO, "%.2f s, peak memory %s", seconds,
           lm_show_bytes((double)lm_rss_peak(), peak));
}

static lm_code report(const lm_bpe_train_stats *s, double seconds, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw j;
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "output", tool.output);
    lm_jw_int(&j, "vocab_size", s->vocab_size);
    lm_jw_int(&j, "merges", s->merges);
    lm_jw_int(&j, "documents", s->documents);
    lm_jw_int(&j, "bytes", s->bytes);
    lm_jw_int(&j, "words", s->words);
    lm_jw_int(&j, "unique_words", s->unique_words);
    lm_jw_f64(&j, "seconds", seconds);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc)
        printf("%s\n", text.data);
    lm_buf_fini(&text);
    return rc;
}

/* Options that the model has no use for. */
static void check_model(lm_train_model model)
{
    static const struct {
        const char *name;
        bool takes[3];
    } some[] = {
        { "pattern", { true, false, false } },        { "max-token-bytes", { true, false, false } },
        { "min-frequency", { true, true, false } },   { "cased", { false, true, false } },
        { "limit-alphabet", { false, true, false } },
    };

    for (size_t i = 0; i < sizeof some / sizeof *some; i++)
        if (lm_given(&tool, some[i].name) && !some[i].takes[model])
            lm_misuse(&tool, some[i].name, "leave it out", "--model %s has no use for it",
                      models[model]);
}

static lm_code train(lm_par *par, product *p, lm_err *e)
{
    static const char *const eot[] = { "<|endoftext|>" };
    static const char *const bert[] = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" };
    static const char *const t5[] = { "<pad>", "</s>", "<unk>" };
    static const char *const *const usual[] = { eot, bert, t5 };
    static const int n_usual[] = { 1, 5, 3 };
    bool given = lm_given(&tool, "special");
    lm_train_model model = LM_TRAIN_BPE;
    while (strcmp(opt.model, models[model]))
        model++;
    check_model(model);
    lm_bpe_train_opts o = {
        .model = model,
        .cased = opt.cased,
        .limit_alphabet = opt.limit_alphabet,
        .vocab_size = opt.vocab_size,
        .min_frequency = opt.min_frequency,
        .max_token_bytes = opt.max_token_bytes,
        .pattern = opt.pattern,
        .special = given ? opt.special.v : usual[model],
        .n_special = given ? opt.special.n : n_usual[model],
    };
    lm_input_opts in_opts = lm_input_args_read(&opt.input);
    lm_bpe_trainer *t = NULL;
    lm_input *in = NULL;
    lm_buf json = { 0 }, config = { 0 };
    lm_bpe_train_stats stats;
    double start = lm_now();
    lm_code rc = lm_bpe_trainer_new(&o, lm_par_threads(par), &t, e);

    if (!rc)
        rc = lm_input_open(&in_opts, (const char *const *)tool.argv, tool.argc, &in, e);
    if (!rc) {
        lm_input_args_refuse(&tool, in, tool.output);
        lm_input_files_warn(lm_input_file_list(in), &tool.sink);
        rc = lm_bpe_train_config(&o, &config, e);
        rc = rc ? rc : open_product(p, &config, e);
    }
    if (!rc)
        rc = lm_bpe_trainer_feed(t, par, &in_opts, in, &tool.sink, e);
    if (!rc)
        rc = lm_bpe_trainer_finish(t, &tool.sink, &json, &stats, e);
    if (!rc)
        rc = write_file(p->json, &json, e);
    if (!rc && p->config)
        rc = write_file(p->config, &config, e);
    if (!rc)
        rc = publish(&p->json, e);
    if (!rc && p->config)
        rc = publish(&p->config, e);
    if (!rc)
        say_summary(&stats, lm_now() - start);
    if (!rc && tool.json)
        rc = report(&stats, lm_now() - start, e);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    lm_input_close(in);
    lm_bpe_trainer_free(t);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    lm_par *par = NULL;
    product p = { 0 };

    lm_begin(&tool, argc, argv);
    if (tool.json && (!tool.output || !strcmp(tool.output, "-")))
        lm_misuse(&tool, "--json", "write the tokenizer to a file",
                  "standard output holds the tokenizer");
    for (int i = 0; i < tool.argc; i++)
        lm_refuse_same(&tool, tool.output, tool.argv[i]);
    lm_refuse_twice(&tool, NULL, 0);
    if (lm_par_new(&par, tool.threads, &err) || train(par, &p, &err))
        lm_complain(&tool, &err);
    if (p.json)
        lm_out_drop(p.json);
    if (p.config)
        lm_out_drop(p.config);
    lm_par_free(par);
    return lm_end(&tool);
}
