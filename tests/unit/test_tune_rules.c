/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune_rules.c -- each method's rule against its equation, written once more as plain loops over random numbers.
 *
 * The equations are those of the papers and of PEFT that the methods' files name.  test_tune_methods.c has others with
 * numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "tune/torch_rng.h"
#include "tune_case.h"

static const char module[] = "m.q_proj";

/* A module with random numbers in all of its tensors. */
static void random_at(trial *t, const lm_tune_method *m, const char *config, int64_t rows,
                      int64_t cols)
{
    begin_at(t, m, config, module, rows, cols, false);
    fill(t);
}

/* d += s a b, a [n,k], b [k,m]; turned: b is [m,k]. */
static void add_product(double *d, double s, const double *a, const double *b, int64_t n, int64_t k,
                        int64_t m, bool turned)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++)
            for (int64_t c = 0; c < k; c++)
                d[i * m + j] += s * a[i * k + c] * (turned ? b[j * k + c] : b[c * m + j]);
}

/* The rule gives `want`. */
static void becomes(trial *t, const double *want)
{
    double d[OUT * IN];
    const int64_t n = t->l.m.out * t->l.m.in;

    for (int64_t i = 0; i < n; i++)
        d[i] = want[i] - t->w[i];
    gives(t, 1, d, n);
}

/* The bias b becomes `want`. */
static void bias_becomes(trial *t, const double *b, const double *want)
{
    double out[OUT];
    bool any = false;
    lm_err e = { 0 };

    if (lm_tune_bias(&t->l, t->w, b, out, &any, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_true(any);
    for (int64_t i = 0; i < t->l.m.out; i++)
        if (fabs(out[i] - want[i]) > 1e-12)
            fail_msg("number %d of the bias is %.15g, not %.15g", (int)i, out[i], want[i]);
}

static void random_numbers(double *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = normal(77, i);
}

/* ---- Low rank ---- */

/* b + alpha / r of B's bias */
static void lora_bias(void **state)
{
    double b[4], want[4];
    trial t;

    (void)state;
    random_at(&t, &lm_tune_lora, "{\"r\": 2, \"lora_alpha\": 6, \"lora_bias\": true}", 4, 3);
    random_numbers(b, 4);
    for (int i = 0; i < 4; i++)
        want[i] = b[i] + 3 * t.room[2][i];
    bias_becomes(&t, b, want);
    for (int i = 0; i < 4; i++) /* a module without one gets it */
        want[i] = 3 * t.room[2][i];
    bias_becomes(&t, NULL, want);
    end(&t);
}

/* W + W o (B A) */
static void hira(void **state)
{
    double d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_hira, "{\"r\": 2}", 4, 3);
    add_product(d, 1, t.room[1], t.room[0], 4, 2, 3, false);
    for (int i = 0; i < 12; i++)
        d[i] *= t.w[i];
    gives(&t, 1, d, 12);
    end(&t);
}

/* W + lambda / r of the sum of b_k a_k / (|b_k| |a_k|), column j times w_j */
static void delora(void **state)
{
    double d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_delora, "{\"r\": 2}", 4, 3);
    for (int k = 0; k < 2; k++) {
        const double *a = t.room[0] + (ptrdiff_t)k * 3, *b = t.room[1] + k;
        double aa = 0, bb = 0;

        for (int j = 0; j < 3; j++)
            aa += a[j] * a[j];
        for (int i = 0; i < 4; i++)
            bb += b[2 * i] * b[2 * i];
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 3; j++)
                d[i * 3 + j] += t.room[2][0] / 2 * b[2 * i] * a[j] / sqrt(aa * bb) * t.room[3][j];
    }
    gives(&t, 1, d, 12);
    end(&t);
}

/* Block (o, i) of k x k: alpha / (r + hybrid) B_o[ranks of i]^T A_i[ranks of o]^T, and a plain part. */
static void gralora(void **state)
{
    enum { R = 4, K = 2, ROWS = 3, COLS = 2, EACH = R / K };
    double d[K * ROWS * K * COLS] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_gralora, "{\"r\": 4, \"alpha\": 10, \"gralora_k\": 2, \"hybrid_r\": 1}",
              6, 4);
    for (int o = 0; o < K; o++)
        for (int i = 0; i < K; i++)
            for (int y = 0; y < ROWS; y++)
                for (int x = 0; x < COLS; x++)
                    for (int e = 0; e < EACH; e++)
                        d[(o * ROWS + y) * K * COLS + i * COLS + x] +=
                            t.room[1][(o * R + i * EACH + e) * ROWS + y] *
                            t.room[0][(i * COLS + x) * R + o * EACH + e];
    add_product(d, 1, t.room[3], t.room[2], 6, 1, 4, false);
    gives(&t, 2, d, 24);
    end(&t);
}

/* W[o, j r + i] + M[i,o], the last block short; a narrow M repeats along the outputs. */
static void miss(void **state)
{
    double d[28], w[36];
    trial t;

    (void)state;
    for (int narrow = 0; narrow < 2; narrow++) {
        const int width = narrow ? 2 : 4;

        random_at(&t, &lm_tune_miss,
                  narrow ? "{\"r\": 3, \"mini_r\": 2, \"init_weights\": \"mini\"}" : "{\"r\": 3}",
                  4, 7);
        for (int o = 0; o < 4; o++)
            for (int j = 0; j < 7; j++)
                d[o * 7 + j] = t.room[0][j % 3 * width + o % width];
        gives(&t, 1, d, 28);
        end(&t);
    }
    /* "bat": each r x r block becomes W_b + W_b M + M of its row of blocks */
    random_at(&t, &lm_tune_miss, "{\"r\": 3, \"init_weights\": \"bat\"}", 6, 6);
    for (int o = 0; o < 6; o++)
        for (int j = 0; j < 6; j++) {
            const double *m = t.room[0] + (ptrdiff_t)(o / 3 * 9);

            w[o * 6 + j] = t.w[o * 6 + j] + m[o % 3 * 3 + j % 3];
            for (int c = 0; c < 3; c++)
                w[o * 6 + j] += t.w[o * 6 + j / 3 * 3 + c] * m[c * 3 + j % 3];
        }
    becomes(&t, w);
    end(&t);
}

/* ---- Shared random matrices ---- */

/* alpha / r of Y, or of its transpose where there are more inputs: Y = B A', A'[rho n + b] = A[rho] lambda[rho,b] gamma[b]. */
static void randlora(void **state)
{
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        const int64_t longer = 6, shorter = 3, n = 2; /* bases of rank 2 */
        double y[18] = { 0 }, d[18], scaled[12];
        trial t;

        random_at(&t, &lm_tune_randlora, "{\"r\": 2, \"randlora_alpha\": 10}",
                  wide ? shorter : longer, wide ? longer : shorter);
        for (int64_t k = 0; k < 4; k++)
            for (int64_t z = 0; z < shorter; z++)
                scaled[k * shorter + z] =
                    t.room[0][k / n * shorter + z] * t.room[2][k] * t.room[3][k % n * shorter + z];
        add_product(y, 1, t.room[1], scaled, longer, 4, shorter, false);
        for (int64_t x = 0; x < longer; x++)
            for (int64_t z = 0; z < shorter; z++)
                d[wide ? z * longer + x : x * shorter + z] = y[x * shorter + z];
        gives(&t, 5, d, 18);
        end(&t);
    }
}

/* The vector of `logit` [n] by its two largest: their softmax times rows of the bank [n,v]. */
static void mix(const double *logit, int n, const double *bank, int v, double *out)
{
    int a = 0, b = -1;

    for (int i = 1; i < n; i++)
        a = logit[i] > logit[a] ? i : a;
    for (int i = 0; i < n; i++)
        b = i != a && (b < 0 || logit[i] > logit[b]) ? i : b;
    const double share = 1 / (1 + exp(logit[b] - logit[a]));
    for (int k = 0; k < v; k++)
        out[k] = share * bank[a * v + k] + (1 - share) * bank[b * v + k];
}

/* W + B A: pieces of rows of A, and of columns of B, are sums of the two vectors with the largest logits. */
static void vblora(void **state)
{
    enum { R = 2, V = 2, N = 4, ROWS = 4, COLS = 6 };
    double a[R * COLS], b[ROWS * R], d[ROWS * COLS] = { 0 }, piece[V];
    trial t;

    (void)state;
    random_at(&t, &lm_tune_vblora, "{\"r\": 2, \"num_vectors\": 4, \"vector_length\": 2}", ROWS,
              COLS);
    for (int k = 0; k < R * COLS / V; k++)
        mix(t.room[0] + (ptrdiff_t)k * N, N, t.room[2], V, a + (ptrdiff_t)k * V);
    for (int o = 0; o < ROWS / V; o++)
        for (int k = 0; k < R; k++) {
            mix(t.room[1] + (ptrdiff_t)(o * R + k) * N, N, t.room[2], V, piece);
            for (int x = 0; x < V; x++)
                b[(o * V + x) * R + k] = piece[x];
        }
    add_product(d, 1, b, a, ROWS, R, COLS, false);
    gives(&t, 1, d, ROWS * COLS);
    end(&t);
}

/* The file has the numbers of the vectors, and all shares but the last one. */
static void vblora_chosen(void **state)
{
    enum { V = 2, ROWS = 2, COLS = 4 };
    const int64_t ids_a[] = { 3, 0, 1, 2 }, ids_b[] = { 2, 3 };
    const double a_share[] = { 0.25, 0.5 }, b_share[] = { 2 };
    double a[COLS], b[ROWS], d[ROWS * COLS] = { 0 };
    trial t;

    (void)state;
    begin_at(
        &t, &lm_tune_vblora,
        "{\"r\": 1, \"num_vectors\": 4, \"vector_length\": 2, \"save_only_topk_weights\": true}",
        module, ROWS, COLS, false);
    fill(&t);
    memcpy(t.ids[3], ids_a, sizeof ids_a);
    memcpy(t.ids[5], ids_b, sizeof ids_b);
    SET(&t, 4, 0.25, 0.5);
    SET(&t, 6, 2);
    for (int k = 0; k < COLS; k++)
        a[k] = a_share[k / V] * t.room[2][ids_a[k / V * 2] * V + k % V] +
               (1 - a_share[k / V]) * t.room[2][ids_a[k / V * 2 + 1] * V + k % V];
    for (int k = 0; k < ROWS; k++)
        b[k] = b_share[0] * t.room[2][ids_b[0] * V + k] +
               (1 - b_share[0]) * t.room[2][ids_b[1] * V + k];
    add_product(d, 1, b, a, ROWS, 1, COLS, false);
    gives(&t, 1, d, ROWS * COLS);
    end(&t);
}

/* W + B A, whose entries are entries of theta times scales. */
static void unilora(void **state)
{
    double a[6], b[8], d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_unilora, "{\"r\": 2, \"theta_d_length\": 5}", 4, 3);
    for (int i = 0; i < 6; i++)
        a[i] = t.room[0][t.ids[1][i]] * t.room[3][i];
    for (int i = 0; i < 8; i++)
        b[i] = t.room[0][t.ids[2][i]] * t.room[4][i];
    add_product(d, 1, b, a, 4, 2, 3, false);
    gives(&t, 1, d, 12);
    end(&t);
}

/* W + B (sum of v_i P_i) A; modules share v in groups of neighbours. */
static void tinylora(void **state)
{
    static const char *const names[] = { "tinylora_v.0", "tinylora_v.0", "tinylora_v.1",
                                         "tinylora_v.1", "tinylora_v.1" };
    double middle[4] = { 0 }, left[8] = { 0 }, d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_tinylora, "{\"r\": 2, \"u\": 3}", 4, 3);
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 4; i++)
            middle[i] += t.room[3][k] * t.room[2][k * 4 + i];
    add_product(left, 1, t.room[1], middle, 4, 2, 2, false);
    add_product(d, 1, left, t.room[0], 4, 2, 3, false);
    gives(&t, 1, d, 12);
    end(&t);
    begin_at(&t, &lm_tune_tinylora, "{\"r\": 2, \"u\": 3, \"weight_tying\": 0.6}", module, 4, 3,
             false);
    t.l.m.places = 5; /* two groups */
    for (int i = 0; i < 5; i++) {
        lm_err e = { 0 };
        int n;

        t.l.m.place = i;
        assert_int_equal(lm_tune_tinylora.tensors(&t.l.m, t.tensor, &n, &e), LM_OK);
        assert_string_equal(t.tensor[3].suffix, names[i]);
    }
    end(&t);
}

/* ---- Spectra, and chosen entries ---- */

/* W + scaling / (out in) of the sum of c_k cos(2 pi (u_k o / out + v_k i / in)), places from the seed */
static void fourierft(void **state)
{
    double d[35] = { 0 };
    int64_t at[6];
    lm_err e = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_fourierft,
              "{\"n_frequency\": 6, \"scaling\": 70, \"random_loc_seed\": 5}", 5, 7);
    assert_int_equal(lm_torch_choose(5, 35, 6, at, &e), LM_OK);
    for (int o = 0; o < 5; o++)
        for (int i = 0; i < 7; i++)
            for (int k = 0; k < 6; k++)
                d[o * 7 + i] +=
                    t.room[0][k] *
                    cos(2 * acos(-1) * ((double)(at[k] / 7 * o) / 5 + (double)(at[k] % 7 * i) / 7));
    gives(&t, 2, d, 35);
    end(&t);
}

/* One level of Haar's transform back, of sides that may be odd; or the coefficients themselves. */
static void waveft(void **state)
{
    (void)state;
    for (int inverse = 0; inverse < 2; inverse++) {
        const int rows = inverse ? 6 : 5, cols = inverse ? 8 : 7;
        double c[48] = { 0 }, d[35];
        int64_t at[9];
        lm_err e = { 0 };
        trial t;

        random_at(&t, &lm_tune_waveft,
                  inverse ? "{\"n_frequency\": 9, \"scaling\": 4}"
                          : "{\"n_frequency\": 9, \"scaling\": 4, \"use_idwt\": false}",
                  5, 7);
        assert_int_equal(lm_torch_choose(777, 35, 9, at, &e), LM_OK);
        for (int k = 0; k < 9; k++)
            c[at[k] / 7 * cols + at[k] % 7] = t.room[0][k];
        for (int o = 0; o < 5; o++)
            for (int i = 0; i < 7; i++) {
                const double *q = c + (ptrdiff_t)(o / 2) * cols + i / 2;
                const int low = rows / 2 * cols, right = cols / 2;
                const double x = o % 2 ? -1 : 1, u = i % 2 ? -1 : 1;

                d[o * 7 + i] = inverse
                                   ? (q[0] + x * q[right] + u * q[low] + x * u * q[low + right]) / 2
                                   : c[o * 7 + i];
            }
        gives(&t, 4, d, 35);
        end(&t);
    }
}

/* r (in + out) entries, by rows and columns */
static void shira(void **state)
{
    const int64_t places[] = { 0, 1, 1, 3, 2, 2, 0, 2, 0, 1, 0, 3, 1, 2 }; /* rows, then columns */
    double d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_shira, "{\"r\": 1}", 4, 3);
    for (int k = 0; k < 14; k++)
        t.ids[1][k] = k < 7 ? places[k] : places[k] % 3;
    for (int k = 0; k < 7; k++)
        for (int j = 0; j < k; j++) /* none twice */
            if (t.ids[1][k] == t.ids[1][j] && t.ids[1][7 + k] == t.ids[1][7 + j])
                t.ids[1][7 + k] = (t.ids[1][7 + k] + 1) % 3, j = -1;
    for (int k = 0; k < 7; k++)
        d[t.ids[1][k] * 3 + t.ids[1][7 + k]] = t.room[0][k];
    gives(&t, 1, d, 12);
    end(&t);
}

/* The largest or the smallest entries, and lora_alpha / r of B A */
static void supertuning(void **state)
{
    (void)state;
    for (int top = 0; top < 2; top++) {
        double d[12] = { 0 };
        trial t;

        random_at(&t, &lm_tune_supertuning,
                  top ? "{\"sparsity\": 0.7, \"r\": 2, \"lora_alpha\": 6}"
                      : "{\"sparsity\": 0.7, \"r\": 2, \"lora_alpha\": 6, \"select_top\": false}",
                  4, 3);
        assert_int_equal(count_of(&t.tensor[1]), 3);
        for (int i = 0; i < 12; i++) {
            int before = 0, k;

            for (int j = 0; j < 12; j++)
                before += top ? fabs(t.w[j]) > fabs(t.w[i]) : fabs(t.w[j]) < fabs(t.w[i]);
            for (k = 0; k < 3 && t.ids[1][k] != i;)
                k++;
            assert_int_equal(k < 3, before < 3);
            d[i] = k < 3 ? t.room[0][k] : 0;
        }
        add_product(d, 3, t.room[3], t.room[2], 4, 2, 3, false);
        gives(&t, 1, d, 12);
        end(&t);
    }
}

/* ---- Rotations ---- */

/* W H_1 .. H_r, H = 1 - 2 u u^T / |u|^2; apply_GS: the directions made orthonormal one after the other. */
static void hra(void **state)
{
    (void)state;
    for (int gs = 0; gs < 2; gs++) {
        double w[20], u[5][3];
        trial t;

        random_at(&t, &lm_tune_hra, gs ? "{\"r\": 3, \"apply_GS\": true}" : "{\"r\": 3}", 4, 5);
        memcpy(w, t.w, sizeof w);
        for (int i = 0; i < 15; i++)
            u[i / 3][i % 3] = t.room[0][i];
        for (int k = 0; k < 3; k++) {
            double q = 0;

            for (int p = 0; gs && p < k; p++) {
                double dot = 0;

                for (int j = 0; j < 5; j++)
                    dot += u[j][p] * u[j][k];
                for (int j = 0; j < 5; j++)
                    u[j][k] -= dot * u[j][p];
            }
            for (int j = 0; j < 5; j++)
                q += u[j][k] * u[j][k];
            for (int j = 0; j < 5; j++)
                u[j][k] /= sqrt(q);
            for (int o = 0; o < 4; o++) {
                double dot = 0;

                for (int j = 0; j < 5; j++)
                    dot += w[o * 5 + j] * u[j][k];
                for (int j = 0; j < 5; j++)
                    w[o * 5 + j] -= 2 * dot * u[j][k];
            }
        }
        becomes(&t, w);
        end(&t);
    }
}

/* f o y + g o turn(y), f = alpha cos theta, g = alpha sin theta, halves (u, v) of a group turned to (-v, u) */
static void road(void **state)
{
    static const char *const config[] = { "{\"group_size\": 4}",
                                          "{\"group_size\": 4, \"variant\": \"road_2\"}",
                                          "{\"group_size\": 4, \"variant\": \"road_4\"}" };
    double w[24], b[8], b2[8];
    trial t;

    (void)state;
    random_numbers(b, 8);
    for (int kind = 0; kind < 3; kind++) {
        random_at(&t, &lm_tune_road, config[kind], 8, 3);
        for (int o = 0; o < 8; o++) {
            const int g = o / 4, k = o % 4, other = k < 2 ? o + 2 : o - 2;
            const int f = kind == 0 ? g * 2 + k % 2 : kind == 1 ? o : g * 8 + k;
            const int s = kind == 2 ? f + 4 : f;
            const double cosine = t.room[1][f] * cos(t.room[0][f]),
                         sine = t.room[1][s] * sin(t.room[0][s]) * (k < 2 ? -1 : 1);

            for (int j = 0; j < 3; j++)
                w[o * 3 + j] = cosine * t.w[o * 3 + j] + sine * t.w[other * 3 + j];
            b2[o] = cosine * b[o] + sine * b[other];
        }
        becomes(&t, w);
        bias_becomes(&t, b, b2);
        end(&t);
    }
}

/* w [rows, n 3] R^T, R = 1 + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 of skew Q [3,3] of its entries above the diagonal, times k */
static void rotate_blocks(const double *w, const double *upper, const double *k, int rows, int n,
                          double *out)
{
    for (int b = 0; b < n; b++) {
        const double *u = upper + (ptrdiff_t)b * 3;
        const double x = u[0] * k[b], y = u[1] * k[b], z = u[2] * k[b];
        const double q[9] = { 0, x, y, -x, 0, z, -y, -z, 0 };
        double r[9] = { 1, 0, 0, 0, 1, 0, 0, 0, 1 }, power[9] = { 1, 0, 0, 0, 1, 0, 0, 0, 1 };

        for (int term = 1; term < 5; term++) {
            double next[9] = { 0 };

            add_product(next, 1, power, q, 3, 3, 3, false);
            memcpy(power, next, sizeof power);
            for (int i = 0; i < 9; i++)
                r[i] += (term < 4 ? 2 : 1) * power[i];
        }
        for (int o = 0; o < rows; o++)
            for (int j = 0; j < 3; j++) {
                double sum = 0;

                for (int c = 0; c < 3; c++)
                    sum += w[o * n * 3 + b * 3 + c] * r[j * 3 + c];
                out[o * n * 3 + b * 3 + j] = sum;
            }
    }
}

/* Blocks of three inputs; coft: |Q| is at most eps / sqrt(blocks). */
static void oft(void **state)
{
    double w[24], k[2] = { 1, 1 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_oft, "{\"oft_block_size\": 3}", 4, 6);
    rotate_blocks(t.w, t.room[0], k, 4, 2, w);
    becomes(&t, w);
    end(&t);
    random_at(&t, &lm_tune_oft, "{\"oft_block_size\": 3, \"coft\": true, \"eps\": 0.5}", 4, 6);
    t.room[0][3] = 0.1, t.room[0][4] = t.room[0][5] = 0; /* short enough */
    double q = 0;
    for (int i = 0; i < 3; i++)
        q += 2 * t.room[0][i] * t.room[0][i];
    k[0] = 0.5 / sqrt(2) / sqrt(q);
    assert_true(k[0] < 1);
    rotate_blocks(t.w, t.room[0], k, 4, 2, w);
    becomes(&t, w);
    end(&t);
    /* The nearest divisor of the inputs; of two that are as near, the lesser one */
    begin_at(&t, &lm_tune_oft, "{\"oft_block_size\": 9}", module, 4, 24, false);
    assert_int_equal(t.tensor[0].dim[0], 3); /* 8 */
    end(&t);
    begin_at(&t, &lm_tune_oft, "{\"oft_block_size\": 5}", module, 4, 24, false);
    assert_int_equal(t.tensor[0].dim[0], 6); /* 4 */
    end(&t);
    begin_at(&t, &lm_tune_oft, "{\"oft_block_size\": 0, \"r\": 4}", module, 4, 24, false);
    assert_int_equal(t.tensor[0].dim[0], 4);
    end(&t);
}

/* Factor i of a butterfly with blocks of two turns inputs at a distance of 2^i, by R = (1 - Q) (1 + Q)^-1. */
static void boft(void **state)
{
    double w[32];
    trial t;

    (void)state;
    random_at(&t, &lm_tune_boft, "{\"boft_block_size\": 2, \"boft_n_butterfly_factor\": 3}", 4, 8);
    memcpy(w, t.w, sizeof w);
    for (int i = 0; i < 3; i++)
        for (int b = 0; b < 4; b++) {
            const double *d = t.room[0] + (ptrdiff_t)(i * 4 + b) * 4;
            const double q = (d[1] - d[2]) / 2, c = (1 - q * q) / (1 + q * q),
                         s = 2 * q / (1 + q * q);
            const int apart = 1 << i, at = b / apart * 2 * apart + b % apart;

            for (int o = 0; o < 4; o++) {
                const double x = w[o * 8 + at], y = w[o * 8 + at + apart];

                w[o * 8 + at] = c * x - s * y;
                w[o * 8 + at + apart] = s * x + c * y;
            }
        }
    for (int i = 0; i < 32; i++)
        w[i] *= t.room[1][i / 8];
    becomes(&t, w);
    end(&t);
}

/* ---- Others ---- */

/* W - P relu(P)^T W + s P R, s = alpha / r, or 1; para: without the last part */
static void deft(void **state)
{
    static const struct {
        const char *config;
        double scale;
    } cases[] = { { "{\"r\": 2}", 1 },
                  { "{\"r\": 2, \"alpha\": 6}", 3 },
                  { "{\"r\": 2, \"para\": true}", 0 } };
    trial t;

    (void)state;
    for (int i = 0; i < 3; i++) {
        double relu[8], old[6] = { 0 }, d[12] = { 0 };

        random_at(&t, &lm_tune_deft, cases[i].config, 4, 3);
        for (int k = 0; k < 8; k++) /* transposed: [2,4] */
            relu[k % 2 * 4 + k / 2] = t.room[0][k] > 0 ? t.room[0][k] : 0;
        add_product(old, 1, relu, t.w, 2, 4, 3, false);
        add_product(d, -1, t.room[0], old, 4, 2, 3, false);
        if (cases[i].scale > 0)
            add_product(d, cases[i].scale, t.room[0], t.room[1], 4, 2, 3, false);
        gives(&t, 1, d, 12);
        end(&t);
    }
    /* qr of one column: Q has the sign opposite to that of its first number */
    for (int sign = -1; sign < 2; sign += 2) {
        double q[4], all = 0, old[3] = { 0 }, d[12] = { 0 };

        random_at(&t, &lm_tune_deft, "{\"r\": 1, \"decomposition_method\": \"qr\"}", 4, 3);
        t.room[0][0] = 0.5 * sign;
        for (int k = 0; k < 4; k++)
            all += t.room[0][k] * t.room[0][k];
        for (int k = 0; k < 4; k++)
            q[k] = -sign * t.room[0][k] / sqrt(all);
        add_product(old, 1, q, t.w, 1, 4, 3, false);
        add_product(d, -1, q, old, 4, 1, 3, false);
        add_product(d, 1, q, t.room[1], 4, 1, 3, false);
        gives(&t, 1, d, 12);
        end(&t);
    }
}

/* W + W o A + B, b + b o D + E + W C: low ranks and single numbers; then vectors */
static void glora(void **state)
{
    enum { A = 0, B = 4, C = 8, D = 12, E = 16, XD = 0, XU = 1, X = 2 };
    double b[4], want[4], a_path[12] = { 0 }, d[12] = { 0 }, c[3] = { 0 };
    trial t;

    (void)state;
    random_numbers(b, 4);
    begin_at(&t, &lm_tune_glora, "{\"r\": 2}", module, 4, 3, true);
    fill(&t);
    add_product(a_path, 1, t.room[A + XD], t.room[A + XU], 4, 2, 3, false);
    for (int i = 0; i < 12; i++)
        d[i] = t.w[i] * a_path[i];
    add_product(d, 1, t.room[B + XD], t.room[B + XU], 4, 2, 3, false);
    gives(&t, 1, d, 12);
    add_product(c, 1, t.room[C + XD], t.room[C + XU], 3, 2, 1, false);
    for (int i = 0; i < 4; i++)
        want[i] = b[i] + b[i] * t.room[D + X][0] + t.room[E + X][0];
    add_product(want, 1, t.w, c, 4, 3, 1, false);
    bias_becomes(&t, b, want);
    end(&t);
    begin_at(&t, &lm_tune_glora,
             "{\"config_A_B\": \"vector\", \"config_C\": \"vector\", \"config_D_E\": \"vector\"}",
             module, 4, 3, true);
    fill(&t);
    for (int i = 0; i < 12; i++)
        d[i] = t.w[i] * t.room[A + X][i / 3] + t.room[B + X][i / 3];
    gives(&t, 1, d, 12);
    for (int i = 0; i < 4; i++)
        want[i] = b[i] + b[i] * t.room[D + X][i] + t.room[E + X][i];
    add_product(want, 1, t.w, t.room[C + X], 4, 3, 1, false);
    bias_becomes(&t, b, want);
    end(&t);
}

/* h [3,2] = f(x [3,n] w [2,n]^T) */
static void layer(const double *x, const double *w, int64_t n, double *h)
{
    memset(h, 0, 6 * sizeof *h);
    add_product(h, 1, x, w, 3, n, 2, true);
    for (int i = 0; i < 6; i++)
        h[i] = h[i] / (1 + exp(-h[i]));
}

/* W + scaling B h^T of two encoders and two decoders: each decoder adds what its encoder read. */
static void peanut(void **state)
{
    double turned[12], h[4][6], x[6], d[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_peanut,
              "{\"r\": 2, \"depth\": 2, \"scaling\": 0.5, \"act_fn\": \"silu\"}", 4, 3);
    for (int i = 0; i < 12; i++)
        turned[i % 3 * 4 + i / 3] = t.w[i];
    layer(turned, t.room[0], 4, h[0]);
    layer(h[0], t.room[2], 2, h[1]); /* encoders.0, decoders.0, encoders.1, decoders.1 */
    layer(h[1], t.room[4], 2, h[2]);
    layer(h[2], t.room[3], 2, x);
    for (int i = 0; i < 6; i++)
        x[i] += h[1][i];
    layer(x, t.room[5], 2, h[3]);
    for (int i = 0; i < 6; i++)
        h[3][i] += h[0][i];
    add_product(d, 0.5, t.room[1], h[3], 4, 2, 3, true);
    gives(&t, 1, d, 12);
    end(&t);
}

/* U (S + diag(l)) V^T, U the columns of W V^-T at length 1; V = 2 0, 1 1 */
static void frod(void **state)
{
    double u[8], left[8], w[8] = { 0 };
    trial t;

    (void)state;
    memset(&t, 0, sizeof t);
    lm_tune_method m = lm_tune_frod;
    m.start = NULL; /* which is refused */
    begin_at(&t, &m, "{\"sparse_rate\": 0.25}", module, 4, 2, false);
    SET(&t, 0, 2, 0, 1, 1);
    SET(&t, 3, 3, -2);
    SET(&t, 4, 5);
    t.ids[1][0] = 1; /* S[1,0] = 5 */
    t.ids[1][1] = 0;
    for (int o = 0; o < 4; o++) { /* rows of W times V^-T = 1/2 -1/2, 0 1 */
        u[2 * o] = t.w[2 * o] / 2;
        u[2 * o + 1] = t.w[2 * o + 1] - t.w[2 * o] / 2;
    }
    for (int k = 0; k < 2; k++) {
        double q = 0;

        for (int o = 0; o < 4; o++)
            q += u[2 * o + k] * u[2 * o + k];
        for (int o = 0; o < 4; o++)
            u[2 * o + k] /= sqrt(q);
    }
    for (int o = 0; o < 4; o++) {
        left[2 * o] = 3 * u[2 * o] + 5 * u[2 * o + 1];
        left[2 * o + 1] = -2 * u[2 * o + 1];
    }
    add_product(w, 1, left, t.room[0], 4, 2, 2, true);
    becomes(&t, w);
    end(&t);
}

/* H H^T W + U diag(s) V; without a rank half of the directions stay. */
static void osf(void **state)
{
    double high[6], kept[9] = { 0 }, left[8], w[12] = { 0 };
    trial t;

    (void)state;
    random_at(&t, &lm_tune_osf, "{\"effective_rank\": 1}", 4, 3);
    for (int i = 0; i < 4; i++)
        high[i] = t.room[3][i];
    add_product(kept, 1, high, t.w, 1, 4, 3, false);
    add_product(w, 1, high, kept, 4, 1, 3, false);
    for (int i = 0; i < 8; i++)
        left[i] = t.room[0][i] * t.room[1][i % 2];
    add_product(w, 1, left, t.room[2], 4, 2, 3, false);
    becomes(&t, w);
    end(&t);
    begin_at(&t, &lm_tune_osf, "{}", module, 8, 7, false);
    assert_int_equal(t.tensor[3].dim[1], 3);
    end(&t);
}

/* Of [W, b] of rank 3, which columns of `left` [out,3] and rows of `right` [3,in+1] give, a new adapter has V with rows of
 * length 1 at right angles, which span those of [W, b]; and A_k with the directions of the cluster's rows of the left
 * singular vectors: |S A_k'|^2 is the sum of the largest squares of singular values.  The clusters are all of the outputs. */
static void new_adamss(int64_t out, int64_t in)
{
    static lm_tune_tensor tensor[LM_TUNE_TENSORS];
    double hyper[8], all[20 * 13] = { 0 }, w[20 * 12], b[20], left[20 * 3], right[3 * 13];
    double *v[LM_TUNE_TENSORS] = { NULL };
    int64_t label[20], rank[2], rows = 0, n = in + 1;
    const int64_t *ids[LM_TUNE_TENSORS] = { NULL, label, rank };
    const bool given[LM_TUNE_TENSORS] = { false };
    bool changed = false;
    int count = 0;
    lm_err e = { 0 };
    lm_tune_module m = { .name = module, .out = out, .in = in, .has_bias = true, .bias = b };
    json_t *config = json_loads("{\"r\": 3, \"num_subspaces\": 2, \"subspace_rank\": 2}", 0, NULL);

    random_numbers(left, out * 3);
    random_numbers(right, 3 * n);
    add_product(all, 1, left, right, out, 3, n, false);
    for (int64_t i = 0; i < out; i++) {
        memcpy(w + i * in, all + i * n, (size_t)in * sizeof *w);
        b[i] = all[i * n + in];
    }
    assert_int_equal(lm_tune_read_hyper(&lm_tune_adamss, config, module, "config", hyper, &e), 0);
    m.hyper = hyper;
    m.config = config;
    for (int pass = 0; pass < 2; pass++) { /* shapes follow from the clusters */
        assert_int_equal(lm_tune_adamss.tensors(&m, tensor, &count, &e), 0);
        for (int i = 0; i < count; i++)
            if (!v[i] && tensor[i].dim[0] > 0)
                v[i] = calloc((size_t)count_of(&tensor[i]), sizeof **v);
        if (pass)
            break;
        assert_int_equal(lm_tune_adamss.derive(&m, w, v, given, &e), 0);
        for (int64_t i = 0; i < out; i++)
            label[i] = (int64_t)v[1][i];
        for (int k = 0; k < 2; k++)
            rank[k] = (int64_t)v[2][k];
        m.ids = ids;
    }
    assert_int_equal(lm_tune_adamss.start(&m, w, &changed, v, lm_rng_make(3, "start", 0), &e), 0);
    assert_false(changed);
    double square[9] = { 0 }, part[20 * 3] = { 0 }, again[20 * 13] = { 0 };
    add_product(square, 1, v[0], v[0], 3, n, 3, true);
    for (int i = 0; i < 9; i++)
        assert_true(fabs(square[i] - (i % 4 == 0)) < 1e-10);
    add_product(part, 1, all, v[0], out, n, 3, true);
    add_product(again, 1, part, v[0], out, 3, n, false);
    for (int64_t i = 0; i < out * n; i++)
        assert_true(fabs(again[i] - all[i]) < 1e-10);
    for (int c = 0; c < 3; c++) { /* U = [W, b] V' with columns of length 1 */
        double q = 0;
        for (int64_t i = 0; i < out; i++)
            q += part[i * 3 + c] * part[i * 3 + c];
        for (int64_t i = 0; i < out; i++)
            part[i * 3 + c] /= sqrt(q);
    }
    for (int k = 0; k < 2; k++) {
        int64_t own = 0;
        double gram[9] = { 0 }, held[4] = { 0 }, room[6] = { 0 }, sum = 0, trace = 0;
        lm_tune_svd s = { 0 };

        for (int64_t i = 0; i < out; i++)
            if (label[i] == k) {
                for (int j = 0; j < 9; j++)
                    gram[j] += part[i * 3 + j / 3] * part[i * 3 + j % 3];
                own++;
            }
        rows += own;
        assert_int_equal(rank[k], own < 2 ? own : 2);
        assert_int_equal(tensor[4 + 2 * k].dim[0], own);
        assert_int_equal(lm_tune_svd_of(gram, 3, 3, &s, &e), 0);
        add_product(room, 1, v[3 + 2 * k], gram, rank[k], 3, 3, false);
        add_product(held, 1, room, v[3 + 2 * k], rank[k], 3, rank[k], true);
        for (int64_t j = 0; j < rank[k]; j++) {
            sum += s.value[j];
            trace += held[j * rank[k] + j];
        }
        assert_true(fabs(sum - trace) < 1e-10);
        lm_tune_svd_fini(&s);
    }
    assert_int_equal(rows, out);
    for (int i = 0; i < count; i++)
        free(v[i]);
    json_decref(config);
}

static void adamss(void **state)
{
    (void)state;
    new_adamss(20, 7);
    new_adamss(9, 12);
}

/* Added biases; norms that are replaced; rows of the embedding, columns here */
static void small_ones(void **state)
{
    const double b[] = { 1, 2, 3 };
    double want[3], w[12];
    trial t;

    (void)state;
    random_at(&t, &lm_tune_beft, "{}", 3, 4);
    for (int i = 0; i < 3; i++)
        want[i] = b[i] + t.room[0][i];
    bias_becomes(&t, b, want);
    bias_becomes(&t, NULL, t.room[0]);
    end(&t);
    begin_at(&t, &lm_tune_ln_tuning, "{}", "m.norm", 3, 0, true);
    fill(&t);
    bias_becomes(&t, b, t.room[1]);
    end(&t);
    begin_at(&t, &lm_tune_tokens, "{\"token_indices\": [3, 1]}", "m.embed_tokens", 3, 4, false);
    t.l.m.embedding = true;
    fill(&t);
    for (int h = 0; h < 3; h++)
        for (int token = 0; token < 4; token++)
            w[h * 4 + token] = token == 3   ? t.room[0][h]
                               : token == 1 ? t.room[0][3 + h]
                                            : t.w[h * 4 + token];
    becomes(&t, w);
    end(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lora_bias),  cmocka_unit_test(hira),          cmocka_unit_test(delora),
        cmocka_unit_test(gralora),    cmocka_unit_test(miss),          cmocka_unit_test(randlora),
        cmocka_unit_test(vblora),     cmocka_unit_test(vblora_chosen), cmocka_unit_test(unilora),
        cmocka_unit_test(tinylora),   cmocka_unit_test(fourierft),     cmocka_unit_test(waveft),
        cmocka_unit_test(shira),      cmocka_unit_test(supertuning),   cmocka_unit_test(hra),
        cmocka_unit_test(road),       cmocka_unit_test(oft),           cmocka_unit_test(boft),
        cmocka_unit_test(deft),       cmocka_unit_test(glora),         cmocka_unit_test(peanut),
        cmocka_unit_test(frod),       cmocka_unit_test(osf),           cmocka_unit_test(adamss),
        cmocka_unit_test(small_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
