/* SPDX-License-Identifier: Apache-2.0 */
/* reference.c -- log-probabilities of a reference model: computed, written, read. */
#include "tune/align/reference.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "format/safetensors.h"

/* Texts that are scored together: enough to fill windows, few enough for signals and progress. */
enum { CHUNK = 1024 };

lm_code lm_reference_room(lm_reference_set *s, lm_err *e)
{
    if (lm_alloc_n(&s->at, (size_t)s->n + 1, sizeof *s->at, "reference", e))
        return e->code;
    for (int64_t i = 0; i < s->n; i++)
        s->at[i + 1] = s->at[i] + s->text[i].n - s->text[i].from;
    return lm_alloc_n(&s->logp, (size_t)s->at[s->n], sizeof *s->logp, "reference", e);
}

void lm_reference_fini(lm_reference_set *s)
{
    lm_free(s->logp);
    lm_free(s->at);
    s->logp = NULL;
    s->at = NULL;
}

/* ---- computing ---- */

/* Memory of a chunk. */
typedef struct {
    double *number, **of;
    size_t cap;
} room;

static lm_code score_chunk(lm_reference_set *s, int64_t from, int64_t n, lm_scorer *scorer, room *r,
                           bool *whole, lm_err *e)
{
    const int64_t first = s->at[from], count = s->at[from + n] - first;
    if (lm_grow(&r->number, &r->cap, (size_t)count, sizeof *r->number, "reference", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        r->of[i] = r->number + (s->at[from + i] - first);
    if (lm_texts_score(&scorer->eval, scorer->comm, s->text + from, n, r->of, whole, e) || !*whole)
        return e->code;
    for (int64_t k = 0; k < count; k++) {
        s->logp[first + k] = (float)r->number[k];
        if (!isfinite(r->number[k]))
            return lm_fail(e, LM_ENUMERIC, "reference", "use another model, or bf16 instead of f16",
                           "a log-probability is %g", r->number[k]);
    }
    return LM_OK;
}

lm_code lm_reference_make(lm_reference_set *set, int n, lm_scorer *scorer, lm_sink *sink,
                          bool *whole, lm_err *e)
{
    room r = { .cap = 0 };
    int64_t all = 0, done = 0;
    for (int k = 0; k < n; k++)
        all += set[k].n;
    if (lm_alloc_n(&r.of, CHUNK, sizeof *r.of, "reference", e))
        return e->code;
    *whole = true;
    for (int k = 0; k < n && !e->code; k++)
        for (int64_t i = 0; i < set[k].n && !e->code && *whole; i += CHUNK) {
            int64_t count = set[k].n - i < CHUNK ? set[k].n - i : CHUNK;
            score_chunk(&set[k], i, count, scorer, &r, whole, e);
            done += count;
            lm_progress(sink, "reference", (double)done, (double)all, "answers", "");
        }
    lm_free(r.of);
    lm_free(r.number);
    return e->code;
}

/* ---- the file ---- */

static void show_digest(const lm_reference_set *s, char key[64], char value[32])
{
    snprintf(key, 64, "%s.answers", s->name);
    snprintf(value, 32, "xxh3:%016" PRIx64, s->digest);
}

static const char model_key[] = "model";

void lm_reference_model_text(const uint8_t digest[16], char out[LM_REFERENCE_MODEL])
{
    size_t at = (size_t)snprintf(out, LM_REFERENCE_MODEL, "xxh3-128:");
    for (int i = 0; i < 16; i++)
        at += (size_t)snprintf(out + at, LM_REFERENCE_MODEL - at, "%02x", digest[i]);
}

static lm_code plan_file(const lm_reference_set *set, int n, const char *model, lm_st_plan *plan,
                         lm_err *e)
{
    char key[64], value[32];
    if (*model && lm_st_plan_meta(plan, model_key, model, e))
        return e->code;
    for (int k = 0; k < n; k++) {
        show_digest(&set[k], key, value);
        if (lm_st_plan_add(plan, set[k].name, LM_DTYPE_F32, 1, &set[k].at[set[k].n], e) ||
            lm_st_plan_meta(plan, key, value, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_reference_save(const lm_reference_set *set, int n, const char *model, const char *path,
                          lm_err *e)
{
    lm_st_plan *plan = NULL;
    lm_st_writer *w = NULL;
    if (!lm_st_plan_new(&plan, e) && !plan_file(set, n, model, plan, e) &&
        !lm_st_create(path, true, plan, &w, e)) {
        for (int k = 0; k < n && !e->code; k++)
            lm_st_write(w, set[k].logp, (size_t)set[k].at[set[k].n] * sizeof *set[k].logp, e);
        if (e->code)
            lm_st_drop(w);
        else
            lm_st_commit(w, e);
    }
    lm_st_plan_free(plan);
    return e->code;
}

static lm_code load_set(lm_reference_set *s, const lm_st *st, lm_err *e)
{
    char key[64], value[32];
    const lm_st_tensor *t = lm_st_find(st, s->name);
    show_digest(s, key, value);
    const char *kept = lm_st_meta(st, key);
    if (!t || !kept)
        return lm_fail(e, LM_EFORMAT, lm_st_path(st), "begin the run again", "has no '%s'",
                       s->name);
    if (strcmp(kept, value) != 0)
        return lm_fail(e, LM_EUSAGE, lm_st_path(st),
                       "resume with the data and options of the run, or begin another",
                       "is of other answers ('%s')", s->name);
    if (t->dtype != LM_DTYPE_F32 || t->ndim != 1 || t->dim[0] != s->at[s->n])
        return lm_fail(e, LM_EFORMAT, lm_st_path(st), "begin the run again",
                       "'%s' has another shape than its answers", s->name);
    return lm_st_load(st, t, LM_DTYPE_F32, s->logp, e);
}

lm_code lm_reference_load(lm_reference_set *set, int n, char model[LM_REFERENCE_MODEL],
                          const char *path, lm_err *e)
{
    lm_st *st = NULL;
    if (lm_st_open(path, &st, e))
        return e->code;
    const char *kept = lm_st_meta(st, model_key);
    snprintf(model, LM_REFERENCE_MODEL, "%s", kept ? kept : "");
    for (int k = 0; k < n && !e->code; k++)
        load_set(&set[k], st, e);
    lm_st_close(st);
    return e->code;
}
