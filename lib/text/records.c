/* SPDX-License-Identifier: Apache-2.0 */
/* records.c -- chooses the form of a record by its keys, and reads the plain ones. */
#include "text/records.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "text/records_impl.h"

const char *lm_text_record_kind_name(lm_text_record_kind k)
{
    static const char *const names[LM_RECORD_KINDS] = { "text",       "messages",
                                                        "prompt",     "prompt and completion",
                                                        "preference", "unpaired preference",
                                                        "stepwise" };
    return names[k];
}

void lm_text_record_fini(lm_text_record *r)
{
    json_t *const owned[] = { r->text,   r->messages,  r->prompt, r->completion,
                              r->chosen, r->rejected,  r->steps,  r->right,
                              r->tools,  r->variables, r->line };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        json_decref(owned[i]);
    *r = (lm_text_record){ 0 };
}

bool lm_text_record_is_chat(const lm_text_record *r)
{
    return r->messages || json_is_array(r->prompt) || json_is_array(r->completion) ||
           json_is_array(r->chosen);
}

/* ---- shared with records_forms.c ---- */

json_t *record_get(const json_t *o, const char *key)
{
    json_t *v = json_object_get(o, key);
    return json_is_null(v) ? NULL : v;
}

lm_code record_fail_type(const char *where, const char *key, const char *wanted, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, where, "correct the record, or rename its keys",
                   "\"%s\" is not %s", key, wanted);
}

lm_code record_check(const json_t *v, const char *where, const char *key, lm_err *e)
{
    size_t i;
    json_t *m;
    if (json_is_string(v))
        return LM_OK;
    if (!json_is_array(v))
        return record_fail_type(where, key, "a string or a list of messages", e);
    if (!json_array_size(v))
        return lm_fail(e, LM_EFORMAT, where, "remove the record", "\"%s\" has no message", key);
    json_array_foreach(v, i, m)
    {
        if (!json_is_object(m))
            return lm_fail(e, LM_EFORMAT, where, "write {\"role\": ..., \"content\": ...}",
                           "message %zu of \"%s\" is not an object", i + 1, key);
        if (!json_is_string(json_object_get(m, "role")))
            return lm_fail(e, LM_EFORMAT, where, "name its role, such as user or assistant",
                           "message %zu of \"%s\" has no \"role\"", i + 1, key);
    }
    return LM_OK;
}

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "a record", NULL, "no memory");
}

lm_code record_append(json_t *list, json_t *taken, lm_err *e)
{
    return json_array_append_new(list, taken) ? no_memory(e) : LM_OK;
}

lm_code record_message(const char *role, json_t *content, json_t **out, lm_err *e)
{
    *out = json_pack("{s:s,s:O}", "role", role, "content", content);
    return *out ? LM_OK : no_memory(e);
}

lm_code record_split_last(json_t **list, json_t **last, const char *where, lm_err *e)
{
    size_t n = json_array_size(*list);
    if (n < 2)
        return lm_fail(e, LM_EFORMAT, where, "give a message before the judged answer",
                       "a judged answer without a prompt");
    json_t *copy = json_copy(*list);
    *last = json_pack("[O]", json_array_get(*list, n - 1));
    if (!copy || !*last) {
        json_decref(copy);
        return no_memory(e);
    }
    json_array_remove(copy, n - 1);
    json_decref(*list);
    *list = copy;
    return LM_OK;
}

/* ---- plain forms ---- */

static lm_code keep(json_t **out, json_t *v, const char *where, const char *key, lm_err *e)
{
    if (record_check(v, where, key, e))
        return e->code;
    *out = json_incref(v);
    return LM_OK;
}

/* One key of the record as text or messages. */
static lm_code keep_key(json_t **out, const json_t *o, const char *key, const char *where,
                        lm_err *e)
{
    return keep(out, record_get(o, key), where, key, e);
}

/* Characters (bytes at borders of UTF-8) with which both begin. */
static size_t common_text(const char *a, const char *b)
{
    size_t n = 0;
    while (a[n] && a[n] == b[n])
        n++;
    while (n && ((unsigned char)a[n] & 0xC0) == 0x80)
        n--;
    return n;
}

static json_t *tail(const json_t *list, size_t from)
{
    json_t *out = json_array();
    for (size_t i = from; out && i < json_array_size(list); i++)
        if (json_array_append(out, json_array_get(list, i))) {
            json_decref(out);
            return NULL;
        }
    return out;
}

/* Without a prompt it is what both answers begin with; of texts, up to the last space before they
 * differ, which then begins both answers. */
static lm_code share_prompt(lm_text_record *r, const char *where, lm_err *e)
{
    json_t *c = r->chosen, *d = r->rejected;
    size_t n = 0;
    if (json_is_array(c)) {
        while (n < json_array_size(c) && n < json_array_size(d) &&
               json_equal(json_array_get(c, n), json_array_get(d, n)))
            n++;
        r->chosen = tail(c, n);
        r->rejected = tail(d, n);
        r->prompt = json_array();
        for (size_t i = 0; r->prompt && i < n; i++)
            json_array_append(r->prompt, json_array_get(c, i));
    } else {
        n = common_text(json_string_value(c), json_string_value(d));
        if (n && json_string_value(c)[n - 1] == ' ')
            n--;
        r->chosen = json_string(json_string_value(c) + n);
        r->rejected = json_string(json_string_value(d) + n);
        r->prompt = json_stringn(json_string_value(c), n);
    }
    json_decref(c);
    json_decref(d);
    if (!r->chosen || !r->rejected || !r->prompt)
        return no_memory(e);
    if (!n)
        return lm_fail(e, LM_EFORMAT, where, "give the prompt under \"prompt\"",
                       "chosen and rejected do not begin with a common prompt");
    if (json_is_array(r->chosen) && (!json_array_size(r->chosen) || !json_array_size(r->rejected)))
        return lm_fail(e, LM_EFORMAT, where, "remove the record",
                       "one of the answers ends with the prompt that both begin with");
    return LM_OK;
}

/* A prompt that is a text before answers that are messages, or the reverse. */
static lm_code read_mixed(lm_text_record *r, lm_err *e)
{
    json_t **plain[2] = { &r->prompt, NULL };
    const char *const role[2] = { "user", "assistant" };
    if (json_is_array(r->prompt)) {
        plain[0] = &r->chosen;
        plain[1] = &r->rejected;
    }
    for (int i = 0; i < 2 && plain[i]; i++) {
        json_t *list = json_pack("[{s:s,s:o}]", "role", role[plain[0] != &r->prompt], "content",
                                 *plain[i]); /* takes the text */
        *plain[i] = list;
        if (!list)
            return no_memory(e);
    }
    return LM_OK;
}

/* True for two conversations that begin with the same message: a prompt beside them repeats it. */
static bool are_whole(const lm_text_record *r)
{
    return json_is_array(r->chosen) &&
           json_equal(json_array_get(r->chosen, 0), json_array_get(r->rejected, 0));
}

static lm_code read_preference(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    r->kind = LM_RECORD_PREFERENCE;
    r->form = "chosen and rejected";
    if (keep_key(&r->chosen, o, "chosen", where, e) ||
        keep_key(&r->rejected, o, "rejected", where, e))
        return e->code;
    if (json_typeof(r->chosen) != json_typeof(r->rejected))
        return record_fail_type(where, "rejected", "of the form of \"chosen\"", e);
    if (json_equal(r->chosen, r->rejected)) /* refused by the caller */
        return LM_OK;
    if (!record_get(o, "prompt") || are_whole(r))
        return share_prompt(r, where, e);
    if (keep_key(&r->prompt, o, "prompt", where, e))
        return e->code;
    return json_typeof(r->prompt) == json_typeof(r->chosen) ? LM_OK : read_mixed(r, e);
}

static lm_code read_steps(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    size_t i;
    json_t *v;
    r->kind = LM_RECORD_STEPWISE;
    r->form = "completions and labels";
    json_t *steps = record_get(o, "completions"), *labels = record_get(o, "labels");
    if (!json_is_array(steps) || !json_array_size(steps))
        return record_fail_type(where, "completions", "a list of texts", e);
    if (!json_is_array(labels) || json_array_size(labels) != json_array_size(steps))
        return record_fail_type(where, "labels", "a list with one of true and false for each step",
                                e);
    json_array_foreach(steps, i, v) if (!json_is_string(v)) return record_fail_type(
        where, "completions", "a list of texts", e);
    json_array_foreach(labels, i, v) if (!json_is_boolean(v)) return record_fail_type(
        where, "labels", "a list of true and false", e);
    r->steps = json_incref(steps);
    r->right = json_incref(labels);
    return keep_key(&r->prompt, o, "prompt", where, e);
}

/* true, false, 1, 0: whether an answer is good.  *there is false for other values, which are then a
 * column. */
static void read_label(const json_t *o, bool *there, bool *good)
{
    static const char *const keys[] = { "label", "kto_tag" };
    *there = false;
    for (int k = 0; k < 2 && !*there; k++) {
        const json_t *v = record_get(o, keys[k]);
        json_int_t i = json_is_integer(v) ? json_integer_value(v) : -1;
        *there = json_is_boolean(v) || i == 0 || i == 1;
        *good = *there && (json_is_true(v) || i == 1);
    }
}

/* The answer of a prompt under one of the names, NULL if it is none. */
static const char *answer_key(const json_t *o)
{
    static const char *const keys[] = { "completion", "response" };
    for (int k = 0; k < 2; k++)
        if (record_get(o, keys[k]))
            return keys[k];
    return NULL;
}

static lm_code read_pair(const json_t *o, const char *prompt, const char *completion,
                         const char *where, lm_text_record *r, lm_err *e)
{
    r->kind = LM_RECORD_COMPLETION;
    if (keep_key(&r->prompt, o, prompt, where, e) ||
        keep_key(&r->completion, o, completion, where, e))
        return e->code;
    if (json_typeof(r->prompt) != json_typeof(r->completion))
        return record_fail_type(where, completion, "of the form of the prompt", e);
    return LM_OK;
}

static lm_code read_prompt(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    const char *answer = answer_key(o);
    if (record_get(o, "completions") && record_get(o, "labels"))
        return read_steps(o, where, r, e);
    r->form = answer ? "prompt and completion" : "prompt";
    if (answer)
        return read_pair(o, "prompt", answer, where, r, e);
    r->kind = LM_RECORD_PROMPT;
    return keep_key(&r->prompt, o, "prompt", where, e);
}

static lm_code read_messages(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    r->kind = LM_RECORD_MESSAGES;
    r->form = "messages";
    if (!json_is_array(record_get(o, "messages")))
        return record_fail_type(where, "messages", "a list of messages", e);
    return keep_key(&r->messages, o, "messages", where, e);
}

static lm_code fail_unknown(const json_t *o, const char *where, lm_err *e)
{
    char names[160] = "";
    size_t used = 0;
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v)
    {
        int n = snprintf(names + used, sizeof names - used, "%s\"%.40s\"", used ? ", " : "", key);
        if (n < 0 || (size_t)n >= sizeof names - used) {
            names[used] = 0;
            break;
        }
        used += (size_t)n;
    }
    return lm_fail(
        e, LM_EFORMAT, where, "give messages, prompt and completion, or text; or rename keys",
        *names ? "no form of record has the keys %s" : "an object without keys%s", names);
}

/* The rows of the table in records.h. */
static lm_code read_form(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    static const struct {
        const char *prompt, *completion, *form;
    } pairs[] = { { "question", "answer", "question and answer" },
                  { "input", "output", "input and output" },
                  { "source", "target", "source and target" } };
    bool pair = record_get(o, "chosen") && record_get(o, "rejected");
    bool turns = json_is_object(record_get(o, "chosen")); /* one message each, behind a prompt */
    if (record_get(o, "conversations") || (record_get(o, "messages") && pair && turns))
        return record_sharegpt(o, where, r, e);
    if (record_get(o, "messages") && !pair)
        return read_messages(o, where, r, e);
    if (record_get(o, "instruction"))
        return record_alpaca(o, where, r, e);
    if (pair)
        return read_preference(o, where, r, e);
    if (record_get(o, "prompt"))
        return read_prompt(o, where, r, e);
    if (record_get(o, "text")) {
        r->kind = LM_RECORD_TEXT;
        r->form = "text";
        if (!json_is_string(record_get(o, "text")))
            return record_fail_type(where, "text", "a string", e);
        r->text = json_incref(record_get(o, "text"));
        return LM_OK;
    }
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (record_get(o, pairs[i].prompt) && record_get(o, pairs[i].completion)) {
            r->form = pairs[i].form;
            return read_pair(o, pairs[i].prompt, pairs[i].completion, where, r, e);
        }
    return fail_unknown(o, where, e);
}

/* ---- what all forms share ---- */

/* A list, or a string that holds one: LLaMA-Factory's. */
static lm_code read_tools(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    json_t *v = record_get(o, "tools");
    if (json_is_string(v) && !*json_string_value(v))
        return LM_OK;
    if (json_is_string(v)) {
        lm_err bad = { 0 };
        if (lm_json_parse(json_string_value(v), json_string_length(v), where, &r->tools, &bad))
            return record_fail_type(where, "tools", "a list of tools", e);
    } else {
        r->tools = v ? json_incref(v) : NULL;
    }
    return !r->tools || json_is_array(r->tools)
               ? LM_OK
               : record_fail_type(where, "tools", "a list of tools", e);
}

static lm_code read_rest(const json_t *o, const char *where, lm_text_record *r, lm_err *e)
{
    json_t *v = record_get(o, "chat_template_kwargs");
    bool judged;
    if (v && !json_is_object(v))
        return record_fail_type(where, "chat_template_kwargs", "an object", e);
    r->variables = v ? json_incref(v) : NULL;
    if (read_tools(o, where, r, e))
        return e->code;
    read_label(o, &judged, &r->good);
    if (judged && r->kind == LM_RECORD_MESSAGES) {
        r->prompt = r->messages;
        r->messages = NULL;
        if (record_split_last(&r->prompt, &r->completion, where, e))
            return e->code;
    }
    if (judged && r->completion)
        r->kind = LM_RECORD_UNPAIRED;
    if (r->kind == LM_RECORD_PREFERENCE && json_equal(r->chosen, r->rejected))
        return lm_fail(e, LM_EFORMAT, where, "remove the record",
                       "the chosen and the rejected answer are the same");
    return LM_OK;
}

static lm_code read_object(json_t *line, const char *where, lm_text_record *out, lm_err *e)
{
    out->line = line; /* taken */
    if (!json_is_object(line))
        return lm_fail(e, LM_EFORMAT, where, "write one object on each line",
                       "the record is not a JSON object");
    return read_form(line, where, out, e) || read_rest(line, where, out, e) ? e->code : LM_OK;
}

lm_code lm_text_record_read(const char *line, size_t len, const lm_text_record_map *map,
                            const char *where, lm_text_record *out, lm_err *e)
{
    json_t *o = NULL;
    *out = (lm_text_record){ 0 };
    lm_code rc = lm_json_parse(line, len, where, &o, e);
    if (!rc && map && json_is_object(o))
        rc = record_rename(map, o, where, e);
    if (rc)
        json_decref(o);
    else
        rc = read_object(o, where, out, e);
    if (rc)
        lm_text_record_fini(out);
    return rc;
}

lm_code lm_text_record_of_doc(const lm_doc *doc, const lm_text_record_map *map, lm_text_record *out,
                              lm_err *e)
{
    char where[200];
    snprintf(where, sizeof where, "%.160s:%lld", doc->source, (long long)doc->line);
    if (doc->jsonl)
        return lm_text_record_read(doc->raw.data, doc->raw.len, map, where, out, e);
    *out = (lm_text_record){ .kind = LM_RECORD_TEXT, .form = "plain text" };
    out->text = json_stringn(doc->raw.data, doc->raw.len);
    if (out->text)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, where, "convert it to UTF-8", "the text is not valid UTF-8");
}
