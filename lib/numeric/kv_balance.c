/* SPDX-License-Identifier: Apache-2.0 */
/* kv_balance.c -- codes with scales along both axes.
 *
 * A tile X has a row for each group axis (a channel of keys, a token of values) and a column for each number of a row.
 * Rounds divide columns and then rows by their standard deviations, in the logarithm, so that both come near 1; the round
 * with the least imbalance (largest over least deviation of columns plus that of rows) is kept, the start included.
 * A group of the balanced row is then coded over its range, and stored are row scale * step, row scale * least, column
 * scale.  After KVarN (arXiv:2606.03458); 8 rounds as vLLM has them (the paper: up to 16), logarithms within [-0.3, 10],
 * sample deviations within [1e-3, 1e3]. */
#include <math.h>

#include "base/mem.h"
#include "numeric/kv_impl.h"

enum { ROUNDS = 8 };

/* Numbers by row and column of the tile, and the scales of both with their logarithms. */
typedef struct {
    const float *x;
    int64_t rows, cols, row_step, col_step;
    double row[LM_KV_MAX_TOKENS], col[LM_KV_MAX_TOKENS];
    double log_row[LM_KV_MAX_TOKENS], log_col[LM_KV_MAX_TOKENS];
} matrix;

static double balanced_at(const matrix *m, int64_t r, int64_t c)
{
    return (double)m->x[r * m->row_step + c * m->col_step] / m->col[c] / m->row[r];
}

/* The sample standard deviation of a row (by_row) or column of the balanced matrix; 1 of a single number. */
static double deviation(const matrix *m, int64_t i, bool by_row)
{
    int64_t n = by_row ? m->cols : m->rows;
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < n; k++)
        sum += by_row ? balanced_at(m, i, k) : balanced_at(m, k, i);
    for (int64_t k = 0; k < n; k++) {
        double y = (by_row ? balanced_at(m, i, k) : balanced_at(m, k, i)) - sum / (double)n;
        squares += y * y;
    }
    return n > 1 ? sqrt(squares / (double)(n - 1)) : 1;
}

/* Divide rows or columns by their deviations. */
static void divide(matrix *m, bool by_row)
{
    double *log_scale = by_row ? m->log_row : m->log_col, *scale = by_row ? m->row : m->col;
    for (int64_t i = 0; i < (by_row ? m->rows : m->cols); i++)
        log_scale[i] += log(lm_kv_limited(deviation(m, i, by_row), 1e-3, 1e3));
    for (int64_t i = 0; i < (by_row ? m->rows : m->cols); i++) {
        log_scale[i] = lm_kv_limited(log_scale[i], -0.3, 10);
        scale[i] = exp(log_scale[i]);
    }
}

static double spread(const matrix *m, bool by_row)
{
    double least = INFINITY, most = 0;
    for (int64_t i = 0; i < (by_row ? m->rows : m->cols); i++) {
        double s = deviation(m, i, by_row);
        least = fmin(least, s);
        most = fmax(most, s);
    }
    return most / fmax(least, 1e-8);
}

/* Set the scales of rows and columns to those of the best round. */
static void balance(matrix *m)
{
    double row[LM_KV_MAX_TOKENS], col[LM_KV_MAX_TOKENS], best = (double)INFINITY;
    for (int64_t i = 0; i < LM_KV_MAX_TOKENS; i++)
        m->row[i] = m->col[i] = row[i] = col[i] = 1;
    for (int round = 0; round <= ROUNDS; round++) {
        double now = spread(m, false) + spread(m, true);
        if (now <= best) {
            best = now;
            memcpy(row, m->row, sizeof row);
            memcpy(col, m->col, sizeof col);
        }
        divide(m, false);
        divide(m, true);
    }
    memcpy(m->row, row, sizeof row);
    memcpy(m->col, col, sizeof col);
}

/* Code the columns [c, c + n) of row r, which share a scale; t, d: the token and channel of the first. */
static void code_part(const lm_kv_view *p, const matrix *m, int64_t r, int64_t c, int64_t n,
                      int64_t t, int64_t d)
{
    bool by_channel = p->f->axis == LM_KV_CHANNEL;
    double x[LM_KV_MAX_TOKENS], least = INFINITY, most = -INFINITY, top = (1 << p->f->bits) - 1;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        x[i] = balanced_at(m, r, c + i);
        finite = finite && isfinite(x[i]);
        least = fmin(least, x[i]);
        most = fmax(most, x[i]);
    }
    lm_kv_scale by = { finite ? fmax((most - least) / top, 1e-10) : (double)NAN,
                       finite ? least : 0 };
    for (int64_t i = 0; i < n; i++)
        lm_kv_put_code(p, t + (by_channel ? i : 0), d + (by_channel ? 0 : i),
                       lm_kv_code_of(p->f, by, x[i]));
    int64_t at = lm_kv_scale_at(p->f, p->T, p->D, t, d);
    lm_set(p->f->scale, p->data + p->at.scale, at, lm_kv_stored(p->f->scale, m->row[r] * by.s));
    lm_set(p->f->scale, p->data + p->at.min, at, lm_kv_stored(p->f->scale, m->row[r] * by.m));
}

void lm_kv_encode_balanced(const lm_kv_view *p, const float *x, int64_t pitch, int64_t at,
                           int64_t n)
{
    const lm_kv_format *f = p->f;
    bool by_channel = f->axis == LM_KV_CHANNEL;
    matrix m = { .x = x,
                 .rows = by_channel ? p->D : n,
                 .cols = by_channel ? n : p->D,
                 .row_step = by_channel ? 1 : pitch,
                 .col_step = by_channel ? pitch : 1 };
    balance(&m);
    int64_t part = !by_channel && f->group ? f->group : m.cols;
    for (int64_t r = 0; r < m.rows; r++)
        for (int64_t c = 0; c < m.cols; c += part)
            code_part(p, &m, r, c, c + part < m.cols ? part : m.cols - c, by_channel ? at : at + r,
                      by_channel ? r : c);
    for (int64_t c = 0; c < m.cols; c++)
        lm_set(f->scale, p->data + p->at.second,
               lm_kv_second_at(f, p->T, p->D, by_channel ? at + c : at, by_channel ? 0 : c),
               lm_kv_stored(f->scale, m.col[c]));
}
