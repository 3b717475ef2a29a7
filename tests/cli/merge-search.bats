#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# merge-models --search: candidates in memory, their losses, the lines about them, resumption, the best merged.

bats_require_minimum_version 1.5.0

# One base, two models tuned on other texts, and a part of each text held out.
setup_file() {
    cd "$BATS_FILE_TMPDIR"
    awk 'BEGIN { for (i = 0; i < 300; i++) printf "The system reads word%d and writes line %d of it.\n\n", i % 37, i }' > words.txt
    awk 'BEGIN { for (i = 0; i < 300; i++) printf "%d + %d = %d, %d * 2 = %d.\n\n", i % 17, i % 23, i % 17 + i % 23, i % 29, i % 29 * 2 }' > sums.txt
    train-tokenizer -q --vocab-size 320 --pattern llama3 -o tok/tokenizer.json words.txt sums.txt
    for d in words sums; do
        shard-data -q --tokenizer tok --split blank --val-fraction 0.1 -o $d-data/ $d.txt
    done
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=96 --tokenizer tok/tokenizer.json -o m0/
    # documents of both, so that the base has learned from both
    shard-data -q --tokenizer tok --split blank -o both/ words.txt sums.txt
    train -q m0/ both/ -o base/ --steps 12 --lr 3e-3 --batch-size 8 --seq-len 64
    for d in words sums; do
        train -q base/ $d-data/ -o $d/ --steps 10 --lr 2e-3 --batch-size 8 --seq-len 64
    done
}

setup() {
    cd "$BATS_FILE_TMPDIR"
    out=$BATS_TEST_TMPDIR
    vals="--val words-data/val --val sums-data/val"
    short="--seq-len 64" # less padding, so less time
}

# value KEY FILE: of the last line that has it
value() { grep -o "\"$1\":[-0-9.e+]*" "$2" | tail -n 1 | cut -d: -f2; }
# lines FILE: candidates without their times
lines() { sed 's/"seconds":[-0-9.e+]*//' "$1" | grep '"event":"candidate"'; }
search() { merge-models -q --method dem --base base/ words/ sums/ $vals $short "$@"; }

@test "merge-models --search: the example of the manual; the best has the loss that eval-model measures" {
    short=
    search --search coordinate -o "$out/best/" > "$out/c.jsonl"
    [ "$(head -n 1 "$out/c.jsonl" | grep -c '"event":"search"')" -eq 1 ]
    [ "$(tail -n 1 "$out/c.jsonl" | grep -c '"event":"best"')" -eq 1 ]
    [ "$(value candidates "$out/c.jsonl")" -eq "$(lines "$out/c.jsonl" | wc -l)" ]
    eval-model "$out/best/" words-data/val > "$out/w"
    eval-model "$out/best/" sums-data/val > "$out/s"
    # loss and objective of the best line, digit for digit
    best=$(grep '"best":true' "$out/c.jsonl" | tail -n 1)
    [[ "$best" == *"\"loss\":[$(value loss "$out/w"),$(value loss "$out/s")]"* ]]
    awk -v a="$(value loss "$out/w")" -v n="$(value tokens "$out/w")" -v b="$(value loss "$out/s")" -v m="$(value tokens "$out/s")" \
        -v o="$(value objective "$out/c.jsonl")" 'BEGIN { d = (a * n + b * m) / (n + m) - o; exit !(d < 1e-9 && d > -1e-9) }'
    # the weights are those of the best line, and better than either model alone
    w=$(grep '"event":"best"' "$out/c.jsonl" | sed 's/.*"weights":\[\([^]]*\)\].*/\1/')
    [[ "$best" == *"\"weights\":[$w]"* ]]
    merge-models -q --method dem --base base/ words/:"${w%,*}" sums/:"${w#*,}" -o "$out/again/"
    cmp "$out/best/config.json" "$out/again/config.json"
    cmp <(tail -c 200000 "$out/best/model.safetensors") <(tail -c 200000 "$out/again/model.safetensors")
}

@test "merge-models --search: every method, the same for any number of threads" {
    for way in grid simplex coordinate cma-es; do
        extra=
        [ $way != grid ] || extra="--grid 0,0.5,1"
        [ $way != cma-es ] || extra="--bounds 0,1 --sigma 0.2 --popsize 4"
        max="--max-candidates 12"
        search --search $way $extra $max --seed 3 -j 1 -o "$out/$way-1.safetensors" > "$out/1"
        search --search $way $extra $max --seed 3 -j 2 -o "$out/$way-2.safetensors" > "$out/2"
        lines "$out/1" > "$out/l1"
        lines "$out/2" > "$out/l2"
        cmp "$out/l1" "$out/l2"
        [ "$(wc -l < "$out/l1")" -le 12 ]
        [ "$(wc -l < "$out/l1")" -ge 4 ]
    done
    [ "$(grep -c '"kind":"corner"' "$out/l1")" -eq 0 ]
    search --search simplex --max-candidates 5 -o "$out/s" > "$out/1"
    [[ "$(lines "$out/1")" == *'"kind":"centre","weights":[0.5,0.5]'*'"kind":"corner","weights":[1,0]'*'"kind":"corner","weights":[0,1]'*'"kind":"random"'* ]]
}

@test "merge-models --search: an interrupted search continues exactly" {
    for way in cma-es coordinate; do
        search --search $way --max-candidates 14 --seed 5 -o "$out/$way-whole.safetensors" > "$out/whole"
        { head -n 5 "$out/whole"; sed -n 6p "$out/whole" | cut -c 1-70 | tr -d '\n'; } > "$out/cut"
        search --search $way --max-candidates 14 --seed 5 --resume "$out/cut" -o "$out/$way-on.safetensors" > "$out/on"
        lines "$out/whole" > "$out/a"
        lines "$out/on" > "$out/b"
        cmp "$out/a" "$out/b"
        # known candidates are not measured again: they keep their times
        cmp <(sed -n 2,5p "$out/whole") <(sed -n 2,5p "$out/on")
        [ "$(sed -n 6p "$out/whole")" != "$(sed -n 6p "$out/on")" ]
    done
    # another method may use known candidates, other models may not
    search --search grid --grid 0.25,0.5 --seed 5 --resume "$out/whole" -o "$out/g" > "$out/on"
    run merge-models --method dem --base base/ sums/ words/ $vals $short --search grid --seed 5 --resume "$out/whole" -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *'differs in "merge"'* ]]
    run merge-models --method dem --base base/ words/ sums/ $vals $short --search grid --seed 6 --resume "$out/whole" -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *'differs in "seed"'* ]]
    # nor may the same models with one changed bit, wherever it is: here in the first tensor, 320 x 64 F32
    cp -rL words/latest "$out/words"
    model=$out/words/model.safetensors
    at=$((8 + $(od -An -tu8 -N 8 "$model") + 8192))
    # shellcheck disable=SC2059
    printf "$(printf '\\%03o' $(($(od -An -tu1 -j $at -N 1 "$model") ^ 1)))" |
        dd of="$model" bs=1 seek=$at conv=notrunc status=none
    run merge-models --method dem --base base/ "$out/words/" sums/ $vals $short --search grid --seed 5 --resume "$out/whole" -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *'differs in "merge"'* ]]
    run merge-models --method dem --base base/ words/ sums/ --val words-data/val $short --search grid --seed 5 --resume "$out/whole" -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *'differs in "val"'* ]]
    [ ! -e "$out/x" ]
}

@test "merge-models --search: text, a limit of tokens, equal sets, BF16 and other methods" {
    head -n 20 words.txt > "$out/w.txt"
    merge-models -q -m ties -b base/ words/ sums/ --density 0.5 --val "$out/w.txt" --val sums-data/val --val-tokens 50 --objective equal \
        --val-dtype bf16 --seq-len 32 --search grid --grid 0.5,1 --dtype bf16 -o "$out/m/" > "$out/c"
    head -n 1 "$out/c" | grep -q '"val":\[{"path":"[^"]*w.txt","tokens":50},{"path":"sums-data/val","tokens":50}\]'
    [ "$(lines "$out/c" | wc -l)" -eq 4 ]
    lines "$out/c" | head -n 1 | sed 's/.*"loss":\[\([^]]*\)\],"objective":\([^,]*\),.*/\1 \2/; s/,/ /' |
        awk '{ d = ($1 + $2) / 2 - $3; exit !(d < 1e-9 && d > -1e-9) }'
    # the validated weights are the written ones: BF16 weights, also of GPT-2, whose matrices are transposed
    init-model -q gpt2-124m --set n_layer=1 --set n_embd=64 --set n_head=4 --set n_positions=64 --tokenizer tok/tokenizer.json --seed 1 -o "$out/g1/"
    init-model -q gpt2-124m --set n_layer=1 --set n_embd=64 --set n_head=4 --set n_positions=64 --tokenizer tok/tokenizer.json --seed 2 -o "$out/g2/"
    merge-models -q -m linear "$out/g1/" "$out/g2/" --val sums-data/val --search simplex --max-candidates 4 --dtype bf16 -o "$out/g3/" > "$out/c"
    eval-model "$out/g3/" sums-data/val > "$out/e"
    [[ "$(grep '"best":true' "$out/c" | tail -n 1)" == *"\"loss\":[$(value loss "$out/e")]"* ]]
}

@test "merge-models --search: weights that cannot be merged have no loss, and the search continues" {
    linear() { merge-models --method linear words/ sums/ $vals $short --search grid "$@"; }
    linear --grid 0,1 -o "$out/m/" > "$out/c" 2> "$out/log"
    grep -q 'merge-models: candidate 0 has no loss: .*: the weights add up to 0$' "$out/log"
    [ "$(grep -c 'has no loss' "$out/log")" -eq 1 ]
    [[ "$(lines "$out/c" | head -n 1)" == *'"weights":[0,0],"loss":[null,null],"objective":null,"best":false'* ]]
    [ "$(lines "$out/c" | wc -l)" -eq 4 ]
    [ -e "$out/m/config.json" ]
    # and a resumed search reads such a line
    linear -q --grid 0,1 --resume "$out/c" -o "$out/n/" > "$out/d"
    diff <(lines "$out/c") <(lines "$out/d")
    run linear --grid 0 -o "$out/x/"
    [ "$status" -eq 4 ]
    [[ "$output" == *"search: none of 1 point has a finite loss: "* ]]
    [ ! -e "$out/x" ]
}

@test "merge-models --search: a reader that exits does not end it; an existing output is refused at once" {
    search --search grid --grid 0,1 -o "$out/m/" 2> "$out/log" | head -n 1 > "$out/c"
    [ -e "$out/m/config.json" ]
    run search --search grid -o "$out/m/"
    [ "$status" -eq 2 ]
    [[ "$output" != *candidate* ]]
    search --search grid --grid 0,1 -f -o "$out/m/" > "$out/c"
}

refuses() { # TEXT ARGUMENT ...
    local text=$1
    shift
    run merge-models "$@"
    [ "$status" -eq 2 ]
    [[ "$output" == *"$text"* ]]
    [ "${#lines[@]}" -eq 1 ]
    [ ! -e "$out/x" ]
}

@test "merge-models --search: misuse" {
    dem="-m dem -b base/ words/ sums/ -o $out/x"
    refuses "--val" $dem --val sums-data/val
    refuses "--grid" $dem --val sums-data/val --search simplex --grid 0,1
    refuses "--bounds" $dem --val sums-data/val --search grid --bounds 0,1
    refuses "no data for validation" $dem --search grid
    refuses "holds the candidates" -m dem -b base/ words/ sums/ --search grid --val sums-data/val -o -
    refuses "holds the candidates" $dem --search grid --val sums-data/val --json
    refuses "holds the candidates" -m dem -b base/ words/ sums/ --search grid --val sums-data/val -o /dev/stdout
    refuses "'0,b' is not a list of numbers" $dem --search grid --val sums-data/val --grid 0,b
    refuses "is not greater than" $dem --search grid --val sums-data/val --grid 1,0
    refuses "49 points, more than 10" $dem --search grid --val sums-data/val --max-candidates 10
    refuses "has no weights" -m slerp -b base/ words/ --t 0.5 --search grid --val sums-data/val -o "$out/x"
    refuses "--popsize" $dem --search grid --val sums-data/val --popsize 6
    refuses "choose from 4" $dem --search cma-es --val sums-data/val --popsize 3
    refuses "stride" $dem --search grid --val sums-data/val --seq-len 8 --stride 9
    for dry in "" --dry-run; do # a dry run opens the sets too
        run merge-models $dem --search grid --val nothing $dry
        [ "$status" -eq 1 ]
        [[ "$output" == *"nothing"* ]]
    done
    merge-models $dem --search grid --val sums-data/val --dry-run > "$out/plan"
    run ! grep -q candidate "$out/plan"
    # the lines of two searches in one file could not be told apart
    search --search grid --grid 0,1 -o "$out/y" > "$out/c"
    run bash -c "merge-models $dem --search grid --grid 0,1 --val words-data/val --val sums-data/val $short --resume '$out/c' 2>&1 >> '$out/c'"
    [ "$status" -eq 2 ]
    [[ "$output" == *"both an input and the output"* ]]
    [ ! -e "$out/x" ]
}
