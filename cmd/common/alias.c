/* SPDX-License-Identifier: Apache-2.0 */
/* alias.c -- the names of our options in other programs. */
#include <stdlib.h>
#include <string.h>

#include "common/frame.h"

static lm_frame *const f = &lm_the_frame;

/* Options of other programs are written with '_' as often as with '-'; ours have '-' only. */
void lm_option_fold(const char *name, char *out, size_t size)
{
    size_t n = 0;

    for (; name[n] && n + 1 < size; n++)
        out[n] = name[n] == '_' ? '-' : name[n];
    out[n] = 0;
}

static bool taken(const char *name)
{
    return lm_option_find(name) >= 0 || lm_alias_find(name);
}

void lm_alias_add(const lm_opt *row)
{
    static char pool[4096];
    static size_t used;

    for (const char *at = row->name; *at;) {
        size_t n = strcspn(at, " ");
        char *copy = pool + used;

        if (used + n + 1 > sizeof pool || f->n_alias == LM_MOST_ALIASES)
            abort();
        memcpy(copy, at, n);
        copy[n] = 0;
        if (!taken(copy)) {
            used += n + 1;
            f->alias[f->n_alias++] = (lm_alias){ copy, row->kind == LM_OPT_INSTEAD ? -1 : f->n - 1,
                                                 row->value, row->help };
        }
        at += n + (at[n] == ' ');
    }
}

const lm_alias *lm_alias_find(const char *name)
{
    for (int i = 0; i < f->n_alias; i++) {
        if (!strcmp(f->alias[i].name, name))
            return &f->alias[i];
    }
    return NULL;
}

/* Names of choices in other programs. */
static const char *const synonyms[][2] = {
    { "fp32", "f32" },
    { "float32", "f32" },
    { "torch.float32", "f32" },
    { "fp16", "f16" },
    { "float16", "f16" },
    { "half", "f16" },
    { "torch.float16", "f16" },
    { "bfloat16", "bf16" },
    { "torch.bfloat16", "bf16" },
    { "constant-with-warmup", "constant" },
    { "cosine-with-restarts", "cosine" },
    { "warmup-stable-decay", "wsd" },
    { "adamw-torch", "adamw" },
    { "adamw-torch-fused", "adamw" },
    { "adamw-8bit", "adamw8bit" },
    { "adamw-bnb-8bit", "adamw8bit" },
    { "lion-32bit", "lion" },
    { "schedule-free-adamw", "schedule-free" },
    { "galore-adamw", "galore" },
    { "llama2.c", "llama2c" },
    { "llm.c", "llmc" },
    { "huggingface", "hf" },
    { "safetensors", "hf" },
};

/* The same word in any case, '_' as '-'. */
static bool alike(const char *a, const char *b)
{
    for (; *a && *b; a++, b++) {
        char x = *a == '_' ? '-' : *a, y = *b == '_' ? '-' : *b;

        x = x >= 'A' && x <= 'Z' ? (char)(x + 32) : x;
        y = y >= 'A' && y <= 'Z' ? (char)(y + 32) : y;
        if (x != y)
            return false;
    }
    return *a == *b;
}

const char *lm_choice_find(const char *const *choices, const char *text)
{
    for (const char *const *c = choices; *c; c++) {
        if (!strcmp(*c, text))
            return *c;
    }
    for (const char *const *c = choices; *c; c++) {
        if (alike(*c, text))
            return *c;
    }
    for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++) {
        for (const char *const *c = choices; *c && alike(synonyms[i][0], text); c++) {
            if (!strcmp(*c, synonyms[i][1]))
                return *c;
        }
    }
    return NULL;
}
