/* SPDX-License-Identifier: Apache-2.0 */
/* prompts.c -- prompts of records, one after the other. */
#include "tune/align/prompts.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"

typedef struct {
    const lm_prompts_opts *o;
    lm_prompts *p;
    lm_text_example_scratch *scratch;
    lm_text_example x;
    lm_buf shown;
} reading;

/* The prompt as rewards and logs see it: as it is written, or as the template rendered it. */
static lm_code show_prompt(reading *r, const lm_text_record *rec, char **out, size_t *len,
                           lm_err *e)
{
    const char *text = json_string_value(rec->prompt);
    *len = json_string_length(rec->prompt);
    if (!json_is_string(rec->prompt)) {
        r->shown.len = 0;
        if (lm_tokenizer_decode(r->o->maker.tok, r->x.ids.v, r->x.ids.n, false, &r->shown, e))
            return e->code;
        text = r->shown.data ? r->shown.data : "";
        *len = r->shown.len;
    }
    return lm_arena_strdup(r->p->arena, out, text, *len, e);
}

static lm_code keep_prompt(reading *r, const lm_text_record *rec, lm_err *e)
{
    lm_prompts *p = r->p;
    const size_t n = r->x.ids.n;
    uint32_t *ids;
    char *text;
    size_t len;
    json_t *asked = NULL;
    if (n < 1 || (int64_t)n > r->o->most) {
        p->dropped++;
        return LM_OK;
    }
    if (lm_grow(&p->v, &p->cap, (size_t)p->n + 1, sizeof *p->v, "prompts", e) ||
        lm_arena_alloc(p->arena, &ids, n, sizeof *ids, e) || show_prompt(r, rec, &text, &len, e) ||
        lm_text_example_asked(rec, &asked, e))
        return e->code;
    memcpy(ids, r->x.ids.v, n * sizeof *ids);
    p->v[p->n++] =
        (lm_on_policy_prompt){ ids, (int64_t)n, text, len, json_incref(rec->line), asked };
    p->longest = (int64_t)n > p->longest ? (int64_t)n : p->longest;
    return LM_OK;
}

static lm_code take_doc(reading *r, const lm_doc *doc, lm_err *e)
{
    lm_text_record rec = { 0 };
    if (lm_text_record_of_doc(doc, r->o->map, &rec, e))
        return e->code;
    if (!r->p->records++)
        r->p->form = rec.form;
    if (lm_text_example_prompt(&r->o->maker, r->scratch, &rec, &r->x, e))
        lm_err_in(e, "%s:%lld", doc->source, (long long)doc->line);
    else
        keep_prompt(r, &rec, e);
    lm_text_record_fini(&rec);
    return e->code;
}

static lm_code read_all(reading *r, lm_input *in, lm_err *e)
{
    lm_doc doc = { 0 };
    bool got = true;
    while (!lm_stopping() && (!r->o->limit || r->p->n < r->o->limit) &&
           !lm_input_next(in, &doc, &got, e) && got && !take_doc(r, &doc, e))
        ;
    lm_doc_fini(&doc);
    return e->code;
}

lm_code lm_prompts_read(const lm_prompts_opts *o, lm_prompts *p, lm_err *e)
{
    const lm_input_opts how = { .kind = LM_INPUT_JSONL };
    reading r = { .o = o, .p = p };
    lm_input *in = NULL;
    *p = (lm_prompts){ 0 };
    if (!lm_arena_new(&p->arena, 1 << 20, e) &&
        !lm_text_example_scratch_new(&o->maker, &r.scratch, e) &&
        !lm_input_open(&how, o->path, o->n, &in, e) && !read_all(&r, in, e) && !p->n &&
        !lm_stopping())
        lm_fail(e, LM_EUSAGE, o->n ? o->path[0] : "standard input",
                p->records ? "allow longer prompts" : "give at least one",
                "%" PRId64 " records, none of them with a prompt of at most %" PRId64 " tokens",
                p->records, o->most);
    lm_input_close(in);
    lm_text_example_fini(&r.x);
    lm_text_example_scratch_free(r.scratch);
    lm_buf_fini(&r.shown);
    if (e->code)
        lm_prompts_fini(p);
    return e->code;
}

void lm_prompts_fini(lm_prompts *p)
{
    for (int64_t i = 0; i < p->n; i++) {
        json_decref((json_t *)(uintptr_t)p->v[i].record);
        json_decref((json_t *)(uintptr_t)p->v[i].asked);
    }
    lm_free(p->v);
    lm_arena_free(p->arena);
    *p = (lm_prompts){ 0 };
}
