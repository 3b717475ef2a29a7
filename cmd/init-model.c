/* SPDX-License-Identifier: Apache-2.0 */
/* init-model -- make a model with fresh weights.  See man/man1/init-model.1. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/presets.h"
#include "common/tool.h"
#include "format/fp8_source.h"
#include "format/provenance.h"
#include "model/config.h"
#include "model/mixture.h"
#include "model/preset.h"
#include "model/store.h"
#include "text/tokenizer_source.h"

static struct {
    const char *tokenizer, *dtype;
    lm_strs set;
    int64_t pad, shard, experts, chosen;
    double noise, drop;
    bool list, upcycle;
} opt = { .experts = 8, .chosen = 2 };

static const char *const dtypes[] = { "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Model"),
    LM_STR('t', "tokenizer", &opt.tokenizer, "PATH",
           "take vocabulary size and special ids from this tokenizer or model, and copy it"),
    LM_LIST('s', "set", &opt.set, "KEY=VALUE", "change a key of config.json (may be repeated)"),
    LM_COUNT(0, "pad-vocab-to", &opt.pad, "N", 1, 1e6,
             "round the vocabulary size up to a multiple of N [1]"),
    LM_ALSO("pad-vocab-size-to pad-to-multiple-of make-vocab-size-divisible-by"),
    LM_FLAG('l', "list", &opt.list, "list the presets and exit"),
    LM_GROUP("A mixture of experts from a dense model"),
    LM_FLAG(0, "upcycle", &opt.upcycle, "the model's MLP becomes every expert; a new router"),
    LM_COUNT(0, "experts", &opt.experts, "N", 1, 4096, "experts of a layer [8]"),
    LM_ALSO("num-experts num-local-experts"),
    LM_COUNT(0, "experts-per-token", &opt.chosen, "K", 1, 4096, "experts of a token [2]"),
    LM_ALSO("num-experts-per-tok top-k"),
    LM_REAL(0, "expert-noise", &opt.noise, "X", 0, 10,
            "noise on the copies, in standard deviations of each matrix [0]"),
    LM_REAL(0, "expert-drop", &opt.drop, "SHARE", 0, 1,
            "draw this share of each expert's inner columns again [0]"),
    LM_GROUP("Output (-o is a folder, .tar[.zst ...], .lmz, .safetensors or -)"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes,
              "f32 or bf16 [f32; --upcycle: the model's types]"),
    LM_ALSO("torch-dtype"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_BYTES(0, "max-shard-size", &opt.shard, "BYTES", 1, 9e18,
             "begin another file at this size [folder: 5 GB]"),
    LM_END
};

static const char *const examples[] = {
    "init-model llama-5m --tokenizer tok/tokenizer.json -o m0/",
    "init-model gpt2-124m --set n_layer=6 --set resid_pdrop=0 --dry-run",
    "init-model --upcycle m0/ --experts 4 --expert-drop 0.5 -o mixture/", NULL
};

static lm_tool tool = {
    .name = "init-model",
    .args = "PRESET|config.json|MODEL",
    .brief = "make a model folder with fresh weights from a preset or a config.json",
    .opts = options,
    .makes = LM_MAKES_MODEL,
    .use = LM_USE_HISTORY | LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON |
           LM_USE_DRY_RUN,
    .max_args = 1,
    .examples = examples,
};

/* ---- presets ---- */

static lm_presets presets;

static const char *const *dirs(void)
{
    return (const char *const *)presets.dir;
}

/* Print a line of --list. */
static lm_code list_preset(const char *name, const lm_config *c, lm_err *e)
{
    char size[32];
    lm_buf text = { 0 };
    lm_jw j;
    if (!tool.json) {
        printf("%-16s %-12s %8s parameters  %3d layers  width %5d  vocabulary %6d\n", name,
               lm_arch_name(c->arch), lm_show_count((double)lm_config_params(c), size),
               (int)c->layers, (int)c->width, (int)c->vocab);
        return LM_OK;
    }
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "preset", name);
    lm_jw_str(&j, "model_type", lm_arch_name(c->arch));
    lm_jw_int(&j, "parameters", lm_config_params(c));
    lm_jw_int(&j, "layers", c->layers);
    lm_jw_int(&j, "width", c->width);
    lm_jw_int(&j, "vocab_size", c->vocab);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc)
        printf("%s\n", text.data);
    lm_buf_fini(&text);
    return rc;
}

static lm_code list_presets(lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_preset_list(dirs(), &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        json_t *o = NULL;
        lm_config c;
        rc = lm_preset_load(dirs(), names[i], &o, NULL, e);
        if (!rc && !(rc = lm_config_read(o, names[i], &c, e))) {
            rc = list_preset(names[i], &c, e);
            lm_config_fini(&c);
        }
        json_decref(o);
    }
    lm_names_free(names, n);
    return rc;
}

/* ---- the config ---- */

typedef struct {
    json_t *tree;
    char *path;  /* path of its source */
    char *where; /* the same for messages */
    lm_tokenizer *tok;
    lm_model_source *tok_from; /* the model that contains it; NULL: a separate file or folder */
    uint64_t digest, tok_digest;
    lm_config config;
    lm_model *model;
    lm_st_plan *plan;
    lm_par *par;
    lm_model_source *dense; /* with --upcycle: its MLPs become experts */
    lm_config dense_config;
    lm_mixture_mlp *expert;
    lm_mixture_spec spec;
    lm_mixture *mixture;
    json_t *generation; /* generation_config.json of the dense model; NULL: none */
} work;

static bool was_set(const char *key)
{
    size_t n = strlen(key);
    for (int i = 0; i < opt.set.n; i++)
        if (!strncmp(opt.set.v[i], key, n) && opt.set.v[i][n] == '=')
            return true;
    return false;
}

static void put_id(work *w, const char *key, int64_t id)
{
    if (!was_set(key))
        json_object_set_new(w->tree, key, id < 0 ? json_null() : json_integer(id));
}

/* Set the keys that depend on the tokenizer. */
static lm_code fit_tokenizer(work *w, lm_err *e)
{
    int64_t need = lm_tokenizer_vocab_size(w->tok);
    if (!was_set("vocab_size"))
        json_object_set_new(w->tree, "vocab_size", json_integer(need));
    int64_t have = json_integer_value(json_object_get(w->tree, "vocab_size"));
    if (have < need)
        return lm_fail(
            e, LM_EUSAGE, "--set", "give at least as much, or leave it out to use the tokenizer's",
            "vocab_size %lld is less than the tokenizer's %lld", (long long)have, (long long)need);
    put_id(w, "bos_token_id", lm_tokenizer_bos(w->tok));
    put_id(w, "eos_token_id", lm_tokenizer_eos(w->tok));
    /* a padding id of the published tokenizer that this one does not have would be outside the embedding */
    if (lm_tokenizer_pad(w->tok) >= 0 ||
        json_integer_value(json_object_get(w->tree, "pad_token_id")) >= have)
        put_id(w, "pad_token_id", lm_tokenizer_pad(w->tok));
    return LM_OK;
}

/* True for a model in one file or standard input; the operand may also be a folder, a JSON file or
 * a name. */
static bool is_packed(const char *path)
{
    struct stat st;
    char first = '{';

    if (!strcmp(path, "-"))
        return true;
    if (stat(path, &st) || !S_ISREG(st.st_mode) || lm_text_ends(path, ".json"))
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, &first, 1);
    if (fd >= 0)
        close(fd);
    return n == 1 && !strchr("{ \t\r\n", first);
}

/* Open it and read a stream to its end, which keeps its small files in memory. */
static lm_code open_packed(const char *path, lm_model_source **m, lm_err *e)
{
    const lm_bundle_opts how = lm_tool_bundle(&tool, NULL);
    lm_code rc = lm_model_source_open(path, &how, m, e);

    return rc ? rc : lm_model_source_finish(*m, e);
}

/* The dense model, and the config of the mixture. */
static lm_code load_dense(work *w, lm_err *e)
{
    const lm_bundle_opts how = lm_tool_bundle(&tool, NULL);
    lm_code rc = lm_fp8_source_open(tool.argv[0], &how, &w->dense, e);
    const json_t *tree = rc ? NULL : lm_model_source_config(w->dense);

    if (!rc && !tree)
        rc = lm_fail(e, LM_EUSAGE, lm_model_source_path(w->dense),
                     "give a model with its config.json", "a lone .safetensors has no config.json");
    if (!rc)
        rc = lm_strdup(&w->path, lm_model_source_path(w->dense), e);
    if (!rc)
        rc = lm_config_read(tree, w->path, &w->dense_config, e);
    if (!rc)
        rc = lm_mixture_config(tree, w->path, opt.experts, opt.chosen, &w->tree, e);
    if (!rc)
        rc = lm_model_source_digest(w->dense, &w->digest, e);
    if (!rc)
        rc = lm_model_source_spool(w->dense, e);
    return rc ? rc : lm_model_source_json(w->dense, "generation_config.json", &w->generation, e);
}

static lm_code load_config(work *w, lm_err *e)
{
    lm_model_source *m = NULL;

    if (opt.upcycle)
        return load_dense(w, e);
    if (!is_packed(tool.argv[0])) {
        lm_code rc = lm_preset_load(dirs(), tool.argv[0], &w->tree, &w->path, e);
        return rc || lm_stream_is(w->path) ? rc : lm_digest_path(w->path, &w->digest, e);
    }
    lm_code rc = open_packed(tool.argv[0], &m, e);
    if (!rc && !lm_model_source_config(m))
        rc = lm_fail(e, LM_EUSAGE, lm_model_source_path(m), "give a model with its config.json",
                     "a lone .safetensors has no config.json");
    if (!rc && !(w->tree = json_deep_copy(lm_model_source_config(m))))
        rc = lm_fail(e, LM_ELIMIT, "config.json", NULL, "out of memory");
    if (!rc)
        rc = lm_strdup(&w->path, lm_model_source_path(m), e);
    if (!rc)
        rc = lm_model_source_digest(m, &w->digest, e);
    lm_model_source_close(m);
    return rc;
}

static lm_code load_tokenizer(work *w, lm_err *e)
{
    if (!is_packed(opt.tokenizer)) {
        /* it is read twice: for its properties, and to be copied */
        if (lm_stream_is(opt.tokenizer))
            return lm_fail(e, LM_EUSAGE, opt.tokenizer, "write it to a file first, and name that",
                           "a tokenizer cannot be read from a pipe");
        lm_code rc = lm_tokenizer_load(opt.tokenizer, &w->tok, e);
        return rc ? rc : lm_digest_path(opt.tokenizer, &w->tok_digest, e);
    }
    lm_code rc = open_packed(opt.tokenizer, &w->tok_from, e);
    if (!rc)
        rc = lm_tokenizer_of(w->tok_from, &w->tok, e);
    if (!rc && !w->tok)
        rc = lm_fail(e, LM_EUSAGE, lm_model_source_path(w->tok_from), "name another",
                     "it has no tokenizer");
    return rc ? rc : lm_model_source_digest(w->tok_from, &w->tok_digest, e);
}

/* The type of the weights; NONE: each has its own. */
static lm_dtype dtype(void)
{
    return opt.dtype     ? (opt.dtype[0] == 'b' ? LM_DTYPE_BF16 : LM_DTYPE_F32)
           : opt.upcycle ? LM_DTYPE_NONE
                         : LM_DTYPE_F32;
}

static lm_code make_config(work *w, lm_err *e)
{
    lm_code rc = load_config(w, e);
    for (int i = 0; i < opt.set.n && !rc; i++)
        rc = lm_config_set(w->tree, opt.set.v[i], e);
    if (!rc && opt.tokenizer && !(rc = load_tokenizer(w, e)))
        rc = fit_tokenizer(w, e);
    if (rc)
        return rc;
    int64_t vocab = json_integer_value(json_object_get(w->tree, "vocab_size"));
    if (opt.pad > 1 && vocab > 0 && vocab < (int64_t)1 << 40)
        json_object_set_new(w->tree, "vocab_size",
                            json_integer((vocab + opt.pad - 1) / opt.pad * opt.pad));
    if (opt.dtype || !opt.upcycle) {
        json_object_del(w->tree, "dtype");
        json_object_set_new(w->tree, "torch_dtype",
                            json_string(dtype() == LM_DTYPE_BF16 ? "bfloat16" : "float32"));
    }
    rc = lm_asprintf(&w->where, e, "%s%s",
                     lm_path_exists(tool.argv[0]) || is_packed(tool.argv[0])
                         ? w->path
                         : lm_path_base(tool.argv[0]),
                     opt.set.n ? " with --set" : "");
    return rc ? rc : lm_config_read(w->tree, w->where, &w->config, e);
}

/* ---- the folder ---- */

/* Every expert is a copy of the dense model's MLP. */
static lm_code plan_mixture(work *w, lm_err *e)
{
    const lm_mixture_mlp copy = {
        .src = w->dense, .noise_share = opt.noise, .drop = opt.drop, .down = 1
    };
    const char *seq = lm_model_source_meta(w->dense, LM_SEQ_KEY);
    size_t experts = 0; /* some layers may have none */
    for (int64_t l = 0; l < w->config.layers; l++)
        if ((size_t)w->config.layer[l].moe.experts > experts)
            experts = (size_t)w->config.layer[l].moe.experts;
    lm_code rc = lm_alloc_n(&w->expert, experts, sizeof *w->expert, "experts", e);

    for (size_t i = 0; !rc && i < experts; i++)
        w->expert[i] = copy;
    w->spec = (lm_mixture_spec){ .config = &w->config,
                                 .dense = &w->dense_config,
                                 .base = w->dense,
                                 .expert = w->expert,
                                 .shared = { .src = w->dense, .down = 1 },
                                 .halves = true,
                                 .gate_std = w->config.init_std,
                                 .seed = (uint64_t)tool.seed };
    if (!rc)
        rc = lm_mixture_new(&w->spec, &w->mixture, e);
    if (!rc && seq)
        rc = lm_st_plan_meta(w->plan, LM_SEQ_KEY, seq, e);
    return rc ? rc : lm_mixture_plan(w->mixture, dtype(), w->plan, e);
}

static lm_code plan_fresh(work *w, lm_err *e)
{
    const lm_build build = { .mode = LM_MODE_EVAL,
                             .batch = 1,
                             .seq = 1,
                             .precision = { .low = LM_DTYPE_F32 },
                             .ahead = LM_AHEAD_KEPT,
                             .pairs = LM_PAIRS_KEPT };
    lm_code rc = lm_model_build(&w->config, &build, &w->model, e);
    return rc ? rc : lm_model_plan(w->model, LM_TENSORS_ALL, dtype(), w->plan, e);
}

static lm_code make_plan(work *w, lm_err *e)
{
    const lm_history_input inputs[2] = { { .name = lm_path_base(w->path), .digest = w->digest },
                                         { .name = opt.tokenizer, .digest = w->tok_digest } };
    lm_history_step step = lm_tool_step(&tool);
    lm_code rc = lm_st_plan_new(&w->plan, e);
    if (!rc)
        rc = opt.upcycle ? plan_mixture(w, e) : plan_fresh(w, e);
    step.inputs = inputs;
    step.n_inputs = opt.tokenizer ? 2 : 1;
    if (!rc)
        rc = lm_history_plan(w->dense ? lm_model_source_meta(w->dense, LM_HISTORY_KEY) : NULL,
                             &step, w->plan, e);
    return rc;
}

/* A lone SentencePiece file, which becomes a tokenizer.json. */
static bool is_piece_file(const work *w)
{
    return w->tok && !w->tok_from && !lm_path_is_dir(opt.tokenizer) &&
           lm_text_ends(opt.tokenizer, ".model");
}

/* A tokenizer_config.json beside a lone tokenizer.json is copied too. */
static lm_code put_tokenizer_config(const work *w, lm_folder *f, lm_err *e)
{
    size_t len = 0;
    lm_code rc = LM_OK;
    if (!w->tok || w->tok_from || lm_path_is_dir(opt.tokenizer))
        return LM_OK;
    const char *text = lm_tokenizer_json(w->tok, &len);
    if (is_piece_file(w))
        rc = lm_folder_put(f, "tokenizer.json", text, len, e);
    text = lm_tokenizer_config_json(w->tok, &len);
    return rc || !text ? rc : lm_folder_put(f, "tokenizer_config.json", text, len, e);
}

static lm_code write_model(work *w, lm_err *e)
{
    lm_bundle_opts how = lm_tool_bundle(&tool, NULL);
    const lm_folder_spec spec = { .config = w->tree,
                                  .tokenizer =
                                      w->tok_from || is_piece_file(w) ? NULL : opt.tokenizer,
                                  .tokenizer_from = w->dense ? w->dense : w->tok_from,
                                  .generation_config = w->generation,
                                  .plan = w->plan,
                                  .max_shard_bytes = (uint64_t)opt.shard };
    lm_folder *f = NULL;
    lm_code rc = lm_par_new(&w->par, tool.threads, e);
    how.par = w->spec.par = w->par;
    if (!rc)
        rc = lm_folder_create(tool.output, tool.force, &how, &spec, &f, e);
    if (!rc)
        rc = put_tokenizer_config(w, f, e);
    if (!rc)
        rc = w->mixture ? lm_mixture_write(w->mixture, f, &tool.sink, e)
                        : lm_model_draw(w->model, (uint64_t)tool.seed, w->par, f, &tool.sink, e);
    if (!rc && !lm_stopping())
        return lm_folder_commit(f, e);
    lm_folder_drop(f);
    return rc;
}

static const char *shown_dtype(void)
{
    return opt.dtype ? opt.dtype : opt.upcycle ? "as in the model" : "f32";
}

static lm_code report(const work *w, lm_err *e)
{
    const lm_config *c = &w->config;
    char count[32], bytes[32], size_of[32], further[96] = "";
    int64_t params = lm_config_params(c), ahead = lm_config_ahead_params(c);
    uint64_t size = lm_st_plan_data_bytes(w->plan);
    lm_buf text = { 0 };
    lm_jw j;
    if (!tool.json) {
        lm_show_count((double)params, count);
        lm_show_bytes((double)size, bytes);
        if (ahead)
            snprintf(further, sizeof further, "further    %lld (%s) in %lld module%s\n",
                     (long long)ahead, lm_show_count((double)ahead, size_of), (long long)c->ahead,
                     lm_plural((uint64_t)c->ahead));
        if (tool.dry_run)
            printf("model      %s\nparameters %lld (%s)\n%stensors    %zu\nvocabulary %lld\n"
                   "bytes      %llu (%s, %s)\n",
                   lm_arch_name(c->arch), (long long)params, count, further,
                   lm_st_plan_count(w->plan), (long long)c->vocab, (unsigned long long)size, bytes,
                   shown_dtype());
        else
            lm_say(&tool, LM_LOG_NOTICE, "%s: %s, %s parameters, vocabulary %lld, %s",
                   strcmp(tool.output, "-") ? tool.output : "standard output",
                   lm_arch_name(c->arch), count, (long long)c->vocab, bytes);
        return LM_OK;
    }
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "model_type", lm_arch_name(c->arch));
    lm_jw_int(&j, "parameters", params);
    if (ahead)
        lm_jw_int(&j, "mtp_parameters", ahead);
    lm_jw_int(&j, "tensors", (int64_t)lm_st_plan_count(w->plan));
    lm_jw_int(&j, "vocab_size", c->vocab);
    lm_jw_str(&j, "dtype", shown_dtype());
    lm_jw_int(&j, "bytes", (int64_t)size);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc)
        printf("%s\n", text.data);
    lm_buf_fini(&text);
    return rc;
}

static lm_code init(work *w, lm_err *e)
{
    double start = lm_now();
    lm_code rc = make_config(w, e);
    if (!rc)
        rc = make_plan(w, e);
    if (!rc && !tool.dry_run)
        rc = write_model(w, e);
    if (!rc && !lm_stopping())
        rc = report(w, e);
    lm_say(&tool, LM_LOG_INFO, "%.2f s", lm_now() - start);
    return rc;
}

static const char *const of_upcycling[] = { "--experts", "--experts-per-token", "--expert-noise",
                                            "--expert-drop" };

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    work w = { 0 };
    lm_code rc;

    lm_begin(&tool, argc, argv);
    if (!opt.list && tool.argc != 1)
        lm_misuse(&tool, "operand", "name one; --list shows the presets",
                  "a preset or a config.json is needed");
    if (!opt.list && !tool.dry_run && !tool.output)
        lm_misuse(&tool, "-o", "name the folder with -o FOLDER", "an output folder is needed");
    if (!opt.list && !tool.dry_run && tool.json && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--json", "name a file or folder with -o",
                  "standard output receives the model already");
    if (opt.upcycle && (opt.tokenizer || opt.pad > 1))
        lm_misuse(&tool, opt.tokenizer ? "--tokenizer" : "--pad-vocab-to", "leave it out",
                  "--upcycle keeps the vocabulary of the model");
    for (size_t i = 0; !opt.upcycle && i < sizeof of_upcycling / sizeof *of_upcycling; i++)
        if (lm_given(&tool, of_upcycling[i] + 2))
            lm_misuse(&tool, of_upcycling[i],
                      "add --upcycle, or set the key of the config with --set",
                      "there is no dense model whose MLP is copied");
    if (opt.upcycle && opt.chosen > opt.experts)
        lm_misuse(&tool, "--experts-per-token", "give at most as many as --experts",
                  "a token cannot go to %" PRId64 " of %" PRId64 " experts", (int64_t)opt.chosen,
                  (int64_t)opt.experts);
    lm_refuse_twice(&tool, &opt.tokenizer, 1);
    if (tool.argc == 1) {
        const char *output = tool.dry_run ? NULL : tool.output;
        lm_refuse_same(&tool, output, tool.argv[0]);
        if (opt.tokenizer)
            lm_refuse_same(&tool, output, opt.tokenizer);
    }
    rc = lm_presets_find(&presets, &err);
    if (!rc)
        rc = opt.list ? list_presets(&err) : init(&w, &err);
    if (rc)
        lm_complain(&tool, &err);
    lm_par_free(w.par);
    lm_st_plan_free(w.plan);
    lm_model_free(w.model);
    lm_config_fini(&w.config);
    lm_tokenizer_free(w.tok);
    lm_mixture_free(w.mixture);
    json_decref(w.generation);
    lm_free(w.expert);
    lm_config_fini(&w.dense_config);
    lm_model_source_close(w.dense);
    lm_model_source_close(w.tok_from);
    json_decref(w.tree);
    lm_free(w.path);
    lm_free(w.where);
    lm_presets_fini(&presets);
    return lm_end(&tool);
}
