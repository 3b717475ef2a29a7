/* SPDX-License-Identifier: Apache-2.0 */
/* offline.c -- steps of given answers. */
#include "tune/align/offline.h"

#include <inttypes.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tune/align/reference.h"
#include "tune/align/reference_model.h"
#include "tune/align/sums.h"

/* A set of answers as texts, `unit` for each record. */
typedef struct {
    const lm_text_answers *answers;
    lm_align_text *text; /* [n] */
    int64_t n;
    uint32_t *mixed; /* ids of mismatched answers, or of texts with one more id */
    lm_reference_set ref;
} set;

/* The texts of a round: numbers in their set, places, counts. */
typedef struct {
    const set *s;
    int64_t *number;     /* [n] */
    lm_align_text *text; /* [n] */
    int64_t n;
    lm_texts places;
    lm_align_counts counts;
    lm_align_sums sums;
} lot;

/* Memory of one micro-batch: sequences, and numbers of all of their tokens. */
typedef struct {
    lm_align_seq *seq;
    int64_t *text; /* numbers in the lot */
    double *logp, *ref, *dlogp, *collision;
    uint8_t *mask;
} work;

struct lm_offline {
    lm_offline_opts o;
    lm_align_spec spec;
    lm_objective objective;
    lm_objective_site site;
    int64_t unit;
    bool reads_ref, whole;
    char model[LM_REFERENCE_MODEL]; /* of the reference */
    set train, val;
    lot step, check; /* of a step; of an evaluation */
    work work;
};

/* ---- sets ---- */

int64_t lm_offline_unit(const lm_align_spec *s)
{
    const lm_align_kind kind = lm_align_kind_of(s);
    return kind == LM_ALIGN_TEACHER || (kind == LM_ALIGN_UNPAIRED && !lm_align_mismatches(s)) ? 1
                                                                                              : 2;
}

static bool is_scored(const lm_align_spec *s)
{
    return lm_align_kind_of(s) == LM_ALIGN_SCORES;
}

int64_t lm_offline_rows(const lm_align_spec *s, int64_t longest)
{
    return lm_offline_unit(s) * (is_scored(s) ? longest : longest - 1);
}

static bool is_mixed(const lm_offline *x)
{
    return lm_align_mismatches(&x->spec);
}

/* The prompt of answer i and the text of answer j, cut to the longest of the set. */
static int64_t mix(const lm_text_answers *a, int64_t i, int64_t j, uint32_t *out)
{
    const lm_text_answer *p = lm_text_answers_at(a, i), *q = lm_text_answers_at(a, j);
    int64_t most = lm_text_answers_stat(a)->longest, n = p->prompt + q->n - q->prompt;
    n = n < most ? n : most;
    memcpy(out, p->ids, (size_t)p->prompt * sizeof *out);
    memcpy(out + p->prompt, q->ids + q->prompt, (size_t)(n - p->prompt) * sizeof *out);
    return n;
}

static lm_code mix_all(set *s, lm_err *e)
{
    int64_t count = lm_text_answers_count(s->answers), total = 0;
    for (int64_t i = 0; i < count; i++) {
        const lm_text_answer *p = lm_text_answers_at(s->answers, i);
        const lm_text_answer *q = lm_text_answers_at(s->answers, (i + 1) % count);
        total += p->prompt + q->n - q->prompt;
    }
    if (lm_alloc_n(&s->mixed, (size_t)total, sizeof *s->mixed, "mismatched answers", e))
        return e->code;
    uint32_t *at = s->mixed;
    for (int64_t i = 0; i < count; i++) {
        int64_t n = mix(s->answers, i, (i + 1) % count, at);
        s->text[2 * i + 1] = (lm_align_text){ at, n, lm_text_answers_at(s->answers, i)->prompt };
        at += n;
    }
    return LM_OK;
}

/* Texts with one more id, so that the last token has a row; the first wanted row is the one with
 * the score. */
static lm_code extend_all(const lm_offline *x, set *s, lm_err *e)
{
    int64_t total = 0;
    for (int64_t i = 0; i < s->n; i++)
        total += s->text[i].n + 1;
    if (lm_alloc_n(&s->mixed, (size_t)total, sizeof *s->mixed, "answers", e))
        return e->code;
    uint32_t *at = s->mixed;
    for (int64_t i = 0; i < s->n; i++) {
        lm_align_text *t = &s->text[i];
        int64_t last = t->n - 1;
        while (last > 0 && t->ids[last] == x->o.pad)
            last--;
        memcpy(at, t->ids, (size_t)t->n * sizeof *at);
        *t = (lm_align_text){ at, t->n + 1, last + 1 };
        at += t->n;
    }
    return LM_OK;
}

static lm_code make_set(lm_offline *x, const lm_text_answers *a, const char *name, set *s,
                        lm_err *e)
{
    int64_t count = lm_text_answers_count(a), by = is_mixed(x) ? 2 : 1;
    *s = (set){ .answers = a, .n = count * by };
    if (is_mixed(x) && count < 2)
        return lm_fail(
            e, LM_EUSAGE, name, "give more of them, or use apo_zero_unpaired",
            "kto needs two records: each prompt is also judged with the answer of the next");
    if (lm_alloc_n(&s->text, (size_t)s->n, sizeof *s->text, "answers", e))
        return e->code;
    for (int64_t i = 0; i < count; i++) {
        const lm_text_answer *t = lm_text_answers_at(a, i);
        s->text[i * by] = (lm_align_text){ t->ids, t->n, x->whole ? 1 : t->prompt };
    }
    if ((is_mixed(x) && mix_all(s, e)) || (is_scored(&x->spec) && extend_all(x, s, e)))
        return e->code;
    s->ref = (lm_reference_set){ .text = s->text, .n = s->n, .name = name };
    s->ref.digest = lm_text_answers_digest(a) ^ (uint64_t)by ^ ((uint64_t)x->whole << 8);
    return x->reads_ref ? lm_reference_room(&s->ref, e) : LM_OK;
}

static void free_set(set *s)
{
    lm_reference_fini(&s->ref);
    lm_free(s->text);
    lm_free(s->mixed);
}

/* ---- lots ---- */

static lm_code make_lot(const set *s, int64_t n, lot *l, lm_err *e)
{
    *l = (lot){ .s = s, .n = n };
    return lm_alloc_n(&l->number, (size_t)n, sizeof *l->number, "answers of a step", e) ||
                   lm_alloc_n(&l->text, (size_t)n, sizeof *l->text, "answers of a step", e)
               ? e->code
               : LM_OK;
}

static void free_lot(lot *l)
{
    lm_free(l->number);
    lm_free(l->text);
    lm_texts_fini(&l->places);
    lm_align_sums_fini(&l->sums);
}

/* True if entry k of text i of the set is the completion's. */
static bool is_answer(const set *s, const lm_offline *x, int64_t i, int64_t k)
{
    return !x->whole || s->text[i].from + k >= lm_text_answers_at(s->answers, i)->prompt;
}

/* What windows [0, windows) hold. */
static void count_lot(const lm_offline *x, lot *l, int64_t windows)
{
    l->counts = (lm_align_counts){ 0 };
    for (int64_t i = 0; i < l->n; i++) {
        if ((is_mixed(x) && i % 2) || l->places.window[i] >= windows)
            continue;
        int64_t t = l->number[i], all = l->text[i].n - l->text[i].from;
        int64_t prompt = x->whole ? lm_text_answers_at(l->s->answers, t)->prompt - 1 : 0;
        l->counts.sequences++;
        l->counts.tokens += all - prompt;
        l->counts.sft += i % 2 ? 0 : all - prompt;
        l->counts.sft_whole += i % 2 ? 0 : all;
    }
}

static lm_code place_lot(const lm_offline *x, lot *l, lm_err *e)
{
    for (int64_t i = 0; i < l->n; i++)
        l->text[i] = l->s->text[l->number[i]];
    if (lm_texts_place(l->text, l->n, x->unit, x->o.seq, &l->places, e))
        return e->code;
    count_lot(x, l, l->places.windows);
    return LM_OK;
}

/* The records of a step. */
static lm_code draw_step(lm_offline *x, int64_t step, lm_err *e)
{
    lot *l = &x->step;
    int64_t records = x->train.n / x->unit;
    for (int64_t k = 0; k < x->o.each; k++) {
        int64_t index = step * x->o.each + k, epoch = index / records;
        int64_t r = (int64_t)lm_rng_permute(lm_rng_make(x->o.seed, "shuffle", (uint64_t)epoch),
                                            (uint64_t)(index % records), (uint64_t)records);
        for (int64_t i = 0; i < x->unit; i++)
            l->number[k * x->unit + i] = r * x->unit + i;
    }
    return place_lot(x, l, e);
}

/* ---- the objective ---- */

static lot *lot_of(lm_offline *x, const lm_round *r)
{
    return r->val ? &x->check : &x->step;
}

static lm_code fail_model(const char *path, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, path, "resume with the model of the run, or begin another",
                   "is of another model");
}

static lm_code load_reference(lm_offline *x, lm_reference_set *both, int n, lm_err *e)
{
    char own[LM_REFERENCE_MODEL];
    if (lm_reference_load(both, n, own, x->o.kept, e))
        return e->code;
    if (*x->model && strcmp(x->model, own) != 0)
        return fail_model(x->o.kept, e);
    memcpy(x->model, own, sizeof own);
    return LM_OK;
}

/* By the weights that train, before the first step. */
static lm_code make_own(lm_offline *x, lm_reference_set *both, int n, bool *whole, lm_err *e)
{
    lm_scorer scorer = { .made = false };
    if (!lm_scorer_open(&scorer, &x->site, e))
        lm_reference_make(both, n, &scorer, x->o.sink, whole, e);
    lm_scorer_close(&scorer);
    return e->code;
}

/* By another model, which is closed behind it; a kept file must be of that model. */
static lm_code make_other(lm_offline *x, lm_reference_set *both, int n, bool *whole, lm_err *e)
{
    const lm_offline_opts *o = &x->o;
    lm_reference_model r = { .shares = o->reference_shares };
    uint8_t digest[16];
    if (o->kept ? lm_reference_model_read(&r, o->reference_model, o->reference_adapter,
                                          x->site.config, o->tokenizer, e)
                : lm_reference_model_open(&r, o->reference_model, o->reference_adapter,
                                          o->tokenizer, &x->site, e)) {
        lm_reference_model_close(&r);
        return e->code;
    }
    lm_model_source_set_par(r.weights.src, x->site.par);
    if (!lm_reference_model_digest(&r, digest, e)) {
        lm_reference_model_text(digest, x->model);
        if (!o->kept)
            lm_reference_make(both, n, &r.scorer, o->sink, whole, e);
    }
    lm_reference_model_close(&r);
    return e->code;
}

static lm_code find_reference(lm_offline *x, lm_err *e)
{
    lm_reference_set both[2] = { x->train.ref, x->val.ref };
    int n = x->o.val ? 2 : 1;
    bool whole = true;
    const char *to = x->o.reference, *from = x->o.kept;
    if (x->o.reference_model) {
        if (make_other(x, both, n, &whole, e))
            return e->code;
    } else if (x->o.weights) {
        lm_reference_model_text(x->o.weights, x->model);
    }
    if (from && load_reference(x, both, n, e))
        return e->code;
    if (!from && !x->o.reference_model && make_own(x, both, n, &whole, e))
        return e->code;
    if (!whole)
        return LM_OK;
    const bool writes = !x->site.comm || lm_comm_rank(x->site.comm) == 0;
    return to && writes && !(from && lm_path_same(to, from))
               ? lm_reference_save(both, n, x->model, to, e)
               : LM_OK;
}

/* A micro-batch has at most as many numbers, and texts, as rows. */
static lm_code make_work(lm_offline *x, lm_err *e)
{
    work *w = &x->work;
    size_t n = (size_t)(x->site.batch * x->site.seq);
    return lm_alloc_n(&w->seq, n, sizeof *w->seq, "sequences", e) ||
                   lm_alloc_n(&w->text, n, sizeof *w->text, "sequences", e) ||
                   lm_alloc_n(&w->logp, n, sizeof *w->logp, "log-probabilities", e) ||
                   lm_alloc_n(&w->ref, n, sizeof *w->ref, "log-probabilities", e) ||
                   lm_alloc_n(&w->dlogp, n, sizeof *w->dlogp, "log-probabilities", e) ||
                   lm_alloc_n(&w->collision, n, sizeof *w->collision, "entropies", e) ||
                   lm_alloc_n(&w->mask, n, sizeof *w->mask, "log-probabilities", e)
               ? e->code
               : LM_OK;
}

static lm_code offline_ready(void *ctx, const lm_objective_site *site, lm_err *e)
{
    lm_offline *x = ctx;
    x->site = *site;
    if (make_work(x, e))
        return e->code;
    return x->reads_ref ? find_reference(x, e) : LM_OK;
}

static lm_code offline_begin(void *ctx, const lm_round *r, int64_t *micros, lm_err *e)
{
    lm_offline *x = ctx;
    lot *l = lot_of(x, r);
    *micros = 0;
    if (r->val && !x->o.val)
        return LM_OK;
    if (!r->val && draw_step(x, r->step, e))
        return e->code;
    lm_align_sums_begin(&l->sums);
    *micros = (l->places.windows + x->site.batch - 1) / x->site.batch;
    if (r->val && x->o.check && *micros > x->o.check) {
        *micros = x->o.check;
        count_lot(x, l, *micros * x->site.batch);
    }
    return LM_OK;
}

static lm_code offline_fill(void *ctx, const lm_round *r, int64_t micro, lm_batch *b, lm_err *e)
{
    lm_offline *x = ctx;
    lot *l = lot_of(x, r);
    return lm_texts_fill(&l->places, l->text, micro * b->batch, x->o.vocab, b, e);
}

/* Sequence k of a micro-batch: text i of the lot, whose first number is `at` in the work's
 * memory. */
static void take_seq(lm_offline *x, const lot *l, int64_t k, int64_t i, int64_t at,
                     const float *nll, const float *collision)
{
    work *w = &x->work;
    const set *s = l->s;
    int64_t t = l->number[i], n = l->text[i].n - l->text[i].from;
    int64_t a = is_mixed(x) ? t / 2 : t;
    const lm_text_answer *answer = lm_text_answers_at(s->answers, a);
    w->text[k] = i;
    if (is_scored(&x->spec)) {
        w->seq[k] = (lm_align_seq){ .score = nll[0], .margin = answer->margin };
        return;
    }
    w->seq[k] = (lm_align_seq){ .n = n,
                                .logp = w->logp + at,
                                .dlogp = w->dlogp + at,
                                .ref = x->reads_ref ? w->ref + at : NULL,
                                .collision = collision ? w->collision + at : NULL,
                                .mask = x->whole ? w->mask + at : NULL,
                                .good = answer->good,
                                .margin = answer->margin,
                                .mismatched = is_mixed(x) && t % 2 };
    for (int64_t c = 0; c < n; c++) {
        w->logp[at + c] = -(double)nll[c];
        if (collision)
            w->collision[at + c] = (double)collision[c];
        if (x->reads_ref)
            w->ref[at + c] = s->ref.logp[s->ref.at[t] + c];
        if (x->whole)
            w->mask[at + c] = is_answer(s, x, t, c);
    }
}

static lm_code offline_grade(void *ctx, const lm_round *r, int64_t micro, const lm_batch *b,
                             const lm_row_results *rows, const lm_row_slopes *to, lm_err *e)
{
    lm_offline *x = ctx;
    lot *l = lot_of(x, r);
    const lm_texts *p = &l->places;
    int64_t from = micro * b->batch, end = from + b->batch, at = 0, k = 0;
    lm_align_metrics metrics = { .n = 0 };
    lm_align_batch todo = { .counts = &l->counts, .seq = x->work.seq, .metrics = &metrics };
    end = end < p->windows ? end : p->windows;
    for (int64_t j = p->first[from]; j < p->first[end]; j++, k++) {
        int64_t i = p->order[j];
        const int64_t row = lm_texts_row(p, l->text, i, from, b->batch);
        take_seq(x, l, k, i, at, rows->nll + row, rows->entropy ? rows->entropy + row : NULL);
        at += x->work.seq[k].n;
    }
    todo.n = k;
    if (lm_align_run(&x->spec, &todo, e) || lm_align_sums_add(&l->sums, todo.loss, &metrics, e))
        return e->code;
    for (int64_t q = 0; to && q < k; q++) {
        const lm_align_seq *s = &x->work.seq[q];
        int64_t row = lm_texts_row(p, l->text, x->work.text[q], from, b->batch);
        if (is_scored(&x->spec))
            to->nll[row] = (float)s->dscore;
        for (int64_t c = 0; c < s->n; c++)
            to->nll[row + c] = (float)-s->dlogp[c];
    }
    return LM_OK;
}

static lm_code offline_finish(void *ctx, const lm_round *r, double *loss, lm_err *e)
{
    lm_offline *x = ctx;
    lm_align_sums *s = &lot_of(x, r)->sums;
    lm_code rc = lm_align_sums_join(s, x->site.comm, e);
    *loss = s->loss;
    return rc;
}

static void offline_report(void *ctx, const lm_round *r, lm_metrics *m)
{
    const lm_align_metrics *x = &lot_of(ctx, r)->sums.metrics;
    for (int i = 0; i < x->n; i++)
        lm_metrics_f32(m, x->item[i].name, lm_align_value(&x->item[i]));
}

/* ---- checkpoints ---- */

static lm_code offline_save(void *ctx, int64_t step, lm_buf *out, lm_err *e)
{
    const lm_offline *x = ctx;
    lm_jw w;
    (void)step;
    if (!x->reads_ref || !*x->model)
        return LM_OK;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "reference", x->model);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

/* The kept reference must be that with which the checkpoint was trained. */
static lm_code offline_load(void *ctx, int64_t step, const json_t *o, lm_err *e)
{
    const lm_offline *x = ctx;
    const char *model = json_string_value(json_object_get(o, "reference"));
    (void)step;
    return model && x->reads_ref && strcmp(model, x->model) != 0 ? fail_model(x->o.kept, e) : LM_OK;
}

/* ---- life ---- */

static lm_code make_lots(lm_offline *x, lm_err *e)
{
    if (make_lot(&x->train, x->o.each * x->unit, &x->step, e))
        return e->code;
    if (!x->o.val)
        return LM_OK;
    if (make_lot(&x->val, x->val.n, &x->check, e))
        return e->code;
    for (int64_t i = 0; i < x->val.n; i++)
        x->check.number[i] = i;
    return place_lot(x, &x->check, e);
}

static lm_code offline_twin(void *ctx, const lm_objective **out, lm_err *e)
{
    const lm_offline *x = ctx;
    lm_offline *twin = NULL;
    lm_offline_opts o = x->o;
    o.sink = NULL; /* the first one reports */
    lm_code rc = lm_offline_new(&o, &twin, e);
    *out = rc ? NULL : &twin->objective;
    return rc;
}

static void offline_drop(void *ctx)
{
    lm_offline_free(ctx);
}

lm_code lm_offline_new(const lm_offline_opts *o, lm_offline **out, lm_err *e)
{
    lm_offline *x = NULL;
    *out = NULL;
    if (lm_alloc_n(&x, 1, sizeof *x, "answers", e))
        return e->code;
    x->o = *o;
    x->spec = *o->spec;
    x->unit = lm_offline_unit(o->spec);
    x->reads_ref = lm_align_reads_ref(o->spec);
    x->whole = lm_align_whole(o->spec);
    x->objective = (lm_objective){ .ctx = x,
                                   .ready = offline_ready,
                                   .begin = offline_begin,
                                   .fill = offline_fill,
                                   .grade = offline_grade,
                                   .finish = offline_finish,
                                   .report = offline_report,
                                   .save = offline_save,
                                   .load = offline_load,
                                   .twin = offline_twin,
                                   .drop = offline_drop };
    if (make_set(x, o->train, "train", &x->train, e) ||
        (o->val && make_set(x, o->val, "val", &x->val, e)) || make_lots(x, e)) {
        lm_offline_free(x);
        return e->code;
    }
    *out = x;
    return LM_OK;
}

void lm_offline_free(lm_offline *x)
{
    if (!x)
        return;
    free_set(&x->train);
    free_set(&x->val);
    free_lot(&x->step);
    free_lot(&x->check);
    lm_free(x->work.seq);
    lm_free(x->work.text);
    lm_free(x->work.logp);
    lm_free(x->work.ref);
    lm_free(x->work.dlogp);
    lm_free(x->work.collision);
    lm_free(x->work.mask);
    lm_free(x);
}

const lm_objective *lm_offline_objective(const lm_offline *x)
{
    return &x->objective;
}

int64_t lm_offline_records(const lm_offline *x)
{
    return x->train.n / x->unit;
}

double lm_offline_micros(const lm_offline *x, int64_t batch)
{
    double rows = 0;
    for (int64_t i = 0; i < x->train.n; i++)
        rows += (double)(x->train.text[i].n - 1);
    rows *= (double)(x->o.each * x->unit) / (double)x->train.n;
    return rows / (double)(x->o.seq * batch);
}
