/* SPDX-License-Identifier: Apache-2.0 */
/* clean.c -- see clean.h: the sets of rules over the parts of a text (clean_parts.h). */
#include "text/clean.h"

#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "text/clean_parts.h"

struct lm_clean_scratch {
    lm_parts parts;
    lm_buf kept;  /* the text with the lines that C4 keeps */
    lm_buf small; /* the text in small letters, for searching phrases */
};

#define LM_CLEAN_ROW(id, set, shape, name, dflt, max, help) { name, LM_CLEAN_##set, dflt, help },
static const struct {
    const char *name;
    lm_clean_set set;
    double dflt;
    const char *help;
} rules[LM_RULES] = { LM_CLEAN_RULES(LM_CLEAN_ROW) };

const char *lm_clean_rule_name(lm_clean_rule r)
{
    return rules[r].name;
}

lm_clean_set lm_clean_rule_set(lm_clean_rule r)
{
    return rules[r].set;
}

bool lm_clean_rule_is_line(lm_clean_rule r)
{
    return strncmp(rules[r].help, "line: ", 6) == 0;
}

void lm_clean_defaults(lm_clean_opts *o)
{
    *o = (lm_clean_opts){ .strip_citations = true };
    for (int r = 0; r < LM_RULES; r++) {
        o->rule[r].limit = rules[r].dflt;
        o->rule[r].on = true;
    }
    lm_clean_word_len(o, LM_RULE_MIN_WORD_LEN, NULL);
    lm_clean_word_len(o, LM_RULE_MAX_WORD_LEN, NULL);
}

void lm_clean_word_len(lm_clean_opts *o, lm_clean_rule r, const lm_language *l)
{
    o->rule[r].on = l && l->max_len > 0;
    if (o->rule[r].on)
        o->rule[r].limit = r == LM_RULE_MIN_WORD_LEN ? l->min_len : l->max_len;
}

lm_code lm_clean_scratch_new(lm_clean_scratch **out, lm_err *e)
{
    return lm_alloc_n(out, 1, sizeof **out, "scratch for cleaning", e);
}

void lm_clean_scratch_free(lm_clean_scratch *s)
{
    if (!s)
        return;
    lm_parts_fini(&s->parts);
    lm_buf_fini(&s->kept);
    lm_buf_fini(&s->small);
    lm_free(s);
}

static bool above(const lm_clean_opts *o, lm_clean_rule r, double value)
{
    return value > o->rule[r].limit;
}

static bool below(const lm_clean_opts *o, lm_clean_rule r, double value)
{
    return value < o->rule[r].limit;
}

/* ---- gopher: repetition ---- */

static lm_code judge_repetition(const lm_clean_opts *o, lm_parts *p, int *rule, lm_err *e)
{
    double chars = p->chars ? (double)p->chars : 1;
    lm_repeats lines, paras;
    lm_code rc = lm_parts_repeats(p, LM_UNIT_LINE, &lines, e);
    if (!rc)
        rc = lm_parts_repeats(p, LM_UNIT_PARAGRAPH, &paras, e);
    if (rc)
        return rc;
    if (above(o, LM_RULE_DUP_LINES, lines.share))
        *rule = LM_RULE_DUP_LINES;
    else if (above(o, LM_RULE_DUP_LINE_CHARS, (double)lines.chars / chars))
        *rule = LM_RULE_DUP_LINE_CHARS;
    else if (above(o, LM_RULE_DUP_PARAS, paras.share))
        *rule = LM_RULE_DUP_PARAS;
    else if (above(o, LM_RULE_DUP_PARA_CHARS, (double)paras.chars / chars))
        *rule = LM_RULE_DUP_PARA_CHARS;
    for (int n = 2; n <= 10 && !rc && *rule < 0; n++) {
        lm_clean_rule r = (lm_clean_rule)(LM_RULE_TOP_2 + n - 2);
        int64_t found = 0;
        rc = n <= 4 ? lm_parts_top_gram(p, n, &found, e) : lm_parts_dup_grams(p, n, &found, e);
        if (!rc && above(o, r, (double)found / chars))
            *rule = (int)r;
    }
    return rc;
}

/* ---- gopher: quality ---- */

static int judge_quality(const lm_clean_opts *o, const lm_parts *p)
{
    double words = p->n_words ? (double)p->n_words : 1;
    double plain = p->plain_words ? (double)p->plain_words : 1;
    double lines = p->n_lines ? (double)p->n_lines : 1;
    double mean = (double)p->plain_chars / plain;
    const struct {
        lm_clean_rule rule;
        bool failed;
    } checks[] = {
        { LM_RULE_MIN_WORDS, below(o, LM_RULE_MIN_WORDS, (double)p->plain_words) },
        { LM_RULE_MAX_WORDS, above(o, LM_RULE_MAX_WORDS, (double)p->plain_words) },
        { LM_RULE_MIN_WORD_LEN,
          o->rule[LM_RULE_MIN_WORD_LEN].on && below(o, LM_RULE_MIN_WORD_LEN, mean) },
        { LM_RULE_MAX_WORD_LEN,
          o->rule[LM_RULE_MAX_WORD_LEN].on && above(o, LM_RULE_MAX_WORD_LEN, mean) },
        { LM_RULE_HASHES, above(o, LM_RULE_HASHES, (double)p->hashes / words) },
        { LM_RULE_ELLIPSES, above(o, LM_RULE_ELLIPSES, (double)p->ellipses / words) },
        { LM_RULE_BULLETS, above(o, LM_RULE_BULLETS, (double)p->bullet_lines / lines) },
        { LM_RULE_ELLIPSIS_LINES,
          above(o, LM_RULE_ELLIPSIS_LINES, (double)p->ellipsis_lines / lines) },
        { LM_RULE_ALPHA, below(o, LM_RULE_ALPHA, (double)p->alpha_words / words) },
        { LM_RULE_STOP_WORDS, o->stop && below(o, LM_RULE_STOP_WORDS, (double)p->stop_words) },
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (checks[i].failed)
            return (int)checks[i].rule;
    return -1;
}

/* ---- c4 ---- */

/* Both in small letters. */
static bool holds(const char *s, size_t n, const char *what)
{
    return s && memmem(s, n, what, strlen(what));
}

static bool holds_policy(const char *s, size_t n)
{
    static const char *const phrases[] = { "cookie policy", "uses cookies", "use of cookies",
                                           "use cookies" };
    if (holds(s, n, "terms of use") || holds(s, n, "privacy policy"))
        return true;
    for (size_t i = 0; holds(s, n, "cookie") && i < sizeof phrases / sizeof *phrases; i++)
        if (holds(s, n, phrases[i]))
            return true;
    return false;
}

static lm_code add_small(lm_buf *b, const char *s, size_t n, lm_err *e)
{
    b->len = 0;
    lm_code rc = lm_buf_room(b, n, e);
    for (size_t i = 0; !rc && i < n; i++)
        b->data[i] = (char)(s[i] + (s[i] >= 'A' && s[i] <= 'Z' ? 32 : 0));
    return rc;
}

/* The line rule that drops s[0..n), trimmed; -1 keeps it.  small[0..m) is the untrimmed line in
 * small letters. */
static int judge_line(const lm_clean_opts *o, const char *s, size_t n, const char *small, size_t m)
{
    int64_t words, longest;
    lm_line_words(s, n, &words, &longest);
    if (above(o, LM_RULE_LINE_WORD_LEN, (double)longest))
        return LM_RULE_LINE_WORD_LEN;
    if (o->rule[LM_RULE_LINE_PUNCT].on && !lm_line_ends_sentence(s, n))
        return LM_RULE_LINE_PUNCT;
    if (below(o, LM_RULE_LINE_WORDS, (double)words))
        return LM_RULE_LINE_WORDS;
    if (o->rule[LM_RULE_LINE_SCRIPT].on && holds(small, m, "javascript"))
        return LM_RULE_LINE_SCRIPT;
    if (o->rule[LM_RULE_LINE_POLICY].on && holds_policy(small, m))
        return LM_RULE_LINE_POLICY;
    return -1;
}

/* Length of the citation mark at s: [12], [], [edit], [citation needed]; 0 if none. */
static size_t citation(const char *s, size_t n)
{
    static const char *const marks[] = { "[edit]", "[citation needed]" };
    size_t i = 1;
    while (i < n && s[i] >= '0' && s[i] <= '9')
        i++;
    if (i < n && s[i] == ']')
        return i + 1;
    for (size_t k = 0; k < 2; k++)
        if (n >= strlen(marks[k]) && memcmp(s, marks[k], strlen(marks[k])) == 0)
            return strlen(marks[k]);
    return 0;
}

static lm_code add_without_citations(lm_buf *out, const char *s, size_t n, lm_err *e)
{
    size_t from = 0;
    for (size_t i = 0; i < n;) {
        size_t k = s[i] == '[' ? citation(s + i, n - i) : 0;
        if (!k) {
            i++;
            continue;
        }
        lm_code rc = lm_buf_add(out, s + from, i - from, e);
        if (rc)
            return rc;
        i += k;
        from = i;
    }
    return lm_buf_add(out, s + from, n - from, e);
}

static lm_code judge_c4(const lm_clean_opts *o, lm_clean_scratch *s, lm_clean_result *r, lm_err *e)
{
    const char *at = r->text, *end = r->text + r->len;
    int64_t sentences = 0, dropped = 0;
    lm_code rc = add_small(&s->small, r->text, r->len, e);
    if (rc)
        return rc;
    const char *small = s->small.data;
    if (o->rule[LM_RULE_LOREM].on && holds(small, r->len, "lorem ipsum")) {
        r->rule = LM_RULE_LOREM;
        return LM_OK;
    }
    if (o->rule[LM_RULE_CURLY].on && memchr(r->text, '{', r->len)) {
        r->rule = LM_RULE_CURLY;
        return LM_OK;
    }
    s->kept.len = 0;
    for (bool more = true; more;) {
        const char *nl = memchr(at, '\n', (size_t)(end - at)), *stop = nl ? nl : end;
        const char *a = at, *b = stop;
        lm_trim(&a, &b);
        size_t from = s->kept.len ? s->kept.len + 1 : 0;
        rc = from ? lm_buf_add(&s->kept, "\n", 1, e) : LM_OK;
        if (!rc && o->strip_citations)
            rc = add_without_citations(&s->kept, a, (size_t)(b - a), e);
        else if (!rc)
            rc = lm_buf_add(&s->kept, a, (size_t)(b - a), e);
        if (rc)
            return rc;
        const char *line = s->kept.data ? s->kept.data + from : "", *tail = line;
        tail += s->kept.len - from;
        lm_trim(&line, &tail); /* the space before a mark at the end is kept */
        s->kept.len -= (size_t)(s->kept.data + s->kept.len - tail);
        int why = b > a ? judge_line(o, line, (size_t)(tail - line), small + (a - r->text),
                                     (size_t)(b - a))
                        : -1;
        if (why >= 0) {
            r->lines[why]++;
            dropped++;
            s->kept.len = from ? from - 1 : 0;
        } else if (b > a) {
            sentences += lm_line_sentences(line, (size_t)(tail - line));
        } else {
            s->kept.len = from ? from - 1 : 0; /* blank lines are dropped without being counted */
        }
        more = nl != NULL;
        at = more ? nl + 1 : end;
    }
    if (below(o, LM_RULE_SENTENCES, (double)sentences))
        r->rule = LM_RULE_SENTENCES;
    if (dropped || s->kept.len != r->len ||
        (r->len && memcmp(s->kept.data, r->text, r->len) != 0)) {
        r->text = s->kept.data ? s->kept.data : "";
        r->len = s->kept.len;
    }
    return LM_OK;
}

/* ---- fineweb ---- */

static lm_code judge_fineweb(const lm_clean_opts *o, lm_parts *p, int *rule, lm_err *e)
{
    double lines = p->n_lines ? (double)p->n_lines : 1;
    double chars = p->chars > p->newlines ? (double)(p->chars - p->newlines) : 1;
    double words = p->n_words ? (double)p->n_words : 1;
    lm_repeats rep;
    lm_code rc = lm_parts_repeats(p, LM_UNIT_LINE, &rep, e);
    if (rc)
        return rc;
    if (below(o, LM_RULE_FW_PUNCT, (double)p->sentence_lines / lines))
        *rule = LM_RULE_FW_PUNCT;
    else if (above(o, LM_RULE_FW_SHORT, (double)p->short_lines / lines))
        *rule = LM_RULE_FW_SHORT;
    else if (above(o, LM_RULE_FW_DUP_CHARS, (double)rep.chars / chars))
        *rule = LM_RULE_FW_DUP_CHARS;
    else if (above(o, LM_RULE_FW_NEWLINES, (double)p->newlines / words))
        *rule = LM_RULE_FW_NEWLINES;
    return LM_OK;
}

lm_code lm_clean_text(const lm_clean_opts *o, lm_clean_scratch *s, const char *text, size_t len,
                      lm_clean_result *r, lm_err *e)
{
    lm_code rc = LM_OK;
    *r = (lm_clean_result){ .rule = -1, .text = text, .len = len };
    if (o->set[LM_CLEAN_GOPHER]) {
        rc = lm_parts_split(&s->parts, text, len, o->stop, e);
        if (!rc)
            rc = judge_repetition(o, &s->parts, &r->rule, e);
        if (!rc && r->rule < 0)
            r->rule = judge_quality(o, &s->parts);
    }
    if (!rc && r->rule < 0 && o->set[LM_CLEAN_C4])
        rc = judge_c4(o, s, r, e);
    if (!rc && r->rule < 0 && o->set[LM_CLEAN_FINEWEB]) {
        rc = lm_parts_split(&s->parts, r->text, r->len, NULL, e);
        if (!rc)
            rc = judge_fineweb(o, &s->parts, &r->rule, e);
    }
    return rc;
}
