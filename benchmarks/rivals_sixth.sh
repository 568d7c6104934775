#!/usr/bin/env bash
# The sixth comparison (docs/results/rivals.md) in one call on a GPU machine, after benchmarks/gpu_pack.sh:
#
#     benchmarks/rivals_sixth.sh OUT SECONDS [PYTHON...]
#
# One process trains the given network, searches and races; when the network is there, FastNAS chooses beside it in a
# second process, and a third makes and trains the others. Rows of all three are collected in OUT/rows.jsonl.
set -uo pipefail
out=$1 seconds=$2
shift 2
python=("${@:-python3}")
here=$(dirname "$0") data=.gpu/cifar10 budget=44M recipe=$budget:5:0.01
fixed=uniform,tp-isomorphic-fpgm,tp-global-l2,tp-global-fpgm
mkdir -p "$out"/{ours,fastnas,fixed}
for side in fastnas fixed; do ln -sfn ../ours/base "$out/$side/base"; done

compare() { # SIDE JOB...: rivals_fifth.py in its own folder, within what is left of the seconds
    local side=$1
    shift
    "${python[@]}" "$here/rivals_fifth.py" --data $data --out "$out/$side" --seconds $((seconds - SECONDS)) --jobs "$@" \
        >>"$out/$side.txt" 2>&1
}
plan() { # SIDE METHOD FLAGS...
    local side=$1 method=$2
    shift 2
    python3 "$here/rivals.py" plan --base "$out/ours/base" --networks mobilenetv2_cifar --budgets $budget --data $data \
        --methods "$method" --out "$out/$side/plan-$method.json" "$@" >>"$out/$side.txt" 2>&1
}
fixed_rivals() {
    local method
    for method in ${fixed//,/ }; do OMP_NUM_THREADS=2 plan fixed "$method" --device cpu & done
    wait
    compare fixed "rivals:$recipe:$fixed"
    compare fixed "rivals:$budget:20:0.02:uniform,tp-isomorphic-fpgm,tp-global-l2"
}
fastnas_rival() {
    OMP_NUM_THREADS=2 plan fastnas fastnas
    compare fastnas "rivals:$recipe:fastnas"
    compare fastnas "rivals:$budget:20:0.02:fastnas"
}
ours() {
    compare ours "search:$budget" "bcnet:$recipe" "rivals:$recipe:bcnet-uniform" "bcnet:$budget:20:0.02"
}

compare ours base:90:0
fastnas_rival &
fixed_rivals &
ours &
wait
cat "$out"/{ours,fastnas,fixed}/rows.jsonl >"$out/rows.jsonl"
echo "in all $SECONDS s"
