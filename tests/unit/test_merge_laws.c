/* SPDX-License-Identifier: Apache-2.0 */
/* Laws of all merge methods: equal models are reproduced, a weight of one gives the model's bits,
 * the bits do not depend on threads or on the processor's level; refusals and warnings; and the
 * selection of the largest elements, which many methods use. */
#include "tests/unit/merge_case.h"

#include "merge/select.h"

static lm_par *two, *three;

static int setup(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_par_new(&two, 2, &e) || lm_par_new(&three, 3, &e);
}

static int teardown(void **state)
{
    (void)state;
    lm_par_free(two);
    lm_par_free(three);
    return 0;
}

/* --- laws ------------------------------------------------------------------------------------ */

/* Set the inputs that a method requires. */
static void ask(merge_case *c, const lm_merge_method *m)
{
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        if (!(m->required >> p & 1))
            continue;
        if (!lm_merge_params[p].per_model)
            c->job.param[p] = 0.3;
        for (int i = 0; lm_merge_params[p].per_model && i < c->job.n_models; i++)
            c->model[i].param[p] = 1.0 / c->job.n_models;
    }
    if (m->takes >> LM_MERGE_DENSITY & 1)
        for (int i = 0; i < c->job.n_models; i++)
            c->model[i].param[LM_MERGE_DENSITY] = 0.5;
    if (m->takes >> LM_MERGE_SELECT_TOPK & 1)
        c->job.param[LM_MERGE_SELECT_TOPK] = 0.4;
}

static int models_of(const lm_merge_method *m, int wanted)
{
    wanted = m->max_models && wanted > m->max_models ? m->max_models : wanted;
    return wanted < m->min_models ? m->min_models : wanted;
}

static void same_bytes_for_any_threads_and_level(void **state)
{
    (void)state;
    const lm_merge_method *m;
    for (int i = 0; (m = lm_merge_method_at(i)); i++)
        for (int ty = 0; ty < 4; ty += 1) {
            merge_case *c = new_case(models_of(m, 3), types[ty], 2, 67, 1031, i);
            size_t bytes = (size_t)c->job.count * lm_dtype_size(types[ty]);
            lm_par *pools[] = { NULL, two, three };
            lm_cpu_level best = lm_cpu_detect();
            void *first = room(bytes, 1);
            ask(c, m);
            for (int p = 0; p < 3; p++) {
                c->job.par = pools[p];
                merge(c, m->name);
                if (!p)
                    memcpy(first, c->job.out, bytes);
                else if (memcmp(first, c->job.out, bytes))
                    fail_msg("%s: %d threads give other bytes", m->name, p + 1);
            }
            for (lm_cpu_level l = LM_CPU_REF; l < best; l++) {
                c->job.cpu = l;
                merge(c, m->name);
                if (memcmp(first, c->job.out, bytes))
                    fail_msg("%s: level %s gives other bytes", m->name, lm_cpu_level_name(l));
            }
            lm_free(first);
            free_case(c);
        }
}

static void equal_models_stay(void **state)
{
    (void)state;
    const lm_merge_method *m;
    for (int i = 0; (m = lm_merge_method_at(i)); i++)
        for (int ty = 0; ty < N_TYPES; ty++) {
            if (types[ty] == LM_DTYPE_F64)
                continue; /* weights of a third change the last digit */
            merge_case *c = new_case(models_of(m, 3), types[ty], 2, 9, 231, i);
            ask(c, m);
            c->job.param[LM_MERGE_SELECT_TOPK] = NAN; /* nothing varies */
            for (int k = 0; k < c->job.n_models; k++) {
                memcpy(c->x[k], c->b, (size_t)c->job.count * 8);
                put(c, k, types[ty]);
            }
            merge(c, m->name);
            for (int64_t k = 0; k < c->job.count; k++)
                if (c->got[k] != c->b[k])
                    fail_msg("%s (%s): element %lld: %.9g became %.9g", m->name,
                             lm_dtype_name(types[ty]), (long long)k, c->b[k], c->got[k]);
            assert_string_equal(c->warned, "");
            free_case(c);
        }
}

/* Numbers of all sizes, an infinity, a NaN with a payload: the bits come through. */
static void a_weight_of_one_gives_the_bits(void **state)
{
    static const char *const names[] = { "linear",      "dem",   "task_arithmetic",  "ties",
                                         "dare_linear", "della", "breadcrumbs_ties", "passthrough",
                                         "slerp",       "sce",   "multislerp",       "karcher" };
    (void)state;
    for (int ty = 0; ty < N_TYPES; ty++)
        for (int m = 0; m < 12; m++)
            for (int more = 0; more < (m < 7 ? 2 : 1); more++) {
                merge_case *c = new_case(1 + more, types[ty], 1, 3000, 0, m);
                size_t size = lm_dtype_size(types[ty]), bytes = 3000 * size;
                lm_rng r = lm_rng_make(1, "bits", (uint64_t)ty);
                unsigned char *p = (unsigned char *)c->data[0] + 8;
                for (size_t k = 0; m != 8 && k < bytes; k++) /* slerp at t = 1 needs an angle */
                    p[k] = (unsigned char)lm_rng_u32(r, k);
                if (m != 8)
                    p[0] = 1;
                if (names[m][0] == 's' && m == 8)
                    c->job.param[LM_MERGE_T] = 1;
                else if (method(names[m])->required)
                    c->model[0].param[LM_MERGE_WEIGHT] = 1;
                if (more) /* a second model without weight */
                    c->model[1].param[LM_MERGE_WEIGHT] = 0;
                merge(c, names[m]);
                if (memcmp(c->job.out, p, bytes))
                    fail_msg("%s changes bits of %s", names[m], lm_dtype_name(types[ty]));
                free_case(c);
            }
}

static void order_does_not_matter(void **state)
{
    static const char *const names[] = { "ties", "sce", "model_stock", "karcher", "breadcrumbs" };
    (void)state;
    for (int m = 0; m < 5; m++) {
        merge_case *c = new_case(3, LM_DTYPE_F32, 2, 31, 77, m);
        ask(c, method(names[m]));
        set_weights(c, NAN, NAN, NAN);
        if (method(names[m])->required)
            set_weights(c, 0.5, 0.5, 0.5);
        merge(c, names[m]);
        double *first = room((size_t)c->job.count, 8);
        memcpy(first, c->got, (size_t)c->job.count * 8);
        lm_merge_operand t = c->model[0];
        c->model[0] = c->model[2];
        c->model[2] = t;
        merge(c, names[m]);
        for (int64_t k = 0; k < c->job.count; k++)
            assert_true(fabs(c->got[k] - first[k]) <= 1e-6 * fabs(first[k]) + 1e-9);
        lm_free(first);
        free_case(c);
    }
}

/* A double to a narrow type is rounded once: beside the halfway points of the type. */
static void one_rounding(void **state)
{
    const lm_blend *b = lm_blend_at(lm_cpu_detect(), true), *plain = lm_blend_at(LM_CPU_REF, true);
    static const double apart[] = { 0, 1e-15, -1e-15, 1e-9, -1e-9, 0.01, -0.01 };
    (void)state;
    for (int ty = 0; ty < N_TYPES; ty++) {
        lm_dtype t = types[ty];
        double x[64 * 7 + 6], want, got[64 * 7 + 6], ref[64 * 7 + 6];
        const double odd[] = { NAN, INFINITY, -INFINITY, 1e300, -3.4028235677973366e38, 1e-320 };
        int64_t n = 0;
        for (int k = 0; k < 64; k++)
            for (int a = 0; a < 7; a++)
                x[n++] =
                    ldexp((1 + (2 * k + 1) * half_place(t) / 2 * (k % 2 ? 2 : 1)) * (1 + apart[a]),
                          k % 40 - 20) *
                    (k % 3 ? 1 : -1);
        memcpy(x + n, odd, sizeof odd);
        n += 6;
        b->store(t, got, 0, x, n);
        plain->store(t, ref, 0, x, n);
        for (int64_t k = 0; k < n; k++) {
            size_t size = lm_dtype_size(t);
            lm_set(t, &want, 0, x[k]);
            assert_memory_equal((char *)got + (size_t)k * size, &want, size);
            assert_memory_equal((char *)ref + (size_t)k * size, &want, size);
        }
    }
}

/* --- small ones, computed by hand ------------------------------------------------------------ */

static void set_all(merge_case *c, int i, const double *v)
{
    memcpy(i == MOST ? c->b : c->x[i], v, (size_t)c->job.count * 8);
    put(c, i, LM_DTYPE_F32);
}

static void by_hand(void **state)
{
    (void)state;
    merge_case *c = new_case(2, LM_DTYPE_F32, 1, 4, 0, 0);
    set_all(c, MOST, (double[]){ 1, 1, 1, 1 });
    set_all(c, 0, (double[]){ 5, 0, 2, 1 });  /* deltas  4 -1  1  0 */
    set_all(c, 1, (double[]){ 2, -2, 4, 3 }); /* deltas  1 -3  3  2 */
    set_weights(c, 1, 1, 0);
    c->model[0].param[LM_MERGE_DENSITY] = c->model[1].param[LM_MERGE_DENSITY] = 0.5;
    c->job.param[LM_MERGE_LAMBDA] = 2;
    merge(c, "ties"); /* kept 4 -1 (not 1: higher index) and -3 3: means 4 -2 3 0, doubled */
    assert_true(c->got[0] == 9 && c->got[1] == -3 && c->got[2] == 7 && c->got[3] == 1);
    c->job.param[LM_MERGE_RESCALE] = LM_RESCALE_L1;
    c->job.param[LM_MERGE_NORMALIZE] = 0;
    c->job.param[LM_MERGE_LAMBDA] = 1;
    merge(c, "ties"); /* times 6/5 and 9/6 */
    assert_true(fabs(c->got[0] - 5.8) < 1e-6 && fabs(c->got[1] + 4.7) < 1e-6);
    assert_true(fabs(c->got[2] - 5.5) < 1e-6 && c->got[3] == 1);
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        c->job.param[p] = NAN;
    c->model[0].param[LM_MERGE_GAMMA] = 0.25;
    merge(c, "breadcrumbs"); /* without 4: -1 1; of the other (gamma n = 0) -3 3 */
    assert_true(c->got[0] == 1 && c->got[1] == -3 && c->got[2] == 5 && c->got[3] == 1);
    free_case(c);

    c = new_case(1, LM_DTYPE_F32, 1, 2, 0, 0);
    set_all(c, MOST, (double[]){ 2, 0 });
    set_all(c, 0, (double[]){ 0, 2 });
    c->job.param[LM_MERGE_T] = 0.5;
    merge(c, "slerp"); /* half of a right angle: both times sqrt(1/2) */
    assert_true(fabs(c->got[0] - M_SQRT2) < 1e-6 && fabs(c->got[1] - M_SQRT2) < 1e-6);
    free_case(c);
}

static void dare_keeps_the_expectation(void **state)
{
    (void)state;
    merge_case *c = new_case(1, LM_DTYPE_F32, 1, 200000, 0, 0);
    double kept = 0, sum = 0, whole = 0;
    c->model[0].param[LM_MERGE_WEIGHT] = 1;
    c->model[0].param[LM_MERGE_DENSITY] = 0.25;
    for (int64_t k = 0; k < c->job.count; k++)
        c->x[0][k] = c->b[k] + 1;
    put(c, 0, LM_DTYPE_F32);
    merge(c, "dare_linear");
    for (int64_t k = 0; k < c->job.count; k++) {
        kept += c->got[k] != c->b[k];
        sum += c->got[k] - c->b[k];
        whole += c->x[0][k] - c->b[k];
    }
    assert_true(fabs(kept / 200000 - 0.25) < 0.005); /* 5 standard errors */
    assert_true(fabs(sum / whole - 1) < 0.02);
    free_case(c);
}

/* --- NaN and infinities, misuse, warnings ---------------------------------------------------- */

static void nan_stays_where_it_is(void **state)
{
    static const char *const names[] = { "linear", "dem",         "task_arithmetic",
                                         "ties",   "breadcrumbs", "della" };
    (void)state;
    for (int m = 0; m < 6; m++)
        for (int ty = 0; ty < 3; ty++) {
            merge_case *c = new_case(2, types[ty], 2, 20, 150, m);
            c->x[0][1234] = NAN;
            put(c, 0, types[ty]);
            set_weights(c, 0.5, 0.5, 0);
            if (m >= 3 && m != 4 && m != 5)
                c->model[0].param[LM_MERGE_DENSITY] = 0.1;
            merge(c, names[m]);
            for (int64_t k = 0; k < c->job.count; k++)
                assert_true(isnan(c->got[k]) == (k == 1234));
            free_case(c);
        }
    merge_case *c = new_case(1, LM_DTYPE_F32, 1, 100, 0, 0);
    c->x[0][50] = INFINITY;
    put(c, 0, LM_DTYPE_F32);
    c->job.param[LM_MERGE_T] = 0.5;
    merge(c, "slerp");
    assert_true(isnan(c->got[0]));
    assert_non_null(strstr(c->warned, "NaN or infinity"));
    free_case(c);
}

static void empty_tensors(void **state)
{
    const lm_merge_method *m;
    (void)state;
    for (int i = 0; (m = lm_merge_method_at(i)); i++)
        for (int way = 0; way < 3; way++) {
            int64_t d[3][2] = { { 0, 5 }, { 5, 0 }, { 0, 0 } };
            merge_case *c =
                new_case(models_of(m, 3), LM_DTYPE_BF16, way == 2 ? 1 : 2, d[way][0], d[way][1], 0);
            ask(c, m);
            merge(c, m->name);
            free_case(c);
        }
}

static void warnings(void **state)
{
    (void)state;
    merge_case *c = new_case(2, LM_DTYPE_F32, 1, 2, 0, 0);
    set_all(c, MOST, (double[]){ 0, 0 });
    set_all(c, 0, (double[]){ 1, 0.5 });
    set_all(c, 1, (double[]){ -1, 0.75 });
    merge(c, "model_stock");
    assert_non_null(strstr(c->warned, "below 0"));
    set_weights(c, 1, 1, 0);
    c->model[0].param[LM_MERGE_DENSITY] = 0;
    merge(c, "ties");
    assert_non_null(strstr(c->warned, "keeps no element of model 1"));
    assert_true(c->got[0] == -1);
    free_case(c);
    static const char *const names[] = { "ties",         "dare_linear", "dare_ties",       "della",
                                         "della_linear", "breadcrumbs", "breadcrumbs_ties" };
    for (int m = 0; m < 7; m++) {
        c = new_case(1, LM_DTYPE_BF16, 2, 9, 40, 0);
        c->model[0].param[LM_MERGE_WEIGHT] = 1;
        c->model[0].param[LM_MERGE_DENSITY] = 0;
        merge(c, names[m]);
        assert_memory_equal(c->job.out, c->base.data, 720);
        free_case(c);
    }
}

static void refuse(merge_case *c, const char *name, lm_code code, const char *says)
{
    lm_err e = { 0 };
    assert_int_equal(try_merge(c, name, &e), code);
    if (!strstr(e.what, says))
        fail_msg("%s: '%s' does not say '%s'", name, e.what, says);
}

static void misuse(void **state)
{
    lm_err e = { 0 };
    const lm_merge_method *m;
    (void)state;
    assert_int_equal(lm_merge_method_find("tie", &m, &e), LM_EUSAGE);
    assert_non_null(strstr(e.todo, "ties"));
    assert_int_equal(lm_merge_param_find(NULL, "density"), LM_MERGE_DENSITY);
    assert_int_equal(lm_merge_param_find(NULL, "densities"), -1);
    merge_case *c = new_case(2, LM_DTYPE_F32, 1, 8, 0, 0);
    refuse(c, "linear", LM_EUSAGE, "weight");
    refuse(c, "slerp", LM_EUSAGE, "2 models");
    refuse(c, "nearswap", LM_EUSAGE, "2 models");
    set_weights(c, 1, -1, 0);
    refuse(c, "linear", LM_EUSAGE, "add up to 0");
    c->job.param[LM_MERGE_FISHER_FLOOR] = 0; /* 0 / 0 where no model is important */
    refuse(c, "fisher", LM_EUSAGE, "fisher_floor is 0");
    c->job.param[LM_MERGE_FISHER_FLOOR] = NAN;
    c->model[1].param[LM_MERGE_DENSITY] = 1.5;
    refuse(c, "ties", LM_EUSAGE, "density is 1.5");
    c->model[1].param[LM_MERGE_DENSITY] = 0.5;
    refuse(c, "linear", LM_EUSAGE, "takes no density");
    c->model[1].param[LM_MERGE_EPSILON] = 0.5;
    refuse(c, "della", LM_EUSAGE, "epsilon");
    c->model[1].param[LM_MERGE_EPSILON] = NAN;
    c->job.param[LM_MERGE_RESCALE] = LM_RESCALE_EXPECTED;
    refuse(c, "ties", LM_EUSAGE, "magnitude");
    c->job.param[LM_MERGE_RESCALE] = NAN;
    c->job.base = NULL;
    refuse(c, "ties", LM_EUSAGE, "base");
    c->job.base = &c->base;
    c->model[0].dtype = LM_DTYPE_I32;
    refuse(c, "ties", LM_EUSAGE, "i32");
    free_case(c);
    c = new_case(3, LM_DTYPE_F32, 1, 8, 0, 0);
    set_weights(c, 0.1, 0.2, -0.3); /* not 0 in binary */
    refuse(c, "linear", LM_EUSAGE, "add up to 0");
    refuse(c, "multislerp", LM_ENUMERIC, "cancel out");
    free_case(c);
    for (int i = 0; (m = lm_merge_method_at(i)); i++) { /* what the table promises */
        assert_true(m->about && m->source && m->run);
        assert_true(!(m->required & ~m->takes) && !(m->defaults & ~m->takes));
        assert_true(!m->base_required || m->base_allowed);
    }
    assert_null(lm_merge_method_at(-1));
}

/* --- the k largest --------------------------------------------------------------------------- */

static void fill_from(const void *ctx, int64_t at, int64_t n, void *out, void *cells)
{
    const merge_case *c = ctx;
    const lm_blend *b = lm_merge_loops(&c->job);
    (void)cells;
    for (int i = 0; i < 2; i++)
        b->load(c->model[i].dtype, c->model[i].data, at, lm_merge_cell(b, out, i), n);
}

static void selection(void **state)
{
    /* listed whole, up to 131,072; bracketed by a sample; too many equal ones for a list */
    const int64_t sizes[] = { 1, 100, 131072, 160000, 300000 };
    (void)state;
    for (int s = 0; s < 5; s++)
        for (int ty = 0; ty < 3; ty++)
            for (int kind = s == 4; kind < 2; kind++) {
                int64_t n = sizes[s];
                merge_case *c = new_case(2, types[ty], 1, n, 0, s);
                const double share[] = { 0, 0.01, 0.3, 0.5, 0.99, 1 };
                for (int64_t k = 0; kind && k < n; k++) /* few distinct values, many zeros */
                    c->x[0][k] = fabs(c->x[0][k]) < 0.7 ? 0 : rint(c->x[0][k] * 4);
                put(c, 0, types[ty]);
                c->job.par = kind ? two : NULL;
                lm_merge_values v = { .job = &c->job,
                                      .loops = lm_merge_loops(&c->job),
                                      .fill = fill_from,
                                      .ctx = c,
                                      .rows = 2 };
                lm_merge_top top[6] = { 0 };
                lm_merge_scratch need = { 0 }, room_for = { 0 };
                int threads = lm_par_threads(c->job.par);
                for (int t = 0; t < 6; t++) {
                    top[t].k = (int64_t)(share[t] * (double)n);
                    top[t].row = t == 3;
                }
                lm_merge_select(&v, top, 6, threads, &need);
                room_for.at = room(need.used + 64, 1);
                lm_merge_select(&v, top, 6, threads, &room_for);
                assert_int_equal(need.used, room_for.used);
                for (int row = 0; row < 2; row++) {
                    ranked *r = rank_all(c->x[row], n);
                    for (int t = 0; t < 6; t++) {
                        if (top[t].row != row)
                            continue;
                        for (int64_t k = 0; k < n; k++) {
                            union {
                                double d;
                                uint64_t u;
                            } wide = { .d = r[k].size };
                            union {
                                float f;
                                uint32_t u;
                            } low = { .f = (float)r[k].size };
                            uint64_t u = is_narrow(c) ? low.u : wide.u;
                            bool in =
                                u > top[t].bits || (u == top[t].bits && r[k].at <= top[t].cut);
                            assert_int_equal(in, k < top[t].k);
                        }
                    }
                    lm_free(r);
                }
                lm_free(room_for.at);
                free_case(c);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bytes_for_any_threads_and_level),
        cmocka_unit_test(equal_models_stay),
        cmocka_unit_test(a_weight_of_one_gives_the_bits),
        cmocka_unit_test(order_does_not_matter),
        cmocka_unit_test(one_rounding),
        cmocka_unit_test(by_hand),
        cmocka_unit_test(dare_keeps_the_expectation),
        cmocka_unit_test(nan_stays_where_it_is),
        cmocka_unit_test(empty_tensors),
        cmocka_unit_test(warnings),
        cmocka_unit_test(misuse),
        cmocka_unit_test(selection),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
