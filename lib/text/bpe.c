/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary and the merge table of bpe.h: two open-addressing hash tables with linear probing,
 * at most half full. */
#include "text/bpe.h"

#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/text.h"

uint32_t lm_byte_char(uint8_t b)
{
    if ((b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE)
        return b;
    if (b <= 0x20)
        return 0x100u + b;
    if (b <= 0xA0)
        return 0x121u + (b - 0x7Fu);
    return 0x143u; /* 0xAD */
}

int lm_byte_of_char(uint32_t c)
{
    if (c < 0x100)
        return lm_byte_char((uint8_t)c) == c ? (int)c : -1;
    if (c <= 0x120)
        return (int)(c - 0x100);
    if (c <= 0x142)
        return (int)(c - 0x121 + 0x7F);
    return c == 0x143 ? 0xAD : -1;
}

size_t lm_byte_utf8(uint8_t b, char out[4])
{
    return lm_utf8_put(lm_byte_char(b), out);
}

void lm_bpe_fini(lm_bpe *b)
{
    lm_free(b->text);
    lm_free(b->tokens);
    lm_free(b->cells);
    lm_free(b->merges);
    memset(b, 0, sizeof *b);
}

static size_t table_size(size_t n)
{
    size_t m = 16;
    while (m < 2 * n)
        m *= 2;
    return m;
}

lm_code lm_bpe_begin_vocab(lm_bpe *b, size_t n, size_t n_ids, lm_err *e)
{
    size_t m = table_size(n);
    lm_code rc = lm_alloc_n(&b->cells, m, sizeof *b->cells, "the vocabulary", e);

    if (!rc)
        rc = lm_alloc_n(&b->tokens, n_ids, sizeof *b->tokens, "the vocabulary", e);
    if (rc)
        return rc;
    b->cell_mask = m - 1;
    b->n_ids = n_ids;
    memset(b->cells, 0xFF, m * sizeof *b->cells);
    memset(b->tokens, 0xFF, n_ids * sizeof *b->tokens);
    return LM_OK;
}

/* The cell of the hash table that holds this text, or the free cell for it. */
static uint32_t *cell_of(const lm_bpe *b, const char *s, size_t len)
{
    size_t i = lm_hash64(s, len, 0) & b->cell_mask;
    uint32_t id;

    for (; (id = b->cells[i]) != LM_BPE_NONE; i = (i + 1) & b->cell_mask)
        if (b->tokens[id].len == len && !memcmp(b->text + b->tokens[id].off, s, len))
            break;
    return &b->cells[i];
}

uint32_t lm_bpe_find(const lm_bpe *b, const char *s, size_t len)
{
    return *cell_of(b, s, len);
}

lm_code lm_bpe_add_token(lm_bpe *b, const char *s, size_t len, uint32_t id, const char *where,
                         lm_err *e)
{
    uint32_t *cell = cell_of(b, s, len);
    lm_code rc;

    if (*cell != LM_BPE_NONE)
        return lm_fail(e, LM_EFORMAT, where, NULL, "token \"%.*s\" appears twice",
                       (int)(len < 80 ? len : 80), s);
    if (id >= b->n_ids)
        return lm_fail(e, LM_EFORMAT, where, NULL, "token \"%.*s\" has id %u, the highest is %zu",
                       (int)(len < 80 ? len : 80), s, id, b->n_ids - 1);
    if (b->tokens[id].off != LM_BPE_NONE)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "id %u belongs to two tokens, \"%.*s\" and \"%.*s\"", id,
                       (int)(b->tokens[id].len < 60 ? b->tokens[id].len : 60),
                       b->text + b->tokens[id].off, (int)(len < 60 ? len : 60), s);
    if (b->text_len + len >= LM_BPE_NONE)
        return lm_fail(e, LM_EFORMAT, where, NULL, "the vocabulary's text exceeds 4 GiB");
    rc = lm_grow(&b->text, &b->text_cap, b->text_len + len + 1, 1, "the vocabulary", e);
    if (rc)
        return rc;
    if (len)
        memcpy(b->text + b->text_len, s, len);
    b->tokens[id].off = (uint32_t)b->text_len;
    b->tokens[id].len = (uint32_t)len;
    b->text_len += len;
    b->n_tokens++;
    *cell = id;
    return LM_OK;
}

void lm_bpe_end_vocab(lm_bpe *b)
{
    b->byte_level = true;
    for (int i = 0; i < 256; i++) {
        static const char hex[] = "0123456789ABCDEF";
        char c[4], fall[6] = { '<', '0', 'x', hex[i >> 4], hex[i & 15], '>' };
        size_t n = lm_byte_utf8((uint8_t)i, c);
        b->byte_id[i] = lm_bpe_find(b, c, n);
        b->fallback_id[i] = lm_bpe_find(b, fall, sizeof fall);
        b->byte_level &= b->byte_id[i] != LM_BPE_NONE;
    }
    b->unk_id = LM_BPE_NONE;
}

lm_code lm_bpe_begin_merges(lm_bpe *b, size_t n, lm_err *e)
{
    size_t m = table_size(n);
    lm_code rc = lm_alloc_n(&b->merges, m, sizeof *b->merges, "the merge table", e);

    if (rc)
        return rc;
    b->merge_mask = m - 1;
    memset(b->merges, 0xFF, m * sizeof *b->merges);
    return LM_OK;
}

static lm_code need_token(const lm_bpe *b, const char *s, size_t len, uint32_t *id,
                          const char *where, lm_err *e)
{
    *id = lm_bpe_find(b, s, len);
    if (*id == LM_BPE_NONE)
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"%.*s\" is not in the vocabulary",
                       (int)(len < 80 ? len : 80), s);
    return LM_OK;
}

lm_code lm_bpe_add_merge(lm_bpe *b, const char *l, size_t llen, const char *r, size_t rlen,
                         uint32_t rank, const char *where, lm_err *e)
{
    uint32_t left, right, whole;
    char small[256], *both = small;
    lm_code rc = need_token(b, l, llen, &left, where, e);

    if (!rc)
        rc = need_token(b, r, rlen, &right, where, e);
    if (!rc && (!llen || !rlen))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "an empty token cannot be merged");
    if (!rc && llen + rlen > sizeof small)
        rc = lm_alloc_n(&both, llen + rlen, 1, "a merge", e);
    if (rc)
        return rc;
    memcpy(both, l, llen);
    memcpy(both + llen, r, rlen);
    rc = need_token(b, both, llen + rlen, &whole, where, e);
    if (both != small)
        lm_free(both);
    if (rc)
        return rc;
    /* A pair given twice keeps its last rank, as in `tokenizers`. */
    uint64_t pair = (uint64_t)left << 32 | right;
    size_t i = (pair * 0x9E3779B97F4A7C15u) >> 32 & b->merge_mask;
    while (b->merges[i].pair != LM_BPE_EMPTY && b->merges[i].pair != pair)
        i = (i + 1) & b->merge_mask;
    b->n_merges += b->merges[i].pair == LM_BPE_EMPTY;
    b->merges[i] = (lm_bpe_merge){ .pair = pair, .rank = rank, .id = whole };
    return LM_OK;
}
