/* SPDX-License-Identifier: Apache-2.0 */
/* eval-model -- perplexity, bits per byte and multiple choice.  See man/man1/eval-model.1. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/adapter.h"
#include "common/device.h"
#include "common/input_opts.h"
#include "common/model.h"
#include "common/sharing.h"
#include "common/tool.h"
#include "format/source.h"
#include "model/loaded.h"
#include "text/tokenizer_match.h"
#include "text/tokenizer_source.h"
#include "train/data.h"
#include "train/mcq.h"
#include "train/pair_score.h"
#include "train/score.h"
#include "train/span_score.h"
#include "train/targets.h"
#include "train/window.h"

static struct {
    lm_input_args in;
    const char *task, *tokenizer, *dtype, *weights_in, *format, *mesh;
    lm_strs adapters;
    const char *adapter; /* the only one */
    bool documents, special, check_tokenizer;
    int64_t seq, stride, batch;
    double max_loss, max_perplexity, min_accuracy;
} opt = { .in = LM_INPUT_ARGS_DEFAULT,
          .task = "perplexity",
          .dtype = "f32",
          .weights_in = "auto",
          .format = "auto",
          .check_tokenizer = true,
          .documents = true,
          .special = true,
          .batch = 8,
          .max_loss = INFINITY,
          .max_perplexity = INFINITY };

static const char *const tasks[] = { "perplexity", "mlm", "multiple-choice", "pairs", NULL };
static const char *const formats[] = { "auto", "megatron", "llmc", "nanogpt", NULL };
static const char *const dtypes[] = { "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Evaluation"),
    LM_CHOICE('t', "task", &opt.task, "TASK", tasks,
              "perplexity, mlm, multiple-choice or pairs [of MODEL]"),
    LM_COUNT(0, "seq-len", &opt.seq, "N", 1, 1e9,
             "tokens in a window [that of its training; unknown: 1024]"),
    LM_ALSO("block-size seq-length max-seq-length max-seq-len max-length context-length"),
    LM_COUNT(0, "stride", &opt.stride, "N", 1, 1e9, "step from window to window [seq-len / 2]"),
    LM_FLAG(0, "documents", &opt.documents, "no context from another document [yes]"),
    LM_FLAG(0, "add-special", &opt.special,
            "text: add what the tokenizer's post-processor adds [yes]"),
    LM_GROUP("Model"),
    LM_ADAPTER(&opt.adapters),
    LM_STR(0, "tokenizer", &opt.tokenizer, "PATH",
           "tokenizer.json or its folder [the model's own]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse a tokenizer or shards of another model [yes]"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "compute in f32 or bf16 [f32]"),
    LM_ALSO("torch-dtype precision"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_WEIGHTS_IN(&opt.weights_in),
    LM_COUNT('b', "batch-size", &opt.batch, "N", 1, 65536, "windows at a time [8]"),
    LM_ALSO("per-device-eval-batch-size eval-batch-size"),
    LM_STR(0, "mesh", &opt.mesh, "AXES", "processes share the weights: tp=N"),
    LM_GROUP("Verdict (exit status 3)"),
    LM_REAL(0, "max-loss", &opt.max_loss, "X", 0, 1e300, "the loss must not be above X"),
    LM_REAL(0, "max-perplexity", &opt.max_perplexity, "X", 1, 1e300, "nor the perplexity"),
    LM_REAL(0, "min-accuracy", &opt.min_accuracy, "X", 0, 1,
            "multiple-choice: nor accuracy below X"),
    LM_GROUP("Input"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats,
              "of shards: auto, megatron, llmc or nanogpt [auto]"),
    LM_INPUT_OPTIONS(opt.in),
    LM_END
};

static const char *const examples[] = {
    "eval-model run/ data/val",
    "eval-model --task multiple-choice --batch-size 32 run/ hellaswag_val.jsonl", NULL
};

static lm_tool tool = {
    .name = "eval-model",
    .args = "MODEL [DATA]",
    .brief = "measure perplexity, bits per byte or multiple-choice accuracy",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_DEVICE | LM_USE_JSON | LM_USE_RANKS,
    .json = true,
    .min_args = 1,
    .max_args = 2,
    .examples = examples,
};

typedef struct {
    const char *data;
    lm_loaded model;
    lm_tune_use adapter;
    lm_tokenizer *tok; /* NULL: shards, for a model without tokenizer */
    uint32_t *id_bytes;
    lm_par *par;
    lm_backend *backend;
    lm_sharing sharing;
    lm_evaluator eval;
    lm_mlm masks; /* share 0: of a causal model */
    lm_scorer *scorer;
    lm_span span;          /* with an encoder: what is cut out of windows, */
    lm_span_scorer *spans; /* and predicted */
    lm_packed_set pairs;   /* of --task pairs, and how they are made */
    lm_text_example_maker maker;
    lm_tokens *shards;
    lm_input_opts in_opts;
    lm_input *in;
    int64_t seq, room, stride, documents; /* room: seq without virtual tokens */
    lm_score score;
    lm_mcq_sum mcq;
    double seconds;
} work;

static bool multiple_choice(void)
{
    return !strcmp(opt.task, "multiple-choice");
}

/* Targets of sources: of models with an encoder. */
static bool pairs(void)
{
    return !strcmp(opt.task, "pairs");
}

/* ---- opening ---- */

/* An encoder fills masks, and nothing else is measured of it. */
static lm_code choose_task(work *w, lm_err *e)
{
    const lm_config *c = &w->model.config;
    const bool masks = lm_config_bidirectional(c), asked = !strcmp(opt.task, "mlm");
    if (pairs() && !c->encoder)
        return lm_fail(e, LM_EUSAGE, tool.argv[0], "leave --task out",
                       "a %s model has no encoder, which would read the sources",
                       lm_arch_name(c->arch));
    if (asked && !masks)
        return lm_fail(e, LM_EUSAGE, tool.argv[0], "leave --task out",
                       "a %s model sees no later tokens: it fills no masks", lm_arch_name(c->arch));
    if (!masks)
        return LM_OK;
    if (!asked && lm_given(&tool, "task"))
        return lm_config_check_causal(c, tool.argv[0], "give --task mlm", e);
    if (opt.stride)
        return lm_fail(e, LM_EUSAGE, "--stride", "leave it out",
                       "masks are filled in windows side by side");
    opt.task = "mlm";
    w->masks.share = 0.15;
    return LM_OK;
}

static lm_code open_tokenizer(work *w, bool need, lm_err *e)
{
    int64_t vocab = w->model.config.vocab;
    unsigned how =
        (need ? LM_TOKENIZER_NEEDED : 0u) | (opt.check_tokenizer ? LM_TOKENIZER_CHECKED : 0u);
    lm_code rc = lm_tokenizer_choose(opt.tokenizer, w->model.src, vocab, how, &w->tok, e);
    if (rc || !w->tok)
        return rc;
    if (lm_alloc_n(&w->id_bytes, (size_t)vocab, sizeof *w->id_bytes, "sizes of tokens", e))
        return e->code;
    for (int64_t i = 0; i < vocab; i++)
        w->id_bytes[i] = (uint32_t)lm_tokenizer_id_bytes(w->tok, (uint32_t)i);
    return LM_OK;
}

static lm_code open_shards(work *w, lm_err *e)
{
    int64_t vocab = w->model.config.vocab, eos = w->tok ? lm_tokenizer_eos(w->tok) : -1;
    const lm_token_reader r = { .name = tool.argv[0], .vocab = vocab, .tok = w->tok };
    if (lm_tokens_open(w->data, lm_tokens_kind_find(opt.format), eos, &w->shards, e) ||
        (opt.check_tokenizer && lm_token_reader_check(&r, w->shards, e)))
        return e->code;
    return lm_tokens_index(w->shards, w->par, e);
}

static int64_t virtual_tokens(const work *w)
{
    return w->model.adapter ? w->model.adapter->virtual_tokens : 0;
}

/* True if the first id of a document is scored, behind virtual tokens. */
static bool scores_first(const work *w)
{
    return w->model.adapter && w->model.adapter->predicts;
}

/* All pairs, whole unless --seq-len is given: it cuts sources and targets. */
static lm_code read_pairs(work *w, lm_err *e)
{
    lm_text_examples_opts how = { .path = &w->data, .n = 1, .sink = &tool.sink };
    lm_input_args_idle(&tool, &opt.in, "pairs");
    if (lm_packed_maker_with(w->tok, w->model.src, NULL, lm_config_eos(&w->model.config), &w->maker,
                             e))
        return e->code;
    w->maker.pair = true;
    w->maker.virtual_first = w->model.config.vocab;
    w->maker.virtuals = virtual_tokens(w);
    w->maker.unseen = w->maker.virtuals > 0 && !scores_first(w);
    w->maker.most_target = opt.seq;
    how.maker = w->maker;
    if (lm_packed_read(&how, opt.seq ? opt.seq : INT32_MAX, false, w->par, &w->pairs, e))
        return e->code;
    const lm_text_examples_stats *st = lm_text_examples_stat(w->pairs.examples);
    if (st->cut)
        lm_say(&tool, LM_LOG_WARN, "%s: %lld pairs are longer than --seq-len, and are cut", w->data,
               (long long)st->cut);
    w->documents = st->examples;
    w->seq = st->source;
    return LM_OK;
}

static lm_code open_data(work *w, lm_err *e)
{
    bool text = strcmp(opt.format, "auto") == 0 && lm_input_is_text(w->data);
    bool choice = multiple_choice(), masks = w->masks.share > 0;
    if (open_tokenizer(w, text || choice || masks || pairs(), e) ||
        (masks && lm_mlm_init(&w->masks, w->tok, w->model.config.vocab, tool.argv[0], e)))
        return e->code;
    w->in_opts = lm_input_args_read(&opt.in);
    if (pairs())
        return read_pairs(w, e);
    if (choice)
        w->in_opts.kind = LM_INPUT_JSONL;
    if (!text && !choice) {
        lm_input_args_idle(&tool, &opt.in, "shards");
        return open_shards(w, e);
    }
    lm_code rc = lm_input_open(&w->in_opts, &w->data, 1, &w->in, e);
    if (!rc)
        lm_input_files_warn(lm_input_file_list(w->in), &tool.sink);
    return rc;
}

/* With an encoder the loss is that of pairs, or of spans, drawn with a fixed seed. */
static lm_code open_spans(work *w, lm_err *e)
{
    const lm_config *c = &w->model.config;
    static const char *const idle[] = { "stride", "documents", NULL };
    lm_targets t;
    if (!c->encoder)
        return LM_OK;
    lm_targets_set(&t, LM_TARGETS_SPANS);
    if (lm_given(&tool, "task") && !pairs() && lm_config_check_alone(c, "--task", "this", e))
        return e->code;
    for (int i = 0; idle[i]; i++)
        if (lm_given(&tool, idle[i]))
            return lm_fail(
                e, LM_EUSAGE, "windows", "leave it out",
                pairs() ? "--%s does not apply to pairs, each of which has its window"
                        : "--%s does not apply to spans, which are cut out of a running text",
                idle[i]);
    if (pairs())
        return LM_OK;
    opt.task = "span";
    return lm_span_fit(w->seq, t.key[LM_TARGETS_DENSITY], t.key[LM_TARGETS_MEAN], &w->span, e) ||
                   lm_span_ids(c, w->model.src, &w->span, e)
               ? e->code
               : LM_OK;
}

static lm_code open_model(work *w, lm_err *e)
{
    const lm_config *c = &w->model.config;
    lm_dtype type = opt.dtype[0] == 'b' ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    w->seq = pairs() ? w->seq : opt.seq;
    if (!w->seq && lm_window_default(w->model.src, c->max_positions, &w->seq, NULL, e))
        return e->code;
    if (open_spans(w, e))
        return e->code;
    w->room = w->seq - virtual_tokens(w);
    if (w->masks.share > 0 && w->room < w->seq)
        return lm_fail(e, LM_EUSAGE, opt.adapter, "use an adapter without them",
                       "has virtual tokens, which windows of masked tokens do not have");
    if (w->span.source && w->room < w->seq)
        return lm_fail(e, LM_EUSAGE, opt.adapter, "give pairs with --task pairs",
                       "has virtual tokens, which windows with gaps do not have");
    if (pairs())
        w->room = w->seq; /* that of pairs counts them */
    if (w->room < 1)
        return lm_fail(e, LM_EUSAGE, opt.adapter, "raise --seq-len",
                       "has %lld virtual tokens, which leave no room in windows of %lld",
                       (long long)virtual_tokens(w), (long long)w->seq);
    w->stride = opt.stride ? opt.stride : (w->room + 1) / 2;
    if (w->stride > w->room)
        return lm_fail(e, LM_EUSAGE, "--stride", "give at most the window's length",
                       "%lld is more than %s, %lld", (long long)w->stride,
                       w->room < w->seq ? "--seq-len without virtual tokens" : "--seq-len",
                       (long long)w->room);
    if (lm_open_backend(&tool, w->par, true, &w->backend, e) ||
        lm_place_weights(&tool, opt.weights_in, type, w->backend, &w->model, e))
        return e->code;
    lm_build build = {
        .batch = opt.batch, .seq = w->seq, .documents = true, .precision = { .low = type }
    };
    if (w->model.config.encoder) {
        build.seq = pairs() ? lm_text_examples_stat(w->pairs.examples)->target : w->span.target;
        build.source = pairs() ? w->seq : w->span.source;
        build.documents = false;
    }
    if (lm_sharing_use(&tool, &w->sharing, w->backend, &w->model, e))
        return e->code;
    lm_loaded_build(&w->model, &build);
    if (lm_evaluator_new(c, &build, w->backend, &w->eval, e) ||
        lm_loaded_weights(&w->model, w->eval.model, w->backend, e))
        return e->code;
    lm_store_bind(w->model.store, w->eval.model, w->eval.exec);
    lm_say(&tool, LM_LOG_INFO, "%s %s, %s on %s, windows of %lld, stride %lld", tool.name,
           LM_VERSION, opt.dtype, w->backend->name, (long long)w->seq, (long long)w->stride);
    lm_say_weights(&tool, &w->model);
    return LM_OK;
}

/* ---- measuring ---- */

static lm_code score_text(work *w, lm_err *e)
{
    lm_tok_scratch *scratch = NULL;
    lm_doc doc = { 0 };
    lm_ids ids = { 0 };
    bool got = true;
    lm_code rc = lm_tok_scratch_new(w->tok, &scratch, e);
    while (!rc && !lm_stop_here() && !(rc = lm_input_read(w->in, &doc, &got, e)) && got) {
        if (opt.documents)
            ids.n = 0;
        size_t before = ids.n;
        rc = lm_tokenizer_encode(w->tok, scratch, doc.text, doc.len, opt.special, &ids, e);
        w->documents++;
        if (!rc && w->spans) {
            rc = lm_span_scorer_add(w->spans, ids.v, (int64_t)ids.n, &w->score, e);
            ids.n = 0;
            lm_input_stats st = lm_input_stat(w->in);
            lm_progress(&tool.sink, "evaluate", (double)st.bytes, (double)st.total, "bytes", NULL);
            continue;
        }
        w->score.bytes += (int64_t)doc.len;
        if (!rc && !before && ids.n && !scores_first(w)) /* no context: its text is not scored */
            w->score.bytes -= w->id_bytes[ids.v[0]];
        if (!rc && opt.documents)
            rc = lm_scorer_add(w->scorer, ids.v, (int64_t)ids.n, 0, &w->score, e);
        lm_input_stats st = lm_input_stat(w->in);
        lm_progress(&tool.sink, "evaluate", (double)st.bytes, (double)st.total, "bytes", NULL);
    }
    if (!rc && !opt.documents && !w->spans)
        rc = lm_scorer_add(w->scorer, ids.v, (int64_t)ids.n, 0, &w->score, e);
    lm_doc_fini(&doc);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(scratch);
    return rc;
}

static lm_code score_shards(work *w, lm_err *e)
{
    int64_t count = lm_tokens_count(w->shards), docs = lm_tokens_docs(w->shards);
    w->documents = docs;
    if (w->spans)
        return lm_span_scorer_add_tokens(w->spans, w->shards, &w->score, e);
    if (!opt.documents)
        return lm_scorer_add_tokens(w->scorer, w->shards, 0, count, &w->score, e);
    for (int64_t d = 0; d < docs && !lm_stop_here(); d++) {
        int64_t at = lm_tokens_doc_start(w->shards, d), end = lm_tokens_doc_start(w->shards, d + 1);
        if (lm_scorer_add_tokens(w->scorer, w->shards, at, end - at, &w->score, e))
            return e->code;
        lm_progress(&tool.sink, "evaluate", (double)end, (double)count, "tokens", NULL);
    }
    return LM_OK;
}

static lm_code measure(work *w, lm_err *e)
{
    double start = lm_now();
    const uint32_t *bytes = w->shards ? w->id_bytes : NULL;
    lm_code rc = pairs() ? lm_pairs_score(&w->eval, &w->pairs.data, virtual_tokens(w), &tool.sink,
                                          &w->score, e)
                 : w->span.sentinel   ? lm_span_scorer_new(&w->eval, &w->span, &w->spans, e)
                 : w->masks.share > 0 ? lm_scorer_masked(&w->eval, &w->masks, bytes, &w->scorer, e)
                                      : lm_scorer_new(&w->eval, w->stride, bytes, &w->scorer, e);
    if (!rc && w->scorer && !w->masks.share)
        rc = lm_scorer_virtual(w->scorer, virtual_tokens(w), scores_first(w), e);
    if (!rc && multiple_choice()) {
        rc = lm_mcq_run(w->in, w->tok, w->scorer, w->room, &tool.sink, &w->mcq, e);
        w->score.nll = w->mcq.nll;
        w->score.tokens = w->mcq.tokens;
    } else if (!rc && !pairs()) {
        rc = w->in ? score_text(w, e) : score_shards(w, e);
        if (!rc)
            rc = w->spans ? lm_span_scorer_flush(w->spans, &w->score, e)
                          : lm_scorer_flush(w->scorer, e);
    }
    w->seconds = lm_now() - start;
    if (!rc)
        lm_input_args_warn(&tool, &opt.in);
    if (rc || lm_stopping())
        return rc;
    if (!w->score.tokens && multiple_choice())
        return lm_fail(e, LM_EFORMAT, w->data, "give at least one", "no question in it");
    if (!w->score.tokens && w->spans)
        return lm_fail(e, LM_EFORMAT, w->data, "give more text, or a shorter --seq-len",
                       "nothing to evaluate: a window has %lld tokens", (long long)w->span.window);
    if (!w->score.tokens)
        return lm_fail(e, LM_EFORMAT, w->data, "give more text",
                       w->masks.share > 0 ? "nothing to evaluate: no token was masked"
                                          : "nothing to evaluate: no document has two tokens");
    if (!isfinite(w->score.nll))
        return lm_fail(e, LM_ENUMERIC, tool.argv[0], lm_advise_finite(tool.argv[0]),
                       "the loss is not a finite number");
    return LM_OK;
}

/* ---- the result ---- */

static void put_measures(const work *w, lm_jw *j, double loss)
{
    if (multiple_choice()) {
        double n = (double)w->mcq.questions;
        lm_jw_int(j, "questions", w->mcq.questions);
        lm_jw_f64(j, "accuracy", (double)w->mcq.right / n);
        lm_jw_f64(j, "accuracy_normalized", (double)w->mcq.right_norm / n);
        lm_jw_int(j, "contexts_cut", w->mcq.cut);
    }
    lm_jw_f64(j, "loss", loss);
    lm_jw_f64(j, w->masks.share > 0 ? "pseudo_perplexity" : "perplexity", exp(loss));
    if (w->masks.share > 0)
        lm_jw_f64(j, "masked_share", w->masks.share);
    else if (!multiple_choice() && !w->spans && !pairs()) {
        /* NAN is written as null: without a tokenizer the bytes are unknown */
        lm_jw_f64(j, "bits_per_byte",
                  w->score.bytes ? w->score.nll / log(2) / (double)w->score.bytes : (double)NAN);
        lm_jw_int(j, "bytes", w->score.bytes);
    }
    if (!multiple_choice())
        lm_jw_int(j, "documents", w->documents);
    lm_jw_int(j, "tokens", w->score.tokens);
}

/* For --no-json: one line for each member. */
static lm_code as_lines(lm_buf *text, lm_err *e)
{
    json_t *o = NULL, *v;
    const char *key;
    lm_code rc = lm_json_parse(text->data, text->len, "report", &o, e);
    text->len = 0;
    json_object_foreach(o, key, v)
    {
        if (rc)
            break;
        if (json_is_string(v))
            rc = lm_buf_addf(text, e, "%-20s %s\n", key, json_string_value(v));
        else if (json_is_null(v))
            rc = lm_buf_addf(text, e, "%-20s -\n", key);
        else
            rc = lm_buf_addf(text, e, "%-20s %.*g\n", key, json_is_integer(v) ? 15 : 6,
                             json_number_value(v));
    }
    json_decref(o);
    return rc;
}

static lm_code answer(const work *w, lm_out *out, lm_err *e)
{
    double loss = w->score.nll / (double)w->score.tokens;
    lm_buf text = { 0 };
    lm_jw j;
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "model", tool.argv[0]);
    lm_jw_str(&j, "data", w->data);
    lm_jw_str(&j, "task", opt.task);
    put_measures(w, &j, loss);
    lm_jw_f64(&j, "seconds", w->seconds);
    lm_jw_f64(&j, "tokens_per_second", (double)w->score.tokens / w->seconds);
    lm_jw_int(&j, "seq_len", w->seq);
    if (virtual_tokens(w))
        lm_jw_int(&j, "virtual_tokens", virtual_tokens(w));
    if (!w->masks.share && !w->spans && !pairs())
        lm_jw_int(&j, "stride", w->stride);
    lm_jw_str(&j, "dtype", opt.dtype);
    lm_jw_str(&j, "device", w->backend->name);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc && !tool.json)
        rc = as_lines(&text, e);
    if (!rc && text.data[text.len - 1] != '\n')
        rc = lm_buf_add(&text, "\n", 1, e);
    if (!rc && fwrite(text.data, 1, text.len, lm_out_file(out)) != text.len)
        rc = lm_fail(e, LM_EIO, lm_out_path(out), NULL, "cannot write");
    lm_buf_fini(&text);
    return rc;
}

/* On every rank: they end alike. */
static void judge(const work *w)
{
    const double loss = w->score.nll / (double)w->score.tokens;
    if (loss > opt.max_loss || exp(loss) > opt.max_perplexity ||
        (w->mcq.questions && (double)w->mcq.right < opt.min_accuracy * (double)w->mcq.questions))
        lm_answer_no(&tool);
}

static lm_code run(work *w, lm_err *e)
{
    lm_out *out = NULL;
    lm_code rc = lm_bundle_there(tool.argv[0], e);
    if (!rc) /* before a model is read from a pipe */
        rc = multiple_choice() ? lm_source_there(&w->data, 1, e) : lm_data_there(w->data, e);
    if (!rc)
        rc = lm_par_new(&w->par, tool.threads, e);
    if (!rc)
        rc = lm_open_model(&tool, tool.argv[0], opt.tokenizer, w->par, &w->model, e);
    if (!rc)
        rc = lm_sharing_ask(&tool, opt.mesh, opt.adapter, &w->sharing, e);
    if (!rc)
        rc = lm_open_adapter(&tool, opt.adapter, w->par, &w->model, &w->adapter, e);
    if (!rc)
        rc = choose_task(w, e);
    if (!rc)
        rc = open_data(w, e);
    if (!rc && tool.rank == 0)
        rc = lm_out_open(tool.output ? tool.output : "-", tool.force, &out, e);
    if (!rc)
        rc = open_model(w, e);
    if (!rc)
        rc = measure(w, e);
    if (!rc && !lm_stopping())
        judge(w);
    if (!rc && !lm_stopping() && out)
        rc = answer(w, out, e);
    if (!rc && !lm_stopping() && out)
        return lm_out_commit(out, e);
    lm_out_drop(out);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    work w = { 0 };

    lm_begin(&tool, argc, argv);
    if (lm_given(&tool, "min-accuracy") && !multiple_choice())
        lm_misuse(&tool, "--min-accuracy", "add --task multiple-choice",
                  "perplexity has no accuracy");
    if ((multiple_choice() || pairs()) && strcmp(opt.format, "auto") != 0)
        lm_misuse(&tool, "--format", "give the records as JSONL", "%s does not read shards",
                  opt.task);
    if (multiple_choice() && opt.in.skip_bad)
        lm_misuse(&tool, "--skip-bad", "leave it out, and correct the questions",
                  "multiple-choice is measured on all questions");
    if (opt.adapters.n > 1)
        lm_misuse(&tool, "--adapter", "merge them first, or measure one after the other",
                  "one adapter is measured, and here are several");
    opt.adapter = opt.adapters.n ? opt.adapters.v[0] : NULL;
    w.data = tool.argc > 1 ? tool.argv[1] : "-";
    if (tool.comm && (lm_stream_same(w.data, "-") || lm_stream_same(tool.argv[0], "-")))
        lm_misuse(&tool, "standard input", "name a file", "processes cannot share it");
    if (tool.argc == 1 && lm_stream_same(tool.argv[0], "-"))
        lm_misuse(&tool, "standard input", "name the data",
                  "the model is read from it, so the data cannot be");
    lm_refuse_twice(&tool, (const char *[]){ opt.tokenizer, tool.argc > 1 ? NULL : "-" }, 2);
    lm_refuse_same(&tool, tool.output, tool.argv[0]);
    lm_refuse_text(&tool, tool.output, w.data);
    if (opt.tokenizer)
        lm_refuse_same(&tool, tool.output, opt.tokenizer);
    if (opt.adapter)
        lm_refuse_same(&tool, tool.output, opt.adapter);
    if (run(&w, &err))
        lm_complain(&tool, &err);
    lm_scorer_free(w.scorer);
    lm_mlm_fini(&w.masks);
    lm_span_scorer_free(w.spans);
    lm_span_fini(&w.span);
    lm_packed_fini(&w.pairs);
    w.maker.tok = NULL; /* w.tok */
    lm_packed_maker_fini(&w.maker);
    lm_evaluator_fini(&w.eval);
    lm_loaded_fini(&w.model);
    lm_tune_use_fini(&w.adapter);
    lm_close_backend(&tool, w.backend);
    lm_tokens_close(w.shards);
    lm_input_close(w.in);
    lm_tokenizer_free(w.tok);
    lm_free(w.id_bytes);
    lm_par_free(w.par);
    return lm_end(&tool);
}
