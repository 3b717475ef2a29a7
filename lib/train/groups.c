/* SPDX-License-Identifier: Apache-2.0 */
/* groups.c -- groups of tensors and their optimisers. */
#include "train/groups.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "model/arch.h"
#include "train/optim/optims.h"

/* ---- parsing ---- */

static const char where[] = "optimizer";

static lm_code fail_name(const char *name, lm_err *e)
{
    char known[512] = "";
    size_t len = 0;
    for (int i = 0; lm_optim_at(i) && len < sizeof known; i++)
        len += (size_t)snprintf(known + len, sizeof known - len, "%s%s",
                                i ? " " : "choose one of: ", lm_optim_at(i)->name);
    return lm_fail(e, LM_EUSAGE, where, known, "there is no optimiser '%.40s'", name);
}

static lm_code set_rate(lm_optim_use *u, const char *value, double lr, lm_err *e)
{
    double x;
    if (!lm_parse_double(value, &x) || !(x >= 0 && x <= 1e3))
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "lr of %s is a number from 0 to 1000, not '%.40s'", u->optim->name, value);
    if (x > 0 && lr <= 0)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "lr of %s is a multiple of the run's learning rate, which is 0",
                       u->optim->name);
    u->rate = lr > 0 ? x / lr : 1;
    return LM_OK;
}

static lm_code set_average(lm_optim_use *u, const char *value, lm_err *e)
{
    double x;
    if (!lm_parse_double(value, &x) || !(x >= 0 && x <= 0.9999999))
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "ema of %s is a number from 0 to 0.9999999, not '%.40s'", u->optim->name,
                       value);
    u->ema = x;
    return LM_OK;
}

static lm_code set_key(lm_optim_use *u, const lm_hyper_text *t, double lr, lm_err *e)
{
    const lm_optim *o = u->optim;
    int i = lm_hyper_find(o->hyper, t->key);
    return i >= 0 ? lm_hyper_set(&o->hyper[i], where, o->name, t->value, &u->hyper[i], e)
           : !strcmp(t->key, "lr")  ? set_rate(u, t->value, lr, e)
           : !strcmp(t->key, "ema") ? set_average(u, t->value, e)
                                    : lm_hyper_fail(o->hyper, where, o->name, " lr ema", t->key, e);
}

/* The bit of a key that set_key knows. */
static uint64_t bit_of(const lm_optim *o, const char *key)
{
    int i = lm_hyper_find(o->hyper, key);
    return (uint64_t)1 << (i >= 0 ? i + 2 : !strcmp(key, "lr"));
}

/* An optimiser that computes its own rates uses the run's schedule as a factor that starts at 1. */
static lm_code finish(lm_optim_use *u, bool rate_given, double lr, lm_err *e)
{
    const lm_optim *o = u->optim;
    lm_err why = { 0 };
    if (o->own_rate && o->own_rate(u->hyper)) {
        if (rate_given)
            return lm_fail(e, LM_EUSAGE, where, "leave it out", "lr of %s follows from its keys",
                           o->name);
        u->rate = lr > 0 ? 1 / lr : 1;
    }
    if (o->check && o->check(u->hyper, &why))
        return lm_fail(e, LM_EUSAGE, where, NULL, "%s of %s %s", why.where, o->name, why.what);
    return LM_OK;
}

/* The run's peak rate, and whether uses without a rate have that of their optimiser instead. */
typedef struct {
    double lr;
    bool own;
} peak;

/* NAME[:key=value,...] up to ';' or the end. */
static lm_code parse_use(const char **at, const lm_hyper_value *given, const peak *p,
                         lm_optim_use *u, lm_err *e)
{
    char name[64];
    lm_hyper_text t;
    uint64_t set = 0;
    if (!lm_text_until(at, ":;", name, sizeof name) || !lm_optim_find(name))
        return fail_name(name, e);
    *u = lm_optim_default(lm_optim_find(name));
    if (p->own)
        u->rate = u->optim->rate / p->lr;
    for (; given && given->name; given++) {
        int i = lm_optim_hyper(u->optim, given->name);
        if (i >= 0)
            u->hyper[i] = given->value;
    }
    while (**at == ':' || **at == ',') {
        ++*at;
        if (lm_hyper_next(at, ";", where, u->optim->name, &t, e) || set_key(u, &t, p->lr, e))
            return e->code;
        uint64_t bit = bit_of(u->optim, t.key);
        if (set & bit)
            return lm_fail(e, LM_EUSAGE, where, "keep one of them", "%s of %s is given twice",
                           t.key, u->optim->name);
        set |= bit;
    }
    return finish(u, set & bit_of(u->optim, "lr"), p->lr, e);
}

/* The rate of the entry that the text begins with; 0: no entry has that name. */
static double own_rate(const char *text)
{
    char name[64];
    const lm_optim *o = lm_text_until(&text, ":;", name, sizeof name) ? lm_optim_find(name) : NULL;
    return o ? o->rate : 0;
}

lm_code lm_groups_parse(const char *text, const lm_hyper_value *given, double lr, lm_groups *out,
                        lm_err *e)
{
    const char *at = text;
    const peak p = { .lr = lr < 0 ? own_rate(text) : lr, .own = lr < 0 };
    *out = (lm_groups){ .text = text, .n = 1, .lr = p.lr };
    if (parse_use(&at, given, &p, &out->use[0], e))
        return e->code;
    while (*at == ';') {
        at++;
        if (!*at) /* a separator at the end is ignored */
            break;
        if (out->n == LM_GROUPS)
            return lm_fail(e, LM_EUSAGE, where, NULL, "more than %d groups", LM_GROUPS);
        char *pattern = out->pattern[out->n];
        if (!lm_text_until(&at, "=;", pattern, sizeof out->pattern[0]))
            return lm_fail(e, LM_EUSAGE, where, "use '*', or a group more",
                           "the patterns of a group have at most %zu characters",
                           sizeof out->pattern[0] - 1);
        if (*at != '=' || !*pattern)
            return lm_fail(e, LM_EUSAGE, where, "write PATTERN=OPTIMISER, as in *norm*=adamw",
                           "'%.40s' names no tensors or no optimiser", pattern);
        at++;
        if (parse_use(&at, NULL, &p, &out->use[out->n], e))
            return e->code;
        out->n++;
    }
    return LM_OK;
}

lm_groups lm_groups_of(lm_optim_use use)
{
    return (lm_groups){ .text = use.optim->name, .use = { use }, .n = 1, .lr = use.optim->rate };
}

/* ---- matching ---- */

static void strip(const char *tensor, char out[512])
{
    snprintf(out, 512, "%s", lm_arch_rootless(tensor));
    if (lm_text_ends(out, ".weight"))
        out[strlen(out) - strlen(".weight")] = 0;
}

/* Words for parts, which have other names in each family. */
static bool is_word_of(const char *word, lm_part part, bool bias)
{
    return !strcasecmp(word, "embed") ? lm_part_is_embedding(part)
           : !strcasecmp(word, "head")
               ? part == LM_PART_OUTPUT || part == LM_PART_HEAD_DENSE || part == LM_PART_HEAD_BIAS
           : !strcasecmp(word, "norm") ? lm_part_is_norm(part)
           : !strcasecmp(word, "bias") ? bias && !lm_part_is_norm(part)
                                       : false;
}

bool lm_groups_match(const char *patterns, const char *name, lm_part part, bool bias)
{
    char bare[512], one[256];
    const char *at = patterns;
    strip(name, bare);
    for (;; at++) {
        lm_text_until(&at, "|", one, sizeof one);
        if (is_word_of(one, part, bias) || !fnmatch(one, bare, FNM_CASEFOLD) ||
            !fnmatch(one, name, FNM_CASEFOLD))
            return true;
        if (!*at)
            return false;
    }
}

/* The group of a tensor (name, part and bias are read). */
static int group_of(const lm_groups *g, const lm_update_tensor *t)
{
    for (int i = 1; i < g->n; i++)
        if (lm_groups_match(g->pattern[i], t->name, t->part, t->bias))
            return i;
    return 0;
}

/* The length of an optimiser's name, or of patterns, '=' and a name, at *at, which then points to the next group. */
static size_t skip_keys(const char **at, bool patterns)
{
    size_t start = patterns ? strcspn(*at, "=;") : 0; /* patterns may hold ':' */
    size_t n = start + strcspn(*at + start, ":;");
    *at += n + strcspn(*at + n, ";");
    *at += **at == ';';
    return n;
}

bool lm_groups_same(const char *a, const char *b)
{
    bool patterns = false;
    do {
        const char *x = a, *y = b;
        size_t n = skip_keys(&a, patterns);
        if (skip_keys(&b, patterns) != n || strncasecmp(x, y, n))
            return false;
        patterns = true;
    } while (*a && *b);
    return !*a && !*b;
}

/* ---- of a model ---- */

static lm_code place(const lm_groups *g, lm_update_tensor *t, int n, lm_err *e)
{
    int count[LM_GROUPS] = { 0 };
    for (int i = 0; i < n; i++)
        count[t[i].use = group_of(g, &t[i])]++;
    for (int k = 1; k < g->n; k++)
        if (!count[k])
            return lm_fail(e, LM_EUSAGE, where, "see the names with inspect-model",
                           "no trainable tensor is left for '%s'", g->pattern[k]);
    return LM_OK;
}

static bool has_low(const lm_model *m)
{
    for (int i = 0; i < m->n_params; i++)
        if (m->param[i].trains && m->graph->value[m->param[i].value].t.dtype == LM_DTYPE_BF16)
            return true;
    return false;
}

lm_code lm_groups_update(const lm_groups *g, const lm_model *m, const lm_update_opts *opts,
                         lm_update **out, lm_err *e)
{
    lm_update_opts o = *opts;
    lm_update_tensor *t = NULL;
    int n = 0;
    *out = NULL;
    o.use = g->use;
    o.n_use = g->n;
    o.block = m->train_end;
    o.trained = m->train_end;
    o.low = has_low(m);
    lm_code rc = lm_update_tensors(m, &t, &n, &o.norm_blocks, e);
    if (!rc)
        rc = place(g, t, n, e);
    if (!rc)
        rc = lm_update_build(&o, t, n, out, e);
    lm_free(t);
    return rc;
}

/* ---- lists ---- */

lm_code lm_optims_table(lm_buf *out, lm_err *e)
{
    for (int i = 0; lm_optim_at(i); i++) {
        const lm_optim *o = lm_optim_at(i);
        const lm_hyper rate = { "lr", o->rate, 0, 1e3, "peak learning rate", NULL };
        if (lm_buf_addf(out, e, "%-16s %s\n", o->name, o->about) ||
            lm_hyper_add_line(&rate, out, e))
            return e->code;
        for (const lm_hyper *h = o->hyper; h->name; h++)
            if (lm_hyper_add_line(h, out, e))
                return e->code;
    }
    return LM_OK;
}

lm_code lm_optims_json(lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    for (int i = 0; lm_optim_at(i); i++) {
        const lm_optim *o = lm_optim_at(i);
        lm_jw_obj(&w, o->name);
        lm_jw_str(&w, "about", o->about);
        lm_jw_f64(&w, "lr", o->rate);
        lm_jw_obj(&w, "hyper");
        for (const lm_hyper *h = o->hyper; h->name; h++)
            lm_hyper_add_json(h, &w);
        lm_jw_close_obj(&w);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}
