/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates of models: where they come from, the assistant's turns in their text, and the ids that train. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "text/chat.h"

static const char two_turns[] =
    "[{\"role\": \"user\", \"content\": \"one\"}, {\"role\": \"assistant\", \"content\": \" two\"},"
    " {\"role\": \"user\", \"content\": \"three\"}, {\"role\": \"assistant\", \"content\": "
    "\"four\"}]";

static json_t *parse(const char *text)
{
    lm_err e = { 0 };
    json_t *j = NULL;

    assert_int_equal(lm_json_parse(text, strlen(text), "test", &j, &e), 0);
    return j;
}

static lm_chat *open_text(const char *template)
{
    json_t *tokens = parse("{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}");
    lm_chat *c = NULL;
    lm_err e = { 0 };

    if (lm_chat_new(template, strlen(template), "t", tokens, &c, &e))
        fail_msg("%s: %s", e.where, e.what);
    json_decref(tokens);
    return c;
}

/* The marked parts of the text, each in brackets. */
static lm_code mark(const char *template, const char *messages, lm_chat_turns turns, char *out,
                    lm_err *e)
{
    lm_chat *c = open_text(template);
    json_t *list = parse(messages);
    const lm_chat_request q = { .messages = list };
    lm_text_spans spans = { 0 };
    lm_buf text = { 0 };
    lm_code rc = lm_buf_add(&text, "before", 6, e);

    *out = 0;
    rc = rc ? rc : lm_chat_render_marked(c, &q, turns, &text, &spans, e);
    for (size_t i = 0; !rc && i < spans.n; i++)
        sprintf(out + strlen(out), "[%.*s]", (int)(spans.v[i].to - spans.v[i].from),
                text.data + spans.v[i].from);
    lm_text_spans_fini(&spans);
    lm_buf_fini(&text);
    json_decref(list);
    lm_chat_free(c);
    return rc;
}

static const struct {
    const char *name, *template, *want, *last;
} forms[] = {
    { "prompts are prefixes",
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if "
      "add_generation_prompt %}<assistant>{% endif %}",
      "[ two<end>\n][four<end>\n]", "[four<end>\n]" },
    { "marks of the template",
      "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ "
      "m.content }}.{% endgeneration %}{% endif %}{% endfor %}",
      "[ two.][four.]", "[four.]" },
    { "no header of answers", "{% for m in messages %}[{{ m.content }}]{% endfor %}",
      "[[ two]][[four]]", "[[four]]" },
    /* what the prompt opens is not in the text: the answer begins where they part */
    { "a prompt that opens more",
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if "
      "add_generation_prompt %}<assistant><think>{% endif %}",
      "[ two<end>][four<end>]", "[four<end>]" },
    /* earlier answers lose what the last one has */
    { "the last answer has more",
      "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' "
      "%}<thought>{% endif %}{{ m.content | trim }}<end>{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}",
      "[two<end>][<thought>four<end>]", "[<thought>four<end>]" },
    { "a token behind everything",
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{{ '<assistant>' if "
      "add_generation_prompt else eos_token }}",
      "[ two<end>][four<end></s>]", "[four<end></s>]" },
};

static void test_turns(void **state)
{
    char got[500];

    (void)state;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        lm_err e = { 0 };

        if (mark(forms[i].template, two_turns, LM_CHAT_ASSISTANT, got, &e))
            fail_msg("%s: %s: %s", forms[i].name, e.where, e.what);
        if (strcmp(got, forms[i].want) != 0)
            fail_msg("%s: %s", forms[i].name, got);
        assert_int_equal(mark(forms[i].template, two_turns, LM_CHAT_LAST, got, &e), 0);
        assert_string_equal(got, forms[i].last);
    }
}

static void test_no_turns(void **state)
{
    lm_err e = { 0 };
    char got[100];

    (void)state;
    assert_int_equal(mark(forms[0].template, "[{\"role\": \"user\", \"content\": \"x\"}]",
                          LM_CHAT_ASSISTANT, got, &e),
                     0);
    assert_string_equal(got, "");
    /* an answer that is changed by what follows, and has no text to find it by */
    assert_int_equal(mark("{% for m in messages %}{{ loop.revindex }}{{ m.role }}{% endfor %}",
                          two_turns, LM_CHAT_ASSISTANT, got, &e),
                     LM_EFORMAT);
    assert_non_null(strstr(e.what, "message 2"));
    assert_non_null(strstr(e.todo, "{% generation %}"));
}

static lm_code render(const char *template, const char *messages, bool prompt, bool more,
                      lm_buf *out, lm_err *e)
{
    lm_chat *c = open_text(template);
    json_t *list = parse(messages);
    const lm_chat_request q = { .messages = list,
                                .add_generation_prompt = prompt,
                                .continue_final = more };
    lm_code rc = lm_chat_render(c, &q, out, e);

    json_decref(list);
    lm_chat_free(c);
    return rc;
}

static void test_request(void **state)
{
    static const char all[] = "{{ bos_token }}{% for m in messages %}{{ m|tojson }}{% endfor %}{{ "
                              "tools is none }}{{ documents is none }}{{ x is defined }}";
    lm_buf out = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(render(all, "[{\"role\": \"user\", \"content\": null, \"reasoning\": \"r\"}]",
                            false, false, &out, &e),
                     0);
    assert_string_equal(out.data, "<s>{\"thinking\": \"r\", \"role\": \"user\", \"reasoning\": "
                                  "\"r\", \"reasoning_content\": \"r\"}TrueTrueFalse");
    out.len = 0;
    assert_int_equal(render(forms[0].template, two_turns, false, true, &out, &e), 0);
    assert_string_equal(out.data,
                        "<user>one<end>\n<assistant> two<end>\n<user>three<end>\n<assistant>four");
    out.len = 0;
    assert_int_equal(render("{% for m in messages %}{{ m.content|trim }}{% endfor %}",
                            "[{\"role\": \"a\", \"content\": \"x  \"}]", false, true, &out, &e),
                     0);
    assert_string_equal(out.data, "x");
    lm_buf_fini(&out);
}

static void test_bad_requests(void **state)
{
    static const char *const bad[] = { "[]", "{}", "[1]", "[{\"content\": \"x\"}]",
                                       "[{\"role\": 1}]" };
    lm_buf out = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };

        assert_int_equal(render(forms[0].template, bad[i], false, false, &out, &e), LM_EUSAGE);
    }
    lm_err e = { 0 };
    assert_int_equal(render(forms[0].template, two_turns, true, true, &out, &e), LM_EUSAGE);
    lm_err hidden = { 0 };
    assert_int_equal(render("nothing", two_turns, false, true, &out, &hidden), LM_EFORMAT);
    lm_buf_fini(&out);
}

/* A byte-level tokenizer: every byte a token, " t" and "wo" merged, and <end> special. */
static lm_tokenizer *make_tokenizer(const char *normalizer)
{
    lm_buf json = { 0 };
    lm_tokenizer *t = NULL;
    lm_err e = { 0 };

    assert_int_equal(
        lm_buf_addf(&json, &e,
                    "{\"version\": \"1.0\", \"added_tokens\": [{\"id\": 258, \"content\": "
                    "\"<end>\", \"special\": true,"
                    " \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                    "\"normalized\": false}],"
                    " \"normalizer\": %s, \"pre_tokenizer\": {\"type\": \"ByteLevel\", "
                    "\"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": true},"
                    " \"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\", "
                    "\"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": true},"
                    " \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                    "\"continuing_subword_prefix\": null,"
                    " \"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
                    "\"vocab\": {",
                    normalizer),
        0);
    for (int byte = 0, other = 256; byte < 256; byte++) { /* GPT-2's characters for bytes */
        bool own = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);

        assert_int_equal(lm_buf_addf(&json, &e, "\"\\u%04x\": %d, ", own ? byte : other, byte), 0);
        other += !own;
    }
    assert_int_equal(
        lm_buf_addf(&json, &e,
                    "\"\\u0120t\": 256, \"wo\": 257}, \"merges\": [\"\\u0120 t\", \"w o\"]}}"),
        0);
    if (lm_tokenizer_from_json(json.data, json.len, NULL, 0, "tok", &t, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_buf_fini(&json);
    return t;
}

static void check_ids(const char *normalizer, const char *text, size_t from, size_t to,
                      const char *want)
{
    lm_tokenizer *t = make_tokenizer(normalizer);
    lm_tok_scratch *s = NULL;
    lm_text_spans spans = { 0 };
    lm_buf flags = { 0 };
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_text_spans_add(&spans, from, to, &e), 0);
    if (lm_chat_encode(t, s, text, strlen(text), &spans, &ids, &flags, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_int_equal(ids.n, flags.len);
    for (size_t i = 0; i < flags.len; i++)
        flags.data[i] = flags.data[i] ? '1' : '0';
    assert_string_equal(flags.data, want);
    lm_text_spans_fini(&spans);
    lm_buf_fini(&flags);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
}

/* A token trains if any of its bytes is in a span. */
static void test_ids(void **state)
{
    (void)state;
    check_ids("null", "a two<end>b", 1, 10, "01110"); /* a, " t", wo, <end>, b */
    check_ids("null", "a two<end>b", 2, 5, "01100");  /* " t" begins before the span */
    check_ids("null", "a two<end>b", 5, 10, "00010"); /* the special token alone */
    check_ids("null", "\xC3\xA9two", 2, 5, "0011");   /* two bytes, t, wo */
    /* a normaliser that makes the text longer: encoded in parts */
    check_ids("{\"type\": \"NFD\"}", "\xC3\xA9two", 2, 4, "000110"); /* e, two bytes, t | w | o */
}

static void test_named(void **state)
{
    lm_err e = { 0 };
    lm_chat *c = NULL;

    (void)state;
    for (int i = 0; lm_chat_names[i]; i++) {
        assert_int_equal(lm_chat_open(NULL, NULL, lm_chat_names[i], &c, &e), 0);
        lm_chat_free(c);
    }
    assert_int_equal(lm_chat_open(NULL, NULL, "nosuch", &c, &e), LM_EUSAGE);
    assert_null(c);
    assert_non_null(strstr(e.todo, "chatml"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),   cmocka_unit_test(test_no_turns),
        cmocka_unit_test(test_request), cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_ids),     cmocka_unit_test(test_named),
    };

    return cmocka_run_group_tests_name("text_chat", tests, NULL, NULL);
}
