/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_offline.c -- training on given answers: losses and derivatives of steps and evaluations are those of the
 * records, which this test reads again by itself: labels, margins, mismatched answers, masks of prompts, padding.
 *
 * There is no model: log-probabilities and scores are functions of neighbouring ids, so that they do not depend on the
 * window in which a text lies. */
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
#include "graph/backend.h"
#include "tune/align/offline.h"
#include "tune/align/reference.h"

enum { RECORDS = 5, EACH = 3, T = 64, BATCH = 2, EOS = 36, PAD = EOS, VOCAB = 40, MOST = 64 };

static lm_tokenizer *tok;
static lm_backend *backend;
static char folder[] = "/tmp/test_align_offline.XXXXXX";

static void ok(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

/* Ids of "a".."z" are 0.., those of "0".."9" follow. */
static int begin(void **state)
{
    lm_err e = { 0 };
    lm_buf json = { 0 };
    (void)state;
    if (!mkdtemp(folder))
        return 1;
    lm_buf_addf(&json, &e,
                "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                "\"decoder\":{\"type\":\"ByteLevel\"},"
                "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int i = 0; i < 36; i++)
        lm_buf_addf(&json, &e, "%s\"%c\":%d", i ? "," : "", i < 26 ? 'a' + i : '0' + i - 26, i);
    lm_buf_addf(&json, &e, "}}}");
    ok(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "test", &tok, &e), &e);
    ok(lm_backend_cpu(LM_CPU_REF, NULL, &backend, &e), &e);
    lm_buf_fini(&json);
    return 0;
}

static int end(void **state)
{
    lm_err e = { 0 };
    (void)state;
    lm_tokenizer_free(tok);
    lm_backend_close(backend);
    return lm_rm_rf(folder, &e);
}

/* ---- a model ---- */

static double logp_of(int64_t from, int64_t to)
{
    return -0.1 - (double)((from * 7 + to * 13 + 3) % 17) / 7;
}

static double ref_of(int64_t from, int64_t to)
{
    return logp_of(from, to) + (double)((from * 5 + to * 3) % 11 - 5) / 9;
}

static double score_of(int64_t id)
{
    return (double)(id * 11 % 23) / 8 - 1;
}

/* ---- records ---- */

/* Prompts and answers of different lengths.  What ends them is padding to the reward model, as where a model has no other. */
static const char *const prompt[RECORDS] = { "ab", "cde", "f", "ghij", "kl" },
                         *const good[RECORDS] = { "mno", "p", "qrst", "uv", "w99" },
                         *const bad[RECORDS] = { "xy", "z01", "2", "345678", "a9" };
static const double margin[RECORDS] = { 0.5, 0, 1.25, 0, 0.25 };

static int64_t encode(const char *text, uint32_t *out)
{
    int64_t n = 0;
    for (; text[n]; n++)
        out[n] = (uint32_t)(text[n] >= 'a' ? text[n] - 'a' : text[n] - '0' + 26);
    return n;
}

typedef struct {
    lm_align_seq seq;
    uint32_t ids[MOST];
    int64_t n, prompt;
    double logp[MOST], ref[MOST], dlogp[MOST];
    uint8_t mask[MOST];
} text;

/* The definition of a sequence: prompt `p` and the answer, with all its targets, or those of the answer alone. */
static void make_text(text *t, const char *p, const char *answer, bool whole)
{
    memset(t, 0, sizeof *t);
    t->prompt = encode(p, t->ids);
    t->n = t->prompt + encode(answer, t->ids + t->prompt);
    t->ids[t->n++] = EOS;
    const int64_t from = whole ? 1 : t->prompt;
    t->seq = (lm_align_seq){ .n = t->n - from,
                             .logp = t->logp,
                             .ref = t->ref,
                             .dlogp = t->dlogp,
                             .mask = whole ? t->mask : NULL };
    for (int64_t k = from; k < t->n; k++) {
        t->logp[k - from] = logp_of(t->ids[k - 1], t->ids[k]);
        t->ref[k - from] = ref_of(t->ids[k - 1], t->ids[k]);
        t->mask[k - from] = k >= t->prompt;
    }
}

static char *write_records(bool pairs)
{
    lm_err e = { 0 };
    char *path = NULL;
    ok(lm_path_join(&path, folder, pairs ? "pairs.jsonl" : "judged.jsonl", &e), &e);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < RECORDS; i++)
        if (pairs)
            fprintf(f, "{\"prompt\":\"%s\",\"chosen\":\"%s\",\"rejected\":\"%s\",\"margin\":%g}\n",
                    prompt[i], good[i], bad[i], margin[i]);
        else
            fprintf(f, "{\"prompt\":\"%s\",\"completion\":\"%s\",\"label\":%s}\n", prompt[i],
                    i % 2 ? bad[i] : good[i], i % 2 ? "false" : "true");
    fclose(f);
    return path;
}

/* ---- what a step should be ---- */

/* The sequences of record r, two of each in the order of a micro-batch. */
static int sequences_of(const lm_align_spec *spec, int r, text *out)
{
    const bool whole = lm_align_whole(spec);
    if (lm_align_kind_of(spec) != LM_ALIGN_UNPAIRED) {
        make_text(&out[0], prompt[r], good[r], whole);
        make_text(&out[1], prompt[r], bad[r], whole);
        for (int i = 0; i < 2; i++) {
            int64_t last = out[i].n - 1;
            while (out[i].ids[last] == PAD)
                last--;
            out[i].seq.margin = margin[r];
            out[i].seq.score = score_of(out[i].ids[last]);
        }
        return 2;
    }
    const int next = (r + 1) % RECORDS;
    make_text(&out[0], prompt[r], r % 2 ? bad[r] : good[r], whole);
    out[0].seq.good = r % 2 == 0;
    if (!lm_align_mismatches(spec))
        return 1;
    make_text(&out[1], prompt[r], next % 2 ? bad[next] : good[next], whole);
    out[1].seq.mismatched = true;
    return 2;
}

/* Numbers of the rows of a batch, as a model would give them. */
static void run_model(const lm_align_spec *spec, const lm_batch *b, float *nll)
{
    for (int64_t i = 0; i < b->batch * b->seq; i++)
        nll[i] = lm_align_kind_of(spec) == LM_ALIGN_SCORES ? (float)score_of(b->tokens[i])
                 : b->targets[i] >= 0 ? (float)-logp_of(b->tokens[i], b->targets[i])
                                      : -99;
}

/* A number for each pair of ids: derivatives are compared in their sum with these weights. */
static double weight_of(int64_t from, int64_t to)
{
    return 1 + (double)((from * 31 + to * 17) % 29) / 10;
}

typedef struct {
    double loss, sum; /* sum: of derivatives by log-probabilities or scores, weighed */
} outcome;

static outcome by_definition(const lm_align_spec *spec, const int *record, int n)
{
    static text t[2 * RECORDS];
    lm_align_seq seq[2 * RECORDS];
    lm_align_batch b = { .seq = seq };
    lm_err e = { 0 };
    outcome out = { 0 };
    for (int i = 0; i < n; i++)
        b.n += sequences_of(spec, record[i], &t[b.n]);
    for (int64_t i = 0; i < b.n; i++)
        seq[i] = t[i].seq;
    ok(lm_align_run(spec, &b, &e), &e);
    out.loss = b.loss;
    for (int64_t i = 0; i < b.n; i++) {
        const int64_t from = t[i].n - seq[i].n;
        if (lm_align_kind_of(spec) == LM_ALIGN_SCORES) {
            out.sum += seq[i].dscore * (1 + seq[i].score);
            continue;
        }
        for (int64_t k = 0; k < seq[i].n; k++)
            out.sum -= seq[i].dlogp[k] * weight_of(t[i].ids[from + k - 1], t[i].ids[from + k]);
    }
    return out;
}

static outcome by_objective(const lm_align_spec *spec, const lm_objective *x, const lm_round *r)
{
    static float nll[BATCH * T], scale[BATCH * T];
    lm_err e = { 0 };
    lm_batch b;
    int64_t micros;
    outcome out = { 0 };
    ok(lm_batch_new(&b, backend, BATCH, T, 0, &e), &e);
    ok(x->begin(x->ctx, r, &micros, &e), &e);
    assert_true(micros > 0);
    for (int64_t m = 0; m < micros; m++) {
        const lm_row_results rows = { .nll = nll };
        memset(scale, 0, sizeof scale);
        ok(x->fill(x->ctx, r, m, &b, &e), &e);
        run_model(spec, &b, nll);
        const lm_row_slopes to = { .nll = scale };
        ok(x->grade(x->ctx, r, m, &b, &rows, r->val ? NULL : &to, &e), &e);
        for (int64_t i = 0; i < BATCH * T; i++)
            out.sum += (double)scale[i] * (lm_align_kind_of(spec) == LM_ALIGN_SCORES
                                               ? 1 + score_of(b.tokens[i])
                                               : weight_of(b.tokens[i], b.targets[i]));
    }
    ok(x->finish(x->ctx, r, &out.loss, &e), &e);
    lm_batch_fini(&b);
    return out;
}

static void close_to(const char *loss, const char *what, double got, double want)
{
    if (!(fabs(got - want) <= 1e-5 * (1 + fabs(want))))
        fail_msg("%s: %s is %.9g, by its definition %.9g", loss, what, got, want);
}

/* ---- the reference ---- */

/* A file of log-probabilities of all sequences of the data, named as the objective finds it. */
static char *write_reference(const lm_align_spec *spec, const lm_text_answers *a)
{
    static text t[2 * RECORDS];
    lm_align_text at[2 * RECORDS];
    lm_err e = { 0 };
    char *path = NULL;
    int n = 0;
    ok(lm_path_join(&path, folder, "reference.safetensors", &e), &e);
    for (int r = 0; r < RECORDS; r++)
        n += sequences_of(spec, r, &t[n]);
    for (int i = 0; i < n; i++)
        at[i] = (lm_align_text){ t[i].ids, t[i].n, t[i].n - t[i].seq.n };
    const uint64_t by =
        lm_align_mismatches(spec) ? 2 : 1; /* as offline.c marks the kind of sequences */
    lm_reference_set set[2] = { { .text = at, .n = n, .name = "train" }, { 0 } };
    set[0].digest = lm_text_answers_digest(a) ^ by ^ (uint64_t)(lm_align_whole(spec) ? 1 << 8 : 0);
    ok(lm_reference_room(&set[0], &e), &e);
    for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < t[i].seq.n; k++)
            set[0].logp[set[0].at[i] + k] = (float)t[i].ref[k];
    set[1] = set[0];
    set[1].name = "val";
    ok(lm_reference_save(set, 2, "", path, &e), &e);
    lm_reference_fini(&set[0]);
    return path;
}

/* ---- tests ---- */

static void check(const char *loss)
{
    lm_align_spec spec;
    lm_err e = { 0 };
    ok(lm_align_parse(loss, &spec, &e), &e);
    const bool pairs = lm_align_kind_of(&spec) != LM_ALIGN_UNPAIRED;
    char *path = write_records(pairs), *kept = NULL;
    const char *name = path;
    lm_text_answers *a = NULL;
    const lm_text_answers_opts read = {
        .path = &name, .n = 1, .maker = { .tok = tok, .eos = EOS }, .pairs = pairs
    };
    ok(lm_text_answers_read(&read, NULL, &a, &e), &e);
    if (lm_align_reads_ref(&spec))
        kept = write_reference(&spec, a);
    const lm_offline_opts o = { .spec = &spec,
                                .train = a,
                                .val = a,
                                .each = EACH,
                                .vocab = VOCAB,
                                .pad = PAD,
                                .seq = T,
                                .seed = 3,
                                .kept = kept };
    const lm_objective_site site = { .backend = backend, .batch = BATCH, .seq = T };
    lm_offline *x = NULL;
    ok(lm_offline_new(&o, &x, &e), &e);
    const lm_objective *of = lm_offline_objective(x);
    ok(of->ready(of->ctx, &site, &e), &e);
    /* each pass over the data has every record once: of two steps of three, five are of the first */
    for (int64_t step = 0; step < 2 * RECORDS; step++) {
        int record[EACH];
        for (int64_t k = 0; k < EACH; k++) {
            const uint64_t i = (uint64_t)(step * EACH + k);
            record[k] =
                (int)lm_rng_permute(lm_rng_make(3, "shuffle", i / RECORDS), i % RECORDS, RECORDS);
        }
        const lm_round r = { .step = step };
        const outcome want = by_definition(&spec, record, EACH), got = by_objective(&spec, of, &r);
        close_to(loss, "the loss of a step", got.loss, want.loss);
        close_to(loss, "the sum of its derivatives", got.sum, want.sum);
    }
    const int all[RECORDS] = { 0, 1, 2, 3, 4 };
    const lm_round val = { .step = 1, .val = true };
    close_to(loss, "the loss of an evaluation", by_objective(&spec, of, &val).loss,
             by_definition(&spec, all, RECORDS).loss);
    lm_offline_free(x);
    lm_text_answers_free(a);
    lm_free(path);
    lm_free(kept);
}

static void steps_are_those_of_their_records(void **state)
{
    static const char *const losses[] = {
        "dpo",
        "ipo",
        "dpo:ld_alpha=0.5+0.5*sft",
        "orpo",
        "cpo",
        "simpo",
        "reward:center_rewards_coefficient=0.1",
        "apo_zero_unpaired:undesirable_weight=0.5",
    };
    (void)state;
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++)
        check(losses[i]);
}

/* The mean of mismatched answers is one of the micro-batch, which here has all answers of the step. */
static void mismatched_answers(void **state)
{
    (void)state;
    check("kto:beta=0.5,desirable_weight=2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_those_of_their_records),
        cmocka_unit_test(mismatched_answers),
    };
    return cmocka_run_group_tests_name("align_offline", tests, begin, end);
}
