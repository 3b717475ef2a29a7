/* SPDX-License-Identifier: Apache-2.0 */
/* reward.c -- the table of rewards, and sets of them. */
#include "tune/align/reward.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "tune/align/portion.h"
#include "tune/align/reward_impl.h"

static lm_code open_command(reward *r, const char *text, const lm_reward_opts *o, lm_err *e)
{
    return lm_reward_command_open(text, o->timeout > 0 ? o->timeout : 60, &r->command, e);
}

static lm_code ask_command(reward *r, const lm_reward_item *item, int64_t n, double *out, lm_err *e)
{
    return lm_reward_command_score(r->command, item, n, out, e);
}

static lm_code open_model(reward *r, const char *text, const lm_reward_opts *o, lm_err *e)
{
    return lm_reward_model_open(text, o->tokenizer, &r->model, e);
}

static lm_code ask_model(reward *r, const lm_reward_item *item, int64_t n, double *out, lm_err *e)
{
    return lm_reward_model_score(r->model, item, n, out, e);
}

static const reward_kind kinds[] = {
    { .name = "gsm8k",
      .about = "the number of the answer is the reference's",
      .column = true,
      .score = reward_gsm8k },
    { .name = "exact",
      .about = "the answer is the reference",
      .column = true,
      .score = reward_exact },
    { .name = "regex",
      .about = "the pattern behind the colon is found",
      .text = true,
      .score = reward_regex },
    { .name = "think", .about = "<think>...</think> before the answer", .score = reward_think },
    { .name = "tags",
      .about = "<think>...</think><answer>...</answer> and nothing else",
      .score = reward_tags },
    { .name = "length",
      .about = "a cost of each token",
      .keys = reward_length_keys,
      .score = reward_length },
    { .name = "overlong",
      .about = "DAPO's penalty of the last tokens before the limit",
      .keys = reward_overlong_keys,
      .score = reward_overlong },
    { .name = "repetition",
      .about = "a penalty of repeated n-grams",
      .keys = reward_repetition_keys,
      .score = reward_repetition },
    { .name = "command",
      .about = "the answers of the command behind the colon",
      .text = true,
      .open = open_command,
      .score_all = ask_command },
    { .name = "model",
      .about = "the score of a reward model: MODEL or MODEL+ADAPTER behind the colon",
      .text = true,
      .open = open_model,
      .score_all = ask_model },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

struct lm_reward_set {
    reward *r;
    int n;
    char **spec; /* [n] as they were given, */
    lm_reward_opts o;
    bool failed;
    lm_comm *comm;   /* lm_objective_site.comm */
    double *scratch; /* of a command: its answers */
    size_t cap;
};

/* ---- reading ---- */

static lm_code find_kind(const char *name, const reward_kind **out, lm_err *e)
{
    const char *known[KINDS + 1] = { NULL };
    char todo[200];
    size_t len;
    for (int i = 0; i < KINDS; i++) {
        known[i] = kinds[i].name;
        if (!strcmp(name, kinds[i].name)) {
            *out = &kinds[i];
            return LM_OK;
        }
    }
    const char *near = lm_nearest(name, known);
    len = (size_t)snprintf(todo, sizeof todo,
                           near ? "did you mean '%s'? there are" : "choose one of:", near);
    for (int i = 0; i < KINDS && len < sizeof todo; i++)
        len += (size_t)snprintf(todo + len, sizeof todo - len, " %s", known[i]);
    return lm_fail(e, LM_EUSAGE, "reward", todo, "there is no '%.40s'", name);
}

/* Keys and values behind the colon. */
static lm_code read_keys(reward *r, const char *at, lm_err *e)
{
    const reward_kind *k = r->kind;
    static const lm_hyper none[] = { { 0 } };
    lm_hyper_text t;
    for (; *at; at += *at == ',') {
        if (lm_hyper_next(&at, "", "reward", k->name, &t, e))
            return e->code;
        int i = k->keys ? lm_hyper_find(k->keys, t.key) : -1;
        if (k->column && !strcmp(t.key, "column"))
            snprintf(r->column, sizeof r->column, "%s", t.value);
        else if (i < 0)
            return lm_hyper_fail(k->keys ? k->keys : none, "reward", k->name,
                                 k->column ? " column" : "", t.key, e);
        else if (lm_hyper_set(&k->keys[i], "reward", k->name, t.value, &r->key[i], e))
            return e->code;
    }
    return LM_OK;
}

/* The pattern, the command or the model behind the colon. */
static lm_code open_text(reward *r, const char *text, const lm_reward_opts *o, lm_err *e)
{
    if (!*text)
        return lm_fail(e, LM_EUSAGE, "reward", NULL, "%s needs a text behind a colon",
                       r->kind->name);
    if (r->kind->open)
        return r->kind->open(r, text, o, e);
    if (lm_utf8_valid(text, strlen(text)) != strlen(text))
        return lm_fail(e, LM_EUSAGE, "reward", NULL, "the pattern is not UTF-8");
    if (lm_regex_new(text, strlen(text), false, "reward regex", &r->regex, e))
        return lm_err_disobeyed(e);
    return lm_regex_match_new(&r->match, e);
}

static lm_code open_one(reward *r, const char *spec, const lm_reward_opts *o, lm_err *e)
{
    char name[40];
    const char *at = spec;
    lm_text_until(&at, ":", name, sizeof name);
    if (find_kind(name, &r->kind, e))
        return e->code;
    for (int i = 0; r->kind->keys && r->kind->keys[i].name; i++)
        r->key[i] = r->kind->keys[i].value;
    at += *at == ':';
    if (r->kind->text)
        return open_text(r, at, o, e);
    if (read_keys(r, at, e))
        return e->code;
    if (r->kind->keys == reward_overlong_keys && r->key[0] <= 0)
        r->key[0] = (double)o->most_new;
    if (r->kind->keys == reward_overlong_keys && r->key[1] > r->key[0])
        return lm_fail(e, LM_EUSAGE, "reward", NULL, "soft of overlong is %.0f, but most %.0f",
                       r->key[1], r->key[0]);
    return LM_OK;
}

/* The name of reward i among those before it. */
static void name_one(reward *r, int i)
{
    int same = 1;
    for (int k = 0; k < i; k++)
        same += r[k].kind == r[i].kind;
    if (same > 1)
        snprintf(r[i].name, sizeof r[i].name, "%s_%d", r[i].kind->name, same);
    else
        snprintf(r[i].name, sizeof r[i].name, "%s", r[i].kind->name);
}

lm_code lm_reward_open(const char *const *spec, const double *weight, int n,
                       const lm_reward_opts *o, lm_reward_set **out, lm_err *e)
{
    lm_reward_set *s = NULL;
    *out = NULL;
    if (n < 1)
        return lm_fail(e, LM_EUSAGE, "reward", "name at least one", "no reward is named");
    if (lm_alloc_n(&s, 1, sizeof *s, "rewards", e))
        return e->code;
    s->o = *o;
    if (!lm_alloc_n(&s->r, (size_t)n, sizeof *s->r, "rewards", e) &&
        !lm_alloc_n(&s->spec, (size_t)n, sizeof *s->spec, "rewards", e))
        s->n = n;
    for (int i = 0; i < n && !e->code; i++) {
        if (lm_strdup(&s->spec[i], spec[i], e))
            break;
        s->r[i].weight = weight ? weight[i] : 1;
        if (!isfinite(s->r[i].weight))
            lm_fail(e, LM_EUSAGE, "reward", NULL, "weight %d is not a number", i + 1);
        else if (!open_one(&s->r[i], spec[i], o, e))
            name_one(s->r, i);
    }
    if (e->code)
        lm_reward_close(s);
    else
        *out = s;
    return e->code;
}

void lm_reward_close(lm_reward_set *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->n; i++) {
        lm_regex_free(s->r[i].regex);
        lm_regex_match_free(s->r[i].match);
        lm_reward_command_close(s->r[i].command);
        lm_reward_model_close(s->r[i].model);
        lm_buf_fini(&s->r[i].clean);
        lm_free(s->spec[i]);
    }
    lm_free(s->spec);
    lm_free(s->r);
    lm_free(s->scratch);
    lm_free(s);
}

lm_code lm_reward_twin(const lm_reward_set *s, lm_reward_set **out, lm_err *e)
{
    double *weight = NULL;
    *out = NULL;
    if (lm_alloc_n(&weight, (size_t)s->n, sizeof *weight, "rewards", e))
        return e->code;
    for (int i = 0; i < s->n; i++)
        weight[i] = s->r[i].weight;
    lm_reward_open((const char *const *)s->spec, weight, s->n, &s->o, out, e);
    lm_free(weight);
    return e->code;
}

lm_code lm_reward_ready(lm_reward_set *s, const lm_objective_site *site, lm_err *e)
{
    s->comm = site->comm;
    for (int i = 0; i < s->n && !e->code; i++)
        if (s->r[i].model)
            lm_reward_model_load(s->r[i].model, site, e);
    return e->code;
}

lm_code lm_reward_bytes(const lm_reward_set *s, const lm_model *train, size_t arena, size_t *bytes,
                        lm_err *e)
{
    *bytes = 0;
    for (int i = 0; i < s->n && !e->code; i++) {
        size_t own = 0;
        if (s->r[i].model && !lm_reward_model_bytes(s->r[i].model, train, arena, &own, e))
            *bytes += own;
    }
    return e->code;
}

int lm_reward_count(const lm_reward_set *s)
{
    return s->n;
}

const char *lm_reward_name(const lm_reward_set *s, int i)
{
    return s->r[i].name;
}

double lm_reward_weight(const lm_reward_set *s, int i)
{
    return s->r[i].weight;
}

/* ---- scoring ---- */

/* Items [0, n) by one reward, to out[i]. */
static lm_code score_part(reward *r, const lm_reward_item *item, int64_t n, double *out, lm_err *e)
{
    if (r->kind->score_all)
        return r->kind->score_all(r, item, n, out, e);
    for (int64_t i = 0; i < n; i++)
        if (r->kind->score(r, &item[i], &out[i], e))
            return e->code;
    return LM_OK;
}

/* Of all items by one reward.  Each rank judges its own; those of a model divide its windows, for they are the same on all.
 * *whole false: a rank has failed or is to stop, and the others leave with it. */
static lm_code score_one(lm_reward_set *s, reward *r, const lm_reward_item *item, int64_t n,
                         double *out, bool *whole, lm_err *e)
{
    const lm_portion own = lm_portion_own(s->comm, n);
    lm_err second = { 0 };
    bool stops = false;
    lm_code rc = r->model
                     ? score_part(r, item, n, out, e)
                     : score_part(r, item + own.first, own.end - own.first, out + own.first, e);
    if (lm_portion_stops(s->comm, rc != LM_OK, &stops, rc ? &second : e) || rc)
        return e->code;
    *whole = !stops;
    return !r->model && *whole ? lm_portion_join(s->comm, out, n, sizeof *out, e) : LM_OK;
}

/* Rewards and their sums stay where means and variances of them are numbers. */
static lm_code check_size(const char *what, const double *x, int64_t n, lm_err *e)
{
    for (int64_t i = 0; i < n; i++)
        if (fabs(x[i]) > LM_REWARD_MOST)
            return lm_fail(e, LM_EFORMAT, what, "give smaller rewards, or smaller weights",
                           "the reward of completion %lld is %g: its magnitude is above %g",
                           (long long)i + 1, x[i], LM_REWARD_MOST);
    return LM_OK;
}

static void add_weighted(double weight, const double *from, int64_t n, double *total)
{
    for (int64_t i = 0; i < n; i++)
        if (!isnan(from[i]))
            total[i] = (isnan(total[i]) ? 0 : total[i]) + weight * from[i];
}

static void clear(const lm_reward_set *s, int64_t n, double *each, double *total)
{
    for (int64_t i = 0; i < n; i++)
        total[i] = NAN;
    for (int64_t i = 0; each && i < n * s->n; i++)
        each[i] = NAN;
}

lm_code lm_reward_score(lm_reward_set *s, const lm_reward_item *item, int64_t n, double *each,
                        double *total, bool *whole, lm_err *e)
{
    *whole = true;
    if (s->failed)
        return lm_fail(e, LM_EBUG, "reward", NULL, "a set that failed is used again");
    if (lm_grow(&s->scratch, &s->cap, (size_t)n + 1, sizeof *s->scratch, "rewards", e))
        return e->code;
    clear(s, n, each, total);
    for (int k = 0; k < s->n; k++) {
        if (score_one(s, &s->r[k], item, n, s->scratch, whole, e) ||
            (*whole &&
             check_size(s->r[k].command ? "reward command" : s->r[k].name, s->scratch, n, e))) {
            s->failed = true;
            return e->code;
        }
        if (!*whole) {
            clear(s, n, each, total);
            return LM_OK;
        }
        for (int64_t i = 0; each && i < n; i++)
            each[i * s->n + k] = s->scratch[i];
        add_weighted(s->r[k].weight, s->scratch, n, total);
    }
    s->failed = check_size("rewards", total, n, e) != LM_OK;
    return e->code;
}

bool lm_reward_failed(const lm_reward_set *s)
{
    return s->failed;
}

lm_code lm_reward_list_json(lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_arr(&w, NULL);
    for (int i = 0; i < KINDS; i++) {
        const reward_kind *k = &kinds[i];
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "name", k->name);
        lm_jw_str(&w, "about", k->about);
        lm_jw_bool(&w, "column", k->column);
        lm_jw_obj(&w, "keys");
        for (const lm_hyper *h = k->keys; h && h->name; h++)
            lm_hyper_add_json(h, &w);
        lm_jw_close_obj(&w);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    return lm_jw_end(&w);
}

lm_code lm_reward_list(lm_buf *out, lm_err *e)
{
    for (int i = 0; i < KINDS; i++) {
        const reward_kind *k = &kinds[i];
        if (lm_buf_addf(out, e, "  %-12s %s%s\n", k->name, k->about,
                        k->column ? " (column=KEY)" : ""))
            return e->code;
        for (const lm_hyper *h = k->keys; h && h->name; h++)
            if (lm_buf_add(out, "    ", 4, e) || lm_hyper_add_line(h, out, e))
                return e->code;
    }
    return LM_OK;
}
