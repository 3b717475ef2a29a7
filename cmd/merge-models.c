/* merge-models -- several models made into one.  See man/man1/merge-models.1. */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "common/tool.h"
#include "merge/engine.h"
#include "merge/plan.h"
#include "merge/recipe.h"
#include "merge/report.h"

static struct {
    const char *method, *base, *dtype;
    /* parameters, as they are written */
    const char *weight, *density, *gamma, *epsilon, *scale, *rescale, *lambda, *t, *eps, *max_iter,
        *tol, *select_topk, *sign_election, *alpha, *fisher_floor;
    bool normalize, nuslerp_flatten, nuslerp_row_wise, normalize_weights, filter_wise, clamp_t;
    int64_t shard;
    bool list, print_plan;
} opt = { .shard = LM_MAX_SHARD_BYTES };

static const char *const dtypes[] = { "f64", "f32", "f16", "bf16", NULL };
static const char *const rescales[] = { "none", "l1", "expected", NULL };
static const char *const elections[] = { "weighted", "sum", "count", NULL };

static const lm_opt options[] = {
    LM_GROUP("Merge"),
    LM_STR('m', "method", &opt.method, "NAME", "how to merge; see --list"),
    LM_STR('b', "base", &opt.base, "MODEL", "the model that the others were tuned from"),
    LM_FLAG('l', "list", &opt.list, "list the methods with their parameters and exit"),
    LM_GROUP(
        "Parameters, for all models (V: a number, or V,V,... from the first layer to the last)"),
    LM_STR(0, "weight", &opt.weight, "V", "share of a model"),
    LM_STR(0, "density", &opt.density, "V", "share of a delta that is kept"),
    LM_STR(0, "gamma", &opt.gamma, "V", "share of the largest deltas that is dropped"),
    LM_STR(0, "epsilon", &opt.epsilon, "V", "spread of the probabilities to be kept"),
    LM_STR(0, "scale", &opt.scale, "V", "factor on each tensor"),
    LM_GROUP("Parameters of the whole"),
    LM_FLAG(0, "normalize", &opt.normalize, "divide by the sum of the weights"),
    LM_CHOICE(0, "rescale", &opt.rescale, "HOW", rescales, "how a pruned delta is scaled"),
    LM_STR(0, "lambda", &opt.lambda, "V", "factor on the merged delta"),
    LM_STR(0, "t", &opt.t, "V", "way from the base (0) to the model (1)"),
    LM_CHOICE(0, "sign-election", &opt.sign_election, "HOW", elections,
              "what elects the sign of an element"),
    LM_FLAG(0, "nuslerp-flatten", &opt.nuslerp_flatten, "one angle for each tensor"),
    LM_FLAG(0, "nuslerp-row-wise", &opt.nuslerp_row_wise, "one angle for each column"),
    LM_FLAG(0, "normalize-weights", &opt.normalize_weights, "divide the weights by their sum"),
    LM_STR(0, "eps", &opt.eps, "V", "added to norms"),
    LM_STR(0, "max-iter", &opt.max_iter, "N", "most steps of the mean"),
    LM_STR(0, "tol", &opt.tol, "V", "length of a step that ends the search for the mean"),
    LM_STR(0, "select-topk", &opt.select_topk, "V", "share of the elements that are merged"),
    LM_FLAG(0, "filter-wise", &opt.filter_wise, "one angle for each row"),
    LM_FLAG(0, "clamp-t", &opt.clamp_t, "hold the ratio of model_stock to [0,1]"),
    LM_STR(0, "alpha", &opt.alpha, "V", "share of the off-diagonal of a Gram matrix"),
    LM_STR(0, "fisher-floor", &opt.fisher_floor, "V", "least importance"),
    LM_GROUP("Output (-o: a folder, NAME.tar, NAME.lmz, NAME.safetensors, or - for a tar)"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "type of the result [that of the base]"),
    LM_BYTES(0, "max-shard-size", &opt.shard, "BYTES", 1, 9e18,
             "begin another file when one holds this much [5 GB]"),
    LM_FLAG(0, "print-plan", &opt.print_plan, "print what becomes of each tensor and exit"),
    LM_END
};

static const char *const examples[] = {
    "merge-models --method dem --base base/ math/:0.4 code/:0.7 -o merged/",
    "merge-models --config mergekit.yaml -o merged/", NULL
};

static bool takes_config(const char *path);

static lm_tool tool = {
    .name = "merge-models",
    .args = "[MODEL[:WEIGHT|:KEY=VALUE,...] ...]",
    .brief = "make one model of several",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DRY_RUN,
    .max_args = -1,
    .lasting = true,
    .examples = examples,
    .takes_config = takes_config,
    .config_help = "a mergekit YAML file, or options as JSON",
};

/* Options are a JSON object; everything else is taken for YAML. */
static bool takes_config(const char *path)
{
    FILE *f = fopen(path, "re");
    int c = ' ';

    while (f && strchr(" \t\r\n", c) && c)
        c = getc(f);
    if (f)
        fclose(f);
    return f && c != '{';
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
    *out = r;
    return rc;
}

/* What a YAML file says is not said again. */
static void check_config(void)
{
    static const char *const said[] = {
        "method",   "base",  "weight",        "density",         "gamma",
        "epsilon",  "scale", "normalize",     "rescale",         "lambda",
        "t",        "eps",   "sign-election", "nuslerp-flatten", "nuslerp-row-wise",
        "max-iter", "tol",   "select-topk",   "filter-wise",     "normalize-weights",
        "clamp-t",  "alpha", "fisher-floor",
    };

    if (tool.argc)
        lm_misuse(&tool, tool.argv[0], "list it there", "the models are those of %s", tool.config);
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        char where[40];

        snprintf(where, sizeof where, "--%s", said[i]);
        if (lm_given(&tool, said[i]))
            lm_misuse(&tool, where, "change it there", "%s says how to merge", tool.config);
    }
}

static lm_code make_recipe(lm_merge_recipe **r, lm_err *e)
{
    lm_code rc = tool.config ? lm_merge_recipe_load(tool.config, r, e) : from_options(r, e);

    if (rc)
        return rc;
    (*r)->seed = (uint64_t)tool.seed;
    if (opt.dtype)
        (*r)->out_dtype = lm_dtype_parse(opt.dtype);
    return LM_OK;
}

/* ---- Work ---- */

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
    if (!rc && tool.json && !lm_stopping())
        rc = report(p, lm_now() - begin, e);
    return rc;
}

static void refuse_inputs(const lm_merge_recipe *r)
{
    for (int i = 0; i < r->n_inputs; i++) {
        lm_refuse_same(&tool, tool.output, r->input[i].path);
        if (r->input[i].lora)
            lm_refuse_same(&tool, tool.output, r->input[i].lora);
    }
}

static lm_code run(lm_err *e)
{
    lm_merge_recipe *r = NULL;
    lm_merge_plan *p = NULL;
    lm_par *par = NULL;
    lm_bundle_opts bundle = { .tmpdir = tool.tmpdir, .sink = &tool.sink };
    lm_merge_plan_opts how = { .bundle = &bundle, .sink = &tool.sink };
    lm_code rc = make_recipe(&r, e);

    if (!rc)
        refuse_inputs(r);
    if (!rc)
        rc = lm_par_new(&par, tool.threads, e);
    bundle.par = par;
    if (!rc)
        rc = lm_merge_plan_new(r, &how, &p, e);
    if (!rc && (tool.dry_run || opt.print_plan))
        rc = report(p, 0, e);
    else if (!rc)
        rc = merge(p, &bundle, par, e);
    lm_merge_plan_free(p);
    lm_par_free(par);
    lm_merge_recipe_free(r);
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

int main(int argc, char **argv)
{
    lm_err e = { 0 };

    lm_begin(&tool, argc, argv);
    if (opt.list) {
        for (int i = 0; lm_merge_method_at(i); i++)
            list_method(lm_merge_method_at(i));
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
    if (tool.json && tool.output && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--json", "write the model to a file", "standard output holds the model");
    if (run(&e))
        lm_complain(&tool, &e);
    return lm_end(&tool);
}
