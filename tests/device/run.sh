#!/usr/bin/env bash
# Runs the device tests of this folder, as many processes at a time as there are cores, and prints a table and a line of JSON. `cargo xtask pack-gpu` puts it
# beside the binary. Besides bash and coreutils it needs what the tests need: the card's driver, and for CUDA the toolkit, in CUDA_PATH or /usr/local/cuda.
#
# Exit status: 0 if all tests passed, 1 if one failed or gave no result, 2 for wrong arguments.
set -uo pipefail

usage="usage: run.sh [--device cuda|vulkan|flex|cpu] [--jobs N] [--timeout SECONDS] [--logs FOLDER] [FILTER]

  --device   what the tests run on (default: cuda)
  --jobs     processes at a time (default: the number of cores)
  --timeout  most seconds of a process (default: 480)
  --logs     folder for the output of each process (default: logs-DEVICE)
  FILTER     runs only tests whose names contain this, and prints no JSON

A process runs a group of tests, the part of their names after the device, and in slow groups one test. MARLIN_TEST_SEED sets the seed of the random data."

# Groups in which each test is a process of its own: nearly all of their time is the compilation of kernels on one core.
split=(marlin experts decode gptq layer lora pdl llama gemv kernels engine plans)
# Tests below these names compile the same kernels where the next part of their names is the same, and then run in one process.
together=(marlin::tiles)
# What takes longest, which starts first: on an H200 with 16 cores, from 367 seconds on downwards.
slowest=(
    mixtures marlin::tiles::int4 models convert fp8 marlin::tiles layer::forward_agrees_with_f64 experts::every_tile_agrees_with_f64
    experts::gradients_of_a_layer_are_those_of_float_weights pdl decode::attention llama::gptq_costs_less_than_rounding gptq
    lora::no_float_weight_between_the_passes
)
# Tests that run after all others, with the card for themselves: what a kernel reads too early depends on when the kernel before it ends.
alone=(pdl::a_kernel_reads_what_it_waits_for_and_otherwise_does_not)

fail() {
    echo "error: $1" >&2
    exit 2
}

cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
device=cuda jobs=$(nproc) limit=480 logs="" filter=""
while (($#)); do
    case $1 in
        -h | --help) echo "$usage" && exit 0 ;;
        --device | --jobs | --timeout | --logs)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --device) device=$2 ;;
                --jobs) jobs=$2 ;;
                --timeout) limit=$2 ;;
                --logs) logs=$2 ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; run.sh --help lists the options" ;;
        *) filter=$1 && shift ;;
    esac
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs: $jobs is no number of processes"
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--timeout: $limit is no number of seconds"
logs=${logs:-logs-$device}
rm -rf "$logs" cache && mkdir -p "$logs" cache || exit 2

export MARLIN_TEST_FILES=$PWD
export MARLIN_TEST_SEED=${MARLIN_TEST_SEED:-$(date +%s)}
if [[ $device == cuda ]]; then
    export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}
    export LD_LIBRARY_PATH=$CUDA_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# Prints the names of the tests, or with --ignored of those that run only when asked for, without the device in front.
list() {
    ./device --device "$device" --list "$@" 2>>"$logs/list.log" | sed -n "s/^$device::\(.*\): test$/\1/p"
}

commit="" state=""
[[ -r commit ]] && read -r commit state <commit
names=$(list) && ignored=$(list --ignored) || { cat "$logs/list.log" >&2; fail "the tests cannot be listed"; }

# The processes: the name of each is its group or its test.
declare -A tests_of=() group_of=() arguments_of=()
declare -a groups=() parallel=() last=()
add() { # queue, process, group, arguments, test
    local -n queue=$1
    [[ -v tests_of[$2] ]] || queue+=("$2")
    tests_of[$2]+="$5 "
    group_of[$2]=$3
    arguments_of[$2]=$4
}
contains() { # value, values
    local value=$1 other
    shift
    for other; do [[ $value == "$other" ]] && return 0; done
    return 1
}
is_below() { # name, prefixes; the last part of a prefix may be the beginning of one
    local name=$1 prefix
    shift
    for prefix; do [[ $name == "$prefix"* ]] && return 0; done
    return 1
}
# Prints the name of the process of a test that runs together with others, or nothing.
process_of() {
    local prefix rest
    for prefix in "${together[@]}"; do
        rest=${1#"$prefix"::}
        [[ $rest != "$1" ]] && echo "$prefix::${rest%%::*}"
    done
}
for group in $(printf '%s\n' "$names" | sed 's/::.*//' | sort -u); do
    groups+=("$group")
    for name in $names; do
        [[ ${name%%::*} == "$group" && $name == *"$filter"* ]] || continue
        if contains "$name" $ignored; then
            add last "$name" "$group" "--ignored --exact $device::$name" "$name"
        elif contains "$name" "${alone[@]}"; then
            add last "$name" "$group" "--exact $device::$name" "$name"
        elif [[ -z $filter ]] && process=$(process_of "$name") && [[ -n $process ]]; then
            add parallel "$process" "$group" "$device::$process::" "$name"
        elif [[ -n $filter ]] || contains "$group" "${split[@]}"; then
            add parallel "$name" "$group" "--exact $device::$name" "$name"
        else
            skipped=$(for other in "${alone[@]}"; do printf -- ' --skip %s' "$device::$other"; done)
            add parallel "$group" "$group" "$device::$group::$skipped" "$name"
        fi
    done
done
((${#tests_of[@]} > 0)) || fail "no test's name contains $filter"

# The longest first, and each once.
declare -A is_ordered=()
declare -a ordered=()
for prefix in "${slowest[@]}" ""; do
    for process in ${parallel[@]+"${parallel[@]}"}; do
        [[ -v is_ordered[$process] ]] && continue
        [[ -z $prefix ]] || is_below "$process" "$prefix" || continue
        is_ordered[$process]=1
        ordered+=("$process")
    done
done

# Runs a process and writes its exit status and its hundredths of a second.
run() {
    local file="$logs/${1//::/-}" begin=${EPOCHREALTIME/[.,]/} status word=ok
    # Bash says on its own standard error what signal a process died of.
    # shellcheck disable=SC2086
    {
        timeout --kill-after=10 "$limit" ./device --device "$device" ${arguments_of[$1]} --format json --logfile "$file.events" \
            >"$file.log" 2>&1 </dev/null
        status=$?
    } 2>/dev/null
    local time=$(((${EPOCHREALTIME/[.,]/} - begin) / 10000))
    echo "$status $time" >"$file.status"
    ((status == 124 || status == 137)) && word="TIMED OUT"
    ((status != 0)) && [[ $word == ok ]] && word=FAILED
    printf '%-9s %6d.%d s  %s\n' "$word" $((time / 100)) $((time / 10 % 10)) "$1"
}

begin=$SECONDS
card=$(nvidia-smi --query-gpu=name --format=csv,noheader --id=0 2>>"$logs/list.log")
[[ $device == flex || $device == cpu || -z $card ]] && card=$(sed -n 's/^model name[^:]*: //p;' /proc/cpuinfo | head -n 1)
echo "device $device, ${card:-unknown}, commit ${commit:-unknown}${state:+ $state}, seed $MARLIN_TEST_SEED, ${#tests_of[@]} processes, $jobs at a time"
running=0
for process in ${ordered[@]+"${ordered[@]}"}; do
    if ((running == jobs)); then
        wait -n
        running=$((running - 1))
    fi
    run "$process" &
    running=$((running + 1))
done
wait
for process in ${last[@]+"${last[@]}"}; do run "$process"; done
seconds=$((SECONDS - begin))

# What the events of each process say of each of its tests.
declare -A passed=() failed=() count=() longest=() total=()
declare -a failures=()
for process in "${!tests_of[@]}"; do
    group=${group_of[$process]} file="$logs/${process//::/-}"
    read -r status time <"$file.status"
    count[$group]=$((${count[$group]:-0} + 1))
    total[$group]=$((${total[$group]:-0} + time))
    ((time > ${longest[$group]:-0})) && longest[$group]=$time
    # A process that has crashed at once has none.
    [[ -e $file.events ]] || : >"$file.events"
    before=${#failures[@]}
    for name in ${tests_of[$process]}; do
        event=$(sed -n "s/.*\"name\": \"$device::$name\", \"event\": \"\([a-z]*\)\".*/\1/p" "$file.events")
        if [[ $event == ok ]]; then
            passed[$group]=$((${passed[$group]:-0} + 1))
        else
            failed[$group]=$((${failed[$group]:-0} + 1))
            failures+=("$device::$name: ${event:-no result, exit status $status after $((time / 100)) s}, $file.log")
        fi
    done
    if ((status != 0 && ${#failures[@]} == before)); then
        failed[$group]=$((${failed[$group]:-0} + 1))
        failures+=("$device::$process: its tests passed, but it ended with exit status $status, $file.log")
    fi
done

row() { printf '%-12s %7s %7s %10s %12s %10s\n' "$@"; }
echo
row group passed failed processes "longest s" "sum s"
all_passed=0 all_failed=0
for group in "${groups[@]}"; do
    [[ -v count[$group] ]] || continue
    row "$group" "${passed[$group]:-0}" "${failed[$group]:-0}" "${count[$group]}" $((${longest[$group]:-0} / 100)) $((${total[$group]} / 100))
    all_passed=$((all_passed + ${passed[$group]:-0}))
    all_failed=$((all_failed + ${failed[$group]:-0}))
done
row all "$all_passed" "$all_failed" "${#tests_of[@]}" "" "$seconds"
if ((all_failed > 0)); then
    printf '\nfailed:\n'
    printf '%s\n' "${failures[@]}" | sort
fi
if [[ -z $filter ]]; then
    printf '\n{"device": "%s", "commit": "%s", "uncommitted_changes": %s, "card": "%s", "date": "%s", "passed": %d, "failed": %d, "seconds": %d, "cores": %d, "jobs": %d}\n' \
        "$device" "${commit:-unknown}" "$([[ -n $state ]] && echo true || echo false)" "${card:-unknown}" "$(date -u +%F)" \
        "$all_passed" "$all_failed" "$seconds" "$(nproc)" "$jobs" | tee "$logs/result.json"
fi
((all_failed == 0))
