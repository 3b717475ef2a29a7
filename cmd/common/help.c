/* SPDX-License-Identifier: Apache-2.0 */
/* help.c -- --help and --version.
 *
 * The text fits 80 columns and 60 lines: if a tool has more options, the last groups are listed by
 * name only, and the manual page describes them. */
#include <archive.h>
#include <ctype.h>
#include <string.h>
#include <zstd.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/buf.h"
#include "common/frame.h"

enum { WIDTH = 80, LINES = 60, COLUMN = 28 };

static lm_frame *const f = &lm_the_frame;

/* Add words of `text` from column `at`, wrapping to `indent`; ends the line. */
static void wrap(lm_buf *b, const char *text, int at, int indent)
{
    bool first = true;

    while (*text) {
        int n = (int)strcspn(text, " ");

        if (!first && at + 1 + n > WIDTH) {
            lm_buf_addf(b, NULL, "\n%*s", indent, "");
            at = indent;
        } else if (!first) {
            lm_buf_add(b, " ", 1, NULL);
            at++;
        }
        lm_buf_add(b, text, (size_t)n, NULL);
        at += n;
        text += n;
        text += strspn(text, " ");
        first = false;
    }
    lm_buf_add(b, "\n", 1, NULL);
}

static bool starts_on(const lm_opt *o)
{
    return o->kind == LM_OPT_FLAG && o->dst && *(bool *)o->dst;
}

/* alias: see lm_tool. */
static int spell(const lm_opt *o, const char *alias, char *out, size_t size)
{
    char letter[9] = "    ";

    if (o->letter)
        snprintf(letter, sizeof letter, "-%c, ", o->letter);
    for (const char *a = alias; o->letter && a && a[0] && a[1]; a += 2)
        if (a[1] == o->letter)
            snprintf(letter, sizeof letter, "-%c, -%c, ", a[1], a[0]);
    return snprintf(out, size, "  %s--%s%s%s%s", letter, starts_on(o) ? "[no-]" : "", o->name,
                    o->value ? " " : "", o->value ? o->value : "");
}

static void add_option(lm_buf *b, const lm_opt *o, const char *alias)
{
    char left[128];
    int n = spell(o, alias, left, sizeof left);

    lm_buf_addf(b, NULL, "%s", left);
    /* too long: the text follows on the same line if it fits, otherwise below */
    if (n + 2 > COLUMN) {
        bool fits = n + 2 + (int)strlen(o->help) <= WIDTH;

        lm_buf_addf(b, NULL, "%s%*s", fits ? "" : "\n", fits ? 2 : COLUMN, "");
        wrap(b, o->help, fits ? n + 2 : COLUMN, COLUMN);
        return;
    }
    lm_buf_addf(b, NULL, "%*s", COLUMN - n, "");
    wrap(b, o->help, COLUMN, COLUMN);
}

/* "Title: --a, --b, ..." */
static void add_names(lm_buf *b, const char *title, int from, int to)
{
    lm_buf text = { 0 };

    for (int i = from; i < to; i++) {
        if (f->opt[i].help)
            lm_buf_addf(&text, NULL, "%s--%s", text.len ? ", " : "", f->opt[i].name);
    }
    lm_buf_addf(b, NULL, "%s: ", title);
    wrap(b, text.data ? text.data : "", (int)strlen(title) + 2, 2);
    lm_buf_fini(&text);
}

static void add_head(lm_buf *b, const lm_tool *t)
{
    char line[512];

    lm_buf_addf(b, NULL, "Usage: %s ", t->name);
    snprintf(line, sizeof line, "[OPTION ...] %s", t->args ? t->args : "");
    wrap(b, line, 8 + (int)strlen(t->name), 8 + (int)strlen(t->name));
    snprintf(line, sizeof line, "%s.", t->brief);
    line[0] = (char)toupper((unsigned char)line[0]);
    wrap(b, line, 0, 0);
}

static void render(lm_buf *b, const lm_tool *t, int detailed)
{
    int group = 0;

    b->len = 0;
    add_head(b, t);
    for (int i = 0, end; i < f->n; i = end) {
        bool titled = f->opt[i].kind == LM_OPT_GROUP;
        const char *title = titled ? f->opt[i].name : "Options";

        i += titled;
        for (end = i; end < f->n && f->opt[end].kind != LM_OPT_GROUP;)
            end++;
        if (end == i)
            continue;
        if (group++ >= detailed) {
            if (group == detailed + 1)
                lm_buf_add(b, "\n", 1, NULL);
            add_names(b, title, i, end);
            continue;
        }
        lm_buf_addf(b, NULL, "\n%s:\n", title);
        for (int k = i; k < end; k++) {
            if (f->opt[k].help)
                add_option(b, &f->opt[k], t->alias);
        }
    }
    if (t->examples && t->examples[0])
        lm_buf_addf(b, NULL, "\nExamples:\n");
    for (const char *const *x = t->examples; x && *x; x++) /* a command is not wrapped */
        lm_buf_addf(b, NULL, "%*s%s\n", strlen(*x) + 2 <= WIDTH ? 2 : 0, "", *x);
    lm_buf_addf(b, NULL, "\nSee %s(1).\n", t->name);
}

static int count_lines(const lm_buf *b)
{
    int n = 0;

    for (size_t i = 0; i < b->len; i++)
        n += b->data[i] == '\n';
    return n;
}

void lm_help_print(const lm_tool *t)
{
    lm_buf b = { 0 };
    int groups = 1;

    for (int i = 0; i < f->n; i++)
        groups += f->opt[i].kind == LM_OPT_GROUP;
    do {
        render(&b, t, groups);
    } while (count_lines(&b) > LINES && groups-- > 0);
    fwrite(b.data, 1, b.len, stdout);
    lm_buf_fini(&b);
}

void lm_version_print(const lm_tool *t)
{
    printf("%s (lmutils) %s\n", t->name, LM_VERSION);
    printf("zstd=%s libarchive=%s jansson=%s pcre2=%d.%d cpu=ref", ZSTD_VERSION_STRING,
           ARCHIVE_VERSION_ONLY_STRING, JANSSON_VERSION, PCRE2_MAJOR, PCRE2_MINOR);
#if defined(__x86_64__)
    printf(",avx2,avx512,avx512bf16,amx");
#endif
    printf("\n");
}
