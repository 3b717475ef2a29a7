/* SPDX-License-Identifier: Apache-2.0 */
/* arch_olmo.h -- common parts of OLMo 2 and OLMo 3.  Private to lib/model. */
#ifndef LM_MODEL_ARCH_OLMO_H
#define LM_MODEL_ARCH_OLMO_H

#include "model/arch_llama.h"

/* All but windows and rotary tables. */
lm_code lm_read_olmo2(const json_t *o, const char *where, lm_config *c, lm_err *e);

#endif
