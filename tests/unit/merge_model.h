/* SPDX-License-Identifier: Apache-2.0 */
/* merge_model.h -- tiny models in a temporary folder for the tests of plans and engines. */
#ifndef LM_TESTS_MERGE_MODEL_H
#define LM_TESTS_MERGE_MODEL_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/folder.h"
#include "merge/engine.h"
#include "merge/plan.h"
#include "merge/recipe.h"

enum { ROWS = 12, COLS = 8 };

static char mm_old[4096];

/* Every test runs in a fresh folder. */
static inline int mm_enter(void **state)
{
    char dir[] = "/tmp/lm-test-XXXXXX";
    (void)state;
    return getcwd(mm_old, sizeof mm_old) && mkdtemp(dir) && !chdir(dir) ? 0 : -1;
}

static inline int mm_leave(void **state)
{
    char dir[4096];
    lm_err e = { 0 };
    (void)state;
    return getcwd(dir, sizeof dir) && !chdir(mm_old) && !lm_rm_rf(dir, &e) ? 0 : -1;
}

static inline void mm_put(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* Properties of a model; zero means the default. */
typedef struct {
    const char *type;       /* model_type; NULL: llama */
    const char *without;    /* a tensor to leave out */
    const char *extra;      /* a tensor to add, [ROWS] */
    lm_dtype dtype;         /* of all; F64 (0): F32 */
    int layers;             /* 0: 3 */
    int64_t vocab;          /* 0: ROWS */
    int64_t cols;           /* of up_proj; 0: COLS */
    bool tied, whole, ones; /* whole: up_proj is I32; ones: all numbers are 1 */
} mm_shape;

static inline double mm_value(uint64_t seed, const char *name, int64_t i)
{
    uint64_t h = 1469598103934665603u;
    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 1099511628211u;
    return lm_rng_normal(lm_rng_make(seed, "model", h), (uint64_t)i) / 8;
}

static inline void mm_names(const mm_shape *s, lm_st_plan *p)
{
    lm_dtype d = s->dtype ? s->dtype : LM_DTYPE_F32;
    int64_t table[2] = { s->vocab ? s->vocab : ROWS, COLS },
            up[2] = { ROWS, s->cols ? s->cols : COLS };
    char name[64];
    lm_err e = { 0 };

    lm_st_plan_add(p, "model.embed_tokens.weight", d, 2, table, &e);
    for (int l = 0; l < (s->layers ? s->layers : 3); l++) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.up_proj.weight", l);
        if (!s->without || strcmp(name, s->without) != 0)
            lm_st_plan_add(p, name, s->whole ? LM_DTYPE_I32 : d, 2, up, &e);
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", l);
        lm_st_plan_add(p, name, d, 1, up, &e);
    }
    lm_st_plan_add(p, "model.norm.weight", d, 1, up, &e);
    if (!s->tied)
        lm_st_plan_add(p, "lm_head.weight", d, 2, table, &e);
    if (s->extra)
        lm_st_plan_add(p, s->extra, d, 1, up, &e);
    assert_int_equal(e.code, LM_OK);
}

/* A model folder of counted random numbers. */
static inline void mm_model(const char *path, uint64_t seed, const mm_shape *shape)
{
    static const mm_shape usual;
    const mm_shape *s = shape ? shape : &usual;
    char text[256];
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    json_t *c = NULL;
    lm_err e = { 0 };

    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"num_hidden_layers\":%d,\"vocab_size\":%d,"
             "\"tie_word_embeddings\":%s,\"torch_dtype\":\"float32\"}",
             s->type ? s->type : "llama", s->layers ? s->layers : 3,
             s->vocab ? (int)s->vocab : ROWS, s->tied ? "true" : "false");
    assert_int_equal(lm_json_parse(text, strlen(text), "config", &c, &e), LM_OK);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    mm_names(s, p);
    lm_folder_spec spec = { .config = c, .plan = p, .keep_order = true };
    assert_int_equal(lm_folder_create(path, true, NULL, &spec, &f, &e), LM_OK);
    for (const lm_st_tensor *t; (t = lm_folder_next(f)) != NULL;) {
        double v[1024];
        assert_true(t->count <= 1024);
        for (int64_t i = 0; i < t->count; i++)
            v[i] = s->ones                    ? 1
                   : t->dtype == LM_DTYPE_I32 ? (double)i + (double)seed
                                              : mm_value(seed, t->name, i);
        assert_int_equal(lm_folder_write_as(f, LM_DTYPE_F64, v, t->count, &e), LM_OK);
    }
    assert_int_equal(lm_folder_commit(f, &e), LM_OK);
    lm_st_plan_free(p);
    json_decref(c);
}

/* A recipe of operands; base may be NULL. */
static inline lm_merge_recipe *mm_recipe(const char *method, const char *base,
                                         const char *const *operand)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_merge_recipe_new(method, &r, &e);

    if (!rc && base)
        rc = lm_merge_recipe_base(r, base, &e);
    for (; !rc && *operand; operand++)
        rc = lm_merge_recipe_model(r, *operand, &e);
    if (rc)
        fail_msg("%s: %s", e.where, e.what);
    return r;
}

static inline lm_merge_recipe *mm_yaml(const char *text)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };

    if (lm_merge_recipe_parse(text, strlen(text), "m.yaml", &r, &e))
        fail_msg("%s: %s", e.where, e.what);
    return r;
}

/* Merge to `out`; frees r. */
static inline void mm_merge(lm_merge_recipe *r, const char *out, int threads)
{
    static char *argv[] = { "merge", NULL };
    lm_history_step step = { .tool = "merge", .version = "0", .argv = argv, .argc = 1 };
    lm_merge_write_opts o = { .output = out, .force = true, .step = &step };
    lm_merge_plan *p = NULL;
    lm_merge_engine *g = NULL;
    lm_par *par = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_par_new(&par, threads, &e);

    rc = rc ? rc : lm_merge_recipe_check(r, &e);
    rc = rc ? rc : lm_merge_plan_new(r, NULL, &p, &e);
    rc = rc ? rc : lm_merge_engine_new(p, par, LM_CPU_REF, NULL, &g, &e);
    rc = rc ? rc : lm_merge_write(g, &o, &e);
    if (rc)
        fail_msg("%s: %s: %s", e.where, e.what, e.todo);
    lm_merge_engine_free(g);
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
    lm_par_free(par);
}

/* Tensor `name` of a model as doubles; count elements. */
static inline int64_t mm_load(const char *path, const char *name, double *v)
{
    lm_model_source *m = NULL;
    const lm_st_tensor *t;
    lm_err e = { 0 };
    int64_t n;

    if (lm_model_source_open(path, NULL, &m, &e))
        fail_msg("%s: %s", e.where, e.what);
    t = lm_model_source_find(m, name);
    if (!t)
        fail_msg("no tensor %s in %s", name, path);
    assert_int_equal(lm_model_source_load(m, t, LM_DTYPE_F64, v, &e), LM_OK);
    n = t->count;
    lm_model_source_close(m);
    return n;
}

static inline void mm_same(const char *a, const char *name_a, const char *b, const char *name_b)
{
    double x[1024], y[1024];
    int64_t n = mm_load(a, name_a, x);

    assert_int_equal(n, mm_load(b, name_b, y));
    assert_memory_equal(x, y, (size_t)n * sizeof *x);
}

#define OPERANDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

#endif
