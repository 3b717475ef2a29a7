/* SPDX-License-Identifier: Apache-2.0 */
/* fused.c -- see fused.h. */
#include "model/fused.h"

#include <stdlib.h>
#include <string.h>

#include "format/safetensors_table.h"

/* The layer and the rest of "model.layers.3.mlp.gate.weight"; NULL: another name. */
static const char *rest_of(const lm_config *c, const char *name, int64_t *layer)
{
    size_t n = strlen(c->arch->layers);
    char *end;

    if (strncmp(name, c->arch->layers, n) != 0 || name[n] < '0' || name[n] > '9')
        return NULL;
    *layer = strtoll(name + n, &end, 10);
    return *end == '.' && *layer < c->layers ? end + 1 : NULL;
}

bool lm_fused_find(const lm_config *c, const char *name, lm_fused *out)
{
    int64_t layer, one[2];
    const char *rest = c->arch->fused ? rest_of(c, name, &layer) : NULL;
    const lm_tensor_name *row = c->arch->fused;

    while (rest && row->part && strcmp(row->hf, rest) != 0)
        row++;
    if (!rest || !row->part || !lm_part_shape(c, row->part, layer, one))
        return false;
    *out = (lm_fused){ .part = { row->part, LM_PART_EXPERT_UP },
                       .parts = row->part == LM_PART_EXPERT_GATE ? 2 : 1,
                       .layer = layer,
                       .experts = lm_part_count(c, row->part, layer) };
    if (lm_part_is_expert(row->part))
        out->dim[out->ndim++] = out->experts;
    out->dim[out->ndim++] = one[0] * out->parts;
    out->dim[out->ndim++] = one[1];
    return true;
}

lm_code lm_fused_check(const lm_fused *f, const lm_st_tensor *t, const char *file, lm_err *e)
{
    char have[LM_ST_SHAPE], want[LM_ST_SHAPE];
    bool same = t->ndim == f->ndim;

    for (int d = 0; same && d < f->ndim; d++)
        same = t->dim[d] == f->dim[d];
    if (!same)
        return lm_fail(e, LM_EUSAGE, file, "config.json and weights belong to different models",
                       "tensor \"%s\" has shape [%s], config.json requires [%s]", t->name,
                       lm_st_show_shape(t->ndim, t->dim, have),
                       lm_st_show_shape(f->ndim, f->dim, want));
    if (t->dtype == LM_DTYPE_NONE || !lm_dtype_is_float(t->dtype))
        return lm_fail(e, LM_EUSAGE, file, NULL, "tensor \"%s\" has dtype %s, not a float type",
                       t->name, t->dtype_name);
    return LM_OK;
}

lm_part lm_fused_name(const lm_config *c, const lm_fused *f, int64_t k, char out[LM_TENSOR_NAME])
{
    const lm_part part = f->part[k % f->parts];

    lm_expert_hf_name(c->arch, part, f->layer, k / f->parts, false, out);
    return part;
}
