#!/usr/bin/env bash
# The sixth comparison (docs/results/rivals.md) on a GPU machine, after benchmarks/gpu_pack.sh:
#
#     benchmarks/rivals_sixth.sh OUT SECONDS [PYTHON...]
#
# OUT/base holds the given network (rivals_base.py). First bcnet and uniform have the GPU to themselves, so that their
# seconds are their own; then FastNAS chooses in a second process while the others are trained. Rows of all are collected
# in OUT/rows.jsonl; a second call goes on in the folder that the first one left, and ends with equal seconds.
set -uo pipefail
out=$1 seconds=$2
shift 2
python=("${@:-python3}")
here=$(dirname "$0") data=.gpu/cifar10 budget=44M recipe=$budget:20:0.02
fixed=tp-isomorphic-fpgm,tp-global-l2
mkdir -p "$out"/{ours,fixed}
for side in ours fixed; do ln -sfn ../base "$out/$side/base"; done

compare() { # SIDE JOB...: rivals_fifth.py in its own folder, within what is left of the seconds
    local side=$1
    shift
    "${python[@]}" "$here/rivals_fifth.py" --data $data --out "$out/$side" --seconds $((seconds - SECONDS)) --jobs "$@" \
        >>"$out/$side.txt" 2>&1
}
plan() { # SIDE METHOD FLAGS...
    local side=$1 method=$2 file="$out/$1/plan-$2.json"
    shift 2
    [[ -s $file ]] || python3 "$here/rivals.py" plan --base "$out/base" --networks mobilenetv2_cifar --budgets $budget \
        --data $data --methods "$method" --out "$file" "$@" >>"$out/$side.txt" 2>&1
}
plan fixed uniform --device cpu && cp "$out/fixed/plan-uniform.json" "$out/ours/"
(for method in ${fixed//,/ }; do OMP_NUM_THREADS=2 plan fixed "$method" --device cpu; done) &
planned=$!
compare ours "search:$budget" "bcnet:$recipe" "rivals:$recipe:uniform"
echo "bcnet and uniform: $SECONDS s"
OMP_NUM_THREADS=2 plan fixed fastnas &
wait $planned
compare fixed "rivals:$recipe:tp-isomorphic-fpgm" wait:fastnas "rivals:$recipe:fastnas" "rivals:$recipe:tp-global-l2"
wait
echo "others: $SECONDS s"
compare ours "equal:$recipe:uniform" "rivals:$recipe:bcnet-uniform"
cat "$out"/{ours,fixed}/rows.jsonl >"$out/rows.jsonl"
echo "in all $SECONDS s"
