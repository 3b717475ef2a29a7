# SPDX-License-Identifier: Apache-2.0
# tune.mk -- one base, adapted to other text by many methods.  Meant to be read, copied, changed.
#
#   make -f tune.mk                             some minutes on two cores
#   make -f tune.mk METHODS='full lora qlora'   peft-tune --list-methods names them; METHODS=every: all of these
#   make -f tune.mk FROM='my text' OLD=news NEW=law     text of your own: my text/news.jsonl, my text/law.jsonl
#
# A small model is trained on OLD, English prose, with a little of NEW, C headers, so that it has met every token; then it is
# adapted to NEW by each method with the same data and the same number of steps.  METHOD+embed trains the embedding and
# the last norm beside the adapter, as text with other words needs; without it, an adapter takes two to three times as many
# steps to the same loss.
#
# It makes table.txt: parameters that train, peak memory, and of this the copies that training adds (master copies,
# gradients, states), seconds, bytes of the result, the loss on held-out text of both kinds, and the share of full fine-tuning's
# gain on NEW; and loss.svg, the loss of the methods by step.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f tune.mk clean` removes the folder.

WORK    ?= tune
FROM    ?= #             folder with OLD.jsonl and NEW.jsonl; empty: dem-corpus makes them
OLD     ?= bible
NEW     ?= code
SIZE    ?= 1#            megabytes of text of each kind
METHODS ?= full lora+embed lora qlora+embed dora+embed rslora houlsby ia3 ln_tuning prefix prompt
PRESET  ?= llama-1m#     see share/models
VOCAB   ?= 512#          few tokens, so that none is rare
SEQ     ?= 256#          tokens in a window
BATCH   ?= 8#            windows in a step, each a micro-batch
LENGTH  ?= 400#          characters of NEW, at least, in a piece, which is an example
MET     ?= 20#           every so many documents of NEW are read by the base, too
BASE    ?= 400#          steps of the base
STEPS   ?= 100#          steps of each method
RANK    ?= 16#           of LoRA's kind
RATE    ?= 5e-3#         learning rate of adapters, and of others:
RATE_full      ?= 4e-3
RATE_ia3       ?= 2e-2
RATE_ln_tuning ?= 2e-2
RATE_prefix    ?= 1e-1
RATE_prompt    ?= 1
RATE_loraplus  ?= 1e-3
RATE_fourierft ?= 2e-4
# keys of methods whose defaults do not divide the layers of PRESET
SET_adamss ?= r=16
SET_c3a    ?= block_size=32
SET_shira  ?= r=4
SET_vblora ?= vector_length=32
SET_waveft ?= n_frequency=512
SEED    ?= 1

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK FROM
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

# Not these: bitfit needs biases, tokens rows to be named, frod an adapter to begin with.
override METHODS := $(patsubst every,$(filter-out bitfit tokens frod,$(shell peft-tune --list-methods | sed -nE 's/^([a-z][^ ]*) .*/\1/p')),$(METHODS))
OLD := $(strip $(OLD))
NEW := $(strip $(NEW))

all: table.txt loss.svg
	@cat table.txt

# 1. Text of both kinds, of which every tenth document is held out.
text/done:
	@mkdir -p $(@D)
ifeq ($(strip $(FROM)),)
	bash "$$RECIPE_HOME/dem-corpus" text $(strip $(SIZE))
else
	cp "$$RECIPE_FROM/$(OLD).jsonl" "$$RECIPE_FROM/$(NEW).jsonl" $(@D)
endif
	for t in $(OLD) $(NEW); do \
	    awk 'NR % 10' text/$$t.jsonl > text/$$t.train.jsonl && awk 'NR % 10 == 0' text/$$t.jsonl > text/$$t.held.jsonl; \
	done
	bash "$$RECIPE_HOME/tune-report" pieces $(strip $(LENGTH)) < text/$(NEW).train.jsonl > text/$(NEW).pieces.jsonl
	awk 'NR % $(strip $(MET)) == 1' text/$(NEW).train.jsonl > text/met.jsonl
	touch $@

# 2. A base that knows OLD, and has met NEW.
tok/tokenizer.json: text/done
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(strip $(VOCAB)) -f -o $@ text/$(OLD).train.jsonl text/$(NEW).train.jsonl
data/train.bin: tok/tokenizer.json
	shard-data -q --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D) text/$(OLD).train.jsonl text/met.jsonl
m0/config.json: tok/tokenizer.json
	init-model -q $(strip $(PRESET)) --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D)
base/config.json: m0/config.json data/train.bin
	train -q m0/ data/ --steps $(strip $(BASE)) --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --lr 3e-3 \
	    --warmup 20 --seed $(strip $(SEED)) -f -o $(@D)

# 3. Each method on NEW.  What has no rank takes none.
method = $(firstword $(subst +, ,$1))
rank   = $(if $(filter lora rslora loraplus pissa olora qlora dora,$(method)),--rank $(strip $(RANK)))
rate   = $(strip $(or $(RATE_$(method)),$(RATE)))
saved  = $(if $(findstring +embed,$1),--modules-to-save embed_tokens$(,)norm)
, := ,
keys   = $(addprefix --set ,$(SET_$(method)))
tune   = peft-tune base/ text/$(NEW).pieces.jsonl --method $(method) $(rank) $(saved) $(keys) --lr $(rate) --steps $(strip $(STEPS)) \
    --batch-size 1 --gradient-accumulation-steps $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --seed $(strip $(SEED)) --warmup 5
runs/%/done: base/config.json
	@mkdir -p $(@D)
	$(call tune,$*) --dry-run --json -o runs/$*/adapter > runs/$*/plan.json 2> runs/$*/log || { cat runs/$*/log >&2; false; }
	$(call tune,$*) --json --metrics runs/$*/metrics.jsonl -f -o runs/$*/adapter > runs/$*/result.json 2> runs/$*/log || \
	    { cat runs/$*/log >&2; false; }
	touch $@

# 4. What became of it.
loss/base: base/config.json
	@mkdir -p $(@D)
	bash "$$RECIPE_HOME/tune-report" loss base/ '' text/$(OLD).held.jsonl text/$(NEW).held.jsonl > $@
loss/%: runs/%/done
	@mkdir -p $(@D)
	bash "$$RECIPE_HOME/tune-report" loss base/ runs/$*/adapter text/$(OLD).held.jsonl text/$(NEW).held.jsonl > $@
table.txt: loss/base $(METHODS:%=loss/%)
	bash "$$RECIPE_HOME/tune-report" table $(METHODS) > $@
loss.svg: $(METHODS:%=runs/%/done)
	plot-run -q -f -o $@ $(METHODS:%=runs/%/metrics.jsonl)

endif
