/* SPDX-License-Identifier: Apache-2.0 */
/* merge-models -- merge several models into one.  See man/man1/merge-models.1. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/device.h"
#include "common/tool.h"
#include "compress/pack.h"
#include "merge/engine.h"
#include "merge/mixture_run.h"
#include "merge/plan.h"
#include "merge/recipe.h"
#include "merge/report.h"
#include "merge/search_weights.h"
#include "train/data.h"

static struct {
    const char *method, *base, *dtype;
    /* parameters, as written */
    const char *weight, *density, *gamma, *epsilon, *scale, *rescale, *lambda, *t, *eps, *max_iter,
        *tol, *select_topk, *sign_election, *alpha, *r, *fisher_floor;
    bool normalize, nuslerp_flatten, nuslerp_row_wise, normalize_weights, filter_wise, clamp_t;
    int64_t shard;
    bool list, print_plan, digest;
    const char *delta;
    /* different tokenizers */
    const char *tokenizer;
    int64_t pad_to;
    /* the search for weights */
    const char *search, *objective, *val_dtype, *grid, *bounds, *resume;
    lm_strs val;
    int64_t val_tokens, seq, stride, max_candidates, popsize;
    double sigma;
    bool check_tokenizer;
} opt = {
    .shard = LM_MAX_SHARD_BYTES, .objective = "tokens", .val_dtype = "f32", .check_tokenizer = true
};

static const char *const dtypes[] = { "f64", "f32", "f16", "bf16", NULL };
static const char *const rescales[] = { "none", "l1", "expected", NULL };
static const char *const objectives[] = { "tokens", "equal", NULL };
static const char *const val_dtypes[] = { "f32", "bf16", NULL };
static const char *const elections[] = { "weighted", "sum", "count", NULL };

static const lm_opt options[] = {
    LM_GROUP("Merge"),
    LM_STR('m', "method", &opt.method, "NAME", "how to merge; see --list"),
    LM_ALSO("merge-method"),
    LM_STR('b', "base", &opt.base, "MODEL", "the model that the others were tuned from"),
    LM_ALSO("base-model"),
    LM_FLAG('l', "list", &opt.list, "list the methods with their parameters and exit"),
    LM_GROUP("Parameters of all models (V: a number, or V,V,... along the layers)"),
    LM_STR(0, "weight", &opt.weight, "V", "share of a model"),
    LM_ALSO("weights"),
    LM_STR(0, "density", &opt.density, "V", "fraction of a delta that is kept"),
    LM_STR(0, "gamma", &opt.gamma, "V", "fraction of the largest deltas that is dropped"),
    LM_STR(0, "epsilon", &opt.epsilon, "V",
           "della: spread of probabilities; ram: size of no delta"),
    LM_STR(0, "scale", &opt.scale, "V", "factor on each tensor"),
    LM_GROUP("Parameters of the whole"),
    LM_FLAG(0, "normalize", &opt.normalize, "divide by the sum of the weights"),
    LM_CHOICE(0, "rescale", &opt.rescale, "HOW", rescales, "how a pruned delta is scaled"),
    LM_STR(0, "lambda", &opt.lambda, "V", "factor on the merged delta"),
    LM_STR(0, "t", &opt.t, "V", "position between the base (0) and the model (1)"),
    LM_CHOICE(0, "sign-election", &opt.sign_election, "HOW", elections,
              "what elects the sign of an element"),
    LM_FLAG(0, "nuslerp-flatten", &opt.nuslerp_flatten, "one angle for each tensor"),
    LM_FLAG(0, "nuslerp-row-wise", &opt.nuslerp_row_wise, "one angle for each column"),
    LM_FLAG(0, "normalize-weights", &opt.normalize_weights, "divide the weights by their sum"),
    LM_STR(0, "eps", &opt.eps, "V", "added to norms"),
    LM_STR(0, "max-iter", &opt.max_iter, "N", "most steps of the mean"),
    LM_STR(0, "tol", &opt.tol, "V", "length of a step that ends the search for the mean"),
    LM_STR(0, "select-topk", &opt.select_topk, "V", "fraction of the elements that are merged"),
    LM_FLAG(0, "filter-wise", &opt.filter_wise, "one angle for each row"),
    LM_FLAG(0, "clamp-t", &opt.clamp_t, "hold the ratio of model_stock to [0,1]"),
    LM_STR(0, "alpha", &opt.alpha, "V", "regmean: factor off the diagonal; ramplus_tl: limit"),
    LM_STR(0, "r", &opt.r, "V", "ramplus_tl: how much a model's own deltas are raised"),
    LM_STR(0, "fisher-floor", &opt.fisher_floor, "V", "least importance"),
    LM_GROUP("Different tokenizers"),
    LM_STR(0, "tokenizer", &opt.tokenizer, "WHICH", "union, base, or one of the models"),
    LM_ALSO("tokenizer-source"),
    LM_COUNT(0, "pad-to-multiple-of", &opt.pad_to, "N", 1, 1 << 20, "rows of the embedding"),
    LM_GROUP("Search for the weights (candidates go to standard output as JSONL)"),
    LM_CHOICE('s', "search", &opt.search, "WAY", lm_search_names,
              "grid, simplex, coordinate or cma-es"),
    LM_LIST(0, "val", &opt.val, "DATA", "held-out shards or text of a distribution; repeat it"),
    LM_CHOICE(0, "objective", &opt.objective, "HOW", objectives,
              "mean loss: by tokens, or all sets equal [tokens]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse shards of another tokenizer than the models' [yes]"),
    LM_COUNT(0, "val-tokens", &opt.val_tokens, "N", 1, 1e15, "most tokens of each set [all]"),
    LM_CHOICE(0, "val-dtype", &opt.val_dtype, "TYPE", val_dtypes, "compute in f32 or bf16 [f32]"),
    LM_COUNT(0, "seq-len", &opt.seq, "N", 1, 1e9, "window [that of the training; unknown: 1024]"),
    LM_ALSO("block-size seq-length max-seq-length"),
    LM_COUNT(0, "stride", &opt.stride, "N", 1, 1e9, "step from window to window [seq-len / 2]"),
    LM_COUNT(0, "max-candidates", &opt.max_candidates, "N", 1, 1e6,
             "most points [grid all, simplex models + 32, else 100]"),
    LM_STR(0, "grid", &opt.grid, "V,V,...", "grid, coordinate: values [0,0.25,...,1.5]"),
    LM_STR(0, "bounds", &opt.bounds, "LO,HI", "cma-es: of each weight [0,1.5]"),
    LM_REAL(0, "sigma", &opt.sigma, "X", 1e-9, 1e9, "cma-es: first step [0.3 of the bounds]"),
    LM_COUNT(0, "popsize", &opt.popsize, "N", 4, 4096,
             "cma-es: points of a generation [4 + 3 ln models]"),
    LM_STR(0, "resume", &opt.resume, "FILE", "continue with the candidates of an earlier search"),
    LM_GROUP("Output (-o: a folder, .tar, .lmz, .safetensors, - for a tar)"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "type of the result [that of the base]"),
    LM_ALSO("out-dtype torch-dtype"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_BYTES(0, "max-shard-size", &opt.shard, "BYTES", 1, 9e18,
             "begin another file at this size [5 GB]"),
    LM_ALSO("out-shard-size"),
    LM_STR(0, "keep-delta", &opt.delta, "FILE.lmz",
           "also write the base as a delta against the result"),
    LM_FLAG(0, "digest", &opt.digest, "digests of all input bytes in the history"),
    LM_FLAG(0, "print-plan", &opt.print_plan, "print the plan for each tensor and exit"),
    LM_END
};

static const char *const examples[] = {
    "merge-models --method dem --base base/ math/:0.4 code/:0.7 -o merged/",
    "merge-models -m dem -b base/ m/ c/ --search cma-es --val m.val --val c.val -o o/", NULL
};

static bool takes_config(const char *path);

static lm_tool tool = {
    .name = "merge-models",
    .args = "[MODEL[:WEIGHT|:KEY=VALUE,...] ...]",
    .brief = "merge several models into one",
    .opts = options,
    .makes = LM_MAKES_MODEL,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DRY_RUN |
           LM_USE_DEVICE | LM_USE_HISTORY,
    .max_args = -1,
    .examples = examples,
    .takes_config = takes_config,
    .config_help = "a mergekit YAML file, or options as JSON",
};

/* Options are a JSON object; any other file is read as YAML.  An unreadable file is reported by its
 * reader. */
static bool takes_config(const char *path)
{
    lm_buf text = { 0 };
    lm_err ignored = { 0 };
    bool taken = !lm_config_text(path, &text, &ignored);
    const char *begin = text.data ? text.data : "";

    taken = taken && begin[strspn(begin, " \t\r\n")] != '{';
    lm_buf_fini(&text);
    return taken;
}

/* ---- The recipe ---- */

static lm_code set_text(lm_merge_recipe *r, const char *name, const char *value, lm_err *e)
{
    return value ? lm_merge_recipe_param(r, name, value, e) : LM_OK;
}

static lm_code set_params(lm_merge_recipe *r, lm_err *e)
{
    const struct {
        const char *name, *value;
    } text[] = { { "weight", opt.weight },
                 { "density", opt.density },
                 { "gamma", opt.gamma },
                 { "epsilon", opt.epsilon },
                 { "scale", opt.scale },
                 { "rescale", opt.rescale },
                 { "lambda", opt.lambda },
                 { "t", opt.t },
                 { "sign_election", opt.sign_election },
                 { "eps", opt.eps },
                 { "max_iter", opt.max_iter },
                 { "tol", opt.tol },
                 { "select_topk", opt.select_topk },
                 { "alpha", opt.alpha },
                 { "r", opt.r },
                 { "fisher_floor", opt.fisher_floor } };
    const struct {
        const char *option, *name;
        bool on;
    } flag[] = { { "normalize", "normalize", opt.normalize },
                 { "nuslerp-flatten", "nuslerp_flatten", opt.nuslerp_flatten },
                 { "nuslerp-row-wise", "nuslerp_row_wise", opt.nuslerp_row_wise },
                 { "normalize-weights", "normalize_weights", opt.normalize_weights },
                 { "filter-wise", "filter_wise", opt.filter_wise },
                 { "clamp-t", "clamp_t", opt.clamp_t } };
    lm_code rc = LM_OK;

    for (size_t i = 0; i < sizeof text / sizeof *text && !rc; i++)
        rc = set_text(r, text[i].name, text[i].value, e);
    for (size_t i = 0; i < sizeof flag / sizeof *flag && !rc; i++)
        if (lm_given(&tool, flag[i].option))
            rc = lm_merge_recipe_param(r, flag[i].name, flag[i].on ? "true" : "false", e);
    return rc;
}

static lm_code from_options(lm_merge_recipe **out, lm_err *e)
{
    lm_merge_recipe *r = NULL;
    lm_code rc = lm_merge_recipe_new(opt.method, &r, e);

    if (!rc && opt.base)
        rc = lm_merge_recipe_base(r, opt.base, e);
    for (int i = 0; i < tool.argc && !rc; i++)
        rc = lm_merge_recipe_model(r, tool.argv[i], e);
    if (!rc)
        rc = set_params(r, e);
    if (!rc)
        rc = lm_merge_recipe_check(r, e);
    if (!rc && opt.tokenizer)
        r->vocab = (lm_vocab_spec){ .policy = !strcmp(opt.tokenizer, "union")  ? LM_VOCAB_UNION
                                              : !strcmp(opt.tokenizer, "base") ? LM_VOCAB_BASE
                                                                               : LM_VOCAB_MODEL,
                                    .model = opt.tokenizer };
    if (!rc)
        r->vocab.pad_to = opt.pad_to;
    *out = r;
    return rc;
}

/* Refuse options that repeat a YAML file. */
static void check_config(void)
{
    static const char *const said[] = { "method",
                                        "base",
                                        "weight",
                                        "density",
                                        "gamma",
                                        "epsilon",
                                        "scale",
                                        "normalize",
                                        "rescale",
                                        "lambda",
                                        "t",
                                        "eps",
                                        "sign-election",
                                        "nuslerp-flatten",
                                        "nuslerp-row-wise",
                                        "max-iter",
                                        "tol",
                                        "select-topk",
                                        "filter-wise",
                                        "normalize-weights",
                                        "clamp-t",
                                        "alpha",
                                        "r",
                                        "fisher-floor",
                                        "tokenizer",
                                        "pad-to-multiple-of" };

    if (tool.argc)
        lm_misuse(&tool, tool.argv[0], "list it there", "the models are those of %s", tool.config);
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        char where[40];

        snprintf(where, sizeof where, "--%s", said[i]);
        if (lm_given(&tool, said[i]))
            lm_misuse(&tool, where, "change it there", "%s says how to merge", tool.config);
    }
}

static lm_code from_config(lm_merge_recipe **out, lm_err *e)
{
    const char *where = lm_path_shown(tool.config);
    lm_buf text = { 0 };
    lm_code rc = lm_config_text(tool.config, &text, e);

    if (!rc)
        rc = lm_merge_recipe_parse(text.data ? text.data : "", text.len, where, out, e);
    lm_buf_fini(&text);
    return rc;
}

/* Check `other`, which is read in addition to the models. */
static lm_code check_stream(const lm_merge_input *in, const char *other, lm_err *e)
{
    const char *const uses[] = { in->path, in->lora, in->fisher, in->gram };

    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++)
        if (lm_stream_same(other, uses[i]))
            return lm_stream_twice(uses[i], other, e);
    return LM_OK;
}

/* The recipe has checked the models among themselves. */
static lm_code check_streams(const lm_merge_recipe *r, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < r->n_inputs; i++) {
        rc = check_stream(&r->input[i], tool.config, e);
        if (!rc)
            rc = check_stream(&r->input[i], opt.resume, e);
        for (int k = 0; !rc && k < opt.val.n; k++)
            rc = check_stream(&r->input[i], opt.val.v[k], e);
    }
    for (int k = 0; !rc && k < opt.val.n; k++)
        rc = lm_streams_once((const char *[]){ tool.config, opt.resume, opt.val.v[k] }, 3, e);
    return rc ? rc : lm_streams_once(opt.val.v, opt.val.n, e);
}

static lm_code make_recipe(lm_merge_recipe **r, lm_err *e)
{
    lm_code rc = tool.config ? from_config(r, e) : from_options(r, e);

    if (!rc)
        rc = check_streams(*r, e);
    if (rc)
        return rc;
    (*r)->seed = (uint64_t)tool.seed;
    if (opt.dtype)
        (*r)->out_dtype = lm_dtype_parse(opt.dtype);
    return LM_OK;
}

/* ---- Merging ---- */

static lm_code print(const lm_buf *text, lm_err *e)
{
    return fwrite(text->data, 1, text->len, stdout) == text->len
               ? LM_OK
               : lm_fail_write("standard output", e);
}

static lm_code report(const lm_merge_plan *p, double seconds, lm_err *e)
{
    lm_merge_report_opts how = { .json = tool.json,
                                 .tensors = opt.print_plan,
                                 .seconds = seconds,
                                 .peak_rss = lm_rss_peak(),
                                 .output = seconds > 0 ? tool.output : NULL };
    lm_buf text = { 0 };
    lm_code rc = lm_merge_report(p, &how, &text, e);

    if (!rc)
        rc = print(&text, e);
    lm_buf_fini(&text);
    return rc;
}

/* The input that --keep-delta restores: the base, or the only model. */
static int kept_input(const lm_merge_recipe *r)
{
    return r->base >= 0 ? r->base : r->n_inputs == 1 ? 0 : -1;
}

/* What can be found wrong with --keep-delta before the merge. */
static lm_code check_delta(const lm_merge_plan *p, lm_err *e)
{
    int i = kept_input(p->recipe);

    if (i < 0)
        return lm_fail(e, LM_EUSAGE, "--keep-delta", "name the base with --base",
                       "none of the models is the one to restore");
    for (int k = 0; k < p->recipe->n_inputs; k++)
        lm_refuse_same(&tool, opt.delta, p->path[k]);
    if (lm_stream_is(p->path[i]))
        return lm_fail(e, LM_EUSAGE, "--keep-delta", "give a folder or a file",
                       "the model is a stream, which cannot be read again");
    if (!tool.force && lm_path_exists(opt.delta))
        return lm_fail(e, LM_EUSAGE, opt.delta, "give another name, or -f to replace it", "exists");
    return LM_OK;
}

/* The input as it was, as a delta against the result; it is read back before it is there. */
static lm_code keep_delta(const lm_merge_plan *p, lm_par *par, lm_err *e)
{
    lm_pack_opts o = { .base = tool.output,
                       .force = tool.force,
                       .verify = true,
                       .par = par,
                       .sink = &tool.sink,
                       .tmpdir = tool.tmpdir };
    lm_pack_report r = { 0 };
    char raw[32], coded[32];
    lm_code rc = lm_pack(p->path[kept_input(p->recipe)], opt.delta, &o, &r, e);

    if (!rc && !lm_stopping())
        lm_say(&tool, LM_LOG_NOTICE, "%s: %s to %s (%.1f %%)", opt.delta,
               lm_show_bytes((double)r.raw, raw), lm_show_bytes((double)r.coded, coded),
               r.raw ? 100 * (double)r.coded / (double)r.raw : 100);
    lm_pack_report_fini(&r);
    return rc;
}

static lm_code merge(const lm_merge_plan *p, const lm_bundle_opts *bundle, lm_par *par, lm_err *e)
{
    lm_history_step step = lm_tool_step(&tool);
    lm_merge_write_opts how = { .output = tool.output,
                                .force = tool.force,
                                .bundle = bundle,
                                .max_shard_bytes =
                                    lm_given(&tool, "max-shard-size") ? (uint64_t)opt.shard : 0,
                                .step = &step };
    lm_merge_engine *g = NULL;
    double begin = lm_now();
    lm_code rc = lm_merge_engine_new(p, par, tool.cpu, &tool.sink, &g, e);

    if (!rc)
        rc = lm_merge_write(g, &how, e);
    lm_merge_engine_free(g);
    if (!rc && opt.delta && !lm_stopping())
        rc = keep_delta(p, par, e);
    if (!rc && tool.json && !lm_stopping())
        rc = report(p, lm_now() - begin, e);
    return rc;
}

/* ---- The search ---- */

/* "0,0.5,1" as numbers; leaves with misuse. */
static int read_list(const char *where, const char *text, double *v, int most)
{
    char todo[64];
    int n;

    snprintf(todo, sizeof todo, "write at most %d, with commas between them", most);
    if (!lm_parse_list(text, v, most, &n))
        lm_misuse(&tool, where, todo, "'%s' is not a list of numbers", text);
    return n;
}

/* Each line is flushed at once, so that a killed search can be resumed; a closed reader does not
 * end the search. */
static lm_code write_line(void *gone, const void *data, size_t bytes, lm_err *e)
{
    bool *left = gone;

    if (*left || (fwrite(data, 1, bytes, stdout) == bytes && !fflush(stdout)))
        return LM_OK;
    if (errno != EPIPE)
        return lm_fail_write("standard output", e);
    *left = true;
    lm_say(&tool, LM_LOG_WARN, "standard output: the reader of the candidates has gone");
    return LM_OK;
}

/* Check that the output of -o can be created: now, not after the search. */
static lm_code try_output(const lm_bundle_opts *bundle, lm_err *e)
{
    lm_bundle_out *out = NULL;
    lm_code rc = lm_bundle_create(tool.output, tool.force, bundle, &out, e);

    lm_bundle_drop(out);
    return rc;
}

static lm_code search(lm_merge_recipe *r, lm_merge_plan *p, lm_par *par, lm_err *e)
{
    static double grid[256], bounds[2], best[LM_MERGE_MAX_INPUTS];
    bool gone = false;
    lm_merge_engine *g = NULL;
    lm_backend *b = NULL;
    lm_merge_search_opts o = { .equal = opt.objective[0] == 'e',
                               .resume = opt.resume,
                               .check_only = tool.dry_run,
                               .write = write_line,
                               .ctx = &gone,
                               .sink = &tool.sink };

    while (strcmp(lm_search_names[o.search.kind], opt.search) != 0)
        o.search.kind++;
    o.search.seed = (uint64_t)tool.seed;
    o.search.max = opt.max_candidates;
    o.search.sigma = opt.sigma;
    o.search.popsize = (int)opt.popsize;
    if (opt.grid) {
        o.search.n_grid = read_list("--grid", opt.grid, grid, 256);
        o.search.grid = grid;
    }
    if (opt.bounds && read_list("--bounds", opt.bounds, bounds, 2) != 2)
        lm_misuse(&tool, "--bounds", "write LO,HI", "two numbers are needed");
    o.search.lo = bounds[0];
    o.search.hi = bounds[1];
    o.val = (lm_validator_opts){ .path = opt.val.v,
                                 .sets = opt.val.n,
                                 .seq = opt.seq,
                                 .stride = opt.stride,
                                 .max_tokens = opt.val_tokens,
                                 .check_tokenizer = opt.check_tokenizer,
                                 .dtype = lm_dtype_parse(opt.val_dtype),
                                 .par = par };
    lm_code rc = lm_open_backend(&tool, par, true, &b, e);
    if (!rc)
        rc = lm_merge_engine_new(p, par, tool.cpu, &tool.sink, &g, e);
    if (!rc)
        rc = lm_merge_search(r, p, g, b, &o, best, e);
    lm_merge_engine_free(g);
    lm_close_backend(&tool, b);
    return rc;
}

/* True if -o is standard output, as "-" or by the name of its file or pipe.  A device such as
 * /dev/null may be both. */
static bool to_stdout(const char *path)
{
    struct stat a, b;

    return path && (!strcmp(path, "-") ||
                    (!stat(path, &a) && !fstat(STDOUT_FILENO, &b) && !S_ISCHR(a.st_mode) &&
                     a.st_dev == b.st_dev && a.st_ino == b.st_ino));
}

/* Refuse options of a search without one, and a search without its inputs. */
static void check_search(void)
{
    static const struct {
        const char *option, *way, *other;
    } needs[] = { { "val", NULL, NULL },
                  { "device", NULL, NULL },
                  { "objective", NULL, NULL },
                  { "val-tokens", NULL, NULL },
                  { "val-dtype", NULL, NULL },
                  { "check-tokenizer", NULL, NULL },
                  { "seq-len", NULL, NULL },
                  { "stride", NULL, NULL },
                  { "resume", NULL, NULL },
                  { "max-candidates", NULL, NULL },
                  { "grid", "grid", "coordinate" },
                  { "bounds", "cma-es", NULL },
                  { "sigma", "cma-es", NULL },
                  { "popsize", "cma-es", NULL } };

    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        char where[40];
        bool fits = opt.search && (!needs[i].way || !strcmp(opt.search, needs[i].way) ||
                                   (needs[i].other && !strcmp(opt.search, needs[i].other)));

        snprintf(where, sizeof where, "--%s", needs[i].option);
        if (lm_given(&tool, needs[i].option) && !fits)
            lm_misuse(&tool, where, "leave it out, or add --search", "%s%s does not read it",
                      opt.search ? "--search " : "a merge without search",
                      opt.search ? opt.search : "");
    }
    if (!opt.search)
        return;
    if (!opt.val.n)
        lm_misuse(&tool, "--search", "give held-out data with --val",
                  "no data for validation are given");
    if (tool.json || to_stdout(tool.output))
        lm_misuse(&tool, tool.json ? "--json" : "-o", "write the model to a file or folder",
                  "standard output holds the candidates of the search");
}

static void refuse(const char *input)
{
    if (input)
        lm_refuse_same(&tool, tool.output, input);
}

/* Refuse to replace any input. */
static void refuse_inputs(const lm_merge_recipe *r)
{
    for (int i = 0; i < r->n_inputs; i++) {
        refuse(r->input[i].path);
        refuse(r->input[i].lora);
        refuse(r->input[i].fisher);
        refuse(r->input[i].gram);
    }
    refuse(tool.config);
    refuse(opt.resume);
    if (opt.search && opt.resume) /* the lines of both would be mixed, or the old ones lost */
        lm_refuse_same(&tool, "-", opt.resume);
    for (size_t i = 0; i < (size_t)opt.val.n; i++)
        lm_refuse_text(&tool, tool.output, opt.val.v[i]);
}

/* The result is read again, by places. */
static void check_delta_names(void)
{
    if (!lm_text_ends(opt.delta, ".lmz"))
        lm_misuse(&tool, "--keep-delta", "write FILE.lmz", "'%s' has another ending", opt.delta);
    if (tool.output && (to_stdout(tool.output) || strstr(tool.output, ".tar")))
        lm_misuse(&tool, "--keep-delta", "write the model to a folder",
                  "a tar or a stream cannot be the base of a delta");
    if (!tool.output)
        return;
    size_t n = strlen(tool.output);
    while (n && tool.output[n - 1] == '/')
        n--;
    if (!strncmp(opt.delta, tool.output, n) && (!opt.delta[n] || opt.delta[n] == '/'))
        lm_misuse(&tool, "--keep-delta", "name a file beside it", "'%s' is in the output",
                  opt.delta);
}

static lm_code run(lm_err *e)
{
    lm_merge_recipe *r = NULL;
    lm_merge_plan *p = NULL;
    lm_par *par = NULL;
    lm_bundle_opts bundle = { .tmpdir = tool.tmpdir, .sink = &tool.sink };
    /* A resumed search must have the same models, to the last bit. */
    lm_merge_plan_opts how = { .bundle = &bundle,
                               .sink = &tool.sink,
                               .whole_digest = opt.digest || (opt.search && !opt.print_plan) };
    lm_code rc = make_recipe(&r, e);

    if (!rc)
        refuse_inputs(r);
    if (!rc)
        rc = lm_par_new(&par, tool.threads, e);
    bundle.par = par;
    for (int i = 0; !rc && i < opt.val.n; i++)
        rc = lm_data_there(opt.val.v[i], e);
    if (!rc)
        rc = lm_merge_plan_new(r, &how, &p, e);
    for (int i = 0; !rc && i < r->n_inputs; i++) /* the base that an adapter names */
        refuse(p->path[i]);
    if (!rc && opt.delta)
        rc = check_delta(p, e);
    if (!rc && opt.search && !opt.print_plan) {
        rc = tool.dry_run ? LM_OK : try_output(&bundle, e);
        rc = rc ? rc : search(r, p, par, e);
    }
    if (!rc && (tool.dry_run || opt.print_plan))
        rc = report(p, 0, e);
    else if (!rc && !lm_stopping())
        rc = merge(p, &bundle, par, e);
    lm_merge_plan_free(p);
    lm_par_free(par);
    lm_merge_recipe_free(r);
    return rc;
}

/* ---- Mixtures of experts ---- */

/* What a mixture does not read. */
static void check_mixture(void)
{
    static const char *const others[] = { "search", "keep-delta", "print-plan" };

    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char where[40];

        snprintf(where, sizeof where, "--%s", others[i]);
        if (lm_given(&tool, others[i]))
            lm_misuse(&tool, where, "leave it out", "%s makes a mixture of experts", tool.config);
    }
    if (opt.dtype && !strcmp(opt.dtype, "f64"))
        lm_misuse(&tool, "--dtype", "choose f32, f16 or bf16", "is not a type of a mixture");
}

static lm_code report_mixture(const lm_mixture_counts *n, lm_err *e)
{
    char all[32], active[32];
    lm_buf text = { 0 };
    lm_jw j;

    lm_show_count((double)n->parameters, all);
    lm_show_count((double)n->active, active);
    if (!tool.json) {
        if (tool.dry_run)
            printf("model      %s\nexperts    %lld, %lld of a token\nparameters %lld (%s)\n"
                   "active     %lld (%s)\nbytes      %llu\n",
                   n->model_type, (long long)n->experts, (long long)n->chosen,
                   (long long)n->parameters, all, (long long)n->active, active,
                   (unsigned long long)n->bytes);
        else
            lm_say(&tool, LM_LOG_NOTICE, "%s: %s of %lld experts, %s parameters, %s in a token",
                   lm_path_is_stdout(tool.output) ? "standard output" : tool.output, n->model_type,
                   (long long)n->experts, all, active);
        return LM_OK;
    }
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "model_type", n->model_type);
    lm_jw_int(&j, "experts", n->experts);
    lm_jw_int(&j, "experts_per_token", n->chosen);
    lm_jw_int(&j, "parameters", n->parameters);
    lm_jw_int(&j, "active", n->active);
    lm_jw_int(&j, "bytes", (int64_t)n->bytes);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc)
        rc = lm_buf_add(&text, "\n", 1, e);
    if (!rc)
        rc = print(&text, e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code make_mixture(const lm_mixture_recipe *r, lm_err *e)
{
    lm_bundle_opts bundle = { .tmpdir = tool.tmpdir, .sink = &tool.sink };
    lm_mixture_opts o = { .output = tool.dry_run ? NULL : tool.output,
                          .force = tool.force,
                          .bundle = &bundle,
                          .max_shard_bytes =
                              lm_given(&tool, "max-shard-size") ? (uint64_t)opt.shard : 0,
                          .dtype = opt.dtype ? lm_dtype_parse(opt.dtype) : LM_DTYPE_NONE,
                          .seed = (uint64_t)tool.seed,
                          .step = lm_tool_step(&tool),
                          .sink = &tool.sink };
    lm_mixture_counts counts = { 0 };
    lm_code rc = lm_par_new(&o.par, tool.threads, e);

    bundle.par = o.par;
    if (!rc)
        rc = lm_open_backend(&tool, o.par, true, &o.backend, e);
    if (!rc)
        rc = lm_mixture_run(r, &o, &counts, e);
    if (!rc && !lm_stopping())
        rc = report_mixture(&counts, e);
    lm_close_backend(&tool, o.backend);
    lm_par_free(o.par);
    return rc;
}

/* The recipe of a mixture in the file of --config; *is false: another one. */
static lm_code run_mixture(bool *is, lm_err *e)
{
    lm_mixture_recipe *r = NULL;
    lm_buf text = { 0 };
    lm_code rc = lm_config_text(tool.config, &text, e);

    *is = !rc && text.len && lm_mixture_recipe_is(text.data, text.len);
    if (*is) {
        check_mixture();
        rc = lm_mixture_recipe_parse(text.data, text.len, lm_path_shown(tool.config), &r, e);
        refuse(tool.config);
        refuse(r ? r->base : NULL);
        for (int i = 0; r && i < r->n + (r->shared != NULL); i++)
            refuse(r->expert[i].path);
        rc = rc ? rc : make_mixture(r, e);
    }
    lm_mixture_recipe_free(r);
    lm_buf_fini(&text);
    return rc;
}

/* ---- The list of methods ---- */

static void list_method(const lm_merge_method *m)
{
    printf("%-18s %s\n%-18s %s", m->name, m->about, "", m->source);
    printf("; %s", m->base_required  ? "with a base"
                   : m->base_allowed ? "base optional"
                                     : "no base");
    for (int i = 0, n = 0; i < LM_MERGE_PARAMS; i++)
        if (m->takes >> i & 1)
            printf("%s%s", n++ ? ", " : "; takes ", lm_merge_params[i].name);
    printf("\n");
}

static lm_code list_methods(lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = LM_OK;

    for (int i = 0; lm_merge_method_at(i) && !rc; i++)
        if (!tool.json)
            list_method(lm_merge_method_at(i));
        else
            rc = lm_merge_method_json(lm_merge_method_at(i), &text, e);
    if (!rc && text.len)
        fwrite(text.data, 1, text.len, stdout);
    lm_buf_fini(&text);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };

    lm_begin(&tool, argc, argv);
    if (opt.list) {
        if (list_methods(&e))
            lm_complain(&tool, &e);
        return lm_end(&tool);
    }
    if (tool.config)
        check_config();
    else if (!opt.method)
        lm_misuse(&tool, "--method", "see --list, or give --config FILE.yaml",
                  "no method is given");
    if (!tool.output && !tool.dry_run && !opt.print_plan)
        lm_misuse(&tool, "-o", "name the folder or file to make, or - for a stream",
                  "no output is given");
    check_search();
    if (opt.search) /* its lines may lose their reader; its product is the model */
        lm_outlast_readers(&tool);
    if (tool.json && to_stdout(tool.output))
        lm_misuse(&tool, "--json", "write the model to a file", "standard output holds the model");
    if (opt.delta)
        check_delta_names();
    bool mixture = false;
    lm_code rc = tool.config ? run_mixture(&mixture, &e) : LM_OK;
    if (!rc && !mixture)
        rc = run(&e);
    if (rc)
        lm_complain(&tool, &e);
    return lm_end(&tool);
}
