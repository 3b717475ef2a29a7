/* SPDX-License-Identifier: Apache-2.0 */
/* charsmap.c -- see charsmap.h. */
#include "text/charsmap.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <utf8proc.h>

#include "base/base64.h"
#include "base/mem.h"
#include "base/text.h"

enum { MOST_WHOLE = 5 }; /* most bytes of a grapheme that is looked up as a whole */

struct lm_charsmap {
    uint32_t *unit;
    size_t n_units;
    char *text; /* the replacements; a NUL behind the last */
    size_t text_len;
    bool moved[128]; /* ASCII characters that have a replacement in the map */
};

static uint32_t get_u32(const char *p)
{
    const uint8_t *b = (const uint8_t *)p;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static size_t offset_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << (unit & 1u << 9 ? 8 : 0);
}

/* The replacement of the shortest key that s[0..n) begins with; NULL: no such key. */
static const char *find_replacement(const lm_charsmap *c, const char *s, size_t n)
{
    size_t at = offset_of(c->unit[0]);

    for (size_t i = 0; i < n && s[i]; i++) {
        at ^= (uint8_t)s[i];
        if (at >= c->n_units)
            return NULL;
        uint32_t unit = c->unit[at];
        if ((unit & (1u << 31 | 0xFF)) != (uint8_t)s[i])
            return NULL;
        at ^= offset_of(unit);
        if (!(unit & 1u << 8))
            continue;
        size_t value = at < c->n_units ? c->unit[at] & 0x7FFFFFFF : SIZE_MAX;
        /* A value behind the end or inside a character: the map is damaged; treated as no such
         * key. */
        bool good = value < c->text_len && ((uint8_t)c->text[value] & 0xC0) != 0x80;
        return good ? c->text + value : NULL;
    }
    return NULL;
}

static lm_code read_parts(lm_charsmap *c, const lm_buf *b, const char *where, lm_err *e)
{
    size_t trie = b->len >= 4 ? get_u32(b->data) : 0;

    if (b->len < 4 || !trie || trie % 4 || trie > b->len - 4)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "the compiled map of characters has %zu byte%s, of which its trie takes %zu",
                       b->len, lm_plural(b->len), trie);
    const char *text = b->data + 4 + trie;
    c->n_units = trie / 4;
    c->text_len = b->len - 4 - trie;
    if (lm_utf8_valid(text, c->text_len) != c->text_len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "the compiled map of characters is not UTF-8");
    lm_code rc = lm_alloc_n(&c->unit, c->n_units, sizeof *c->unit, "a map of characters", e);
    if (!rc)
        rc = lm_alloc_n(&c->text, c->text_len + 1, 1, "a map of characters", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < c->n_units; i++)
        c->unit[i] = get_u32(b->data + 4 + 4 * i);
    if (c->text_len)
        memcpy(c->text, text, c->text_len);
    for (int i = 1; i < 128; i++)
        c->moved[i] = find_replacement(c, (const char[]){ (char)i }, 1) != NULL;
    return LM_OK;
}

lm_code lm_charsmap_new(const char *coded, size_t len, const char *where, lm_charsmap **out,
                        lm_err *e)
{
    lm_buf bytes = { 0 };
    lm_code rc = lm_base64_decode(coded, len, where, &bytes, e);

    *out = NULL;
    if (!rc)
        rc = lm_alloc_n(out, 1, sizeof **out, "a map of characters", e);
    if (!rc)
        rc = read_parts(*out, &bytes, where, e);
    lm_buf_fini(&bytes);
    if (rc) {
        lm_charsmap_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_charsmap_free(lm_charsmap *c)
{
    if (!c)
        return;
    lm_free(c->unit);
    lm_free(c->text);
    lm_free(c);
}

/* Bytes of the grapheme at s. */
static size_t grapheme(const char *s, size_t n)
{
    int32_t state = 0;
    size_t at, k;
    uint32_t before = lm_utf8_get(s, n, &at);

    while (at < n) {
        uint32_t next = lm_utf8_get(s + at, n - at, &k);
        if (utf8proc_grapheme_break_stateful((int32_t)before, (int32_t)next, &state))
            break;
        before = next;
        at += k;
    }
    return at;
}

/* Append one grapheme, or a part of a long one. */
static lm_code add(const lm_charsmap *c, const char *s, size_t n, lm_buf *out, lm_err *e)
{
    const char *to = n <= MOST_WHOLE ? find_replacement(c, s, n) : NULL;
    lm_code rc = LM_OK;

    if (to)
        return lm_buf_add(out, to, strlen(to), e);
    for (size_t i = 0, k; i < n && !rc; i += k) {
        lm_utf8_get(s + i, n - i, &k);
        to = find_replacement(c, s + i, k);
        rc = to ? lm_buf_add(out, to, strlen(to), e) : lm_buf_add(out, s + i, k, e);
    }
    return rc;
}

lm_code lm_charsmap_run(const lm_charsmap *c, const char *text, size_t len, lm_buf *out, lm_err *e)
{
    size_t done = 0, i = 0;
    lm_code rc = LM_OK;

    while (i < len && !rc) {
        uint8_t a = (uint8_t)text[i], b = i + 1 < len ? (uint8_t)text[i + 1] : 0;
        /* an ASCII character before another one is a grapheme */
        if (a < 0x80 && b < 0x80 && !c->moved[a]) {
            i++;
            continue;
        }
        size_t n = grapheme(text + i, len - i);
        rc = lm_buf_add(out, text + done, i - done, e);
        if (!rc)
            rc = add(c, text + i, n, out, e);
        i += n;
        done = i;
    }
    return rc ? rc : lm_buf_add(out, text + done, len - done, e);
}
