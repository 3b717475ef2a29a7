/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_gkd.c -- steps of distillation: which records and completions a step has, where its targets are, and that its
 * loss and derivatives are those of a mean over all of its tokens, whatever the micro-batches. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "base/rng.h"
#include "text/answers.h"
#include "tune/align/gkd.h"

enum { B = 1, N = B * T, RECORDS = 6, EACH = 4, EOS = 36, SEED = 7, NEW = 5 };

/* Record i: its prompt has only letters from 'u' on, its answer begins with letter i. */
static const char *const prompts[RECORDS] = { "uv", "wxu", "y", "zzu", "vu", "xy" },
                         *const answers[RECORDS] = { "aqqqqqqq",  "bqqqq",   "cqqqqqq",
                                                     "dqqqqqqqq", "eqqqqqq", "fqq" };

static lm_backend *backend;
static lm_tokenizer *tok;
static tiny_model student, teacher;
static lm_text_answers *data;

static void write_data(const char *path)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < RECORDS; i++)
        fprintf(f, "{\"prompt\":\"%s\",\"completion\":\"%s\"}\n", prompts[i], answers[i]);
    fclose(f);
}

static int begin(void **state)
{
    lm_err e = { 0 };
    lm_buf json = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    tiny_model_make(&student, llama_text, "student");
    tiny_model_make(&teacher, llama_text, "teacher");
    lm_buf_addf(&json, &e,
                "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                "\"decoder\":{\"type\":\"ByteLevel\"},"
                "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int i = 0; i < EOS; i++)
        lm_buf_addf(&json, &e, "%s\"%c\":%d", i ? "," : "", i < 26 ? 'a' + i : '0' + i - 26, i);
    lm_buf_addf(&json, &e, "}}}");
    ok(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "test", &tok, &e), &e);
    lm_buf_fini(&json);
    char *path = path_of("data.jsonl");
    const char *name = path;
    write_data(path);
    const lm_text_answers_opts read = {
        .path = &name, .n = 1, .maker = { .tok = tok, .eos = EOS }, .given = true
    };
    ok(lm_text_answers_read(&read, NULL, &data, &e), &e);
    lm_free(path);
    return 0;
}

static int end(void **state)
{
    (void)state;
    lm_text_answers_free(data);
    lm_tokenizer_free(tok);
    tiny_model_fini(&student);
    tiny_model_fini(&teacher);
    lm_backend_close(backend);
    return train_end();
}

/* ---- an objective ---- */

typedef struct {
    lm_loaded weights;
    lm_teacher teacher;
    lm_model *m;
    lm_plan plan;
    lm_evaluator v;
    lm_store *store;
    lm_align_spec spec;
    lm_gkd *x;
    const lm_objective *o;
    lm_objective_site site;
    lm_rollout_opts rollout;
} distillation;

/* Many, so that some completions have only their end. */
static int64_t ends[VOCAB - EOS];

static void open_gkd(distillation *d, const char *loss, int64_t check)
{
    lm_err e = { 0 };
    lm_build how = { .mode = LM_MODE_EVAL,
                     .batch = B,
                     .seq = T,
                     .precision = { .low = LM_DTYPE_F32 },
                     .documents = true,
                     .backend = backend };
    char *path = path_of("teacher"), *of_student = path_of("student");
    *d = (distillation){ .m = NULL };
    ok(lm_align_parse(loss, &d->spec, &e), &e);
    ok(lm_loaded_open(path, NULL, &d->teacher.weights, &e), &e);
    ok(lm_teacher_build(&d->teacher, &how, 0.5, 1, &e), &e);
    how.teacher = &d->teacher.as;
    ok(lm_loaded_open(of_student, NULL, &d->weights, &e), &e);
    ok(lm_model_build(&d->weights.config, &how, &d->m, &e), &e);
    ok(lm_plan_make(d->m->graph, backend, &d->m->loss, 1, &d->plan, &e), &e);
    ok(lm_evaluator_of(d->m, &d->plan, backend, NULL, &d->v, &e), &e);
    ok(lm_store_new(d->m, backend, &(lm_store_opts){ .par = par }, &d->store, &e), &e);
    ok(lm_store_draw(d->store, LM_TENSORS_ALL, 5, &e), &e);
    for (int i = 0; i < VOCAB - EOS; i++)
        ends[i] = EOS + i;
    d->rollout = (lm_rollout_opts){ .most_prompt = 8,
                                    .most_new = NEW,
                                    .sample = { 1, 0, 1, 0, 1 },
                                    .eos = ends,
                                    .n_eos = VOCAB - EOS,
                                    .seed = 9 };
    const lm_gkd_opts o = { .spec = &d->spec,
                            .train = data,
                            .val = data,
                            .teacher = &d->teacher,
                            .each = EACH,
                            .check = check,
                            .vocab = VOCAB,
                            .seed = SEED,
                            .rollout = d->rollout,
                            .tokenizer = tok };
    d->site = (lm_objective_site){ .backend = backend,
                                   .par = par,
                                   .config = &d->weights.config,
                                   .model = d->m,
                                   .store = d->store,
                                   .exec = d->v.exec,
                                   .batch = B,
                                   .seq = T };
    ok(lm_gkd_new(&o, &d->x, &e), &e);
    d->o = lm_gkd_objective(d->x);
    ok(d->o->ready(d->o->ctx, &d->site, &e), &e);
    lm_free(path);
    lm_free(of_student);
}

static void close_gkd(distillation *d)
{
    lm_gkd_free(d->x);
    lm_store_free(d->store);
    lm_evaluator_fini(&d->v);
    lm_plan_fini(&d->plan);
    lm_model_free(d->m);
    lm_loaded_fini(&d->weights);
    lm_teacher_close(&d->teacher);
}

/* ---- a round ---- */

typedef struct {
    int32_t ids[T + 1];
    int n, from; /* targets are ids [from, n) */
} document;

typedef struct {
    document doc[16];
    int docs, tokens;
    int64_t micros;
    double loss, want; /* of the objective; the mean of the numbers that it got */
    float slope[8][N]; /* of each micro-batch, and */
    bool target[8][N]; /* where its targets are */
    double divergence, own, length, clipped;
} result;

/* The texts of a batch: rows with one `lo`, whose targets are the next tokens, or -1. */
static void read_documents(const lm_batch *b, result *r)
{
    for (int i = 0; i < N;) {
        document *d = &r->doc[r->docs];
        const int from = i;
        int last = -1;
        *d = (document){ .from = -1 };
        do {
            const int at = i - from;
            d->ids[at] = b->tokens[i];
            if (b->targets[i] >= 0) {
                d->from = d->from < 0 ? at + 1 : d->from;
                d->ids[at + 1] = b->targets[i];
                last = at + 1;
            }
            i++;
        } while (i < N && i % T && b->pos[i]);
        d->n = last + 1;
        r->docs += last > 0;
    }
}

/* The number that row i of a micro-batch has in place of a divergence. */
static float number_of(int64_t micro, int i)
{
    return (float)(0.25 + 0.125 * (double)((i * 7 + micro * 3) % 11));
}

static double field(const json_t *o, const char *name)
{
    return json_number_value(json_object_get(o, name));
}

static void report(distillation *d, const lm_round *round, result *out)
{
    lm_err e = { 0 };
    lm_metrics *m = NULL;
    lm_buf text = { 0 };
    json_t *o = NULL;
    char *path = path_of("metrics.jsonl");
    remove(path);
    ok(lm_metrics_open(path, LM_METRICS_NEW, NULL, &m, &e), &e);
    lm_metrics_begin(m, "step");
    d->o->report(d->o->ctx, round, m);
    ok(lm_metrics_end(m, &e), &e);
    lm_metrics_close(m, &e);
    ok(lm_file_read(path, 1 << 16, &text, &e), &e);
    ok(lm_json_parse(text.data, text.len, path, &o, &e), &e);
    out->divergence = field(o, "divergence");
    out->own = field(o, "on_policy");
    out->length = field(o, "completions/mean_length");
    out->clipped = field(o, "completions/clipped_ratio");
    json_decref(o);
    lm_buf_fini(&text);
    lm_free(path);
}

static void run(distillation *d, const lm_round *round, result *out)
{
    lm_err e = { 0 };
    *out = (result){ .docs = 0 };
    ok(d->o->begin(d->o->ctx, round, &out->micros, &e), &e);
    assert_true(out->micros > 0 && out->micros <= 8);
    for (int64_t k = 0; k < out->micros; k++) {
        float nll[N];
        lm_batch *b = &d->v.batch;
        ok(d->o->fill(d->o->ctx, round, k, b, &e), &e);
        read_documents(b, out);
        for (int i = 0; i < N; i++) {
            nll[i] = number_of(k + round->step, i);
            out->target[k][i] = b->targets[i] >= 0;
            out->tokens += out->target[k][i];
            out->want += out->target[k][i] ? (double)nll[i] : 0;
        }
        const lm_row_results rows = { .nll = nll };
        const lm_row_slopes to = { .nll = out->slope[k] };
        ok(d->o->grade(d->o->ctx, round, k, b, &rows, round->val ? NULL : &to, &e), &e);
    }
    out->want /= out->tokens;
    ok(d->o->finish(d->o->ctx, round, &out->loss, &e), &e);
    report(d, round, out);
}

static void check_mean(const result *r, bool slopes)
{
    if (!(fabs(r->loss - r->want) < 1e-6 && fabs(r->divergence - r->want) < 1e-6))
        fail_msg("loss %.9g, divergence %.9g: not %.9g", r->loss, r->divergence, r->want);
    for (int64_t k = 0; slopes && k < r->micros; k++)
        for (int i = 0; i < N; i++) {
            double want = r->target[k][i] ? 1.0 / r->tokens : 0;
            if (!(fabs((double)r->slope[k][i] - want) < 1e-7))
                fail_msg("micro-batch %d, row %d: slope %g, not %g", (int)k, i,
                         (double)r->slope[k][i], want);
        }
}

/* The document that begins with this prompt and has exactly this answer. */
static bool has(const result *r, const uint32_t *ids, int64_t n, int64_t from)
{
    for (int i = 0; i < r->docs; i++) {
        const document *d = &r->doc[i];
        bool same = d->n == n && d->from == from;
        for (int64_t k = 0; same && k < n; k++)
            same = d->ids[k] == (int32_t)ids[k];
        if (same)
            return true;
    }
    return false;
}

/* Record number k of a step. */
static int64_t record_of(int64_t step, int64_t k)
{
    const uint64_t i = (uint64_t)(step * EACH + k);
    return (int64_t)lm_rng_permute(lm_rng_make(SEED, "shuffle", i / RECORDS), i % RECORDS, RECORDS);
}

/* ---- tests ---- */

/* Passes over the data, each in an order of its own; the texts of a step are whole, and its loss a mean of all. */
static void test_given(void **state)
{
    distillation d;
    result r;
    int seen[RECORDS] = { 0 }, moved = 0;
    (void)state;
    open_gkd(&d, "gkd:lambda=0", 0);
    for (int64_t step = 0; step < 6; step++) {
        run(&d, &(lm_round){ .step = step }, &r);
        assert_int_equal(r.docs, EACH);
        assert_true(r.micros > 1 && r.own == 0);
        check_mean(&r, true);
        for (int64_t k = 0; k < EACH; k++) {
            const lm_text_answer *a = lm_text_answers_at(data, record_of(step, k));
            assert_true(has(&r, a->ids, a->n, a->prompt));
        }
        for (int i = 0; i < r.docs; i++)
            seen[r.doc[i].ids[r.doc[i].from]]++;
    }
    for (int i = 0; i < RECORDS; i++) {
        assert_int_equal(seen[i], 6 * EACH / RECORDS);
        moved += record_of(0, i) != record_of(RECORDS / 2, i); /* 3 steps are 2 passes */
    }
    assert_true(moved);
    close_gkd(&d);
}

/* Evaluations count the tokens of their own micro-batches, again and again alike. */
static void test_evaluated(void **state)
{
    distillation d;
    result all, part, again;
    (void)state;
    open_gkd(&d, "2*gkd:lambda=0", 1);
    run(&d, &(lm_round){ .step = 3, .val = true }, &part);
    assert_int_equal(part.micros, 1);
    assert_true(fabs(part.loss - 2 * part.want) < 1e-6);
    run(&d, &(lm_round){ .step = 5, .val = true }, &again);
    assert_true(fabs(again.loss - 2 * again.want) < 1e-6 && again.want != part.want);
    assert_true(fabs(again.divergence - again.want) < 1e-6); /* of this one alone */
    close_gkd(&d);
    open_gkd(&d, "gkd:lambda=0", 0);
    run(&d, &(lm_round){ .step = 3, .val = true }, &all);
    assert_true(all.docs == RECORDS && all.tokens > part.tokens && part.docs < RECORDS);
    check_mean(&all, false);
    close_gkd(&d);
}

/* What the student samples: the prompts of the step's records, and completions of its rollout of that step. */
static void test_sampled(void **state)
{
    distillation d;
    result r;
    lm_err e = { 0 };
    lm_rollout *own = NULL;
    (void)state;
    open_gkd(&d, "gkd:lambda=1", 0);
    const lm_rollout_site at = { .backend = backend,
                                 .par = par,
                                 .config = &d.weights.config,
                                 .store = d.store,
                                 .model = d.m,
                                 .tokenizer = tok };
    ok(lm_rollout_new(&at, &d.rollout, &own, &e), &e);
    int64_t shortest = NEW;
    for (int64_t step = 0; step < 3; step++) {
        lm_rollout_prompt ask[EACH];
        const lm_rollout_text *said = NULL;
        bool whole = false;
        double length = 0, clipped = 0;
        run(&d, &(lm_round){ .step = step }, &r);
        for (int64_t k = 0; k < EACH; k++) {
            const lm_text_answer *a = lm_text_answers_at(data, record_of(step, k));
            ask[k] = (lm_rollout_prompt){ a->ids, a->prompt };
        }
        ok(lm_rollout_run(own, step, ask, EACH, 1, &said, &whole, NULL, &e), &e);
        assert_true(whole && r.docs == EACH);
        for (int64_t k = 0; k < EACH; k++) {
            uint32_t ids[T];
            const int64_t n = ask[k].n + said[k].n;
            memcpy(ids, ask[k].ids, (size_t)ask[k].n * sizeof *ids);
            memcpy(ids + ask[k].n, said[k].ids, (size_t)said[k].n * sizeof *ids);
            assert_true(has(&r, ids, n, ask[k].n));
            shortest = said[k].n < shortest ? said[k].n : shortest;
            length += (double)said[k].n / EACH;
            clipped += (double)said[k].truncated / EACH;
        }
        check_mean(&r, true);
        assert_true(r.own == 1 && fabs(r.length - length) < 1e-6);
        assert_true(fabs(r.clipped - clipped) < 1e-6);
    }
    assert_int_equal(shortest, 1);
    lm_rollout_free(own);
    close_gkd(&d);
}

/* Steps that sample are a share of lambda; the same ones again. */
static void test_share(void **state)
{
    enum { STEPS = 60 };
    distillation d;
    lm_err e = { 0 };
    int64_t micros;
    int own = 0;
    (void)state;
    open_gkd(&d, "gkd:lambda=0.2,beta=0.9", 0);
    for (int64_t step = 0; step < STEPS; step++) {
        const lm_round round = { .step = step };
        result r = { .docs = 0 };
        ok(d.o->begin(d.o->ctx, &round, &micros, &e), &e);
        report(&d, &round, &r);
        own += r.own > 0;
        assert_true((r.own > 0) ==
                    (lm_rng_uniform(lm_rng_make(SEED, "gkd", 0), (uint64_t)step) < 0.2));
    }
    assert_true(own > 4 && own < 20);
    close_gkd(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given),
        cmocka_unit_test(test_evaluated),
        cmocka_unit_test(test_sampled),
        cmocka_unit_test(test_share),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
