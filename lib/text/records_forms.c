/* SPDX-License-Identifier: Apache-2.0 */
/* records_forms.c -- the forms of LLaMA-Factory: ShareGPT and Alpaca, as messages of chat
 * templates. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "text/records_impl.h"

/* ---- ShareGPT ---- */

static const struct {
    const char *from, *role;
} roles[] = {
    { "human", "user" },          { "user", "user" },         { "gpt", "assistant" },
    { "assistant", "assistant" }, { "chatgpt", "assistant" }, { "bing", "assistant" },
    { "system", "system" },       { "observation", "tool" },  { "tool", "tool" },
    { "function_call", "" },
};

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "a record", NULL, "no memory");
}

/* The assistant calls functions: {"name", "arguments"}, or a list of these, in a string. */
static lm_code read_call(const char *text, size_t len, const char *where, json_t **out, lm_err *e)
{
    json_t *v = NULL, *calls = json_array(), *c;
    lm_err bad = { 0 };
    size_t i;
    if (!calls)
        return no_memory(e);
    lm_code rc = lm_json_parse(text, len, where, &v, &bad);
    json_t *list = !rc && json_is_object(v) ? json_pack("[O]", v) : json_incref(v);
    if (rc || !json_is_array(list) || !json_array_size(list))
        rc = lm_fail(e, LM_EFORMAT, where, "write {\"name\": ..., \"arguments\": {...}}",
                     "a function_call is not a call in JSON");
    json_array_foreach(list, i, c)
    {
        json_t *call = json_pack("{s:s,s:O}", "type", "function", "function", c);
        if (!rc)
            rc = call ? record_append(calls, call, e) : no_memory(e);
        else
            json_decref(call);
    }
    if (!rc) {
        *out = json_pack("{s:s,s:s,s:O}", "role", "assistant", "content", "", "tool_calls", calls);
        rc = *out ? LM_OK : no_memory(e);
    }
    json_decref(list);
    json_decref(v);
    json_decref(calls);
    return rc;
}

/* One message: {from, value}; {role, content} is taken as it is. */
static lm_code read_turn(json_t *t, const char *where, const char *key, json_t **out, lm_err *e)
{
    json_t *from = json_object_get(t, "from"), *value = json_object_get(t, "value");
    if (!from && json_is_string(json_object_get(t, "role"))) {
        *out = json_incref(t);
        return LM_OK;
    }
    if (!json_is_string(from) || !json_is_string(value))
        return lm_fail(e, LM_EFORMAT, where, "write {\"from\": \"human\", \"value\": ...}",
                       "a message of \"%s\" has no \"from\" and \"value\"", key);
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (strcmp(json_string_value(from), roles[i].from) != 0)
            continue;
        if (*roles[i].role)
            return record_message(roles[i].role, value, out, e);
        return read_call(json_string_value(value), json_string_length(value), where, out, e);
    }
    return lm_fail(e, LM_EFORMAT, where, "use human, gpt, system, observation or function_call",
                   "a message is from \"%.40s\"", json_string_value(from));
}

/* A message of its own, or a list, appended to `list`. */
static lm_code add_turns(json_t *list, json_t *v, const char *where, const char *key, lm_err *e)
{
    size_t i;
    json_t *t;
    json_t *all = json_is_object(v) ? json_pack("[O]", v) : json_incref(v);
    lm_code rc = json_is_array(all) && json_array_size(all)
                     ? LM_OK
                     : record_fail_type(where, key, "a list of messages", e);
    json_array_foreach(all, i, t)
    {
        json_t *m = NULL;
        if (!rc)
            rc = read_turn(t, where, key, &m, e);
        if (!rc)
            rc = record_append(list, m, e);
    }
    json_decref(all);
    return rc;
}

/* The system's text, if there is one, as the first message. */
static lm_code add_system(json_t *list, const json_t *o, const char *where, lm_err *e)
{
    json_t *s = record_get(o, "system"), *m = NULL;
    if (!s || (json_is_string(s) && !*json_string_value(s)))
        return LM_OK;
    if (!json_is_string(s))
        return record_fail_type(where, "system", "a string", e);
    return record_message("system", s, &m, e) || record_append(list, m, e) ? e->code : LM_OK;
}

static lm_code start_list(json_t **out, const json_t *o, const char *where, lm_err *e)
{
    *out = json_array();
    return *out ? add_system(*out, o, where, e) : no_memory(e);
}

/* The two answers of a pair, as lists of messages. */
static lm_code add_answers(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    r->kind = LM_RECORD_PREFERENCE;
    r->chosen = json_array();
    r->rejected = json_array();
    if (!r->chosen || !r->rejected)
        return no_memory(e);
    return add_turns(r->chosen, record_get(o, "chosen"), where, "chosen", e) ||
                   add_turns(r->rejected, record_get(o, "rejected"), where, "rejected", e)
               ? e->code
               : LM_OK;
}

static bool has_pair(const json_t *o)
{
    return record_get(o, "chosen") && record_get(o, "rejected");
}

lm_code record_sharegpt(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    const char *key = record_get(o, "conversations") ? "conversations" : "messages";
    json_t *list = NULL;
    r->form = "ShareGPT";
    r->kind = LM_RECORD_MESSAGES;
    lm_code rc = start_list(&list, o, where, e);
    if (!rc)
        rc = add_turns(list, record_get(o, key), where, key, e);
    if (has_pair(o))
        r->prompt = list;
    else
        r->messages = list;
    return rc || !has_pair(o) ? rc : add_answers(o, where, r, e);
}

/* ---- Alpaca ---- */

static lm_code add_text(json_t *list, const char *role, const char *text, size_t len, lm_err *e)
{
    json_t *m = NULL, *s = json_stringn(text, len);
    lm_code rc = s ? record_message(role, s, &m, e) : no_memory(e);
    json_decref(s);
    return rc ? rc : record_append(list, m, e);
}

/* [[question, answer], ...]: earlier turns. */
static lm_code add_history(json_t *list, const json_t *o, const char *where, lm_err *e)
{
    json_t *h = record_get(o, "history"), *pair;
    size_t i;
    if (h && !json_is_array(h))
        return record_fail_type(where, "history", "a list of pairs", e);
    json_array_foreach(h, i, pair)
    {
        const json_t *a = json_array_get(pair, 0), *b = json_array_get(pair, 1);
        if (json_array_size(pair) != 2 || !json_is_string(a) || !json_is_string(b))
            return record_fail_type(where, "history", "a list of pairs of texts", e);
        if (add_text(list, "user", json_string_value(a), json_string_length(a), e) ||
            add_text(list, "assistant", json_string_value(b), json_string_length(b), e))
            return e->code;
    }
    return LM_OK;
}

/* The user's turn: instruction, and below it the input if there is one. */
static lm_code add_query(json_t *list, const json_t *o, const char *where, lm_err *e)
{
    const json_t *a = record_get(o, "instruction"), *b = record_get(o, "input");
    lm_buf text = { 0 };
    if (!json_is_string(a))
        return record_fail_type(where, "instruction", "a string", e);
    if (b && !json_is_string(b))
        return record_fail_type(where, "input", "a string", e);
    lm_code rc = lm_buf_add(&text, json_string_value(a), json_string_length(a), e);
    if (!rc && b && json_string_length(b)) {
        rc = text.len ? lm_buf_add(&text, "\n", 1, e) : LM_OK;
        rc = rc ? rc : lm_buf_add(&text, json_string_value(b), json_string_length(b), e);
    }
    rc = rc ? rc : add_text(list, "user", text.data ? text.data : "", text.len, e);
    lm_buf_fini(&text);
    return rc;
}

/* An answer that is a text, as a list of one message. */
static lm_code read_answer(const json_t *o, const char *key, const char *where, json_t **out,
                           lm_err *e)
{
    const json_t *v = record_get(o, key);
    if (!json_is_string(v))
        return record_fail_type(where, key, "a string", e);
    *out = json_array();
    return *out ? add_text(*out, "assistant", json_string_value(v), json_string_length(v), e)
                : no_memory(e);
}

lm_code record_alpaca(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    r->form = "Alpaca";
    if (start_list(&r->prompt, o, where, e) || add_history(r->prompt, o, where, e) ||
        add_query(r->prompt, o, where, e))
        return e->code;
    if (has_pair(o)) {
        r->kind = LM_RECORD_PREFERENCE;
        return read_answer(o, "chosen", where, &r->chosen, e) ||
                       read_answer(o, "rejected", where, &r->rejected, e)
                   ? e->code
                   : LM_OK;
    }
    r->kind = record_get(o, "output") ? LM_RECORD_COMPLETION : LM_RECORD_PROMPT;
    return r->kind == LM_RECORD_PROMPT ? LM_OK : read_answer(o, "output", where, &r->completion, e);
}
