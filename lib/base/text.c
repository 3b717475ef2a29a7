/* SPDX-License-Identifier: Apache-2.0 */
/* text.c -- parse and format numbers. */
#include "base/text.h"

#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char letter;
    int64_t factor;
} suffix;

static const suffix decimal[] = { { 'k', 1000 },       { 'K', 1000 },          { 'M', 1000000 },
                                  { 'B', 1000000000 }, { 'T', 1000000000000 }, { 0, 0 } };
static const suffix binary[] = { { 'k', 1LL << 10 }, { 'K', 1LL << 10 }, { 'M', 1LL << 20 },
                                 { 'G', 1LL << 30 }, { 'T', 1LL << 40 }, { 0, 0 } };

/* [-]DIGITS[.DIGITS][SUFFIX] without rounding; with `round` a fraction of a unit is dropped. */
static bool parse_scaled(const char *s, const suffix *table, bool round, int64_t *out)
{
    bool negative = *s == '-', any = false, point = false;
    __int128 n = 0, divisor = 1;
    int64_t factor = 1;

    for (s += negative; (*s >= '0' && *s <= '9') || (*s == '.' && !point); s++) {
        if (*s == '.') {
            point = true;
            continue;
        }
        any = true;
        n = n * 10 + (*s - '0');
        divisor *= point ? 10 : 1;
        if (n > (__int128)1 << 80 || divisor > (__int128)1000000000000000000)
            return false;
    }
    if (!any || s[-1] == '.')
        return false;
    if (*s) {
        for (; table->letter && table->letter != *s; table++)
            ;
        if (!table->letter || s[1])
            return false;
        factor = table->factor;
    } else if (point && round) {
        return false; /* half a byte */
    }
    n *= factor;
    if (n % divisor && !round)
        return false;
    n /= divisor;
    n = negative ? -n : n;
    if (n > INT64_MAX || n < INT64_MIN)
        return false;
    *out = (int64_t)n;
    return true;
}

bool lm_parse_count(const char *s, int64_t *out)
{
    return parse_scaled(s, decimal, false, out);
}

bool lm_parse_bytes(const char *s, int64_t *out)
{
    return parse_scaled(s, binary, true, out);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static locale_t c_locale;

static void make_locale(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

static size_t digits_at(const char *s)
{
    return strspn(s, "0123456789");
}

/* The length of [+-]DIGITS[.DIGITS][e[+-]DIGITS] at s, 0 if there is none: strtod would also take
 * hexadecimal numbers, "inf" and "nan". */
static size_t decimal_at(const char *s)
{
    const char *c = s + (*s == '+' || *s == '-'), *e;
    size_t whole = digits_at(c), part = 0;

    c += whole;
    if (*c == '.') {
        part = digits_at(c + 1);
        c += 1 + part;
    }
    if (!whole && !part)
        return 0;
    if (*c == 'e' || *c == 'E') {
        e = c + 1 + (c[1] == '+' || c[1] == '-');
        if (!digits_at(e))
            return 0;
        c = e + digits_at(e);
    }
    return (size_t)(c - s);
}

/* Parse a decimal number at s and set its end.  False where there is no number, and where a double
 * cannot hold it: too large, or so small that digits are lost. */
static bool read_double(const char *s, double *out, const char **end)
{
    size_t n = decimal_at(s);
    int saved = errno, why;

    pthread_once(&once, make_locale);
    errno = 0;
    *out = !n ? 0 : c_locale ? strtod_l(s, NULL, c_locale) : strtod(s, NULL);
    why = errno;
    errno = saved;
    *end = s + n;
    return n && why != ERANGE;
}

bool lm_parse_double(const char *s, double *out)
{
    const char *end;
    double v;

    if (!read_double(s, &v, &end) || *end)
        return false;
    *out = v;
    return true;
}

bool lm_parse_list(const char *s, double *v, int most, int *n)
{
    const char *end;

    for (*n = 0; *n < most; s = end + 1) {
        if (!read_double(s, &v[*n], &end))
            return false;
        ++*n;
        if (!*end)
            return true;
        if (*end != ',')
            return false;
    }
    return false;
}

bool lm_parse_seconds(const char *s, double *out)
{
    const char *end;
    double v;

    if (!read_double(s, &v, &end) || (*end && end[1]))
        return false;
    switch (*end) {
    case 0:
    case 's':
        break;
    case 'm':
        v *= 60;
        break;
    case 'h':
        v *= 3600;
        break;
    default:
        return false;
    }
    if (!isfinite(v))
        return false;
    *out = v;
    return true;
}

/* Three significant digits. */
static char *show(double n, double step, const char *const *units, int last, char *buf)
{
    int i = 0;
    double size = fabs(n);

    while (i < last && size >= step * (i ? 0.9995 : 1)) {
        size /= step;
        n /= step;
        i++;
    }
    if (i == 0)
        snprintf(buf, 32, "%.4g%s%s", n, *units[0] ? " " : "", units[0]);
    else
        snprintf(buf, 32, "%.*f %s", size < 9.995 ? 2 : size < 99.95 ? 1 : 0, n, units[i]);
    return buf;
}

char *lm_show_bytes(double bytes, char *buf)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };

    return show(bytes, 1024, units, 5, buf);
}

char *lm_show_seconds(double s, char *buf)
{
    long n = s < 0 || !(s < 1e8) ? 0 : (long)(s + 0.5);

    if (n >= 3600)
        snprintf(buf, 32, "%ld:%02ld:%02ld", n / 3600, n / 60 % 60, n % 60);
    else
        snprintf(buf, 32, "%ld:%02ld", n / 60, n % 60);
    return buf;
}

char *lm_show_count(double n, char *buf)
{
    static const char *const units[] = { "", "k", "M", "B", "T" };

    return show(n, 1000, units, 4, buf);
}

enum { LONGEST = 64 };

/* Edit distance with swaps of neighbours (optimal string alignment). */
static int distance(const char *a, const char *b)
{
    int n = (int)strlen(a), m = (int)strlen(b), d[3][LONGEST + 1];

    if (n > LONGEST || m > LONGEST)
        return LONGEST;
    for (int j = 0; j <= m; j++)
        d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *row = d[i % 3], *up = d[(i + 2) % 3], *up2 = d[(i + 1) % 3];

        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = up[j - 1] + (a[i - 1] != b[j - 1]);

            best = up[j] + 1 < best ? up[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = up2[j - 2] + 1 < best ? up2[j - 2] + 1 : best;
            row[j] = best;
        }
    }
    return d[n % 3][m];
}

const char *lm_plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

bool lm_text_until(const char **at, const char *ends, char *out, size_t size)
{
    size_t n = strcspn(*at, ends);
    const char *from = *at;
    size_t kept = n < size ? n : size - 1;
    *at += n;
    memcpy(out, from, kept);
    out[kept] = 0;
    return kept == n;
}

bool lm_text_ends(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n > k && !strcmp(s + n - k, end);
}

const char *lm_nearest(const char *s, const char *const *list)
{
    const char *best = NULL;
    int least = 4;

    for (; *list; list++) {
        int d = distance(s, *list);

        /* at least one character in common, and half of what was written */
        if (d < least && d < (int)strlen(*list) && 2 * d <= (int)strlen(s)) {
            least = d;
            best = *list;
        }
    }
    return best;
}
