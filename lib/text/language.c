/* SPDX-License-Identifier: Apache-2.0 */
/* language.c -- see language.h. */
#include "text/language.h"

#include <string.h>
#include <utf8proc.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/text.h"
#include "text/cjk.h"

static const lm_language languages[] = {
    { "ar", 2, 10, "في من على أن إلى عن لا ما هذا التي الذي كان مع هو و" },
    { "cs", 3, 10, "a se v na je že to s do i o jako ale by" },
    { "da", 3, 10, "og i at det er en til af på der den for med ikke" },
    { "de", 3, 10, "der die das und in den von zu mit sich des auf für ist nicht ein eine" },
    { "el", 3, 10, "και το να του η της με που για είναι από τα στο" },
    { "en", 3, 10, "the be to of and that have with" },
    { "es", 3, 10, "de la que el en y a los se del las un por con una" },
    { "fa", 2, 10, "و در به از که این را با است برای آن یک" },
    { "fi", 3, 14, "ja on ei se että oli hän joka mutta niin kun ovat myös" },
    { "fr", 3, 10, "de la le et les des en un du une que est pour dans qui" },
    { "he", 2, 10, "את של על לא זה הוא כי גם עם או היא יש" },
    { "hi", 2, 10, "के में की है से को का और पर ने यह कि" },
    { "hu", 3, 14, "a az és hogy nem is egy van meg de ez volt" },
    { "id", 3, 10, "yang dan di itu dengan untuk dari ini dalam tidak pada adalah" },
    { "it", 3, 10, "di che e la il un a per in una del non con sono" },
    { "ja", 0, 0, "の に は を た が で て と し れ さ" },
    { "ko", 2, 10, "이 그 수 있는 것 등 및 있다 한 는 의 이런 그리고 하는 할" },
    { "nl", 3, 10, "de van het een en in dat die te is op met voor niet" },
    { "no", 3, 10, "og i det er på en til som av for med ikke den" },
    { "pl", 3, 10, "w i z na się nie do to że jest o jak po" },
    { "pt", 3, 10, "de a que o e do da em um para com não uma os" },
    { "ro", 3, 10, "de în și la a cu pe nu care din o este mai" },
    { "ru", 3, 10, "и в не на что с он как это по но из за" },
    { "sv", 3, 10, "och i att det som en på är av för med den inte" },
    { "tr", 3, 14, "ve bir bu da de için ile çok o ne gibi daha" },
    { "uk", 3, 10, "і в не на що з у та до як це за" },
    { "vi", 2, 10, "và của là có không được cho một những trong các với" },
    { "zh", 0, 0, "的 一 是 不 了 在 人 有 我 他 这 中 這 為 为" },
};

enum { N_LANGUAGES = sizeof languages / sizeof *languages, MOST_BYTES = 63, MOST_WORDS = 1 << 20 };

const char *const lm_language_codes[] = { "none", "ar", "cs", "da", "de", "el", "en", "es",
                                          "fa",   "fi", "fr", "he", "hi", "hu", "id", "it",
                                          "ja",   "ko", "nl", "no", "pl", "pt", "ro", "ru",
                                          "sv",   "tr", "uk", "vi", "zh", NULL };

const lm_language *lm_language_find(const char *code)
{
    for (int i = 0; i < N_LANGUAGES; i++)
        if (!strcmp(code, languages[i].code))
            return &languages[i];
    return NULL;
}

/* ---- sets ---- */

struct lm_stop_words {
    uint64_t *cell; /* open addressing: hashes of the words in small letters; 0: free */
    uint32_t *number;
    size_t mask, n, longest; /* bytes of the longest word, in any case of its letters */
};

/* s[0..n) in small letters; returns its bytes, 0 when it does not fit. */
static size_t fold(const char *s, size_t n, char out[MOST_BYTES + 4])
{
    size_t m = 0;

    for (size_t i = 0, k; i < n; i += k) {
        unsigned char c = (unsigned char)s[i];
        if (m >= MOST_BYTES)
            return 0;
        k = 1;
        if (c < 0x80)
            out[m++] = (char)(c >= 'A' && c <= 'Z' ? c + 32 : c);
        else
            m += lm_utf8_put((uint32_t)utf8proc_tolower((int32_t)lm_utf8_get(s + i, n - i, &k)),
                             out + m);
    }
    return m;
}

static uint64_t hash_of(const char *s, size_t n)
{
    uint64_t h = lm_hash64(s, n, 0);
    return h ? h : 1;
}

static bool add_word(lm_stop_words *w, const char *s, size_t n)
{
    char small[MOST_BYTES + 4];
    size_t m = fold(s, n, small), i;

    if (!m || m > MOST_BYTES)
        return false;
    uint64_t h = hash_of(small, m);
    for (i = h & w->mask; w->cell[i] && w->cell[i] != h;)
        i = (i + 1) & w->mask;
    if (!w->cell[i])
        w->number[i] = (uint32_t)w->n++;
    w->cell[i] = h;
    size_t most = 0;
    for (i = 0; i < m; i++)
        most += (unsigned char)small[i] < 0x80 ? 1 : 2; /* a capital may have more bytes */
    w->longest = most > w->longest ? most : w->longest;
    return true;
}

static bool has_cjk(const char *s, size_t n)
{
    for (size_t i = 0, k; i < n; i += k)
        if (lm_is_cjk(lm_utf8_get(s + i, n - i, &k)))
            return true;
    return false;
}

static const char *skip(const char *p, const char *end, bool space)
{
    while (p < end && (*p == ' ' || (*p >= 9 && *p <= 13)) == space)
        p++;
    return p;
}

static lm_code add_words(lm_stop_words *w, const char *text, size_t len, const char *where,
                         lm_err *e)
{
    const char *p = text, *end = text + len;

    while ((p = skip(p, end, true)) < end) {
        const char *stop = skip(p, end, false);
        size_t n = (size_t)(stop - p), one = 0;
        int show = n < 40 ? (int)n : 0;
        lm_utf8_get(p, n, &one);
        if (one < n && has_cjk(p, n))
            return lm_fail(e, LM_EFORMAT, where, "give single characters",
                           "stop word '%.*s': texts in this script are cut into single characters",
                           show, p);
        if (!add_word(w, p, n))
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "a stop word of more than %d bytes at byte %zu", MOST_BYTES,
                           (size_t)(p - text));
        p = stop;
    }
    if (!w->n)
        return lm_fail(e, LM_EFORMAT, where, "write words into it, separated by white space",
                       "no stop word in it");
    return LM_OK;
}

lm_code lm_stop_words_new(const char *text, size_t len, const char *where, lm_stop_words **out,
                          lm_err *e)
{
    size_t valid = lm_utf8_valid(text, len), words = 0, cap = 64;
    lm_stop_words *w = NULL;

    *out = NULL;
    if (valid != len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "invalid UTF-8 at byte %zu", valid);
    for (const char *p = text, *end = text + len; (p = skip(p, end, true)) < end; words++)
        p = skip(p, end, false);
    if (words > MOST_WORDS)
        return lm_fail(e, LM_EFORMAT, where, NULL, "%zu stop word%s, more than %d", words,
                       lm_plural(words), MOST_WORDS);
    while (cap < 4 * words)
        cap *= 2;
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "stop words", e);
    if (!rc)
        rc = lm_alloc_n(&w->cell, cap, sizeof *w->cell, "stop words", e);
    if (!rc)
        rc = lm_alloc_n(&w->number, cap, sizeof *w->number, "stop words", e);
    if (!rc) {
        w->mask = cap - 1;
        rc = add_words(w, text, len, where, e);
    }
    if (rc)
        lm_stop_words_free(w);
    else
        *out = w;
    return rc;
}

void lm_stop_words_free(lm_stop_words *s)
{
    if (!s)
        return;
    lm_free(s->cell);
    lm_free(s->number);
    lm_free(s);
}

size_t lm_stop_words_count(const lm_stop_words *s)
{
    return s->n;
}

int64_t lm_stop_words_find(const lm_stop_words *w, const char *s, size_t n)
{
    char small[MOST_BYTES + 4];

    if (n > w->longest)
        return -1;
    size_t m = fold(s, n, small);
    if (!m)
        return -1;
    uint64_t h = hash_of(small, m);
    for (size_t i = h & w->mask; w->cell[i]; i = (i + 1) & w->mask)
        if (w->cell[i] == h)
            return w->number[i];
    return -1;
}
