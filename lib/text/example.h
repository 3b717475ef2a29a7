/* SPDX-License-Identifier: Apache-2.0 */
/* example.h -- a record as token ids, with a mark on each id that is trained.
 *
 * Messages are rendered by the chat template of the model and tokenised as a whole, without the
 * tokenizer's own special ids, because the rendered text has them: no second BOS.  Which bytes of
 * the text train is known from the template (chat.h) or from where prompt and completion meet; an
 * id trains if any of its bytes does.  So the mark of the end of a turn trains with the turn.
 * Plain text and plain prompts and completions begin with the ids that the tokenizer adds to a text
 * (BOS) and end with the end-of-text id, which trains.
 *
 * For a model with an encoder an example is a pair: the ids of its source, which the encoder reads, and behind them those of
 * its target, of which each trains and no id of the source does.  Either is a text of its own for the tokenizer and ends with
 * the end-of-text id.  Of messages the target is the assistant's last turn, the source what stands before it: rendered by the
 * template if there is one; without, one message and its answer are their texts. */
#ifndef LM_TEXT_EXAMPLE_H
#define LM_TEXT_EXAMPLE_H

#include "text/chat.h"
#include "text/records.h"
#include "text/tokenizer.h"

typedef enum {
    LM_LOSS_AUTO, /* COMPLETION for prompt and completion, ASSISTANT for messages, otherwise ALL */
    LM_LOSS_ALL,  /* every id */
    LM_LOSS_ASSISTANT,  /* all turns of the assistant */
    LM_LOSS_LAST,       /* the last turn of the assistant */
    LM_LOSS_COMPLETION, /* what follows the prompt; of messages, the last turn */
} lm_loss_on;
/* "auto", "all", "assistant", "last", "completion"; NULL-terminated. */
extern const char *const lm_loss_on_names[];

typedef enum {
    LM_CUT_START, /* keep the start: ids beyond `most` are removed */
    LM_CUT_END,   /* keep the end */
    LM_CUT_DROP,  /* a longer example is left out */
} lm_truncation;
extern const char *const lm_cut_names[]; /* "start", "end", "drop" */

/* Ids of one example.  Zero-initialise, reuse for many. */
typedef struct {
    lm_ids ids;
    const uint8_t *trains; /* [ids.n]: 1 for ids that are trained to be predicted; borrowed */
    lm_buf marks;          /* holds them */
    size_t trained;        /* number of these */
    size_t
        prompt; /* ids before the first completion id, those of a pair's source; 0 without prompt */
    size_t cut; /* ids that truncation removed */
    bool dropped; /* LM_CUT_DROP: too long; ids.n is 0 */
} lm_text_example;
void lm_text_example_fini(lm_text_example *x);

/* How examples are made; constant, shared by threads. */
typedef struct {
    const lm_tokenizer *tok;
    const lm_chat *chat; /* the template; NULL: records with messages are refused */
    bool wrap;           /* plain prompts and completions are a user's and an assistant's message */
    lm_loss_on loss_on;
    int64_t most; /* ids of an example; 0: any number */
    lm_truncation cut;
    int64_t eos; /* ends plain texts and completions; -1: none */
    /* `virtuals` ids from `virtual_first` on stand in front of every example, and count in `most`:
     * virtual tokens of a prompt that is trained (model/adapt.h); 0: none */
    int64_t virtual_first, virtuals;
    /* these have no state that could predict (prefixes): the first id of a text does not train */
    bool unseen;
    /* Examples are pairs, whose targets have at most `most_target` ids (0: any number) and whose sources `most`; the
     * end-of-text id stays where a text is cut.  `eos` must not be -1, loss_on AUTO or COMPLETION.  Virtual tokens stand in
     * front of the source, with `unseen` in front of the target, where they alone do not train. */
    bool pair;
    int64_t most_target;
} lm_text_example_maker;

/* What one thread needs. */
typedef struct lm_text_example_scratch lm_text_example_scratch;
lm_code lm_text_example_scratch_new(const lm_text_example_maker *m, lm_text_example_scratch **out,
                                    lm_err *e);
void lm_text_example_scratch_free(lm_text_example_scratch *s);

/* The example of a record of kind TEXT, MESSAGES or COMPLETION; of UNPAIRED and STEPWISE, that of
 * its prompt and completion (steps joined by newlines).  Fails: LM_EUSAGE for other kinds, for
 * messages without template, and for a text that is to be a pair; as the template (chat.h) and lm_tokenizer_encode. */
lm_code lm_text_example_make(const lm_text_example_maker *m, lm_text_example_scratch *s,
                             const lm_text_record *r, lm_text_example *out, lm_err *e);
/* Prompt and one answer of it, a string or messages (r->chosen, r->rejected, r->completion): what
 * follows the prompt trains.  Fails as lm_text_example_make. */
lm_code lm_text_example_answer(const lm_text_example_maker *m, lm_text_example_scratch *s,
                               const lm_text_record *r, const json_t *answer, lm_text_example *out,
                               lm_err *e);
/* The prompt as the record has it: a string, or messages, those of MESSAGES before the assistant's
 * last turn.  *out is the caller's.  Fails: LM_EFORMAT for messages that begin with the
 * assistant's. */
lm_code lm_text_example_asked(const lm_text_record *r, json_t **out, lm_err *e);
/* The prompt alone, with the template's beginning of an answer: input of generation.  Of MESSAGES,
 * those before the assistant's last turn; nothing trains.  Fails as lm_text_example_make. */
lm_code lm_text_example_prompt(const lm_text_example_maker *m, lm_text_example_scratch *s,
                               const lm_text_record *r, lm_text_example *out, lm_err *e);

#endif
