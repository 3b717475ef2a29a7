#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The recipes, from folders with spaces in their names, on text of every shape.
bats_require_minimum_version 1.5.0

setup() {
    ROOT=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    cp -r "$ROOT/share/recipes" 'my recipes'
    mkdir my work 'my text' # folders that an unquoted path would name
    touch my/own work/own
    SMALL=(PRESET=llama-1m VOCAB=300 SEQ=32 BATCH=2 BUDGET=0.2)
}

# One text without an empty line.
tiny() { awk 'BEGIN { for (i = 0; i < 900; i++) printf "The system reads word%d and writes line %d of the text\t\"quoted\" \\ ü.\n", i * 7 % 37, i }'; }

@test "first-light.mk: one plain text, all paths with spaces: the last tenth is held out; clean removes WORK alone" {
    tiny > 'my text/tiny one.txt'
    make -f 'my recipes/first-light.mk' WORK='my work' CORPUS='my text/tiny one.txt' "${SMALL[@]}" > log 2>&1 || { cat log; false; }
    grep -q '^pictures   my\\ work/loss.svg' log
    grep -q ' 1 document and ' log
    [ "$(cat 'my work/held-out.how')" = ends ]
    cd 'my work'
    # the parts together are the text; the second has a tenth of its characters
    perl '../my recipes/jsonl2text' train.jsonl | head -c -1 > both
    cat held-out.txt >> both
    cmp <(perl '../my recipes/jsonl2text' clean.jsonl) both
    export LC_ALL=C.UTF-8
    n=$(($(perl '../my recipes/jsonl2text' clean.jsonl | wc -m) - 1))
    [ "$(($(wc -m < held-out.txt) - 1))" -eq $((n - n * 9 / 10)) ]
    # and shard-data's validation split is that part
    shard-data -q --tokenizer tok/tokenizer.json -o val/ held-out.jsonl
    cmp data/val.bin val/train.bin
    [ -s data/val.bin ]
    cd ..
    # a second call makes nothing, another text makes everything again
    make -f 'my recipes/first-light.mk' WORK='my work' CORPUS='my text/tiny one.txt' "${SMALL[@]}" > again 2>&1
    run ! grep -q clean-data again
    # -n and -q make nothing, not even the links in WORK
    all_of() { find 'my work' -printf '%p %T@ %l\n' | sort; }
    all_of > before
    make -n -f 'my recipes/first-light.mk' WORK='my work' CORPUS='my text/tiny one.txt' "${SMALL[@]}" > same 2>&1
    run ! grep -q clean-data same
    make -n -f 'my recipes/first-light.mk' WORK='my work' CORPUS="'my text/tiny one.txt' my/own" "${SMALL[@]}" > other 2>&1
    grep -q '^clean-data .*corpus/0001-tiny_one.txt corpus/0002-own' other
    run make -q -f 'my recipes/first-light.mk' WORK='my work' CORPUS=my/own "${SMALL[@]}"
    [ "$status" -ne 0 ]
    make -n -f 'my recipes/first-light.mk' WORK='no work' CORPUS=my/own "${SMALL[@]}" | grep -q '^clean-data .*corpus/0001-own'
    make -n -f 'my recipes/dem.mk' WORK='no work' > other 2>&1
    grep -q '^merge-models' other
    [ ! -e 'no work' ]
    all_of | cmp - before
    for dry in -n -t -q; do # removes nothing
        make $dry -f 'my recipes/first-light.mk' WORK='my work' clean > log 2>&1 || [ $dry = -q ]
        [ -e 'my work/clean.jsonl' ]
    done
    make -f 'my recipes/first-light.mk' WORK='my work' clean
    [ ! -e 'my work' ] && [ -e my/own ] && [ -e work/own ] && [ -e 'my text/tiny one.txt' ]
    make -f 'my recipes/first-light.mk' WORK='my work' clean # nothing to remove
    # a folder that existed before is not removed
    make -f 'my recipes/first-light.mk' WORK=my CORPUS='my text/tiny one.txt' "${SMALL[@]}" clean.jsonl > log 2>&1
    run make -f 'my recipes/first-light.mk' WORK=my clean
    [ "$status" -eq 2 ]
    [[ $output == *"first-light.mk: WORK: my: was there before a recipe used it"* ]]
    [ -e my/own ] && [ -e my/clean.jsonl ]
}

@test "first-light.mk: few empty lines do not make few documents; many make documents" {
    { tiny; echo; tiny | tac; } > few.txt
    awk 'BEGIN { srand(3); for (i = 0; i < 60; i++) { for (k = 0; k < 12; k++) printf "word%d ", rand() * 5000; print "\n" } }' > many.txt
    for t in few many; do
        make -f 'my recipes/first-light.mk' WORK="$t work" CORPUS=$t.txt "${SMALL[@]}" data/train.bin > log 2>&1 || { cat log; false; }
    done
    [ "$(wc -l < 'few work/clean.jsonl')" -eq 1 ]
    [ "$(cat 'few work/held-out.how')" = ends ]
    [ "$(wc -l < 'many work/clean.jsonl')" -ge 20 ]
    [ "$(cat 'many work/held-out.how')" = documents ]
}

@test "recipes: a list of texts, patterns, missing files, an empty WORK" {
    tiny > 'my text/a b.txt'
    tiny > 'my text/c.txt'
    tiny > plain.txt
    first() { make -f "$ROOT/share/recipes/first-light.mk" "${SMALL[@]}" "$@"; }
    first WORK=w CORPUS="\"my text/a b.txt\" my\\ text/c.txt pl*.txt" clean.jsonl > log 2>&1 || { cat log; false; }
    [ "$(ls w/corpus | tr '\n' ' ')" = '0001-a_b.txt 0002-c.txt 0003-plain.txt ' ]
    run first WORK=w2 CORPUS='nothing.txt' clean.jsonl
    [ "$status" -eq 2 ]
    [[ $output == *'first-light.mk: CORPUS: nothing.txt: is not there'* ]]
    run first WORK= clean
    [ "$status" -eq 2 ]
    [[ $output == *'WORK: is empty'* ]]
    first WORK=-odd CORPUS=plain.txt clean.jsonl > log 2>&1 || { cat log; false; }
    [ -s ./-odd/clean.jsonl ]
    # PATH with a folder that is not absolute, and WORK from the environment
    PATH="my tools:$PATH" WORK='from env' first CORPUS=plain.txt clean.jsonl > log 2>&1 || { cat log; false; }
    [ -s 'from env/clean.jsonl' ]
}

@test "dem.mk: distributions from a folder with spaces, into another" {
    for s in law math; do
        awk -v s=$s 'BEGIN { for (i = 0; i < 120; i++) printf "{\"text\": \"The %s of line %d is word%d and so on and on.\"}\n", s, i, i * 7 % 37 }' > "my text/$s.jsonl"
    done
    make -f 'my recipes/dem.mk' WORK='my work' FROM='my text' SETS='law math' "${SMALL[@]}" SEARCH=grid BUDGET=0.1 > log 2>&1 || { cat log; false; }
    grep -q '^DEM of the 2 ' log
    grep -q '^base + law ' log
    [ -s 'my work/dem/model.safetensors' ]
    make -f 'my recipes/dem.mk' WORK='my work' clean
    [ ! -e 'my work' ] && [ -e my/own ] && [ -e work/own ]
    head -n 5 'my text/law.jsonl' > short && mv short 'my text/law.jsonl'
    run make -f 'my recipes/dem.mk' WORK='my work' FROM='my text' SETS='law math' text/.made
    [ "$status" -eq 2 ]
    [[ $output == *'dem.mk: law: fewer than 10 documents'* ]]
}

@test "optimizers.mk: rates searched for, given and shared; a table by loss; divergence is reported; all of the registry" {
    tiny | sed G > 'my text/tiny one.txt'
    compare() { make -f 'my recipes/optimizers.mk' WORK='my work' CORPUS='my text/tiny one.txt' PRESET=llama-1m VOCAB=300 SEQ=32 BATCH=2 \
        STEPS=10 SEARCH=2 TIMED=3 ROUNDS=1 RATES='lion=4e-4 momentum=1000' KEYS_momentum=weight_decay=10 "$@"; }
    compare OPTIMIZERS='muon lion adam sgd momentum' KEYS_lion=beta1=0.8 > log 2>&1 || { cat log; false; }
    grep -q '^momentum  *1000   diverged ' log
    cd 'my work'
    [ "$(head -n 1 table.tsv)" = $'optimizer\trate\tloss\tstate_bytes_per_parameter\tstep_time' ]
    tail -n +2 table.tsv > rows
    [ "$(cut -f 1 rows | sort | tr '\n' ' ')" = 'adam adamw lion momentum muon sgd ' ]
    cut -f 3 rows | sort -g -c
    of() { awk -F '\t' -v name="$1" -v n="$2" '$1 == name { print $n }' rows; }
    [ "$(of adamw 4) $(of lion 4) $(of sgd 4)" = '8.00 4.00 0.00' ]
    [ "$(of lion 2)" = 4e-4 ]
    [ "$(of adam 2)" = "$(of adamw 2)" ]
    [ "$(of adamw 5)" = 1.00 ]
    awk -F '\t' '$5 <= 0 { exit 1 }' rows
    # the best of the tried rates
    [ "$(wc -l < rates/adamw)" -ge 4 ]
    [ "$(head -n -1 rates/adamw | sort -g -k 2 | head -n 1 | cut -d ' ' -f 1)" = "$(of adamw 2)" ]
    # each run has the same steps, and its own hyper-parameters
    for n in adamw lion muon sgd adam; do grep -q '"event":"step","step":10,' runs/$n.jsonl; done
    grep -q '"lion:beta1=0.8"' runs/lion.jsonl
    rate=$(awk -v o="$(of adamw 2)" -v m="$(of muon 2)" 'BEGIN { printf "%.6g", o / m }')
    grep -q "\"muon:adam_rate=$rate\"" runs/muon.jsonl
    grep -q '>lion<' loss-1.svg
    cd ..
    # a second call trains nothing; with one more optimiser, it trains that one only
    compare OPTIMIZERS='muon lion adam sgd momentum' > again 2>&1
    run ! grep -q optimizers-try again
    compare OPTIMIZERS='muon lion adam sgd momentum nesterov' -n > more 2>&1
    [ "$(grep -c 'optimizers-try.*runs/' more)" -eq 1 ]
    compare -n > all 2>&1
    for n in $(train --list-optimizers | awk '/^[^ ]/ { print $1 }'); do
        [ -e "my work/losses/$n" ] || grep -q "runs/$n.jsonl" all
    done
    compare clean
    [ ! -e 'my work' ]
}

@test "moe.mk: a dense model and a mixture on equal tokens, their figures and pictures" {
    tiny > 'my text/tiny one.txt'
    compare() { make -f 'my recipes/moe.mk' WORK='my work' CORPUS='my text/tiny one.txt' DENSE=llama-1m VOCAB=300 SEQ=32 BATCH=2 STEPS=10 "$@"; }
    compare > log 2>&1 || { cat log; false; }
    cd 'my work'
    awk '
        $1 == "dense" { n++; if ($2 != $3 || !($4 > 1 && $5 > 0 && $6 > 0)) bad = 1 }
        $1 == "mixture" { n++; if (!($2 > 2 * $3 && $4 > 1 && $5 > 0 && $6 > 0)) bad = 1 }
        END { exit bad || n != 2 }' table.txt
    [ "$(grep -o '"step":10,"tokens":[0-9]*' dense.jsonl | head -n 1)" = "$(grep -o '"step":10,"tokens":[0-9]*' mixture.jsonl | head -n 1)" ]
    grep -q "after 10 steps and" table.txt
    grep -qE "fullest expert has [0-9]+[.][0-9]+ x the mean load" table.txt
    grep -q moe_aux_loss mixture.jsonl
    run ! grep -q moe_aux_loss dense.jsonl
    grep -q '>mixture<' loss.svg
    grep -q 'layer 4' experts.svg
    cd ..
    compare > again 2>&1
    run ! grep -q 'train -q' again
    compare clean
    [ ! -e 'my work' ]
}

@test "dem-corpus: headers of every kind are text" {
    mkdir -p headers/'with space' bin
    for i in 1 2 3; do awk -v i=$i 'BEGIN { for (k = 0; k < 40; k++) printf "int f%d_%d(void); /* what it is for */\n", i, k }' > headers/$i.h; done
    { echo '{"text": "no record"'; cat headers/1.h; } > headers/json.h
    { echo '{"a": 1}'; cat headers/2.h; } > headers/jsonl.h
    { printf 'bad \377\376 bytes\n'; cat headers/3.h; } > headers/latin.h
    { printf 'nul \0 byte\n'; cat headers/1.h; } > headers/nul.h
    gzip -c headers/*.h > headers/packed.h
    tar -cf headers/archive.h headers/1.h headers/2.h
    cp headers/3.h headers/'with space'/$'new\nline "quote".h'
    cp headers/2.h headers/-dash.h
    cp headers/1.h headers/secret.h && echo more >> headers/secret.h && chmod 0 headers/secret.h
    mkdir headers/closed && cp headers/1.h headers/closed && chmod 0 headers/closed
    ln -s nowhere headers/dangling.h
    # the text of the package is not fetched here
    printf '#!/bin/sh\nfor i in 1 2 3; do echo "{\\"text\\":\\"verse $i\\"}"; done\n' > 'my recipes/fetch-corpus'
    HEADERS=headers bash 'my recipes/dem-corpus' 'my work' 1
    chmod 700 headers/closed
    perl 'my recipes/jsonl2text' 'my work/code.jsonl' > text
    grep -q 'no record' text
    grep -q '{"a": 1}' text
    grep -q 'f3_39' text
    [ "$(wc -l < 'my work/numbers.jsonl')" -gt 100 ]
    [ "$(wc -l < 'my work/bible.jsonl')" -eq 3 ]
    mkdir none
    HEADERS=none run bash 'my recipes/dem-corpus' 'my work' 1
    [ "$status" -eq 1 ]
    [ "$output" = 'dem-corpus: none: no header files: install libc6-dev, or name another folder with HEADERS' ]
}

@test "jsonl2text: lines of any length, escapes, the right key" {
    t() { perl 'my recipes/jsonl2text' "$@"; }
    # 300,000 escapes in one line, and 5 MB without one
    perl -e 'print "{\"text\":\"", "a\\n\\\"" x 150000, "\"}\n{\"text\":\"", "b" x 5000000, "\"}\n"' > long.jsonl
    [ "$(t long.jsonl | wc -c)" -eq $((150000 * 3 + 1 + 5000001)) ]
    [ "$(t long.jsonl | head -n 150002 | tail -n 2 | head -c 4)" = $'"\nbb' ]
    printf '%s\n' '{"meta":{"text":"no"},"id":"\"text\":\"no\"","a":["text",{"text":"no"}], "text" : "yes\t\u00e9\ud83d\ude00\ud83d\\"}' \
        '{"x":"text","y":1}' '{"text":""}' > odd.jsonl
    [ "$(t odd.jsonl)" = "$(printf 'yes\t\303\251\360\237\230\200\357\277\275\\\n')" ]
    [ "$(t odd.jsonl | wc -l)" -eq 2 ]
}

@test "kv.mk: trains in three stages, and measures; another model; the same text gives the same bytes" {
    tiny > 'my text/tiny one.txt'
    small=(CORPUS='my text/tiny one.txt' SIZE=0.02 STEPS='2 2 2' STEP=256 SEQ=256 VOCAB=700 WINDOWS=1)
    make -f 'my recipes/kv.mk' WORK='my work' "${small[@]}" METHODS='int8 h2o:keep=0.2' > log 2>&1 || { cat log; false; }
    grep -q '^plain  *16.00 ' 'my work/table.txt'
    grep -q '^int8 ' 'my work/table.txt'
    grep -q '<svg' 'my work/map.svg'
    # larger channels of keys, and the same function
    cd 'my work'
    run ! cmp -s long/model.safetensors outliers/model.safetensors
    eval-model -q --seq-len 64 long/ held-out.jsonl | grep -o '"loss":[^,]*' > loss
    eval-model -q --seq-len 64 outliers/ held-out.jsonl | grep -o '"loss":[^,]*' | cmp - loss
    cd ..
    perl 'my recipes/kv-text' short 20000 3 < 'my work/train.jsonl' > a
    perl 'my recipes/kv-text' short 20000 3 < 'my work/train.jsonl' > b
    perl 'my recipes/kv-text' short 20000 4 < 'my work/train.jsonl' > c
    cmp a b
    run ! cmp -s a c
    longest() { perl 'my recipes/kv-text' long 60000 3 "$@" < 'my work/train.jsonl' | awk '{ if (length() > n) n = length() } END { print n }'; }
    [ "$(longest 6000)" -gt "$((2 * $(longest)))" ]
    make -f 'my recipes/kv.mk' WORK='other work' MODEL='my work/short' "${small[@]}" METHODS=int8 > log 2>&1 || { cat log; false; }
    grep -q '^int8 ' 'other work/table.txt'
    [ ! -e 'other work/m0' ]
    # the table is made again for other methods and for another model, and only then
    cp 'other work/table.txt' first
    again() { make -f 'my recipes/kv.mk' WORK='other work' "${small[@]}" "$@" > log 2>&1 || { cat log; false; }; }
    again MODEL='my work/short' METHODS=int8
    [ ! 'other work/table.txt' -nt first ]
    again MODEL='my work/short' METHODS=int4
    grep -q '^int4 ' 'other work/table.txt'
    run ! grep -q '^int8 ' 'other work/table.txt'
    cp 'other work/table.txt' second
    again MODEL='my work/outliers' METHODS=int4
    run ! cmp -s second 'other work/table.txt'
    make -f 'my recipes/kv.mk' WORK='my work' clean
    [ ! -e 'my work' ]
}

@test "align.mk: a base, rewards and pairs are trained and measured" {
    make -f 'my recipes/align.mk' WORK='my work' LINES=3000 LIMIT=15 BASE=3 STEPS=2 PROMPTS=4 GROUP=2 EPOCHS=1 > log 2>&1 || { cat log; false; }
    for name in base grpo dpo; do
        grep -qE "^$name  *[01]\.[0-9]+  *[0-9]+\.[0-9]+ " 'my work/table.txt'
    done
    grep -q '<svg' 'my work/reward.svg'
    cd 'my work/problems'
    [ "$(wc -l < held.jsonl)" -eq 200 ]
    [ "$(cat held.jsonl train.jsonl | sort -u | wc -l)" -eq 225 ]
    # one answer in nine is right, and never a rejected one
    perl -ne '/"(\d+)\+(\d+)=(\d+)"/ and $n++, $r += $1 + $2 == $3; END { exit !(abs($r / $n - 1 / 9) < 0.03) }' text.jsonl
    perl -ne '/"(\d+)\+(\d+)=","chosen":"(\d+)","rejected":"(\d+)"/ or die; die if $3 != $1 + $2 || $4 == $3' pairs.jsonl val.jsonl
}

@test "kv-text: its names and numbers are those of quantize-kv's passkeys" {
    perl -0 -ne '/names\[LM_KV_PASSKEY_NAMES\] = \{(.*?)\};/s and print join "\n", $1 =~ /"(\w+)"/g' "$ROOT/lib/compress/kv_passkey.c" > of-tool
    perl -0 -ne '/my \@name = qw\((.*?)\)/s and print join "\n", split " ", $1' 'my recipes/kv-text' > of-recipe
    [ "$(wc -w < of-tool)" -eq 64 ]
    cmp of-tool of-recipe
    grep -q '101 + 14 \* value' "$ROOT/lib/compress/kv_passkey.c"
    grep -q '101 + 14 \* \$_ } 0 .. 63' 'my recipes/kv-text'
    grep -q 'LM_KV_PASSKEY_VALUES = 64' "$ROOT/lib/compress/kv_passkey.h"
}

@test "tune.mk: methods on text of one's own, a table and a picture" {
    for t in old new; do
        seq 60 | awk -v t=$t '{ print "{\"text\": \"The " t " river number " $1 " walks under the bridge " $1 * 7 % 11 ".\"}" }' > "my text/$t.jsonl"
    done
    small=(FROM='my text' NEW=new VOCAB=300 SEQ=32 BATCH=2 STEPS=2 RANK=2 LENGTH=20)
    make -f 'my recipes/tune.mk' WORK='my work' "${small[@]}" OLD=old METHODS='full lora+embed ia3' PRESET=llama-1m BASE=4 \
        > log 2>&1 || { cat log; false; }
    [ "$(wc -l < 'my work/table.txt')" -eq 5 ]
    grep -qE '^lora\+embed +[0-9.]+ k +[0-9.]+ +[0-9]+ +[0-9.]+ +[0-9.]+ +[0-9]+ +[0-9.]+ +[0-9.]+ +-?[0-9]+$' 'my work/table.txt'
    grep -qE '^full .* 100 .* 100$' 'my work/table.txt'
    grep -q '"modules_to_save": *\["\?embed_tokens' <(tr -d '\n ' < 'my work/runs/lora+embed/adapter/adapter_config.json')
    # the pieces are the text, cut
    [ "$(wc -l < 'my work/text/new.pieces.jsonl')" -gt 60 ]
    texts() { sed 's/^{"text": *"//; s/"}$//' "$1" | tr -d '\n'; }
    texts 'my work/text/new.train.jsonl' > whole
    texts 'my work/text/new.pieces.jsonl' | cmp - whole
    grep -q '<svg' 'my work/loss.svg'
    [ "$(grep -c 'stroke-dasharray' 'my work/methods.svg')" -eq 2 ]
    [ "$(grep -oE '>(full|lora.embed|ia3)<' 'my work/methods.svg' | sort | tr -d '\n')" = '>full<>ia3<>lora+embed<' ]
    make -f 'my recipes/tune.mk' WORK='my work' FROM='my text' OLD=old NEW=new METHODS='full lora+embed ia3' > again 2>&1
    run ! grep -q peft-tune again
    # pictures of many methods: sorted by the loss on the new text, a loss that is not a number last; few lines by step
    mkdir -p ranks/loss
    echo '1.5 2.9 ' > ranks/loss/base
    for m in a:2.5 b:nan c:0.5 d:10.25 e:1.5; do echo "1.6 ${m#*:} " > "ranks/loss/${m%:*}"; done
    (cd ranks && timeout 60 bash '../my recipes/tune-report' picture a b c d e > methods.svg)
    [ "$(grep -oE '>[a-e]<' ranks/methods.svg | tr -d '\n')" = '>c<>e<>a<>d<>b<' ]
    [ "$(cd ranks && bash '../my recipes/tune-report' best 3 a b c d e | tr '\n' ' ')" = 'a c e ' ]
    # the axis begins near the lowest loss
    echo '5.5 5.2 ' > ranks/loss/base
    echo '5.6 5.1 ' > ranks/loss/a
    (cd ranks && timeout 60 bash '../my recipes/tune-report' picture a > methods.svg)
    grep -q '>5</text>' ranks/methods.svg
    run ! grep -q '>[0-4]</text>' ranks/methods.svg
    rm 'my work/loss.svg'
    make -f 'my recipes/tune.mk' WORK='my work' FROM='my text' OLD=old NEW=new METHODS='full lora+embed ia3' SHOWN=1 > again 2>&1
    run ! grep -qE 'peft-tune|eval-model' again
    best=$(head -n 1 <(for m in full lora+embed ia3; do echo "$(cut -d ' ' -f 2 "my work/loss/$m") $m"; done | sort -n))
    [ "$(grep -oE '>(full|lora.embed|ia3)<' 'my work/loss.svg' | sort -u)" = ">${best#* }<" ]
    # a method that diverges is in the table without numbers, and the others go on; no picture by step
    mkdir stops
    printf '#!/bin/sh\ncase $* in *dry-run*) ;; *rslora*) echo "step 2: not a number" >&2; exit 4 ;; esac\nexec "%s" "$@"\n' \
        "$(command -v peft-tune)" > stops/peft-tune
    chmod +x stops/peft-tune
    PATH=$PWD/stops:$PATH make -f 'my recipes/tune.mk' WORK='my work' "${small[@]}" OLD=old METHODS='full ia3 rslora boft' \
        SHOWN=0 > again 2>&1 || { cat again; false; }
    grep -qx 'step 2: not a number' again
    grep -qE '^rslora .* - +nan +nan +-$' 'my work/table.txt'
    grep -qE '^boft .* [0-9.]+ +-?[0-9]+$' 'my work/table.txt'
    [ "$(grep -c '>nan<' 'my work/methods.svg')" -eq 2 ]
    # a base that is there, text of two kinds that it knows, and the share of full fine-tuning's memory and gain left out
    make -f 'my recipes/tune.mk' WORK='other work' "${small[@]}" OLD='old new' MODEL='my work/base' METHODS=lora > log 2>&1 ||
        { cat log; false; }
    run ! grep -qE '^(train|init-model) ' log
    [ "$(sed -n 's/.*"base_model_name_or_path": *"\([^"]*\)".*/\1/p' 'other work/runs/lora/adapter/adapter_config.json')" = base/ ]
    cmp 'my work/base/model.safetensors' 'other work/base/model.safetensors'
    cat 'my work/text/old.held' 'my work/text/new.held' | cmp - 'other work/text/old.held'
    grep -qE '^lora +[0-9.]+ k +[0-9.]+ +- .* -$' 'other work/table.txt'
    make -f 'my recipes/tune.mk' WORK='third work' "${small[@]}" OLD=old MODEL=nowhere METHODS=lora > log 2>&1 || refused=1
    [ "$refused" = 1 ]
    grep -q 'tune.mk: MODEL: nowhere: has no config.json' log
    make -f 'my recipes/tune.mk' WORK='my work' clean
    [ ! -e 'my work' ]
}
