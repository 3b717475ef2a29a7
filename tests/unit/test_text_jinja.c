/* SPDX-License-Identifier: Apache-2.0 */
/* The Jinja language of chat templates: what a template gives, what it is refused for, and its limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "text/jinja.h"

static const char variables[] =
    "{\"s\": \"H\xC3\xA9llo\", \"n\": 5, \"e\": \"\", \"z\": null, \"l\": [3, 1, 2],"
    " \"d\": {\"b\": 1, \"items\": 9, \"a\": [1, \"x\"]},"
    " \"m\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": "
    "\"yo\"}]}";

static lm_code render(const char *text, const lm_jinja_limits *l, lm_buf *out, lm_text_spans *spans,
                      lm_err *e)
{
    lm_jinja *t = NULL;
    json_t *vars = NULL;
    lm_code rc = lm_json_parse(variables, strlen(variables), "vars", &vars, e);

    if (!rc)
        rc = lm_jinja_compile(text, strlen(text), "t", &t, e);
    if (!rc)
        rc = lm_jinja_render(t, vars, l, out, spans, e);
    lm_jinja_free(t);
    json_decref(vars);
    return rc;
}

static const struct {
    const char *text, *want;
} good[] = {
    { "{{ 1 + 2 * 3 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }}", "7 3 2 3.5 1024" },
    { "{{ s[1] }}{{ s[-1] }} {{ s[1:3] }} {{ s[::-1] }} {{ s|length }}",
      "\xC3\xA9o \xC3\xA9l oll\xC3\xA9H 5" },
    { "{{ d['items'] }}{{ d.items()|list }}", "9[('b', 1), ('items', 9), ('a', [1, 'x'])]" },
    { "{{ nothing }}{{ nothing is defined }}{{ d.q|default('x') }}", "Falsex" },
    { "{% for x in l %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% endfor %}", "13,21,32" },
    { "{% for x in l if x > 9 %}a{% else %}b{% endfor %}", "b" },
    { "{% for k, v in d|dictsort %}{{ k }}{% endfor %}", "abitems" },
    { "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "32" },
    { "{% for x in l %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "31" },
    { "{% set a = 1 %}{% for x in l %}{% set a = 2 %}{% endfor %}{{ a }}", "1" },
    { "{% set ns = namespace(a=1) %}{% for x in l %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a "
      "}}",
      "7" },
    { "{% macro f(a, b=2) %}[{{ a }}{{ b }}]{% endmacro %}{{ f(1) }}{{ f(b=3, a=4) }}",
      "[12][43]" },
    { "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}{{ n }}{% endcall %}", "<5>" },
    { "{% filter upper %}a{{ n }}{% endfilter %}{% set x | trim %} b {% endset %}[{{ x }}]",
      "A5[b]" },
    { "{% raw %}{{ x }}{% endraw %}{# no #}!", "{{ x }}!" },
    { "  {% if n %}\n  x\n  {% endif %}\ny", "  x\ny" },
    { "a  {%- if n -%}  b  {%- endif +%}  c", "ab  c" },
    { "{{ m|map(attribute='role')|join(',') }}{{ m|selectattr('role', 'eq', 'user')|list|length }}",
      "user,assistant1" },
    { "{{ {'a': [1, 2.0, none, true], 'b': 'x\"\xC3\xA9\\n'}|tojson }}",
      "{\"a\": [1, 2.0, null, true], \"b\": \"x\\\"\xC3\xA9\\n\"}" },
    { "{{ {'b': [], 'a': [1]}|tojson(indent=2, sort_keys=true) }}",
      "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}" },
    { "{{ [1, 'it\\'s', 1e16, none] }}", "[1, \"it's\", 1e+16, None]" },
    { "{{ '%s-%03d'|format('a', 7) }}{{ '{} {b!r}'.format(1, b='c') }}", "a-0071 'c'" },
    { "{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'abc'.replace('b', '') }}", "['a', 'b']xac" },
    { "{{ 1 < 2 < 3 }}{{ 2 in l }}{{ 'x' not in s }}{{ n is odd and not e }}", "TrueTrueTrueTrue" },
    { "{{ strftime_now('%Y-%m') }}", "2001-09" },
};

static void test_renders(void **state)
{
    const lm_jinja_limits l = { .now = 1000000000 };

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        lm_buf out = { 0 };
        lm_err e = { 0 };

        if (render(good[i].text, &l, &out, NULL, &e))
            fail_msg("%s: %s: %s", good[i].text, e.where, e.what);
        assert_string_equal(out.data ? out.data : "", good[i].want);
        lm_buf_fini(&out);
    }
}

static const struct {
    const char *text, *where, *what;
} bad[] = {
    { "a\n  {{ nothing.x }}", "t: line 2, column 14", "'nothing' is undefined" },
    { "{{ raise_exception('no ' ~ n) }}", "t: line 1, column 19", "the template refuses: no 5" },
    { "{{ 'a' + 1 }}", "t: line 1, column 8", "can only concatenate str (not \"int\") to str" },
    { "{{ s.__class__.x }}", NULL, "unsafe" },
    { "{{ l.append(1) }}", NULL, "unsafe" },
    { "{{ z|length }}", NULL, "has no len()" },
    { "{{ 1 // 0 }}", NULL, "by zero" },
    { "{% for a, b in [[1]] %}{% endfor %}", NULL, "not enough values to unpack" },
    { "{{ n|nosuch }}", NULL, "no filter is named 'nosuch'" },
    { "{{ n is nosuch }}", NULL, "no test is named 'nosuch'" },
    { "{{ 99999999999999999999 }}", NULL, "64 bits" },
    { "{{ 9223372036854775807 + 1 }}", NULL, "64 bits" },
    { "{% include 'x' %}", "t: line 1, column 4", "'include' is not supported" },
    { "{% for x in l recursive %}{% endfor %}", NULL, "recursive" },
    { "{% if n %}", NULL, "the template ends where 'elif' is needed" },
    { "{% endif %}", NULL, "no statement is named 'endif'" },
    { "{{ (1 }}", NULL, "" },
    { "{{ 'x }}", "t: line 1, column 4", "a string has no end" },
    { "x {# y", NULL, "a comment has no end" },
    { "{% break %}", NULL, "outside a loop" },
    { "{{ n", NULL, "ends inside {{ }}" },
};

static void test_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_buf out = { 0 };
        lm_err e = { 0 };

        assert_int_equal(render(bad[i].text, NULL, &out, NULL, &e), LM_EFORMAT);
        if (bad[i].where)
            assert_string_equal(e.where, bad[i].where);
        assert_non_null(strstr(e.where, "line "));
        if (!strstr(e.what, bad[i].what))
            fail_msg("%s: %s", bad[i].text, e.what);
        lm_buf_fini(&out);
    }
}

/* Each would run, grow or recurse without end. */
static void test_limits(void **state)
{
    static const char *const texts[] = {
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% "
        "endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor "
        "%}{{ ns.x }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% for i in range(99999) %}{{ s * 100000 }}{% endfor %}",
    };
    const lm_jinja_limits l = { .steps = 2000000, .memory = 64 << 20, .output = 1 << 20 };

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        lm_buf out = { 0 };
        lm_err e = { 0 };
        lm_code rc = render(texts[i], &l, &out, NULL, &e);

        if (rc != LM_ELIMIT)
            fail_msg("%s: %d %s", texts[i], rc, e.what);
        assert_true(out.len <= 1 << 20);
        lm_buf_fini(&out);
    }
}

/* Long texts count as work wherever all of their characters are read, in each of 300 passes over 100,000. */
static void test_work(void **state)
{
    static const char *const texts[][2] = {
        { "x", "a|upper" },      { "x", "a.lower()" },     { "x", "a|capitalize" },
        { "x", "a|title" },      { "X", "a.isupper()" },   { "X", "a is upper" },
        { "x", "a.isalpha()" },  { "1", "a.isdigit()" },   { " ", "a|trim" },
        { " ", "a.strip()" },    { " ", "a.split()" },     { " ", "a.rsplit()" },
        { " ", "a|int" },        { " ", "a|float" },       { "x", "a.splitlines()" },
        { "&", "a|e" },          { "\u00e9", "a[99999]" }, { "\u00e9", "a|length" },
        { "\u00e9", "a[::-1]" },
    };
    const lm_jinja_limits l = { .steps = 2000000, .memory = 512 << 20 };

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char text[200];
        lm_buf out = { 0 };
        lm_err e = { 0 };

        snprintf(
            text, sizeof text,
            "{%% set a = '%s' * 100000 %%}{%% for i in range(300) %%}{%% set b = %s %%}{%% endfor "
            "%%}",
            texts[i][0], texts[i][1]);
        if (render(text, &l, &out, NULL, &e) != LM_ELIMIT || !strstr(e.what, "too much work"))
            fail_msg("%s: %s", text, e.what);
        lm_buf_fini(&out);
    }
}

static void test_deep(void **state)
{
    lm_buf text = { 0 }, out = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_buf_add(&text, "{{ ", 3, &e), 0);
    for (int i = 0; i < 100000; i++)
        assert_int_equal(lm_buf_add(&text,
                                    i % 3   ? "["
                                    : i % 2 ? "-"
                                            : "not ",
                                    i % 3   ? 1
                                    : i % 2 ? 1
                                            : 4,
                                    &e),
                         0);
    assert_int_equal(render(text.data, NULL, &out, NULL, &e), LM_EFORMAT);
    lm_buf_fini(&text);
    lm_buf_fini(&out);
}

static void test_marks(void **state)
{
    lm_text_spans spans = { 0 };
    lm_buf out = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_buf_add(&out, "old", 3, &e), 0);
    assert_int_equal(render("{% for x in m %}[{{ s }}{% generation %}{{ x.content }}{% "
                            "endgeneration %}]{% endfor %}",
                            NULL, &out, &spans, &e),
                     0);
    assert_string_equal(out.data, "old[H\xC3\xA9llohi][H\xC3\xA9lloyo]");
    assert_int_equal(spans.n, 2);
    assert_memory_equal(out.data + spans.v[0].from, "hi]", 3);
    assert_memory_equal(out.data + spans.v[1].from, "yo]", 3);
    assert_int_equal(spans.v[1].to - spans.v[1].from, 2);
    lm_text_spans_fini(&spans);
    lm_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_renders), cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_limits),  cmocka_unit_test(test_deep),
        cmocka_unit_test(test_work),    cmocka_unit_test(test_marks),
    };

    return cmocka_run_group_tests_name("text_jinja", tests, NULL, NULL);
}
