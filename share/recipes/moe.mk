# SPDX-License-Identifier: Apache-2.0
# moe.mk -- a dense model and a mixture of experts with the same active parameters, on equal tokens: held-out loss, speed,
# memory, and the load of the experts.  Meant to be read, copied, changed.
#
#   make -f moe.mk                                    the text of `make demo`, most of half an hour on two cores
#   make -f moe.mk CORPUS=text.txt STEPS=3000         your own text, longer
#   make -f moe.mk BALANCE='--moe-aux-loss-coeff 0'   without a loss of the routers: see train(1)
#
# It makes table.txt, loss.svg (both losses) and experts.svg (the load of each expert over the steps).  Data, their order,
# steps, rate and schedule are the same for both.  Of each token the mixture's experts that are chosen have the width of
# the dense model's MLP together.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f moe.mk clean` removes the folder.  Do not use -j, because both are timed.

WORK    ?= moe
CORPUS  ?= #             plain text or JSONL; empty: that of fetch-corpus
SPLIT   ?= blank#        plain text is split into documents at empty lines; file: a document per file
DENSE   ?= llama-5m#     see share/models
MIXTURE ?= qwen3-moe-13m
VOCAB   ?= 4096
BATCH   ?= 16#           sequences per step
SEQ     ?= 128#          tokens per sequence
STEPS   ?= 1000
LR      ?= 3e-3
BALANCE ?= --moe-aux-loss-type layer --moe-aux-loss-coeff 0.01
SEED    ?= 1

TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --lr $(strip $(LR)) --dtype bf16 --seed $(strip $(SEED)) \
	--steps $(strip $(STEPS)) --warmup $$(($(strip $(STEPS)) / 20 + 1)) --save-every 0

.DELETE_ON_ERROR:
.NOTPARALLEL:
.SECONDARY:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK CORPUS
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

RAW := $(if $(strip $(CORPUS)),corpus.list $(sort $(wildcard corpus/*)),raw.jsonl)

all: table.txt loss.svg experts.svg
	@cat $<
	@printf 'pictures: %s/loss.svg, %s/experts.svg\n' "$$RECIPE_WORK" "$$RECIPE_WORK"

# 1. Text, a tokenizer, token shards with a validation split.
raw.jsonl:
	bash "$$RECIPE_HOME/fetch-corpus" . > $@
text.jsonl: $(RAW)
	clean-data -q --rules none --split $(strip $(SPLIT)) $(filter-out corpus.list,$(RAW)) > $@
tok/tokenizer.json: text.jsonl
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(strip $(VOCAB)) --pattern llama3 -f -o $@ $<
data/train.bin: tok/tokenizer.json text.jsonl
	if [ "$$(wc -l < text.jsonl)" -ge 100 ]; then how='--val-fraction 0.015'; \
	else how='--split contiguous --val-fraction 0.1'; fi; \
	shard-data -q --tokenizer $< $$how --seed $(strip $(SEED)) -f -o $(@D) text.jsonl

# 2. Two models with random weights.
dense-0/config.json: tok/tokenizer.json
	init-model -q $(strip $(DENSE)) --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D)
mixture-0/config.json: tok/tokenizer.json
	init-model -q $(strip $(MIXTURE)) --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D)

# 3. Both on the same tokens, and the loss on the whole validation split.
dense.json mixture.json: %.json: %-0/config.json data/train.bin
	rm -rf $* $*.jsonl
	train -q $*-0/ data/ -o $*/ $(TRAIN) $(if $(filter mixture,$*),$(BALANCE)) \
	    --eval-every $(strip $(STEPS)) --eval-batches 0 --metrics $*.jsonl --json > $@

# 4. Figures and pictures.
table.txt: dense.json mixture.json
	bash "$$RECIPE_HOME/moe-report" > $@
loss.svg: dense.json mixture.json
	plot-run -q --smooth 0.95 -f -o $@ --name dense --name mixture dense.jsonl mixture.jsonl
experts.svg: mixture.json
	plot-run -q --experts -f -o $@ --title 'load of the experts' mixture.jsonl

endif
