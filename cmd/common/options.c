/* SPDX-License-Identifier: Apache-2.0 */
/* options.c -- the option table: common rows, parsing, checking. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "common/frame.h"
#include "graph/backend.h"

lm_frame lm_the_frame = { .progress = true, .history = true };

static lm_frame *const f = &lm_the_frame;

bool lm_option_takes_value(const lm_opt *o)
{
    return o->kind > LM_OPT_FLAG;
}

int lm_option_find(const char *name)
{
    for (int i = 0; i < f->n; i++) {
        if (f->opt[i].kind != LM_OPT_GROUP && !strcmp(f->opt[i].name, name))
            return i;
    }
    return -1;
}

static int find_letter(char c)
{
    for (int i = 0; i < f->n; i++) {
        if (f->opt[i].kind != LM_OPT_GROUP && f->opt[i].letter == c)
            return i;
    }
    return -1;
}

/* A row of the tool replaces a common one of the same name or letter. */
static void add(bool wanted, lm_opt o)
{
    if (wanted && (o.kind == LM_OPT_ALSO || o.kind == LM_OPT_INSTEAD)) {
        lm_alias_add(&o);
        return;
    }
    if (!wanted || (o.kind != LM_OPT_GROUP && lm_option_find(o.name) >= 0))
        return;
    if (f->n == LM_MOST_OPTS)
        abort();
    if (o.letter && find_letter(o.letter) >= 0)
        o.letter = 0;
    f->opt[f->n++] = o;
}

static lm_opt action(char letter, const char *name, const char *help)
{
    return (lm_opt){ LM_OPT_FLAG, letter, name, NULL, NULL, 0, 0, NULL, help };
}

/* Common options without effect in this tool are refused with a reason. */
static void add_missing(unsigned use)
{
    add(!(use & LM_USE_THREADS),
        (lm_opt)LM_INSTEAD("threads num-threads n-threads", "leave it out: one thread is enough"));
    add(!(use & LM_USE_SEED),
        (lm_opt)LM_INSTEAD("seed random-seed", "leave it out: no random numbers are used"));
    add(!(use & LM_USE_JSON),
        (lm_opt)LM_INSTEAD("json", "leave it out: the picture is the only output"));
}

void lm_frame_build(lm_tool *t)
{
    static const char *const devices[] = { "cpu", "cuda", NULL };
    unsigned use = t->use;

    f->name = t->name;
    f->plans = t->plans;
    for (const lm_opt *o = t->opts; o && o->kind != LM_OPT_END; o++)
        add(true, *o);
    add(true, (lm_opt)LM_GROUP("Common"));
    add(use & LM_USE_OUTPUT, (lm_opt)LM_STR('o', "output", &t->output, "PATH", "output"));
    add(use & LM_USE_OUTPUT, (lm_opt)LM_ALSO("output-dir out-dir output-path output-file outfile"));
    add(use & LM_USE_OUTPUT, (lm_opt)LM_FLAG('f', "force", &t->force, "overwrite existing files"));
    add(use & LM_USE_OUTPUT, (lm_opt)LM_ALSO("overwrite overwrite-output-dir"));
    add(use & LM_USE_THREADS,
        (lm_opt)LM_COUNT('j', "threads", &f->threads, "N", 0, 1024, "threads; 0 = every core [0]"));
    add(use & LM_USE_THREADS, (lm_opt)LM_ALSO("num-threads n-threads num-proc num-workers"));
    add(use & LM_USE_SEED,
        (lm_opt)LM_COUNT(0, "seed", &t->seed, "N", 0, 9.2e18, "seed of all randomness [0]"));
    add(use & LM_USE_SEED, (lm_opt)LM_ALSO("random-seed"));
    add(use & LM_USE_JSON, (lm_opt)LM_FLAG(0, "json", &t->json, "write JSON to standard output"));
    add_missing(use);
    add(use & LM_USE_DEVICE, (lm_opt){ LM_OPT_DEVICE, 0, "device", &t->device, "DEV", 0, 0, devices,
                                       "where to compute: cpu, cuda or cuda:N [cpu]" });
    add(use & LM_USE_DEVICE, (lm_opt)LM_ALSO_AS("cuda", "cuda"));
    add(use & LM_USE_HISTORY, (lm_opt)LM_FLAG(0, "history", &f->history,
                                              "record command and inputs in the product [on]"));
    add(use & LM_USE_DRY_RUN,
        (lm_opt)LM_FLAG(0, "dry-run", &t->dry_run, "show the plan, do nothing"));
    add(use & LM_USE_METRICS,
        (lm_opt)LM_STR(0, "metrics", &t->metrics, "DEST", "JSON lines to FILE, - or fd:N"));
    add(true, (lm_opt)LM_STR(0, "config", &f->config, "FILE",
                             t->config_help ? t->config_help : "options from a JSON file"));
    add(true, (lm_opt)LM_FLAG(0, "print-config", &f->print_config, "print the options as JSON"));
    add(true, (lm_opt)LM_FLAG(0, "progress", &f->progress, "progress line [on a terminal]"));
    add(true, action('v', "verbose", "say more (repeatable)"));
    add(true, action('q', "quiet", "say less (repeatable)"));
    add(true, action('h', "help", "this text"));
    add(true, action(0, "version", "name, version, libraries"));
    add(true, (lm_opt)LM_STR(0, "completion", &f->completion, "SHELL", NULL));
}

/* "--steps" or "-n", for messages. */
static const char *shown(const lm_opt *o)
{
    static char text[80];

    snprintf(text, sizeof text, "--%s", o->name);
    return text;
}

static lm_code out_of_range(const lm_opt *o, const char *text, lm_err *e)
{
    char todo[128];

    if (o->max >= 9e18 || isinf(o->max))
        snprintf(todo, sizeof todo, "at least %.15g is needed", o->min);
    else
        snprintf(todo, sizeof todo, "choose from %.15g to %.15g", o->min, o->max);
    return lm_fail(e, LM_EUSAGE, shown(o), todo, "%s is out of range", text);
}

static lm_code bad_value(const lm_opt *o, const char *text, lm_err *e)
{
    static const char *const need[] = {
        [LM_OPT_LEVEL] = "give a whole number",
        [LM_OPT_COUNT] = "give a whole number such as 300, 20k or 1.5M",
        [LM_OPT_BYTES] = "give a size such as 4096, 64K or 2G",
        [LM_OPT_TIME] = "give a time such as 90, 90s, 15m or 2h",
        [LM_OPT_REAL] = "give a number such as 0.1 or 3e-4",
    };

    return lm_fail(e, LM_EUSAGE, shown(o), need[o->kind], "'%s' is not a %s", text,
                   o->kind == LM_OPT_BYTES  ? "size"
                   : o->kind == LM_OPT_TIME ? "time"
                                            : "number");
}

static lm_code set_choice(const lm_opt *o, const char *text, lm_err *e)
{
    char todo[256];
    int n = 0;
    const char *near, *found = lm_choice_find(o->choices, text);

    if (found) {
        *(const char **)o->dst = found;
        return LM_OK;
    }
    near = lm_nearest(text, o->choices);
    if (near)
        n = snprintf(todo, sizeof todo, "did you mean '%s'? ", near);
    n += snprintf(todo + n, sizeof todo - (size_t)n, "choose from");
    for (const char *const *c = o->choices; *c && n < (int)sizeof todo; c++)
        n += snprintf(todo + n, sizeof todo - (size_t)n, "%s %s", c == o->choices ? "" : ",", *c);
    return lm_fail(e, LM_EUSAGE, shown(o), todo, "unknown value '%s'", text);
}

static lm_code set_device(const lm_opt *o, const char *text, lm_err *e)
{
    if (!lm_device_named(text))
        return lm_fail(e, LM_EUSAGE, shown(o), "choose from cpu, cuda, cuda:0, cuda:1, ...",
                       "unknown device '%s'", text);
    *(const char **)o->dst = text;
    return LM_OK;
}

static lm_code append(lm_strs *list, const char *text, lm_err *e)
{
    lm_code rc = lm_realloc_n(&list->v, (size_t)list->n + 1, sizeof *list->v, "options", e);

    if (!rc)
        list->v[list->n++] = text;
    return rc;
}

/* Texts may be empty; names of files and lists may not, because the option would silently have no
 * effect. */
static bool may_be_empty(const lm_opt *o)
{
    return !strcmp(o->value, "TEXT") || !strcmp(o->value, "STRING");
}

static lm_code empty(const lm_opt *o, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, shown(o), "give one, or leave the option out",
                   "the value is empty");
}

lm_code lm_option_set(int i, const char *text, lm_err *e)
{
    const char *known;
    const lm_opt *o = &f->opt[i];
    int64_t n = 0;
    double x = 0;

    switch (o->kind) {
    case LM_OPT_LEVEL:
    case LM_OPT_COUNT:
    case LM_OPT_BYTES:
        if (!(o->kind == LM_OPT_BYTES ? lm_parse_bytes : lm_parse_count)(text, &n))
            return bad_value(o, text, e);
        if ((double)n < o->min || (double)n > o->max)
            return out_of_range(o, text, e);
        *(int64_t *)o->dst = n;
        return LM_OK;
    case LM_OPT_TIME:
    case LM_OPT_REAL:
        if (!(o->kind == LM_OPT_TIME ? lm_parse_seconds : lm_parse_double)(text, &x))
            return bad_value(o, text, e);
        if (x < o->min || x > o->max)
            return out_of_range(o, text, e);
        *(double *)o->dst = x;
        return LM_OK;
    case LM_OPT_CHOICE:
        return set_choice(o, text, e);
    case LM_OPT_DEVICE:
        return set_device(o, text, e);
    case LM_OPT_LIST:
        return *text || may_be_empty(o) ? append(o->dst, text, e) : empty(o, e);
    default:
        if (!*text && !may_be_empty(o))
            return empty(o, e);
        known = o->choices ? lm_choice_find(o->choices, text) : NULL; /* in another spelling */
        *(const char **)o->dst = known ? known : text;
        return LM_OK;
    }
}

/* One option as found on the command line; stored after environment and --config. */
typedef struct {
    int index;
    const char *text; /* NULL for flags */
    bool off;
} given_opt;

typedef struct {
    given_opt *v;
    size_t n, cap;
} given_list;

static lm_code note(given_list *l, int index, const char *text, bool off, lm_err *e)
{
    lm_code rc = lm_grow(&l->v, &l->cap, l->n + 1, sizeof *l->v, "options", e);

    if (!rc)
        l->v[l->n++] = (given_opt){ index, text, off };
    return rc;
}

static lm_code unknown_long(const lm_tool *t, const char *name, lm_err *e)
{
    const char *names[2 * LM_MOST_OPTS + LM_MOST_ALIASES + 1], *near;
    static char negated[LM_MOST_OPTS][48];
    const lm_alias *alias;
    char where[128], todo[128];
    int n = 0;

    for (int i = 0; i < f->n; i++) {
        if (f->opt[i].kind == LM_OPT_GROUP || !f->opt[i].help)
            continue;
        names[n++] = f->opt[i].name;
        if (f->opt[i].kind == LM_OPT_FLAG && f->opt[i].dst) {
            snprintf(negated[i], sizeof negated[i], "no-%s", f->opt[i].name);
            names[n++] = negated[i];
        }
    }
    for (int i = 0; i < f->n_alias; i++)
        names[n++] = f->alias[i].name;
    names[n] = NULL;
    near = lm_nearest(name, names);
    alias = near ? lm_alias_find(near) : NULL;
    if (alias && alias->target >= 0 && !alias->value)
        near = f->opt[alias->target].name;
    snprintf(where, sizeof where, "--%.100s", name);
    if (near)
        snprintf(todo, sizeof todo, "did you mean --%s?", near);
    else
        snprintf(todo, sizeof todo, "see '%s --help'", t->name);
    return lm_fail(e, LM_EUSAGE, where, todo, "unknown option");
}

static lm_code no_value(const lm_opt *o, const char *where, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, where, NULL, "a value is missing (%s)",
                   o->value ? o->value : "VALUE");
}

/* An option as written: the option, and the value that its name implies. */
typedef struct {
    int index;
    bool off;          /* --no-x */
    const char *value; /* value of a flag that sets one; otherwise NULL */
} spelling;

static bool is_flag(int i)
{
    return i >= 0 && f->opt[i].kind == LM_OPT_FLAG && f->opt[i].dst;
}

/* `name` without the dashes in front. */
static lm_code read_name(const lm_tool *t, const char *name, spelling *out, lm_err *e)
{
    char folded[128], where[136];
    const lm_alias *alias;

    lm_option_fold(name, folded, sizeof folded);
    *out = (spelling){ .index = lm_option_find(folded) };
    if (out->index >= 0)
        return LM_OK;
    alias = lm_alias_find(folded);
    if (alias && alias->instead) {
        snprintf(where, sizeof where, "--%.100s", name);
        return lm_fail(e, LM_EUSAGE, where, alias->instead, "unknown option");
    }
    if (alias) {
        *out = (spelling){ .index = alias->target, .value = alias->value };
        return LM_OK;
    }
    if (!strncmp(folded, "no-", 3)) {
        alias = lm_alias_find(folded + 3);
        out->index = alias && !alias->value ? alias->target : lm_option_find(folded + 3);
        out->off = true;
        if (is_flag(out->index))
            return LM_OK;
    }
    return unknown_long(t, name, e);
}

/* argv[*at] starts with "--". */
static lm_code parse_long(const lm_tool *t, int argc, char **argv, int *at, given_list *l,
                          lm_err *e)
{
    char name[128];
    const char *arg = argv[*at] + 2, *value = strchr(arg, '=');
    spelling s;

    snprintf(name, sizeof name, "%.*s", value ? (int)(value - arg) : 127, arg);
    if (read_name(t, name, &s, e))
        return e->code;
    if (!lm_option_takes_value(&f->opt[s.index]) || s.value) {
        char where[136];

        snprintf(where, sizeof where, "--%.100s", name);
        if (value)
            return lm_fail(e, LM_EUSAGE, where, NULL, "takes no value, '%s' was given", value + 1);
        return note(l, s.index, s.value, s.off, e);
    }
    if (!value && *at + 1 >= argc)
        return no_value(&f->opt[s.index], shown(&f->opt[s.index]), e);
    return note(l, s.index, value ? value + 1 : argv[++*at], false, e);
}

/* The option that "-19" and "-f19" set; -1 if `digits` are not a number or the tool has no such
 * option. */
static int find_level(const char *digits)
{
    if (strspn(digits, "0123456789") != strlen(digits))
        return -1;
    for (int i = 0; i < f->n; i++) {
        if (f->opt[i].kind == LM_OPT_LEVEL)
            return i;
    }
    return -1;
}

/* The option of a letter or of an alias letter. */
static int find_letter_or_alias(const lm_tool *t, char c)
{
    int i = find_letter(c);

    for (const char *a = t->alias; i < 0 && a && a[0] && a[1]; a += 2) {
        if (*a == c)
            i = find_letter(a[1]);
    }
    return i;
}

/* argv[*at] is "-abc" or "-nVALUE" or "-n" with the value behind it. */
static lm_code parse_short(const lm_tool *t, int argc, char **argv, int *at, given_list *l,
                           lm_err *e)
{
    lm_code rc = LM_OK;

    for (const char *c = argv[*at] + 1; *c && !rc; c++) {
        char where[3] = { '-', *c, 0 };
        int level = find_level(c), i = find_letter_or_alias(t, *c);

        if (level >= 0)
            return note(l, level, c, false, e);
        if (i < 0) {
            const lm_alias *none = *c == 'j' ? lm_alias_find("threads") : NULL;
            char todo[128];

            snprintf(todo, sizeof todo, "see '%s --help'", t->name);
            return lm_fail(e, LM_EUSAGE, where, none ? none->instead : todo, "unknown option");
        }
        if (!lm_option_takes_value(&f->opt[i])) {
            rc = note(l, i, NULL, false, e);
            continue;
        }
        if (c[1])
            return note(l, i, c + 1, false, e);
        if (*at + 1 >= argc)
            return no_value(&f->opt[i], where, e);
        return note(l, i, argv[++*at], false, e);
    }
    return rc;
}

/* True if this option does not affect the product.  The history leaves it out, so that the bytes do
 * not depend on the output's name, the number of threads or the verbosity. */
static bool is_silent(const lm_tool *t, const lm_opt *o)
{
    const void *const silent[] = { &f->threads, &f->progress, &f->history, &t->output,
                                   &t->metrics, &t->force,    &t->json };

    for (size_t i = 0; i < sizeof silent / sizeof *silent; i++)
        if (o->dst == silent[i])
            return true;
    for (const char *const *side = t->side; side && *side; side++)
        if (!strcmp(o->name, *side))
            return true;
    return !o->dst && (!strcmp(o->name, "verbose") || !strcmp(o->name, "quiet"));
}

static lm_code tell_word(lm_tool *t, const char *word, lm_err *e)
{
    char *copy = NULL;
    lm_code rc =
        lm_realloc_n(&t->told_argv, (size_t)t->told_argc + 1, sizeof *t->told_argv, "history", e);

    if (!rc)
        rc = lm_strdup(&copy, word, e);
    if (!rc)
        t->told_argv[t->told_argc++] = copy;
    return rc;
}

/* "--x" and, unless NULL, its value. */
static lm_code tell_option(lm_tool *t, const lm_opt *o, bool off, const char *value, lm_err *e)
{
    char name[80];
    lm_code rc;

    snprintf(name, sizeof name, "--%s%s", off ? "no-" : "", o->name);
    rc = tell_word(t, name, e);
    return rc || !value ? rc : tell_word(t, value, e);
}

static lm_code tell_given(lm_tool *t, const lm_opt *o, lm_err *e)
{
    const lm_strs *list = o->dst;
    char number[40];
    lm_code rc = LM_OK;

    switch (o->kind) {
    case LM_OPT_FLAG:
        return tell_option(t, o, !*(bool *)o->dst, NULL, e);
    case LM_OPT_LIST:
        for (int i = 0; i < list->n && !rc; i++)
            rc = tell_option(t, o, false, list->v[i], e);
        return rc;
    case LM_OPT_COUNT:
    case LM_OPT_BYTES:
    case LM_OPT_LEVEL:
        snprintf(number, sizeof number, "%" PRId64, *(int64_t *)o->dst);
        return tell_option(t, o, false, number, e);
    case LM_OPT_TIME:
    case LM_OPT_REAL:
        for (int digits = 15; digits <= 17; digits++) {
            double back;
            snprintf(number, sizeof number, "%.*g", digits, *(double *)o->dst);
            if (lm_parse_double(number, &back) && back == *(double *)o->dst)
                break;
        }
        return tell_option(t, o, false, number, e);
    default:
        return tell_option(t, o, false, *(const char **)o->dst, e);
    }
}

/* The given options that affect the product, by name in the order of the table, then the operands:
 * the same for options from the command line and from --config. */
static lm_code record_options(lm_tool *t, const bool told[], lm_err *e)
{
    lm_code rc = tell_word(t, t->full_argv[0], e);

    for (int i = 0; i < f->n && !rc; i++) {
        const lm_opt *o = &f->opt[i];

        if (told[i] && o->dst && o->help && o->dst != &f->config && o->dst != &f->print_config &&
            !is_silent(t, o))
            rc = tell_given(t, o, e);
    }
    if (!rc && t->config)
        rc = tell_word(t, "--config", e);
    if (!rc && t->config)
        rc = tell_word(t, t->config, e);
    for (int i = 0; i < t->argc && !rc; i++)
        rc = tell_word(t, t->argv[i], e);
    return rc;
}

lm_code lm_tell_too(lm_tool *t, const char *const *names, lm_err *e)
{
    bool told[LM_MOST_OPTS];

    memcpy(told, f->given, sizeof told);
    for (; *names; names++)
        if (lm_option_find(*names) >= 0)
            told[lm_option_find(*names)] = true;
    while (t->told_argc)
        lm_free(t->told_argv[--t->told_argc]);
    return record_options(t, told, e);
}

/* Split options to *l and operands to t->argv; they may come in any order. */
static lm_code split(lm_tool *t, int argc, char **argv, given_list *l, lm_err *e)
{
    lm_code rc = lm_alloc_n(&t->argv, (size_t)argc + 2, sizeof *t->argv, "operands", e);
    bool ended = false;

    for (int i = 1; i < argc && !rc; i++) {
        if (!ended && !strcmp(argv[i], "--"))
            ended = true;
        else if (!ended && !strncmp(argv[i], "--", 2))
            rc = parse_long(t, argc, argv, &i, l, e);
        else if (!ended && argv[i][0] == '-' && argv[i][1] &&
                 !strchr(":+", argv[i][1])) /* "-:0.4", "-+lora": operands */
            rc = parse_short(t, argc, argv, &i, l, e);
        else
            t->argv[t->argc++] = argv[i];
    }
    return rc;
}

/* -q and -v never select warnings without the closing summary: only LM_LOG does. */
static int steps_up(int verbosity)
{
    return verbosity == LM_LOG_ERROR ? 2 : verbosity < LM_LOG_DEBUG;
}

static int steps_down(int verbosity)
{
    return verbosity == LM_LOG_NOTICE ? 2 : verbosity > 0;
}

static lm_code apply_action(lm_tool *t, const lm_opt *o)
{
    if (!strcmp(o->name, "verbose"))
        t->verbosity += steps_up(t->verbosity);
    else if (!strcmp(o->name, "quiet"))
        t->verbosity -= steps_down(t->verbosity);
    else if (!strcmp(o->name, "help"))
        f->help = true;
    else
        f->version = true;
    return LM_OK;
}

static lm_code apply(lm_tool *t, const given_opt *g, bool *fresh, lm_err *e)
{
    const lm_opt *o = &f->opt[g->index];

    f->given[g->index] = true;
    if (o->kind == LM_OPT_LIST && !fresh[g->index]) { /* replaces the value of --config */
        ((lm_strs *)o->dst)->n = 0;
        fresh[g->index] = true;
    }
    if (lm_option_takes_value(o))
        return lm_option_set(g->index, g->text, e);
    if (!o->dst)
        return apply_action(t, o);
    *(bool *)o->dst = !g->off;
    return LM_OK;
}

static lm_code read_level(lm_tool *t, lm_err *e)
{
    static const char *const names[] = { "none", "error", "warn", "notice", "info", "debug", NULL };
    const char *s = getenv("LM_LOG");

    if (!s || !*s)
        return LM_OK;
    for (int i = 0; names[i]; i++) {
        if (!strcmp(s, names[i])) {
            t->verbosity = i;
            return LM_OK;
        }
    }
    return lm_fail(e, LM_EUSAGE, "LM_LOG", "choose from none, error, warn, notice, info, debug",
                   "unknown level '%s'", s);
}

static lm_code read_variable(const char *name, const char *option, lm_err *e)
{
    const char *s = getenv(name);
    int i = lm_option_find(option);
    lm_code rc = s && *s && i >= 0 ? lm_option_set(i, s, e) : LM_OK;

    if (rc)
        lm_err_in(e, "%s", name);
    return rc;
}

static lm_code read_environment(lm_tool *t, lm_err *e)
{
    const char *cpu = getenv("LM_CPU"), *tmp = getenv("LM_TMPDIR");
    lm_code rc = read_level(t, e);

    rc = rc ? rc : read_variable("LM_THREADS", "threads", e);
    rc = rc ? rc : read_variable("LM_DEVICE", "device", e);
    t->tmpdir = tmp && *tmp ? tmp : NULL;
    t->cpu = lm_cpu_detect();
    if (!rc && cpu && *cpu)
        rc = lm_cpu_level_parse(cpu, &t->cpu, e);
    return rc;
}

static lm_code save_built_in(json_t **out, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_options_save(&text, e);

    if (!rc)
        rc = lm_json_parse(text.data, text.len, "options", out, e);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_options_parse(lm_tool *t, lm_err *e)
{
    static bool fresh[LM_MOST_OPTS];
    given_list l = { 0 };
    json_t *built_in = NULL;
    lm_code rc = split(t, t->full_argc, t->full_argv, &l, e);
    int config = lm_option_find("config"), progress = lm_option_find("progress");
    const int planned = t->plans ? lm_option_find("plan") : -1;

    for (size_t i = 0; i < l.n && !rc; i++) { /* these need no valid operands */
        const lm_opt *o = &f->opt[l.v[i].index];

        if (!o->dst && (!strcmp(o->name, "help") || !strcmp(o->name, "version"))) {
            rc = apply_action(t, o);
            goto done;
        }
        if (l.v[i].index == config || l.v[i].index == planned)
            rc = lm_option_set(l.v[i].index, l.v[i].text, e);
    }
    if (!rc && f->config)
        rc = save_built_in(&built_in, e);
    rc = rc ? rc : read_environment(t, e);
    if (!rc && f->config && t->takes_config && t->takes_config(f->config))
        t->config = f->config;
    else if (!rc && f->config)
        rc = lm_options_read(t, f->config, built_in, e);
    const char *plan = planned < 0 ? NULL : *(const char **)f->opt[planned].dst;
    if (!rc && plan)
        rc = lm_options_read_plan(t, plan, e);
    for (size_t i = 0; i < l.n && !rc; i++)
        rc = apply(t, &l.v[i], fresh, e);
    f->progress_given = f->given[progress];
    t->threads = f->threads ? (int)f->threads : lm_cpu_count();
    t->seed_given = lm_given(t, "seed");
    rc = rc ? rc : record_options(t, f->given, e);
    /* an existing folder is not overwritten as such: tools check the files in it */
    if (!rc && f->config)
        lm_refuse_same(t, t->output && lm_path_is_dir(t->output) ? "-" : t->output, f->config);
    if (!rc && plan)
        lm_refuse_same(t, t->output && lm_path_is_dir(t->output) ? "-" : t->output, plan);
done:
    json_decref(built_in);
    lm_free(l.v);
    return rc;
}

bool lm_given(const lm_tool *t, const char *name)
{
    int i = lm_option_find(name);

    (void)t;
    return i >= 0 && f->given[i];
}

const char *lm_given_besides(const lm_tool *t, const char *const *names)
{
    (void)t;
    for (int i = 0; i < f->n; i++) {
        bool among = !f->given[i] || !f->opt[i].dst;

        for (const char *const *name = names; !among && *name; name++)
            among = !strcmp(*name, f->opt[i].name);
        if (!among)
            return f->opt[i].name;
    }
    return NULL;
}
