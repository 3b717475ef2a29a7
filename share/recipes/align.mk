# SPDX-License-Identifier: Apache-2.0
# align.mk -- a model that learns from rewards, and one that learns from preferences.  Meant to be read, copied, changed.
#
#   make -f align.mk                            some minutes on two cores
#   make -f align.mk STEPS=400 LIMIT=50         longer, with larger numbers
#   make -f align.mk LOSS=rloo REWARD='command:./judge.sh'
#
# A small model is trained on sums of two numbers, most of which are wrong: it answers about one in nine correctly.
# Then it learns from its own answers, of which a reward says whether they are right (GRPO), without being shown one; another copy learns
# from pairs of a right and a wrong answer (DPO).  Problems of the measurements are in neither.
#
# It makes table.txt: the share of right answers to held-out problems, the loss of their right answers, the share of held-out
# pairs whose right answer gained more, and the margin; and reward.svg, how the reward rises.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f align.mk clean` removes the folder.

WORK    ?= align
LIMIT   ?= 30#     numbers are below this
LINES   ?= 400000# problems that the base reads
BASE    ?= 1200#   steps of the base, of 64 windows with 64 tokens
STEPS   ?= 200#    steps of GRPO
PROMPTS ?= 48#     prompts of a step
GROUP   ?= 8#      answers to each
LOSS    ?= dapo#   align-model --list-losses
REWARD  ?= gsm8k#  align-model --list-rewards
RATE    ?= 6e-4
BETA    ?= 0.1#    of DPO
EPOCHS  ?= 4#      of DPO
SEED    ?= 1

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

RUNS  := base grpo dpo

all: table.txt reward.svg
	@cat table.txt

# 1. Problems, a tokenizer with a token for each character, a base.
problems/text.jsonl:
	bash "$$RECIPE_HOME/align-data" problems $(strip $(LIMIT)) $(strip $(LINES)) $(strip $(SEED))
tok/tokenizer.json: problems/text.jsonl
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size 257 -f -o $@ $<
data/train.bin: tok/tokenizer.json problems/text.jsonl
	shard-data -q --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D) problems/text.jsonl
m0/config.json: tok/tokenizer.json
	init-model -q llama-1m --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D) --set num_hidden_layers=2 \
	    --set hidden_size=96 --set intermediate_size=256 --set num_attention_heads=4 --set num_key_value_heads=4
base/config.json: m0/config.json data/train.bin
	train -q m0/ data/ --steps $(strip $(BASE)) --batch-size 64 --seq-len 64 --lr 5e-3 --warmup 20 --log-every 20 \
	    --seed $(strip $(SEED)) --metrics base.jsonl -f -o $(@D)

# 2. Rewards: the model's own answers.
grpo/config.json: base/config.json
	align-model -q base/ problems/train.jsonl --loss $(strip $(LOSS)) --reward $(strip $(REWARD)) \
	    --batch-size $(strip $(PROMPTS)) --group $(strip $(GROUP)) --max-new-tokens 8 --rollout-sequences 256 \
	    --steps $(strip $(STEPS)) --lr $(strip $(RATE)) --lr-schedule constant --warmup 5 --beta2 0.99 --weight-decay 0 \
	    --val problems/held.jsonl --eval-every 20 --seed $(strip $(SEED)) --metrics grpo.jsonl -f -o $(@D)

# 3. Preferences: a right answer and a wrong one.
dpo/config.json: base/config.json
	align-model -q base/ problems/pairs.jsonl --loss dpo+0.2*sft --beta $(strip $(BETA)) --epochs $(strip $(EPOCHS)) \
	    --batch-size 32 --lr 3e-4 --warmup 5 --weight-decay 0 --val problems/val.jsonl --eval-every 20 --eval-batches 0 \
	    --seed $(strip $(SEED)) --metrics dpo.jsonl -f -o $(@D)

# 4. What became of it.
accuracy/%: %/config.json
	@mkdir -p $(@D)
	bash "$$RECIPE_HOME/align-report" accuracy $*/ < problems/held.jsonl > $@
loss/%: %/config.json
	@mkdir -p $(@D)
	eval-model -q $*/ problems/right.jsonl | grep -o '"loss":[0-9.]*' | cut -d : -f 2 > $@
table.txt: $(RUNS:%=accuracy/%) $(RUNS:%=loss/%)
	bash "$$RECIPE_HOME/align-report" table base: grpo:grpo.jsonl dpo:dpo.jsonl > $@
reward.svg: grpo/config.json
	plot-run -q -k reward -k reward_std -t 'reward of $(strip $(LOSS))' -f -o $@ grpo.jsonl

endif
