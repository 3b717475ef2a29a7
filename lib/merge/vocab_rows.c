/* SPDX-License-Identifier: Apache-2.0 */
/* vocab_rows.c -- maps a model's embedding to the merged vocabulary, row by row. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "merge/vocab_impl.h"
#include "numeric/format.h"

typedef struct {
    const lm_vocab *v;
    int m;
    const lm_vocab_table *t;
    int64_t cols;
    lm_dtype dtype;
    uint8_t *out;
} job;

static const void *row_of(const lm_vocab_table *t, int64_t row, int64_t cols)
{
    return (const uint8_t *)t->data + (size_t)(row * cols) * lm_dtype_size(t->dtype);
}

static void put_mean(const job *j, int64_t t, void *to)
{
    for (int64_t c = 0; c < j->cols; c++) {
        double sum = 0;
        int have = 0;
        for (int m = 0; m < j->v->n; m++)
            if (j->v->map[m][t] >= 0 && j->t[m].data) {
                sum += lm_get(j->t[m].dtype, row_of(&j->t[m], j->v->map[m][t], j->cols), c);
                have++;
            }
        lm_set(j->dtype, to, c, have ? sum / have : 0);
    }
}

static void put_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_vocab *v = j->v;
    size_t bytes = lm_plain_bytes(j->dtype, j->cols);
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        int from = j->m;
        int64_t row = v->map[j->m][t];
        uint8_t *to = j->out + (size_t)t * bytes;
        if (v->from[t] == LM_ROW_BLANK)
            continue;
        if (row < 0 || v->force[t]) {
            from = v->from[t];
            row = v->from_row[t];
        }
        if (from >= 0 && j->t[from].data)
            lm_convert(j->t[from].dtype, row_of(&j->t[from], row, j->cols), j->dtype, to, j->cols);
        else if (from == LM_ROW_ZERO)
            memset(to, 0, bytes);
        else
            put_mean(j, t, to);
    }
}

enum { COLUMNS = 64 };

/* Columns [begin, end), at most COLUMNS, of the rows without a token: the mean of the rows with one.
 */
static void put_blanks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    size_t bytes = lm_plain_bytes(j->dtype, j->cols);
    double sum[COLUMNS] = { 0 };
    int64_t have = 0;
    (void)worker;
    for (int64_t t = 0; t < j->v->rows; t++) {
        if (j->v->from[t] == LM_ROW_BLANK)
            continue;
        for (int64_t c = begin; c < end; c++)
            sum[c - begin] += lm_get(j->dtype, j->out + (size_t)t * bytes, c);
        have++;
    }
    for (int64_t t = 0; t < j->v->rows; t++)
        for (int64_t c = begin; c < end && j->v->from[t] == LM_ROW_BLANK; c++)
            lm_set(j->dtype, j->out + (size_t)t * bytes, c,
                   have ? sum[c - begin] / (double)have : 0);
}

lm_code lm_vocab_operand(const lm_vocab *v, int m, const lm_vocab_table *t, int64_t cols,
                         const char *tensor, lm_dtype dtype, void *out, lm_par *par, lm_err *e)
{
    job j = { v, m, t, cols, dtype, out };
    bool blank = false;
    for (int i = 0; i < v->n; i++)
        if (t[i].data && t[i].rows != v->model[i].rows)
            return lm_fail(e, LM_EFORMAT, v->model[i].name, NULL,
                           "tensor \"%s\" has %" PRId64 " row%s, its embedding %" PRId64, tensor,
                           t[i].rows, lm_plural(t[i].rows), v->model[i].rows);
    lm_par_for(par, v->rows, 64, put_rows, &j);
    for (int64_t r = 0; r < v->rows && !blank; r++)
        blank = v->from[r] == LM_ROW_BLANK;
    if (blank)
        lm_par_for(par, cols, COLUMNS, put_blanks, &j);
    return LM_OK;
}
