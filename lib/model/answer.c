/* SPDX-License-Identifier: Apache-2.0 */
/* answer.c -- records of prompts, read in place, and their answers. */
#include "model/answer.h"

#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "format/jsonl.h"

static const char *const asking[] = { "prompt", "text" };

/* The string token of the prompt; false without one, and *fault: the reason. */
static bool find_prompt(const char *line, size_t len, size_t *begin, size_t *end,
                        lm_jsonl_fault *fault)
{
    for (int i = 0; i < 2; i++) {
        *fault = lm_jsonl_find(line, len, asking[i], begin, end);
        if (!fault->what || fault->kind != LM_JSONL_ABSENT)
            return !fault->what;
    }
    return false;
}

static lm_code fail_absent(const char *line, size_t len, const char *where, lm_err *e)
{
    lm_buf names = { 0 };
    lm_code rc = lm_jsonl_names(line, len, &names, e);
    if (!rc)
        rc = lm_fail(e, LM_EFORMAT, where, "write {\"prompt\": \"...\"}",
                     "there is neither \"prompt\" nor \"text\" nor \"messages\"; it has %s",
                     names.len ? names.data : "no fields");
    lm_buf_fini(&names);
    return rc;
}

lm_code lm_answer_prompt(const char *line, size_t len, const char *where, lm_buf *text,
                         bool *object, lm_err *e)
{
    size_t begin, end, valid = lm_utf8_valid(line, len);
    int64_t lone = 0;
    lm_jsonl_fault fault;
    *object = false;
    if (valid < len)
        return lm_fail(e, LM_EFORMAT, where, "write it in UTF-8", "invalid UTF-8 at byte %zu",
                       valid);
    if (find_prompt(line, len, &begin, &end, &fault)) {
        *object = true;
        return lm_jsonl_unescape(line + begin, end - begin, text, &lone, e);
    }
    *object = fault.kind != LM_JSONL_MALFORMED;
    if (fault.kind == LM_JSONL_ABSENT)
        return fail_absent(line, len, where, e);
    return lm_fail(e, LM_EFORMAT, where, "write {\"prompt\": \"...\"}", "column %zu: %s",
                   fault.at + 1, fault.what);
}

bool lm_answer_has_messages(const char *line, size_t len)
{
    size_t begin, end;
    lm_jsonl_fault fault = lm_jsonl_find(line, len, "prompt", &begin, &end);

    if (!fault.what || fault.kind != LM_JSONL_ABSENT)
        return false;
    fault = lm_jsonl_find(line, len, "messages", &begin, &end);
    return fault.what && fault.kind == LM_JSONL_NO_STRING;
}

/* Names of the answer's own fields, including the prompt; for a record without a prompt only the
 * first.  Those of two options are ours only with them. */
static bool is_ours(const char *key, size_t len, bool asked, const lm_answer_opts *o)
{
    static const char *const ours[] = { "error",  "prompt",        "text",
                                        "tokens", "finish_reason", "prompt_tokens",
                                        "sample", "token_ids",     "logprobs" };
    if ((o->index && lm_jsonl_is(key, len, "prompt_index")) ||
        (o->seconds && lm_jsonl_is(key, len, "first_token_seconds")) ||
        (o->drafts &&
         (lm_jsonl_is(key, len, "drafted_tokens") || lm_jsonl_is(key, len, "accepted_tokens"))))
        return true;
    for (size_t i = 0; i < (asked ? sizeof ours / sizeof *ours : 1); i++)
        if (lm_jsonl_is(key, len, ours[i]))
            return true;
    return false;
}

/* The prompt first, then the other fields, unchanged. */
static void put_record(lm_jw *j, const char *line, size_t len, const lm_answer_opts *o)
{
    static const char key[] = "\"prompt\":";
    size_t begin, end, at = 0;
    lm_jsonl_fault fault;
    lm_jsonl_member m;
    bool chat = lm_answer_has_messages(line, len);
    bool asked = chat || find_prompt(line, len, &begin, &end, &fault);
    if (asked && !chat) {
        lm_buf member = { 0 };
        lm_code rc = lm_buf_add(&member, key, sizeof key - 1, j->err);
        rc = rc ? rc : lm_buf_add(&member, line + begin, end - begin, j->err);
        j->rc = j->rc ? j->rc : rc;
        lm_jw_raw(j, member.data, member.len);
        lm_buf_fini(&member);
    }
    while (lm_jsonl_next(line, len, &at, &m))
        if (!is_ours(line + m.key, m.key_end - m.key, asked, o))
            lm_jw_raw(j, line + m.key, m.value_end - m.key);
}

static lm_code end_line(lm_jw *j, lm_buf *out, lm_err *e)
{
    lm_jw_close_obj(j);
    lm_code rc = lm_jw_end(j);
    return rc || out->data[out->len - 1] == '\n' ? rc : lm_buf_add(out, "\n", 1, e);
}

/* An object begins with what was asked. */
static void begin_answer(lm_jw *j, const lm_completion *c, const lm_answer_opts *o)
{
    const char *prompt = c->prompt.data ? c->prompt.data : "";
    lm_jw_obj(j, NULL);
    if (o->record)
        put_record(j, prompt, c->prompt.len, o);
    else
        lm_jw_strn(j, "prompt", prompt, c->prompt.len);
}

static void put_numbers(lm_jw *j, const lm_completion *c, const lm_answer_opts *o)
{
    if (o->sample)
        lm_jw_int(j, "sample", c->sample);
    if (o->index)
        lm_jw_int(j, "prompt_index", c->index);
}

lm_code lm_answer_write(const lm_completion *c, const lm_answer_opts *o, lm_buf *out, lm_err *e)
{
    size_t made = c->ids.n - c->n_prompt;
    lm_jw j;
    lm_jw_begin(&j, out, 0, e);
    begin_answer(&j, c, o);
    lm_jw_strn(&j, "text", c->text.data ? c->text.data : "", c->text.len);
    lm_jw_int(&j, "tokens", (int64_t)made);
    lm_jw_str(&j, "finish_reason", c->finish);
    lm_jw_int(&j, "prompt_tokens", (int64_t)c->n_prompt);
    put_numbers(&j, c, o);
    if (o->seconds)
        lm_jw_f64(&j, "first_token_seconds", c->first_seconds);
    if (o->drafts) {
        lm_jw_int(&j, "drafted_tokens", c->drafted);
        lm_jw_int(&j, "accepted_tokens", c->accepted);
    }
    if (o->details) {
        lm_jw_arr(&j, "token_ids");
        for (size_t i = 0; i < made; i++)
            lm_jw_int(&j, NULL, c->ids.v[c->n_prompt + i]);
        lm_jw_close_arr(&j);
        lm_jw_arr(&j, "logprobs");
        for (size_t i = 0; i < made; i++)
            lm_jw_f32(&j, NULL, c->logprob[i]);
        lm_jw_close_arr(&j);
    }
    return end_line(&j, out, e);
}

lm_code lm_answer_write_failed(const lm_completion *c, const lm_answer_opts *o, const char *why,
                               lm_buf *out, lm_err *e)
{
    lm_jw j;
    lm_jw_begin(&j, out, 0, e);
    begin_answer(&j, c, o);
    put_numbers(&j, c, o);
    lm_jw_str(&j, "error", why);
    return end_line(&j, out, e);
}

lm_code lm_answer_write_error(const char *line, size_t len, const char *source, int64_t number,
                              int64_t index, const char *why, lm_buf *out, lm_err *e)
{
    const lm_answer_opts o = { .index = index >= 0 };
    lm_jw j;
    lm_jw_begin(&j, out, 0, e);
    lm_jw_obj(&j, NULL);
    if (len) {
        put_record(&j, line, len, &o);
    } else {
        lm_jw_str(&j, "source", source);
        lm_jw_int(&j, "line", number);
    }
    if (o.index)
        lm_jw_int(&j, "prompt_index", index);
    lm_jw_str(&j, "error", why);
    return end_line(&j, out, e);
}
