/* shard-data -- text to shuffled, split token shards.  See man/man1/shard-data.1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/input_opts.h"
#include "common/tool.h"
#include "format/provenance.h"
#include "text/shard_run.h"

static struct {
    lm_input_args in;
    const char *tokenizer, *format, *eos_token;
    lm_strs weight;
    bool eos, special, shuffle;
    double val_fraction, max_epochs;
    int64_t tokens, shard_tokens, eos_id, vocab;
} opt = { .in = LM_INPUT_ARGS_DEFAULT,
          .format = "megatron",
          .eos = true,
          .shuffle = true,
          .max_epochs = 4,
          .eos_id = -1 };

static const char *const formats[] = { "megatron", "llmc", "nanogpt", NULL };

static const lm_opt options[] = {
    LM_GROUP("Tokens"),
    LM_STR('t', "tokenizer", &opt.tokenizer, "PATH",
           "tokenizer.json, or a folder that holds one; without it the inputs are shards"),
    LM_FLAG(0, "eos", &opt.eos, "set an end-of-text id between documents [yes]"),
    LM_STR(0, "eos-token", &opt.eos_token, "TEXT", "the token for that [the tokenizer's]"),
    LM_COUNT(0, "eos-id", &opt.eos_id, "ID", 0, 2e9, "its id, where shards are read"),
    LM_FLAG(0, "add-special", &opt.special, "add what the post-processor adds to a text [no]"),
    LM_COUNT(0, "vocab-size", &opt.vocab, "N", 1, 2e9,
             "ids are below N [the tokenizer's; of shards the largest id + 1]"),
    LM_GROUP("Selection"),
    LM_REAL(0, "val-fraction", &opt.val_fraction, "X", 0, 0.999,
            "share of the documents that is held out as 'val' [0]"),
    LM_FLAG(0, "shuffle", &opt.shuffle, "write documents in a random order [yes]"),
    LM_LIST('w', "weight", &opt.weight, "X",
            "share of this input, in the order of the inputs; or write FILE:X"),
    LM_COUNT('n', "tokens", &opt.tokens, "N", 1, 9e15, "write about N ids into 'train' [all]"),
    LM_REAL(0, "max-epochs", &opt.max_epochs, "X", 1, 1e6,
            "with --tokens: go through an input at most so often [4]"),
    LM_GROUP("Output (-o is a folder)"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats, "megatron, llmc or nanogpt [megatron]"),
    LM_COUNT(0, "shard-tokens", &opt.shard_tokens, "N", 1, 2147483647,
             "llmc, nanogpt: ids in a shard [one shard]"),
    LM_GROUP("Input"),
    LM_INPUT_OPTIONS(opt.in),
    LM_END
};

static const char *const examples[] = {
    "shard-data --tokenizer tok/tokenizer.json --val-fraction 0.01 -o data/ clean.jsonl",
    "shard-data --format llmc --eos-id 50256 -o llmc/ data/train", NULL
};

static lm_tool tool = {
    .name = "shard-data",
    .args = "FILE[:WEIGHT] ...",
    .brief = "turn text into shuffled, indexed token shards",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON,
    .min_args = 1,
    .max_args = -1,
    .examples = examples,
};

typedef struct {
    char **path;    /* operands without their weights */
    double *weight; /* NULL when none was given */
    lm_par *par;
    lm_tokenizer *tok;
    lm_input *in;
    lm_tokens **shards; /* inputs that are token datasets */
    lm_input_opts in_opts;
    lm_tokens_kind kind;
    int64_t vocab, eos;
    bool made_folder;
    lm_out *meta;
    lm_shard_job job;
    lm_shard_stats st;
    int64_t *taken; /* documents of 'train' by source */
    int64_t written[LM_SPLITS], docs[LM_SPLITS];
} work;

static const char *const split_names[LM_SPLITS] = { "train", "val" };

/* ---- operands ---- */

static double weight_of(const char *where, const char *s)
{
    double v;
    if (!lm_parse_double(s, &v) || !(v >= 0) || v > 1e15)
        lm_misuse(&tool, where, "give a number such as 0.7", "'%s' is no weight", s);
    return v;
}

/* "a.jsonl:0.7": a weight, unless a file has just this name. */
static void read_operands(work *w, lm_err *e)
{
    if (lm_alloc_n(&w->path, (size_t)tool.argc, sizeof *w->path, "paths", e) ||
        lm_alloc_n(&w->weight, (size_t)tool.argc, sizeof *w->weight, "weights", e) ||
        lm_alloc_n(&w->taken, (size_t)tool.argc, sizeof *w->taken, "counts", e))
        return;
    int given = 0;
    for (int i = 0; i < tool.argc; i++) {
        double ignored;
        if (lm_strdup(&w->path[i], tool.argv[i], e))
            return;
        char *colon = strrchr(w->path[i], ':');
        if (!colon || lm_path_exists(tool.argv[i]) || !lm_parse_double(colon + 1, &ignored))
            continue;
        w->weight[i] = weight_of(tool.argv[i], colon + 1);
        *colon = 0;
        given++;
    }
    if (opt.weight.n && (given || opt.weight.n != tool.argc))
        lm_misuse(&tool, "--weight", "give one weight for each input", "%d weights for %d inputs",
                  opt.weight.n + given, tool.argc);
    for (int i = 0; i < opt.weight.n; i++, given++)
        w->weight[i] = weight_of("--weight", opt.weight.v[i]);
    if (given && given != tool.argc)
        lm_misuse(&tool, "weights", "give one weight for each input", "%d weights for %d inputs",
                  given, tool.argc);
    if (!given) {
        lm_free(w->weight);
        w->weight = NULL;
    }
}

/* ---- inputs ---- */

static lm_code find_eos(work *w, lm_err *e)
{
    w->eos = -1;
    if (!opt.eos)
        return LM_OK;
    if (opt.eos_token)
        w->eos = lm_tokenizer_id(w->tok, opt.eos_token, strlen(opt.eos_token));
    else
        w->eos = opt.eos_id >= 0 ? opt.eos_id : lm_tokenizer_eos(w->tok);
    if (w->eos >= 0)
        return LM_OK;
    if (opt.eos_token)
        return lm_fail(e, LM_EUSAGE, "--eos-token", "choose one that is in it",
                       "the tokenizer has no token '%s'", opt.eos_token);
    return lm_fail(e, LM_EUSAGE, opt.tokenizer, "name one with --eos-token, or give --no-eos",
                   "the tokenizer has no end-of-text token");
}

static lm_code open_text(work *w, lm_err *e)
{
    w->in_opts = lm_input_args_read(&opt.in);
    lm_code rc = lm_tokenizer_load(opt.tokenizer, &w->tok, e);
    if (!rc)
        rc = find_eos(w, e);
    if (!rc)
        rc = lm_input_open(&w->in_opts, (const char *const *)w->path, tool.argc, &w->in, e);
    if (rc)
        return rc;
    w->vocab = lm_tokenizer_vocab_size(w->tok);
    if (opt.vocab && opt.vocab < w->vocab)
        return lm_fail(e, LM_EUSAGE, "--vocab-size", "give at least as much",
                       "%lld is less than the tokenizer's %lld", (long long)opt.vocab,
                       (long long)w->vocab);
    return LM_OK;
}

static lm_code open_shards(work *w, lm_err *e)
{
    lm_code rc = lm_alloc_n(&w->shards, (size_t)tool.argc, sizeof *w->shards, "shards", e);
    w->eos = opt.eos ? opt.eos_id : -1;
    for (int i = 0; i < tool.argc && !rc; i++) {
        rc = lm_tokens_open(w->path[i], LM_TOKENS_AUTO, opt.eos_id, &w->shards[i], e);
        if (!rc)
            rc = lm_tokens_index(w->shards[i], w->par, e);
        if (rc)
            break;
        int64_t top = (int64_t)lm_tokens_max(w->shards[i], w->par) + 1;
        if (opt.vocab)
            rc = lm_tokens_check(w->shards[i], opt.vocab, w->par, e);
        w->vocab = top > w->vocab ? top : w->vocab;
        if (opt.eos && w->eos < 0)
            w->eos = lm_tokens_eot(w->shards[i]);
    }
    if (rc)
        return rc;
    if (w->vocab > UINT32_MAX)
        return lm_fail(e, LM_EFORMAT, w->path[0], "shard the text again",
                       "it holds ids that are negative or beyond 32 bits");
    if (w->eos < 0 && opt.eos && w->kind != LM_TOKENS_MEGATRON)
        return lm_fail(e, LM_EUSAGE, "--eos-id", "give the id, or --no-eos",
                       "%s shards need an id between documents, the input does not tell it",
                       opt.format);
    if (w->eos >= w->vocab)
        w->vocab = w->eos + 1;
    return LM_OK;
}

/* ---- outputs ---- */

static lm_code target(const char *name, lm_buf *out, lm_err *e)
{
    size_t n = strlen(tool.output);
    out->len = 0;
    return lm_buf_addf(out, e, "%s%s%s", tool.output, n && tool.output[n - 1] == '/' ? "" : "/",
                       name);
}

static lm_code open_outputs(work *w, lm_err *e)
{
    lm_buf path = { 0 };
    lm_code rc = LM_OK;
    w->made_folder = !lm_path_exists(tool.output);
    if (w->made_folder)
        rc = lm_mkdir_p(tool.output, e);
    for (int s = 0; s < LM_SPLITS && !rc && !tool.force; s++) {
        rc = target(split_names[s], &path, e);
        if (!rc)
            rc = lm_tokens_clear(path.data, false, e);
    }
    if (!rc)
        rc = target("meta.json", &path, e);
    if (!rc)
        rc = lm_out_open(path.data, tool.force, &w->meta, e);
    for (int s = 0; s < LM_SPLITS && !rc; s++)
        if (s == LM_SPLIT_TRAIN || opt.val_fraction > 0)
            rc = lm_tokens_pool_new(tool.output, tool.argc, w->vocab, &w->job.pool[s], e);
    lm_buf_fini(&path);
    return rc;
}

/* A pool to its dataset; the writer waits in *out to be committed with the others. */
static lm_code write_split(work *w, int s, lm_tokens_writer **out, lm_err *e)
{
    const lm_tokens_writer_opts o = {
        .kind = w->kind, .vocab = w->vocab, .shard_tokens = opt.shard_tokens, .force = tool.force
    };
    bool train = s == LM_SPLIT_TRAIN;
    const lm_tokens_mix mix = { .shuffle = opt.shuffle,
                                .seed = (uint64_t)tool.seed,
                                .weight = train ? w->weight : NULL,
                                .tokens = train ? opt.tokens : 0,
                                .max_epochs = opt.tokens ? opt.max_epochs : 1 };
    lm_buf path = { 0 };
    lm_code rc = target(split_names[s], &path, e);
    if (!rc)
        rc = lm_tokens_create(path.data, &o, out, e);
    if (!rc)
        rc = lm_tokens_pool_write(w->job.pool[s], &mix, *out, train ? w->taken : NULL, &tool.sink,
                                  e);
    if (!rc) {
        w->written[s] = lm_tokens_written(*out);
        w->docs[s] = lm_tokens_written_docs(*out);
    }
    lm_buf_fini(&path);
    return rc;
}

/* ---- meta.json ---- */

static lm_code digest_input(const work *w, int i, uint64_t *out, lm_err *e)
{
    if (w->in) {
        *out = lm_input_digest(w->in, i);
        return LM_OK;
    }
    lm_buf path = { 0 };
    lm_code rc = lm_buf_addf(&path, e, "%s", w->path[i]);
    if (!rc && (!lm_path_exists(path.data) || lm_path_is_dir(path.data)))
        rc = lm_buf_addf(&path, e, ".bin");
    *out = 0; /* numbered shards: not taken */
    if (!rc && lm_path_exists(path.data))
        rc = lm_digest_path(path.data, out, e);
    lm_buf_fini(&path);
    return rc;
}

static lm_code put_history(const work *w, lm_jw *j, lm_err *e)
{
    lm_history_input *inputs;
    lm_buf chain = { 0 };
    json_t *tree = NULL;
    size_t n = (size_t)tool.argc;
    lm_code rc = lm_alloc_n(&inputs, n + 1, sizeof *inputs, "inputs", e);
    for (int i = 0; i < tool.argc && !rc; i++) {
        inputs[i].name = w->path[i];
        rc = digest_input(w, i, &inputs[i].digest, e);
    }
    if (!rc && w->tok) {
        inputs[n].name = opt.tokenizer;
        rc = lm_digest_path(opt.tokenizer, &inputs[n++].digest, e);
    }
    const lm_history_step step = { .tool = tool.name,
                                   .version = LM_VERSION,
                                   .argv = tool.full_argv,
                                   .argc = tool.full_argc,
                                   .inputs = inputs,
                                   .n_inputs = n,
                                   .hide_paths = getenv("SOURCE_DATE_EPOCH") != NULL };
    if (!rc)
        rc = lm_history_add(NULL, &step, &chain, e);
    if (!rc)
        rc = lm_json_parse(chain.data, chain.len, "history", &tree, e);
    if (!rc)
        lm_jw_json(j, "history", tree);
    json_decref(tree);
    lm_buf_fini(&chain);
    lm_free(inputs);
    return rc;
}

static void put_sources(const work *w, lm_jw *j)
{
    lm_jw_arr(j, "sources");
    for (int i = 0; i < tool.argc; i++) {
        lm_jw_obj(j, NULL);
        lm_jw_str(j, "name", w->path[i]);
        if (w->weight)
            lm_jw_f64(j, "weight", w->weight[i]);
        lm_jw_int(j, "documents", lm_tokens_pool_docs(w->job.pool[LM_SPLIT_TRAIN], i));
        lm_jw_int(j, "tokens", lm_tokens_pool_tokens(w->job.pool[LM_SPLIT_TRAIN], i));
        lm_jw_int(j, "documents_taken", w->taken[i]);
        lm_jw_close_obj(j);
    }
    lm_jw_close_arr(j);
}

static lm_code make_meta(const work *w, int indent, lm_buf *out, lm_err *e)
{
    lm_jw j;
    lm_jw_begin(&j, out, indent, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "format", opt.format);
    lm_jw_int(&j, "vocab_size", w->vocab);
    if (w->eos >= 0)
        lm_jw_int(&j, "eos_token_id", w->eos);
    else
        lm_jw_str(&j, "eos_token_id", NULL);
    for (int s = 0; s < LM_SPLITS; s++) {
        lm_jw_obj(&j, split_names[s]);
        lm_jw_int(&j, "documents", w->docs[s]);
        lm_jw_int(&j, "tokens", w->written[s]);
        lm_jw_close_obj(&j);
    }
    lm_jw_f64(&j, "val_fraction", opt.val_fraction);
    lm_jw_bool(&j, "shuffle", opt.shuffle);
    lm_jw_int(&j, "seed", tool.seed);
    lm_jw_int(&j, "bytes", w->st.bytes);
    lm_jw_int(&j, "skipped", w->st.skipped);
    put_sources(w, &j);
    lm_code rc = put_history(w, &j, e);
    lm_jw_close_obj(&j);
    lm_code end = lm_jw_end(&j);
    if (!rc && !end && (!out->len || out->data[out->len - 1] != '\n'))
        rc = lm_buf_add(out, "\n", 1, e);
    return rc ? rc : end;
}

/* ---- the work ---- */

static lm_code fill_pools(work *w, lm_err *e)
{
    lm_code rc = LM_OK;
    w->job.val_fraction = opt.val_fraction;
    w->job.eos = w->eos;
    w->job.eos_first = w->kind == LM_TOKENS_LLMC;
    w->job.add_special = opt.special;
    w->job.sink = &tool.sink;
    if (w->in)
        rc = lm_shard_text(&w->job, w->in, &w->in_opts, w->tok, w->par, &w->st, e);
    for (int i = 0; w->shards && i < tool.argc && !rc; i++)
        rc = lm_shard_tokens(&w->job, w->shards[i], i, &w->st, e);
    if (rc || lm_stopping())
        return rc;
    if (!w->st.documents)
        return lm_fail(e, LM_EFORMAT, tool.argc == 1 ? w->path[0] : "inputs",
                       "give at least one document", "no document in it");
    if (!lm_tokens_pool_tokens(w->job.pool[LM_SPLIT_TRAIN], -1))
        return lm_fail(e, LM_EUSAGE, "--val-fraction", "hold out less",
                       "all %lld documents fell into the validation split",
                       (long long)w->st.documents);
    return LM_OK;
}

static lm_code publish(work *w, lm_tokens_writer *writer[LM_SPLITS], lm_err *e)
{
    lm_buf text = { 0 }, path = { 0 };
    lm_code rc = make_meta(w, 2, &text, e);
    if (!rc)
        rc = lm_write_all(lm_out_fd(w->meta), text.data, text.len, lm_out_path(w->meta), e);
    for (int s = LM_SPLITS - 1; s >= 0 && !rc; s--) {
        lm_tokens_writer *one = writer[s];
        writer[s] = NULL;
        if (one)
            rc = lm_tokens_commit(one, e);
        else if (!(rc = target(split_names[s], &path, e)))
            rc = lm_tokens_clear(path.data, tool.force, e);
    }
    if (!rc) {
        lm_out *meta = w->meta;
        w->meta = NULL;
        rc = lm_out_commit(meta, e);
    }
    text.len = 0;
    if (!rc && tool.json && !(rc = make_meta(w, 0, &text, e)))
        fwrite(text.data, 1, text.len, stdout);
    lm_buf_fini(&text);
    lm_buf_fini(&path);
    return rc;
}

static void say_summary(const work *w, double seconds)
{
    char a[32], b[32], c[32];
    lm_say(&tool, LM_LOG_WARN,
           "%s tokens in %lld documents to %s, %s tokens in %lld documents held out",
           lm_show_count((double)w->written[0], a), (long long)w->docs[0], tool.output,
           lm_show_count((double)w->written[1], b), (long long)w->docs[1]);
    if (w->st.skipped)
        lm_say(&tool, LM_LOG_WARN, "%lld documents skipped for invalid UTF-8",
               (long long)w->st.skipped);
    if (opt.val_fraction > 0 && !w->docs[LM_SPLIT_VAL])
        lm_say(&tool, LM_LOG_WARN,
               "none of %lld documents fell into the validation split, 'val' is not written",
               (long long)w->st.documents);
    lm_say(&tool, LM_LOG_INFO, "%.2f s, %s tokens/s, %s/s of text", seconds,
           lm_show_count((double)(w->written[0] + w->written[1]) / seconds, a),
           lm_show_bytes((double)w->st.bytes / seconds, c));
}

static lm_code shard(work *w, lm_err *e)
{
    lm_tokens_writer *writer[LM_SPLITS] = { 0 };
    double start = lm_now();
    lm_code rc = opt.tokenizer ? open_text(w, e) : open_shards(w, e);
    if (!rc && opt.vocab)
        w->vocab = opt.vocab;
    if (!rc && w->kind == LM_TOKENS_NANOGPT && w->vocab > 65536)
        rc =
            lm_fail(e, LM_EUSAGE, "--format", "choose megatron or llmc",
                    "nanoGPT shards hold 16-bit ids, the vocabulary has %lld", (long long)w->vocab);
    if (!rc)
        rc = open_outputs(w, e);
    if (!rc)
        rc = fill_pools(w, e);
    for (int s = 0; s < LM_SPLITS && !rc && !lm_stopping(); s++)
        if (w->job.pool[s] && lm_tokens_pool_docs(w->job.pool[s], -1))
            rc = write_split(w, s, &writer[s], e);
    if (!rc && !lm_stopping()) {
        rc = publish(w, writer, e);
        w->made_folder = false;
        if (!rc)
            say_summary(w, lm_now() - start);
    }
    for (int s = 0; s < LM_SPLITS; s++)
        lm_tokens_drop(writer[s]);
    return rc;
}

static void close_work(work *w)
{
    lm_out_drop(w->meta);
    for (int s = 0; s < LM_SPLITS; s++)
        lm_tokens_pool_free(w->job.pool[s]);
    for (int i = 0; w->shards && i < tool.argc; i++)
        lm_tokens_close(w->shards[i]);
    if (w->made_folder)
        rmdir(tool.output); /* nothing came of it */
    lm_free(w->shards);
    lm_input_close(w->in);
    lm_tokenizer_free(w->tok);
    for (int i = 0; w->path && i < tool.argc; i++)
        lm_free(w->path[i]);
    lm_free(w->path);
    lm_free(w->weight);
    lm_free(w->taken);
    lm_par_free(w->par);
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    work w = { 0 };

    lm_begin(&tool, argc, argv);
    if (!tool.output || strcmp(tool.output, "-") == 0)
        lm_misuse(&tool, "-o", "name the folder with -o FOLDER", "an output folder is needed");
    for (int k = 0; formats[k]; k++)
        if (strcmp(opt.format, formats[k]) == 0)
            w.kind = (lm_tokens_kind)(LM_TOKENS_MEGATRON + k);
    read_operands(&w, &err);
    if (err.code || lm_par_new(&w.par, tool.threads, &err) || shard(&w, &err))
        lm_complain(&tool, &err);
    close_work(&w);
    return lm_end(&tool);
}
