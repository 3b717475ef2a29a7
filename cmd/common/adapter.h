/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.h -- the option --adapter of tools that use a model as it is. */
#ifndef LM_CMD_ADAPTER_H
#define LM_CMD_ADAPTER_H

#include "common/model.h"
#include "tune/use.h"

#define LM_ADAPTER_NAMES LM_ALSO("lora peft lora-path adapter-path lora-modules")
#define LM_ADAPTER(p)                                                                         \
    LM_LIST(0, "adapter", p, "PATH", "a PEFT adapter of the model, which is attached to it"), \
        LM_ADAPTER_NAMES
#define LM_ADAPTERS(p)                                                           \
    LM_LIST(0, "adapter", p, "PATH",                                             \
            "a PEFT adapter of the model; NAME=PATH: for prompts that name it"), \
        LM_ADAPTER_NAMES

/* Attach the adapter at `path` (NULL: none) to the open model, before its graphs are built.  Release with lm_tune_use_fini
 * after the model. */
lm_code lm_open_adapter(lm_tool *t, const char *path, lm_par *par, lm_loaded *l, lm_tune_use *out,
                        lm_err *e);

#endif
