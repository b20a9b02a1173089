#!/usr/bin/env bash
# Runs the GPU tests of this folder and prints how many passed. It needs an NVIDIA GPU of compute capability 8.0 or
# higher, its driver and NVRTC; no Rust, no network. Logs go to $OUT, or to the folder `logs` beside this script.
# With `memcheck`, `racecheck` or `initcheck` as argument, the ops in bf16 and the hand-written kernels run under that
# tool of compute-sanitizer instead.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
logs=${OUT:-$PWD/logs}
mkdir -p -- "$logs"
export RIDGE_GPU_TESTS=required RIDGE_FIXTURES=$PWD/fixtures RIDGE_SKIPPED_TESTS=$logs/skipped
: > "$RIDGE_SKIPPED_TESTS"

case ${1:-} in
memcheck | racecheck | initcheck)
    failed=0
    for tests in conformance::every_op_conforms_in_bf16 kernels::; do
        log=$logs/$1-${tests%%::*}.log
        compute-sanitizer --tool "$1" --error-exitcode 9 ./cuda "$tests" > "$log" 2>&1 || failed=1
        # A name that selects no test checks nothing.
        grep -q '^running [1-9]' "$log" || failed=1
        printf '%s, %s: %s\n' "$1" "$tests" "$(grep 'SUMMARY' "$log")"
    done
    exit $failed
    ;;
esac

passed=0 failed=0
count() {
    if [[ $2 == 0 ]]; then passed=$((passed + $1)); else failed=$((failed + $1)); fi
}

./ridge doctor > "$logs/doctor.txt" 2>&1
# A program and the part of the names of its tests that selects some; a selection without tests is a failure.
for tests in "unit " "cuda conformance::" "cuda graphs::" "cuda kernels::" "cuda gemm::" "cuda ranks::" "models cuda::"; do
    program=${tests%% *} names=${tests#* }
    log=$logs/$program${names:+-${names%%::*}}.log
    ./"$program" --nocapture ${names:+"$names"} > "$log" 2>&1
    status=$?
    result=$(grep '^test result: ' "$log")
    printf '%s: %s\n' "${tests%::}" "${result:-ended with status $status}"
    of=(${result//[^0-9]/ })
    ran=$((${of[0]:-0} + ${of[1]:-0}))
    count "${of[0]:-0}" 0
    count "$((${of[1]:-0} + ((status != 0 || ran == 0) && ${of[1]:-0} == 0)))" 1
done

# The same text as the CPU's, by the model that is compiled in. (In 16 bits, sums in another order change the text.)
for format in "" "--format q8_0"; do
    for device in cpu cuda; do
        # shellcheck disable=SC2086
        ./ridge generate --greedy --quiet --device $device $format "Once upon a time" > "$logs/$device.txt" 2> "$logs/$device.err"
    done
    if [[ -s $logs/cuda.txt ]] && cmp -s "$logs/cpu.txt" "$logs/cuda.txt"; then
        printf 'generate --greedy %s: the text of the CPU\n' "$format"
        count 1 0
    else
        printf 'generate --greedy %s: another text than the CPU'"'"'s; %s\n' "$format" "$(tail -n 1 "$logs/cuda.err")"
        count 1 1
    fi
done

skipped=$(sort -u "$RIDGE_SKIPPED_TESTS" | wc -l)
cat "$RIDGE_SKIPPED_TESTS"
printf '%d passed, %d failed, %d skipped\n' $((passed - skipped)) "$failed" "$skipped"
exit $((failed > 0))
