/* SPDX-License-Identifier: Apache-2.0 */
/* loss.c -- the table of losses, and sums of them as text. */
#include "tune/align/loss.h"

#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "tune/align/loss_impl.h"

static const lm_align_loss *const table[] = {
    &lm_loss_dpo,      &lm_loss_robust,
    &lm_loss_hinge,    &lm_loss_ipo,
    &lm_loss_exo_pair, &lm_loss_nca_pair,
    &lm_loss_bco_pair, &lm_loss_sppo_hard,
    &lm_loss_aot,      &lm_loss_aot_unpaired,
    &lm_loss_apo_zero, &lm_loss_apo_down,
    &lm_loss_discopop, &lm_loss_sigmoid_norm,
    &lm_loss_sft,      &lm_loss_orpo,
    &lm_loss_cpo,      &lm_loss_cpo_hinge,
    &lm_loss_cpo_ipo,  &lm_loss_simpo,
    &lm_loss_kto,      &lm_loss_apo_zero_unpaired,
    &lm_loss_reward,   &lm_loss_grpo,
    &lm_loss_bnpo,     &lm_loss_dapo,
    &lm_loss_dr_grpo,  &lm_loss_luspo,
    &lm_loss_cispo,    &lm_loss_sapo,
    &lm_loss_vespo,    &lm_loss_gmpo,
    &lm_loss_rloo,     &lm_loss_ppo,
    &lm_loss_reject,   &lm_loss_gkd,
};
enum { LOSSES = sizeof table / sizeof *table };

/* Other names, with hyper-parameters that differ from the loss's defaults. */
static const struct {
    const char *name, *loss, *settings;
} alias[] = {
    { "sigmoid", "dpo", "" },
    { "cdpo", "dpo", "label_smoothing=0.1" },
    { "exo", "exo_pair", "" },
    { "slic", "hinge", "" },
    { "nca", "nca_pair", "" },
    { "bco", "bco_pair", "" },
    { "sppo", "sppo_hard", "" },
    { "alphapo", "simpo", "alpha=0.25" },
    { "raft", "reject", "" },
    { "best_of_n", "reject", "" },
    { "gspo", "grpo",
      "mean=sequences,importance_sampling_level=sequence,epsilon=3e-4,epsilon_high=4e-4" },
};
enum { ALIASES = sizeof alias / sizeof *alias };

const lm_align_loss *const *lm_align_losses(int *n)
{
    *n = LOSSES;
    return table;
}

static const lm_align_loss *find_loss(const char *name)
{
    for (int i = 0; i < LOSSES; i++)
        if (strcmp(table[i]->name, name) == 0)
            return table[i];
    return NULL;
}

static int find_alias(const char *name)
{
    for (int i = 0; i < ALIASES; i++)
        if (strcmp(alias[i].name, name) == 0)
            return i;
    return -1;
}

const lm_align_loss *lm_align_find(const char *name)
{
    int i = find_alias(name);
    return find_loss(i < 0 ? name : alias[i].loss);
}

/* ---- text ---- */

static const char see_list[] = "list the losses to see all";

static lm_code fail_name(const char *name, lm_err *e)
{
    const char *names[LOSSES + ALIASES + 1] = { NULL };
    char todo[96];
    for (int i = 0; i < LOSSES; i++)
        names[i] = table[i]->name;
    for (int i = 0; i < ALIASES; i++)
        names[LOSSES + i] = alias[i].name;
    const char *near = lm_nearest(name, names);
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    return lm_fail(e, LM_EUSAGE, "loss", near ? todo : see_list, "unknown loss '%s'", name);
}

/* "key=value,..." up to an end of `ends`. */
static lm_code read_hyper(const char **at, const char *ends, lm_align_use *u, lm_err *e)
{
    const lm_align_loss *l = u->loss;
    lm_hyper_text kv;
    while (**at && !strchr(ends, **at)) {
        if (lm_hyper_next(at, ends, "loss", l->name, &kv, e))
            return e->code;
        int i = lm_hyper_find(l->hyper, kv.key);
        if (i < 0)
            return lm_hyper_fail(l->hyper, "loss", l->name, "", kv.key, e);
        if (lm_hyper_set(&l->hyper[i], "loss", l->name, kv.value, &u->hyper[i], e))
            return e->code;
        *at += **at == ',';
    }
    return LM_OK;
}

static lm_code set_loss(const char *name, lm_align_use *u, lm_err *e)
{
    int i = find_alias(name);
    u->loss = lm_align_find(name);
    if (!u->loss)
        return fail_name(name, e);
    for (int k = 0; u->loss->hyper[k].name; k++)
        u->hyper[k] = u->loss->hyper[k].value;
    const char *settings = i < 0 ? "" : alias[i].settings;
    return read_hyper(&settings, "", u, e);
}

/* "[WEIGHT*]NAME[:key=value,...]"; *at then is at '+' or the end.  A '+' in a value's exponent
 * belongs to the value. */
static lm_code read_use(const char **at, lm_align_use *u, lm_err *e)
{
    char name[64];
    char *end;
    u->weight = strtod(*at, &end);
    if (end > *at && *end == '*')
        *at = end + 1;
    else
        u->weight = 1;
    size_t n = strcspn(*at, ":+");
    if (!(u->weight > 0) || isinf(u->weight))
        return lm_fail(e, LM_EUSAGE, "loss", "give it a weight above 0", "a weight of %g",
                       u->weight);
    if (n >= sizeof name)
        return lm_fail(e, LM_EUSAGE, "loss", see_list, "a name of %zu characters", n);
    memcpy(name, *at, n);
    name[n] = '\0';
    *at += n;
    if (set_loss(name, u, e))
        return e->code;
    *at += **at == ':';
    return read_hyper(at, "+", u, e);
}

static lm_code check_uses(const lm_align_spec *s, lm_err *e)
{
    for (int i = 0; i < s->n; i++) {
        const lm_align_use *u = &s->use[i];
        if (u->loss->kind != s->use[0].loss->kind)
            return lm_fail(e, LM_EUSAGE, "loss", "train them one after the other",
                           "%s and %s need different data", s->use[0].loss->name, u->loss->name);
        if (u->loss->check && u->loss->check(u, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_align_parse(const char *text, lm_align_spec *out, lm_err *e)
{
    *out = (lm_align_spec){ .n = 0 };
    for (const char *at = text;; at++) {
        if (out->n == LM_ALIGN_MOST_USES)
            return lm_fail(e, LM_EUSAGE, "loss", "leave some out", "more than %d losses",
                           LM_ALIGN_MOST_USES);
        if (read_use(&at, &out->use[out->n++], e))
            return e->code;
        if (*at != '+')
            return check_uses(out, e);
    }
}

lm_code lm_align_set(lm_align_spec *s, const char *key, const char *value, lm_err *e)
{
    bool any = false;
    for (int i = 0; i < s->n; i++) {
        lm_align_use *u = &s->use[i];
        int k = lm_hyper_find(u->loss->hyper, key);
        if (k < 0)
            continue;
        if (lm_hyper_set(&u->loss->hyper[k], "loss", u->loss->name, value, &u->hyper[k], e))
            return e->code;
        any = true;
    }
    return any ? check_uses(s, e)
               : lm_hyper_fail(s->use[0].loss->hyper, "loss", s->use[0].loss->name, "", key, e);
}

void lm_align_bound_length(lm_align_spec *s, int64_t most_new)
{
    for (int i = 0; i < s->n; i++) {
        const int k = lm_hyper_find(s->use[i].loss->hyper, LM_ALIGN_LENGTH);
        if (k >= 0 && s->use[i].hyper[k] < 1)
            s->use[i].hyper[k] = (double)most_new;
    }
}

double lm_align_hyper(const lm_align_spec *s, const char *key, double none)
{
    for (int i = 0; i < s->n; i++)
        if (lm_hyper_find(s->use[i].loss->hyper, key) >= 0)
            return lm_align_get(&s->use[i], key, none);
    return none;
}

lm_code lm_align_show(const lm_align_spec *s, lm_buf *out, lm_err *e)
{
    char text[64];
    for (int i = 0; i < s->n; i++) {
        const lm_align_use *u = &s->use[i];
        if (i && lm_buf_addf(out, e, "+"))
            return e->code;
        if (u->weight != 1 && lm_buf_addf(out, e, "%.17g*", u->weight))
            return e->code;
        if (lm_buf_addf(out, e, "%s", u->loss->name))
            return e->code;
        for (int k = 0; u->loss->hyper[k].name; k++) {
            lm_hyper_show(&u->loss->hyper[k], u->hyper[k], text);
            if (lm_buf_addf(out, e, "%c%s=%s", k ? ',' : ':', u->loss->hyper[k].name, text))
                return e->code;
        }
    }
    return LM_OK;
}

lm_code lm_align_list(bool hypers, lm_buf *out, lm_err *e)
{
    for (int i = 0; i < LOSSES; i++) {
        const lm_align_loss *l = table[i];
        if (lm_buf_addf(out, e, "%-18s %s (%s)\n", l->name, l->about, l->paper))
            return e->code;
        for (int k = 0; hypers && l->hyper[k].name; k++)
            if (lm_hyper_add_line(&l->hyper[k], out, e))
                return e->code;
    }
    for (int i = 0; i < ALIASES; i++)
        if (lm_buf_addf(out, e, "%-18s %s%s%s\n", alias[i].name, alias[i].loss,
                        *alias[i].settings ? ":" : "", alias[i].settings))
            return e->code;
    return LM_OK;
}

static void add_loss(const lm_align_loss *l, lm_jw *w)
{
    static const char *const from[] = { [LM_ALIGN_PAIRS] = "pairs",
                                        [LM_ALIGN_UNPAIRED] = "judged answers",
                                        [LM_ALIGN_SCORES] = "pairs",
                                        [LM_ALIGN_POLICY] = "rewards",
                                        [LM_ALIGN_TEACHER] = "a teacher" };
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "name", l->name);
    lm_jw_str(w, "about", l->about);
    lm_jw_str(w, "paper", l->paper);
    lm_jw_str(w, "learns_from", from[l->kind]);
    lm_jw_f64(w, "lr", l->rate);
    lm_jw_obj(w, "keys");
    for (const lm_hyper *h = l->hyper; h->name; h++)
        lm_hyper_add_json(h, w);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

lm_code lm_align_list_json(lm_buf *out, lm_err *e)
{
    char text[128];
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_arr(&w, NULL);
    for (int i = 0; i < LOSSES; i++)
        add_loss(table[i], &w);
    for (int i = 0; i < ALIASES; i++) {
        snprintf(text, sizeof text, "%s%s%s", alias[i].loss, *alias[i].settings ? ":" : "",
                 alias[i].settings);
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "name", alias[i].name);
        lm_jw_str(&w, "loss", text);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    return lm_jw_end(&w);
}

/* ---- running ---- */

lm_align_kind lm_align_kind_of(const lm_align_spec *s)
{
    return s->use[0].loss->kind;
}

bool lm_align_reads_ref(const lm_align_spec *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->use[i].loss->reads_ref && s->use[i].loss->reads_ref(&s->use[i]))
            return true;
    return false;
}

bool lm_align_mismatches(const lm_align_spec *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->use[i].loss->mismatches)
            return true;
    return false;
}

bool lm_align_whole(const lm_align_spec *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->use[i].loss->whole)
            return true;
    return false;
}

bool lm_align_values(const lm_align_spec *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->use[i].loss->values)
            return true;
    return false;
}

bool lm_align_keeps(const lm_align_spec *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->use[i].loss->keeps)
            return true;
    return false;
}

lm_entropy lm_align_entropy(const lm_align_spec *s)
{
    lm_entropy is = LM_ENTROPY_READ;
    for (int i = 0; i < s->n; i++) {
        if (lm_align_get(&s->use[i], "use_weighting", 0) != 0)
            return LM_ENTROPY_COLLISION;
        if (lm_align_get(&s->use[i], "entropy_coef", 0) != 0)
            is = LM_ENTROPY_TRAINS;
    }
    return is;
}

static void clear(lm_align_batch *b)
{
    for (int64_t i = 0; i < b->n; i++) {
        lm_align_seq *q = &b->seq[i];
        for (int64_t t = 0; q->dlogp && t < q->n; t++)
            q->dlogp[t] = 0;
        for (int64_t t = 0; q->dvalue && t < q->n; t++)
            q->dvalue[t] = 0;
        for (int64_t t = 0; q->dentropy && t < q->n; t++)
            q->dentropy[t] = 0;
        q->dscore = 0;
    }
}

lm_code lm_align_run(const lm_align_spec *s, lm_align_batch *b, lm_err *e)
{
    lm_align_counts own = { 0 };
    lm_align_batch all = *b;
    lm_align_kind kind = lm_align_kind_of(s);
    if ((kind == LM_ALIGN_PAIRS || kind == LM_ALIGN_SCORES) && b->n % 2)
        return lm_fail(e, LM_EUSAGE, "loss", "give both sequences of each pair",
                       "%lld sequences are not pairs", (long long)b->n);
    clear(b);
    if (!all.counts) {
        lm_align_count(b->seq, b->n, &own);
        all.counts = &own;
    }
    for (int i = 0; i < s->n; i++) {
        lm_align_metrics none = { .n = 0 };
        all.metrics = i ? &none : b->metrics; /* the first loss's; the others' would count again */
        if (s->use[i].loss->run(&s->use[i], &all, e))
            return e->code;
    }
    b->loss = all.loss;
    lm_align_note_entropy(b);
    return LM_OK;
}
