/* SPDX-License-Identifier: Apache-2.0 */
/* model_panels.c -- selects the weights of a model that are kept in the panels of its products. */
#include "kernels/panels.h"
#include "model/build.h"
#include "op/ops.h"

/* True if all readers of the parameter read panels, and one of them is a product. */
static bool are_read(const lm_model *m, lm_vid v)
{
    lm_backend *b = m->build.backend;
    bool read = false;
    for (size_t k = 0; k < m->graph->n_nodes; k++) {
        const lm_node *n = &m->graph->node[k];
        for (int i = 0; i < n->n_in; i++) {
            if (n->in[i] != v)
                continue;
            if (!b->panels(b, n->op->name, i, lm_node_act(m->graph, n)))
                return false;
            read |= n->op != &lm_op_embed;
        }
    }
    return read;
}

/* True if each tensor of parameter p is in panels by itself. */
static bool are_whole(const lm_model *m, int p)
{
    const lm_tensor *t = &m->graph->value[m->param[p].value].t;
    bool whole = !m->param[p].plain && t->ndim == 2 && t->dim[1] % LM_PANEL == 0;
    for (int i = 0; whole && i < m->n_slices; i++)
        whole = m->slice[i].param != p ||
                (m->slice[i].row % LM_PANEL == 0 && m->slice[i].rows % LM_PANEL == 0);
    return whole;
}

void lm_model_keep_panels(lm_model *m)
{
    const lm_backend *b = m->build.backend;
    for (int p = 0; b && b->panels && p < m->n_params; p++) {
        lm_tensor *t = &m->graph->value[m->param[p].value].t;
        t->panels = t->dtype == LM_DTYPE_BF16 && !t->codes && are_whole(m, p) &&
                    are_read(m, m->param[p].value);
    }
}
