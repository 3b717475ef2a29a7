/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune_methods.c -- rules of adaptation on small matrices, their starts, choices of modules, and adapters' folders. */
#include "adapter_out.h"
#include "merge_model.h"
#include "tune/convert.h"
#include "tune/quantised.h"
#include "tune/torch_rng.h"
#include "tune_case.h"

enum { MOST = 1 << 16 };

static double distance(const double *a, const double *b, int64_t n)
{
    double d = 0, all = 0;

    for (int64_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        all += b[i] * b[i];
    }
    return sqrt(d / all);
}

/* Values that suit the small module. */
static const char small[] =
    "{\"r\": 4, \"init_r\": 4, \"gralora_k\": 2, \"block_size\": 8, \"oft_block_size\": 8, "
    "\"num_vectors\": 9,"
    " \"vector_length\": 8, \"n_frequency\": 20, \"group_size\": 8, \"sparsity\": 0.9, "
    "\"theta_d_length\": 12,"
    " \"u\": 3, \"token_indices\": [2, 5], \"effective_rank\": 6}";

static bool named(const char *list, const char *name)
{
    char word[40];

    snprintf(word, sizeof word, " %s ", name);
    return strstr(list, word) != NULL;
}

/* Every method's rule runs on what it begins with, and begins at the base unless PEFT's does not either. */
static void starts_at_base(void **state)
{
    static const char elsewhere[] = " VBLORA UNILORA C3A FOURIERFT FROD ";
    const lm_tune_method *m;
    double out[OUT * IN];
    int n = 0;

    (void)state;
    for (int i = 0; (m = lm_tune_method_at(i)); i++) {
        trial t;
        lm_err e = { 0 };

        if (!strcmp(m->peft_type, "FROD") || !strcmp(m->peft_type, "ADAMSS") ||
            (m->is & LM_TUNE_VECTORS) || !m->weight)
            continue;
        begin(&t, m, !strcmp(m->peft_type, "OFT") ? "{\"oft_block_size\": 8}" : small);
        if (t.l.m.in != IN)
            continue;
        double base[OUT * IN];
        for (int64_t k = 0; k < OUT * IN; k++)
            base[k] = normal(1, k);
        if (!strcmp(m->peft_type, "TRAINABLE_TOKENS"))
            t.l.m.embedding = true;
        if (lm_tune_weight(&t.l, t.w, out, NULL, &e))
            fail_msg("%s: %s: %s", m->name, e.where, e.what);
        for (int64_t k = 0; k < OUT * IN; k++)
            assert_true(isfinite(out[k]));
        if (!named(elsewhere, m->peft_type) && distance(out, base, OUT * IN) > 1e-6)
            fail_msg("%s begins %g away from its base", m->name, distance(out, base, OUT * IN));
        end(&t);
        n++;
    }
    assert_true(n > 25);
}

static void lora_start_keeps_base(void **state)
{
    static const char *const kinds[] = { "pissa", "olora", "gaussian", "orthogonal" };

    (void)state;
    for (int i = 0; i < 4; i++) {
        trial t;
        lm_err e = { 0 };
        char config[160];
        double out[OUT * IN], base[OUT * IN];

        snprintf(config, sizeof config,
                 "{\"r\": 4, \"lora_alpha\": 6, \"init_lora_weights\": \"%s\"}", kinds[i]);
        begin(&t, lm_tune_method_of("LORA"), config);
        for (int64_t k = 0; k < OUT * IN; k++)
            base[k] = normal(1, k);
        if (i < 2)
            assert_true(distance(t.w, base, OUT * IN) > 0.1);
        /* applied to the base: the rule takes the start out of it again */
        assert_int_equal(lm_tune_weight(&t.l, base, out, NULL, &e), LM_OK);
        assert_true(distance(out, base, OUT * IN) < 1e-12);
        end(&t);
    }
}

/* W + s B A by hand, and the exact factors. */
static void lora_by_hand(void **state)
{
    trial t;
    lm_err e = { 0 };
    double out[OUT * IN], left[OUT * 4], right[4 * IN];
    int64_t rank = 0;

    (void)state;
    begin(&t, lm_tune_method_of("LORA"), "{\"r\": 4, \"lora_alpha\": 6, \"use_rslora\": true}");
    for (int64_t i = 0; i < OUT * 4; i++)
        t.l.v[1][i] = normal(9, i);
    assert_int_equal(lm_tune_weight(&t.l, t.w, out, NULL, &e), LM_OK);
    assert_int_equal(t.l.method->low_rank(&t.l.m, t.l.v, &rank, left, right, &e), LM_OK);
    assert_int_equal(rank, 4);
    for (int64_t i = 0; i < OUT; i++)
        for (int64_t j = 0; j < IN; j++) {
            double d = 0, f = 0;

            for (int64_t k = 0; k < 4; k++) {
                d += 3 * t.l.v[1][i * 4 + k] * t.l.v[0][k * IN + j];
                f += left[i * 4 + k] * right[k * IN + j];
            }
            assert_true(fabs(out[i * IN + j] - t.w[i * IN + j] - d) < 1e-12);
            assert_true(fabs(f - d) < 1e-12);
        }
    end(&t);
}

/* With DoRA the rows of W' have the lengths m; a row of zeros has no direction, and remains zero. */
static void dora_by_hand(void **state)
{
    trial t;
    lm_err e = { 0 };
    double out[OUT * IN];

    (void)state;
    begin(&t, lm_tune_method_of("LORA"), "{\"r\": 4, \"lora_alpha\": 6, \"use_dora\": true}");
    for (int64_t i = 0; i < OUT * 4; i++) /* row 3 of B, and below of W, is zero */
        t.l.v[1][i] = i / 4 == 3 ? 0 : normal(9, i);
    memset(t.w + 3 * IN, 0, IN * sizeof *t.w);
    for (int64_t i = 0; i < OUT; i++)
        t.l.v[3][i] = 1 + 0.1 * (double)i;
    assert_int_equal(lm_tune_weight(&t.l, t.w, out, NULL, &e), LM_OK);
    for (int64_t i = 0; i < OUT; i++) {
        double row[IN], squares = 0;

        for (int64_t j = 0; j < IN; j++) {
            row[j] = t.w[i * IN + j];
            for (int64_t k = 0; k < 4; k++)
                row[j] += 1.5 * t.l.v[1][i * 4 + k] * t.l.v[0][k * IN + j];
            squares += row[j] * row[j];
        }
        for (int64_t j = 0; j < IN; j++) {
            double want = i == 3 ? 0 : t.l.v[3][i] * row[j] / sqrt(squares);

            assert_true(fabs(out[i * IN + j] - want) < 1e-12);
        }
    }
    end(&t);
}

/* C3A's first block: W'[i,k] - W[i,k] = K[(k - i) mod b] / in. */
static void c3a_by_hand(void **state)
{
    trial t;
    lm_err e = { 0 };
    double out[OUT * IN];

    (void)state;
    begin(&t, lm_tune_method_of("C3A"), "{\"block_size\": 8}");
    assert_int_equal(lm_tune_weight(&t.l, t.w, out, NULL, &e), LM_OK);
    for (int64_t i = 0; i < 8; i++)
        for (int64_t k = 0; k < 8; k++)
            assert_true(fabs(out[i * IN + k] - t.w[i * IN + k] - t.l.v[0][(k - i + 8) % 8] / IN) <
                        1e-12);
    end(&t);
}

/* ---- Rules by numbers: equations of PEFT's methods on matrices small enough to be written out ---- */

/* W + alpha / r (A1 B1) o (A2 B2) */
static void loha_by_numbers(void **state)
{
    const double d[] = { 2, 3, 0, -7 };
    trial t;

    (void)state;
    begin_at(&t, &lm_tune_loha, "{\"r\": 2, \"alpha\": 3}", "m.q_proj", 2, 2, false);
    SET(&t, 0, 1, 2, 3, 4);
    SET(&t, 1, 1, 1, 0, 1); /* A1 B1 = 1 3, 3 7 */
    SET(&t, 2, 2, 1, 0, -1);
    SET(&t, 3, 1, 0, 0, 1);
    gives(&t, 1.5, d, 4);
    end(&t);
}

/* W + alpha / (init_r + 1e-5) B diag(E) A, whatever ranks are left; init_r in place of an alpha that is not positive. */
static void adalora_by_numbers(void **state)
{
    static const struct {
        const char *config;
        double scale;
    } cases[] = {
        { "{\"init_r\": 2, \"lora_alpha\": 6}", 6 / 2.00001 },
        { "{\"init_r\": 2, \"lora_alpha\": 0}", 2 / 2.00001 },
        { "{\"init_r\": 4, \"lora_alpha\": 6, \"rank_pattern\":"
          " {\"m.k_proj.lora_E\": [true, true, true, true],"
          " \"base_model.model.m.q_proj.lora_E\": [false, true, true, false]}}",
          6 / 4.00001 },
    };
    const double d[] = { 2, 4, -1, 0 };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double left[4], right[4];
        int64_t rank = 0;
        lm_err e = { 0 };
        trial t;

        begin_at(&t, &lm_tune_adalora, cases[i].config, "m.q_proj", 2, 2, false);
        SET(&t, 0, 1, 2, 3, 4); /* A */
        SET(&t, 1, 2, -1);      /* E: diag(E) A = 2 4, -3 -4 */
        SET(&t, 2, 1, 0, 1, 1); /* B */
        gives(&t, cases[i].scale, d, 4);
        assert_int_equal(t.l.method->low_rank(&t.l.m, t.l.v, &rank, left, right, &e), LM_OK);
        assert_int_equal(rank, 2);
        for (int k = 0; k < 4; k++)
            assert_true(fabs(left[k / 2 * 2] * right[k % 2] +
                             left[k / 2 * 2 + 1] * right[2 + k % 2] - cases[i].scale * d[k]) <
                        1e-12);
        end(&t);
    }
}

/* W + alpha / r kron(w1, w2): row i c + k, column j d + l is w1[i,j] w2[k,l]. */
static void lokr_by_numbers(void **state)
{
    const double whole[] = { 1, 0, -1, 2, 0, -2, 2, 1, 0, 4, 2, 0,
                             3, 0, -3, 4, 0, -4, 6, 3, 0, 8, 4, 0 };
    const double low[] = { 1, 0, -1, 2, 0, -2, 2, 0, -2, 4, 0, -4,
                           3, 0, -3, 4, 0, -4, 6, 0, -6, 8, 0, -8 };
    double both[54];
    trial t;

    (void)state;
    begin_at(&t, &lm_tune_lokr, "{\"r\": 2, \"alpha\": 3}", "m.q_proj", 4, 6, false);
    SET(&t, 0, 1, 2, 3, 4);
    SET(&t, 3, 1, 0, -1, 2, 1, 0);
    gives(&t, 1.5, whole, 24);
    end(&t);
    /* a rank below half of the longer side of w2: w2 = w2_a w2_b */
    begin_at(&t, &lm_tune_lokr, "{\"r\": 1, \"alpha\": 2}", "m.q_proj", 4, 6, false);
    assert_true(t.tensor[3].off);
    SET(&t, 0, 1, 2, 3, 4);
    SET(&t, 4, 1, 2);
    SET(&t, 5, 1, 0, -1);
    gives(&t, 2, low, 24);
    end(&t);
    /* and decompose_both: w1 = w1_a w1_b [3,3], w2 [2,3] */
    begin_at(&t, &lm_tune_lokr,
             "{\"r\": 1, \"alpha\": 2, \"decompose_both\": true, \"decompose_factor\": 3}",
             "m.q_proj", 6, 9, false);
    assert_true(t.tensor[0].off && t.tensor[3].off);
    SET(&t, 1, 1, 0, 3);
    SET(&t, 2, 1, -1, 2);
    SET(&t, 4, 1, 2);
    SET(&t, 5, 1, -2, 4);
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 9; j++)
            both[i * 9 + j] =
                t.room[1][i / 2] * t.room[2][j / 3] * t.room[4][i % 2] * t.room[5][j % 3];
    gives(&t, 2, both, 54);
    end(&t);
}

/* Sides of w1 by decompose_factor: itself where it divides, else the largest divisor below it and below the root. */
static void lokr_divides(void **state)
{
    static const struct {
        int64_t factor, out, in, a, b;
    } cases[] = { { -1, 12, 24, 3, 4 },
                  { 6, 12, 24, 6, 6 },
                  { 5, 12, 24, 3, 4 },
                  { 2, 7, 9, 1, 1 },
                  { 8, 7, 9, 1, 3 } };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[80];
        trial t;

        snprintf(config, sizeof config, "{\"r\": 8, \"decompose_factor\": %d}",
                 (int)cases[i].factor);
        begin_at(&t, &lm_tune_lokr, config, "m.q_proj", cases[i].out, cases[i].in, false);
        assert_int_equal(t.tensor[0].dim[0], cases[i].a);
        assert_int_equal(t.tensor[0].dim[1], cases[i].b);
        assert_int_equal(t.tensor[3].dim[0], cases[i].out / cases[i].a);
        assert_int_equal(t.tensor[3].dim[1], cases[i].in / cases[i].b);
        end(&t);
    }
}

/* torch's uniform numbers of seed 0 within 1: the first five. */
static const double drawn[] = { -0.0074868202, 0.53644359, -0.82304513, -0.73593903, -0.38515437 };

/* W + diag(b) B diag(d) A: A [r, widest] and behind it B [highest, r] from one generator, uniform within sqrt(6 / columns). */
static void vera_by_numbers(void **state)
{
    trial t;
    double a[2], b[2], d[4];

    (void)state;
    for (int parts = 1; parts <= 2; parts++) { /* PVeRA's A has a row more for each rank */
        const bool p = parts == 2;
        const int64_t widest = p ? 2 : 4;
        lm_err e = { 0 };

        begin_at(&t, p ? &lm_tune_pvera : &lm_tune_vera, "{\"r\": 1}", "m.q_proj", 2, widest,
                 false);
        assert_int_equal(t.tensor[0].dim[0], parts);
        assert_int_equal(t.tensor[0].dim[1], widest);
        for (int k = 0; k < 4; k++)
            assert_true(fabs(t.room[0][k] - sqrt(6. / (double)widest) * drawn[k]) < 1e-6);
        assert_true(fabs(t.room[1][0] - sqrt(6.) * drawn[4]) < 1e-6);
        /* of a narrower module: the first columns of A */
        t.l.m.in = 2;
        for (int k = 0; k < 2; k++) {
            a[k] = t.room[0][k];
            b[k] = t.room[1][k];
        }
        t.room[2][0] = 3;
        SET(&t, 3, 2, -5);
        for (int k = 0; k < 4; k++)
            d[k] = (k < 2 ? 2 : -5) * b[k / 2] * 3 * a[k % 2];
        gives(&t, 1, d, 4);
        assert_int_equal(t.l.method->draw(&t.l.m, 0, t.room[0], &e), LM_OK);
        assert_true(t.room[0][1] == a[1]);
        end(&t);
    }
}

/* Scales of outputs are those of rows of W and of the bias; feed-forward modules have scales of inputs: of columns. */
static void ia3_by_numbers(void **state)
{
    const double w[] = { 1, 2, 3, 4, 5, 6 }, bias[] = { 10, 20 };
    const double rows[] = { 2, 4, 6, -4, -5, -6 }, cols[] = { 2, -2, 9, 8, -5, 18 };
    trial t;

    (void)state;
    for (int k = 0; k < 4; k++) {
        static const char *const config[] = { "{}", "{}", "{\"feedforward_modules\": \".*k_p.*\"}",
                                              "{\"feedforward_modules\": [\"k_proj\"]}" };
        static const char *const name[] = { "m.k_proj", "m.down_proj", "m.k_proj", "m.k_proj" };
        const double *want = k ? cols : rows;
        double out[6], b[2];
        bool any = false;
        lm_err e = { 0 };

        begin_at(&t, &lm_tune_ia3, config[k], name[k], 2, 3, false);
        assert_int_equal(t.tensor[0].dim[0], k ? 1 : 2);
        assert_int_equal(t.tensor[0].dim[1], k ? 3 : 1);
        if (k)
            SET(&t, 0, 2, -1, 3);
        else
            SET(&t, 0, 2, -1);
        assert_int_equal(lm_tune_weight(&t.l, w, out, NULL, &e), LM_OK);
        assert_memory_equal(out, want, sizeof rows);
        assert_int_equal(lm_tune_bias(&t.l, NULL, bias, b, &any, NULL, &e), LM_OK);
        assert_true(any && b[0] == (k ? 10 : 20) && b[1] == (k ? 20 : -20));
        end(&t);
    }
}

/* A rotation of the inputs keeps the length of every row. */
static void rotations_keep_lengths(void **state)
{
    static const char *const types[] = { "OFT", "BOFT", "HRA" };
    static const char *const config[] = {
        "{\"oft_block_size\": 8, \"use_cayley_neumann\": false}",
        "{\"boft_block_size\": 6, \"boft_n_butterfly_factor\": 3}", "{\"r\": 4}"
    };

    (void)state;
    for (int i = 0; i < 3; i++) {
        trial t;
        lm_err e = { 0 };
        double out[OUT * IN];

        begin(&t, lm_tune_method_of(types[i]), config[i]);
        for (int64_t k = 0; k < count_of(&t.tensor[0]); k++)
            t.l.v[0][k] = normal(5, k);
        assert_int_equal(lm_tune_weight(&t.l, t.w, out, NULL, &e), LM_OK);
        assert_true(distance(out, t.w, OUT * IN) > 0.1);
        for (int64_t row = 0; row < OUT; row++) {
            double a = 0, b = 0;

            for (int64_t k = 0; k < IN; k++) {
                a += t.w[row * IN + k] * t.w[row * IN + k];
                b += out[row * IN + k] * out[row * IN + k];
            }
            assert_true(fabs(a - b) < 1e-9 * a);
        }
        end(&t);
    }
}

/* PyTorch's numbers (torch 2.x, CPU): empty(5).uniform_(-b, b) of seed 0, and randperm of seed 777. */
static void torch_draws(void **state)
{
    static const float uniform[] = { -0.00264699059F, 0.189661443F, -0.290990382F, -0.260193735F,
                                     -0.136172622F };
    static const int64_t small_ones[] = { 5, 9, 0, 3, 1, 7 },
                         large[] = { 1374311, 8240085, 6766295, 6474818, 14786199, 14783200 };
    lm_torch_rng g;
    double v[5];
    int64_t p[6];
    lm_err e = { 0 };

    (void)state;
    lm_torch_rng_seed(&g, 0);
    lm_torch_uniform(&g, sqrt(6 / 48.0), 5, v);
    for (int i = 0; i < 5; i++)
        assert_true((float)v[i] == uniform[i]);
    /* torch.manual_seed(7); torch.randn(20): the last 16 are drawn twice */
    static const double normals[] = { -0.8201345205307007, 0.39563116431236267, 0.8989084959030151,
                                      -1.3884038925170898, 0.19844505190849304 };
    double z[20];
    lm_torch_rng_seed(&g, 7);
    lm_torch_normal(&g, 20, z);
    for (int i = 0; i < 5; i++)
        assert_true(fabs(z[i] - normals[i]) < 1e-6);
    assert_true(fabs(z[19] - -0.35672253370285034) < 1e-6);
    assert_int_equal(lm_torch_choose(777, 10, 6, p, &e), LM_OK);
    assert_memory_equal(p, small_ones, sizeof p);
    assert_int_equal(lm_torch_choose(777, 16777216, 6, p, &e), LM_OK);
    assert_memory_equal(p, large, sizeof p);
    assert_int_equal(lm_torch_choose(777, LM_TORCH_MOST, 6, p, &e), LM_EUSAGE);
}

/* ---- Modules ---- */

static size_t chosen(const lm_tune_bases *b, const char *config, const char *fails)
{
    json_t *c = json_loads(config, 0, NULL);
    bool *is = calloc(b->n, 1);
    lm_err e = { 0 };
    size_t n = 0;
    lm_code rc = lm_tune_choose(b, lm_tune_method_of("LORA"), c, "config", is, &e);

    if (!fails != !rc)
        fail_msg("%s: %d %s: %s", config, rc, e.what, e.todo);
    if (fails && !strstr(e.what, fails) && !strstr(e.todo, fails))
        fail_msg("'%s' is neither in '%s' nor in '%s'", fails, e.what, e.todo);
    for (size_t i = 0; i < b->n; i++)
        n += is[i];
    free(is);
    json_decref(c);
    return n;
}

static void choices(void **state)
{
    lm_model_source *s = NULL;
    lm_tune_bases b;
    lm_err e = { 0 };

    (void)state;
    mm_model("m", 1, NULL);
    assert_int_equal(lm_model_source_open("m", NULL, &s, &e), LM_OK);
    assert_int_equal(lm_tune_bases_read(s, false, &b, &e), LM_OK);
    assert_int_equal(chosen(&b, "{\"target_modules\": [\"up_proj\"]}", NULL), 3);
    assert_int_equal(chosen(&b, "{\"target_modules\": \"all-linear\"}", NULL), 3);
    assert_int_equal(chosen(&b, "{\"target_modules\": \".*layers\\\\.[01]\\\\..*proj\"}", NULL), 2);
    assert_int_equal(
        chosen(&b, "{\"target_modules\": [\"up_proj\"], \"layers_to_transform\": [1]}", NULL), 1);
    assert_int_equal(
        chosen(
            &b,
            "{\"target_modules\": [\"up_proj\"], \"exclude_modules\": [\"layers.2.mlp.up_proj\"]}",
            NULL),
        2);
    assert_int_equal(chosen(&b,
                            "{\"target_modules\": [\"up_proj\", \"embed_tokens\"],"
                            " \"modules_to_save\": [\"embed_tokens\"]}",
                            NULL),
                     3);
    chosen(&b, "{\"target_modules\": [\"up_prj\"]}", "up_proj");
    chosen(&b, "{\"target_modules\": \"(\"}", "regular expression");
    chosen(&b, "{\"target_modules\": 3}", "neither a list nor a string");
    lm_tune_bases_fini(&b);
    lm_model_source_close(s);
}

/* ---- Folders ---- */

static void config_text(void **state)
{
    json_t *c = json_loads(
        "{\"r\": 4, \"b\": {}, \"a\": [1, 0.5, \"\\u00e9\"], \"n\": null, \"t\": true}", 0, NULL);
    lm_buf text = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_tune_config_text(c, &text, &e), LM_OK);
    assert_string_equal(text.data,
                        "{\n  \"a\": [\n    1,\n    0.5,\n    \"\\u00E9\"\n  ],\n  \"b\": {},\n"
                        "  \"n\": null,\n  \"r\": 4,\n  \"t\": true\n}");
    lm_buf_fini(&text);
    json_decref(c);
}

/* A folder of VeRA-like or LoRA tensors, written, read and bound. */
static lm_code bind(const char *config, const char *const *names, const int64_t (*dim)[2], size_t n,
                    lm_err *e)
{
    static const float zeros[MOST];
    lm_tune_saved t[8];
    json_t *c = json_loads(config, 0, NULL);
    lm_model_source *s = NULL;
    lm_tune_bases b = { 0 };
    lm_tune_folder *f = NULL;
    lm_code rc;

    for (size_t i = 0; i < n; i++)
        t[i] = (lm_tune_saved){
            names[i], LM_DTYPE_F32, dim[i][1] ? 2 : 1, { dim[i][0], dim[i][1] }, zeros
        };
    assert_int_equal(finished(lm_tune_folder_write(onto("a"), c, t, n, e)), LM_OK);
    assert_int_equal(lm_model_source_open("m", NULL, &s, e), LM_OK);
    assert_int_equal(lm_tune_bases_read(s, false, &b, e), LM_OK);
    rc = lm_tune_folder_open("a", NULL, &f, e);
    rc = rc ? rc : lm_tune_folder_bind(f, &b, e);
    if (!rc)
        assert_int_equal(lm_tune_folder_parts(f), 1);
    lm_tune_folder_close(f);
    lm_tune_bases_fini(&b);
    lm_model_source_close(s);
    json_decref(c);
    return rc;
}

#define UP "base_model.model.model.layers.1.mlp.up_proj."

static void folders(void **state)
{
    const char *loha[] = { UP "hada_w1_a", UP "hada_w1_b", UP "hada_w2_a", UP "hada_w2_b",
                           UP "hada_w3" };
    const int64_t dim[][2] = { { ROWS, 2 }, { 2, COLS }, { ROWS, 2 }, { 2, COLS }, { 2, COLS } };
    const int64_t wrong[][2] = { { ROWS, 2 }, { 2, COLS }, { ROWS, 2 }, { 2, COLS + 1 } };
    const char *other[] = { "base_model.model.model.layers.9.mlp.up_proj.hada_w1_a" };
    lm_err e = { 0 };

    (void)state;
    mm_model("m", 1, NULL);
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 2}", loha, dim, 4, &e), LM_OK);
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 2}", loha, dim, 3, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "has no hada_w2_b"));
    e = (lm_err){ 0 };
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 2}", loha, dim, 5, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "is not one of LOHA"));
    e = (lm_err){ 0 };
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 2}", loha, wrong, 4, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "[2,9], where the base and adapter_config.json have [2,8]"));
    e = (lm_err){ 0 };
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 2}", other, dim, 1, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "has no module"));
    e = (lm_err){ 0 };
    assert_int_equal(bind("{\"peft_type\": \"LOHA\", \"r\": 1.5}", loha, dim, 4, &e), LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(bind("{\"peft_type\": \"PROMPT_TUNING\"}", loha, dim, 4, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "is not a change of weights"));
}

/* A file of F32 tensors again, with the numbers of one of them others. */
static void put_numbers(const char *path, const char *tensor, const float *v)
{
    static float all[16][ROWS * COLS];
    lm_tune_saved t[16];
    lm_buf text = { 0 };
    lm_st *st = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_st_open(path, &st, &e), LM_OK);
    size_t n = lm_st_count(st);
    assert_true(n <= 16);
    for (size_t i = 0; i < n; i++) {
        const lm_st_tensor *x = lm_st_at(st, i);
        bool other = !strcmp(x->name, tensor);
        assert_int_equal(lm_st_load(st, x, LM_DTYPE_F32, all[i], &e), LM_OK);
        t[i] = (lm_tune_saved){
            x->name, LM_DTYPE_F32, x->ndim, { x->dim[0], x->dim[1] }, other ? v : all[i]
        };
    }
    assert_int_equal(lm_tune_tensors_bytes(t, n, &text, &e), LM_OK);
    lm_st_close(st);
    FILE *f = fopen(path, "w");
    fwrite(text.data, 1, text.len, f);
    fclose(f);
    lm_buf_fini(&text);
}

/* LoftQ beside its base: Q is brought where W is another matrix, and only there. */
static void loftq_brings_its_base(void **state)
{
    const char *names[] = { UP "lora_A.weight", UP "lora_B.weight" };
    const int64_t dim[][2] = { { 2, COLS }, { ROWS, 2 } };
    const char *config = "{\"peft_type\": \"LORA\", \"r\": 2, \"init_lora_weights\": \"loftq\", "
                         "\"loftq_config\": {\"loftq_bits\": 4, \"loftq_iter\": 2}}";
    static float w[ROWS * COLS], q[ROWS * COLS];
    double want[ROWS * COLS];
    lm_err e = { 0 };

    (void)state;
    mm_model("m", 1, NULL);
    assert_int_equal(bind(config, names, dim, 2, &e), LM_OK);
    for (int again = 0; again < 2; again++) {
        lm_model_source *s = NULL;
        lm_tune_bases b = { 0 };
        lm_tune_folder *f = NULL;
        lm_tune_quantised *x = NULL;
        lm_tune_loaded l;
        assert_int_equal(lm_model_source_open("m", NULL, &s, &e), LM_OK);
        assert_int_equal(lm_tune_bases_read(s, false, &b, &e), LM_OK);
        assert_int_equal(lm_tune_folder_open("a", NULL, &f, &e), LM_OK);
        assert_int_equal(lm_tune_folder_bind(f, &b, &e), LM_OK);
        assert_int_equal(lm_tune_quantised_new(f, s, &x, &e), LM_OK);
        assert_true(
            json_is_true(json_object_get(lm_tune_quantised_config(x), "init_lora_weights")));
        const lm_st *st = lm_tune_quantised_tensors(x);
        assert_non_null(lm_st_find(st, UP "lora_A.weight"));
        assert_true(lm_tune_quantised_brings(x) == !again);
        assert_true(lm_tune_quantised_has(x, "model.layers.1.mlp.up_proj.weight") == !again);
        assert_false(lm_tune_quantised_has(x, "model.layers.0.mlp.up_proj.weight"));
        const lm_st_tensor *t = lm_st_find(st, UP "base_layer.weight");
        assert_true((t == NULL) == (again != 0));
        if (t) {
            const lm_st_tensor *own = lm_model_source_find(s, "model.layers.1.mlp.up_proj.weight");
            assert_int_equal(lm_st_load(st, t, LM_DTYPE_F32, q, &e), LM_OK);
            assert_int_equal(lm_model_source_load(s, own, LM_DTYPE_F32, w, &e), LM_OK);
            assert_int_equal(lm_tune_load(f, lm_tune_folder_part(f, 0), &l, &e), LM_OK);
            for (int i = 0; i < ROWS * COLS; i++)
                want[i] = w[i];
            assert_int_equal(l.method->derive(&l.m, want, l.v, l.given, &e), LM_OK);
            for (int i = 0; i < ROWS * COLS; i++)
                assert_true(q[i] == (float)want[i]);
            assert_true(memcmp(q, w, sizeof q) != 0);
            lm_tune_loaded_fini(&l);
        }
        lm_tune_quantised_free(x);
        lm_tune_folder_close(f);
        lm_tune_bases_fini(&b);
        lm_model_source_close(s);
        if (!again)
            put_numbers("m/model.safetensors", "model.layers.1.mlp.up_proj.weight", q);
    }
}

/* Keys of rank_pattern: ends of names behind a dot, or regular expressions, whose dots match anything; the first that fits. */
static void patterns(void **state)
{
    static const struct {
        const char *map, *module;
        double want; /* 0: none */
    } cases[] = {
        { "{\"q_proj\": 3}", "model.layers.1.self_attn.q_proj", 3 },
        { "{\"q_proj\": 3}", "q_proj", 3 },
        { "{\"q_proj\": 3}", "model.xq_proj", 0 },
        { "{\"q_proj\": 3}", "model.q_proj.x", 0 },
        { "{\"attn.q_proj\": 3}", "model.self_attn.q_proj", 0 },
        { "{\"self_attn.q_proj\": 3}", "model.self_attn.q_proj", 3 },
        { "{\"self.attn.q_proj\": 3}", "model.self_attn.q_proj", 3 },
        { "{\"layers.1.q_proj\": 3, \"q_proj\": 5}", "layers.11.q_proj", 5 },
        { "{\"q_proj\": 5, \"layers.1.q_proj\": 3}", "layers.1.q_proj", 5 },
        { "{\"[qk]_proj\": 3}", "layers.1.k_proj", 3 },
        { "{\".*layers.1.*q_proj\": 3}", "model.layers.1.self_attn.q_proj", 3 },
        { "{\"\": 3}", "model.q_proj", 0 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *map = json_loads(cases[i].map, 0, NULL);
        double got = 0;
        lm_err e = { 0 };
        assert_int_equal(lm_tune_pattern(map, cases[i].module, &got, "a", &e), LM_OK);
        if (got != cases[i].want)
            fail_msg("%s on %s: %g", cases[i].map, cases[i].module, got);
        json_decref(map);
    }
}

/* Tensors of many modules, in an order of their own in the file, each to its module; names with and without the root. */
static void binds_many(void **state)
{
    enum { LAYERS = 40 };
    static float v[2 * LAYERS][2 * ROWS];
    lm_tune_saved t[2 * LAYERS] = { 0 };
    char name[2 * LAYERS][96];
    const mm_shape shape = { .layers = LAYERS };
    lm_model_source *s = NULL;
    lm_tune_bases b = { 0 };
    lm_tune_folder *f = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("m", 1, &shape);
    for (int i = 0; i < 2 * LAYERS; i++) {
        int layer = i / 2 * 7 % LAYERS;
        snprintf(name[i], sizeof name[i], "base_model.model.%slayers.%d.mlp.up_proj.lora_%c.weight",
                 i % 3 ? "model." : "", layer, 'A' + i % 2);
        t[i] = (lm_tune_saved){
            name[i], LM_DTYPE_F32, 2, { i % 2 ? ROWS : 2, i % 2 ? 2 : COLS }, v[i]
        };
        v[i][0] = (float)(2 * layer + i % 2);
    }
    json_t *c = json_loads("{\"peft_type\": \"LORA\", \"r\": 2}", 0, NULL);
    assert_int_equal(finished(lm_tune_folder_write(onto("a"), c, t, 2 * LAYERS, &e)), LM_OK);
    assert_int_equal(lm_model_source_open("m", NULL, &s, &e), LM_OK);
    assert_int_equal(lm_tune_bases_read(s, false, &b, &e), LM_OK);
    assert_int_equal(lm_tune_folder_open("a", NULL, &f, &e), LM_OK);
    assert_int_equal(lm_tune_folder_bind(f, &b, &e), LM_OK);
    assert_int_equal(lm_tune_folder_parts(f), LAYERS);
    for (int l = 0; l < LAYERS; l++) {
        double got[2 * ROWS];
        snprintf(name[0], sizeof name[0], "model.layers.%d.mlp.up_proj", l);
        const lm_tune_part *p = lm_tune_folder_part_of(f, name[0]);
        assert_non_null(p);
        assert_string_equal(p->module.name, name[0]);
        assert_int_equal(p->module.place, l);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(lm_tune_folder_load(f, p, k, got, &e), LM_OK);
            assert_true(got[0] == 2 * l + k);
        }
    }
    lm_tune_folder_close(f);
    lm_tune_bases_fini(&b);
    lm_model_source_close(s);
    json_decref(c);
}

/* Files with bytes changed at random are read, or refused with one line. */
static void damaged_folders(void **state)
{
    static const char config[] =
        "{\"peft_type\": \"LOKR\", \"r\": 2, \"alpha\": 3, \"rank_pattern\": {\"up_proj\": 2},"
        " \"target_modules\": [\"up_proj\"], \"decompose_factor\": 2}";
    const char *names[] = { UP "lokr_w1", UP "lokr_w2_a", UP "lokr_w2_b" };
    const int64_t dim[][2] = { { 2, 2 }, { 6, 2 }, { 2, 4 } };
    lm_rng rng = lm_rng_make(1, "damage", 0);
    lm_model_source *s = NULL;
    lm_tune_bases b = { 0 };
    lm_err e = { 0 };
    int read = 0, refused = 0;

    (void)state;
    mm_model("m", 1, NULL);
    bind(config, names, dim, 3, &e);
    assert_int_equal(lm_model_source_open("m", NULL, &s, &e), LM_OK);
    assert_int_equal(lm_tune_bases_read(s, false, &b, &e), LM_OK);
    for (uint64_t i = 0; i < 600; i++) {
        const char *path = i % 2 ? "a/adapter_config.json" : "a/adapter_model.safetensors";
        lm_tune_folder *f = NULL;
        char old[4096], now[4096];
        FILE *file = fopen(path, "r+b");
        size_t n = fread(old, 1, sizeof old, file), most = n < 300 ? n : 300;

        memcpy(now, old, n);
        for (uint64_t k = 0; k < 1 + i % 3; k++)
            now[lm_rng_below(rng, 8 * i + k, most)] =
                (char)(lm_rng_u32(rng, 8 * i + 4 + k) % 96 + 32);
        rewind(file);
        fwrite(now, 1, n, file);
        fclose(file);
        e = (lm_err){ 0 };
        lm_code rc = lm_tune_folder_open("a", NULL, &f, &e);
        rc = rc ? rc : lm_tune_folder_bind(f, &b, &e);
        read += !rc;
        refused += rc != LM_OK;
        assert_true(!rc == !e.what[0]);
        lm_tune_folder_close(f);
        file = fopen(path, "r+b");
        fwrite(old, 1, n, file);
        fclose(file);
    }
    assert_true(read > 10 && refused > 10);
    lm_tune_bases_fini(&b);
    lm_model_source_close(s);
}

/* ---- Conversion ---- */

/* A LoHa of rank 2, whose change has rank 4, as LoRA: exactly with rank 4, with a loss of less. */
static void converts(void **state)
{
    const char *names[] = { UP "hada_w1_a", UP "hada_w1_b", UP "hada_w2_a", UP "hada_w2_b" };
    const int64_t dim[][2] = { { ROWS, 2 }, { 2, COLS }, { ROWS, 2 }, { 2, COLS } };
    static float v[4][64];
    lm_tune_lora_opts o = { .rank = 4 };
    lm_tune_lora_report r;
    lm_tune_saved t[4];
    lm_model_source *s = NULL;
    lm_tune_bases b = { 0 };
    lm_tune_folder *f = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("m", 1, NULL);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 64; k++)
            v[i][k] = (float)normal((uint64_t)i, k);
        t[i] = (lm_tune_saved){ names[i], LM_DTYPE_F32, 2, { dim[i][0], dim[i][1] }, v[i] };
    }
    json_t *c = json_loads("{\"peft_type\": \"LOHA\", \"r\": 2}", 0, NULL);
    assert_int_equal(finished(lm_tune_folder_write(onto("a"), c, t, 4, &e)), LM_OK);
    assert_int_equal(lm_model_source_open("m", NULL, &s, &e), LM_OK);
    assert_int_equal(lm_tune_bases_read(s, false, &b, &e), LM_OK);
    assert_int_equal(lm_tune_folder_open("a", NULL, &f, &e), LM_OK);
    assert_int_equal(lm_tune_folder_bind(f, &b, &e), LM_OK);
    assert_int_equal(finished(lm_tune_to_lora(f, s, &o, onto("l"), &r, &e)), LM_OK);
    assert_int_equal(r.modules, 1);
    assert_int_equal(r.most, 4);
    assert_true(r.lost < 1e-6);
    o.rank = 2;
    assert_int_equal(finished(lm_tune_to_lora(f, s, &o, onto("l"), &r, &e)), LM_OK);
    assert_true(r.lost > 1e-3 && r.lost < 1);
    lm_tune_folder_close(f);
    lm_tune_bases_fini(&b);
    lm_model_source_close(s);
    json_decref(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starts_at_base),
        cmocka_unit_test(lora_start_keeps_base),
        cmocka_unit_test(lora_by_hand),
        cmocka_unit_test(dora_by_hand),
        cmocka_unit_test(c3a_by_hand),
        cmocka_unit_test(loha_by_numbers),
        cmocka_unit_test(adalora_by_numbers),
        cmocka_unit_test(lokr_by_numbers),
        cmocka_unit_test(lokr_divides),
        cmocka_unit_test(vera_by_numbers),
        cmocka_unit_test(ia3_by_numbers),
        cmocka_unit_test(rotations_keep_lengths),
        cmocka_unit_test(torch_draws),
        cmocka_unit_test_setup_teardown(choices, mm_enter, mm_leave),
        cmocka_unit_test(config_text),
        cmocka_unit_test_setup_teardown(folders, mm_enter, mm_leave),
        cmocka_unit_test(patterns),
        cmocka_unit_test_setup_teardown(binds_many, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(loftq_brings_its_base, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(damaged_folders, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(converts, mm_enter, mm_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
