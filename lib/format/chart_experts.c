/* SPDX-License-Identifier: Apache-2.0 */
/* chart_experts.c -- loads of experts as a map. */
#include "format/chart_experts.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_COLUMNS = 64 };

/* The i-th layer; NULL past the last. */
static const lm_list_series *layer_at(const lm_metrics_file *f, size_t i)
{
    const lm_list_series *r, *first = NULL;
    for (size_t k = 0; (r = lm_metrics_file_rows(f, k)); k++) {
        if (strncmp(r->event, "experts.", 8) != 0 || strcmp(r->key, "load") != 0)
            continue;
        first = first ? first : r;
        if (r->width == first->width && r->n && i-- == 0)
            return r;
    }
    return NULL;
}

/* The first record of column `col`; of `cols`: their number. */
static size_t begins(const lm_list_series *r, size_t col, size_t cols)
{
    return r->n * col / cols;
}

/* The load of an expert divided by the mean load, averaged over the records of a column; NAN: the
 * column has no record. */
static double share_of(const lm_list_series *r, size_t expert, size_t from, size_t to)
{
    double sum = 0, n = 0;
    for (size_t k = from; k < to; k++) {
        double all = 0;
        for (size_t e = 0; e < r->width; e++)
            all += r->value[k * r->width + e];
        if (!(all > 0))
            continue;
        sum += r->value[k * r->width + expert] * (double)r->width / all;
        n++;
    }
    return n > 0 ? sum / n : NAN;
}

static lm_code add_name(lm_arena *a, const char **out, double number, lm_err *e)
{
    char text[32], *copy;
    snprintf(text, sizeof text, "%.0f", number);
    if (lm_arena_strdup(a, &copy, text, strlen(text), e))
        return e->code;
    *out = copy;
    return LM_OK;
}

static lm_code name_grid(const lm_list_series *r, lm_arena *a, lm_chart_map *m, lm_err *e)
{
    const char **x, **y;
    if (lm_arena_alloc(a, &x, m->cols, sizeof *x, e) ||
        lm_arena_alloc(a, &y, m->rows, sizeof *y, e))
        return e->code;
    for (size_t c = 0; c < m->cols; c++)
        if (add_name(a, &x[c], r->step[begins(r, c + 1, m->cols) - 1], e))
            return e->code;
    for (size_t k = 0; k < m->rows; k++)
        if (add_name(a, &y[k], (double)k, e))
            return e->code;
    m->x = x;
    m->y = y;
    return LM_OK;
}

static lm_code fill_panel(const lm_list_series *r, lm_arena *a, const lm_chart_map *m,
                          lm_chart_map_panel *p, lm_err *e)
{
    double *v;
    char text[48], *label;
    snprintf(text, sizeof text, "layer %s", r->event + strlen("experts."));
    if (lm_arena_alloc(a, &v, m->rows * m->cols, sizeof *v, e) ||
        lm_arena_strdup(a, &label, text, strlen(text), e))
        return e->code;
    for (size_t k = 0; k < m->rows; k++)
        for (size_t c = 0; c < m->cols; c++)
            v[k * m->cols + c] = share_of(r, k, begins(r, c, m->cols), begins(r, c + 1, m->cols));
    *p = (lm_chart_map_panel){ label, v };
    return LM_OK;
}

lm_code lm_experts_chart_make(const lm_metrics_file *f, const char *title, lm_arena *a,
                              lm_chart_map *out, lm_err *e)
{
    const lm_list_series *first = layer_at(f, 0), *r;
    lm_chart_map_panel *panel;
    size_t n = 0, fewest;
    if (!first)
        return lm_fail(e, LM_EFORMAT, lm_metrics_file_path(f),
                       "name the metrics of the training of a mixture of experts",
                       "has no records of experts");
    if (first->width > LM_CHART_MAP_MOST)
        return lm_fail(e, LM_EFORMAT, lm_metrics_file_path(f), NULL,
                       "%zu experts are too many for a map", first->width);
    fewest = first->n;
    for (; (r = layer_at(f, n)); n++)
        fewest = r->n < fewest ? r->n : fewest;
    *out = (lm_chart_map){ .title = title,
                           .quantity = "load over the mean load",
                           .x_label = "step",
                           .y_label = "expert",
                           .cols = fewest < MOST_COLUMNS ? fewest : MOST_COLUMNS,
                           .rows = first->width,
                           .lo = 0,
                           .hi = 2,
                           .n = n };
    if (name_grid(first, a, out, e) || lm_arena_alloc(a, &panel, n, sizeof *panel, e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        if (fill_panel(layer_at(f, i), a, out, &panel[i], e))
            return e->code;
    out->panel = panel;
    return LM_OK;
}
