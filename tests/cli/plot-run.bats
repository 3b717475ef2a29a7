#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# plot-run: pictures, growing files, refusals.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/plot-run.sh"
}

@test "plot-run: the chart in the terminal has title, axes, line, marks and last value" {
    run plot-run --width 60 --height 12 run.jsonl
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 12 ]
    [ "${lines[0]}" = run.jsonl ]
    [[ "${lines[1]}" == *training*evaluation* ]]
    [[ "${lines[3]}" == "8 ┤⢦⡀"* ]]
    [[ "${lines[9]}" == *"● 3.31" ]]
    [[ "${lines[11]}" == *100*200*"300 step" ]]
    [ "$(grep -o ● <<< "$output" | wc -l)" -eq 7 ]
}

@test "plot-run: no colours without a terminal" {
    run plot-run run.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" != *$'\033'* ]]
}

@test "plot-run: colours on a terminal, none with NO_COLOR" {
    command -v script > /dev/null || skip "script is missing"
    [[ "$(script -qc 'plot-run run.jsonl' /dev/null)" == *$'\033[38;5;33m'* ]]
    [[ "$(NO_COLOR=1 script -qc 'plot-run run.jsonl' /dev/null)" != *$'\033'* ]]
}

@test "plot-run: SVG has every point, and the same bytes each time" {
    plot-run --no-eval -w 4000 -o a.svg run.jsonl
    plot-run --no-eval -w 4000 -o b.svg run.jsonl
    cmp a.svg b.svg
    points=$(grep -o 'stroke="#2563eb" .*points="[^"]*"' a.svg | grep -o '[0-9.]*,[0-9.]*' | wc -l)
    [ "$points" -eq 300 ]
    run ! grep -q '<circle' a.svg
}

@test "plot-run: evaluations are marks" {
    plot-run -o a.svg run.jsonl
    [ "$(grep -c '<circle' a.svg)" -eq 7 ] # six, and the legend's
}

@test "plot-run: PNG has the requested size" {
    plot-run -o a.png --width 500 --height 300 run.jsonl
    [ "$(head -c 24 a.png | od -An -tx1 | tr -d ' \n')" = \
        89504e470d0a1a0a0000000d49484452000001f40000012c ]
}

@test "plot-run: two runs have two colours, their names and a panel for each key" {
    plot-run -o a.svg -k loss -k lr -n fast run.jsonl slow.jsonl
    grep -q '>fast</text>' a.svg
    grep -q '>slow.jsonl</text>' a.svg
    grep -q '#2563eb' a.svg
    grep -q '#ea580c' a.svg
    grep -q '>loss</text>' a.svg
    grep -q '>lr</text>' a.svg
}

@test "plot-run: equal names become paths" {
    mkdir a b
    cp run.jsonl a/
    cp slow.jsonl b/run.jsonl
    plot-run -o a.svg a/run.jsonl b/run.jsonl
    grep -q '>a/run.jsonl</text>' a.svg
    grep -q '>b/run.jsonl</text>' a.svg
}

@test "plot-run: smoothing adds a faint line behind, but not to a schedule" {
    plot-run -s 0.9 -o a.svg run.jsonl
    grep -q 'stroke-opacity="0.28"' a.svg
    plot-run -s 0.9 -k lr -o b.svg run.jsonl
    run ! grep -q 'stroke-opacity="0.28"' b.svg
}

@test "plot-run: tokens and seconds along x" {
    run plot-run -x tokens run.jsonl
    [[ "${lines[-1]}" == *500k*1M*tokens ]]
    run plot-run -x seconds run.jsonl
    [[ "${lines[-1]}" == *30s*1m*seconds ]]
}

@test "plot-run: standard input and standard output" {
    plot-run -o a.svg -t x run.jsonl
    plot-run -o - --format svg -t x < run.jsonl | cmp - a.svg
}

@test "plot-run: plain objects of another program" {
    printf '{"loss":3}\n{"loss":2}\n{"loss":1}\n' > other.jsonl
    run plot-run -w 40 --height 8 other.jsonl
    [ "$status" -eq 0 ]
    [[ "${lines[-1]}" == *1*2*"3 step" ]]
}

@test "plot-run: an incomplete last line is skipped, a bad one is reported once" {
    head -c 20000 run.jsonl > cut.jsonl
    run plot-run cut.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" != *plot-run:* ]]
    sed -i '5s/.*/not json/' cut.jsonl
    run plot-run cut.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" == *"plot-run: cut.jsonl: line 5: not a JSON object; 1 such line skipped"* ]]
}

@test "plot-run: NaN breaks the line and is shown" {
    sed -i 's/"step":150,\(.*\)"loss":[0-9.]*,\(.*\)}/"step":150,\1"loss":null,\2,"nonfinite":"nan"}/' run.jsonl
    plot-run --no-eval -o a.svg run.jsonl
    [ "$(grep -c '<polyline.*#2563eb' a.svg)" -eq 2 ]
    [ "$(grep -c '#dc2626' a.svg)" -eq 2 ]
}

@test "plot-run: --follow waits for the file, draws new records and ends with the run" {
    { sleep 0.3; head -n 100 run.jsonl > grow.jsonl; sleep 0.3; tail -n +101 run.jsonl >> grow.jsonl; } &
    run timeout 20 plot-run --follow --interval 0.1 --width 60 --height 12 grow.jsonl
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 12 ] # no terminal: one chart, the last
    [[ "${lines[9]}" == *"● 3.31" ]]
}

@test "plot-run: --follow replaces the picture and ends on a signal" {
    head -n 50 run.jsonl > grow.jsonl
    plot-run --follow --interval 0.1 -o a.svg grow.jsonl &
    pid=$!
    for _ in $(seq 100); do [ -e a.svg ] && break; sleep 0.05; done
    cp a.svg first.svg
    sed -n 51,100p run.jsonl >> grow.jsonl
    for _ in $(seq 100); do cmp -s a.svg first.svg || break; sleep 0.05; done
    run ! cmp -s a.svg first.svg
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    [ "$status" -eq 143 ]
    [ -z "$(ls -A | grep tmp)" ]
}

@test "plot-run: for an unknown key the message lists the existing keys" {
    run plot-run -k los run.jsonl
    [ "$status" -eq 1 ]
    [ "$output" = "plot-run: run.jsonl: no record has 'los'; the keys are tokens, seconds, loss, lr, grad_norm: choose one of these" ]
}

@test "plot-run: a list of keys that is too long ends behind a whole name, with the number of the others" {
    printf '{"step":1' > long.jsonl
    for i in $(seq 10 39); do printf ',"quantity/number%s":1' "$i"; done >> long.jsonl
    printf '}\n' >> long.jsonl
    run plot-run long.jsonl -k none
    [ "$status" -eq 1 ]
    [[ "$output" =~ \ quantity/number[0-9][0-9],\ and\ ([0-9]+)\ more:\ choose\ one ]]
    [ $(($(grep -o quantity <<< "$output" | wc -l) + BASH_REMATCH[1])) -eq 30 ]
}

panels() { # panels FILE ...: the keys that are drawn, in SVG
    plot-run -f -o panels.svg -t x "$@"
    grep -oE '>(loss|reward|margin|rewards/margins|lr)</text>' panels.svg | tr -d '\n'
}

@test "plot-run: without a key, rewards or margins are drawn where every run has them, else the loss" {
    sh "$root/tests/cli/examples/align-model.sh" > /dev/null 2>&1
    A=(align-model -q --batch-size 4 --steps 2 --peak-tflops 0)
    "${A[@]}" m0/ problems.jsonl -o grpo/ --loss grpo --reward length:target=8 --group 4 --max-new-tokens 8 --metrics grpo.jsonl
    "${A[@]}" m0/ pairs.jsonl -o dpo/ --loss dpo --metrics dpo.jsonl
    "${A[@]}" m0/ pairs.jsonl -o judge/ --loss reward --metrics judge.jsonl
    [ "$(panels grpo.jsonl)" = '>reward</text>' ]
    [ "$(panels dpo.jsonl)" = '>rewards/margins</text>' ]
    [ "$(panels judge.jsonl)" = '>margin</text>' ]
    [ "$(panels run.jsonl)" = '>loss</text>' ]
    [ "$(panels grpo.jsonl run.jsonl)" = '>loss</text>' ]
    [ "$(panels -k lr grpo.jsonl)" = '>lr</text>' ]
    [ "$(panels --follow grpo.jsonl)" = '>reward</text>' ]
}

@test "plot-run: files with nothing to draw" {
    : > empty.jsonl
    run plot-run empty.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"empty.jsonl: no record with numbers in it"* ]]
    run plot-run missing.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"missing.jsonl: cannot open: No such file or directory"* ]]
    run plot-run .
    [ "$status" -eq 1 ]
    [[ "$output" == *"is a folder"* ]]
    printf '{"step":1,"loss":-1}\n' > minus.jsonl
    run plot-run --log-y minus.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"no record has a finite positive 'loss'"* ]]
}

@test "plot-run: misuse: status 2, nothing written" {
    run plot-run -o loss run.jsonl
    [ "$status" -eq 2 ]
    run plot-run -o a.svg --width 20 run.jsonl
    [ "$status" -eq 2 ]
    run plot-run --smooth 1 run.jsonl
    [ "$status" -eq 2 ]
    run plot-run -n a -n b run.jsonl
    [ "$status" -eq 2 ]
    run plot-run --format text -o run.jsonl run.jsonl
    [ "$status" -eq 2 ]
    run plot-run -x epochs run.jsonl
    [ "$status" -eq 2 ]
    [ "$(ls)" = $'run.jsonl\nslow.jsonl' ]
}

@test "plot-run: an existing picture is kept without -f" {
    echo mine > a.svg
    run plot-run -o a.svg run.jsonl
    [ "$status" -eq 2 ]
    [ "$(cat a.svg)" = mine ]
    plot-run -f -o a.svg run.jsonl
    grep -q '<svg' a.svg
}

@test "plot-run: a full disk is a failure" {
    run plot-run --format svg -o /dev/full run.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"No space left on device"* ]]
    run bash -c 'plot-run run.jsonl > /dev/full'
    [ "$status" -eq 1 ]
}

@test "plot-run: names cannot send control codes to the terminal" {
    printf '{"step":1,"lo\\u001b[31mss":1}\n{"step":2,"lo\\u001b[31mss":2}\n' > evil.jsonl
    run plot-run -t $'a\033]0;x\007' -k $'lo\033[31mss' evil.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" != *$'\033'* ]]
    run plot-run -k nothing evil.jsonl
    [[ "$output" != *$'\033'* ]]
}

@test "plot-run --schedule: bubbles and micro-batches in flight" {
    values() { # schedule, key, options -> the key's values
        plot-run --schedule "$1" --mesh pp=4 --micro-batches 8 --json "${@:3}" | sed -n "s/.*\"$2\": *\([0-9.]*\),*$/\1/p" | xargs
    }
    [ "$(values 1f1b makespan_ms)" = 33 ]
    [ "$(values 1f1b bubble_of_ideal)" = 0.375 ]
    [ "$(values 1f1b in_flight)" = '4 3 2 1 4 3 2 1' ]
    [ "$(values zb-h1 makespan_ms)" = 27 ]
    [ "$(values zb-h1 idle_ms)" = '3 2 1 0' ]
    [ "$(values zb-v makespan_ms)" = 25.5 ]
    [ "$(values zb-v bubble_of_span)" = 0 ]
    [ "$(values zb-v in_flight)" = '8 8 8 8 8 7 6 5 4 3 2 1' ]
    # 11 times the work of a micro-batch, and sending over three borders there and back
    [ "$(values gpipe makespan_ms --costs 2,2.5,2,0.25)" = 73 ]
}

@test "plot-run --schedule: rows are written, read and drawn" {
    plot-run --schedule dualpipe --mesh pp=4 --micro-batches 8 -o rows.csv
    [ "$(wc -l < rows.csv)" -eq 4 ]
    grep -q '^0F0,0F1,0F2,3F4,3I4,3W4,3F5,(0F3;3B5)OVERLAP_F_B' rows.csv
    a=$(plot-run --schedule dualpipe --mesh pp=4 --micro-batches 8 --json | tail -n +3)
    [ "$a" = "$(plot-run --schedule rows.csv --json | tail -n +3)" ]
    run plot-run --schedule rows.csv --width 90
    [ "$status" -eq 0 ]
    [[ "${lines[0]}" == "rows.csv: 8 micro-batches on 4 ranks, 26 ms"* ]]
    [[ "${lines[1]}" == "rank 0 0--1-2--"*"waits 2, holds 5" ]]
    [ "${#lines[@]}" -eq 7 ]
    plot-run --schedule rows.csv -o a.svg
    [ "$(grep -c '<rect' a.svg)" -gt 64 ]
    plot-run --schedule rows.csv -o a.png
    [ "$(head -c 4 a.png | tail -c 3)" = PNG ]
}

@test "plot-run --schedule: without colours, each entry of the legend has a mark of its own" {
    echo 0F0,1F0,1B0,0I0,0W0,0F1,1F1,1I1,1W1,0B1 > rows.csv
    plot-run --schedule rows.csv --width 90 | tail -n 1 | sed 's/  /\n/g' > legend
    [ "$(wc -l < legend)" -eq 8 ]
    [ "$(cut -d' ' -f1 legend | sort -u | wc -l)" -eq 8 ]
}

@test "plot-run --schedule: costs of each stage" {
    printf '1,1,1\n5,1,1\n' > costs
    plot-run --schedule gpipe --mesh pp=2 --micro-batches 10 --costs-file costs --json | grep -q '"makespan_ms": 73,'
    printf '1,1,1\n' > costs
    run plot-run --schedule gpipe --mesh pp=2 --micro-batches 10 --costs-file costs
    [ "$status" -eq 2 ]
    [[ "$output" == *"1 lines for 2 stages"* ]]
}

@test "plot-run --schedule: what cannot be drawn is one line" {
    bad() { # words of the message, options
        run plot-run "${@:2}"
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$1"* ]]
    }
    bad 'takes 8 or 12' --schedule interleaved:2 --mesh pp=4 --micro-batches 10
    bad 'zb-v' --schedule zbv --mesh pp=4 --micro-batches 8
    bad 'give --mesh' --schedule zb-v
    bad 'not a number of ranks' --schedule zb-v --mesh tp=2 --micro-batches 8
    bad 'serves --schedule only' --mesh pp=2 run.jsonl
    bad 'cannot be combined with --format' --schedule 1f1b --mesh pp=2 --micro-batches 4 --json --format svg
    bad 'serves --schedule only' --json run.jsonl
    bad 'serves --schedule only' --format csv run.jsonl
    bad 'is not drawn with --smooth' --schedule 1f1b --mesh pp=2 --micro-batches 2 --smooth 0.9
    bad 'leave out the run' --schedule 1f1b --mesh pp=2 --micro-batches 2 run.jsonl
    bad 'not F,B,W,COMM' --schedule 1f1b --mesh pp=2 --micro-batches 2 --costs 1,-1,1
    bad 'no step takes time' --schedule 1f1b --mesh pp=2 --micro-batches 2 --costs 0,0,0
    printf '0B0,0F0\n1F0,1B0\n' > circle.csv
    bad 'rank 0 waits without end' --schedule circle.csv
    printf '0F0\n' > half.csv
    bad 'not forward and backward once' --schedule half.csv
    bad 'No such file' --schedule none.csv
    plot-run --schedule 1f1b --mesh pp=2 --micro-batches 2 -o rows.csv
    bad 'has 2 ranks and 2 micro-batches' --schedule rows.csv --mesh pp=4
    [ "$(ls)" = $'circle.csv\nhalf.csv\nrows.csv\nrun.jsonl\nslow.jsonl' ]
}
