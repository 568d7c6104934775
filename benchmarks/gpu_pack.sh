#!/usr/bin/env bash
# Fill FOLDER (default .gpu, which git ignores) with what a GPU machine without a package index needs: CIFAR-10 as
# given, and the packages that PyTorch's own images lack: site.txz for bcnet and Torch-Pruning, modelopt.txz for FastNAS.
#
#     benchmarks/gpu_pack.sh CIFAR10_FOLDER [FOLDER]
#
# There: mkdir -p ~/site && cat .gpu/*.txz | tar xJi -C ~/site && PYTHONPATH=$PWD:$HOME/site python3 benchmarks/...
set -euo pipefail
cifar=$1
out=$(realpath -m "${2:-.gpu}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pack() { # NAME PACKAGE...: the packages, unpacked and without what nobody imports, as NAME.txz
    local name=$1 site=$work/$1
    shift
    mkdir -p "$site"
    pip download --quiet --dest "$site.wheels" --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 "$@"
    for wheel in "$site.wheels"/*.whl; do unzip -q -o "$wheel" -d "$site"; done
    find "$site"/pygments/lexers -name '*.py' ! -name '_*' ! -name 'python.py' ! -name 'diff.py' -delete 2>/dev/null || true
    rm -rf "$site"/pulp/solverdir "$site"/modelopt/{onnx,deploy} "$site"/modelopt/torch/puzzletron
    find "$site" -name '*.so*' -exec strip -s {} +
    find "$site" \( -name '*.cpp' -o -name '*.c' -o -name '*.pyx' -o -name '*.pyi' \) -delete
    find "$site" -type d \( -name tests -o -name licenses \) -prune -exec rm -rf {} +
    XZ_OPT=-9e tar cJf "$out/$name.txz" -C "$site" --sort=name .
}

mkdir -p "$out/cifar10"
pack site torch-pruning==1.6.1 \
    pymoo==0.6.2 moocore cffi pycparser platformdirs alive-progress about-time graphemeu \
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection typing-extensions \
    typer rich markdown-it-py mdurl shellingham click annotated-doc pygments
pack modelopt nvidia-modelopt==0.47.0 torchprofile==0.0.4 'pulp<4' omegaconf nvidia-ml-py \
    requests urllib3 idna certifi charset-normalizer
cp "$cifar"/*.parquet "$out/cifar10/"
chmod u+w "$out"/cifar10/*
du -ab "$out" | sort -n
