/* SPDX-License-Identifier: Apache-2.0 */
/* Encoding, and the queries on a loaded tokenizer. */
#include "text/tokenizer.h"

#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/tokenizer_impl.h"

struct lm_tok_scratch {
    lm_bpe_scratch *bpe;
    lm_regex_match *match;
    lm_pretok_scratch pretok;
    lm_buf normal[2];
};

void lm_ids_fini(lm_ids *ids)
{
    lm_free(ids->v);
    memset(ids, 0, sizeof *ids);
}

lm_code lm_tok_scratch_new(const lm_tokenizer *t, lm_tok_scratch **out, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "encoding", e);

    (void)t;
    if (!rc)
        rc = lm_bpe_scratch_new(&(*out)->bpe, e);
    if (!rc)
        rc = lm_regex_match_new(&(*out)->match, e);
    if (rc) {
        lm_tok_scratch_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_tok_scratch_free(lm_tok_scratch *s)
{
    if (!s)
        return;
    lm_bpe_scratch_free(s->bpe);
    lm_regex_match_free(s->match);
    lm_pretok_scratch_fini(&s->pretok);
    lm_buf_fini(&s->normal[0]);
    lm_buf_fini(&s->normal[1]);
    lm_free(s);
}

static lm_code add_id(lm_ids *out, uint32_t id, lm_err *e)
{
    lm_code rc = LM_OK;

    if (out->n == out->cap)
        rc = lm_grow(&out->v, &out->cap, out->n + 1, sizeof *out->v, "token ids", e);
    if (!rc)
        out->v[out->n++] = id;
    return rc;
}

/* Text without added tokens, already normalised: cut into words and merge each. */
static lm_code encode_words(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                            bool start, lm_ids *out, lm_err *e)
{
    const char *end = text + len, *base;
    const lm_pieces *words;
    lm_code rc = LM_OK;

    if (t->scan && t->plain_bytes) {
        while (text < end && !rc) {
            size_t n = lm_scan_word(t->scan, text, end);
            rc = lm_bpe_encode(&t->bpe, s->bpe, text, n, (size_t)(end - text), true, out, e);
            text += n;
        }
        return rc;
    }
    rc = lm_pretok_run(t->pretok, s->match, &s->pretok, text, len, start, &base, &words, e);
    for (size_t i = 0; !rc && i < words->n; i++)
        rc = lm_bpe_encode(&t->bpe, s->bpe, base + words->v[i].off, words->v[i].len,
                           words->v[i].len, t->plain_bytes, out, e);
    return rc;
}

/* Text without raw added tokens: normalise, then the added tokens of the second group. */
static lm_code encode_raw(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                          bool start, lm_ids *out, lm_err *e)
{
    lm_added_walk w = { .added = &t->added, .group = LM_ADDED_NORMAL };
    lm_code rc = lm_normal_run(t->normal, s->match, text, len, &s->normal[0], &s->normal[1],
                               &w.text, &w.len, e);

    while (!rc && lm_added_next(&w)) {
        if (w.begin > w.gap)
            rc = encode_words(t, s, w.text + w.gap, w.begin - w.gap, start && !w.gap, out, e);
        if (!rc)
            rc = add_id(out, w.token->id, e);
    }
    if (!rc && w.len > w.gap)
        rc = encode_words(t, s, w.text + w.gap, w.len - w.gap, start && !w.gap, out, e);
    return rc;
}

/* A text without the ids of the post-processor. */
static lm_code encode_text(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                           lm_ids *out, lm_err *e)
{
    lm_added_walk w = { .added = &t->added, .group = LM_ADDED_RAW, .text = text, .len = len };
    size_t valid = lm_utf8_valid(text, len);
    lm_code rc = LM_OK;

    if (valid != len)
        return lm_fail(e, LM_EFORMAT, "text", "convert the text to UTF-8",
                       "invalid UTF-8 at byte %zu of %zu", valid, len);
    while (!rc && lm_added_next(&w)) {
        if (w.begin > w.gap)
            rc = encode_raw(t, s, text + w.gap, w.begin - w.gap, !w.gap, out, e);
        if (!rc)
            rc = add_id(out, w.token->id, e);
    }
    if (!rc && len > w.gap)
        rc = encode_raw(t, s, text + w.gap, len - w.gap, !w.gap, out, e);
    return rc;
}

lm_code lm_tokenizer_encode(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                            bool add_special, lm_ids *out, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; i < t->n_prefix && add_special && !rc; i++)
        rc = add_id(out, t->prefix[i], e);
    if (!rc)
        rc = encode_text(t, s, text, len, out, e);
    for (int i = 0; i < t->n_suffix && add_special && !rc; i++)
        rc = add_id(out, t->suffix[i], e);
    return rc;
}

lm_code lm_tokenizer_encode_pair(const lm_tokenizer *t, lm_tok_scratch *s, const char *a,
                                 size_t a_len, const char *b, size_t b_len, bool add_special,
                                 lm_ids *out, lm_ids *types, lm_err *e)
{
    static const lm_pair_item plain[] = { { LM_PAIR_A, 0 }, { LM_PAIR_B, 1 } };
    const lm_pair_item *v = t->n_pair ? t->pair : plain;
    int n = t->n_pair ? t->n_pair : 2;
    lm_code rc = LM_OK;

    if (t->n_templates > 1 || (t->n_templates && !t->n_pair))
        return lm_fail(e, LM_EFORMAT, "tokenizer", NULL, "its post-processor has %s for two texts",
                       t->n_templates > 1 ? "several templates" : "no template");
    for (int i = 0; i < n && !rc; i++) {
        size_t from = out->n;
        if (v[i].id == LM_PAIR_A)
            rc = encode_text(t, s, a, a_len, out, e);
        else if (v[i].id == LM_PAIR_B)
            rc = encode_text(t, s, b, b_len, out, e);
        else if (add_special)
            rc = add_id(out, (uint32_t)v[i].id, e);
        for (; from < out->n && !rc; from++)
            rc = add_id(types, v[i].type, e);
    }
    return rc;
}

int64_t lm_tokenizer_vocab_size(const lm_tokenizer *t)
{
    return t->vocab_size;
}

static const lm_added_token *added_token(const lm_tokenizer *t, uint32_t id)
{
    if (id >= t->vocab_size || t->added_of[id] == LM_BPE_NONE)
        return NULL;
    return &t->added.v[t->added_of[id]];
}

const char *lm_tokenizer_token(const lm_tokenizer *t, uint32_t id, size_t *len)
{
    const lm_added_token *a = added_token(t, id);

    *len = 0;
    if (a) {
        *len = a->len;
        return a->text;
    }
    if (id >= t->bpe.n_ids || t->bpe.tokens[id].off == LM_BPE_NONE)
        return NULL;
    *len = t->bpe.tokens[id].len;
    return t->bpe.text + t->bpe.tokens[id].off;
}

int64_t lm_tokenizer_id(const lm_tokenizer *t, const char *token, size_t len)
{
    uint32_t id = lm_bpe_find(&t->bpe, token, len);

    if (id != LM_BPE_NONE)
        return id;
    for (size_t i = 0; i < t->added.n; i++)
        if (t->added.v[i].len == len && !memcmp(t->added.v[i].text, token, len))
            return t->added.v[i].id;
    return -1;
}

bool lm_tokenizer_is_special(const lm_tokenizer *t, uint32_t id)
{
    const lm_added_token *a = added_token(t, id);
    return a && a->special;
}

/* Each mapped character is a byte; a byte token <0xXX> is one; other characters count their UTF-8,
 * and U+2581, which stands for a space, counts 1.  A WordPiece that begins a word counts the space
 * before it. */
size_t lm_tokenizer_id_bytes(const lm_tokenizer *t, uint32_t id)
{
    const lm_added_token *a = added_token(t, id);
    size_t len, n = 0, k, one;
    const char *s = lm_tokenizer_token(t, id, &len);

    if (a)
        return a->special ? 0 : a->len;
    if (!s)
        return 0;
    if (t->subword.kind == LM_SUBWORD_WORDPIECE) {
        k = strlen(t->subword.prefix);
        return len > k && !memcmp(s, t->subword.prefix, k) ? len - k : len + 1;
    }
    if (!t->bpe.byte_level) {
        for (int b = 0; b < 256 && t->bpe.byte_fallback; b++)
            if (t->bpe.fallback_id[b] == id)
                return 1;
        for (n = len, k = 0; k + 3 <= len; k++)
            n -= memcmp(s + k, "\xE2\x96\x81", 3) ? 0 : 2;
        return n;
    }
    for (k = 0; k < len; k += one) {
        uint32_t c = lm_utf8_get(s + k, len - k, &one);
        n += lm_byte_of_char(c) >= 0 ? 1 : one;
    }
    return n;
}

int64_t lm_tokenizer_bos(const lm_tokenizer *t)
{
    return t->bos;
}

int64_t lm_tokenizer_eos(const lm_tokenizer *t)
{
    return t->eos;
}

int64_t lm_tokenizer_pad(const lm_tokenizer *t)
{
    return t->pad;
}

int64_t lm_tokenizer_mask(const lm_tokenizer *t)
{
    return t->mask;
}

int64_t lm_tokenizer_unk(const lm_tokenizer *t)
{
    return t->unk;
}

const char *lm_tokenizer_json(const lm_tokenizer *t, size_t *len)
{
    *len = t->json.len;
    return t->json.data;
}

const char *lm_tokenizer_config_json(const lm_tokenizer *t, size_t *len)
{
    *len = t->config.len;
    return t->config.len ? t->config.data : NULL;
}
