/* methods_other.c -- SCE, nearswap, Arcee fusion: merges with a rule of their own for which
 * elements move. */
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/select.h"

const lm_merge_method lm_merge_other_methods[] = {
    { .name = NULL },
};
