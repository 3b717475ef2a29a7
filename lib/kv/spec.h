/* SPDX-License-Identifier: Apache-2.0 */
/* spec.h -- how a cache of keys and values is stored, by one line of text:
 *
 *   SPEC   := ITEM {';' ITEM}
 *   ITEM   := VALUE | '*=' VALUE | 'layers.' RANGE {'|' RANGE} '=' VALUE
 *   RANGE  := A ['-' B]                         layers A to B, from 0; negative numbers from the end, -1 is the last
 *   VALUE  := [POLICY '+'] (METHOD | SIDE {',' SIDE}) | POLICY
 *   SIDE   := ('k' | 'v') '=' METHOD            of keys, of values; without it the method is that of both
 *   METHOD := NAME [':' KEY '=' VALUE {',' KEY '=' VALUE}]
 *   POLICY := a METHOD that drops or merges tokens, of all layers
 *
 *   int4    k=q8_0,v=q4_0    layers.0-3|-1=int8;int4:group=64    h2o:keep=0.2+k=int8,v=int4
 *
 * For keys and for values of a layer, the first item counts that names the layer and sets that
 * side; otherwise the item without layers, which may be anywhere in the text; otherwise they are
 * plain ("auto").  Methods that need a calibration have the key "file", a path without ',' and ';'.
 * Each specification has one canonical text: names and keys as in the tables, without keys that
 * have the value they would have if they were not given. */
#ifndef LM_KV_SPEC_H
#define LM_KV_SPEC_H

#include "kv/method.h"

enum { LM_KV_FILES = 16 }; /* calibrations at most */

typedef struct lm_kv_spec lm_kv_spec;

/* Parse; the caller frees *out with lm_kv_spec_free.  Fails: LM_EUSAGE naming what is unknown, out
 * of range, given twice, or not of this form. */
lm_code lm_kv_spec_parse(const char *text, lm_kv_spec **out, lm_err *e);
/* The same; a name that does not exist is compared with `names` (kv/list.h), NULL-terminated. */
lm_code lm_kv_spec_parse_of(const char *text, const char *const *names, lm_kv_spec **out,
                            lm_err *e);
void lm_kv_spec_free(lm_kv_spec *s);
/* Methods that read a calibration and name no file read `path`; *any: there are some.  The text
 * stays as it is. */
lm_code lm_kv_spec_default_file(lm_kv_spec *s, const char *path, bool *any, lm_err *e);
/* The name of the first method that reads a calibration and names no file; NULL: there is none. */
const char *lm_kv_spec_uncalibrated(const lm_kv_spec *s);
/* Check the candidates of a calibration, "int8;int4": one method each, without budget and policy.
 * from: their place in errors.  Fails: LM_EUSAGE. */
lm_code lm_kv_check_candidates(const char *candidates, const char *from, lm_err *e);
/* The canonical text, borrowed. */
const char *lm_kv_spec_text(const lm_kv_spec *s);

/* The i-th different file that the specification names, borrowed; NULL past the last. */
const char *lm_kv_spec_file(const lm_kv_spec *s, int i);

/* The cache of a model: one form for each layer and side, and one length of pages for all. */
typedef struct lm_kv_plan lm_kv_plan;
struct lm_kv_plan {
    int64_t layers;
    int64_t page;               /* tokens: a multiple of 64, and of all that are coded together */
    const lm_kv_side *side;     /* [layers][2]: LM_KV_K, LM_KV_V */
    const char *text;           /* the canonical text; of auto with the methods that were chosen */
    const lm_kv_policy *policy; /* of all layers; NULL: all tokens stay */
    lm_arena *arena;            /* holds all of it */
};

/* Bind to the layers of a model.  data[i] is what lm_kv_spec_file(s, i) holds; it may be NULL if
 * there are no files, and is borrowed as long as the plan.  The caller frees *out with
 * lm_kv_plan_free.  Fails: LM_EUSAGE when an item has no layer or its layers keep nothing (a state
 * in place of keys and values), and when a method cannot store a layer. */
lm_code lm_kv_spec_bind(const lm_kv_spec *s, const lm_kv_site *site, int64_t layers,
                        const lm_kv_data *const *data, lm_kv_plan **out, lm_err *e);
void lm_kv_plan_free(lm_kv_plan *p);

/* Bytes of a token in the pages of all layers, with scales. */
double lm_kv_plan_bytes(const lm_kv_plan *p, const lm_kv_site *site);
/* Bytes of a text of which layer l holds rows[l] tokens: of those that are coded, and of those that
 * the methods keep plain. */
double lm_kv_plan_text_bytes(const lm_kv_plan *p, const lm_kv_site *site, const int64_t *rows);

#endif
