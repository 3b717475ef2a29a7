/* SPDX-License-Identifier: Apache-2.0 */
/* tune_driver -- conversions of adapters for test_tune.py.
 *
 *   to-lora BASE ADAPTER OUT RANK SHARE       an adapter of any method as LoRA
 *   extract BASE TUNED OUT RANK SHARE         the difference of two models as LoRA
 *   combine HOW BASE OUT A WEIGHT B WEIGHT    linear, cat or svd
 *   start KIND BASE MODULE OUT                LoRA's start: A, B and the changed W, as doubles
 * Prints a line of what was made. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/adapter_out.h"
#include "tune/apply.h"
#include "tune/convert.h"

static lm_err e;

static void must(lm_code rc)
{
    if (!rc)
        return;
    fprintf(stderr, "%s: %s: %s\n", e.where, e.what, e.todo);
    exit(1);
}

static void told(const lm_tune_lora_report *r)
{
    printf("%zu %zu %lld %lld %.6g %.6g\n", r->modules, r->whole, (long long)r->least,
           (long long)r->most, r->lost, r->worst);
}

/* LoRA's start on W of a module. */
static void start(const char *kind, lm_model_source *base, const lm_tune_bases *b, const char *name,
                  const char *out)
{
    const lm_tune_base *m = lm_tune_base_find(b, name, strlen(name));
    const lm_tune_method *t = lm_tune_method_of("LORA");
    json_t *config = NULL;
    double hyper[32], *v[LM_TUNE_TENSORS] = { NULL }, *w;
    bool changed = false;
    FILE *f = fopen(out, "wb");
    size_t n;

    must(lm_tune_config_new(t, NULL, "CAUSAL_LM", &config, &e));
    json_object_set_new(config, "init_lora_weights", json_string(kind));
    json_object_set_new(config, "r", json_integer(4));
    json_object_set_new(config, "lora_alpha", json_integer(8));
    must(lm_tune_read_hyper(t, config, name, "config", hyper, &e));
    lm_tune_module module = {
        .name = name, .out = m->out, .in = m->in, .hyper = hyper, .config = config
    };
    n = (size_t)(m->out * m->in);
    w = calloc(n, sizeof *w);
    v[0] = calloc((size_t)(4 * m->in), sizeof *w);
    v[1] = calloc((size_t)(4 * m->out), sizeof *w);
    must(lm_model_source_load(base, lm_model_source_find(base, m->weight), LM_DTYPE_F64, w, &e));
    must(t->start(&module, w, &changed, v, lm_rng_make(1, "start", 0), &e));
    fwrite(v[0], sizeof *w, (size_t)(4 * m->in), f);
    fwrite(v[1], sizeof *w, (size_t)(4 * m->out), f);
    fwrite(w, sizeof *w, n, f);
    fclose(f);
    json_decref(config);
    free(w);
    free(v[0]);
    free(v[1]);
}

static lm_tune_folder *adapter(const char *path, const lm_tune_bases *b)
{
    lm_tune_folder *f = NULL;

    must(lm_tune_folder_open(path, NULL, &f, &e));
    must(lm_tune_folder_bind(f, b, &e));
    return f;
}

static lm_model_source *open_model(const char *path)
{
    lm_model_source *m = NULL;

    must(lm_model_source_open(path, NULL, &m, &e));
    return m;
}

int main(int argc, char **argv)
{
    lm_tune_lora_opts o = { 0 };
    lm_tune_lora_report r = { 0 };
    lm_tune_bases b = { 0 };
    lm_model_source *base, *tuned = NULL;
    lm_tune_folder *f[2] = { NULL };

    if (argc < 6)
        return 2;
    bool combines = !strcmp(argv[1], "combine"), starts = !strcmp(argv[1], "start");
    base = open_model(argv[combines || starts ? 3 : 2]);
    must(lm_tune_bases_read(base, false, &b, &e));
    if (starts) {
        start(argv[2], base, &b, argv[4], argv[5]);
    } else if (combines) {
        static const char *const kinds[] = { "linear", "cat", "svd" };
        const double weight[] = { atof(argv[6]), atof(argv[8]) };
        int how = 0;

        while (how < 2 && strcmp(kinds[how], argv[2]) != 0)
            how++;
        f[0] = adapter(argv[5], &b);
        f[1] = adapter(argv[7], &b);
        must(finished(
            lm_tune_combine(f, weight, 2, (lm_tune_combination)how, &o, onto(argv[4]), &r, &e)));
    } else {
        o.rank = atoll(argv[5]);
        o.share = argc > 6 ? atof(argv[6]) : 0;
        if (!strcmp(argv[1], "extract")) {
            tuned = open_model(argv[3]);
            must(finished(lm_tune_extract(base, tuned, &b, &o, onto(argv[4]), &r, &e)));
        } else {
            f[0] = adapter(argv[3], &b);
            must(finished(lm_tune_to_lora(f[0], base, &o, onto(argv[4]), &r, &e)));
        }
    }
    told(&r);
    lm_tune_folder_close(f[0]);
    lm_tune_folder_close(f[1]);
    lm_tune_bases_fini(&b);
    lm_model_source_close(tuned);
    lm_model_source_close(base);
    return 0;
}
