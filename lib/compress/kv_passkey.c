/* SPDX-License-Identifier: Apache-2.0 */
/* kv_passkey.c -- tasks of retrieval from records and other text, by random numbers of their own for each task. */
#include "compress/kv_passkey.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/text.h"

/* The names of share/recipes/kv-text; its values are 101 + 14 i. */
static const char *const names[LM_KV_PASSKEY_NAMES] = {
    "amber",   "apple",  "arrow",   "basil",   "beach",   "berry",   "brick",   "cabin",
    "camel",   "candle", "canyon",  "cedar",   "cherry",  "clover",  "cobalt",  "copper",
    "coral",   "cotton", "crystal", "daisy",   "dragon",  "eagle",   "ember",   "falcon",
    "feather", "fennel", "forest",  "garnet",  "ginger",  "glacier", "granite", "hazel",
    "indigo",  "island", "ivory",   "jasmine", "juniper", "lagoon",  "lantern", "lemon",
    "lily",    "linen",  "maple",   "marble",  "meadow",  "mango",   "nectar",  "nutmeg",
    "olive",   "onyx",   "opal",    "orchid",  "otter",   "pebble",  "pepper",  "pine",
    "plum",    "quartz", "raven",   "saffron", "silver",  "tulip",   "velvet",  "willow",
};

typedef struct {
    const lm_tokenizer *tok;
    lm_tok_scratch *scratch;
    const uint32_t *filler;
    int64_t n_filler;
    const lm_kv_passkey_opts *o;
    lm_rng rng;           /* of the task */
    uint64_t drawn;       /* numbers taken from it */
    lm_ids ids;           /* of all tasks */
    lm_ids record, asked; /* of one record, or a question; of a question and its answer */
    /* of the records: tokens of the filler before it, name, value */
    int64_t place[LM_KV_PASSKEY_NAMES], value[LM_KV_PASSKEY_NAMES];
    int name[LM_KV_PASSKEY_NAMES];
} maker;

static int64_t draw(maker *m, int64_t n)
{
    return (int64_t)lm_rng_below(m->rng, m->drawn++, (uint64_t)n);
}

static lm_code add(lm_ids *to, const uint32_t *v, size_t n, lm_err *e)
{
    if (lm_grow(&to->v, &to->cap, to->n + n + 1, sizeof *to->v, "tokens", e))
        return e->code;
    memcpy(to->v + to->n, v, n * sizeof *v);
    to->n += n;
    return LM_OK;
}

/* value < 0: the question, which ends before it. */
static lm_code encode(maker *m, int name, int64_t value, const char *end, lm_ids *to, lm_err *e)
{
    char text[96], number[24] = "";

    if (value >= 0)
        snprintf(number, sizeof number, " %" PRId64, 101 + 14 * value);
    int n = snprintf(text, sizeof text, " The key of %s is%s%s", names[name], number, end);
    to->n = 0;
    return lm_tokenizer_encode(m->tok, m->scratch, text, (size_t)n, false, to, e);
}

/* Draw the names of the records and their values. */
static void draw_records(maker *m)
{
    for (int i = 0; i < LM_KV_PASSKEY_NAMES; i++)
        m->name[i] = i;
    for (int64_t i = 0; i < m->o->records; i++) {
        int64_t k = i + draw(m, LM_KV_PASSKEY_NAMES - i);
        int swap = m->name[i];
        m->name[i] = m->name[k];
        m->name[k] = swap;
        m->value[i] = draw(m, LM_KV_PASSKEY_VALUES);
    }
}

/* The first record has its place in the filler by the depth, the others have random ones. */
static void draw_places(maker *m, int64_t depth, int64_t filler)
{
    const lm_kv_passkey_opts *o = m->o;

    m->place[0] = o->depths > 1 ? filler * depth / (o->depths - 1) : filler / 2;
    for (int64_t i = 1; i < o->records; i++)
        m->place[i] = draw(m, filler + 1);
}

/* Pieces of filler and records in the order of their places; equal places in the order of records. */
static lm_code write_context(maker *m, int64_t filler, lm_err *e)
{
    const uint32_t *from = m->filler + draw(m, m->n_filler - filler + 1);
    int64_t at = 0;

    for (int64_t next = 0; next <= filler; next++)
        for (int64_t i = 0; i < m->o->records; i++) {
            if (m->place[i] != next)
                continue;
            if (add(&m->ids, from + at, (size_t)(next - at), e) ||
                encode(m, m->name[i], m->value[i], ".", &m->record, e) ||
                add(&m->ids, m->record.v, m->record.n, e))
                return e->code;
            at = next;
        }
    return add(&m->ids, from + at, (size_t)(filler - at), e);
}

/* The tokens that all records take. */
static lm_code count_records(maker *m, int64_t *n, lm_err *e)
{
    *n = 0;
    for (int64_t i = 0; i < m->o->records; i++) {
        if (encode(m, m->name[i], m->value[i], ".", &m->record, e))
            return e->code;
        *n += (int64_t)m->record.n;
    }
    return LM_OK;
}

static lm_code check_filler(const maker *m, int64_t length, int64_t filler, lm_err *e)
{
    if (filler < 1)
        return lm_fail(e, LM_EUSAGE, "passkeys", "use longer ones, or fewer records",
                       "%" PRId64 " tokens are too few for %" PRId64 " record%s and a question",
                       length, m->o->records, lm_plural(m->o->records));
    if (filler > m->n_filler)
        return lm_fail(e, LM_EUSAGE, "passkeys", "give more text",
                       "%" PRId64 " tokens of other text for a length of %" PRId64 ", %" PRId64
                       " are needed",
                       m->n_filler, length, filler);
    return LM_OK;
}

static lm_code write_task(maker *m, int64_t depth, int64_t length, lm_kv_task *t, lm_err *e)
{
    size_t begin = m->ids.n, same = 0;
    int64_t records;

    draw_records(m);
    if (count_records(m, &records, e) || encode(m, m->name[0], -1, "", &m->record, e) ||
        encode(m, m->name[0], m->value[0], "", &m->asked, e))
        return e->code;
    /* the answer is where the longer text differs from the question */
    while (same < m->record.n && same < m->asked.n && m->record.v[same] == m->asked.v[same])
        same++;
    int64_t filler = length - records - (int64_t)same;
    if (check_filler(m, length, filler, e))
        return e->code;
    draw_places(m, depth, filler);
    if (write_context(m, filler, e) || add(&m->ids, m->asked.v, m->asked.n, e))
        return e->code;
    *t = (lm_kv_task){ .context = (int64_t)(m->ids.n - begin - m->asked.n),
                       .question = (int64_t)same,
                       .answer = (int64_t)(m->asked.n - same) };
    return LM_OK;
}

static lm_code write_all(maker *m, lm_kv_passkeys *out, lm_err *e)
{
    const lm_kv_passkey_opts *o = m->o;
    const uint32_t *at;

    for (int64_t i = 0; i < out->n; i++) {
        int64_t cell = i / o->repeats;
        m->rng = lm_rng_make(o->seed, "passkeys", (uint64_t)i);
        m->drawn = 0;
        if (write_task(m, cell / o->lengths, o->length[cell % o->lengths], &out->task[i], e))
            return e->code;
        out->task[i].cell = cell;
    }
    out->ids = m->ids.v;
    m->ids.v = NULL;
    at = out->ids;
    for (int64_t i = 0; i < out->n; i++) {
        lm_kv_task *t = &out->task[i];
        int64_t n = t->context + t->question + t->answer;
        t->ids = at;
        at += n;
        out->longest = n > out->longest ? n : out->longest;
    }
    return LM_OK;
}

lm_code lm_kv_passkeys_make(const lm_tokenizer *t, const uint32_t *filler, int64_t n,
                            const lm_kv_passkey_opts *o, lm_kv_passkeys *out, lm_err *e)
{
    maker m = { .tok = t, .filler = filler, .n_filler = n, .o = o };
    size_t cells, tasks;

    *out = (lm_kv_passkeys){ 0 };
    if (o->lengths < 1 || o->depths < 1 || o->repeats < 1 || o->records < 1 ||
        o->records > LM_KV_PASSKEY_NAMES)
        return lm_fail(e, LM_EUSAGE, "passkeys", NULL,
                       "%" PRId64 " lengths, %" PRId64 " depths, %" PRId64
                       " tasks of each, %" PRId64 " records: at least 1, and at most %d records",
                       o->lengths, o->depths, o->repeats, o->records, LM_KV_PASSKEY_NAMES);
    if (!lm_mul_ok((size_t)o->lengths, (size_t)o->depths, &cells) ||
        !lm_mul_ok(cells, (size_t)o->repeats, &tasks))
        return lm_fail(e, LM_ELIMIT, "passkeys", NULL, "their number cannot be counted");
    out->n = (int64_t)tasks;
    lm_code rc = lm_alloc_n(&out->task, tasks, sizeof *out->task, "passkeys", e);
    if (!rc)
        rc = lm_tok_scratch_new(t, &m.scratch, e);
    if (!rc)
        rc = write_all(&m, out, e);
    lm_tok_scratch_free(m.scratch);
    lm_ids_fini(&m.ids);
    lm_ids_fini(&m.record);
    lm_ids_fini(&m.asked);
    if (rc)
        lm_kv_passkeys_fini(out);
    return rc;
}

void lm_kv_passkeys_fini(lm_kv_passkeys *p)
{
    lm_free(p->task);
    lm_free(p->ids);
    *p = (lm_kv_passkeys){ 0 };
}
