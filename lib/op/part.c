/* SPDX-License-Identifier: Apache-2.0 */
/* part.c -- see part.h. */
#include "op/part.h"

lm_code lm_part_append(lm_shard_call *s, lm_origin *o, lm_err *e)
{
    const lm_tensor *x = &s->graph->value[s->in[0]].t;
    const lm_portions *p = s->pieces;
    const int64_t piece = p->n ? p->run[0].size : s->length;
    int64_t inner = 1, outer = 1;
    int k = 0;
    lm_range first = { 0 }, second = { 0 };
    for (int d = 0; d < s->dim; d++)
        outer *= x->dim[d];
    for (int d = s->dim + 1; d < x->ndim; d++)
        inner *= x->dim[d];
    while (k < LM_ORIGIN_LEVELS && o->level[k].period)
        k++;
    if (k == LM_ORIGIN_LEVELS)
        return lm_fail(e, LM_EBUG, s->op->name, NULL, "parts along %d axes have no more levels", k);
    lm_portions_at(p, s->length, s->ranks, s->rank, 0, &first);
    if (p->ends)
        lm_portions_at(p, s->length, s->ranks, s->rank, 1, &second);
    o->count = lm_origin_count(o, outer * s->length * inner);
    o->level[k] = (lm_origin_level){ .period = piece * inner,
                                     .from0 = first.from * inner,
                                     .count0 = first.count * inner,
                                     .from1 = second.from * inner,
                                     .count1 = second.count * inner };
    return lm_shard_append(s, e);
}
