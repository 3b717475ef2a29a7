/* SPDX-License-Identifier: Apache-2.0 */
/* reward_number.c -- answers that are compared with the reference of the record: numbers, and
 * texts. */
#include <ctype.h>
#include <string.h>

#include "base/text.h"
#include "tune/align/reward_impl.h"

/* ---- numbers in a text ---- */

static bool is_digit(const char *p, const char *end)
{
    return p < end && *p >= '0' && *p <= '9';
}

/* A comma with three digits behind it and no fourth. */
static bool is_thousands(const char *p, const char *end)
{
    return p < end && *p == ',' && is_digit(p + 1, end) && is_digit(p + 2, end) &&
           is_digit(p + 3, end) && !is_digit(p + 4, end);
}

/* A minus directly before the number, or before its currency sign, that does not subtract from what
 * is before it. */
static bool is_negative(const char *begin, const char *p)
{
    if (p > begin && p[-1] == '$')
        p--;
    if (p > begin && p[-1] == '\\') /* \$ of LaTeX */
        p--;
    if (p == begin || p[-1] != '-')
        return false;
    p--;
    return p == begin || !(isalnum((unsigned char)p[-1]) || p[-1] == ')');
}

/* The number that begins at p; its end, or NULL if it is too long to be read. */
static const char *read_number(const char *begin, const char *p, const char *end, double *out)
{
    char digits[64];
    size_t n = 0;
    digits[n++] = is_negative(begin, p) ? '-' : '+';
    if (*p == '.')
        digits[n++] = '0';
    for (bool point = false; p < end; p++) {
        bool fraction = *p == '.' && !point && is_digit(p + 1, end);
        if (!point && is_thousands(p, end))
            continue;
        if (!is_digit(p, end) && !fraction)
            break;
        point |= fraction;
        if (n < sizeof digits - 1)
            digits[n] = *p;
        n++;
    }
    if (n >= sizeof digits)
        return NULL;
    digits[n] = 0;
    return lm_parse_double(digits, out) ? p : NULL;
}

/* The first or the last number of text[0..len). */
static bool find_number(const char *text, size_t len, bool first, double *out)
{
    const char *end = text + len;
    bool found = false;
    for (const char *p = text; p < end;) {
        const char *next = p + 1;
        double x;
        if (is_digit(p, end) || (*p == '.' && is_digit(p + 1, end))) {
            next = read_number(text, p, end, &x);
            if (next) {
                *out = x;
                found = true;
                if (first)
                    return true;
            } else {
                for (next = p; is_digit(next, end); next++)
                    ;
            }
        }
        p = next > p ? next : p + 1;
    }
    return found;
}

/* ---- the place of the answer ---- */

/* Behind the last `mark`; NULL: there is none. */
static const char *find_last(const char *text, size_t len, const char *mark)
{
    const size_t n = strlen(mark);
    for (size_t i = len >= n ? len - n + 1 : 0; i > 0; i--)
        if (!memcmp(text + i - 1, mark, n))
            return text + i - 1 + n;
    return NULL;
}

/* From p up to the '}' of the '{' before it. */
static size_t brace_len(const char *p, const char *end)
{
    size_t n = 0;
    for (int depth = 1; p + n < end; n++) {
        depth += p[n] == '{' ? 1 : p[n] == '}' ? -1 : 0;
        if (!depth)
            break;
    }
    return n;
}

bool reward_number(const char *text, size_t len, double *out)
{
    const char *end = text + len, *p = find_last(text, len, "####");
    if (p)
        return find_number(p, (size_t)(end - p), true, out);
    p = find_last(text, len, "\\boxed{");
    if (p)
        return find_number(p, brace_len(p, end), false, out);
    p = find_last(text, len, "<answer>");
    if (p) {
        const char *close = memmem(p, (size_t)(end - p), "</answer>", 9);
        return find_number(p, (size_t)((close ? close : end) - p), false, out);
    }
    return find_number(text, len, false, out);
}

/* ---- rewards ---- */

static lm_code get_reference(const reward *r, const lm_reward_item *item, const json_t **out,
                             lm_err *e)
{
    static const char *const usual[] = { "answer", "solution", "target", "ground_truth",
                                         "completion" };
    *out = NULL;
    if (*r->column)
        *out = json_object_get(item->record, r->column);
    for (size_t i = 0; !*r->column && !*out && i < sizeof usual / sizeof *usual; i++)
        *out = json_object_get(item->record, usual[i]);
    if (json_is_string(*out) || json_is_number(*out))
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, r->name, "name the column of the reference: NAME:column=KEY",
                   "the record of the prompt '%.60s' has no text or number under '%s'",
                   item->prompt, *r->column ? r->column : "answer");
}

lm_code reward_gsm8k(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    const json_t *ref;
    double want, got;
    if (get_reference(r, item, &ref, e))
        return e->code;
    if (json_is_number(ref))
        want = json_number_value(ref);
    else if (!reward_number(json_string_value(ref), json_string_length(ref), &want))
        return lm_fail(e, LM_EFORMAT, r->name, "use records whose reference is a number",
                       "the reference '%.60s' has no number", json_string_value(ref));
    *out = reward_number(item->text, item->text_len, &got) && got == want ? 1 : 0;
    return LM_OK;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

lm_code reward_exact(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    const json_t *ref;
    if (get_reference(r, item, &ref, e))
        return e->code;
    if (!json_is_string(ref))
        return lm_fail(e, LM_EFORMAT, r->name, "write it in quotes", "the reference is a number");
    const char *a = item->text, *b = json_string_value(ref);
    size_t n = item->text_len, m = json_string_length(ref);
    for (; n && is_space(a[n - 1]); n--)
        ;
    for (; n && is_space(*a); a++, n--)
        ;
    for (; m && is_space(b[m - 1]); m--)
        ;
    for (; m && is_space(*b); b++, m--)
        ;
    *out = n == m && !memcmp(a, b, n) ? 1 : 0;
    return LM_OK;
}
