/* SPDX-License-Identifier: Apache-2.0 */
/* share_case.h -- trainings of tiny models on ranks that share a list, beside those of one rank: losses, weights and states are
 * the same up to rounding, and the same bits each time. */
#ifndef LM_TESTS_SHARE_CASE_H
#define LM_TESTS_SHARE_CASE_H

#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "numeric/portions.h"
#include "train/trainer_impl.h"

static lm_backend *backend;
static lm_par *one_thread;

static void share_begin(void)
{
    lm_err e = { 0 };
    train_begin();
    ok(lm_par_new(&one_thread, 1, &e), &e);
    ok(lm_backend_cpu(lm_cpu_detect(), one_thread, &backend, &e), &e);
}

static int share_end(void)
{
    lm_backend_close(backend);
    lm_par_free(one_thread);
    return train_end();
}

static lm_trainer_opts share_options(const char *optim, bool rows)
{
    lm_err e = { 0 };
    lm_trainer_opts o = { .batch = 2,
                          .seq = T,
                          .accumulate = 4,
                          .leaves = 2,
                          .mesh = lm_mesh_alone,
                          .rows = rows,
                          .steps = 4,
                          .precision = { .low = LM_DTYPE_F32 },
                          .documents = true,
                          .dropout = true,
                          .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                          .clip_norm = 1,
                          .eval_every = 2,
                          .log_every = 1 };
    ok(lm_groups_parse(optim, NULL, 1e-2, &o.groups, &e), &e);
    return o;
}

static lm_code share_train(const lm_trainer_opts *o, tiny_model *m, lm_trainer **t,
                           lm_train_result *r, lm_err *e)
{
    const lm_trainer_io io = {
        .config = &m->config, .weights = m->source, .train = tokens, .val = tokens
    };
    return lm_trainer_train(o, &io, backend, NULL, NULL, t, r, e);
}

/* ---- weights ---- */

static double worst; /* of compared numbers, in parts of the largest of their tensor */

/* Elements [rows, cols] of `part`, which are those of *cut of `whole`, rows of `width`. */
static void compare(const lm_cut *cut, const float *part, int64_t rows, int64_t cols,
                    const float *whole)
{
    const int64_t width = cut->ranks && cut->dim == 1 ? cut->whole : cols;
    double most = 0, far = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            int64_t at[2] = { r, c }, left = cut->ranks ? at[cut->dim] : 0;
            lm_range run;
            for (int64_t k = 0; cut->ranks && lm_cut_at(cut, k, &run); left -= run.count, k++)
                if (left < run.count) {
                    at[cut->dim] = run.from + left;
                    break;
                }
            const double x = whole[at[0] * width + at[1]];
            most = fmax(most, fabs(x));
            far = fmax(far, fabs(part[r * cols + c] - x));
        }
    worst = fmax(worst, far / most);
}

static const float *at_slice(const lm_store *s, const lm_slice *t, int64_t *cols)
{
    const lm_param *p = &s->model->param[t->param];
    *cols = p->count / s->model->graph->value[p->value].t.dim[0];
    return (const float *)lm_store_flat(s, LM_KEPT_PARAM, 0) + p->offset + t->row * *cols;
}

/* Returns the number of tensors of which this rank has a part. */
static int compare_weights(const lm_store *part, const lm_store *whole)
{
    int cut = 0;
    assert_int_equal(part->model->n_slices, whole->model->n_slices);
    for (int i = 0; i < part->model->n_slices; i++) {
        const lm_slice *t = &part->model->slice[i];
        int64_t cols, all_cols;
        const float *x = at_slice(part, t, &cols),
                    *y = at_slice(whole, &whole->model->slice[i], &all_cols);
        compare(&t->cut, x, t->rows, cols, y);
        cut += t->cut.ranks > 0;
    }
    return cut;
}

static void compare_states(const lm_store *part, const lm_store *whole)
{
    const lm_store_block *a, *b;
    for (int k = 0; (a = lm_store_find(part, LM_KEPT_OPT, k)); k++) {
        b = lm_store_find(whole, LM_KEPT_OPT, k);
        assert_int_equal(a->state->n_parts, b->state->n_parts);
        for (int i = 0; i < a->state->n_parts; i++) {
            const struct lm_state_part *p = &a->state->part[i], *q = &b->state->part[i];
            assert_int_equal(p->tensor, q->tensor);
            const int64_t rows = p->shape.dim[0], cols = p->shape.ndim > 1 ? p->shape.dim[1] : 1;
            const lm_cut all = { .ranks = 1, .whole = rows },
                         *cut = p->owned ? &all : &part->model->slice[p->tensor].cut;
            if (!p->none && a->state->format == LM_DTYPE_F32)
                compare(cut, (const float *)a->data + p->at, rows, cols,
                        (const float *)b->data + q->at);
        }
    }
}

/* ---- trainings ---- */

/* tolerance: of weights and states.  Returns the number of tensors that are split. */
static int share_check(tiny_model *m, const char *name, const lm_trainer_opts *alone,
                       const lm_trainer_opts *shared, double tolerance)
{
    lm_err e = { 0 };
    lm_trainer *one = NULL, *many = NULL, *again = NULL;
    lm_train_result r, q, s;
    char mesh[80] = "";
    for (int i = 0; i < LM_AXES; i++)
        if (shared->mesh.size[i] > 1)
            snprintf(mesh + strlen(mesh), 16, " %s=%d", lm_axis_names[i], shared->mesh.size[i]);
    if (share_train(alone, m, &one, &r, &e) || share_train(shared, m, &many, &q, &e) ||
        share_train(shared, m, &again, &s, &e))
        fail_msg("%s,%s: %s: %s: %s", name, mesh, e.where, e.what, e.todo);
    if (!(fabs(r.loss - q.loss) <= 1e-6 * r.loss && fabs(r.val_loss - q.val_loss) <= 1e-6 * r.loss))
        fail_msg("%s,%s: losses %.9g and %.9g, validation %.9g and %.9g", name, mesh, r.loss,
                 q.loss, r.val_loss, q.val_loss);
    assert_true(q.loss == s.loss && q.val_loss == s.val_loss);
    assert_int_equal(r.tokens, q.tokens);
    worst = 0;
    const int cut = compare_weights(many->s.store, one->s.store);
    compare_states(many->s.store, one->s.store);
    if (!(worst <= tolerance))
        fail_msg("%s,%s: weights or states differ by %.3g", name, mesh, worst);
    lm_trainer_free(one);
    lm_trainer_free(many);
    lm_trainer_free(again);
    return cut;
}

#endif
