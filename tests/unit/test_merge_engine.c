/* SPDX-License-Identifier: Apache-2.0 */
/* The merge engine: the same bytes for any number of threads, a weight of one reproduces the
 * model's bits, layers get their new positions, streams, LoRA folders, side data, provenance. */
#include "tests/unit/merge_model.h"

#include <sys/stat.h>

static const char *const up1 = "model.layers.1.mlp.up_proj.weight";

static void sums(void **state)
{
    double b[1024], x[1024], y[1024], got[1024];
    int64_t n;

    (void)state;
    mm_model("b", 1, NULL);
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    mm_merge(mm_recipe("dem", "b", OPERANDS("x:0.4", "y:0.7")), "o", 1);
    n = mm_load("b", up1, b);
    mm_load("x", up1, x);
    mm_load("y", up1, y);
    assert_int_equal(mm_load("o", up1, got), n);
    for (int64_t i = 0; i < n; i++)
        assert_true(got[i] == (float)(b[i] + (0.4 * (x[i] - b[i]) + 0.7 * (y[i] - b[i]))));
}

static void one(void **state)
{
    mm_shape s = { .dtype = LM_DTYPE_BF16 };

    (void)state;
    mm_model("b", 1, &s);
    mm_model("x", 2, &s);
    mm_merge(mm_recipe("dem", "b", OPERANDS("x:1")), "o", 1);
    mm_same("o", up1, "x", up1);
    mm_same("o", "lm_head.weight", "x", "lm_head.weight");
    mm_merge(mm_recipe("linear", NULL, OPERANDS("x:1", "b:0")), "p", 1);
    mm_same("p", up1, "x", up1);
}

static void read_whole(const char *path, lm_buf *out)
{
    lm_err e = { 0 };
    assert_int_equal(lm_file_read(path, 1 << 20, out, &e), LM_OK);
}

static void threads(void **state)
{
    lm_buf a = { 0 }, b = { 0 };

    (void)state;
    mm_model("b", 1, NULL);
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    mm_merge(mm_recipe("dare_ties", "b", OPERANDS("x:weight=0.4,density=0.5", "y")), "o", 1);
    mm_merge(mm_recipe("dare_ties", "b", OPERANDS("x:weight=0.4,density=0.5", "y")), "p", 3);
    read_whole("o/model.safetensors", &a);
    read_whole("p/model.safetensors", &b);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

static void stacks(void **state)
{
    double x[1024], o[1024];
    int64_t n;

    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, &(mm_shape){ .whole = false });
    mm_merge(mm_yaml("merge_method: passthrough\nslices:\n"
                     "  - sources: [{model: x, layer_range: [1, 3]}]\n"
                     "  - sources: [{model: y, layer_range: [0, 2], parameters: {scale: 0.5}}]\n"),
             "o", 2);
    mm_same("o", "model.layers.0.mlp.up_proj.weight", "x", up1);
    mm_same("o", "model.layers.1.input_layernorm.weight", "x",
            "model.layers.2.input_layernorm.weight");
    mm_same("o", "model.embed_tokens.weight", "x", "model.embed_tokens.weight");
    n = mm_load("o", "model.layers.3.mlp.up_proj.weight", o);
    mm_load("y", up1, x);
    for (int64_t i = 0; i < n; i++)
        assert_true(o[i] == (float)(x[i] * 0.5));
    n = mm_load("o", "lm_head.weight", o);
    mm_load("y", "lm_head.weight", x);
    assert_true(o[5] == (float)(x[5] * 0.5));
}

/* Integers are copied from the base; types of the result. */
static void types(void **state)
{
    lm_model_source *m = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("x", 2, &(mm_shape){ .whole = true });
    mm_model("y", 2, &(mm_shape){ .whole = true, .dtype = LM_DTYPE_F16 });
    lm_merge_recipe *r = mm_recipe("linear", NULL, OPERANDS("x", "y"));
    r->out_dtype = LM_DTYPE_BF16;
    mm_merge(r, "o", 1);
    mm_same("o", up1, "x", up1);
    assert_int_equal(lm_model_source_open("o", NULL, &m, &e), LM_OK);
    assert_int_equal(lm_model_source_find(m, up1)->dtype, LM_DTYPE_I32);
    assert_int_equal(lm_model_source_find(m, "model.norm.weight")->dtype, LM_DTYPE_BF16);
    assert_string_equal(
        json_string_value(json_object_get(lm_model_source_config(m), "torch_dtype")), "bfloat16");
    assert_non_null(lm_model_source_meta(m, LM_HISTORY_KEY));
    assert_non_null(strstr(lm_model_source_meta(m, LM_HISTORY_KEY), "xxh3_sample"));
    assert_non_null(strstr(lm_model_source_meta(m, LM_MERGE_KEY), "\"method\":\"linear\""));
    lm_model_source_close(m);
}

/* A tensor in memory, with other weights than the recipe's. */
static void in_memory(void **state)
{
    lm_merge_recipe *r;
    lm_merge_plan *p = NULL;
    lm_merge_engine *g = NULL;
    double weight[3] = { 0, 0, 1 }, want[1024];
    float got[1024];
    lm_err e = { 0 };

    (void)state;
    mm_model("b", 1, NULL);
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    r = mm_recipe("dem", "b", OPERANDS("x:0.4", "y:0.7"));
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_OK);
    assert_int_equal(lm_merge_engine_new(p, NULL, LM_CPU_REF, NULL, &g, &e), LM_OK);
    for (int64_t i = 0; i < p->n; i++) {
        assert_int_equal(lm_merge_engine_tensor(g, i, weight, LM_DTYPE_F32, got, &e), LM_OK);
        int64_t n = mm_load("y", p->tensor[i].name, want);
        for (int64_t k = 0; k < n; k++)
            assert_true((double)got[k] == want[k]);
    }
    lm_merge_engine_free(g);
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

/* A file of side data: one value for each tensor. */
static const char *fisher_of = up1;

static void put_fisher(const char *path, double value)
{
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    int64_t dim = 1;
    float v = (float)value;
    lm_err e = { 0 };

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, fisher_of, LM_DTYPE_F32, 1, &dim, &e), LM_OK);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    assert_int_equal(lm_st_write(w, &v, sizeof v, &e), LM_OK);
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

/* A file of side data without tensors. */
static void put_nothing(const char *path)
{
    static const char file[] = "\2\0\0\0\0\0\0\0{}";
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(file, 1, sizeof file - 1, f), sizeof file - 1);
    assert_int_equal(fclose(f), 0);
}

static void fisher(void **state)
{
    double x[1024], y[1024], o[1024];
    int64_t n;

    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    put_fisher("fx", 3);
    put_fisher("fy", 1);
    mm_merge(mm_recipe("fisher", NULL, OPERANDS("x:fisher=fx", "y:fisher=fy,weight=1")), "o", 1);
    n = mm_load("o", up1, o);
    mm_load("x", up1, x);
    mm_load("y", up1, y);
    for (int64_t i = 0; i < n; i++)
        assert_true(fabs(o[i] - (0.75 * x[i] + 0.25 * y[i])) < 1e-7);
}

static void no_fisher(const char *first, const char *second, const char *what)
{
    const char *const operands[] = { first, second, NULL };
    lm_merge_recipe *r = mm_recipe("fisher", NULL, operands);
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    if (!lm_merge_recipe_check(r, &e))
        assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
    lm_merge_recipe_free(r);
}

/* Side data of the second model that are damaged. */
static void damaged_side(const char *method, const char *second, const char *where,
                         const char *what)
{
    const char *const operands[] = { !strcmp(method, "fisher") ? "x:fisher=fx" : "x", second,
                                     NULL };
    lm_merge_recipe *r = mm_recipe(method, NULL, operands);
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EFORMAT);
    assert_string_equal(e.where, where);
    assert_string_equal(e.what, what);
    lm_merge_recipe_free(r);
}

/* Importances of some models, of some tensors, or of none that there are. */
static void bad_fishers(void **state)
{
    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    put_fisher("fx", 3);
    fisher_of = "model.norm.weight";
    put_fisher("fy", 1);
    fisher_of = "up_proj";
    put_fisher("fz", 1);
    fisher_of = up1;
    no_fisher("x:fisher=fx", "y", "method fisher needs the importances of every model");
    no_fisher("x:fisher=fx", "y:fisher=fy", "its side data has no tensor 'model.layers.");
    no_fisher("x:fisher=fx", "y:fisher=fz", "y has no tensor 'up_proj'");
    put_fisher("f0", 0);
    damaged_side("fisher", "y:fisher=f0", "f0", "all importances are 0");
    put_nothing("none");
    damaged_side("fisher", "y:fisher=none", "none", "it holds no tensors");
    damaged_side("regmean", "y:gram=none", "none", "it holds no tensors");
}

/* ---- LoRA ---- */

enum { RANK = 2 };
static double rows_of_a[RANK]; /* not 0: A has these in its rows, B is 1 */
static bool put_magnitude;     /* DoRA's, for each output */

static void put_lora(const char *dir, const char *config, const char *module, bool turned)
{
    int64_t a[2] = { RANK, turned ? ROWS : COLS }, b[2] = { turned ? COLS : ROWS, RANK };
    char name[160], path[160];
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };

    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    mm_put(path, config);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    if (module) {
        snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
        assert_int_equal(lm_st_plan_add(p, name, LM_DTYPE_F32, 2, a, &e), LM_OK);
        snprintf(name, sizeof name, "base_model.model.%s.lora_B.weight", module);
        assert_int_equal(lm_st_plan_add(p, name, LM_DTYPE_F32, 2, b, &e), LM_OK);
    }
    if (put_magnitude) {
        snprintf(name, sizeof name, "base_model.model.%s.lora_magnitude_vector", module);
        assert_int_equal(lm_st_plan_add(p, name, LM_DTYPE_F32, 1, b, &e), LM_OK);
    }
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    for (const lm_st_tensor *t; (t = lm_st_next(w)) != NULL;) {
        double v[256];
        for (int64_t i = 0; i < t->count; i++)
            v[i] = !rows_of_a[0]           ? mm_value(9, t->name, i)
                   : strstr(t->name, "_A") ? rows_of_a[i / t->dim[1]]
                                           : 1;
        assert_int_equal(lm_st_write_as(w, LM_DTYPE_F64, v, t->count, &e), LM_OK);
    }
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

/* s B A at (i, j), from the same numbers. */
static double delta(double s, int64_t i, int64_t j, int64_t in)
{
    const char *module = "model.layers.1.mlp.up_proj";
    char a[160], b[160];
    double sum = 0;

    snprintf(a, sizeof a, "base_model.model.%s.lora_A.weight", module);
    snprintf(b, sizeof b, "base_model.model.%s.lora_B.weight", module);
    for (int64_t k = 0; k < RANK; k++)
        sum +=
            (double)(float)mm_value(9, b, i * RANK + k) * (double)(float)mm_value(9, a, k * in + j);
    return s * sum;
}

#define LORA_CONFIG                                                \
    "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 3, "      \
    "\"rank_pattern\": {\"layers\\\\.[01]\\\\.mlp.up_proj\": 2}, " \
    "\"alpha_pattern\": {\"up_proj\": 5}, \"use_rslora\": true, "  \
    "\"base_model_name_or_path\": \"b\"}"

static void lora(void **state)
{
    double b[1024], o[1024];
    int64_t n;

    (void)state;
    mm_model("b", 1, NULL);
    put_lora("l", LORA_CONFIG, "model.layers.1.mlp.up_proj", false);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("l")), "o", 2);
    n = mm_load("o", up1, o);
    mm_load("b", up1, b);
    for (int64_t i = 0; i < n; i++)
        assert_true(o[i] == (float)(b[i] + delta(5 / sqrt(2), i / COLS, i % COLS, COLS)));
    mm_same("o", "model.layers.0.mlp.up_proj.weight", "b", "model.layers.0.mlp.up_proj.weight");
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+l")), "p", 1);
    mm_same("p", up1, "o", up1);
    mm_merge(mm_recipe("dem", "b", OPERANDS("b+l:0.5")), "q", 1);
    mm_load("q", up1, b);
    assert_true(fabs(b[7] - (o[7] - 0.5 * delta(5 / sqrt(2), 0, 7, COLS))) < 1e-7);
}

/* Into 16 bits: the exact sum, rounded once. */
static void lora_rounds_once(void **state)
{
    double b[1024], o[1024];
    int64_t n;

    (void)state;
    mm_model("b", 1, &(mm_shape){ .dtype = LM_DTYPE_BF16 });
    put_lora("l", LORA_CONFIG, "model.layers.1.mlp.up_proj", false);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("l")), "o", 1);
    n = mm_load("o", up1, o);
    mm_load("b", up1, b);
    for (int64_t i = 0; i < n; i++) {
        double exact = b[i] + delta(5 / sqrt(2), i / COLS, i % COLS, COLS);
        assert_true(o[i] == (double)lm_bf16_to_f32(lm_f64_to_bf16(exact)));
    }
}

/* 1 + 2^-8 + 2^-40 is above the tie between two numbers of BF16; in FP32 it is on it. */
static void lora_tie(void **state)
{
    double o[1024];

    (void)state;
    mm_model("b", 1, &(mm_shape){ .dtype = LM_DTYPE_BF16, .ones = true });
    rows_of_a[0] = ldexp(1, -8);
    rows_of_a[1] = ldexp(1, -40);
    put_lora("l", "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 2}",
             "model.layers.1.mlp.up_proj", false);
    rows_of_a[0] = 0;
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+l")), "o", 1);
    mm_load("o", up1, o);
    assert_true(o[0] == 1 + ldexp(1, -7) && o[ROWS * COLS - 1] == o[0]);
}

static void lora_turned(void **state)
{
    double b[1024], o[1024];
    int64_t n;

    (void)state;
    mm_model("b", 1, NULL);
    put_lora("l",
             "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4, \"fan_in_fan_out\": true}",
             "model.layers.1.mlp.up_proj", true);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+l")), "o", 1);
    n = mm_load("o", up1, o);
    mm_load("b", up1, b);
    for (int64_t i = 0; i < n; i++)
        assert_true(o[i] == (float)(b[i] + delta(2, i % COLS, i / COLS, ROWS)));
}

/* Each output of W + s B A has the length of its magnitude and the direction of the sum. */
static void dora_of(bool turned)
{
    char config[160], name[160];
    double b[1024], o[1024];
    int64_t outs = turned ? COLS : ROWS, ins = turned ? ROWS : COLS;

    snprintf(config, sizeof config,
             "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4, \"use_dora\": true, "
             "\"fan_in_fan_out\": %s}",
             turned ? "true" : "false");
    put_magnitude = true;
    put_lora("l", config, "model.layers.1.mlp.up_proj", turned);
    put_magnitude = false;
    snprintf(name, sizeof name,
             "base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector");
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+l")), "o", 2);
    mm_load("o", up1, o);
    mm_load("b", up1, b);
    for (int64_t i = 0; i < outs; i++) {
        double squares = 0, m = (float)mm_value(9, name, i);

        for (int64_t k = 0; k < ins; k++) {
            double w = b[turned ? k * COLS + i : i * COLS + k] + delta(2, i, k, ins);
            squares += w * w;
        }
        for (int64_t k = 0; k < ins; k++) {
            int64_t at = turned ? k * COLS + i : i * COLS + k;
            double want = m / sqrt(squares) * (b[at] + delta(2, i, k, ins));
            assert_true(fabs(o[at] - want) <= 1e-7 * fabs(want));
        }
    }
}

static void lora_dora(void **state)
{
    (void)state;
    mm_model("b", 1, NULL);
    dora_of(false);
    dora_of(true);
}

/* The memory bound includes that of an adapter: the sum in F32, the factors in F64 twice. */
static void lora_in_the_bound(void **state)
{
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("b", 1, &(mm_shape){ .dtype = LM_DTYPE_BF16 });
    put_lora("l", LORA_CONFIG, "model.layers.1.mlp.up_proj", false);
    lm_merge_recipe *r = mm_recipe("passthrough", NULL, OPERANDS("b+l"));
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_OK);
    assert_int_equal(lm_merge_plan_bound(p),
                     2 * p->largest + (64u << 20) + 4 * ROWS * COLS + 16 * RANK * (ROWS + COLS));
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

static void no_lora(const char *config, const char *module, const char *what)
{
    lm_merge_recipe *r;
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    put_lora("l", config, module, false);
    r = mm_recipe("passthrough", NULL, OPERANDS("b+l"));
    assert_true(lm_merge_plan_new(r, NULL, &p, &e) < 0);
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
    lm_merge_recipe_free(r);
}

static void bad_loras(void **state)
{
    const char *const up = "model.layers.1.mlp.up_proj";

    (void)state;
    mm_model("b", 1, NULL);
    no_lora("{\"peft_type\": \"XLORA\"}", up, "'XLORA' is not a change of weights");
    no_lora("{\"peft_type\": \"NEW\"}", up, "'NEW' are not known");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"use_dora\": true}", up, "use_dora");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"init_lora_weights\": \"corda\"}", up,
            "'corda' changes the base");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 4}", up, "has rank 2, adapter_config.json says 4");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2}", "model.layers.7.mlp.up_proj",
            "b has no tensor 'model.layers.7.mlp.up_proj.weight'");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2}", "model.norm", "it does not fit the shape");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"rank_pattern\": {\"(\": 2}}", up,
            "'(' is not a valid regular expression");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"rank_pattern\": [2]}", up,
            "rank_pattern is not an object");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"alpha_pattern\": \"q_proj\"}", up,
            "alpha_pattern is not an object");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"rank_pattern\": {\"down_proj\": 1.5}}", up,
            "'down_proj' is 1.5, which is not a rank");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2, \"rank_pattern\": {\"down_proj\": \"2\"}}", up,
            "the value of 'down_proj' is not a number");
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2}", NULL, "holds no tensors");
    put_magnitude = true;
    no_lora("{\"peft_type\": \"LORA\", \"r\": 2}", up, "but use_dora is not set");
    put_magnitude = false;
}

/* Nothing is left when the output cannot be written or an input ends early. */
static void half(void **state)
{
    static char *argv[] = { "merge", NULL };
    lm_history_step step = { .tool = "merge", .version = "0", .argv = argv, .argc = 1 };
    lm_merge_write_opts o = { .output = "none/o", .step = &step };
    lm_merge_recipe *r;
    lm_merge_plan *p = NULL;
    lm_merge_engine *g = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("x", 2, NULL);
    r = mm_recipe("linear", NULL, OPERANDS("x"));
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_OK);
    assert_int_equal(lm_merge_engine_new(p, NULL, LM_CPU_REF, NULL, &g, &e), LM_OK);
    assert_int_equal(lm_merge_write(g, &o, &e), LM_EIO);
    assert_false(lm_path_exists("none"));
    lm_merge_engine_free(g);
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

/* An adapter that saves the head, the embedding or both, in numbers of their own, or in the
 * same. */
static void put_saved(const char *dir, const char *config, bool head, bool embed, bool same)
{
    const char *const names[] = { "base_model.model.lm_head.weight",
                                  "base_model.model.model.embed_tokens.weight" };
    char path[160];
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };

    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    mm_put(path, config);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    for (int i = 0; i < 2; i++)
        if (i ? embed : head)
            assert_int_equal(
                lm_st_plan_add(p, names[i], LM_DTYPE_F32, 2, (int64_t[]){ ROWS, COLS }, &e), LM_OK);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    for (const lm_st_tensor *t; (t = lm_st_next(w)) != NULL;) {
        double v[ROWS * COLS];
        for (int64_t i = 0; i < t->count; i++)
            v[i] = mm_value(9, same ? "same" : t->name, i);
        assert_int_equal(lm_st_write_as(w, LM_DTYPE_F64, v, t->count, &e), LM_OK);
    }
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

/* The table in `o` is that of seed 9 (saved), or of the base's embedding. */
static void expect_table(const char *model, const char *name, const char *saved)
{
    double o[1024];
    int64_t n = mm_load(model, name, o);

    assert_int_equal(n, ROWS * COLS);
    for (int64_t i = 0; i < n; i++) {
        float want =
            (float)(saved ? mm_value(9, saved, i) : mm_value(1, "model.embed_tokens.weight", i));
        assert_true(o[i] == want);
    }
}

static bool says_tied(const char *model)
{
    lm_model_source *m = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_model_source_open(model, NULL, &m, &e), LM_OK);
    bool tied = json_is_true(json_object_get(lm_model_source_config(m), "tie_word_embeddings"));
    assert_int_equal(lm_model_source_find(m, "lm_head.weight") == NULL, tied);
    lm_model_source_close(m);
    return tied;
}

/* PEFT: a saved module of a tied base has a separate copy; the other module keeps the base's
 * weights. */
static void lora_unties(void **state)
{
#define SAVES(list) \
    "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 2, \"modules_to_save\": [" list "]}"
    static const char head[] = "lm_head.weight", embed[] = "model.embed_tokens.weight";
    static const char own_head[] = "base_model.model.lm_head.weight",
                      own_embed[] = "base_model.model.model.embed_tokens.weight";
    double o[1024], h[1024];
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("b", 1, &(mm_shape){ .tied = true });
    put_saved("h", SAVES("\"lm_head\""), true, false, false);
    put_saved("m", SAVES("\"embed_tokens\""), false, true, false);
    put_saved("hm", SAVES("\"embed_tokens\", \"lm_head\""), true, true, false);
    put_saved("t", SAVES("\"embed_tokens\""), true, true, true);
    put_saved("r", SAVES(""), false, true, false); /* only saved with it, as more rows are */
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+h")), "oh", 1);
    assert_false(says_tied("oh"));
    expect_table("oh", head, own_head);
    expect_table("oh", embed, NULL);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+m")), "om", 1);
    assert_false(says_tied("om"));
    expect_table("om", head, NULL);
    expect_table("om", embed, own_embed);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+hm")), "ohm", 1);
    assert_false(says_tied("ohm"));
    expect_table("ohm", head, own_head);
    expect_table("ohm", embed, own_embed);
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+t")), "ot", 1);
    assert_true(says_tied("ot"));
    expect_table("ot", embed, "same");
    mm_merge(mm_recipe("passthrough", NULL, OPERANDS("b+r")), "or", 1);
    assert_true(says_tied("or"));
    expect_table("or", embed, own_embed);
    /* beside a model that is tied, whose head is its embedding; whichever comes first */
    for (int k = 0; k < 2; k++) {
        mm_merge(mm_recipe("linear", NULL, k ? OPERANDS("b", "b+h") : OPERANDS("b+h", "b")), "l",
                 2);
        assert_false(says_tied("l"));
        expect_table("l", embed, NULL);
        mm_load("l", head, o);
        for (int64_t i = 0; i < mm_load("oh", head, h); i++)
            assert_true(fabs(o[i] - (h[i] + (float)mm_value(1, embed, i)) / 2) < 1e-7);
    }
    /* a low-rank change of a head that is tied: PEFT's merge changes the embedding, its training
     * did not */
    put_lora("bad", "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 2}", "lm_head", false);
    lm_merge_recipe *r = mm_recipe("passthrough", NULL, OPERANDS("b+bad"));
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_string_equal(e.what, "it adapts the head, which b ties to its embedding");
    lm_merge_recipe_free(r);
#undef SAVES
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sums, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(one, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(threads, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(stacks, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(types, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(in_memory, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(bad_fishers, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(fisher, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_rounds_once, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_tie, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_turned, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_in_the_bound, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_dora, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(lora_unties, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(bad_loras, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(half, mm_enter, mm_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
