/* SPDX-License-Identifier: Apache-2.0 */
/* chat_named.c -- the built-in templates. */
#include <string.h>

#include "text/chat.h"

/* Every output character is in an expression, so that a renderer may or may not strip the white
 * space around blocks. */
static const char alpaca[] = "{% for turn in messages %}"
                             "{% set text = turn['content'] | trim + '\\n\\n' %}"
                             "{% if turn['role'] == 'system' %}{{ text }}"
                             "{% elif turn['role'] == 'user' %}{{ '### Instruction:\\n' + text }}"
                             "{% elif turn['role'] == 'user_context' %}{{ '### Input:\\n' + text }}"
                             "{% elif turn['role'] == 'assistant' %}{{ '### Response:\\n' + text }}"
                             "{% endif %}"
                             "{% endfor %}"
                             "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}";

static const char chatml[] =
    "{% for turn in messages %}"
    "{{ '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

static const char exaone[] = "{% if not messages or messages[0]['role'] != 'system' %}"
                             "{{ '[|system|][|endofturn|]\\n' }}"
                             "{% endif %}"
                             "{% for turn in messages %}"
                             "{{ '[|' + turn['role'] + '|]' + turn['content'] }}"
                             "{{ '\\n' if turn['role'] == 'user' else '[|endofturn|]\\n' }}"
                             "{% endfor %}"
                             "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}";

static const char llama3[] =
    "{{ bos_token }}"
    "{% for turn in messages %}"
    "{{ '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ turn['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}";

static const char mistral[] =
    "{% set told = messages and messages[0]['role'] == 'system' %}"
    "{{ bos_token }}"
    "{% for turn in (messages[1:] if told else messages) %}"
    "{% if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('after the system, user and assistant must take turns') }}"
    "{% elif turn['role'] == 'user' %}"
    "{{ ' [INST] ' }}"
    "{% if told and loop.first %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ turn['content'] + ' [/INST]' }}"
    "{% else %}"
    "{{ ' ' + turn['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}";

const char *const lm_chat_names[] = { "alpaca", "chatml", "exaone", "llama3", "mistral", NULL };
static const char *const texts[] = { alpaca, chatml, exaone, llama3, mistral };

const char *lm_chat_named(const char *name)
{
    for (int i = 0; lm_chat_names[i]; i++)
        if (!strcmp(lm_chat_names[i], name))
            return texts[i];
    return NULL;
}
