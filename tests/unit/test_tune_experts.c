/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune_experts.c -- LoRA of parameters of experts: merged into each layout of a base, converted, added, extracted, and
 * what is refused.  E = 2, r = 2, in != out. */
#include <sys/stat.h>

#include "adapter_out.h"
#include "merge/lora.h"
#include "merge_model.h"
#include "tune/convert.h"
#include "tune/experts.h"

enum { E = 2, R = 2, H = 4, F = 3, MOST = 256 };

#define M    "model.layers.0.mlp.experts"
#define BOTH "\"target_parameters\": [\"mlp.experts.down_proj\", \"mlp.experts.gate_up_proj\"]"
#define LORA "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"target_modules\": [], "

/* ---- Tensors by name: numbers follow from the seed and the name ---- */

typedef struct {
    const char *name;
    int64_t dim[3];
} tensor;

static void put_file(const char *path, const lm_tune_saved *t, size_t n)
{
    lm_buf text = { 0 };
    lm_err e = { 0 };
    assert_int_equal(lm_tune_tensors_bytes(t, n, &text, &e), LM_OK);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text.data, 1, text.len, f), text.len);
    fclose(f);
    lm_buf_fini(&text);
}

static int64_t count_of(const tensor *t)
{
    return t->dim[0] * t->dim[1] * (t->dim[2] ? t->dim[2] : 1);
}

static void put_tensors(const char *path, uint64_t seed, const tensor *t, size_t n)
{
    static float v[8][MOST];
    lm_tune_saved s[8] = { 0 };
    for (size_t i = 0; i < n; i++) {
        s[i] = (lm_tune_saved){ t[i].name,
                                LM_DTYPE_F32,
                                t[i].dim[2] ? 3 : 2,
                                { t[i].dim[0], t[i].dim[1], t[i].dim[2] },
                                v[i] };
        for (int64_t k = 0; k < count_of(&t[i]); k++)
            v[i][k] = (float)mm_value(seed, t[i].name, k);
    }
    put_file(path, s, n);
}

static void put_model(const char *dir, const char *type, const tensor *t, size_t n)
{
    char text[128], path[64];
    mkdir(dir, 0777);
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", \"num_hidden_layers\": 1}", type);
    snprintf(path, sizeof path, "%s/config.json", dir);
    mm_put(path, text);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    put_tensors(path, 1, t, n);
}

static void put_adapter(const char *dir, const char *config, uint64_t seed, const tensor *t,
                        size_t n)
{
    char path[64];
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    mm_put(path, config);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    put_tensors(path, seed, t, n);
}

#define P "base_model.model." M
static const tensor both[] = { { P ".base_layer.lora_A.weight", { E * R, H } },
                               { P ".base_layer.lora_B.weight", { 2 * F, R *E } },
                               { P ".lora_A.weight", { E * R, F } },
                               { P ".lora_B.weight", { H, R *E } } };
static const tensor stacked[] = { { M ".gate_up_proj", { E, 2 * F, H } },
                                  { M ".down_proj", { E, H, F } } };
static const tensor turned[] = { { M ".gate_up_proj", { E, H, 2 * F } },
                                 { M ".down_proj", { E, F, H } } };
static const tensor apart[] = {
    { M ".0.gate_proj.weight", { F, H } }, { M ".0.up_proj.weight", { F, H } },
    { M ".0.down_proj.weight", { H, F } }, { M ".1.gate_proj.weight", { F, H } },
    { M ".1.up_proj.weight", { F, H } },   { M ".1.down_proj.weight", { H, F } }
};
#define S "model.layers.0.block_sparse_moe.experts"
static const tensor mixtral[] = { { S ".0.w1.weight", { F, H } }, { S ".0.w3.weight", { F, H } },
                                  { S ".0.w2.weight", { H, F } }, { S ".1.w1.weight", { F, H } },
                                  { S ".1.w3.weight", { F, H } }, { S ".1.w2.weight", { H, F } } };

/* ---- The merge, held against the formula ---- */

typedef struct {
    lm_model_source *base;
    lm_lora *l;
} merge;

static lm_code open_merge(const char *base, const char *adapter, merge *m, lm_err *e)
{
    *m = (merge){ 0 };
    assert_int_equal(lm_model_source_open(base, NULL, &m->base, e), LM_OK);
    lm_code rc = lm_lora_open(adapter, NULL, &m->l, e);
    return rc ? rc : lm_lora_bind(m->l, m->base, NULL, e);
}

static void close_merge(merge *m)
{
    lm_lora_close(m->l);
    lm_model_source_close(m->base);
}

static void merged(const merge *m, const char *name, float *out)
{
    static float w[MOST];
    lm_err e = { 0 };
    const lm_st_tensor *t = lm_model_source_find(m->base, name);
    assert_non_null(t);
    assert_int_equal(lm_model_source_load(m->base, t, LM_DTYPE_F32, w, &e), LM_OK);
    if (lm_lora_effect_on(m->l, t) == LM_LORA_ADDED)
        assert_int_equal(lm_lora_add(m->l, t, w, out, NULL, &e), LM_OK);
    else
        memcpy(out, w, (size_t)t->count * sizeof *out);
}

/* s B_e A_e at output o and input i, of the pair with that inner part in its name. */
static double change(uint64_t seed, const char *inner, int64_t in, int64_t e, int64_t o, int64_t i)
{
    char a[128], b[128];
    double sum = 0;
    snprintf(a, sizeof a, P "%s.lora_A.weight", inner);
    snprintf(b, sizeof b, P "%s.lora_B.weight", inner);
    for (int64_t k = 0; k < R; k++)
        sum += (float)mm_value(seed, b, o * R * E + k * E + e) *
               (double)(float)mm_value(seed, a, (e * R + k) * in + i);
    return 1.5 * sum;
}

static void near(float got, const char *name, int64_t at, double change)
{
    assert_true(fabs((float)mm_value(1, name, at) + change - got) < 1e-6);
}

static void check_whole(const merge *m, const tensor *t, uint64_t seed, const char *inner,
                        bool turn)
{
    static float got[MOST];
    int64_t out = t->dim[turn ? 2 : 1], in = t->dim[turn ? 1 : 2];
    merged(m, t->name, got);
    for (int64_t e = 0; e < E; e++)
        for (int64_t o = 0; o < out; o++)
            for (int64_t i = 0; i < in; i++) {
                int64_t at = e * out * in + (turn ? i * out + o : o * in + i);
                near(got[at], t->name, at, change(seed, inner, in, e, o, i));
            }
}

static void check_matrix(const merge *m, const tensor *t, int64_t e, int64_t row, const char *inner)
{
    static float got[MOST];
    merged(m, t->name, got);
    for (int64_t o = 0; o < t->dim[0]; o++)
        for (int64_t i = 0; i < t->dim[1]; i++)
            near(got[o * t->dim[1] + i], t->name, o * t->dim[1] + i,
                 change(7, inner, t->dim[1], e, row + o, i));
}

static void merges(void **state)
{
    merge m;
    lm_err e = { 0 };
    char line[600];
    (void)state;
    put_adapter("a", LORA BOTH "}", 7, both, 4);
    put_model("m", "some_moe", stacked, 2);
    assert_int_equal(open_merge("m", "a", &m, &e), LM_OK);
    check_whole(&m, &stacked[0], 7, ".base_layer", false);
    check_whole(&m, &stacked[1], 7, "", false);
    assert_true(lm_lora_experts_line(m.l, line, sizeof line));
    assert_string_equal(line, "parameters of 2 experts, in '" M "': gate_up_proj by lora_A [4,4], "
                              "down_proj by lora_A [4,3]; by their shapes");
    close_merge(&m);
    put_model("t", "gpt_oss", turned, 2);
    assert_int_equal(open_merge("t", "a", &m, &e), LM_OK);
    check_whole(&m, &turned[0], 7, ".base_layer", true);
    check_whole(&m, &turned[1], 7, "", true);
    close_merge(&m);
    for (int way = 0; way < 2; way++) {
        const tensor *t = way ? mixtral : apart;
        put_model("s", "some_moe", t, 6);
        assert_int_equal(open_merge("s", "a", &m, &e), LM_OK);
        for (int x = 0; x < E; x++) {
            check_matrix(&m, &t[3 * x], x, 0, ".base_layer");
            check_matrix(&m, &t[3 * x + 1], x, F, ".base_layer");
            check_matrix(&m, &t[3 * x + 2], x, 0, "");
        }
        close_merge(&m);
    }
}

/* ---- Which pair is whose ---- */

static void nests(void **state)
{
    /* all shapes alike: as PEFT wraps, the first that is declared is innermost */
    static const tensor square[] = { { M ".down_proj", { E, H, H } },
                                     { M ".up_proj", { E, H, H } } };
    static const tensor odd[] = { { M ".alpha", { E, H, H } }, { M ".beta", { E, H, H } } };
    static const tensor pairs[] = { { P ".base_layer.lora_A.weight", { E * R, H } },
                                    { P ".base_layer.lora_B.weight", { H, R * E } },
                                    { P ".lora_A.weight", { E * R, H } },
                                    { P ".lora_B.weight", { H, R * E } } };
    /* the reverse nesting: shapes decide before order */
    static const tensor swapped[] = { { P ".base_layer.lora_A.weight", { E * R, F } },
                                      { P ".base_layer.lora_B.weight", { H, R * E } },
                                      { P ".lora_A.weight", { E * R, H } },
                                      { P ".lora_B.weight", { 2 * F, R * E } } };
    char line[600];
    merge m;
    lm_err e = { 0 };
    (void)state;
    put_adapter("a",
                LORA "\"target_parameters\": [\"mlp.experts.down_proj\", \"experts.up_proj\"]}", 7,
                pairs, 4);
    put_model("m", "some_moe", square, 2);
    assert_int_equal(open_merge("m", "a", &m, &e), LM_OK);
    check_whole(&m, &square[1], 7, ".base_layer", false);
    check_whole(&m, &square[0], 7, "", false);
    assert_true(lm_lora_experts_line(m.l, line, sizeof line));
    assert_non_null(strstr(line, "shapes fit both ways: in the order in which PEFT wraps them"));
    close_merge(&m);
    put_adapter("a", LORA BOTH "}", 7, swapped, 4);
    put_model("m", "some_moe", stacked, 2);
    assert_int_equal(open_merge("m", "a", &m, &e), LM_OK);
    check_whole(&m, &stacked[0], 7, "", false);
    check_whole(&m, &stacked[1], 7, ".base_layer", false);
    close_merge(&m);
    put_adapter("a", LORA "\"target_parameters\": [\"experts.alpha\", \"experts.beta\"]}", 7, pairs,
                4);
    put_model("m", "some_moe", odd, 2);
    assert_int_equal(open_merge("m", "a", &m, &e), LM_EUSAGE);
    assert_string_equal(e.what, "shapes do not say which pair of '" M
                                "' belongs to which of its parameters");
    close_merge(&m);
}

/* ---- What is refused ---- */

static void refuses_one(const char *config, const tensor *t, size_t n, lm_code code,
                        const char *what)
{
    merge m;
    lm_err e = { 0 };
    put_adapter("a", config, 7, t, n);
    assert_int_equal(open_merge("m", "a", &m, &e), code);
    if (!strstr(e.what, what))
        fail_msg("'%s' has no '%s'", e.what, what);
    close_merge(&m);
}

static void refuses(void **state)
{
    static const tensor wrong[] = { { P ".lora_A.weight", { E * R, F + 1 } },
                                    { P ".lora_B.weight", { H, R * E } } };
    const char *down = LORA "\"target_parameters\": [\"mlp.experts.down_proj\"]}";
    (void)state;
    put_model("m", "some_moe", stacked, 2);
    refuses_one(LORA BOTH ", \"use_dora\": true}", both, 4, LM_EUSAGE, "use_dora is set");
    refuses_one(LORA BOTH ", \"init_lora_weights\": \"pissa\"}", both, 4, LM_EUSAGE,
                "init_lora_weights 'pissa' changes the base");
    refuses_one(LORA "\"target_parameters\": [3]}", both, 4, LM_EFORMAT,
                "target_parameters is not a list of names");
    refuses_one(LORA "\"target_parameters\": {\"a\": 1}}", both, 4, LM_EFORMAT,
                "is not a list of names");
    refuses_one(LORA BOTH "}", both, 3, LM_EFORMAT, "has lora_A but no lora_B");
    refuses_one(LORA BOTH "}", both, 2, LM_EUSAGE,
                "1 pair of lora_A and lora_B for '" M "', where m has 2");
    refuses_one(LORA "\"target_parameters\": [\"mlp.experts.w9\"]}", both, 4, LM_EUSAGE,
                "where m has 0");
    refuses_one(LORA "\"target_parameters\": [\"attn.w9\"]}", both, 4, LM_EUSAGE,
                "m has no module for");
    refuses_one(down, wrong, 2, LM_EUSAGE,
                "lora_A [4,4] and lora_B [4,4] of '" M
                "' do not fit down_proj [2,4,3] of the base");
    refuses_one(LORA BOTH ", \"rank_pattern\": {\"experts.down_proj\": 3}}", both, 4, LM_EUSAGE,
                "do not fit");
}

/* ---- Adapters made of them ---- */

typedef struct {
    lm_model_source *base;
    lm_tune_bases bases;
    lm_tune_folder *f[2];
} opened;

static void open_all(opened *o, const char *base, const char *a, const char *b)
{
    lm_err e = { 0 };
    *o = (opened){ 0 };
    assert_int_equal(lm_model_source_open(base, NULL, &o->base, &e), LM_OK);
    assert_int_equal(lm_tune_bases_read(o->base, false, &o->bases, &e), LM_OK);
    for (int i = 0; i < 2 && (i ? b : a); i++) {
        assert_int_equal(lm_tune_folder_open(i ? b : a, NULL, &o->f[i], &e), LM_OK);
        assert_int_equal(lm_tune_folder_bind(o->f[i], &o->bases, &e), LM_OK);
    }
}

static void close_opened(opened *o)
{
    for (int i = 0; i < 2; i++)
        lm_tune_folder_close(o->f[i]);
    lm_tune_bases_fini(&o->bases);
    lm_model_source_close(o->base);
}

/* The largest difference of what two adapters make of a base; w: its tensor. */
static double apart_by(const char *base, const char *x, const char *y, const char *w)
{
    static float a[MOST], b[MOST];
    merge m;
    lm_err e = { 0 };
    double most = 0;
    assert_int_equal(open_merge(base, x, &m, &e), LM_OK);
    merged(&m, w, a);
    int64_t n = lm_model_source_find(m.base, w)->count;
    close_merge(&m);
    assert_int_equal(open_merge(base, y, &m, &e), LM_OK);
    merged(&m, w, b);
    close_merge(&m);
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

static void converts(void **state)
{
    lm_tune_lora_opts how = { .rank = 2 };
    lm_tune_lora_report r;
    opened o;
    lm_err e = { 0 };
    (void)state;
    put_adapter("a", LORA BOTH "}", 7, both, 4);
    put_model("m", "some_moe", stacked, 2);
    open_all(&o, "m", "a", NULL);
    assert_int_equal(finished(lm_tune_to_lora(o.f[0], o.base, &how, onto("same"), &r, &e)), LM_OK);
    assert_int_equal(r.modules, 2);
    assert_true(r.lost == 0);
    how.rank = 1;
    assert_int_equal(finished(lm_tune_to_lora(o.f[0], o.base, &how, onto("less"), &r, &e)), LM_OK);
    assert_true(r.lost > 0.01 && r.lost < 1);
    for (int i = 0; i < 2; i++) {
        assert_true(apart_by("m", "a", "same", stacked[i].name) < 1e-6);
        assert_true(apart_by("m", "a", "less", stacked[i].name) > 1e-3);
    }
    close_opened(&o);
    open_all(&o, "m", "same", NULL);
    assert_non_null(lm_st_find(lm_tune_folder_tensors(o.f[0]), P ".base_layer.lora_A.weight"));
    assert_int_equal(lm_tune_folder_param(o.f[0], 0)->rank, 2);
    assert_string_equal(lm_tune_folder_param(o.f[0], 0)->stack.key, M ".gate_up_proj");
    close_opened(&o);
    /* one expert's change is of rank 1: so is what a share of nearly all keeps of both */
    how = (lm_tune_lora_opts){ .rank = 2, .share = 0.01 };
    open_all(&o, "m", "a", NULL);
    assert_int_equal(finished(lm_tune_to_lora(o.f[0], o.base, &how, onto("less"), &r, &e)), LM_OK);
    assert_int_equal(r.most, 1);
    close_opened(&o);
}

/* a, and b on down_proj alone, added; held against the sum of what each changes. */
static void combines(void **state)
{
    static const tensor down[] = { { P ".lora_A.weight", { E * R, F } },
                                   { P ".lora_B.weight", { H, R * E } } };
    static const lm_tune_combination how[] = { LM_TUNE_COMBINE_CAT, LM_TUNE_COMBINE_SVD,
                                               LM_TUNE_COMBINE_LINEAR };
    static float got[MOST];
    const double w[] = { 0.5, -2 };
    (void)state;
    put_adapter("a", LORA BOTH "}", 7, both, 4);
    put_adapter("b", LORA "\"target_parameters\": [\"mlp.experts.down_proj\"]}", 8, down, 2);
    put_model("m", "some_moe", stacked, 2);
    for (int k = 0; k < 3; k++) {
        const lm_tune_lora_opts opts = { .rank = 4 };
        lm_tune_lora_report r;
        opened o;
        merge m;
        lm_err e = { 0 };
        open_all(&o, "m", "b", "a"); /* the outer one first */
        assert_int_equal(finished(lm_tune_combine(o.f, (const double[]){ w[1], w[0] }, 2, how[k],
                                                  &opts, onto("sum"), &r, &e)),
                         LM_OK);
        close_opened(&o);
        assert_int_equal(open_merge("m", "sum", &m, &e), LM_OK);
        merged(&m, stacked[0].name, got);
        for (int64_t i = 0; i < E * 2 * F * H; i++)
            near(got[i], stacked[0].name, i,
                 w[0] * change(7, ".base_layer", H, i / (2 * F * H), i / H % (2 * F), i % H));
        merged(&m, stacked[1].name, got);
        for (int64_t i = 0; how[k] != LM_TUNE_COMBINE_LINEAR && i < E * H * F; i++) {
            int64_t x = i / (H * F), out = i / F % H, in = i % F;
            near(got[i], stacked[1].name, i,
                 w[0] * change(7, "", F, x, out, in) + w[1] * change(8, "", F, x, out, in));
        }
        close_merge(&m);
    }
}

static void extracts(void **state)
{
    (void)state;
    for (int way = 0; way < 2; way++) {
        const tensor *t = way ? turned : stacked;
        const lm_tune_lora_opts how = { .rank = 2 };
        static float v[2][MOST];
        lm_tune_saved s[2] = { 0 };
        lm_tune_lora_report r;
        lm_model_source *tuned = NULL;
        opened o;
        merge m;
        lm_err e = { 0 };
        put_adapter("a", LORA BOTH "}", 7, both, 4);
        put_model("m", way ? "gpt_oss" : "some_moe", t, 2);
        put_model("u", "some_moe", t, 2);
        assert_int_equal(open_merge("m", "a", &m, &e), LM_OK);
        for (int i = 0; i < 2; i++) {
            merged(&m, t[i].name, v[i]);
            s[i] = (lm_tune_saved){
                t[i].name, LM_DTYPE_F32, 3, { t[i].dim[0], t[i].dim[1], t[i].dim[2] }, v[i]
            };
        }
        close_merge(&m);
        put_file("u/model.safetensors", s, 2);
        open_all(&o, "m", NULL, NULL);
        assert_int_equal(lm_model_source_open("u", NULL, &tuned, &e), LM_OK);
        assert_int_equal(
            finished(lm_tune_extract(o.base, tuned, &o.bases, &how, onto("x"), &r, &e)), LM_OK);
        assert_int_equal(r.modules, 2);
        lm_model_source_close(tuned);
        close_opened(&o);
        for (int i = 0; i < 2; i++)
            assert_true(apart_by("m", "a", "x", t[i].name) < 1e-5);
    }
}

/* A change that LoRA has no place for is not lost in silence. */
static void extract_refuses(void **state)
{
    static const tensor more[] = { { M ".gate_up_proj", { E, 2 * F, H } },
                                   { M ".gate_up_proj_bias", { E, 2 * F } } };
    const lm_tune_lora_opts how = { .rank = 2 };
    lm_tune_lora_report r;
    lm_model_source *tuned = NULL;
    opened o;
    lm_err e = { 0 };
    (void)state;
    put_model("m", "gpt_oss", more, 2);
    put_model("u", "gpt_oss", more, 2);
    put_tensors("u/model.safetensors", 2, more, 2);
    open_all(&o, "m", NULL, NULL);
    assert_int_equal(lm_model_source_open("u", NULL, &tuned, &e), LM_OK);
    assert_int_equal(finished(lm_tune_extract(o.base, tuned, &o.bases, &how, onto("x"), &r, &e)),
                     LM_EUSAGE);
    assert_non_null(strstr(e.what, "gate_up_proj_bias' differs from the base"));
    lm_model_source_close(tuned);
    close_opened(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(merges, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(nests, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(refuses, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(converts, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(combines, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(extracts, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(extract_refuses, mm_enter, mm_leave),
    };
    return cmocka_run_group_tests_name("tune experts", tests, NULL, NULL);
}
