/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_file.c -- pipeline schedules as text: a line for each rank, cells of stage, kind and micro-batch. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "parallel/pipeline_impl.h"

typedef struct {
    const char *where;
    size_t line; /* from 1 */
    lm_pipeline *p;
    size_t cap; /* room of the line's row */
} reader;

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* Read a number of at most `most` at *at; -1 without digits, and for a larger number. */
static int32_t read_number(const char **at, const char *end, int32_t most)
{
    int64_t n = 0;
    const char *from = *at;

    while (*at < end && **at >= '0' && **at <= '9' && n <= most)
        n = 10 * n + *(*at)++ - '0';
    return *at > from && n <= most ? (int32_t)n : -1;
}

static lm_code fail_cell(const reader *r, const char *cell, const char *end, lm_err *e)
{
    int n = end - cell < 40 ? (int)(end - cell) : 40;
    return lm_fail(e, LM_EFORMAT, r->where, "write stage, F, B, I or W, and micro-batch: 3F0",
                   "line %zu: '%.*s' is not a step", r->line, n, cell);
}

/* True for an action that follows from the others: communication, and gathering and releasing of weights. */
static bool is_other(const char *at, const char *end)
{
    static const char *const names[] = { "UNSHARD",         "RESHARD",     "SEND_F",
                                         "RECV_F",          "SEND_B",      "RECV_B",
                                         "WAIT_SEND_F",     "WAIT_SEND_B", "REDUCE_GRAD",
                                         "WAIT_REDUCE_GRAD" };

    while (end > at && end[-1] >= '0' && end[-1] <= '9')
        end--;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == (size_t)(end - at) && !memcmp(names[i], at, (size_t)(end - at)))
            return true;
    return false;
}

/* "3F0" in at..end. */
static lm_code read_step(reader *r, const char *at, const char *end, bool joined, lm_err *e)
{
    static const char letters[] = "FBIW";
    const char *cell = at;
    lm_pipe_row *row = &r->p->row[r->p->ranks - 1];
    int32_t stage = read_number(&at, end, LM_PIPE_STAGES - 1), micro;

    if (stage >= 0 && !joined && is_other(at, end))
        return LM_OK;
    const char *kind = at < end ? memchr(letters, *at, 4) : NULL;
    if (stage < 0 || !kind)
        return fail_cell(r, cell, end, e);
    at++;
    micro = read_number(&at, end, LM_PIPE_MICROS - 1);
    if (micro < 0 || at != end)
        return fail_cell(r, cell, end, e);
    if (lm_grow(&row->step, &r->cap, row->n + 1, sizeof *row->step, "steps of a pipeline schedule",
                e))
        return e->code;
    row->step[row->n++] = (lm_pipe_step){
        .micro = micro, .stage = (int16_t)stage, .kind = (uint8_t)(kind - letters), .joined = joined
    };
    if (stage >= r->p->stages)
        r->p->stages = stage + 1;
    if (micro >= r->p->micros)
        r->p->micros = micro + 1;
    return LM_OK;
}

/* "(0F5;3B2)OVERLAP_F_B": both are computed together. */
static lm_code read_pair(reader *r, const char *at, const char *end, lm_err *e)
{
    static const char name[] = ")OVERLAP_F_B";
    size_t len = sizeof name - 1;
    const char *mid = memchr(at, ';', (size_t)(end - at)), *close = end - len;

    if (!mid || (size_t)(end - at) < len + 4 || mid > close || memcmp(close, name, len))
        return fail_cell(r, at, end, e);
    if (read_step(r, at + 1, mid, true, e) || read_step(r, mid + 1, close, false, e))
        return e->code;
    const lm_pipe_row *row = &r->p->row[r->p->ranks - 1];
    if (row->n < 2 || !row->step[row->n - 2].joined ||
        row->step[row->n - 2].kind == row->step[row->n - 1].kind)
        return fail_cell(r, at, end, e);
    return LM_OK;
}

static lm_code read_cell(reader *r, const char *at, const char *end, lm_err *e)
{
    while (at < end && is_blank(*at))
        at++;
    while (end > at && is_blank(end[-1]))
        end--;
    if (at == end)
        return LM_OK;
    return *at == '(' ? read_pair(r, at, end, e) : read_step(r, at, end, false, e);
}

static lm_code read_line(reader *r, const char *at, const char *end, lm_err *e)
{
    lm_pipeline *p = r->p;
    size_t ranks = (size_t)p->ranks;

    if (p->ranks == LM_PIPE_RANKS)
        return lm_fail(e, LM_EFORMAT, r->where, NULL, "more than %d lines, one for each rank",
                       LM_PIPE_RANKS);
    if (lm_realloc_n(&p->row, ranks + 1, sizeof *p->row, "rows of a pipeline schedule", e))
        return e->code;
    p->row[p->ranks++] = (lm_pipe_row){ 0 };
    r->cap = 0;
    for (const char *comma = at; comma; at = comma + 1) {
        comma = memchr(at, ',', (size_t)(end - at));
        if (read_cell(r, at, comma ? comma : end, e))
            return e->code;
        if (!comma)
            break;
    }
    return p->row[ranks].n
               ? LM_OK
               : lm_fail(e, LM_EFORMAT, r->where, "take it out", "line %zu has no steps", r->line);
}

/* The end of a text without the blank lines behind it. */
static const char *end_of_lines(const char *at, const char *end)
{
    while (end > at && (is_blank(end[-1]) || end[-1] == '\n'))
        end--;
    return end;
}

/* What a stage of a micro-batch has in the rows. */
typedef struct {
    int16_t rank; /* of its forward, plus one */
    bool f, b, i, w;
} presence;

static lm_code mark(const lm_pipeline *p, presence *seen, const char *where, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++)
        for (size_t k = 0; k < p->row[r].n; k++) {
            const lm_pipe_step *s = &p->row[r].step[k];
            presence *c = &seen[(size_t)s->stage * (size_t)p->micros + (size_t)s->micro];
            bool *flag = (bool *[]){ &c->f, &c->b, &c->i, &c->w }[s->kind];
            char letter = lm_pipe_letter((lm_pipe_kind)s->kind);

            if (*flag)
                return lm_fail(e, LM_EFORMAT, where, NULL, "%d%c%" PRId32 " stands twice", s->stage,
                               letter, s->micro);
            if (c->rank && c->rank != r + 1)
                return lm_fail(e, LM_EFORMAT, where,
                               "keep forward and backward of a stage on one rank",
                               "%d%c%" PRId32
                               " stands in the line of rank %d, the rest of it in that of rank %d",
                               s->stage, letter, s->micro, r, c->rank - 1);
            *flag = true;
            c->rank = (int16_t)(r + 1);
        }
    return LM_OK;
}

static lm_code check_whole(const lm_pipeline *p, const char *where, lm_err *e)
{
    size_t forwards = 0, cells = (size_t)p->stages * (size_t)p->micros;
    presence *seen;

    for (int r = 0; r < p->ranks; r++)
        for (size_t k = 0; k < p->row[r].n; k++)
            forwards += p->row[r].step[k].kind == LM_PIPE_F;
    if (!p->stages)
        return lm_fail(e, LM_EFORMAT, where, "write a line of steps for each rank: 0F0,0B0",
                       "it has no steps");
    if (forwards != cells || cells > LM_PIPE_CELLS)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "%zu forward steps for %" PRId32 " stages of %" PRId32
                       " micro-batches, which are %zu",
                       forwards, p->stages, p->micros, cells);
    if (lm_alloc_n(&seen, cells, sizeof *seen, "check of a pipeline schedule", e))
        return e->code;
    (void)mark(p, seen, where, e);
    for (size_t i = 0; i < cells && !e->code; i++)
        if (!seen[i].f || (seen[i].b ? seen[i].i || seen[i].w : !seen[i].i || !seen[i].w))
            lm_fail(e, LM_EFORMAT, where, "each needs one F, and one B, or one I and one W",
                    "stage %zu of micro-batch %zu is not forward and backward once",
                    i / (size_t)p->micros, i % (size_t)p->micros);
    lm_free(seen);
    return e->code;
}

lm_code lm_pipeline_read(const char *text, size_t len, const char *where, lm_pipeline *out,
                         lm_err *e)
{
    reader r = { .where = where, .p = out };
    const char *at = text, *end = end_of_lines(text, text + len);

    *out = (lm_pipeline){ 0 };
    while (at < end && !e->code) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));

        r.line++;
        (void)read_line(&r, at, stop ? stop : end, e);
        at = stop ? stop + 1 : end;
    }
    if (!e->code)
        (void)check_whole(out, where, e);
    if (e->code)
        lm_pipeline_fini(out);
    return e->code;
}

static lm_code write_row(const lm_pipe_row *row, lm_buf *out, lm_err *e)
{
    for (size_t k = 0; k < row->n; k++) {
        const lm_pipe_step *s = &row->step[k];
        bool second = k && row->step[k - 1].joined;

        if (lm_buf_addf(out, e, "%s%s%d%c%" PRId32 "%s", k && !second ? "," : "",
                        s->joined ? "(" : "", s->stage, lm_pipe_letter((lm_pipe_kind)s->kind),
                        s->micro,
                        s->joined ? ";"
                        : second  ? ")OVERLAP_F_B"
                                  : ""))
            return e->code;
    }
    return lm_buf_add(out, "\n", 1, e);
}

lm_code lm_pipeline_write(const lm_pipeline *p, lm_buf *out, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++)
        if (write_row(&p->row[r], out, e))
            return e->code;
    return LM_OK;
}
