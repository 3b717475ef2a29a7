/* SPDX-License-Identifier: Apache-2.0 */
/* completion.c -- scripts for bash, zsh and fish from the option table. */
#include <string.h>

#include "common/frame.h"

static lm_frame *const f = &lm_the_frame;

static bool listed(const lm_opt *o)
{
    return o->kind != LM_OPT_GROUP && o->help;
}

static void put_choices(const lm_opt *o)
{
    for (const char *const *c = o->choices; *c; c++)
        printf("%s%s", c == o->choices ? "" : " ", *c);
}

/* A function name from a tool's: '-' is not allowed everywhere. */
static void put_name(const char *s)
{
    for (; *s; s++)
        putchar(*s == '-' ? '_' : *s);
}

static void print_bash(const lm_tool *t)
{
    printf("# bash completion for %s; generated, do not edit\n_", t->name);
    put_name(t->name);
    printf("()\n{\n    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
           "    local words=\n    case $prev in\n");
    for (int i = 0; i < f->n; i++) {
        const lm_opt *o = &f->opt[i];

        if (!listed(o) || !o->choices)
            continue;
        printf("    ");
        if (o->letter)
            printf("-%c|", o->letter);
        printf("--%s) words='", o->name);
        put_choices(o);
        printf("' ;;\n");
    }
    printf("    *) if [[ $cur == -* ]]; then words='");
    for (int i = 0; i < f->n; i++) {
        if (listed(&f->opt[i]))
            printf("\n        --%s", f->opt[i].name);
    }
    printf("'; fi ;;\n    esac\n"
           "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n}\n"
           "complete -o default -F _");
    put_name(t->name);
    printf(" %s\n", t->name);
}

/* Help text inside single quotes; `drop` are characters with a meaning in the shell's syntax. */
static void put_help(const char *s, const char *drop)
{
    for (; *s; s++) {
        if (*s == '\'')
            printf("'\\''");
        else if (strchr(drop, *s))
            printf("\\%c", *s);
        else
            putchar(*s);
    }
}

static void print_zsh(const lm_tool *t)
{
    printf("#compdef %s\n# generated, do not edit\n_arguments -s -S \\\n", t->name);
    for (int i = 0; i < f->n; i++) {
        const lm_opt *o = &f->opt[i];

        if (!listed(o))
            continue;
        if (o->letter)
            printf("  '(-%c --%s)'{-%c,--%s}'[", o->letter, o->name, o->letter, o->name);
        else
            printf("  '--%s%s[", o->name, lm_option_takes_value(o) ? "=" : "");
        put_help(o->help, "[]:\\");
        printf("]");
        if (o->choices) {
            printf(":%s:(", o->value ? o->value : "value");
            put_choices(o);
            printf(")");
        } else if (lm_option_takes_value(o)) {
            printf(":%s:_files", o->value ? o->value : "value");
        }
        printf("' \\\n");
    }
    printf("  '*:file:_files'\n");
}

static void print_fish(const lm_tool *t)
{
    printf("# fish completion for %s; generated, do not edit\n", t->name);
    for (int i = 0; i < f->n; i++) {
        const lm_opt *o = &f->opt[i];

        if (!listed(o))
            continue;
        printf("complete -c %s", t->name);
        if (o->letter)
            printf(" -s %c", o->letter);
        printf(" -l %s", o->name);
        if (o->choices) {
            printf(" -x -a '");
            put_choices(o);
            printf("'");
        } else if (lm_option_takes_value(o)) {
            printf(" -r");
        }
        printf(" -d '");
        for (const char *s = o->help; *s; s++)
            printf(*s == '\'' || *s == '\\' ? "\\%c" : "%c", *s);
        printf("'\n");
    }
}

static void put_number(double v)
{
    printf("\t%.17g", v);
}

/* For tests: one line for each option and alias, fields separated by tabs.  NAME KIND MIN MAX
 * CHOICES of an option, the choices with spaces between them; NAME "also" OPTION VALUE, NAME
 * "instead" TEXT. */
static void print_table(void)
{
    static const char *const kinds[] = {
        [LM_OPT_FLAG] = "flag",  [LM_OPT_COUNT] = "count",   [LM_OPT_BYTES] = "bytes",
        [LM_OPT_TIME] = "time",  [LM_OPT_REAL] = "real",     [LM_OPT_STR] = "text",
        [LM_OPT_LIST] = "list",  [LM_OPT_CHOICE] = "choice", [LM_OPT_DEVICE] = "device",
        [LM_OPT_LEVEL] = "level"
    };

    for (int i = 0; i < f->n; i++) {
        const lm_opt *o = &f->opt[i];

        if (!listed(o))
            continue;
        printf("%s\t%s", o->name, o->dst ? kinds[o->kind] : "action");
        put_number(o->min);
        put_number(o->max);
        printf("\t");
        if (o->choices)
            put_choices(o);
        printf("\n");
    }
    for (int i = 0; i < f->n_alias; i++) {
        const lm_alias *a = &f->alias[i];

        if (a->instead)
            printf("%s\tinstead\t%s\n", a->name, a->instead);
        else
            printf("%s\talso\t%s\t%s\n", a->name, f->opt[a->target].name, a->value ? a->value : "");
    }
}

lm_code lm_completion_print(const lm_tool *t, const char *shell, lm_err *e)
{
    if (!strcmp(shell, "bash"))
        print_bash(t);
    else if (!strcmp(shell, "zsh"))
        print_zsh(t);
    else if (!strcmp(shell, "fish"))
        print_fish(t);
    else if (!strcmp(shell, "table"))
        print_table();
    else
        return lm_fail(e, LM_EUSAGE, "--completion", "choose from bash, zsh, fish",
                       "unknown shell '%s'", shell);
    return LM_OK;
}
