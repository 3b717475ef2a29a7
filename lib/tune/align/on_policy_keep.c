/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_keep.c -- a generation in checkpoints between its steps.
 *
 *   kl_coef     b of the next generation, where it follows a target; between generations this is all
 *   generation  its number
 *   metrics     by name
 *   prompt, tokens, truncated   of each completion: index of its prompt, new tokens, 0 or 1
 *   ids         all new tokens, one completion behind the other, base64 of 32 bits each
 *   sampled, old, ref           of them, base64 of F64; the latter two where there are such
 *   value, advantages, returns  likewise, with a loss of values
 *   reward, advantage           of each completion, likewise
 *
 * Little-endian, as everything that this library writes. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/base64.h"
#include "tune/align/on_policy_impl.h"

static const char where[] = "objective.json";

static int64_t count(const lm_on_policy *p)
{
    return p->o.prompts * p->o.group;
}

/* ---- writing ---- */

static lm_code put_bytes(lm_jw *w, const char *key, const lm_buf *bytes, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_base64_encode(bytes->data ? bytes->data : "", bytes->len, &text, e);
    if (!rc)
        lm_jw_strn(w, key, text.data ? text.data : "", text.len);
    lm_buf_fini(&text);
    return rc;
}

typedef const void *(*get_fn)(const sampled *s, size_t *bytes);

static const void *get_ids(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->text.ids;
    return s->text.ids + s->text.from;
}

static const void *get_sampled(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->sampled;
    return s->sampled;
}

static const void *get_old(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->old;
    return s->old;
}

static const void *get_ref(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->ref;
    return s->ref;
}

static const void *get_value(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->value;
    return s->value;
}

static const void *get_advantages(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->advantages;
    return s->advantages;
}

static const void *get_returns(const sampled *s, size_t *bytes)
{
    *bytes = (size_t)s->n * sizeof *s->returns;
    return s->returns;
}

static const void *get_reward(const sampled *s, size_t *bytes)
{
    *bytes = sizeof s->reward;
    return &s->reward;
}

static const void *get_advantage(const sampled *s, size_t *bytes)
{
    *bytes = sizeof s->advantage;
    return &s->advantage;
}

static lm_code put_all(const lm_on_policy *p, lm_jw *w, const char *key, get_fn get, lm_err *e)
{
    lm_buf all = { 0 };
    for (int64_t i = 0; i < count(p) && !e->code; i++) {
        size_t n;
        const void *from = get(&p->made[i], &n);
        lm_buf_add(&all, from, n, e);
    }
    if (!e->code)
        put_bytes(w, key, &all, e);
    lm_buf_fini(&all);
    return e->code;
}

static void put_counts(const lm_on_policy *p, lm_jw *w)
{
    lm_jw_arr(w, "prompt");
    for (int64_t i = 0; i < count(p); i++)
        lm_jw_int(w, NULL, p->made[i].prompt);
    lm_jw_close_arr(w);
    lm_jw_arr(w, "tokens");
    for (int64_t i = 0; i < count(p); i++)
        lm_jw_int(w, NULL, p->made[i].n);
    lm_jw_close_arr(w);
    lm_jw_arr(w, "truncated");
    for (int64_t i = 0; i < count(p); i++)
        lm_jw_int(w, NULL, p->made[i].truncated);
    lm_jw_close_arr(w);
}

static lm_code put_generation(const lm_on_policy *p, lm_jw *w, lm_err *e)
{
    lm_jw_int(w, "generation", p->generation);
    lm_jw_obj(w, "metrics");
    for (int i = 0; i < p->of_generation.n; i++)
        lm_jw_f64(w, p->of_generation.item[i].name, lm_align_value(&p->of_generation.item[i]));
    lm_jw_close_obj(w);
    put_counts(p, w);
    if (put_all(p, w, "ids", get_ids, e) || put_all(p, w, "sampled", get_sampled, e) ||
        (p->made[0].old && put_all(p, w, "old", get_old, e)) ||
        (p->made[0].ref && put_all(p, w, "ref", get_ref, e)) ||
        (p->values &&
         (put_all(p, w, "value", get_value, e) || put_all(p, w, "advantages", get_advantages, e) ||
          put_all(p, w, "returns", get_returns, e))))
        return e->code;
    return put_all(p, w, "reward", get_reward, e) || put_all(p, w, "advantage", get_advantage, e)
               ? e->code
               : LM_OK;
}

lm_code on_policy_save(void *ctx, int64_t step, lm_buf *out, lm_err *e)
{
    const lm_on_policy *p = ctx;
    const int64_t all = steps_of_generation(p);
    const bool within = step % all && p->generation == step / all;
    lm_jw w;
    if (!within && !(p->o.kl_target > 0))
        return LM_OK;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    if (p->o.kl_target > 0)
        lm_jw_f64(&w, "kl_coef", p->kl);
    if (within && put_generation(p, &w, e))
        return e->code;
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

/* ---- reading ---- */

/* The bytes of a key, exactly `bytes` of them, in the arena. */
static lm_code get_bytes(lm_on_policy *p, const json_t *o, const char *key, size_t bytes, void *out,
                         lm_err *e)
{
    const json_t *text = json_object_get(o, key);
    lm_buf all = { 0 };
    void **to = out;
    if (!json_is_string(text))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\" is missing", key);
    if (!lm_base64_decode(json_string_value(text), json_string_length(text), where, &all, e)) {
        if (all.len != bytes)
            lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\" has %zu bytes, not %zu", key, all.len,
                    bytes);
        else if (!lm_arena_alloc(p->arena, to, bytes + 1, 1, e) && bytes)
            memcpy(*to, all.data, bytes);
    }
    lm_buf_fini(&all);
    return e->code;
}

/* Number i of an array of `count` whole numbers, in [0, most]. */
static lm_code get_count(const lm_on_policy *p, const json_t *o, const char *key, int64_t i,
                         int64_t most, int64_t *out, lm_err *e)
{
    const json_t *a = json_object_get(o, key), *v = json_array_get(a, (size_t)i);
    *out = json_integer_value(v);
    if ((int64_t)json_array_size(a) == count(p) && json_is_integer(v) && *out >= 0 && *out <= most)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, where,
                   "resume with the same prompts, completions of each and most new tokens",
                   "\"%s\" does not fit the data and options of the run", key);
}

/* What completion i is, without its numbers. */
static lm_code read_one(lm_on_policy *p, const json_t *o, int64_t i, lm_err *e)
{
    sampled *s = &p->made[i];
    int64_t truncated;
    *s = (sampled){ 0 };
    if (get_count(p, o, "prompt", i, p->o.n_prompts - 1, &s->prompt, e) ||
        get_count(p, o, "tokens", i, p->o.rollout.most_new, &s->n, e) ||
        get_count(p, o, "truncated", i, 1, &truncated, e))
        return e->code;
    s->truncated = truncated;
    return LM_OK;
}

/* Its text: that of the prompt, and new[0..n). */
static lm_code join(lm_on_policy *p, sampled *s, const uint32_t *new, lm_err *e)
{
    const lm_on_policy_prompt *from = &p->o.prompt[s->prompt];
    uint32_t *ids;
    if (s->n < 1)
        return lm_fail(e, LM_EFORMAT, where, NULL, "a completion has no tokens");
    if (lm_arena_alloc(p->arena, &ids, (size_t)(from->n + s->n), sizeof *ids, e))
        return e->code;
    memcpy(ids, from->ids, (size_t)from->n * sizeof *ids);
    memcpy(ids + from->n, new, (size_t)s->n * sizeof *ids);
    s->text = (lm_align_text){ ids, from->n + s->n, from->n };
    return LM_OK;
}

static lm_code read_numbers(lm_on_policy *p, const json_t *o, lm_err *e)
{
    const size_t n = (size_t)count(p);
    size_t all = 0;
    uint32_t *ids = NULL;
    double *sampled_at = NULL, *old = NULL, *ref = NULL, *reward = NULL, *advantage = NULL,
           *value = NULL, *advantages = NULL, *returns = NULL;
    for (size_t i = 0; i < n; i++)
        all += (size_t)p->made[i].n;
    if (get_bytes(p, o, "ids", all * sizeof *ids, &ids, e) ||
        get_bytes(p, o, "sampled", all * sizeof *old, &sampled_at, e) ||
        (p->scores && get_bytes(p, o, "old", all * sizeof *old, &old, e)) ||
        (p->compares && get_bytes(p, o, "ref", all * sizeof *ref, &ref, e)) ||
        (p->values && (get_bytes(p, o, "value", all * sizeof *old, &value, e) ||
                       get_bytes(p, o, "advantages", all * sizeof *old, &advantages, e) ||
                       get_bytes(p, o, "returns", all * sizeof *old, &returns, e))) ||
        get_bytes(p, o, "reward", n * sizeof *reward, &reward, e) ||
        get_bytes(p, o, "advantage", n * sizeof *advantage, &advantage, e))
        return e->code;
    for (size_t i = 0, at = 0; i < n; at += (size_t)p->made[i++].n) {
        sampled *s = &p->made[i];
        if (join(p, s, ids + at, e))
            return e->code;
        s->sampled = sampled_at + at;
        s->old = old ? old + at : NULL;
        s->ref = ref ? ref + at : NULL;
        s->value = value ? value + at : NULL;
        s->advantages = advantages ? advantages + at : NULL;
        s->returns = returns ? returns + at : NULL;
        s->reward = reward[i];
        s->advantage = advantage[i];
    }
    return LM_OK;
}

static void read_metrics(lm_on_policy *p, const json_t *o)
{
    const char *name;
    json_t *v;
    json_decref(p->kept);
    p->kept = json_incref(json_object_get(o, "metrics")); /* its keys are the names */
    p->of_generation.n = 0;
    json_object_foreach(p->kept, name, v)
    {
        if (json_is_number(v) && p->of_generation.n < LM_ALIGN_METRICS)
            lm_align_note(&p->of_generation, name, json_number_value(v), 1, LM_ALIGN_MEAN);
    }
}

lm_code on_policy_load(void *ctx, int64_t step, const json_t *o, lm_err *e)
{
    lm_on_policy *p = ctx;
    const int64_t g = step / steps_of_generation(p);
    int64_t number;
    if (p->o.kl_target > 0 && lm_json_f64_or(o, "kl_coef", p->o.kl_reward, &p->kl, where, e))
        return e->code;
    if (!(p->kl >= 0))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"kl_coef\" is no coefficient");
    if (!json_object_get(o, "generation") && json_object_get(o, "kl_coef"))
        return LM_OK;
    if (lm_json_i64(o, "generation", 0, INT64_C(1) << 50, &number, where, e))
        return e->code;
    if (number != g || step % steps_of_generation(p) == 0)
        return lm_fail(e, LM_EUSAGE, where, "resume with the options of the run",
                       "the checkpoint is within generation %" PRId64
                       ", which has another number of steps",
                       number);
    lm_arena_free(p->arena);
    p->arena = NULL;
    if (lm_arena_new(&p->arena, 1 << 20, e))
        return e->code;
    for (int64_t i = 0; i < count(p); i++)
        if (read_one(p, o, i, e))
            return e->code;
    if (read_numbers(p, o, e))
        return e->code;
    read_metrics(p, o);
    p->generation = g;
    return LM_OK;
}
