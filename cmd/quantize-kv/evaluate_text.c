/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate_text.c -- a report as a table, as JSON and as a picture. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/chart.h"
#include "quantize-kv/evaluate.h"

static int64_t layers_of(const kv_report *k)
{
    return k->work.model.config.layers;
}

static double per_token(const lm_kv_sums *s, double sum)
{
    return s->tokens ? sum / (double)s->tokens : -1;
}

static double perplexity(const lm_kv_sums *s)
{
    return s->tokens ? exp(s->nll / (double)s->tokens) : -1;
}

/* ---- the table ---- */

enum { COLUMNS = 14, CELL = 16 };
static const char *const head[COLUMNS] = { "bits",     "bytes/token", "coded",       "memory",
                                           "tokens/s", "32 at once",  "first token", "perplexity",
                                           "plain's",  "KL",          "top-1",       "passkeys",
                                           "observed", "attention" };

/* A number with that many digits behind the point; "-" if it was not measured. */
static void show(double x, int digits, char out[CELL])
{
    if (x < 0)
        snprintf(out, CELL, "-");
    else
        snprintf(out, CELL, "%.*f", digits, x);
}

static void fill_cells(const kv_report *k, const lm_kv_row *r, char cell[COLUMNS][CELL])
{
    char bytes[32];
    double act = 8.0 * (double)lm_dtype_size(k->report.dtype);

    show(act * r->token_bytes / r->plain_bytes, 2, cell[0]);
    show(r->token_bytes, 0, cell[1]);
    show(r->coded_bytes, 0, cell[2]);
    snprintf(cell[3], CELL, "%s", r->memory < 0 ? "-" : lm_show_bytes(r->memory, bytes));
    show(r->rate[0], 0, cell[4]);
    show(r->rate[1], 0, cell[5]);
    if (r->first < 0)
        show(-1, 0, cell[6]);
    else
        snprintf(cell[6], CELL, "%.4g ms", 1e3 * r->first);
    show(perplexity(&r->sum), 4, cell[7]);
    show(perplexity(&r->reference), 4, cell[8]);
    snprintf(cell[9], CELL, r->sum.tokens ? "%.3g" : "-", per_token(&r->sum, r->sum.kl));
    show(per_token(&r->sum, (double)r->sum.top1), 4, cell[10]);
    show(lm_kv_solved(r->solved, k->report.cells, k->passkeys.n), 3, cell[11]);
    show(lm_kv_solved(r->observed, k->report.cells, k->passkeys.n), 3, cell[12]);
    show(r == k->row ? 0 : lm_kv_row_error(r, layers_of(k)), 4, cell[13]);
}

/* The widest name. */
static int name_width(const kv_report *k)
{
    int wide = 6;

    for (int i = 0; i < k->rows; i++) {
        int n = (int)strlen(k->row[i].name);
        wide = n > wide ? n : wide;
    }
    return wide;
}

static lm_code put_measures(const kv_report *k, lm_buf *out, lm_err *e)
{
    char cell[1 + KV_MOST_METHODS][COLUMNS][CELL];
    int wide[COLUMNS], name = name_width(k);

    for (int c = 0; c < COLUMNS; c++)
        wide[c] = (int)strlen(head[c]);
    for (int i = 0; i < k->rows; i++) {
        const lm_kv_row *r = &k->row[i];
        if (!r->ran)
            continue;
        fill_cells(k, r, cell[i]);
        for (int c = 0; c < COLUMNS; c++)
            wide[c] = (int)strlen(cell[i][c]) > wide[c] ? (int)strlen(cell[i][c]) : wide[c];
    }
    lm_buf_addf(out, e, "%-*s", name, "method");
    for (int c = 0; c < COLUMNS && !e->code; c++)
        lm_buf_addf(out, e, "  %*s", wide[c], head[c]);
    for (int i = 0; i < k->rows && !e->code; i++) {
        const lm_kv_row *r = &k->row[i];
        lm_buf_addf(out, e, "\n%-*s", name, r->name);
        for (int c = 0; c < COLUMNS && r->ran && !e->code; c++)
            lm_buf_addf(out, e, "  %*s", wide[c], cell[i][c]);
        if (!r->ran && !e->code)
            lm_buf_addf(out, e, "  %s: %s%s%s", r->why.where, r->why.what, *r->why.todo ? ": " : "",
                        r->why.todo);
    }
    return e->code ? e->code : lm_buf_add(out, "\n", 1, e);
}

/* Errors of attention in layers [from, to), a line for each method that has them. */
static lm_code put_layers(const kv_report *k, int64_t from, int64_t to, lm_buf *out, lm_err *e)
{
    int name = name_width(k);

    lm_buf_addf(out, e, "\n%-*s", name, "method");
    for (int64_t l = from; l < to && !e->code; l++)
        lm_buf_addf(out, e, "  %6" PRId64, l);
    for (int i = 0; i < k->rows && !e->code; i++) {
        const lm_kv_row *r = &k->row[i];
        if (!r->error)
            continue;
        lm_buf_addf(out, e, "\n%-*s", name, r->name);
        for (int64_t l = from; l < to && !e->code; l++)
            lm_buf_addf(out, e, "  %6.4f", r->error[l]);
    }
    return e->code ? e->code : lm_buf_add(out, "\n", 1, e);
}

lm_code kv_report_table(const kv_report *k, lm_buf *out, lm_err *e)
{
    enum { AT_ONCE = 12 }; /* layers beside each other */
    int64_t layers = layers_of(k);
    bool any = false;

    lm_code rc = put_measures(k, out, e);
    for (int i = 0; i < k->rows; i++)
        any |= k->row[i].error != NULL;
    if (!rc && any)
        rc = lm_buf_addf(out, e, "\nerror of attention by layer");
    for (int64_t l = 0; l < layers && any && !rc; l += AT_ONCE)
        rc = put_layers(k, l, l + AT_ONCE < layers ? l + AT_ONCE : layers, out, e);
    if (!rc && k->passkeys.n) {
        rc = lm_buf_add(out, "\n", 1, e);
        return rc ? rc : kv_report_picture(k, "table.txt", out, e);
    }
    return rc;
}

/* ---- JSON ---- */

static void put_number(lm_jw *j, const char *key, double x)
{
    lm_jw_f64(j, key, x < 0 ? (double)NAN : x);
}

static void put_map(const kv_report *k, const char *key, const int64_t *map, lm_jw *j)
{
    lm_jw_arr(j, key);
    for (int64_t d = 0; map && d < k->depths; d++) {
        lm_jw_arr(j, NULL);
        for (int64_t l = 0; l < k->lengths; l++)
            lm_jw_f64(j, NULL, (double)map[d * k->lengths + l] / (double)k->repeats);
        lm_jw_close_arr(j);
    }
    lm_jw_close_arr(j);
}

static void put_row(const kv_report *k, const lm_kv_row *r, lm_jw *j)
{
    lm_jw_obj(j, NULL);
    lm_jw_str(j, "method", r->name);
    lm_jw_str(j, "spec", r->plan.plan ? r->plan.plan->text : "auto");
    if (!r->ran) {
        lm_jw_str(j, "error", r->why.what);
        lm_jw_close_obj(j);
        return;
    }
    lm_jw_f64(j, "bytes_per_token", r->token_bytes);
    lm_jw_f64(j, "bytes_per_coded_token", r->coded_bytes);
    lm_jw_f64(j, "ratio", r->plain_bytes / r->token_bytes);
    put_number(j, "memory", r->memory);
    put_number(j, "tokens_per_second", r->rate[0]);
    put_number(j, "tokens_per_second_32", r->rate[1]);
    put_number(j, "first_token_seconds", r->first);
    lm_jw_int(j, "tokens", r->sum.tokens);
    put_number(j, "loss", per_token(&r->sum, r->sum.nll));
    put_number(j, "perplexity", perplexity(&r->sum));
    put_number(j, "perplexity_reference", perplexity(&r->reference));
    put_number(j, "kl", per_token(&r->sum, r->sum.kl));
    put_number(j, "kl_most", r->sum.tokens ? r->sum.kl_most : -1);
    put_number(j, "top1", per_token(&r->sum, (double)r->sum.top1));
    put_number(j, "passkeys", lm_kv_solved(r->solved, k->report.cells, k->passkeys.n));
    put_map(k, "passkey_map", r->solved, j);
    put_number(j, "passkeys_observed", lm_kv_solved(r->observed, k->report.cells, k->passkeys.n));
    put_map(k, "passkey_map_observed", r->observed, j);
    put_number(j, "attention_error", r == k->row ? 0 : lm_kv_row_error(r, layers_of(k)));
    lm_jw_arr(j, "attention_error_by_layer");
    for (int64_t l = 0; r->error && l < layers_of(k); l++)
        lm_jw_f64(j, NULL, r->error[l]);
    lm_jw_close_arr(j);
    lm_jw_close_obj(j);
}

lm_code kv_report_json(const kv_report *k, lm_buf *out, lm_err *e)
{
    lm_jw j;

    lm_jw_begin(&j, out, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "model", k->work.path);
    lm_jw_str(&j, "data", k->work.data);
    lm_jw_str(&j, "dtype", k->work.o->dtype);
    lm_jw_str(&j, "device", k->b->name);
    lm_jw_int(&j, "windows", k->report.windows);
    lm_jw_int(&j, "seq_len", k->report.length);
    lm_jw_int(&j, "prompt_tokens", k->report.speed_prompt);
    lm_jw_arr(&j, "passkey_lengths");
    for (int64_t i = 0; i < k->lengths; i++)
        lm_jw_int(&j, NULL, k->length[i]);
    lm_jw_close_arr(&j);
    lm_jw_int(&j, "passkey_depths", k->depths);
    lm_jw_int(&j, "passkeys_each", k->passkeys.n ? k->repeats : 0);
    lm_jw_arr(&j, "key_outliers");
    for (int64_t l = 0; l < layers_of(k); l++)
        lm_jw_f64(&j, NULL, k->outliers[l]);
    lm_jw_close_arr(&j);
    lm_jw_arr(&j, "methods");
    for (int i = 0; i < k->rows; i++)
        put_row(k, &k->row[i], &j);
    lm_jw_close_arr(&j);
    lm_jw_close_obj(&j);
    return lm_jw_end(&j) ? e->code : lm_buf_add(out, "\n", 1, e);
}

/* ---- the picture ---- */

typedef struct {
    lm_chart_map_panel panel[1 + KV_MOST_METHODS];
    double *value; /* of all panels */
    char x[KV_MOST_LENGTHS][24];
    char (*y)[24];
    const char *x_name[KV_MOST_LENGTHS];
    const char **y_name;
} drawing;

static lm_code fill_map(const kv_report *k, drawing *d, lm_chart_map *m, lm_err *e)
{
    size_t cells = (size_t)(k->lengths * k->depths);

    if (lm_alloc_n(&d->value, cells * (size_t)k->rows, sizeof *d->value, "a map", e) ||
        lm_alloc_n(&d->y, (size_t)k->depths, sizeof *d->y, "a map", e) ||
        lm_alloc_n((void *)&d->y_name, (size_t)k->depths, sizeof *d->y_name, "a map", e))
        return e->code;
    for (int64_t i = 0; i < k->lengths; i++) {
        snprintf(d->x[i], sizeof d->x[i], "%" PRId64, k->length[i]);
        d->x_name[i] = d->x[i];
    }
    for (int64_t i = 0; i < k->depths; i++) {
        double at = k->depths > 1 ? 100.0 * (double)i / (double)(k->depths - 1) : 50;
        snprintf(d->y[i], sizeof d->y[i], "%.0f %%", at);
        d->y_name[i] = d->y[i];
    }
    for (int i = 0; i < k->rows; i++) {
        double *v = d->value + (size_t)i * cells;
        if (!k->row[i].solved)
            continue;
        for (size_t c = 0; c < cells; c++)
            v[c] = (double)k->row[i].solved[c] / (double)k->repeats;
        d->panel[m->n++] = (lm_chart_map_panel){ k->row[i].name, v };
    }
    return LM_OK;
}

lm_code kv_report_picture(const kv_report *k, const char *path, lm_buf *out, lm_err *e)
{
    drawing d = { .value = NULL };
    lm_chart_map m = { .title = k->work.path,
                       .quantity = "share of passkeys that are found",
                       .x_label = "tokens",
                       .y_label = "depth",
                       .x = d.x_name,
                       .cols = (size_t)k->lengths,
                       .rows = (size_t)k->depths,
                       .lo = 0,
                       .hi = 1,
                       .panel = d.panel };

    if (!k->passkeys.n)
        return lm_fail(e, LM_EUSAGE, path, "leave -o out, or ask for passkeys",
                       "there are no passkeys to draw");
    lm_code rc = fill_map(k, &d, &m, e);
    m.y = d.y_name;
    if (!rc)
        rc = lm_text_ends(path, ".png")   ? lm_chart_map_png(&m, 960, 540, out, e)
             : lm_text_ends(path, ".txt") ? lm_chart_map_text(&m, 100, false, out, e)
                                          : lm_chart_map_svg(&m, 960, 540, out, e);
    lm_free(d.value);
    lm_free(d.y);
    lm_free((void *)d.y_name);
    return rc;
}
