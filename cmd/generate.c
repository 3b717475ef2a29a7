/* SPDX-License-Identifier: Apache-2.0 */
/* generate -- continue prompts with a model.  See man/man1/generate.1. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/device.h"
#include "common/model.h"
#include "common/tool.h"
#include "format/input.h"
#include "format/source.h"
#include "model/answer.h"
#include "model/complete.h"
#include "model/generation.h"
#include "text/tokenizer_source.h"

static struct {
    lm_strs prompt, stop;
    const char *tokenizer, *dtype, *weights_in;
    int64_t max_new, top_k, context, batch, samples;
    double temperature, top_p, min_p, penalty; /* these, max_new and top_k: -1 if not given */
    bool echo, ignore_eos, special, skip_special, logprobs, generation, check_tokenizer;
} opt = { .dtype = "auto",
          .weights_in = "auto",
          .max_new = -1,
          .top_k = -1,
          .temperature = -1,
          .top_p = -1,
          .min_p = -1,
          .penalty = -1,
          .batch = 8,
          .samples = 1,
          .generation = true,
          .check_tokenizer = true,
          .echo = true,
          .special = true,
          .skip_special = true };

static const char *const dtypes[] = { "auto", "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Prompts"),
    LM_LIST('p', "prompt", &opt.prompt, "TEXT", "continue TEXT, print text (may be repeated)"),
    LM_FLAG(0, "echo", &opt.echo, "with -p: print the prompt in front of its continuation [yes]"),
    LM_FLAG(0, "add-special", &opt.special, "add what the tokenizer's post-processor adds [yes]"),
    LM_COUNT(0, "n", &opt.samples, "N", 1, 1e6, "answers to each prompt [1]"),
    LM_ALSO("num-return-sequences num-samples"),
    LM_GROUP("Sampling (defaults: generation_config.json, else those in brackets)"),
    LM_FLAG(0, "generation-config", &opt.generation, "read defaults from the model's file [yes]"),
    LM_REAL('T', "temperature", &opt.temperature, "X", 0, 100,
            "0: always the most likely token [1]"),
    LM_ALSO("temp"),
    LM_INSTEAD("do-sample", "give --temperature: above 0 draws, 0 takes the most likely"),
    LM_COUNT(0, "top-k", &opt.top_k, "N", 0, 1e9, "from the N most likely tokens only; 0: all [0]"),
    LM_REAL(0, "top-p", &opt.top_p, "X", 0, 1, "from the most likely ones that sum up to X [1]"),
    LM_REAL(0, "min-p", &opt.min_p, "X", 0, 1, "none below X times the highest probability [0]"),
    LM_REAL(0, "repetition-penalty", &opt.penalty, "X", 0.01, 100, "1: none [1]"),
    LM_ALSO("repeat-penalty"),
    LM_GROUP("End"),
    LM_COUNT('n', "max-new-tokens", &opt.max_new, "N", 1, 1e9, "stop after N tokens [128]"),
    LM_ALSO("max-tokens n-predict num-tokens"),
    LM_INSTEAD("max-length", "give --max-new-tokens N: the length without the prompt"),
    LM_LIST('s', "stop", &opt.stop, "TEXT", "stop where TEXT occurs (may be repeated)"),
    LM_ALSO("stop-strings stop-sequences"),
    LM_FLAG(0, "ignore-eos", &opt.ignore_eos, "continue after the end-of-text token"),
    LM_GROUP("Model"),
    LM_STR(0, "tokenizer", &opt.tokenizer, "PATH",
           "tokenizer.json or its folder [the model's own]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse a tokenizer of another model [yes]"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "f32, bf16, or auto for the faster [auto]"),
    LM_ALSO("torch-dtype precision"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_WEIGHTS_IN(&opt.weights_in),
    LM_COUNT(0, "context", &opt.context, "N", 1, 1e9,
             "capacity in tokens, prompt and new [-p: enough; else 2048]"),
    LM_ALSO("ctx-size context-length max-model-len block-size seq-len"),
    LM_COUNT('b', "batch-size", &opt.batch, "N", 1, 1024, "texts at a time [8]"),
    LM_GROUP("Output"),
    LM_FLAG(0, "skip-special", &opt.skip_special, "leave special tokens out of the text [yes]"),
    LM_FLAG(0, "logprobs", &opt.logprobs, "JSON: ids and log-probabilities of the new tokens"),
    LM_END
};

static const char *const examples[] = {
    "generate run/ -p 'The system' -n 64 --temperature 0",
    "generate run/ --top-p 0.95 < prompts.jsonl > answers.jsonl", NULL
};

static lm_tool tool = {
    .name = "generate",
    .args = "MODEL [FILE ...]",
    .brief = "continue prompts with a model",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DEVICE,
    .min_args = 1,
    .max_args = -1,
    .examples = examples,
};

typedef struct {
    lm_loaded model;
    lm_tokenizer *tok;
    lm_tok_scratch *scratch;
    lm_par *par;
    lm_backend *backend;
    lm_generator *gen;
    lm_input *in; /* NULL: -p */
    lm_doc doc;
    lm_ids ids;
    int at;               /* next one of -p */
    lm_buf line, text_of; /* an answer; the prompt of a record */
    lm_out *out;
    FILE *to;
    bool text, live; /* plain text; to a terminal */
    size_t shown;
    lm_generation generation;
    int64_t context, full;
    lm_complete_stats st;
} work;

/* ---- prompts ---- */

static lm_code encode(work *w, const char *text, size_t len, lm_ids *ids, lm_err *e)
{
    const lm_config *c = &w->model.config;
    int64_t eos = lm_config_eos(c);
    int64_t first = c->bos >= 0 ? c->bos : eos >= 0 ? eos : lm_tokenizer_eos(w->tok);
    if (lm_tokenizer_encode(w->tok, w->scratch, text, len, opt.special, ids, e))
        return e->code;
    if (ids->n)
        return LM_OK;
    if (first < 0)
        return lm_fail(e, LM_EUSAGE, "prompt", "give some text",
                       "is empty, and the model has no token with which to begin");
    if (lm_grow(&ids->v, &ids->cap, 1, sizeof *ids->v, "tokens", e))
        return e->code;
    ids->v[ids->n++] = (uint32_t)first;
    return LM_OK;
}

static lm_code fits(const work *w, const lm_completion *c, const char *where, lm_err *e)
{
    if ((int64_t)c->ids.n <= w->context)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where,
                   w->context < w->model.config.max_positions ? "shorten it, or raise --context"
                                                              : "shorten it",
                   "the prompt has %zu token%s, the context holds %lld", c->ids.n,
                   lm_plural(c->ids.n), (long long)w->context);
}

/* Write an error as the answer of the line; the exit status will be 1. */
static lm_code refuse_line(work *w, lm_completion *c, bool object, lm_err *why, lm_err *e)
{
    char text[sizeof why->what + sizeof why->todo + 3];
    lm_code rc;
    snprintf(text, sizeof text, "%s%s%s", why->what, *why->todo ? ": " : "", why->todo);
    c->failed = true;
    c->prompt.len = 0;
    rc = lm_answer_write_error(object ? w->doc.raw.data : "", object ? w->doc.raw.len : 0,
                               w->doc.source, w->doc.line, text, &c->prompt, e);
    why->code = LM_EFORMAT; /* status 1, also when the prompt is too long */
    lm_complain(&tool, why);
    return rc;
}

/* One line of JSONL. */
static lm_code next_line(work *w, lm_completion *c, bool *got, lm_err *e)
{
    char where[300];
    bool object = false;
    lm_err bad = { 0 };
    if (lm_input_next(w->in, &w->doc, got, e) || !*got)
        return e->code;
    const lm_buf *raw = &w->doc.raw;
    snprintf(where, sizeof where, "%.250s:%lld", w->doc.source, (long long)w->doc.line);
    w->text_of.len = 0;
    if (lm_answer_prompt(raw->data, raw->len, where, &w->text_of, &object, &bad) ||
        encode(w, w->text_of.data ? w->text_of.data : "", w->text_of.len, &c->ids, &bad) ||
        fits(w, c, where, &bad))
        return refuse_line(w, c, object, &bad, e);
    return lm_buf_add(&c->prompt, raw->data, raw->len, e);
}

static lm_code next_prompt(void *ctx, lm_completion *c, bool *got, lm_err *e)
{
    work *w = ctx;
    c->max_new = opt.max_new;
    if (!w->in) {
        *got = w->at < opt.prompt.n;
        if (!*got)
            return LM_OK;
        const char *text = opt.prompt.v[w->at++];
        if (encode(w, text, strlen(text), &c->ids, e) || fits(w, c, "-p", e))
            return e->code;
        return lm_buf_add(&c->prompt, text, strlen(text), e);
    }
    *got = !lm_stopping();
    return *got ? next_line(w, c, got, e) : LM_OK;
}

/* ---- answers ---- */

static lm_code write_text(work *w, const char *text, size_t len, lm_err *e)
{
    if (fwrite(text, 1, len, w->to) != len || (w->live && fflush(w->to)))
        return lm_fail(e, LM_EIO, lm_out_path(w->out), NULL, "cannot write");
    return LM_OK;
}

/* Write the text that became final since the last call; the prompt comes first. */
static lm_code show_text(void *ctx, lm_completion *c, lm_err *e)
{
    work *w = ctx;
    const lm_buf *prompt = &c->prompt;
    if (!w->shown && opt.echo && write_text(w, prompt->data ? prompt->data : "", prompt->len, e))
        return e->code;
    if (!w->shown)
        w->shown = 1; /* one more than the bytes shown: the prompt is out */
    if (c->safe > w->shown - 1) {
        if (write_text(w, c->text.data + (w->shown - 1), c->safe - (w->shown - 1), e))
            return e->code;
        w->shown = c->safe + 1;
    }
    return LM_OK;
}

static lm_code put_json(work *w, const lm_completion *c, lm_err *e)
{
    const lm_answer_opts o = { .record = w->in,
                               .sample = opt.samples > 1,
                               .details = opt.logprobs };
    if (c->failed) /* refuse_line wrote the answer */
        return write_text(w, c->prompt.data, c->prompt.len, e);
    w->line.len = 0;
    return lm_answer_write(c, &o, &w->line, e) ? e->code
                                               : write_text(w, w->line.data, w->line.len, e);
}

static lm_code finish(void *ctx, lm_completion *c, lm_err *e)
{
    work *w = ctx;
    lm_code rc;
    w->full += !strcmp(c->finish, "context");
    if (w->text) {
        rc = write_text(w, "\n", 1, e);
        w->shown = 0;
    } else {
        rc = put_json(w, c, e);
    }
    return rc;
}

/* ---- the work ---- */

static void use(const char *option, double *to, double from, double otherwise)
{
    if (*to >= 0)
        return;
    *to = from >= 0 ? from : otherwise;
    if (from >= 0)
        lm_say(&tool, LM_LOG_INFO, "--%s %.15g comes from generation_config.json", option, from);
}

static void use_count(const char *option, int64_t *to, int64_t from, int64_t otherwise)
{
    double x = (double)*to;
    use(option, &x, (double)from, (double)otherwise);
    *to = (int64_t)x;
}

/* Set options that were not given from the model's files, otherwise to our own defaults. */
static lm_code read_generation(work *w, lm_err *e)
{
    lm_generation *g = &w->generation;
    json_t *file = NULL;
    lm_code rc = LM_OK;
    if (opt.generation)
        rc = lm_model_source_json(w->model.src, "generation_config.json", &file, e);
    rc = rc ? rc : lm_generation_read(&w->model.config, file, tool.argv[0], g, e);
    json_decref(file);
    if (rc)
        return rc;
    use("temperature", &opt.temperature, g->temperature, 1);
    use("top-p", &opt.top_p, g->top_p, 1);
    use("min-p", &opt.min_p, g->min_p, 0);
    use("repetition-penalty", &opt.penalty, g->repetition_penalty, 1);
    use_count("top-k", &opt.top_k, g->top_k, 0);
    use_count("max-new-tokens", &opt.max_new, g->max_new, 128);
    for (int i = 0; i < g->n_others; i++)
        lm_say(&tool, LM_LOG_WARN, "generation_config.json: \"%s\" has no effect here",
               g->others[i]);
    return LM_OK;
}

static lm_code open_model(work *w, lm_err *e)
{
    if (read_generation(w, e))
        return e->code;
    unsigned how = LM_TOKENIZER_NEEDED | (opt.check_tokenizer ? LM_TOKENIZER_CHECKED : 0u);
    lm_code rc =
        lm_tokenizer_choose(opt.tokenizer, w->model.src, w->model.config.vocab, how, &w->tok, e);
    return rc ? rc : lm_tok_scratch_new(w->tok, &w->scratch, e);
}

/* The capacity needed: known for -p, otherwise 2048 tokens. */
static lm_code choose_context(work *w, lm_err *e)
{
    int64_t most = w->model.config.max_positions, need = w->in ? 2048 : 0;
    for (int i = 0; i < opt.prompt.n && !w->in; i++) {
        w->ids.n = 0;
        if (encode(w, opt.prompt.v[i], strlen(opt.prompt.v[i]), &w->ids, e)) {
            lm_err_in(e, "-p");
            return e->code;
        }
        if ((int64_t)w->ids.n + opt.max_new > need)
            need = (int64_t)w->ids.n + opt.max_new;
    }
    if (opt.context > most)
        return lm_fail(e, LM_EUSAGE, "--context", "give at most as much",
                       "%lld, but the model was made for %lld position%s", (long long)opt.context,
                       (long long)most, lm_plural(most));
    w->context = opt.context ? opt.context : need < most ? need : most;
    return LM_OK;
}

static const char *const *prompt_files(int *n)
{
    static const char *const standard_input[] = { "-" };
    bool files = tool.argc > 1;
    *n = opt.prompt.n ? 0 : files ? tool.argc - 1 : 1;
    return files ? (const char *const *)tool.argv + 1 : standard_input;
}

static lm_code open_prompts(work *w, lm_err *e)
{
    const lm_input_opts o = { .kind = LM_INPUT_JSONL };
    int n;
    const char *const *files = prompt_files(&n);
    return n ? lm_input_open(&o, files, n, &w->in, e) : LM_OK;
}

/* Choose the faster type, unless one is given. */
static lm_dtype choose_dtype(const work *w)
{
    if (opt.dtype[0] != 'a')
        return opt.dtype[0] == 'b' ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    return !w->backend->host_memory || tool.cpu >= LM_CPU_AVX512 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
}

static lm_code open_generator(work *w, lm_err *e)
{
    int64_t all = opt.prompt.n * opt.samples, batch = !w->in && all < opt.batch ? all : opt.batch;
    if (choose_context(w, e) || lm_open_backend(&tool, w->par, true, &w->backend, e))
        return e->code;
    lm_dtype type = choose_dtype(w);
    if (lm_place_weights(&tool, opt.weights_in, type, w->backend, &w->model, e) ||
        lm_generator_new(&w->model, type, batch, w->context, w->backend, &w->gen, e))
        return e->code;
    char cache[32];
    lm_say(&tool, LM_LOG_INFO, "%s %s, %s on %s, seed %lld, context %lld, caches %s", tool.name,
           LM_VERSION, type == LM_DTYPE_BF16 ? "bf16" : "f32", w->backend->name,
           (long long)tool.seed, (long long)w->context,
           lm_show_bytes((double)lm_generator_cache_bytes(w->gen), cache));
    lm_say_weights(&tool, &w->model);
    return LM_OK;
}

static double rate(int64_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

static void say_summary(const work *w)
{
    const lm_complete_stats *s = &w->st;
    const char *refused = lm_generator_unrecorded(w->gen);
    if (refused)
        lm_say(&tool, LM_LOG_WARN, "%s: decoding runs without a recording: %s", w->backend->name,
               refused);
    if (w->full)
        lm_say(&tool, LM_LOG_WARN, "%lld of %lld text%s ended because the context of %lld is full",
               (long long)w->full, (long long)s->prompts, lm_plural((uint64_t)s->prompts),
               (long long)w->context);
    lm_say(&tool, LM_LOG_NOTICE,
           "prompt %lld token%s, %.1f tokens/s; new %lld token%s, %.1f tokens/s",
           (long long)s->prompt_tokens, lm_plural(s->prompt_tokens),
           rate(s->prompt_tokens, s->prompt_seconds), (long long)s->new_tokens,
           lm_plural(s->new_tokens), rate(s->new_tokens - s->prompts, s->decode_seconds));
}

static lm_code complete(work *w, lm_err *e)
{
    const lm_generation *g = &w->generation;
    const int64_t own = lm_tokenizer_eos(w->tok);
    const lm_complete_opts o = { .sample = { opt.temperature, opt.top_k, opt.top_p, opt.min_p,
                                             opt.penalty },
                                 .seed = (uint64_t)tool.seed,
                                 .samples = opt.samples,
                                 .eos = g->n_eos ? g->eos : &own,
                                 .n_eos = opt.ignore_eos ? 0
                                          : g->n_eos     ? g->n_eos
                                                         : own >= 0,
                                 .stop = opt.stop.v,
                                 .n_stop = opt.stop.n,
                                 .logprobs = opt.logprobs,
                                 .skip_special = opt.skip_special };
    const lm_complete_hooks h = { next_prompt, w->text ? show_text : NULL, finish, w };
    lm_code rc = lm_complete_run(w->gen, w->tok, &o, &h, &w->st, e);
    if (rc == LM_ENUMERIC) {
        lm_err_in(e, "%s", tool.argv[0]);
        snprintf(e->todo, sizeof e->todo, "%s", lm_advise_finite(tool.argv[0]));
    }
    return rc;
}

static lm_code run(work *w, lm_err *e)
{
    int n;
    const char *const *files = prompt_files(&n);
    lm_code rc = lm_bundle_there(tool.argv[0], e);
    if (!rc) /* before a model is read from a pipe */
        rc = lm_source_there(files, n, e);
    if (!rc)
        rc = lm_par_new(&w->par, tool.threads, e);
    w->text = opt.prompt.n && !tool.json;
    if (!rc)
        rc = lm_open_model(&tool, tool.argv[0], opt.tokenizer, w->par, &w->model, e);
    if (!rc)
        rc = open_model(w, e);
    if (!rc)
        rc = open_prompts(w, e);
    if (!rc)
        rc = lm_out_open(tool.output ? tool.output : "-", tool.force, &w->out, e);
    if (!rc)
        rc = open_generator(w, e);
    if (rc)
        return rc;
    w->to = lm_out_file(w->out);
    w->live =
        isatty(lm_out_fd(w->out)) || !w->text; /* a reader of JSONL gets each answer at once */
    rc = complete(w, e);
    if (!rc && !lm_stopping()) {
        lm_out *out = w->out;
        w->out = NULL;
        rc = lm_out_commit(out, e);
    }
    if (!rc)
        say_summary(w);
    return rc;
}

/* An output inside the folder of prompts would be a prompt of the next run. */
static void refuse_text(const char *prompts)
{
    lm_refuse_text(&tool, tool.output, prompts);
    lm_refuse_inside(&tool, tool.output, prompts);
}

static void check_options(void)
{
    bool prompts_in = !opt.prompt.n && tool.argc == 1;
    if (prompts_in && lm_stream_same(tool.argv[0], "-"))
        lm_misuse(&tool, "standard input", "give prompts by -p or in files",
                  "the model is read from it, so the prompts cannot be");
    lm_refuse_twice(&tool, (const char *[]){ opt.tokenizer, prompts_in ? "-" : NULL }, 2);
    lm_refuse_same(&tool, tool.output, tool.argv[0]);
    for (int i = 1; i < tool.argc; i++)
        refuse_text(tool.argv[i]);
    if (tool.argc == 1 && !opt.prompt.n)
        lm_refuse_same(&tool, tool.output, "-");
    if (opt.tokenizer)
        lm_refuse_same(&tool, tool.output, opt.tokenizer);
    if (opt.prompt.n && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "give prompts by -p or in files",
                  "cannot be combined with -p");
    if (opt.logprobs && opt.prompt.n && !tool.json)
        lm_misuse(&tool, "--logprobs", "add --json", "plain text cannot show them");
    for (int i = 0; i < opt.stop.n; i++)
        if (!*opt.stop.v[i])
            lm_misuse(&tool, "--stop", "leave it out", "an empty string occurs everywhere");
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    work w = { 0 };

    lm_begin(&tool, argc, argv);
    check_options();
    if (run(&w, &err))
        lm_complain(&tool, &err);
    lm_out_drop(w.out);
    lm_generator_free(w.gen);
    lm_loaded_fini(&w.model);
    lm_close_backend(&tool, w.backend);
    lm_tok_scratch_free(w.scratch);
    lm_tokenizer_free(w.tok);
    lm_input_close(w.in);
    lm_doc_fini(&w.doc);
    lm_ids_fini(&w.ids);
    lm_buf_fini(&w.line);
    lm_buf_fini(&w.text_of);
    lm_generation_fini(&w.generation);
    lm_par_free(w.par);
    return lm_end(&tool);
}
