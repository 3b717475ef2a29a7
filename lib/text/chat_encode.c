/* SPDX-License-Identifier: Apache-2.0 */
/* chat_encode.c -- a rendered chat as ids, and which of them lie in marked spans.
 *
 * The tokenizer gives no offsets: they are found by adding up the bytes that each id stands for,
 * which holds for every tokenizer that does not change its text.  The sum is checked at the end. */
#include <string.h>

#include "base/mem.h"
#include "text/chat.h"

typedef struct {
    const lm_tokenizer *t;
    lm_tok_scratch *s;
    const char *text;
    size_t len;
    const lm_text_spans *marked;
    lm_ids *ids;
    lm_buf *trains;
    lm_err *err;
} encoding;

static bool is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* The bytes [at, *end) of one id; false: it does not stand there. */
static bool place(const encoding *x, uint32_t id, size_t *at, size_t *end)
{
    static const char space[] = "\xE2\x96\x81"; /* U+2581 */
    size_t n = lm_tokenizer_id_bytes(x->t, id), len;
    const char *s = lm_tokenizer_token(x->t, id, &len);

    if (!n && s) { /* a special token: its own text; it may have taken blanks before it along */
        while (*at < x->len && (x->len - *at < len || memcmp(x->text + *at, s, len) != 0) &&
               is_blank(x->text[*at]))
            ++*at;
        n = len;
        if (x->len - *at < n || memcmp(x->text + *at, s, n) != 0)
            return false;
    } else if (n && s && len >= 3 && !memcmp(s, space, 3) &&
               (*at == x->len || x->text[*at] != ' ')) {
        n--; /* the blank that is put before a text */
    }
    *end = *at + n;
    return *end <= x->len;
}

/* Append a flag for each id from `from` on, or give up: false. */
static lm_code flag_ids(const encoding *x, size_t from, bool *aligned)
{
    size_t at = 0, end = 0, k = 0, had = x->trains->len;
    lm_code rc = LM_OK;

    *aligned = true;
    for (size_t i = from; !rc && *aligned && i < x->ids->n; i++) {
        char flag;

        *aligned = place(x, x->ids->v[i], &at, &end);
        while (k < x->marked->n && x->marked->v[k].to <= at)
            k++;
        flag = k < x->marked->n && x->marked->v[k].from < end && end > at;
        at = end;
        rc = lm_buf_add(x->trains, &flag, 1, x->err);
    }
    while (*aligned && at < x->len && is_blank(x->text[at]))
        at++;
    *aligned = *aligned && at == x->len;
    if (!*aligned)
        x->trains->len = had;
    return rc;
}

static lm_code encode_part(const encoding *x, size_t from, size_t to, char flag)
{
    size_t had = x->ids->n;
    lm_code rc = to > from ? lm_tokenizer_encode(x->t, x->s, x->text + from, to - from, false,
                                                 x->ids, x->err)
                           : LM_OK;

    for (size_t i = had; !rc && i < x->ids->n; i++)
        rc = lm_buf_add(x->trains, &flag, 1, x->err);
    return rc;
}

static lm_code encode_parts(const encoding *x)
{
    size_t at = 0;
    lm_code rc = LM_OK;

    for (size_t k = 0; !rc && k < x->marked->n; k++) {
        const lm_text_span *s = &x->marked->v[k];

        if (s->from < at || s->to < s->from || s->to > x->len)
            return lm_fail(x->err, LM_EBUG, "chat", NULL, "spans of a text that are not ascending");
        rc = encode_part(x, at, s->from, 0);
        if (!rc)
            rc = encode_part(x, s->from, s->to, 1);
        at = s->to;
    }
    return rc ? rc : encode_part(x, at, x->len, 0);
}

lm_code lm_chat_encode(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                       const lm_text_spans *marked, lm_ids *ids, lm_buf *trains, lm_err *e)
{
    encoding x = { t, s, text, len, marked, ids, trains, e };
    size_t had = ids->n;
    bool aligned = false;
    lm_code rc;

    if (!marked)
        return encode_part(&x, 0, len, 1);
    rc = lm_tokenizer_encode(t, s, text, len, false, ids, e);
    if (!rc)
        rc = flag_ids(&x, had, &aligned);
    if (rc || aligned)
        return rc;
    ids->n = had;
    return encode_parts(&x);
}
