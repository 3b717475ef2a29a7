/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_methods_text.c -- the methods of str: text to text, and questions. */
#include <string.h>
#include <utf8proc.h>

#include "base/text.h"
#include "text/jinja_run.h"

/* ---- Text to text ---- */

static lm_code strip(lm_jrun *r, const lm_jval *self, const lm_jcall *c, unsigned sides,
                     lm_jval *out)
{
    const char *s = self->u.s->s;
    size_t n = self->u.s->len;
    const lm_jstr *chars;
    LM_JBIND("strip", "chars=");

    rc = lm_jarg_str(r, &arg[0], "strip arg", &chars);
    if (!rc && chars)
        rc = lm_jrun_work(r, n / 64 * chars->len);
    if (rc)
        return rc;
    lm_jstr_strip(&s, &n, chars, sides);
    rc = lm_jrun_work(r, self->u.s->len - n);
    return rc ? rc : lm_jv_part(r, self->u.s, s, n, out);
}

static lm_code do_strip(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return strip(r, self, c, LM_JSTRIP_LEFT | LM_JSTRIP_RIGHT, out);
}
static lm_code do_lstrip(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return strip(r, self, c, LM_JSTRIP_LEFT, out);
}
static lm_code do_rstrip(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return strip(r, self, c, LM_JSTRIP_RIGHT, out);
}
static lm_code do_upper(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("upper", "");
    return lm_jstr_case(r, self->u.s, true, out);
}
static lm_code do_lower(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("lower", "");
    return lm_jstr_case(r, self->u.s, false, out);
}
static lm_code do_capitalize(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("capitalize", "");
    return lm_jstr_capitalize(r, self->u.s, out);
}

/* Each run of letters capitalised. */
static lm_code do_title(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    const lm_jstr *s = self->u.s;
    lm_buf text = { 0 };
    bool inside = false;
    size_t n;
    LM_JBIND("title", "");

    for (size_t i = 0; !rc && i < s->len; i += n) {
        utf8proc_category_t k =
            utf8proc_category((utf8proc_int32_t)lm_utf8_get(s->s + i, s->len - i, &n));
        lm_jstr one = { s->s + i, n, 1, false };
        lm_jval cased;

        rc = lm_jstr_case(r, &one, !inside, &cased);
        if (!rc)
            rc = lm_jrun_add(r, &text, cased.u.s->s, cased.u.s->len);
        inside = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LM;
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

static lm_code do_replace(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    const lm_jstr *old, *new;
    int64_t count;
    LM_JBIND("replace", "old,new,count=");

    rc = lm_jarg_str(r, &arg[0], "replace() argument 1", &old);
    if (!rc)
        rc = lm_jarg_str(r, &arg[1], "replace() argument 2", &new);
    if (!rc)
        rc = lm_jarg_int(r, &arg[2], -1, &count);
    if (!rc && (!old || !new))
        return lm_jrun_fail(r, "replace() argument must be str, not NoneType");
    return rc ? rc : lm_jstr_replace(r, self->u.s, old, new, count, out);
}

static bool begins(const lm_jstr *s, const lm_jstr *with)
{
    return s->len >= with->len && !memcmp(s->s, with->s, with->len);
}
static bool ends(const lm_jstr *s, const lm_jstr *with)
{
    return s->len >= with->len && !memcmp(s->s + s->len - with->len, with->s, with->len);
}

static lm_code do_removeprefix(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    const lm_jstr *s = self->u.s, *with;
    LM_JBIND("removeprefix", "prefix");

    rc = lm_jarg_str(r, &arg[0], "removeprefix() argument", &with);
    if (rc || !with)
        return rc ? rc : lm_jrun_fail(r, "removeprefix() argument must be str, not None");
    size_t n = begins(s, with) ? with->len : 0;
    return lm_jv_lend(r, s->s + n, s->len - n, out);
}

static lm_code do_removesuffix(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    const lm_jstr *s = self->u.s, *with;
    LM_JBIND("removesuffix", "suffix");

    rc = lm_jarg_str(r, &arg[0], "removesuffix() argument", &with);
    if (rc || !with)
        return rc ? rc : lm_jrun_fail(r, "removesuffix() argument must be str, not None");
    return lm_jv_lend(r, s->s, s->len - (ends(s, with) ? with->len : 0), out);
}

/* Pad to a width: left < 0 to the right of the text, > 0 to the left, 0 both. */
static lm_code pad(lm_jrun *r, const lm_jval *self, const lm_jcall *c, int side, lm_jval *out)
{
    const lm_jstr *s = self->u.s, *fill;
    int64_t width, n = lm_jv_chars(s), left, right;
    lm_buf text = { 0 };
    LM_JBIND("center", "width,fillchar=");

    rc = lm_jarg_int(r, &arg[0], 0, &width);
    if (!rc)
        rc = lm_jarg_str(r, &arg[1], "The fill character", &fill);
    if (!rc && fill && lm_jv_chars(fill) != 1)
        return lm_jrun_fail(r, "The fill character must be exactly one character long");
    if (rc)
        return rc;
    width = width > n ? width - n : 0;
    left = side > 0 ? width : side < 0 ? 0 : width / 2 + (width & (width + n) & 1);
    right = width - left;
    for (int64_t i = 0; !rc && i < left; i++)
        rc = lm_jrun_add(r, &text, fill ? fill->s : " ", fill ? fill->len : 1);
    if (!rc)
        rc = lm_jrun_add(r, &text, s->s, s->len);
    for (int64_t i = 0; !rc && i < right; i++)
        rc = lm_jrun_add(r, &text, fill ? fill->s : " ", fill ? fill->len : 1);
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}
static lm_code do_center(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return pad(r, self, c, 0, out);
}
static lm_code do_ljust(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return pad(r, self, c, -1, out);
}
static lm_code do_rjust(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return pad(r, self, c, 1, out);
}

static lm_code do_zfill(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    const lm_jstr *s = self->u.s;
    int64_t width, n = lm_jv_chars(s);
    size_t sign = s->len && (s->s[0] == '+' || s->s[0] == '-');
    lm_buf text = { 0 };
    LM_JBIND("zfill", "width");

    rc = lm_jarg_int(r, &arg[0], 0, &width);
    if (!rc)
        rc = lm_jrun_add(r, &text, s->s, sign);
    for (; !rc && n < width; n++)
        rc = lm_jrun_add(r, &text, "0", 1);
    if (!rc)
        rc = lm_jrun_add(r, &text, s->s + sign, s->len - sign);
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

static lm_code do_format(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return lm_jformat_braces(r, self->u.s, c, out);
}

/* ---- Questions about text ---- */

/* The part [start, end) of the text, in bytes; false: start is behind the end. */
static lm_code take_part(lm_jrun *r, const lm_jstr *s, const lm_jval *start, const lm_jval *end,
                         lm_jstr *part, size_t *from, bool *some)
{
    int64_t n = lm_jv_chars(s), a, b;
    lm_code rc = lm_jarg_int(r, start, 0, &a);

    if (!rc)
        rc = lm_jarg_int(r, end, n, &b);
    if (rc)
        return rc;
    a = a < 0 ? (a < -n ? 0 : a + n) : a;
    b = b < 0 ? (b < -n ? 0 : b + n) : b > n ? n : b;
    *some = a <= b && a <= n;
    if (!*some)
        return LM_OK;
    *from = lm_jstr_offset(s, a);
    *part = (lm_jstr){ s->s + *from, lm_jstr_offset(s, b) - *from, -1, false };
    return lm_jrun_walk(r, s);
}

static lm_code match(lm_jrun *r, const lm_jval *self, const lm_jcall *c, bool at_end, lm_jval *out)
{
    lm_jstr part;
    size_t from;
    bool some, yes = false;
    LM_JBIND(at_end ? "endswith" : "startswith", "prefix,start=,end=");

    rc = take_part(r, self->u.s, &arg[1], &arg[2], &part, &from, &some);
    if (rc)
        return rc;
    if (arg[0].kind != LM_JV_STR && arg[0].kind != LM_JV_TUPLE)
        return lm_jrun_fail(r, "%s first arg must be str or a tuple of str, not %s",
                            at_end ? "endswith" : "startswith", lm_jv_type(&arg[0]));
    size_t n = arg[0].kind == LM_JV_STR ? 1 : arg[0].u.seq->n;
    for (size_t i = 0; some && !yes && i < n; i++) {
        const lm_jval *with = arg[0].kind == LM_JV_STR ? &arg[0] : &arg[0].u.seq->v[i];

        if (with->kind != LM_JV_STR)
            return lm_jrun_fail(r, "tuple for %s must only contain str",
                                at_end ? "endswith" : "startswith");
        yes = at_end ? ends(&part, with->u.s) : begins(&part, with->u.s);
    }
    *out = lm_jv_bool(yes);
    return LM_OK;
}
static lm_code do_startswith(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return match(r, self, c, false, out);
}
static lm_code do_endswith(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return match(r, self, c, true, out);
}

/* find, rfind, index, rindex */
static lm_code seek(lm_jrun *r, const lm_jval *self, const lm_jcall *c, bool last, bool must,
                    lm_jval *out)
{
    lm_jstr part, head;
    const char *p = NULL;
    size_t from = 0;
    bool some;
    LM_JBIND("find", "sub,start=,end=");

    rc = take_part(r, self->u.s, &arg[1], &arg[2], &part, &from, &some);
    if (rc)
        return rc;
    if (arg[0].kind != LM_JV_STR)
        return lm_jrun_fail(r, "must be str, not %s", lm_jv_type(&arg[0]));
    rc = last ? lm_jstr_work_of_last(r, self->u.s, arg[0].u.s) : LM_OK;
    if (rc)
        return rc;
    if (some)
        p = last              ? lm_jstr_last(&part, arg[0].u.s)
            : arg[0].u.s->len ? memmem(part.s, part.len, arg[0].u.s->s, arg[0].u.s->len)
                              : part.s;
    if (!p && must)
        return lm_jrun_fail(r, "substring not found");
    head = (lm_jstr){ self->u.s->s, p ? (size_t)(p - self->u.s->s) : 0, -1, false };
    *out = lm_jv_int(p ? lm_jv_chars(&head) : -1);
    return LM_OK;
}
static lm_code do_find(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return seek(r, self, c, false, false, out);
}
static lm_code do_rfind(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return seek(r, self, c, true, false, out);
}
static lm_code do_index(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return seek(r, self, c, false, true, out);
}
static lm_code do_rindex(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return seek(r, self, c, true, true, out);
}

static lm_code do_count(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jstr part;
    size_t from = 0;
    int64_t n = 0;
    bool some;
    LM_JBIND("count", "sub,start=,end=");

    rc = take_part(r, self->u.s, &arg[1], &arg[2], &part, &from, &some);
    if (rc)
        return rc;
    if (arg[0].kind != LM_JV_STR)
        return lm_jrun_fail(r, "must be str, not %s", lm_jv_type(&arg[0]));
    const lm_jstr *sub = arg[0].u.s;
    if (some && !sub->len)
        n = lm_jv_chars(&part) + 1;
    while (some && sub->len) {
        const char *p = memmem(part.s, part.len, sub->s, sub->len);

        if (!p)
            break;
        n++;
        part.len -= (size_t)(p - part.s) + sub->len;
        part.s = p + sub->len;
    }
    *out = lm_jv_int(n);
    return LM_OK;
}

/* isalpha and the like: every character is of the class, and there is one. */
static lm_code every(lm_jrun *r, const lm_jval *self, const lm_jcall *c, bool (*is)(uint32_t),
                     lm_jval *out)
{
    const lm_jstr *s = self->u.s;
    bool yes = s->len > 0;
    size_t i = 0, n;
    LM_JBIND("a test of characters", "");

    for (; yes && i < s->len; i += n)
        yes = is(lm_utf8_get(s->s + i, s->len - i, &n));
    *out = lm_jv_bool(yes);
    return lm_jrun_work(r, i);
}
static bool is_alpha(uint32_t cp)
{
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)cp);
    return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}
static bool is_decimal(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND;
}
static bool is_digit(uint32_t cp)
{
    return is_decimal(cp) || cp == 0xB2 || cp == 0xB3 || cp == 0xB9 ||
           (cp >= 0x2070 && cp <= 0x2089 && cp != 0x2071);
}
static bool is_numeric(uint32_t cp)
{
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)cp);
    return k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
}
static bool is_alnum(uint32_t cp)
{
    return is_alpha(cp) || is_numeric(cp);
}
static bool is_ascii(uint32_t cp)
{
    return cp < 0x80;
}
static lm_code do_isalpha(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, is_alpha, out);
}
static lm_code do_isdigit(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, is_digit, out);
}
static lm_code do_isdecimal(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, is_decimal, out);
}
static lm_code do_isnumeric(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, is_numeric, out);
}
static lm_code do_isalnum(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, is_alnum, out);
}
static lm_code do_isspace(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return every(r, self, c, lm_jstr_blank, out);
}
static lm_code do_isascii(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_code rc = every(r, self, c, is_ascii, out);
    if (!rc && !self->u.s->len)
        *out = lm_jv_bool(true);
    return rc;
}
static lm_code do_isupper(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("isupper", "");
    *out = lm_jv_bool(lm_jstr_cased(self->u.s, true));
    return lm_jrun_work(r, self->u.s->len);
}
static lm_code do_islower(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("islower", "");
    *out = lm_jv_bool(lm_jstr_cased(self->u.s, false));
    return lm_jrun_work(r, self->u.s->len);
}

const lm_jmethod lm_jmethods_text[] = {
    { "strip", do_strip },
    { "lstrip", do_lstrip },
    { "rstrip", do_rstrip },
    { "upper", do_upper },
    { "lower", do_lower },
    { "casefold", do_lower },
    { "capitalize", do_capitalize },
    { "title", do_title },
    { "replace", do_replace },
    { "removeprefix", do_removeprefix },
    { "removesuffix", do_removesuffix },
    { "center", do_center },
    { "ljust", do_ljust },
    { "rjust", do_rjust },
    { "zfill", do_zfill },
    { "format", do_format },
    { "startswith", do_startswith },
    { "endswith", do_endswith },
    { "find", do_find },
    { "rfind", do_rfind },
    { "index", do_index },
    { "rindex", do_rindex },
    { "count", do_count },
    { "isalpha", do_isalpha },
    { "isdigit", do_isdigit },
    { "isdecimal", do_isdecimal },
    { "isnumeric", do_isnumeric },
    { "isalnum", do_isalnum },
    { "isspace", do_isspace },
    { "isascii", do_isascii },
    { "isupper", do_isupper },
    { "islower", do_islower },
    { NULL, NULL },
};
