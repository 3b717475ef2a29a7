/* SPDX-License-Identifier: Apache-2.0 */
/* sentencepiece.c -- see sentencepiece.h. */
#include "text/sentencepiece.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/base64.h"
#include "base/mem.h"
#include "base/text.h"
#include "text/charsmap.h"
#include "text/protobuf.h"

enum { MAX_PIECES = 1 << 24, UNIGRAM = 1, BPE, WORD, CHAR };

/* ---- Messages ---- */

typedef struct {
    int64_t kind, unk, bos, eos, pad;
    bool suffix, fallback, there;
} trainer;

typedef struct {
    const uint8_t *charsmap;
    size_t charsmap_len;
    bool prefix, strip, escape;
} normal;

static lm_code read_piece(lm_pb *r, lm_scored_token *t)
{
    lm_pb_field f;
    bool more;
    lm_code rc;

    *t = (lm_scored_token){ .text = "", .type = LM_SCORED_NORMAL };
    while (!(rc = lm_pb_next(r, &f, &more)) && more) {
        if (lm_pb_is(&f, 1, LM_PB_BYTES)) {
            t->text = (const char *)f.bytes;
            t->len = (size_t)f.value;
        } else if (lm_pb_is(&f, 2, LM_PB_FIXED32)) {
            uint32_t bits = (uint32_t)f.value;
            memcpy(&t->score, &bits, 4);
        } else if (lm_pb_is(&f, 3, LM_PB_VARINT)) {
            if (f.value < LM_SCORED_NORMAL || f.value > LM_SCORED_BYTE)
                return lm_pb_broken(r, "a piece of unknown type");
            t->type = (int)f.value;
        }
    }
    if (!rc && isnan(t->score)) /* merges are sorted by them */
        rc = lm_pb_broken(r, "a score that is not a number");
    return rc;
}

static lm_code read_trainer(lm_pb *r, trainer *t)
{
    lm_pb_field f;
    bool more;
    lm_code rc;

    while (!(rc = lm_pb_next(r, &f, &more)) && more) {
        if (f.wire != LM_PB_VARINT)
            continue;
        int64_t id = (int32_t)f.value; /* -1 comes as 64 bits, all set */
        switch (f.number) {
        case 3:
            t->kind = id;
            break;
        case 24:
            t->suffix = f.value;
            break;
        case 35:
            t->fallback = f.value;
            break;
        case 40:
            t->unk = id;
            break;
        case 41:
            t->bos = id;
            break;
        case 42:
            t->eos = id;
            break;
        case 43:
            t->pad = id;
            break;
        default:
            break;
        }
    }
    return rc;
}

static lm_code read_normal(lm_pb *r, normal *n)
{
    lm_pb_field f;
    bool more;
    lm_code rc;

    while (!(rc = lm_pb_next(r, &f, &more)) && more) {
        if (lm_pb_is(&f, 2, LM_PB_BYTES)) {
            n->charsmap = f.bytes;
            n->charsmap_len = (size_t)f.value;
        } else if (lm_pb_is(&f, 3, LM_PB_VARINT)) {
            n->prefix = f.value;
        } else if (lm_pb_is(&f, 4, LM_PB_VARINT)) {
            n->strip = f.value;
        } else if (lm_pb_is(&f, 5, LM_PB_VARINT)) {
            n->escape = f.value;
        }
    }
    return rc;
}

static lm_code add_piece(lm_sentencepiece *m, size_t *cap, lm_pb *r, lm_err *e)
{
    lm_scored_vocab *v = &m->vocab;
    lm_code rc;

    if (v->n == MAX_PIECES)
        return lm_pb_broken(r, "more than 2^24 pieces");
    rc = lm_grow(&v->v, cap, v->n + 1, sizeof *v->v, "pieces", e);
    if (!rc)
        rc = read_piece(r, &v->v[v->n]);
    if (!rc)
        v->n++;
    return rc;
}

static lm_code read_model(lm_pb *r, lm_sentencepiece *m, trainer *t, normal *to, normal *from)
{
    size_t cap = 0;
    lm_pb_field f;
    bool more;
    lm_code rc;

    while (!(rc = lm_pb_next(r, &f, &more)) && more) {
        lm_pb in;
        if (f.number != 1 && f.number != 2 && f.number != 3 && f.number != 5)
            continue;
        rc = lm_pb_enter(r, &f, &in);
        if (!rc && f.number == 1)
            rc = add_piece(m, &cap, &in, r->e);
        else if (!rc && f.number == 2 && (t->there = true))
            rc = read_trainer(&in, t);
        else if (!rc)
            rc = read_normal(&in, f.number == 3 ? to : from);
        if (rc)
            return rc;
    }
    return rc;
}

/* ---- The meaning of the messages ---- */

static lm_code refuse(lm_sentencepiece *m, const char *what, lm_err *e)
{
    m->other_kind = true;
    return lm_fail(e, LM_EFORMAT, m->vocab.where, "give the model's tokenizer.json",
                   "a SentencePiece model with %s", what);
}

static lm_code check_kind(lm_sentencepiece *m, const trainer *t, lm_err *e)
{
    static const char *const names[] = { "", "Unigram", "BPE", "word", "character" };

    if (t->kind < UNIGRAM || t->kind > CHAR)
        return lm_fail(e, LM_EFORMAT, m->vocab.where, NULL,
                       "a SentencePiece model of unknown kind %" PRId64, t->kind);
    m->other_kind = t->kind != BPE && t->kind != UNIGRAM;
    if (m->other_kind)
        return lm_fail(e, LM_EFORMAT, m->vocab.where, "use a model with a BPE or Unigram tokenizer",
                       "a %s SentencePiece model is not supported", names[t->kind]);
    return LM_OK;
}

/* An id that the trainer specification names, if it is that of a control piece: the field also
 * holds a default when the vocabulary has no such piece. */
static int64_t id_or_none(const lm_sentencepiece *m, int64_t id)
{
    bool there = id >= 0 && id < (int64_t)m->vocab.n;
    return there && m->vocab.v[id].type == LM_SCORED_CONTROL ? id : -1;
}

static int64_t first_unknown(const lm_sentencepiece *m)
{
    for (size_t i = 0; i < m->vocab.n; i++)
        if (m->vocab.v[i].type == LM_SCORED_UNKNOWN)
            return (int64_t)i;
    return -1;
}

/* SentencePiece also joins pairs into unused pieces and splits these at the end, which merges
 * cannot express.  A single character is never the result of a join, so it is allowed. */
static lm_code check_unused(lm_sentencepiece *m, lm_err *e)
{
    lm_scored_vocab *v = &m->vocab;
    lm_scored_token *copy = NULL;
    lm_scored_merge *all = NULL;
    size_t n = 0, unused = 0;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < v->n; i++) {
        size_t one = 0;
        if (v->v[i].type != LM_SCORED_UNUSED)
            continue;
        if (v->v[i].len && lm_utf8_get(v->v[i].text, v->v[i].len, &one) && one == v->v[i].len)
            v->v[i].type = LM_SCORED_NORMAL;
        else
            unused++;
    }
    if (!unused)
        return LM_OK;
    rc = lm_alloc_n(&copy, v->n, sizeof *copy, "pieces", e);
    for (size_t i = 0; i < v->n && !rc; i++) {
        copy[i] = v->v[i];
        if (copy[i].type == LM_SCORED_UNUSED)
            copy[i].type = LM_SCORED_NORMAL;
    }
    if (!rc)
        rc = lm_scored_merges(copy, v->n, &all, &n, e);
    for (size_t i = 0; i < n && !rc; i++)
        if (v->v[all[i].id].type == LM_SCORED_UNUSED)
            rc = refuse(m, "unused pieces that occur while words are merged", e);
    lm_free(copy);
    lm_free(all);
    return rc;
}

/* Unigram: SentencePiece leaves unused pieces out of cuts, and prefers user-defined ones, which are
 * added tokens here. */
static lm_code check_unigram(lm_sentencepiece *m, lm_err *e)
{
    static const char mark[] = "\xe2\x96\x81"; /* U+2581 */

    m->steps.unigram = true;
    m->steps.split = m->steps.escape;
    for (size_t i = 0; i < m->vocab.n; i++) {
        const lm_scored_token *t = &m->vocab.v[i];
        if (t->type == LM_SCORED_UNUSED)
            return refuse(m, "unused pieces and a Unigram model", e);
        if (!isfinite(t->score))
            return lm_fail(e, LM_EFORMAT, m->vocab.where, NULL, "the score of piece %zu is %g", i,
                           (double)t->score);
        if (t->type == LM_SCORED_NORMAL && t->len > 3 && memmem(t->text + 1, t->len - 1, mark, 3))
            m->steps.split = false;
    }
    return LM_OK;
}

static lm_code check_pieces(const lm_sentencepiece *m, bool fallback, lm_err *e)
{
    size_t bytes = 0;

    for (size_t i = 0; i < m->vocab.n; i++) {
        const lm_scored_token *t = &m->vocab.v[i];
        bool shape = t->len == 6 && !memcmp(t->text, "<0x", 3) && t->text[5] == '>';
        if (!t->len || memchr(t->text, 0, t->len) || lm_utf8_valid(t->text, t->len) != t->len)
            return lm_fail(e, LM_EFORMAT, m->vocab.where, NULL,
                           "piece %zu is empty, not UTF-8, or has a NUL in it", i);
        if (t->type == LM_SCORED_BYTE && !shape)
            return lm_fail(e, LM_EFORMAT, m->vocab.where, NULL,
                           "piece %zu is of type byte and not <0x00> to <0xFF>", i);
        bytes += t->type == LM_SCORED_BYTE;
    }
    if (fallback && bytes != 256)
        return lm_fail(e, LM_EFORMAT, m->vocab.where, NULL,
                       "byte fallback needs 256 pieces of type byte, and %zu are there", bytes);
    return LM_OK;
}

static bool is_user(const lm_scored_token *t)
{
    return t->type == LM_SCORED_USER;
}

/* User-defined pieces are searched in their normalised form, which must equal their text. */
static lm_code check_user(lm_sentencepiece *m, lm_err *e)
{
    static const char mark[] = "\xe2\x96\x81"; /* U+2581 */
    const char *coded = m->steps.charsmap;
    lm_charsmap *map = NULL;
    lm_buf out = { 0 };
    lm_code rc = LM_OK;

    if (coded)
        rc = lm_charsmap_new(coded, strlen(coded), m->vocab.where, &map, e);
    for (size_t i = 0; i < m->vocab.n && !rc; i++) {
        const lm_scored_token *t = &m->vocab.v[i];
        bool tail = t->len >= 3 && !memcmp(t->text + t->len - 3, mark, 3);
        out.len = 0;
        if (is_user(t) && m->steps.strip && tail)
            rc = refuse(
                m, "user-defined pieces that end in white space that the normaliser removes", e);
        if (!rc && is_user(t) && map)
            rc = lm_charsmap_run(map, t->text, t->len, &out, e);
        if (!rc && is_user(t) && map &&
            (out.len != t->len || memcmp(out.data, t->text, t->len) != 0))
            rc = refuse(m, "user-defined pieces that its normaliser changes", e);
    }
    lm_charsmap_free(map);
    lm_buf_fini(&out);
    return rc;
}

static lm_code set_steps(lm_sentencepiece *m, const trainer *t, const normal *to,
                         const normal *from, lm_err *e)
{
    bool user = false;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < m->vocab.n; i++) {
        lm_scored_token *p = &m->vocab.v[i];
        if (is_user(p) && to->escape && memchr(p->text, ' ', p->len))
            p->type = LM_SCORED_UNUSED; /* spaces are replaced before pieces are searched */
        user |= is_user(p);
    }
    m->steps = (lm_scored_steps){ .prefix = to->prefix,
                                  .first_only = user,
                                  .strip = to->strip,
                                  .escape = to->escape,
                                  .fallback = t->fallback,
                                  .unused = true };
    if (t->suffix)
        return refuse(m, "white space as a suffix", e);
    if (from->charsmap_len)
        return refuse(m, "a denormaliser", e);
    if (user && to->prefix && !to->escape)
        return refuse(m, "user-defined pieces and spaces that are not escaped", e);
    if (to->charsmap_len)
        rc = lm_base64_encode(to->charsmap, to->charsmap_len, &m->charsmap, e);
    m->steps.charsmap = m->charsmap.data;
    return rc || !user ? rc : check_user(m, e);
}

/* "IQ== 0": base 64 of a token and its rank, a line each. */
static bool is_tiktoken(const char *data, size_t len)
{
    size_t i = 0, digits;

    while (i < len && ((data[i] >= '0' && data[i] <= '9') || (data[i] >= 'A' && data[i] <= 'Z') ||
                       (data[i] >= 'a' && data[i] <= 'z') || memchr("+/=", data[i], 3)))
        i++;
    if (!i || i == len || data[i++] != ' ')
        return false;
    for (digits = i; i < len && data[i] >= '0' && data[i] <= '9';)
        i++;
    return i > digits && i < len && data[i] == '\n';
}

lm_code lm_sentencepiece_parse(const char *data, size_t len, const char *where, lm_sentencepiece *m,
                               lm_err *e)
{
    lm_pb r = lm_pb_begin(data, len, where, "SentencePiece model", e);
    trainer t = { .kind = UNIGRAM, .unk = 0, .bos = 1, .eos = 2, .pad = -1 };
    normal to = { .prefix = true, .strip = true, .escape = true }, from = to;

    *m = (lm_sentencepiece){ .vocab = { .where = where }, .other_kind = is_tiktoken(data, len) };
    if (m->other_kind)
        return lm_fail(
            e, LM_EFORMAT, where, "give the model's tokenizer.json",
            "a list of tokens and ranks in tiktoken's format, not a SentencePiece model");
    lm_code rc = read_model(&r, m, &t, &to, &from);
    if (!rc && !m->vocab.n)
        rc = lm_pb_broken(&r, "no piece");
    if (!rc && !t.there) /* follows the pieces: the end of the file is missing */
        rc = lm_pb_broken(&r, "no trainer specification");
    if (!rc)
        rc = check_kind(m, &t, e);
    if (!rc)
        rc = check_pieces(m, t.fallback, e);
    if (!rc)
        rc = set_steps(m, &t, &to, &from, e);
    if (!rc)
        rc = t.kind == UNIGRAM ? check_unigram(m, e) : check_unused(m, e);
    m->vocab.bos = id_or_none(m, t.bos);
    m->vocab.eos = id_or_none(m, t.eos);
    m->vocab.pad = id_or_none(m, t.pad);
    m->vocab.unk = first_unknown(m);
    if (!rc && m->vocab.unk < 0)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "no unknown piece");
    if (rc) {
        bool other_kind = m->other_kind;
        lm_sentencepiece_fini(m);
        m->other_kind = other_kind;
    }
    return rc;
}

void lm_sentencepiece_fini(lm_sentencepiece *m)
{
    lm_free(m->vocab.v);
    lm_buf_fini(&m->charsmap);
    *m = (lm_sentencepiece){ 0 };
}
