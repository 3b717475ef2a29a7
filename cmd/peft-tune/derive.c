/* SPDX-License-Identifier: Apache-2.0 */
/* derive.c -- LoRA adapters that are not trained: the difference of two models, an adapter of another method or rank,
 * several adapters as one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/fp8_source.h"
#include "peft-tune/options.h"
#include "tune/convert.h"
#include "tune/gguf.h"

const char *const tune_combinations[] = { "linear", "cat", "svd", NULL };

typedef struct {
    lm_par *par;
    lm_model_source *base, *tuned;
    lm_tune_bases bases;
    lm_tune_folder **adapter;
    double *weight;
    int n;
    lm_bundle_out *out;
} derivation;

bool tune_derives(void)
{
    return opt.unmerge || opt.to_lora || opt.combine;
}

/* An lm_own_fn: the files of an adapter. */
static bool is_own(const void *none, const char *name)
{
    (void)none;
    return !strcmp(name, "adapter_config.json") || !strcmp(name, "adapter_model.safetensors");
}

static void check_operands(void)
{
    int modes = opt.unmerge + opt.to_lora + (opt.combine != NULL);
    if (modes > 1)
        lm_misuse(&tool, "--unmerge, --to-lora, --combine", "give one of them",
                  "they exclude each other");
    if (opt.loop.resume)
        lm_misuse(&tool, "--resume", "leave it out", "nothing is trained");
    if (!tool.output)
        lm_misuse(&tool, "--output", "name the folder of the adapter with -o FOLDER", "is missing");
    if (tool.json && lm_path_is_stdout(tool.output))
        lm_misuse(&tool, "--json", "write the adapter to a folder",
                  "standard output holds the adapter");
    if (opt.unmerge && tool.argc != 2)
        lm_misuse(&tool, "operands", "give BASE and TUNED", "%d given", tool.argc);
    if (opt.to_lora && tool.argc != 2)
        lm_misuse(&tool, "operands", "give BASE and ADAPTER", "%d given", tool.argc);
    if (opt.combine && tool.argc < 3)
        lm_misuse(&tool, "operands", "give BASE and two adapters or more", "%d given", tool.argc);
    for (int i = 0; i < tool.argc; i++) {
        lm_refuse_same(&tool, tool.output, tool.argv[i]);
        lm_refuse_inside(&tool, tool.output, tool.argv[i]);
    }
}

/* "a/:0.7": the adapter a/ with its weight, 1 by default. */
static lm_code open_adapter(derivation *d, const char *arg, const lm_bundle_opts *how, lm_err *e)
{
    char *path = NULL, line[600];
    double w = 1;
    if (lm_strdup(&path, arg, e))
        return e->code;
    char *colon = strrchr(path, ':');
    if (colon && !lm_path_exists(arg) && lm_parse_double(colon + 1, &w))
        *colon = 0;
    else
        w = 1;
    d->weight[d->n] = w;
    lm_code rc = lm_tune_folder_open(path, how, &d->adapter[d->n], e);
    d->n += !rc;
    rc = rc ? rc : lm_tune_folder_bind(d->adapter[d->n - 1], &d->bases, e);
    if (!rc && lm_tune_folder_params_line(d->adapter[d->n - 1], line, sizeof line))
        lm_say(&tool, LM_LOG_NOTICE, "%s: %s", path, line);
    lm_free(path);
    return rc;
}

static lm_code open_inputs(derivation *d, lm_err *e)
{
    if (lm_par_new(&d->par, tool.threads, e))
        return e->code;
    const lm_bundle_opts how = lm_tool_bundle(&tool, d->par);
    if (lm_fp8_source_open(tool.argv[0], &how, &d->base, e) ||
        lm_tune_bases_read(d->base, false, &d->bases, e) ||
        lm_alloc_n(&d->adapter, (size_t)tool.argc, sizeof *d->adapter, "adapters", e) ||
        lm_alloc_n(&d->weight, (size_t)tool.argc, sizeof *d->weight, "weights", e))
        return e->code;
    if (opt.unmerge)
        return lm_fp8_source_open(tool.argv[1], &how, &d->tuned, e);
    for (int i = 1; i < tool.argc; i++)
        if (open_adapter(d, tool.argv[i], &how, e))
            return e->code;
    return LM_OK;
}

static lm_code make(derivation *d, lm_tune_lora_report *r, lm_err *e)
{
    const lm_tune_lora_opts o = { .rank = opt.tuning.rank > 0 ? (int64_t)opt.tuning.rank : 0,
                                  .share = opt.share,
                                  .seed = (uint64_t)tool.seed,
                                  .par = d->par,
                                  .base = tool.argv[0] };
    int way = 0;
    if (opt.unmerge)
        return lm_tune_extract(d->base, d->tuned, &d->bases, &o, d->out, r, e);
    if (opt.to_lora)
        return lm_tune_to_lora(d->adapter[0], d->base, &o, d->out, r, e);
    while (strcmp(tune_combinations[way], opt.combine) != 0)
        way++;
    return lm_tune_combine(d->adapter, d->weight, d->n, (lm_tune_combination)way, &o, d->out, r, e);
}

static void say(const lm_tune_lora_report *r)
{
    char worst[300] = "";

    if (r->worst > 0 && *r->where)
        snprintf(worst, sizeof worst, ", at most %.3g (%s)", r->worst, r->where);
    lm_say(&tool, LM_LOG_NOTICE,
           "%zu module%s of rank %lld to %lld, %zu tensor%s whole; %.3g of the change is lost%s",
           r->modules, lm_plural(r->modules), (long long)r->least, (long long)r->most, r->whole,
           lm_plural(r->whole), r->lost, worst);
    if (tool.json)
        printf("{\"modules\": %zu, \"whole\": %zu, \"least_rank\": %lld, \"most_rank\": %lld, "
               "\"lost\": %.9g, \"worst\": %.9g}\n",
               r->modules, r->whole, (long long)r->least, (long long)r->most, r->lost, r->worst);
}

/* --to-lora -o FILE.gguf: the adapter for llama.cpp. */
static lm_code make_gguf(const derivation *d, lm_err *e)
{
    lm_config config;
    size_t n = 0;
    const json_t *c = lm_model_source_config(d->base);
    lm_code rc =
        c ? lm_config_read(c, tool.argv[0], &config, e)
          : lm_fail(e, LM_EUSAGE, tool.argv[0], "give the model's folder", "it has no config.json");
    rc = rc ? rc : lm_tune_to_gguf(d->adapter[0], &config, tool.output, tool.force, &n, e);
    if (!rc)
        lm_say(&tool, LM_LOG_NOTICE, "%zu module%s", n, lm_plural(n));
    return rc;
}

/* An adapter's folder, or with -o - its tar stream. */
static lm_code make_folder(derivation *d, lm_err *e)
{
    lm_tune_lora_report r = { 0 };
    const lm_bundle_opts how = { .own = is_own };
    if (lm_bundle_create(tool.output, tool.force, &how, &d->out, e))
        return e->code;
    if (make(d, &r, e)) {
        lm_bundle_drop(d->out);
        return e->code;
    }
    if (!lm_bundle_commit(d->out, e))
        say(&r);
    return e->code;
}

lm_code tune_derive(lm_err *e)
{
    derivation d = { 0 };
    check_operands();
    lm_code rc = open_inputs(&d, e);
    if (!rc)
        rc = opt.to_lora && lm_text_ends(tool.output, ".gguf") ? make_gguf(&d, e)
                                                               : make_folder(&d, e);
    for (int i = 0; i < d.n; i++)
        lm_tune_folder_close(d.adapter[i]);
    lm_free(d.adapter);
    lm_free(d.weight);
    lm_tune_bases_fini(&d.bases);
    lm_model_source_close(d.tuned);
    lm_model_source_close(d.base);
    lm_par_free(d.par);
    return rc;
}
