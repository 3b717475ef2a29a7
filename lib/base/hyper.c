/* SPDX-License-Identifier: Apache-2.0 */
/* hyper.c -- values of hyper-parameters as text, and lists of them. */
#include "base/hyper.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

int lm_hyper_find(const lm_hyper *table, const char *name)
{
    for (int i = 0; table[i].name; i++)
        if (!strcmp(table[i].name, name))
            return i;
    return -1;
}

/* True: its values have names. */
static bool is_named(const lm_hyper *h)
{
    return h->words && *h->words;
}

/* The number of `value` among words; -1: none of them. */
static double word_of(const char *words, const char *value)
{
    double k = 0;
    size_t len = strlen(value);
    for (const char *w = words; *w; k++) {
        size_t n = strcspn(w, " ");
        if (n == len && !memcmp(w, value, n))
            return k;
        w += n + (w[n] == ' ');
    }
    return -1;
}

/* The k-th word, which ends at a space or the end. */
static const char *nth_word(const char *words, int k)
{
    for (; k > 0; k--)
        words += strcspn(words, " ") + 1;
    return words;
}

/* ---- reading ---- */

lm_code lm_hyper_next(const char **at, const char *ends, const char *where, const char *who,
                      lm_hyper_text *out, lm_err *e)
{
    char until[10] = "=,";
    snprintf(until + 2, sizeof until - 2, "%s", ends);
    bool whole = lm_text_until(at, until, out->key, sizeof out->key);
    out->value[0] = 0;
    if (whole && **at != '=')
        return lm_fail(e, LM_EUSAGE, where, "write key=value", "'%.40s' of %s has no value",
                       out->key, who);
    if (**at == '=') {
        ++*at;
        if (!lm_text_until(at, until + 1, out->value, sizeof out->value) && whole)
            return lm_fail(e, LM_EUSAGE, where, NULL, "the value of %s is too long", out->key);
    }
    for (char *c = out->key; *c; c++)
        *c = *c == '-' ? '_' : *c;
    return LM_OK;
}

lm_code lm_hyper_set(const lm_hyper *h, const char *where, const char *who, const char *text,
                     double *out, lm_err *e)
{
    bool named = is_named(h), whole = h->words && !named;
    double x = named ? word_of(h->words, text) : -1;
    bool number = x < 0 && lm_parse_double(text, &x);
    if (named && (x < 0 || number))
        return lm_fail(e, LM_EUSAGE, where, NULL, "%s of %s is one of: %s; not '%.40s'", h->name,
                       who, h->words, text);
    if (!named && (!number || !(x >= h->least && x <= h->most) || (whole && x != floor(x))))
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "%s of %s is a %snumber from %.7g to %.7g, not '%.40s'", h->name, who,
                       whole ? "whole " : "", h->least, h->most, text);
    *out = x;
    return LM_OK;
}

lm_code lm_hyper_fail(const lm_hyper *table, const char *where, const char *who, const char *more,
                      const char *key, lm_err *e)
{
    char known[512];
    size_t len = (size_t)snprintf(known, sizeof known, "its keys are:%s", more);
    for (; table->name && len < sizeof known; table++)
        len += (size_t)snprintf(known + len, sizeof known - len, " %s", table->name);
    return lm_fail(e, LM_EUSAGE, where, known, "%s has no '%.40s'", who, key);
}

/* ---- lists ---- */

/* The word of a value as a string of its own. */
static void copy_word(const lm_hyper *h, double value, char *out, size_t size)
{
    const char *at = nth_word(h->words, (int)value);
    lm_text_until(&at, " ", out, size);
}

void lm_hyper_show(const lm_hyper *h, double value, char out[64])
{
    double back;
    if (is_named(h)) {
        copy_word(h, value, out, 64);
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(out, 64, "%.*g", digits, value);
        if (lm_parse_double(out, &back) && back == value)
            return;
    }
}

lm_code lm_hyper_add_line(const lm_hyper *h, lm_buf *out, lm_err *e)
{
    char word[64];
    if (lm_buf_addf(out, e, "  %-23s %-44s ", h->name, h->help))
        return e->code;
    if (!is_named(h))
        return lm_buf_addf(out, e, "%.7g to %.7g [%g]\n", h->least, h->most, h->value);
    copy_word(h, h->value, word, sizeof word);
    return lm_buf_addf(out, e, "%s [%s]\n", h->words, word);
}

/* Values of words as words, and the words as a list; no least and most, which are their numbers. */
static void add_words(const lm_hyper *h, lm_jw *w)
{
    char one[64];
    copy_word(h, h->value, one, sizeof one);
    lm_jw_str(w, "value", one);
    lm_jw_arr(w, "words");
    for (const char *at = h->words; *at; at += *at == ' ') {
        lm_text_until(&at, " ", one, sizeof one);
        lm_jw_str(w, NULL, one);
    }
    lm_jw_close_arr(w);
}

void lm_hyper_add_json(const lm_hyper *h, lm_jw *w)
{
    lm_jw_obj(w, h->name);
    if (is_named(h)) {
        add_words(h, w);
    } else {
        lm_jw_f64(w, "value", h->value);
        lm_jw_f64(w, "least", h->least);
        lm_jw_f64(w, "most", h->most);
        if (h->words)
            lm_jw_bool(w, "whole", true);
    }
    lm_jw_str(w, "help", h->help);
    lm_jw_close_obj(w);
}
