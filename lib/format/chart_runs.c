/* SPDX-License-Identifier: Apache-2.0 */
/* chart_runs.c -- see chart_runs.h. */
#include "format/chart_runs.h"

#include <math.h>
#include <string.h>

#include "base/buf.h"
#include "base/file.h"
#include "format/chart_canvas.h"

/* The column of s for the x axis. */
static lm_code pick_x(const lm_run_chart *r, const lm_series *s, lm_arena *a, const double **out,
                      lm_err *e)
{
    double *count;
    size_t with = 0;
    lm_code rc;

    *out = !strcmp(r->x, "tokens") ? s->tokens : !strcmp(r->x, "seconds") ? s->seconds : s->step;
    for (size_t i = 0; i < s->n; i++)
        with += !isnan(s->step[i]);
    if (*out != s->step || with > 0)
        return LM_OK;
    rc = lm_arena_alloc(a, &count, s->n, sizeof *count, e);
    for (size_t i = 0; !rc && i < s->n; i++)
        count[i] = (double)(i + 1);
    *out = rc ? NULL : count;
    return rc;
}

static const lm_series *find_series(const lm_run_chart *r, int run, const char *event,
                                    const char *key)
{
    return r->file[run] ? lm_metrics_file_series(r->file[run], event, key) : NULL;
}

/* Add a line for the "step" records of one run; with smoothing, the raw values before it. */
static lm_code add_steps(const lm_run_chart *r, lm_chart_panel *panel, lm_chart_line *line, int run,
                         const char *name, lm_arena *a, lm_err *e)
{
    const lm_series *s = find_series(r, run, "step", panel->label);
    lm_chart_line l = { .name = name, .color = run };
    double *y;
    lm_code rc = LM_OK;

    if (s) {
        rc = pick_x(r, s, a, &l.x, e);
        l.y = s->value;
        l.n = s->n;
    }
    /* a schedule has no noise: it is not smoothed */
    if (!rc && s && r->smooth > 0 && strcmp(panel->label, "lr") != 0) {
        line[panel->n] = l;
        line[panel->n].name = NULL;
        line[panel->n++].style = LM_LINE_FAINT;
        rc = lm_arena_alloc(a, &y, s->n, sizeof *y, e);
        if (rc)
            return rc;
        lm_chart_smooth(y, s->value, s->n, r->smooth);
        l.y = y;
    }
    line[panel->n++] = l; /* also without points: the legend names every run */
    return rc;
}

static lm_code add_evals(const lm_run_chart *r, lm_chart_panel *panel, lm_chart_line *line, int run,
                         const char *name, lm_arena *a, lm_err *e)
{
    const lm_series *s = find_series(r, run, "eval", panel->label);
    lm_chart_line l = { .name = name, .color = run, .style = LM_LINE_MARKS };
    lm_code rc;

    if (!s)
        return LM_OK;
    rc = pick_x(r, s, a, &l.x, e);
    l.y = s->value;
    l.n = s->n;
    line[panel->n++] = l;
    return rc;
}

/* True if a run has evaluations of the quantity of the first panel: only then the legend explains
 * them. */
static bool has_evals(const lm_run_chart *r)
{
    for (int i = 0; r->eval && i < r->runs; i++)
        if (find_series(r, i, "eval", r->key[0]))
            return true;
    return false;
}

static lm_code make_panel(const lm_run_chart *r, int k, lm_arena *a, lm_chart_panel *panel,
                          lm_err *e)
{
    bool marks = has_evals(r), named = false;
    lm_chart_line *line;
    lm_code rc = lm_arena_alloc(a, &line, 3 * (size_t)r->runs, sizeof *line, e);

    *panel = (lm_chart_panel){ .label = r->key[k], .log_y = r->log_y, .line = line };
    for (int i = 0; !rc && i < r->runs; i++) {
        const char *name = k > 0 ? NULL : r->runs > 1 ? r->name[i] : marks ? "training" : NULL;

        rc = add_steps(r, panel, line, i, name, a, e);
    }
    for (int i = 0; !rc && r->eval && i < r->runs; i++) {
        const char *name = k > 0 || named ? NULL : r->runs > 1 ? "evaluations" : "evaluation";

        named |= find_series(r, i, "eval", r->key[k]) != NULL;
        rc = add_evals(r, panel, line, i, name, a, e);
    }
    return rc;
}

lm_code lm_run_chart_make(const lm_run_chart *r, lm_arena *a, lm_chart *out, lm_err *e)
{
    lm_chart_panel *panel;
    lm_code rc = lm_arena_alloc(a, &panel, (size_t)r->keys, sizeof *panel, e);

    for (int k = 0; !rc && k < r->keys; k++)
        rc = make_panel(r, k, a, &panel[k], e);
    if (rc)
        return rc;
    *out = (lm_chart){ .title = r->title       ? r->title
                                : r->runs == 1 ? r->name[0]
                                               : NULL,
                       .x_label = r->x,
                       .x_kind = strcmp(r->x, "seconds") ? LM_AXIS_COUNT : LM_AXIS_TIME,
                       .log_x = r->log_x,
                       .panel = panel,
                       .n = (size_t)r->keys };
    return LM_OK;
}

/* True if a run has a point for this key that can be drawn; *has_key: it has at least the key. */
static bool has_points(const lm_run_chart *r, const char *key, bool *has_key)
{
    bool any = false, by_step = !strcmp(r->x, "step");

    *has_key = false;
    for (int i = 0; i < 2 * r->runs; i++) {
        const lm_series *s = find_series(r, i / 2, i % 2 ? "eval" : "step", key);
        const double *x;

        if (!s || (i % 2 && !r->eval))
            continue;
        *has_key = true;
        x = strcmp(r->x, "tokens") ? s->seconds : s->tokens;
        for (size_t k = 0; k < s->n; k++)
            any |= (by_step || (isfinite(x[k]) && !(r->log_x && x[k] <= 0))) &&
                   isfinite(s->value[k]) && !(r->log_y && s->value[k] <= 0);
    }
    return any;
}

const char *lm_run_chart_usual(const lm_run_chart *r)
{
    static const char *const usual[] = { "reward", "rewards/margins", "margin" };

    for (size_t k = 0; k < sizeof usual / sizeof *usual; k++) {
        int with = 0, without = 0;

        for (int i = 0; i < r->runs; i++) {
            lm_run_chart one = *r;
            bool has_key;

            if (!r->file[i] || !lm_metrics_file_nth(r->file[i], 0))
                continue; /* nothing read yet */
            one.file = &r->file[i];
            one.runs = 1;
            if (has_points(&one, usual[k], &has_key))
                with++;
            else
                without++;
        }
        if (with > 0 && without == 0)
            return usual[k];
    }
    return "loss";
}

/* The keys to choose from, each once, in at most `room` bytes: whole names, then the number of the
 * others. */
static void list_keys(const lm_run_chart *r, size_t room, lm_buf *out, lm_err *e)
{
    enum { MOST = 48, TAIL = sizeof ", and 48 more" };
    const char *seen[MOST] = { "step" };
    char clean[64];
    int n = 1, more = 0;

    for (int i = 0; i < r->runs; i++) {
        const lm_series *s;
        for (size_t k = 0; r->file[i] && (s = lm_metrics_file_nth(r->file[i], k)) != NULL; k++) {
            bool known = n == MOST;
            for (int j = 0; j < n; j++)
                known |= !strcmp(seen[j], s->key);
            if (known)
                continue;
            seen[n++] = s->key;
            lm_chart_clean(clean, sizeof clean, s->key);
            if (more > 0 || (out->len > 0 && out->len + strlen(clean) + TAIL > room))
                more++;
            else if (lm_buf_addf(out, e, "%s%s", out->len ? ", " : "", clean))
                return;
        }
    }
    if (more > 0)
        (void)lm_buf_addf(out, e, ", and %d more", more);
}

lm_code lm_run_chart_check(const lm_run_chart *r, lm_err *e)
{
    for (int k = 0; k < r->keys; k++) {
        const char *where = r->runs == 1 && r->file[0]
                                ? lm_path_shown(lm_metrics_file_path(r->file[0]))
                                : "metrics files";
        lm_buf keys = { 0 };
        size_t room;
        bool has_key;
        lm_code rc;

        if (has_points(r, r->key[k], &has_key))
            continue;
        if (has_key)
            return lm_fail(e, LM_EFORMAT, where, "choose other axes",
                           "no record has a finite%s '%s' and a '%s'", r->log_y ? " positive" : "",
                           r->key[k], r->x);
        room = sizeof e->what - sizeof "no record has ''; the keys are ";
        room -= strlen(r->key[k]) < room ? strlen(r->key[k]) : room;
        list_keys(r, room, &keys, e);
        rc = keys.len ? lm_fail(e, LM_EFORMAT, where, "choose one of these",
                                "no record has '%s'; the keys are %s", r->key[k], keys.data)
                      : lm_fail(e, LM_EFORMAT, where, "give the metrics that train wrote",
                                "no record with numbers in it");
        lm_buf_fini(&keys);
        return rc;
    }
    return LM_OK;
}
