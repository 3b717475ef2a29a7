/* SPDX-License-Identifier: Apache-2.0 */
/* method.h -- methods of storing the keys and values of attention.
 *
 * A method is one file, lib/kv/methods/NAME.c: a table of hyper-parameters, and a function that
 * returns the form of keys or values of one layer.  Everything else is common: the grammar of
 * specifications (spec.h), layers that are left alone, pages, kernels, files. */
#ifndef LM_KV_METHOD_H
#define LM_KV_METHOD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hyper.h"
#include "base/mem.h"
#include "kv/data.h"
#include "kv/policy.h"
#include "numeric/kv_format.h"

enum { LM_KV_K, LM_KV_V };  /* the sides of a cache: keys, values */
enum { LM_KV_HYPERS = 16 }; /* at most */

/* The attention of one layer. */
typedef struct {
    int64_t layer, layers, kv_heads,
        head_dim;   /* 0, 0: a state instead, of which nothing is coded here */
    int64_t window; /* tokens that a query sees at most; 0: all */
    int64_t max_positions;
    lm_dtype act; /* F32, F16 or BF16 */
    bool rope;    /* keys are rotated by their positions */
    /* Of latent attention the numbers of the rotated part of a key, which is then the second side of the layer; the first
     * has the latents, head_dim numbers of one head, which are both key and value.  0: keys and values */
    int64_t rotary;
} lm_kv_site;

/* Numbers of a row of one side. */
static inline int64_t lm_kv_site_dim(const lm_kv_site *s, int side)
{
    return side == LM_KV_V && s->rotary ? s->rotary : s->head_dim;
}
/* Numbers of a token. */
static inline int64_t lm_kv_site_numbers(const lm_kv_site *s)
{
    return s->kv_heads * (lm_kv_site_dim(s, LM_KV_K) + lm_kv_site_dim(s, LM_KV_V));
}

/* The form of the keys, or of the values, of one layer. */
typedef struct {
    const lm_kv_format *format; /* NULL: numbers of `plain` */
    lm_dtype plain;
    /* Heads are multiplied by the orthonormal Hadamard matrix (in blocks of the largest power of two that
     * divides the head) before they are stored, and queries or outputs accordingly. */
    bool rotate;
    bool pre_rope; /* keys are stored before they are rotated by their positions */
    /* Newest tokens that stay plain: with a format that codes single tokens (lm_kv_step 1) the last `residual`
     * ones, with others the last n mod residual of n. */
    int64_t residual;
    int64_t sinks; /* first tokens that stay plain */
    /* The range of a token's codes is that of all its heads without this share of outliers (lm_kv_token_range);
     * negative: each group has its own. */
    double outliers;
} lm_kv_side;

/* Of n tokens those from `sinks` up to this one, without it, are coded; the others are plain. */
int64_t lm_kv_side_coded(const lm_kv_side *s, int64_t n);

typedef struct lm_kv_method lm_kv_method;

/* What the form of a side depends on. */
typedef struct {
    const lm_kv_method *method;
    const double *h; /* h[i] is the value of method->hyper[i] */
    int side;        /* LM_KV_K, LM_KV_V */
    const lm_kv_site *site;
    int64_t page;           /* tokens of a page */
    const lm_kv_data *data; /* the calibration that the key "file" names; NULL: not given */
    const char *name;       /* the method with its values, for messages and the format */
    lm_arena *arena;
} lm_kv_ask;

struct lm_kv_method {
    const char *name, *about;
    const lm_hyper *hyper;
    bool file; /* has the key "file" besides, the path of a calibration */
    /* True if one is read with these values; NULL: never. */
    bool (*calibrated)(const double *h);
    /* Sets values that were not given and depend on others; NULL: there are no such values. */
    void (*complete)(double *h, const bool *given);
    /* The form of a side; *out holds the plain form of the layer.  Fails: LM_EUSAGE when the method cannot store
     * this side or layer. */
    lm_code (*form)(const lm_kv_ask *q, lm_kv_side *out, lm_err *e);
    /* A policy's instead: what it keeps of the layers, of which q->site is the first. */
    lm_code (*policy)(const lm_kv_ask *q, lm_kv_policy *out, lm_err *e);
    lm_kv_format base; /* for `form`: what distinguishes the methods of a file */
    lm_dtype plain;
};

/* Keys of each method that codes: layers that are left alone.  first, last: their number; -1: 2,
 * but at most a quarter of the layers. */
#define LM_KV_ALONE(n)                                                                    \
    { "first", n, -1, 1000, "first layers left alone (-1: 2, at most L/4)", LM_WHOLE },   \
        { "last", n, -1, 1000, "last layers left alone (-1: 2, at most L/4)", LM_WHOLE }, \
    {                                                                                     \
        "skip", 0, 0, 1, "other layers left alone", "none window"                         \
    }

/* The i-th method, NULL past the last. */
const lm_kv_method *lm_kv_method_at(int i);
/* By name, in any case, '-' is read as '_'; NULL if unknown.  A second name of a method ("fp8") may
 * stand for values too, which *keys then holds as text ("kbits=4,vbits=4"); otherwise *keys is
 * "". */
const lm_kv_method *lm_kv_method_find(const char *name, const char **keys);
/* The i-th second name, NULL past the last; *text: what it stands for, "fp8_e4m3". */
const char *lm_kv_alias_at(int i, const char **text);

#endif
