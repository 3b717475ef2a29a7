/* SPDX-License-Identifier: Apache-2.0 */
/* search_log.c -- JSONL of a weight search. */
#include "merge/search_log.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"

enum { MAX_LOG = 1 << 30 };

/* All that determines a loss except the weights: inputs by their digests, each tensor's type and
 * parameters. */
static lm_code digest_plan(const lm_merge_plan *p, uint64_t *out, lm_err *e)
{
    lm_buf b = { 0 };
    const lm_merge_recipe *r = p->recipe;
    lm_code rc = lm_buf_addf(&b, e, "%s %" PRIu64, r->method->name, r->seed);
    for (int i = 0; i < r->n_inputs && !rc; i++)
        rc = lm_buf_addf(&b, e, " %" PRIx64, p->model[i].digest);
    for (int64_t i = 0; i < p->n && !rc; i++) {
        const lm_merge_tensor *t = &p->tensor[i];
        rc = lm_buf_addf(&b, e, "\n%s %d %" PRId64, t->name, (int)t->dtype, t->count);
        if (!rc)
            rc = lm_buf_add(&b, t->param, sizeof t->param, e);
        for (int m = 0; m < t->n_models && !rc; m++) {
            double param[LM_MERGE_PARAMS];
            memcpy(param, t->model[m].param, sizeof param);
            param[LM_MERGE_WEIGHT] = 0;
            rc = lm_buf_addf(&b, e, " %d", t->model[m].input);
            if (!rc)
                rc = lm_buf_add(&b, param, sizeof param, e);
        }
    }
    *out = rc ? 0 : lm_hash64(b.data, b.len, 0);
    lm_buf_fini(&b);
    return rc;
}

lm_code lm_search_log_head(const lm_merge_plan *p, const lm_merge_search_opts *o,
                           const lm_validator *v, lm_buf *out, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    uint64_t digest;
    char hex[20];
    lm_jw j;
    if (digest_plan(p, &digest, e))
        return e->code;
    snprintf(hex, sizeof hex, "%016" PRIx64, digest);
    lm_jw_begin(&j, out, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "event", "search");
    lm_jw_str(&j, "method", r->method->name);
    lm_jw_str(&j, "search", lm_search_names[o->search.kind]);
    lm_jw_str(&j, "base", r->base >= 0 ? r->input[r->base].name : NULL);
    lm_jw_arr(&j, "models");
    for (int k = 0; k < lm_merge_recipe_models(r); k++)
        lm_jw_str(&j, NULL, r->input[lm_merge_recipe_nth(r, k)].name);
    lm_jw_close_arr(&j);
    lm_jw_str(&j, "merge", hex);
    lm_jw_arr(&j, "val");
    for (int i = 0; i < o->val.sets; i++) {
        lm_jw_obj(&j, NULL);
        lm_jw_str(&j, "path", o->val.path[i]);
        lm_jw_int(&j, "tokens", lm_validator_tokens(v, i));
        lm_jw_close_obj(&j);
    }
    lm_jw_close_arr(&j);
    lm_jw_str(&j, "objective", o->equal ? "equal" : "tokens");
    lm_jw_str(&j, "dtype", lm_dtype_name(o->val.dtype));
    lm_jw_int(&j, "seq_len", lm_validator_seq(v));
    lm_jw_int(&j, "stride", lm_validator_stride(v));
    lm_jw_int(&j, "seed", (int64_t)o->search.seed);
    lm_jw_close_obj(&j);
    return lm_jw_end(&j);
}

static void put_numbers(lm_jw *j, const char *key, const double *v, int n)
{
    lm_jw_arr(j, key);
    for (int i = 0; i < n; i++)
        lm_jw_f64(j, NULL, v[i]);
    lm_jw_close_arr(j);
}

lm_code lm_search_log_candidate(const lm_candidate *c, lm_buf *out, lm_err *e)
{
    lm_jw j;
    lm_jw_begin(&j, out, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "event", "candidate");
    lm_jw_int(&j, "candidate", c->index);
    lm_jw_str(&j, "kind", c->kind);
    put_numbers(&j, "weights", c->weight, c->n);
    put_numbers(&j, "loss", c->loss, c->sets);
    lm_jw_f64(&j, "objective", c->objective);
    lm_jw_bool(&j, "best", c->best);
    lm_jw_f64(&j, "seconds", c->seconds);
    lm_jw_close_obj(&j);
    return lm_jw_end(&j);
}

lm_code lm_search_log_best(int n, const double *weights, double objective, int64_t candidates,
                           double seconds, lm_buf *out, lm_err *e)
{
    lm_jw j;
    lm_jw_begin(&j, out, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "event", "best");
    lm_jw_int(&j, "candidates", candidates);
    put_numbers(&j, "weights", weights, n);
    lm_jw_f64(&j, "objective", objective);
    lm_jw_f64(&j, "seconds", seconds);
    lm_jw_close_obj(&j);
    return lm_jw_end(&j);
}

/* ---- reading ---- */

/* n numbers; null replaces one that is not finite. */
static bool read_numbers(const json_t *list, int n, double *out)
{
    if (!json_is_array(list) || json_array_size(list) != (size_t)n)
        return false;
    for (int i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        if (!json_is_number(v) && !json_is_null(v))
            return false;
        out[i] = json_is_null(v) ? (double)NAN : json_number_value(v);
    }
    return true;
}

/* The keys that must be equal for an old loss to be valid now. */
static lm_code check_head(const json_t *old, const char *path, const lm_buf *head, lm_err *e)
{
    /* "merge" also depends on the seed: the seed alone gives a clearer message */
    static const char *const keys[] = { "event", "method",  "seed",   "merge", "val",
                                        "dtype", "seq_len", "stride", NULL };
    json_t *now = NULL;
    if (lm_json_parse(head->data, head->len, "search", &now, e))
        return e->code;
    lm_code rc = LM_OK;
    for (int i = 0; keys[i] && !rc; i++)
        if (!json_equal(json_object_get(old, keys[i]), json_object_get(now, keys[i])))
            rc = lm_fail(e, LM_EUSAGE, path, "start again without resuming",
                         i ? "the search in it differs in \"%s\""
                           : "its first line does not have the \"%s\" of a search",
                         keys[i]);
    json_decref(now);
    return rc;
}

typedef struct {
    int n, sets;
    double *w, *loss;
} shape;

static lm_code read_line(const json_t *j, const shape *s, const char *where, lm_candidates *out,
                         lm_err *e)
{
    const char *event = json_string_value(json_object_get(j, "event"));
    double seconds = json_number_value(json_object_get(j, "seconds"));
    if (!event || strcmp(event, "candidate"))
        return LM_OK;
    if (!read_numbers(json_object_get(j, "weights"), s->n, s->w) ||
        !read_numbers(json_object_get(j, "loss"), s->sets, s->loss))
        return lm_fail(e, LM_EFORMAT, where, "start again without resuming",
                       "a candidate needs %d weight%s and %d loss%s", s->n, lm_plural(s->n),
                       s->sets, s->sets == 1 ? "" : "es");
    return lm_candidates_add(out, s->n, s->sets, s->w, s->loss, NAN, seconds, e);
}

static lm_code read_lines(const char *path, const lm_buf *text, const lm_buf *head, const shape *s,
                          lm_candidates *out, lm_err *e)
{
    const char *p = text->data, *end = text->data + text->len, *newline;
    lm_code rc = LM_OK;
    int64_t line = 0;
    for (; !rc && p && p < end && (newline = memchr(p, '\n', (size_t)(end - p))); p = newline + 1) {
        json_t *j = NULL;
        char where[300];
        snprintf(where, sizeof where, "%.255s:%" PRId64, path, ++line);
        rc = lm_json_parse(p, (size_t)(newline - p), where, &j, e);
        if (!rc)
            rc = line == 1 ? check_head(j, path, head, e) : read_line(j, s, where, out, e);
        json_decref(j);
    }
    return rc;
}

lm_code lm_search_log_read(const char *path, const lm_buf *head, int n, int sets,
                           lm_candidates *out, lm_err *e)
{
    lm_buf text = { 0 };
    shape s = { .n = n, .sets = sets };
    lm_code rc = lm_file_read(path, MAX_LOG, &text, e);
    if (!rc)
        rc = lm_alloc_n(&s.w, (size_t)(n + sets), sizeof *s.w, "a candidate", e);
    s.loss = rc ? NULL : s.w + n;
    if (!rc)
        rc = read_lines(path, &text, head, &s, out, e);
    lm_free(s.w);
    lm_buf_fini(&text);
    return rc;
}
