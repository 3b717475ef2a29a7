/* SPDX-License-Identifier: Apache-2.0 */
/* road.c -- rotation of the outputs in pairs: y' = f o y + g o turn(y), where turn maps the halves
 * (u, v) of each group of outputs to (-v, u).
 *
 * f = alpha cos theta, g = alpha sin theta, of vectors theta and alpha: road_1 has one entry for
 * each pair, road_2 one for each output, road_4 two for each output, the first for f and the
 * second for g. Sources: arXiv:2409.00119; huggingface/peft tuners/road. */
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "variant", 0, 0, 2, "entries of the vectors", "road_1 road_2 road_4" },
    { "group_size", 64, 2, 1e9, "outputs whose halves are paired", LM_WHOLE },
    { 0 },
};
enum { VARIANT, GROUP };
enum { ROAD_1, ROAD_2, ROAD_4 };
enum { THETA, ALPHA };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t group = (int64_t)m->hyper[GROUP], kind = (int64_t)m->hyper[VARIANT];
    int64_t size = kind == ROAD_1 ? m->out / 2 : kind == ROAD_2 ? m->out : 2 * m->out;

    *n = 0;
    if (m->out % group || group % 2)
        return lm_fail(e, LM_EUSAGE, m->name, "use a group_size that is even and divides them",
                       "its %lld outputs do not divide into groups of %lld", (long long)m->out,
                       (long long)group);
    lm_tune_tensor_add(out, n, "road_theta", size, 0, LM_TUNE_ZEROS, 0);
    lm_tune_tensor_add(out, n, "road_alpha", size, 0, LM_TUNE_ONES, 0);
    return LM_OK;
}

/* The entry of the vectors for output o; second: that of g. */
static int32_t entry(const lm_tune_module *m, int64_t o, bool second)
{
    int64_t group = (int64_t)m->hyper[GROUP], half = group / 2;

    if (m->hyper[VARIANT] == ROAD_1)
        return (int32_t)(o / group * half + o % half);
    if (m->hyper[VARIANT] == ROAD_2)
        return (int32_t)o;
    return (int32_t)(o / group * 2 * group + o % group + (second ? group : 0));
}

/* f or g as a row [1,out]. */
static lm_vid factor(lm_rule *r, const lm_tune_module *m, const lm_vid *p, bool second)
{
    int32_t *ids = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)m->out, sizeof *ids, r->e))
        return LM_NONE;
    for (int64_t o = 0; o < m->out; o++)
        ids[o] = entry(m, o, second);
    return LM_R_MAP(r, second ? "y = a * sin(t)" : "y = a * cos(t)",
                    LM_IS("a", lm_r_gather(r, p[ALPHA], ids, LM_DIMS(1, m->out))),
                    LM_IS("t", lm_r_gather(r, p[THETA], ids, LM_DIMS(1, m->out))));
}

/* Rows y [N,out]. */
static lm_vid rotate(lm_rule *r, const lm_tune_module *m, lm_vid y, const lm_vid *p)
{
    int64_t half = (int64_t)m->hyper[GROUP] / 2;
    int32_t *ids = NULL;
    double *sign = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)m->out, sizeof *ids, r->e) ||
        lm_arena_alloc(r->arena, &sign, (size_t)m->out, sizeof *sign, r->e))
        return LM_NONE;
    for (int64_t o = 0; o < m->out; o++) {
        bool upper = o / half % 2;

        ids[o] = (int32_t)(upper ? o - half : o + half);
        sign[o] = upper ? 1 : -1;
    }
    return LM_R_MAP(r, "y = a * f + t * s * g", LM_IS("a", y),
                    LM_IS("t", lm_r_columns(r, y, ids, m->out)),
                    LM_IS("s", lm_r_const(r, LM_DIMS(1, m->out), sign)),
                    LM_IS("f", factor(r, m, p, false)), LM_IS("g", factor(r, m, p, true)));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return lm_r_turn(r, rotate(r, m, lm_r_turn(r, w), p));
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)w;
    return b < 0 ? b : rotate(r, m, b, p);
}

static lm_vid output(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid y, const lm_vid *p)
{
    (void)x;
    return rotate(r, m, y, p);
}

const lm_tune_method lm_tune_road = {
    .peft_type = "ROAD",
    .name = "road",
    .about = "rotation of the outputs in pairs",
    .prefix = "road_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
    .output = output,
};
