/* SPDX-License-Identifier: Apache-2.0 */
/* files.h -- the part of quantize-kv that codes, decodes and lists cache files (kv-cache(5)). */
#ifndef LM_CMD_QUANTIZE_KV_FILES_H
#define LM_CMD_QUANTIZE_KV_FILES_H

#include "common/tool.h"

typedef struct {
    const char *method;
    lm_strs level;
    int64_t bits, group, residual; /* -1: not given */
    bool decode, list, verify, methods;
} kv_file_options;

#define KV_FILE_OPTIONS                         \
    {                                           \
        .bits = -1, .group = -1, .residual = -1 \
    }

/* Rows of the option table, without --method. */
#define KV_FILE_ROWS(a)                                                                        \
    LM_FLAG('d', "decode", &(a).decode, "decode to plain numbers"),                            \
        LM_FLAG('l', "list", &(a).list, "list what is in the file"),                           \
        LM_FLAG(0, "verify", &(a).verify, "only check the file"),                              \
        LM_FLAG(0, "list-methods", &(a).methods, "list the methods and their keys"),           \
        LM_COUNT(0, "bits", &(a).bits, "N", 1, 8, "key of METHOD: bits of a number"),          \
        LM_COUNT(0, "group", &(a).group, "N", 0, 4096, "key: numbers that share a scale"),     \
        LM_COUNT(0, "residual", &(a).residual, "N", 0, 4096, "key: newest tokens kept plain"), \
        LM_LIST(0, "level", &(a).level, "N",                                                   \
                "cachegen: 0 (finest) to 3, may be repeated [1]; -d: that one")

/* Refuse options that do not fit together. */
void kv_files_check(lm_tool *t, const kv_file_options *o);
/* Do what they ask; complain, and return; lm_end has the status. */
void kv_files(lm_tool *t, const kv_file_options *o);

#endif
