/* SPDX-License-Identifier: Apache-2.0 */
/* The forms of normal_form.h.
 *
 * A code point is inert in a form if it stays itself, starts a cluster (combining class 0) and does
 * not compose with what is before it.  Text is cut before inert characters; a piece of one inert
 * character is copied as it is. */
#include "text/normal_form.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/pretok_class.h"

enum { MAX_DECOMPOSED = 32 }; /* the longest is 18 (U+FDFA) */

static uint8_t active[0x110000]; /* bit lm_form: not inert */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int decompose(uint32_t c, bool compat, utf8proc_int32_t *out)
{
    int boundary = 0;
    utf8proc_option_t o = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | (compat ? UTF8PROC_COMPAT : 0);
    utf8proc_ssize_t n =
        utf8proc_decompose_char((utf8proc_int32_t)c, out, MAX_DECOMPOSED, o, &boundary);

    if (n >= 1 && n <= MAX_DECOMPOSED)
        return (int)n;
    out[0] = (utf8proc_int32_t)c;
    return 1;
}

static int combining_class(utf8proc_int32_t c)
{
    return utf8proc_get_property(c)->combining_class;
}

static utf8proc_ssize_t compose(utf8proc_int32_t *cp, size_t n)
{
    return utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
}

static void classify(uint32_t c)
{
    utf8proc_int32_t d[MAX_DECOMPOSED];
    int canon = decompose(c, false, d);
    uint8_t m = 0;

    if (canon > 1 || (uint32_t)d[0] != c) {
        m |= 1 << LM_NFD | 1 << LM_NFKD | 1 << LM_NFKC;
        if (canon > 1) /* its last part composes with the character before it */
            active[d[canon - 1]] |= 1 << LM_NFC | 1 << LM_NFKC;
        if (compose(d, (size_t)canon) != 1 || (uint32_t)d[0] != c)
            m |= 1 << LM_NFC;
    }
    int compat = decompose(c, true, d);
    if (compat > 1 || (uint32_t)d[0] != c)
        m |= 1 << LM_NFKC | 1 << LM_NFKD;
    if (combining_class((utf8proc_int32_t)c))
        m = 15;
    active[c] |= m;
}

static void fill_table(void)
{
    for (uint32_t c = 0xA0; c < 0x3400; c++)
        classify(c);
    for (uint32_t c = 0xA000; c < 0xAC00; c++)
        classify(c);
    memset(active + 0xAC00, 1 << LM_NFD | 1 << LM_NFKD, 0xD7A4 - 0xAC00); /* Hangul syllables */
    for (uint32_t c = 0xD7A4; c < 0x20000; c++)
        if (c < 0xD800 || c > 0xDFFF)
            classify(c);
    for (uint32_t c = 0x2F800; c < 0x2FA20; c++)
        classify(c);
    for (uint32_t c = 0x1161; c <= 0x11C2; c++) /* Hangul vowels and finals */
        active[c] |= 1 << LM_NFC | 1 << LM_NFKC;
}

/* Stable sort of each run of combining marks by class: counting, so that a hostile run stays
 * linear. */
static lm_code order_marks(utf8proc_int32_t *cp, size_t n, lm_buf *tmp, lm_err *e)
{
    for (size_t i = 0, j; i < n; i = j + 1) {
        size_t at[256] = { 0 }, sum = 0;
        bool sorted = true;
        int last = 0, k;
        for (j = i; j < n && (k = combining_class(cp[j])); j++) {
            sorted &= k >= last;
            last = k;
            at[k]++;
        }
        if (sorted)
            continue;
        for (k = 0; k < 256; k++) {
            size_t c = at[k];
            at[k] = sum;
            sum += c;
        }
        tmp->len = 0;
        lm_code rc = lm_buf_room(tmp, (j - i) * sizeof *cp, e);
        if (rc)
            return rc;
        utf8proc_int32_t *to = (utf8proc_int32_t *)(void *)tmp->data;
        for (size_t p = i; p < j; p++)
            to[at[combining_class(cp[p])]++] = cp[p];
        memcpy(cp + i, to, (j - i) * sizeof *cp);
    }
    return LM_OK;
}

/* Normalise one part without inert characters; work[] are scratch buffers. */
static lm_code convert(lm_form form, const uint8_t *p, const uint8_t *end, lm_buf work[2],
                       lm_buf *out, lm_err *e)
{
    size_t n = 0;
    lm_code rc;

    work[0].len = 0;
    while (p < end) {
        unsigned k;
        uint32_t c = lm_class_get(p, &k);
        rc = lm_buf_room(&work[0], (n + MAX_DECOMPOSED) * 4, e);
        if (rc)
            return rc;
        n += (size_t)decompose(c, form >= LM_NFKC, (utf8proc_int32_t *)(void *)work[0].data + n);
        p += k;
    }
    utf8proc_int32_t *cp = (utf8proc_int32_t *)(void *)work[0].data;
    rc = order_marks(cp, n, &work[1], e);
    if (rc)
        return rc;
    if (form == LM_NFC || form == LM_NFKC) {
        utf8proc_ssize_t m = compose(cp, n);
        if (m >= 0)
            n = (size_t)m;
    }
    rc = lm_buf_room(out, 4 * n, e);
    for (size_t i = 0; i < n && !rc; i++)
        out->len += lm_utf8_put((uint32_t)cp[i], out->data + out->len);
    return rc;
}

lm_code lm_form_append(lm_form form, const char *text, size_t len, lm_buf *out, lm_err *e)
{
    const uint8_t *p = (const uint8_t *)text, *end = p + len, *done = p, *inert = p;
    lm_buf work[2] = { 0 };
    uint8_t bit = (uint8_t)(1 << form);
    unsigned k;
    lm_code rc = lm_buf_room(out, len, e);

    pthread_once(&once, fill_table);
    while (p < end && !rc) {
        if (!(active[lm_class_get(p, &k)] & bit)) {
            inert = p;
            p += k;
            continue;
        }
        const uint8_t *stop = p + k;
        while (stop < end && (active[lm_class_get(stop, &k)] & bit))
            stop += k;
        rc = lm_buf_add(out, done, (size_t)(inert - done), e);
        if (!rc)
            rc = convert(form, inert, stop, work, out, e);
        p = done = inert = stop;
    }
    if (!rc)
        rc = lm_buf_add(out, done, (size_t)(end - done), e);
    lm_buf_fini(&work[0]);
    lm_buf_fini(&work[1]);
    return rc;
}
