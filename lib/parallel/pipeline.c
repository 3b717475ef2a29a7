/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.c -- the generators of pipeline schedules by name. */
#include "parallel/pipeline.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "parallel/pipeline_impl.h"

char lm_pipe_letter(lm_pipe_kind k)
{
    return "FBIW"[k];
}

lm_code lm_pipeline_begin(lm_pipeline *p, int64_t ranks, int64_t stages, int64_t micros,
                          size_t most, lm_err *e)
{
    *p = (lm_pipeline){ .ranks = (int32_t)ranks,
                        .stages = (int32_t)stages,
                        .micros = (int32_t)micros };
    if (lm_alloc_n(&p->row, (size_t)ranks, sizeof *p->row, "rows of a pipeline schedule", e))
        return e->code;
    for (int64_t r = 0; r < ranks; r++)
        if (lm_alloc_n(&p->row[r].step, most, sizeof *p->row[r].step,
                       "steps of a pipeline schedule", e)) {
            lm_pipeline_fini(p);
            return e->code;
        }
    return LM_OK;
}

void lm_pipeline_fini(lm_pipeline *p)
{
    for (int32_t r = 0; p->row && r < p->ranks; r++)
        lm_free(p->row[r].step);
    lm_free(p->row);
    *p = (lm_pipeline){ 0 };
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- one stage a rank ---- */

static lm_code make_gpipe(lm_pipeline *p, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++) {
        for (int i = 0; i < p->micros; i++)
            lm_pipe_add(p, r, LM_PIPE_F, i, r);
        for (int i = 0; i < p->micros; i++)
            lm_pipe_add(p, r, LM_PIPE_B, i, r);
    }
    (void)e;
    return LM_OK;
}

static lm_code make_1f1b(lm_pipeline *p, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++) {
        int64_t f = 0, warm = least(p->ranks - r - 1, p->micros);

        for (; f < warm; f++)
            lm_pipe_add(p, r, LM_PIPE_F, f, r);
        for (int64_t b = 0; b < p->micros; b++) {
            if (f < p->micros)
                lm_pipe_add(p, r, LM_PIPE_F, f++, r);
            lm_pipe_add(p, r, LM_PIPE_B, b, r);
        }
    }
    (void)e;
    return LM_OK;
}

/* After `warm` forwards of rank r: I; then W, if more than `behind` of them are pending; then F. */
static void make_zb(lm_pipeline *p, int r, int64_t warm, int64_t behind)
{
    int64_t f = 0, w = 0;

    for (; f < least(warm, p->micros); f++)
        lm_pipe_add(p, r, LM_PIPE_F, f, r);
    for (int64_t i = 0; i < p->micros; i++) {
        lm_pipe_add(p, r, LM_PIPE_I, i, r);
        if (i + 1 - w > behind)
            lm_pipe_add(p, r, LM_PIPE_W, w++, r);
        if (f < p->micros)
            lm_pipe_add(p, r, LM_PIPE_F, f++, r);
    }
    while (w < p->micros)
        lm_pipe_add(p, r, LM_PIPE_W, w++, r);
}

static lm_code make_zb_h1(lm_pipeline *p, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++)
        make_zb(p, r, p->ranks - r, r);
    (void)e;
    return LM_OK;
}

static lm_code make_zb_h2(lm_pipeline *p, lm_err *e)
{
    for (int r = 0; r < p->ranks; r++)
        make_zb(p, r, 2 * (p->ranks - r) - 1, 2 * r);
    (void)e;
    return LM_OK;
}

/* ---- several stages a rank, the stage of rank r's chunk j being j p + r ---- */

static lm_code make_interleaved(lm_pipeline *p, lm_err *e)
{
    int64_t ranks = p->ranks, chunks = p->stages / ranks, n = p->micros * chunks;

    for (int r = 0; r < ranks; r++) {
        int64_t f = 0, warm = p->micros == ranks
                                  ? n
                                  : least(2 * (ranks - r - 1) + (chunks - 1) * ranks, n);

        for (int64_t b = -warm; b < n; b++) { /* index of the backward; negative in the warm-up */
            if (f < n) {
                int64_t chunk = f / ranks % chunks;
                lm_pipe_add(p, r, LM_PIPE_F, f / (ranks * chunks) * ranks + f % ranks,
                            (int)(chunk * ranks) + r);
                f++;
            }
            if (b >= 0) {
                int64_t chunk = chunks - 1 - b / ranks % chunks;
                lm_pipe_add(p, r, LM_PIPE_B, b / (ranks * chunks) * ranks + b % ranks,
                            (int)(chunk * ranks) + r);
            }
        }
    }
    (void)e;
    return LM_OK;
}

static lm_code make_breadth_first(lm_pipeline *p, lm_err *e)
{
    int chunks = p->stages / p->ranks;

    for (int r = 0; r < p->ranks; r++) {
        for (int j = 0; j < chunks; j++)
            for (int i = 0; i < p->micros; i++)
                lm_pipe_add(p, r, LM_PIPE_F, i, j * p->ranks + r);
        for (int j = chunks - 1; j >= 0; j--)
            for (int i = 0; i < p->micros; i++)
                lm_pipe_add(p, r, LM_PIPE_B, i, j * p->ranks + r);
    }
    (void)e;
    return LM_OK;
}

/* ---- by name ---- */

typedef struct {
    const char *name;
    lm_pipe_make *make;
    int stages;    /* of a rank; 0: as many as stand behind the name and a colon */
    int least;     /* micro-batches are at least this many times the ranks */
    bool multiple; /* and a multiple of the ranks */
    bool even;     /* both are even: each stage has two ranks, for half of the micro-batches each */
} generator;

static const generator generators[] = {
    { .name = "gpipe", .make = make_gpipe, .stages = 1 },
    { .name = "1f1b", .make = make_1f1b, .stages = 1 },
    { .name = "interleaved", .make = make_interleaved, .multiple = true },
    { .name = "breadth-first", .make = make_breadth_first },
    { .name = "zb-h1", .make = make_zb_h1, .stages = 1 },
    { .name = "zb-h2", .make = make_zb_h2, .stages = 1 },
    { .name = "zb-v", .make = lm_pipe_make_zb_v, .stages = 2 },
    { .name = "dualpipe", .make = lm_pipe_make_dualpipe, .stages = 1, .least = 2, .even = true },
    { .name = "dualpipev", .make = lm_pipe_make_dualpipev, .stages = 2, .least = 2 },
};

const char *const lm_pipeline_names[] = { "gpipe",     "1f1b",  "interleaved:V", "breadth-first:V",
                                          "zb-h1",     "zb-h2", "zb-v",          "dualpipe",
                                          "dualpipev", NULL };

static const generator *find_generator(const char *spec)
{
    size_t n = strcspn(spec, ":");

    for (size_t i = 0; i < sizeof generators / sizeof *generators; i++)
        if (strlen(generators[i].name) == n && !memcmp(generators[i].name, spec, n))
            return &generators[i];
    return NULL;
}

bool lm_pipeline_is_name(const char *spec)
{
    return find_generator(spec) != NULL;
}

int lm_pipeline_ranks_of_stage(const char *spec)
{
    const generator *g = spec ? find_generator(spec) : NULL;
    return g && g->even ? 2 : 1;
}

/* The stages of a rank: the generator's own, or what follows the colon. */
static lm_code read_chunks(const generator *g, const char *spec, int64_t *chunks, lm_err *e)
{
    const char *colon = strchr(spec, ':');

    *chunks = g->stages;
    if (g->stages && colon)
        return lm_fail(e, LM_EUSAGE, "schedule", NULL, "'%s' has no number behind it: '%s'",
                       g->name, spec);
    if (!g->stages &&
        (!colon || !lm_parse_count(colon + 1, chunks) || *chunks < 2 || *chunks > LM_PIPE_STAGES))
        return lm_fail(e, LM_EUSAGE, "schedule",
                       "the stages of a rank follow a colon, at least 2: interleaved:2",
                       "'%s' has no such number", spec);
    return LM_OK;
}

static lm_code check_sizes(const generator *g, int64_t ranks, int64_t chunks, int64_t micros,
                           lm_err *e)
{
    if (ranks < 1 || ranks > LM_PIPE_RANKS || ranks * chunks > LM_PIPE_STAGES)
        return lm_fail(e, LM_EUSAGE, "schedule", NULL,
                       "%" PRId64 " ranks with %" PRId64
                       " stages each: at most %d ranks and %d stages",
                       ranks, chunks, LM_PIPE_RANKS, LM_PIPE_STAGES);
    if (micros < 1 || micros > LM_PIPE_MICROS)
        return lm_fail(e, LM_EUSAGE, "schedule", NULL, "%" PRId64 " micro-batches: must be 1 to %d",
                       micros, LM_PIPE_MICROS);
    if (ranks * chunks * micros > LM_PIPE_CELLS)
        return lm_fail(e, LM_EUSAGE, "schedule",
                       "use fewer micro-batches: the order of more repeats itself",
                       "%" PRId64 " micro-batches in %" PRId64 " stages: at most %d together",
                       micros, ranks * chunks, LM_PIPE_CELLS);
    if (g->even && (ranks % 2 || micros % 2))
        return lm_fail(e, LM_EUSAGE, "schedule", "use even numbers of both",
                       "%s has micro-batches from both ends, not %" PRId64 " on %" PRId64 " ranks",
                       g->name, micros, ranks);
    if (micros < g->least * ranks)
        return lm_fail(e, LM_EUSAGE, "schedule", NULL,
                       "%s needs at least %" PRId64 " micro-batches on %" PRId64
                       " ranks, not %" PRId64,
                       g->name, g->least * ranks, ranks, micros);
    if (g->multiple && micros % ranks)
        return lm_fail(e, LM_EUSAGE, "schedule", NULL,
                       "%" PRId64 " micro-batches do not divide by %" PRId64
                       " ranks: %s takes %" PRId64 " or %" PRId64,
                       micros, ranks, g->name, micros / ranks ? micros / ranks * ranks : ranks,
                       (micros / ranks + 1) * ranks);
    return LM_OK;
}

lm_code lm_pipeline_make(const char *spec, int64_t ranks, int64_t micros, lm_pipeline *out,
                         lm_err *e)
{
    const generator *g = find_generator(spec);
    int64_t chunks = 0;

    *out = (lm_pipeline){ 0 };
    if (!g)
        return lm_fail(e, LM_EUSAGE, "schedule", lm_nearest(spec, lm_pipeline_names),
                       "'%s' is not the name of a schedule", spec);
    if (read_chunks(g, spec, &chunks, e) || check_sizes(g, ranks, chunks, micros, e) ||
        lm_pipeline_begin(out, ranks, ranks * chunks, micros, (size_t)(3 * chunks * micros), e))
        return e->code;
    if (g->make(out, e))
        lm_pipeline_fini(out);
    return e->code;
}
