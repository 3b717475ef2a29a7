/* SPDX-License-Identifier: Apache-2.0 */
/* kv_report.c -- rows of measures of caches: sizes, times, retrieval, errors of attention, and the comparison with the
 * plain cache, which all rows that run share. */
#include "compress/kv_report.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "compress/kv_capture.h"

typedef struct {
    const lm_kv_report *r;
    lm_kv_site *site; /* [layers] */
    int64_t layers;
    lm_kv_row *row;
    int n;
    int64_t prompt; /* of the comparison that runs */
} report;

/* A failure that only this row has; others end the report. */
static bool is_of_row(lm_kv_row *row, lm_code rc, lm_err *e)
{
    if (rc != LM_EUSAGE && rc != LM_ENUMERIC)
        return false;
    row->ran = false;
    row->why = *e;
    memset(e, 0, sizeof *e);
    return true;
}

/* ---- plans ---- */

static bool has_policy(const lm_kv_row *row)
{
    return row->plan.plan && row->plan.plan->policy;
}

/* The plan of a row with a calibration in memory. */
static lm_code plan_from_data(const report *t, lm_kv_row *row, lm_err *e)
{
    const lm_kv_data *data[LM_KV_FILES];
    lm_kv_spec *s;

    for (int i = 0; i < LM_KV_FILES; i++)
        data[i] = row->data;
    if (lm_kv_spec_parse(row->spec, &s, e))
        return e->code;
    lm_code rc = lm_cache_sites(&t->r->w->config, t->r->dtype, &row->plan.site, e);
    if (!rc)
        rc = lm_kv_spec_bind(s, row->plan.site, t->layers, data, &row->plan.plan, e);
    lm_kv_spec_free(s);
    return rc;
}

static lm_code bind_row(const report *t, lm_kv_row *row, lm_err *e)
{
    row->first = row->rate[0] = row->rate[1] = row->memory = -1;
    row->plain_bytes = row->token_bytes = 0;
    for (int64_t l = 0; l < t->layers; l++)
        row->plain_bytes +=
            (double)lm_dtype_size(t->r->dtype) * (double)lm_kv_site_numbers(&t->site[l]);
    row->token_bytes = row->coded_bytes = row->plain_bytes;
    row->ran = true;
    if (!row->spec)
        return LM_OK;
    lm_code rc = row->data ? plan_from_data(t, row, e)
                           : lm_cache_plan_open(row->spec, &t->r->w->config, t->r->dtype,
                                                t->r->w->src, &row->plan, e);
    if (rc)
        return is_of_row(row, rc, e) ? LM_OK : rc;
    row->coded_bytes = lm_kv_plan_bytes(row->plan.plan, row->plan.site);
    return LM_OK;
}

static lm_code open_generator(const report *t, const lm_kv_row *row, int64_t batch, int64_t context,
                              lm_generator **out, lm_err *e)
{
    const lm_generator_opts o = {
        .dtype = t->r->dtype,
        .batch = batch,
        .context = context,
        .kv = row->plan.plan,
        .state_codes = row == t->row ? NULL : t->r->state_codes,
    };

    return lm_generator_new(t->r->w, &o, t->r->b, out, e);
}

/* ---- bytes ---- */

/* Tokens that each layer holds of a prompt of a whole window: all, or those that a policy leaves. */
static lm_code count_rows(const report *t, const lm_kv_row *row, int64_t *rows, lm_err *e)
{
    lm_generator *g;

    for (int64_t l = 0; l < t->layers; l++)
        rows[l] = t->r->length;
    if (!has_policy(row))
        return LM_OK;
    if (open_generator(t, row, 1, t->r->length, &g, e))
        return e->code;
    lm_code rc = lm_generator_prompt(g, 0, t->r->ids, t->r->length, NULL, e);
    for (int64_t l = 0; l < t->layers && !rc; l++)
        rows[l] = lm_generator_held(g, 0, l);
    lm_generator_free(g);
    return rc;
}

/* Bytes of a token: the mean over the lengths of the last page, because the newest tokens are plain until a block is full.
 * Policies leave what they leave of a whole window. */
static double mean_bytes(const report *t, const lm_kv_row *row, int64_t *rows)
{
    int64_t length = t->r->length, page = row->plan.plan->page;
    int64_t lengths = has_policy(row) ? 1 : page < length / 2 ? page : (length + 1) / 2;
    double sum = 0;

    for (int64_t i = 0; i < lengths; i++) {
        sum += lm_kv_plan_text_bytes(row->plan.plan, row->plan.site, rows) / (double)(length - i);
        for (int64_t l = 0; l < t->layers; l++)
            rows[l]--;
    }
    return sum / (double)lengths;
}

static lm_code size_row(const report *t, lm_kv_row *row, lm_err *e)
{
    int64_t *rows;

    if (!row->plan.plan)
        return LM_OK;
    if (lm_alloc_n(&rows, (size_t)t->layers, sizeof *rows, "layers", e))
        return e->code;
    lm_code rc = count_rows(t, row, rows, e);
    if (!rc)
        row->token_bytes = mean_bytes(t, row, rows);
    lm_free(rows);
    return rc;
}

/* ---- times ---- */

static const lm_sample_attr greedy = { 0, 0, 1, 0, 1 };

/* Seconds from a prompt in slot 0 to its first token. */
static lm_code time_prompt(const report *t, lm_generator *g, double *seconds, lm_err *e)
{
    const int32_t *ids;
    const double u[1] = { 0 };
    double start = lm_now();

    if (lm_generator_prompt(g, 0, t->r->ids, t->r->speed_prompt, NULL, e) ||
        lm_generator_choose(g, &greedy, u, &ids, NULL, e))
        return e->code;
    *seconds = lm_now() - start;
    return LM_OK;
}

/* Tokens/s of steps in which all slots decode; the first two steps are not counted. */
static lm_code time_steps(const report *t, lm_generator *g, double *rate, lm_err *e)
{
    int64_t batch = lm_generator_batch(g);
    double start = 0, *u;
    int32_t *next;
    const int32_t *ids;
    lm_code rc = lm_alloc_n(&u, (size_t)batch, sizeof *u, "slots", e);

    if (rc)
        return rc;
    rc = lm_alloc_n(&next, (size_t)batch, sizeof *next, "slots", e);
    for (int64_t s = 0; s < batch && !rc; s++)
        next[s] = (int32_t)t->r->ids[t->r->speed_prompt];
    for (int64_t s = 1; s < batch && !rc; s++)
        rc = lm_generator_copy(g, 0, s, e);
    for (int64_t i = 0; i < t->r->speed_steps + 2 && !rc && !lm_stopping(); i++) {
        if (i == 2)
            start = lm_now();
        rc = lm_generator_next(g, next, &greedy, u, &ids, NULL, e);
    }
    if (!rc)
        *rate = (double)(batch * t->r->speed_steps) / (lm_now() - start);
    lm_free(u);
    lm_free(next);
    return rc;
}

static lm_code time_row(const report *t, lm_kv_row *row, lm_err *e)
{
    const lm_kv_report *r = t->r;
    int64_t context = r->speed_prompt + r->speed_steps + 2;

    for (int i = 0; i < 2 && r->speed_steps && !lm_stopping(); i++) {
        lm_generator *g;
        double seconds;
        if (open_generator(t, row, r->batch[i], context, &g, e))
            return e->code;
        lm_code rc = time_prompt(t, g, &seconds, e); /* the first one also faults pages in */
        if (!rc && i == 0)
            rc = time_prompt(t, g, &row->first, e);
        if (!rc)
            rc = time_steps(t, g, &row->rate[i], e);
        row->memory = (double)lm_generator_cache_bytes(g);
        lm_generator_free(g);
        if (rc)
            return rc;
    }
    return LM_OK;
}

/* ---- retrieval ---- */

/* Move the question, without its last token, into the prompt of all tasks. */
static lm_code ask_in_prompts(const lm_kv_passkeys *p, lm_kv_task **out, lm_err *e)
{
    if (lm_alloc_n(out, (size_t)p->n, sizeof **out, "passkeys", e))
        return e->code;
    for (int64_t i = 0; i < p->n; i++) {
        lm_kv_task task = p->task[i];
        task.context += task.question - 1;
        task.question = 1;
        (*out)[i] = task;
    }
    return LM_OK;
}

static lm_code ask_row(const report *t, lm_kv_row *row, lm_err *e)
{
    const lm_kv_passkeys *p = t->r->passkeys;
    size_t cells = (size_t)t->r->cells;
    lm_kv_task *own = NULL;
    lm_generator *g;

    if (lm_alloc_n(&row->solved, cells, sizeof *row->solved, "a map", e) ||
        open_generator(t, row, 8, p->longest, &g, e))
        return e->code;
    lm_code rc = lm_kv_retrieve(g, p->task, p->n, row->solved, NULL, e);
    if (!rc && has_policy(row))
        rc = lm_alloc_n(&row->observed, cells, sizeof *row->observed, "a map", e);
    if (!rc && row->observed)
        rc = ask_in_prompts(p, &own, e);
    if (!rc && own)
        rc = lm_kv_retrieve(g, own, p->n, row->observed, NULL, e);
    lm_generator_free(g);
    lm_free(own);
    return rc;
}

/* ---- errors of attention, by the definition ---- */

/* The n tokens of one side as the cache returns them: keys that are stored before their rotation are rotated
 * afterwards. */
static lm_code store_side(const report *t, const lm_kv_capture *c, const lm_kv_row *row,
                          int64_t layer, int side, float *x, float *y, lm_err *e)
{
    const lm_layer *l = &t->r->w->config.layer[layer];
    const lm_kv_side *s = &row->plan.plan->side[2 * layer + side];
    const lm_kv_captured r = lm_kv_capture_layer(c, layer);
    int64_t n = t->r->error_tokens, width = l->kv_heads * l->head_dim;

    lm_kv_columns(s->pre_rope ? r.before : r.rotated, (l->heads + 2 * l->kv_heads) * l->head_dim,
                  l->heads * l->head_dim + side * width, width, n, x);
    if (lm_kv_store(s, row->plan.plan->page, l->kv_heads, l->head_dim, x, n, y, e))
        return e->code;
    if (s->pre_rope)
        lm_kv_capture_rotate(c, layer, n, y);
    return LM_OK;
}

static lm_code measure_layer(const report *t, const lm_kv_capture *c, lm_kv_row *row, int64_t layer,
                             lm_err *e)
{
    const lm_layer *l = &t->r->w->config.layer[layer];
    const lm_kv_attention a = lm_kv_attention_of(&t->r->w->config, layer);
    const lm_kv_captured r = lm_kv_capture_layer(c, layer);
    int64_t n = t->r->error_tokens, width = l->kv_heads * l->head_dim;
    int64_t queries = l->heads * l->head_dim, all = queries + 2 * width;
    float *q, *kv[2], *stored[2], *x;
    double error = 0, norm = 0;

    if (lm_alloc_n(&q, (size_t)(n * (queries + 5 * width)), sizeof *q, "a window", e))
        return e->code;
    lm_kv_columns(r.rotated, all, 0, queries, n, q);
    x = q + n * queries;
    for (int side = 0; side < 2 && !e->code; side++) {
        kv[side] = x + n * width * (1 + 2 * side);
        stored[side] = kv[side] + n * width;
        lm_kv_columns(r.rotated, all, queries + side * width, width, n, kv[side]);
        store_side(t, c, row, layer, side, x, stored[side], e);
    }
    if (!e->code)
        lm_kv_attention_error(&a, n, q, kv[0], kv[1], stored[0], stored[1], &error, &norm, e);
    row->error[layer] = norm > 0 ? sqrt(error / norm) : 0;
    lm_free(q);
    return e->code;
}

typedef struct {
    const report *t;
    const lm_kv_capture *c;
    lm_kv_row *row;
    lm_err *failed; /* [layers] */
} layer_job;

static void measure_layers(void *ctx, int64_t begin, int64_t end, int worker)
{
    const layer_job *k = ctx;

    (void)worker;
    for (int64_t l = begin; l < end; l++)
        measure_layer(k->t, k->c, k->row, l, &k->failed[l]);
}

static lm_code measure_row(const report *t, const lm_kv_capture *c, lm_kv_row *row, lm_err *e)
{
    layer_job k = { t, c, row, NULL };

    /* a policy chooses among all tokens while it runs: there is no definition without it */
    if (!row->plan.plan || has_policy(row))
        return LM_OK;
    if (lm_alloc_n(&row->error, (size_t)t->layers, sizeof *row->error, "layers", e) ||
        lm_alloc_n(&k.failed, (size_t)t->layers, sizeof *k.failed, "layers", e))
        return e->code;
    lm_par_for(t->r->par, t->layers, 1, measure_layers, &k);
    for (int64_t l = 0; l < t->layers && !e->code; l++)
        if (k.failed[l].code)
            *e = k.failed[l];
    lm_free(k.failed);
    return e->code;
}

static lm_code measure_errors(const report *t, lm_err *e)
{
    lm_kv_capture *c;
    lm_code rc = LM_OK;

    if (lm_kv_capture_new(t->r->host_w, t->r->error_tokens, false, t->r->host, &c, e))
        return e->code;
    rc = lm_kv_capture_run(c, t->r->ids, NULL, e);
    for (int64_t l = 0; l < t->layers && t->r->outliers && !rc; l++)
        rc = lm_kv_capture_outliers(c, l, &t->r->outliers[l], e);
    for (int i = 0; i < t->n && !rc && !lm_stopping(); i++) {
        if (t->row[i].ran)
            rc = measure_row(t, c, &t->row[i], e);
        if (rc && is_of_row(&t->row[i], rc, e))
            rc = LM_OK;
        lm_progress(t->r->sink, "attention", (double)(i + 1), (double)t->n, "caches", NULL);
    }
    lm_kv_capture_free(c);
    return rc;
}

/* ---- comparison ---- */

static void compared(void *ctx, int64_t tokens)
{
    const report *t = ctx;

    lm_progress(t->r->sink, "compare", (double)tokens,
                (double)(t->r->windows * (t->r->length - t->prompt)), "tokens", NULL);
}

/* All rows that run, those with a policy or those without, beside the reference.  A policy chooses among the tokens
 * of a prompt: half of a window. */
static lm_code compare_rows(report *t, bool policy, lm_err *e)
{
    lm_kv_text text = { .ids = t->r->ids,
                        .windows = t->r->windows,
                        .length = t->r->length,
                        .prompt = t->prompt,
                        .b = t->r->b,
                        .par = t->r->par,
                        .done = compared,
                        .ctx = t };
    lm_kv_candidate *c = NULL;
    lm_kv_sums *sum = NULL;
    int *at = NULL, n = 0;
    size_t room = (size_t)t->n;
    lm_code rc = lm_alloc_n(&c, room, sizeof *c, "caches", e);

    if (!rc)
        rc = lm_alloc_n(&sum, room, sizeof *sum, "caches", e);
    if (!rc)
        rc = lm_alloc_n(&at, room, sizeof *at, "caches", e);
    for (int i = 0; i < t->n && !rc; i++) {
        if (!t->row[i].ran || (i && has_policy(&t->row[i]) != policy))
            continue;
        c[n].name = t->row[i].name;
        rc = open_generator(t, &t->row[i], text.windows < 8 ? text.windows : 8, text.length,
                            &c[n].g, e);
        if (!rc)
            at[n++] = i;
        else if (i && is_of_row(&t->row[i], rc, e))
            rc = LM_OK;
    }
    if (!rc)
        rc = lm_kv_compare(c, n, &text, sum, e);
    for (int k = 0; k < n; k++) {
        if (k || !policy) { /* the reference is compared with itself from the first token on */
            t->row[at[k]].sum = sum[k];
            t->row[at[k]].reference = sum[0];
        }
        lm_generator_free(c[k].g);
    }
    lm_free(c);
    lm_free(sum);
    lm_free(at);
    return rc;
}

/* ---- all rows ---- */

/* Run one measurement of all rows that still run. */
static lm_code each(const report *t, const char *what,
                    lm_code (*measure)(const report *, lm_kv_row *, lm_err *), lm_err *e)
{
    for (int i = 0; i < t->n && !lm_stopping(); i++) {
        lm_code rc = t->row[i].ran ? measure(t, &t->row[i], e) : LM_OK;
        if (rc && (i == 0 || !is_of_row(&t->row[i], rc, e)))
            return rc;
        lm_progress(t->r->sink, what, (double)(i + 1), (double)t->n, "caches", NULL);
    }
    return LM_OK;
}

lm_code lm_kv_report_run(const lm_kv_report *r, lm_kv_row *row, int n, lm_err *e)
{
    report t = { .r = r, .layers = r->w->config.layers, .row = row, .n = n, .prompt = 1 };
    bool any = false;

    lm_code rc = lm_config_check_coded(&r->w->config, "kv cache", e);

    rc = rc ? rc : lm_cache_sites(&r->w->config, r->dtype, &t.site, e);
    for (int i = 0; i < n && !rc; i++)
        rc = bind_row(&t, &row[i], e);
    if (!rc && !lm_stopping())
        rc = each(&t, "sizes", size_row, e);
    if (!rc && r->host_w && !lm_stopping())
        rc = measure_errors(&t, e);
    if (!rc && r->speed_steps && !lm_stopping())
        rc = each(&t, "times", time_row, e);
    if (!rc && r->passkeys && !lm_stopping())
        rc = each(&t, "passkeys", ask_row, e);
    if (!rc && !lm_stopping())
        rc = compare_rows(&t, false, e);
    for (int i = 0; i < n; i++)
        any |= row[i].ran && has_policy(&row[i]);
    t.prompt = r->length / 2;
    if (!rc && any && !lm_stopping())
        rc = compare_rows(&t, true, e);
    lm_free(t.site);
    return rc;
}

void lm_kv_row_fini(lm_kv_row *row)
{
    lm_cache_plan_fini(&row->plan);
    lm_free(row->solved);
    lm_free(row->observed);
    lm_free(row->error);
    row->solved = row->observed = NULL;
    row->error = NULL;
}

double lm_kv_solved(const int64_t *map, int64_t cells, int64_t n)
{
    int64_t sum = 0;

    if (!map || n < 1)
        return -1;
    for (int64_t i = 0; i < cells; i++)
        sum += map[i];
    return (double)sum / (double)n;
}

double lm_kv_row_error(const lm_kv_row *row, int64_t layers)
{
    double sum = 0;

    if (!row->error)
        return -1;
    for (int64_t l = 0; l < layers; l++)
        sum += row->error[l] * row->error[l];
    return sqrt(sum / (double)layers);
}
