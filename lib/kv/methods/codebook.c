/* SPDX-License-Identifier: Apache-2.0 */
/* codebook.c -- TurboQuant (arXiv:2504.19874) as vLLM has it: after a rotation the numbers of a head are almost
 * normally distributed, so that one table of levels suits all of them.
 *
 *   keys    the norm of the head in F16, and for each number the nearest level of the best table for a normal
 *           distribution of that variance (Lloyd-Max); correct=on stores the norm divided by that of the
 *           levels, so that the decoded head has the norm of the head
 *           kbits=8: FP8 (E4M3, scale 1) without a rotation
 *   values  whole numbers from the least to the most of the head, F16 scale and least
 * The sketch of signs of the paper is left out, as in vLLM.  There values are not rotated: rotate=keys. */
#include "kv/methods/methods.h"

enum { KBITS, VBITS, CORRECT, ROTATE };
enum { ROTATE_OFF, ROTATE_ON, ROTATE_KEYS };

static const lm_hyper hyper[] = {
    { "kbits", 4, 1, 8, "bits of keys: 1 to 5, or 8 for FP8", LM_WHOLE },
    { "vbits", 4, 1, 8, "bits of values, not 7", LM_WHOLE },
    { "correct", 1, 0, 1, "decoded keys have the norm of the keys", "off on" },
    { "rotate", ROTATE_ON, 0, 2, "Hadamard rotation of the head", "off on keys" },
    LM_KV_ALONE(-1),
    { 0 },
};

static lm_code keys(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    int bits = (int)q->h[KBITS];
    lm_kv_format f = { .bits = bits, .axis = LM_KV_TOKEN, .scale = LM_DTYPE_F16 };
    if (bits > 5 && bits != 8)
        return lm_fail(e, LM_EUSAGE, q->name, "choose 1 to 5, or 8", "there is no table of %d bits",
                       bits);
    if (bits == 8) {
        f.levels = LM_KV_FLOAT8;
        f.float8 = LM_DTYPE_F8E4M3;
        f.scale = LM_DTYPE_NONE;
        f.constant = 1;
    } else {
        f.levels = LM_KV_TABLE;
        f.norm = true;
        f.renorm = q->h[CORRECT] != 0;
        f.n_table = 1 << bits;
        lm_kv_normal_table(bits, f.table);
    }
    out->rotate = bits != 8 && q->h[ROTATE] != ROTATE_OFF;
    return lm_kv_put_format(&f, q, out, e);
}

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    if (q->side == LM_KV_K)
        return keys(q, out, e);
    const lm_kv_format f = {
        .bits = (int)q->h[VBITS], .axis = LM_KV_TOKEN, .levels = LM_KV_ASYM, .scale = LM_DTYPE_F16
    };
    out->rotate = q->h[ROTATE] == ROTATE_ON;
    return lm_kv_put_format(&f, q, out, e);
}

const lm_kv_method lm_kv_turboquant = {
    .name = "turboquant",
    .about = "keys by a table for normal numbers and their norm, rotated",
    .hyper = hyper,
    .form = form,
};
