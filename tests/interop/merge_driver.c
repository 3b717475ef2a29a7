/* SPDX-License-Identifier: Apache-2.0 */
/* merge_driver -- one call of a merge method for test_merge.py.
 *
 *   merge METHOD IN OUT [NAME=VALUE | MODEL:NAME=VALUE] ...   IN: safetensors with m0, m1, ... and,
 *       if there is one, base; OUT: the raw bytes of the result, in m0's type
 *   draws NAME MODEL SEED COUNT OUT                           the mask's random words, u32 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/safetensors.h"
#include "merge/method.h"

enum { MOST = 8 };
static lm_err e;

static void must(lm_code rc)
{
    if (!rc)
        return;
    fprintf(stderr, "%s: %s: %s\n", e.where, e.what, e.todo);
    exit(1);
}

static void hear(lm_sink *s, lm_log_level level, const char *text)
{
    (void)s;
    (void)level;
    fprintf(stderr, "%s\n", text);
}

static void save(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f)) {
        perror(path);
        exit(1);
    }
}

static lm_merge_operand operand(const lm_st *s, const lm_st_tensor *t)
{
    lm_merge_operand o = { .data = lm_st_data(s, t), .dtype = t->dtype };
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        o.param[p] = NAN;
    return o;
}

/* Set a parameter: "t=0.5" of the job, "1:weight=0.5" of a model. */
static void set(const lm_merge_method *m, lm_merge_job *j, lm_merge_operand *model, char *arg)
{
    char *value = strchr(arg, '='), *name = strchr(arg, ':');
    double *to = name ? model[atoi(arg)].param : j->param;
    int p;
    *value++ = 0;
    p = lm_merge_param_find(m, name ? name + 1 : arg);
    if (p < 0) {
        fprintf(stderr, "%s: no such parameter\n", arg);
        exit(1);
    }
    to[p] = atof(value);
}

static void merge(int argc, char **argv)
{
    const lm_merge_method *m;
    lm_merge_operand model[MOST], base;
    lm_sink sink = { .log = hear };
    const lm_st_tensor *t;
    lm_st *s;
    char name[8];
    lm_merge_job j = { .model = model, .cpu = lm_cpu_detect(), .sink = &sink };
    must(lm_merge_method_find(argv[2], &m, &e));
    must(lm_st_open(argv[3], &s, &e));
    for (snprintf(name, sizeof name, "m0"); j.n_models < MOST && (t = lm_st_find(s, name));
         snprintf(name, sizeof name, "m%d", j.n_models))
        model[j.n_models++] = operand(s, t);
    t = lm_st_find(s, "base");
    if (t) {
        base = operand(s, t);
        j.base = &base;
    }
    t = lm_st_find(s, "m0");
    j.name = "m0";
    j.ndim = t->ndim;
    j.dim = t->dim;
    j.count = t->count;
    j.out_dtype = t->dtype;
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        j.param[p] = NAN;
    for (int i = 5; i < argc; i++)
        set(m, &j, model, argv[i]);
    lm_merge_defaults(m, j.param);
    must(lm_merge_check(m, &j, &e));
    must(lm_alloc_n(&j.out, (size_t)t->bytes + 1, 1, "output", &e));
    must(lm_alloc_n(&j.work, m->work(&j, 1) + 64, 1, "scratch", &e));
    must(m->run(&j, &e));
    save(argv[4], j.out, (size_t)t->bytes);
    lm_free(j.out);
    lm_free(j.work);
    lm_st_close(s);
}

static void draws(char **argv)
{
    lm_rng r = lm_rng_make((uint64_t)atoll(argv[4]), "merge",
                           lm_hash_str(argv[2]) ^ (uint64_t)atoll(argv[3]));
    size_t n = (size_t)atoll(argv[5]);
    uint32_t *out;
    must(lm_alloc_n(&out, n + 1, 4, "draws", &e));
    for (size_t i = 0; i < n; i++)
        out[i] = lm_rng_u32(r, i);
    save(argv[6], out, 4 * n);
    lm_free(out);
}

int main(int argc, char **argv)
{
    if (argc >= 5 && !strcmp(argv[1], "merge"))
        merge(argc, argv);
    else if (argc == 7 && !strcmp(argv[1], "draws"))
        draws(argv);
    else
        return 2;
    return 0;
}
