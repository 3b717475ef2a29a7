/* SPDX-License-Identifier: Apache-2.0 */
/* fuse_case.h -- shared by tests of joined operators: a backend that joins them, and graphs as
 * text.
 *
 * The backend is the CPU's reference, which has kernels of all joined operators but does not ask
 * for the join; here its answer is replaced. */
#ifndef LM_TESTS_FUSE_CASE_H
#define LM_TESTS_FUSE_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/linear.h"
#include "model_run.h"
#include "op/ops.h"

typedef bool (*joins)(lm_backend *, const char *, lm_dtype, const lm_call *);

static inline bool all(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    const lm_kernel *k = b->kernel(b, op, act);
    return k && (!k->work || k->work(c, b->threads) != SIZE_MAX);
}

static inline bool none(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return false;
}

static inline char *dump(const lm_graph *g)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };
    must(lm_graph_dump(g, &b, &e), &e);
    must(lm_buf_addf(&b, &e, "%c", 0), &e);
    return (char *)b.data;
}

static inline char *operators(const lm_graph *g)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };
    for (size_t k = 0; k < g->n_nodes; k++)
        must(lm_buf_addf(&b, &e, k ? " %s" : "%s", g->node[k].op->name), &e);
    must(lm_buf_addf(&b, &e, "%c", 0), &e);
    return (char *)b.data;
}

/* Each node that the pass has made must satisfy the rules for appended nodes. */
static inline void check_rules(const lm_graph *g)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT], have[LM_MAX_OUT];
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        lm_err e = { 0 };
        unsigned want = 0;
        lm_call c = lm_node_call(g, n, in, out);
        memcpy(have, out, sizeof have);
        assert_true(n->op != &lm_op_norm_dx_dw || n->phase == LM_PHASE_BACKWARD_INPUT);
        assert_true(!k || n->phase != LM_PHASE_FORWARD || n[-1].phase == LM_PHASE_FORWARD);
        for (int i = 0; i < n->n_in; i++)
            assert_true(n->in[i] >= 0 || (n->op->in[i].is & LM_OPTIONAL));
        for (int i = 0; i < n->n_out; i++)
            want |= (unsigned)(n->out[i] >= 0) << i;
        must(lm_op_shape(n->op, &c, want, &e), &e);
        for (int i = 0; i < n->n_out; i++) {
            bool sums = i == 0 && have[i].dtype == LM_DTYPE_F32 &&
                        (n->op == &lm_op_linear || n->op == &lm_op_norm_linear);
            if (n->out[i] < 0)
                continue;
            assert_true(lm_same_shape(&have[i], &out[i]));
            assert_true(sums || have[i].dtype == out[i].dtype);
        }
    }
}

#endif
