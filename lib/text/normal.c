/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing and running the normalisers of normal.h. */
#include "text/normal.h"

#include <string.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/bpe.h"
#include "text/charsmap.h"
#include "text/normal_form.h"
#include "text/pretok_class.h"

enum { MAX_STEPS = 64, MAX_DEPTH = 8, DROPPED = 0x80 };

typedef enum {
    STEP_FORM,
    STEP_LOWER,
    STEP_STRIP,
    STEP_MARKS,   /* StripAccents: all marks */
    STEP_ACCENTS, /* BertNormalizer: non-spacing marks only */
    STEP_REPLACE,
    STEP_PREPEND,
    STEP_BYTES,
    STEP_CLEAN,
    STEP_CHINESE,
    STEP_CHARSMAP,
    STEP_NMT,
} step_kind;

typedef struct {
    step_kind kind;
    lm_form form;
    bool left, right;   /* STEP_STRIP */
    lm_regex *regex;    /* STEP_REPLACE */
    char *text;         /* replacement, or what to prepend */
    lm_charsmap *map;   /* STEP_CHARSMAP */
    uint8_t ascii[128]; /* steps of map_char: what ASCII characters become, or DROPPED */
} step;

struct lm_normal {
    step steps[MAX_STEPS];
    int n;
};

static lm_code add_step(lm_normal *n, step s, const char *where, lm_err *e)
{
    if (n->n == MAX_STEPS)
        return lm_fail(e, LM_EFORMAT, where, NULL, "more than %d normalizers", MAX_STEPS);
    n->steps[n->n++] = s;
    return LM_OK;
}

lm_code lm_pattern_from_json(const json_t *j, const char *where, lm_regex **out, const char **text,
                             lm_err *e)
{
    const json_t *p = json_object_get(j, "pattern"), *s;
    bool literal = (s = json_object_get(p, "String")) != NULL;

    if (!s)
        s = json_object_get(p, "Regex");
    if (!json_is_string(s))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "\"pattern\" must be {\"String\": ...} or {\"Regex\": ...}");
    if (text)
        *text = literal ? NULL : json_string_value(s);
    return lm_regex_new(json_string_value(s), json_string_length(s), literal, where, out, e);
}

static lm_code parse_bert(const json_t *j, lm_normal *n, const char *where, lm_err *e)
{
    bool clean = true, chinese = true, lower = true, accents = true;
    lm_code rc = lm_json_bool_or(j, "clean_text", true, &clean, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "handle_chinese_chars", true, &chinese, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "lowercase", true, &lower, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "strip_accents", lower, &accents, where, e);
    if (!rc && clean)
        rc = add_step(n, (step){ .kind = STEP_CLEAN }, where, e);
    if (!rc && chinese)
        rc = add_step(n, (step){ .kind = STEP_CHINESE }, where, e);
    if (!rc && accents)
        rc = add_step(n, (step){ .kind = STEP_FORM, .form = LM_NFD }, where, e);
    if (!rc && accents)
        rc = add_step(n, (step){ .kind = STEP_ACCENTS }, where, e);
    if (!rc && lower)
        rc = add_step(n, (step){ .kind = STEP_LOWER }, where, e);
    return rc;
}

/* Replace and Prepend: the steps with memory of their own. */
static lm_code parse_text_step(const json_t *j, step s, const char *key, lm_normal *n,
                               const char *where, lm_err *e)
{
    const char *text;
    lm_code rc = lm_json_str_or(j, key, NULL, &text, where, e);

    if (!rc && !text)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\" is missing", key);
    if (!rc)
        rc = add_step(n, s, where, e);
    if (rc)
        return rc;
    step *to = &n->steps[n->n - 1];
    rc = lm_strdup(&to->text, text, e);
    if (!rc && s.kind == STEP_REPLACE)
        rc = lm_pattern_from_json(j, where, &to->regex, NULL, e);
    return rc;
}

static lm_code parse_charsmap(const json_t *j, lm_normal *n, const char *where, lm_err *e)
{
    const json_t *coded = json_object_get(j, "precompiled_charsmap");
    lm_code rc;

    if (!json_is_string(coded))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "\"precompiled_charsmap\" is missing or not a text");
    if (!json_string_length(coded)) /* identity */
        return LM_OK;
    rc = add_step(n, (step){ .kind = STEP_CHARSMAP }, where, e);
    return rc ? rc
              : lm_charsmap_new(json_string_value(coded), json_string_length(coded), where,
                                &n->steps[n->n - 1].map, e);
}

static lm_code parse_step(const json_t *j, lm_normal *n, int depth, const char *where, lm_err *e)
{
    static const struct {
        const char *type;
        step s;
    } plain[] = {
        { "NFC", { .kind = STEP_FORM, .form = LM_NFC } },
        { "NFD", { .kind = STEP_FORM, .form = LM_NFD } },
        { "NFKC", { .kind = STEP_FORM, .form = LM_NFKC } },
        { "NFKD", { .kind = STEP_FORM, .form = LM_NFKD } },
        { "Lowercase", { .kind = STEP_LOWER } },
        { "StripAccents", { .kind = STEP_MARKS } },
        { "ByteLevel", { .kind = STEP_BYTES } },
        { "Nmt", { .kind = STEP_NMT } },
    };
    const char *type;
    lm_code rc = lm_json_str_or(j, "type", "", &type, where, e);

    if (rc)
        return rc;
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        if (!strcmp(type, plain[i].type))
            return add_step(n, plain[i].s, where, e);
    if (!strcmp(type, "Strip")) {
        step s = { .kind = STEP_STRIP };
        rc = lm_json_bool_or(j, "strip_left", true, &s.left, where, e);
        if (!rc)
            rc = lm_json_bool_or(j, "strip_right", true, &s.right, where, e);
        return rc ? rc : add_step(n, s, where, e);
    }
    if (!strcmp(type, "Replace"))
        return parse_text_step(j, (step){ .kind = STEP_REPLACE }, "content", n, where, e);
    if (!strcmp(type, "Prepend"))
        return parse_text_step(j, (step){ .kind = STEP_PREPEND }, "prepend", n, where, e);
    if (!strcmp(type, "Precompiled"))
        return parse_charsmap(j, n, where, e);
    if (!strcmp(type, "BertNormalizer"))
        return parse_bert(j, n, where, e);
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(j, "normalizers"), *item;
        size_t i;
        if (!json_is_array(list) || depth == MAX_DEPTH)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "\"normalizers\" of a Sequence must be a list, nested %d deep at most",
                           MAX_DEPTH);
        json_array_foreach(list, i,
                           item) if ((rc = parse_step(item, n, depth + 1, where, e))) return rc;
        return LM_OK;
    }
    return lm_fail(e, LM_EFORMAT, where, NULL, "normalizer type \"%s\" is not supported", type);
}

void lm_normal_free(lm_normal *n)
{
    if (!n)
        return;
    for (int i = 0; i < n->n; i++) {
        lm_regex_free(n->steps[i].regex);
        lm_free(n->steps[i].text);
        lm_charsmap_free(n->steps[i].map);
    }
    lm_free(n);
}

/* Append text[0..len) to *out with every match of r replaced. */
static lm_code replace_all(const lm_regex *r, lm_regex_match *m, const char *with, size_t with_len,
                           const char *text, size_t len, lm_buf *out, lm_err *e)
{
    size_t done = 0, from = 0, begin, end;
    bool found = true;
    lm_code rc = LM_OK;

    while (!rc && from <= len) {
        rc = lm_regex_find(r, m, text, len, from, &begin, &end, &found, e);
        if (rc || !found || begin < done)
            break;
        if (begin == end && begin == done && done) { /* empty, right after a match: not counted */
            from = lm_regex_step(text, len, from);
            continue;
        }
        rc = lm_buf_add(out, text + done, begin - done, e);
        if (!rc)
            rc = lm_buf_add(out, with, with_len, e);
        done = from = end;
        if (begin == end)
            from = lm_regex_step(text, len, from);
    }
    return rc ? rc : lm_buf_add(out, text + done, len - done, e);
}

static bool is_chinese(uint32_t c)
{
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
           (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

/* SentencePiece's rule "nmt": control characters are removed, marks of direction and other blanks
 * become spaces. */
static int map_nmt(uint32_t c, uint32_t to[4])
{
    bool control = (c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F ||
                   c == 0x8F || c == 0x9F;
    bool blank = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                 (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                 c == 0xFEFF || c == 0xFFFD;

    to[0] = blank ? ' ' : c;
    return !control;
}

/* The steps that map one character to some: at most 4 code points. */
static int map_char(step_kind kind, const uint8_t *tab, uint32_t c, uint32_t to[4])
{
    to[0] = c;
    switch (kind) {
    case STEP_LOWER:
        if (c == 0x130) { /* the one character whose lower case is two */
            to[0] = 'i';
            to[1] = 0x307;
            return 2;
        }
        to[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
        return 1;
    case STEP_MARKS:
        return !(tab[c] & LM_CLASS_MARK);
    case STEP_ACCENTS:
        return utf8proc_category((utf8proc_int32_t)c) != UTF8PROC_CATEGORY_MN;
    case STEP_CLEAN:
        if (c != '\t' && c != '\n' && c != '\r' && (!c || c == 0xFFFD || lm_class_is_other(tab, c)))
            return 0;
        to[0] = tab[c] & LM_CLASS_SPACE ? ' ' : c;
        return 1;
    case STEP_CHINESE:
        if (!is_chinese(c))
            return 1;
        to[0] = to[2] = ' ';
        to[1] = c;
        return 3;
    case STEP_NMT:
        return map_nmt(c, to);
    default:
        return 1;
    }
}

static void fill_ascii(step *s)
{
    const uint8_t *tab = lm_class_table();

    for (uint32_t c = 0; c < 128; c++) {
        uint32_t to[4];
        s->ascii[c] = map_char(s->kind, tab, c, to) ? (uint8_t)to[0] : DROPPED;
    }
}

lm_code lm_normal_new(const json_t *j, const char *where, lm_normal **out, lm_err *e)
{
    lm_code rc;

    *out = NULL;
    if (!j || json_is_null(j))
        return LM_OK;
    rc = lm_alloc_n(out, 1, sizeof **out, "the normalizer", e);
    if (!rc)
        rc = parse_step(j, *out, 0, where, e);
    for (int i = 0; !rc && i < (*out)->n; i++)
        fill_ascii(&(*out)->steps[i]);
    if (*out && (rc || !(*out)->n)) {
        lm_normal_free(*out);
        *out = NULL;
    }
    return rc;
}

static lm_code map_chars(const step *s, const char *text, size_t len, lm_buf *out, lm_err *e)
{
    const uint8_t *tab = lm_class_table(), *p = (const uint8_t *)text, *end = p + len;
    lm_code rc =
        lm_buf_room(out, 2 * len + 16, e); /* no character takes more than twice its bytes */

    if (rc)
        return rc;
    for (char *q = out->data + out->len; p < end; out->len = (size_t)(q - out->data)) {
        unsigned k;
        uint32_t to[4];
        for (; p < end && *p < 128; p++) {
            *q = (char)s->ascii[*p];
            q += s->ascii[*p] != DROPPED;
        }
        if (p == end)
            continue;
        int n = map_char(s->kind, tab, lm_class_get(p, &k), to);
        for (int i = 0; i < n; i++)
            q += lm_utf8_put(to[i], q);
        p += k;
    }
    return LM_OK;
}

static lm_code strip(const step *s, const char *text, size_t len, lm_buf *out, lm_err *e)
{
    const uint8_t *tab = lm_class_table(), *p = (const uint8_t *)text, *end = p + len;
    unsigned k;

    while (s->left && p < end && (tab[lm_class_get(p, &k)] & LM_CLASS_SPACE))
        p += k;
    while (s->right && p < end && (tab[lm_class_before(p, end, &k)] & LM_CLASS_SPACE))
        end -= k;
    return lm_buf_add(out, p, (size_t)(end - p), e);
}

static lm_code run_step(const step *s, lm_regex_match *m, const char *text, size_t len, lm_buf *out,
                        lm_err *e)
{
    lm_code rc = LM_OK;

    switch (s->kind) {
    case STEP_FORM:
        return lm_form_append(s->form, text, len, out, e);
    case STEP_STRIP:
        return strip(s, text, len, out, e);
    case STEP_REPLACE:
        return replace_all(s->regex, m, s->text, strlen(s->text), text, len, out, e);
    case STEP_PREPEND:
        if (len)
            rc = lm_buf_add(out, s->text, strlen(s->text), e);
        return rc ? rc : lm_buf_add(out, text, len, e);
    case STEP_CHARSMAP:
        return lm_charsmap_run(s->map, text, len, out, e);
    case STEP_BYTES:
        rc = lm_buf_room(out, 2 * len, e);
        for (size_t i = 0; i < len && !rc; i++)
            out->len += lm_byte_utf8((uint8_t)text[i], out->data + out->len);
        return rc;
    default:
        return map_chars(s, text, len, out, e);
    }
}

lm_code lm_normal_run(const lm_normal *n, lm_regex_match *m, const char *text, size_t len,
                      lm_buf *a, lm_buf *b, const char **out, size_t *out_len, lm_err *e)
{
    lm_buf *to = a;
    size_t most = 64 * len + (1 << 20);

    for (int i = 0; n && i < n->n; i++) {
        to->len = 0;
        lm_code rc = lm_buf_room(to, len, e);
        if (!rc)
            rc = run_step(&n->steps[i], m, text, len, to, e);
        if (rc)
            return rc;
        if (to->len > most) /* replacements whose output is replaced again */
            return lm_fail(e, LM_ELIMIT, "normalizer", "use another tokenizer",
                           "it expands the text to more than %zu bytes", most);
        text = to->data;
        len = to->len;
        to = to == a ? b : a;
    }
    *out = text;
    *out_len = len;
    return LM_OK;
}
