#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Names of options and values of other programs.
bats_require_minimum_version 1.5.0

setup() {
    BIN=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}/bin
    ROOT=${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}
    cd "$BATS_TEST_TMPDIR"
}

# A legal value of option $2 in the table file $1; nothing for flags.
value() {
    awk -F '\t' -v name="$2" '$1 == name && $2 != "also" && $2 != "instead" {
        if ($2 == "flag") exit
        if ($2 == "choice" || $2 == "device") { split($5, c, " "); print c[1] }
        else if ($2 == "text" || $2 == "list") print 7
        else printf "%.9g\n", $3 + ($4 > $3 + 1 ? 1 : ($4 - $3) / 2)
    }' "$1"
}

@test "every other name is its option: on the command line with '-' and '_', and in a config" {
    for t in "$BIN"/*; do
        "$t" --completion=table > table
        awk -F '\t' '$2 == "also" { print $1, $3, $4 }' table > also
        cat also >> all
        while read -r name option fixed; do
            v=${fixed:-$(value table "$option")}
            "$t" "--$option${v:+=$v}" --print-config > want
            under=${name//-/_}
            if [ -n "$fixed" ] || [ -z "$v" ]; then
                "$t" "--$under" --print-config > got || { echo "$t --$under"; false; }
                cmp want got || { echo "$t --$under"; false; }
                echo "{\"$name\": true}" > c.json
            else
                "$t" "--$name=$v" --print-config > got || { echo "$t --$name=$v"; false; }
                cmp want got || { echo "$t --$name=$v"; false; }
                "$t" "--$under" "$v" --print-config | cmp want - || { echo "$t --$under $v"; false; }
                [[ $v =~ ^[0-9.]+$ ]] && echo "{\"$under\": $v}" > c.json || echo "{\"$under\": \"$v\"}" > c.json
                ! grep -q "\"$option\": \"" want || echo "{\"$under\": \"$v\"}" > c.json
                ! grep -q "\"$option\": \[" want || echo "{\"$under\": [\"$v\"]}" > c.json
            fi
            "$t" --config c.json --print-config | cmp want - || { echo "$t $(cat c.json)"; false; }
        done < also
    done
    [ "$(wc -l < all)" -gt 100 ]
}

@test "for a name without an equivalent option the message says what to write" {
    for t in "$BIN"/*; do
        "$t" --completion=table | awk -F '\t' '$2 == "instead"' > instead
        while IFS=$'\t' read -r name _ text; do
            for n in "--$name" "--${name//-/_}=0.1"; do # also with a value
                run --separate-stderr "$t" "$n" 3
                [ "$status" -eq 2 ]
                [ "$stderr" = "${t##*/}: ${n%=*}: unknown option: $text" ] || { echo "$stderr"; false; }
            done
            echo "{\"$name\": 3}" > c.json
            run --separate-stderr "$t" --config c.json
            [ "$status" -eq 2 ]
            [ "$stderr" = "${t##*/}: c.json: $name: no option of this name: $text" ] || { echo "$stderr"; false; }
        done < instead
    done
}

@test "lmutils(7) lists every other name" {
    mandoc -Tascii "$ROOT/man/man7/lmutils.7" | col -b | sed -n '/Names from elsewhere/,/^DEVICES/p' > page
    for t in "$BIN"/*; do
        # options of other tools are in another section
        "$t" --completion=table | awk -F '\t' '($2 == "also" || $2 == "instead") && $1 !~ /^(json|seed|threads)$/ { print $1 }' > names
        while read -r n; do
            grep -qE -- "--$n([,: ]|\$)" page || { echo "${t##*/}: --$n"; false; }
        done < names
    done
    tr -s ' \t\n' ' ' < page | grep -qF 'linear and cosine end at --min-lr-ratio times --lr, a tenth by default, those of transformers at 0: give --min-lr-ratio 0'
}

@test "train: the names of transformers and nanoGPT" {
    cd "$BATS_TEST_TMPDIR"
    "$BIN/train" --learning-rate 1e-3 --max_steps 7 --warmup_steps 2 --block-size 64 --grad-clip 0.5 --eval_steps 3 --save-steps 4 \
        --logging_steps 2 --lr-scheduler-type cosine_with_restarts --output-dir out --per_device_train_batch_size 4 --bf16 \
        --optim adamw_torch --print-config > theirs
    "$BIN/train" --lr 1e-3 --steps 7 --warmup 2 --seq-len 64 --max-grad-norm 0.5 --eval-every 3 --save-every 4 --log-every 2 \
        --lr-schedule cosine -o out --batch-size 4 --dtype bf16 --optimizer adamw --print-config | cmp - theirs
    while read -r theirs ours; do
        "$BIN/train" --optim "$theirs" --print-config | grep -qF "\"optimizer\": \"$ours\"" || { echo "$theirs"; false; }
    done << 'END'
adamw_8bit adamw8bit
adamw_bnb_8bit adamw8bit
lion_32bit lion
schedule_free_adamw schedule-free
galore_adamw galore
Adafactor adafactor
END
    "$BIN/train" --batch_size 4 --no_document_mask --print-config > ours # our own names, too
    "$BIN/train" --batch-size 4 --no-document-mask --print-config | cmp - ours
    for n in --max-iters --max_iters; do "$BIN/train" $n 9 --print-config | grep -q '"steps": 9'; done
    run "$BIN/train" --num_train_epochs 3
    [ "$status" -eq 2 ]
    [[ $output == *"give --steps N: epochs x tokens of DATA / "* ]]
    run "$BIN/train" --epochs 3
    [ "$status" -eq 2 ]
    run "$BIN/train" --warmup_ratio 0.1
    [[ $output == *"give --warmup N: ratio x --steps"* ]]
}

@test "types by their other names, in any case; a misspelt other name is answered with our name" {
    for v in fp32 float32 FP32 F32 torch.float32; do
        "$BIN/train" --dtype $v --print-config | grep -q '"dtype": "f32"'
    done
    for v in bfloat16 BF16 torch.bfloat16; do
        "$BIN/train" --dtype $v --print-config | grep -q '"dtype": "bf16"'
    done
    for v in Q4_K_M q4_K_M q4-k-m q4_k_m; do
        "$BIN/convert-model" --type $v --print-config | grep -q '"type": "q4_k_m"'
    done
    cd "$BATS_TEST_TMPDIR"
    "$BIN/init-model" -q llama-1m --set vocab_size=64 --set num_hidden_layers=1 -o m
    for v in BF16 bfloat16 F16 float16 FP8_E4M3; do
        "$BIN/compress-ckpt" -q -f m --weights $v -o m.lmz
    done
    run "$BIN/compress-ckpt" -f m --weights f8 -o m.lmz
    [ "$status" -eq 2 ]
    "$BIN/convert-model" --dtype float16 --print-config | grep -q '"dtype": "f16"'
    run "$BIN/train" --dtype float16
    [ "$status" -eq 2 ]
    [[ $output == *"unknown value 'float16': "*"choose from f32, bf16" ]]
    run "$BIN/train" --learning-rat 1
    [ "$output" = "train: --learning-rat: unknown option: did you mean --lr?" ]
    run "$BIN/train" --bf16=yes
    [ "$output" = "train: --bf16: takes no value, 'yes' was given" ]
    run "$BIN/train" --no-bf16
    [ "$status" -eq 2 ]
}
