/* methods_gram.c -- RegMean. */
#include "merge/blocks.h"
#include "merge/entries.h"

const lm_merge_method lm_merge_gram_methods[] = {
    { .name = NULL },
};
