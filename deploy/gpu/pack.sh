#!/usr/bin/env bash
# Gathers what first-light.sh needs on a machine with a GPU and without a network, a Rust toolchain or pip's index.
# Usage: deploy/gpu/pack.sh [--quick] [FOLDER]      (target/first-light)
#
# It builds here: the device tests of both crates, the benchmark of the f64 reference and the wheel; and downloads
# the wheels of the peers for the Python of that machine (PYTHON_THERE, 3.12). What cannot be downloaded is said and
# left out. --quick takes the wheel of the development profile and leaves out benchmark and peers.
set -euo pipefail
cd "$(dirname "$0")/../.."

quick=
if [[ ${1:-} == --quick ]]; then
    quick=1
    shift
fi
kit=${1:-target/first-light}
if [[ $kit == -* ]]; then
    echo "pack.sh: $kit is no option of it; see the top of $0" >&2
    exit 2
fi
there=${PYTHON_THERE:-3.12}
peers=python/requirements-bench-gpu.txt

# The program that a build of cargo's ended with, without its symbols.
program() {
    local name=$1 built
    shift
    built=$(cargo "$@" --locked --no-run --message-format json |
        python3 -c 'import json, sys
found = [line for line in map(json.loads, sys.stdin) if line.get("executable")]
print([line["executable"] for line in found if line["target"]["kind"][0] in ("lib", "bench")][-1])')
    strip -s -o "$kit/bin/$name" "$built"
    gzip -9f "$kit/bin/$name"
}

rm -rf "${kit:?}/bin" "$kit/wheels" "$kit/peers"
mkdir -p "$kit/bin" "$kit/wheels" "$kit/peers"
program replayer-tests test -p backtape-replayer --lib
program dumper-tests test -p backtape-dumper --lib
if [[ -n $quick ]]; then
    make .venv/.wheel-dev
    cp .venv/wheels-dev/*.whl "$kit/wheels/"
else
    program reference bench -p backtape-replayer --bench device
    make wheel
    cp .venv/wheels/*.whl "$kit/wheels/"
    # A wheel of any glibc up to that machine's; what is no wheel is built here, which takes pure Python alone.
    platforms=(manylinux2014_x86_64)
    for minor in $(seq 17 39); do platforms+=("manylinux_2_${minor}_x86_64"); done
    grep -v '^#' "$peers" | while read -r peer; do
        how=(download --only-binary=:all: --python-version "$there" --implementation cp "${platforms[@]/#/--platform=}"
            -d "$kit/peers")
        [[ $peer == https:* ]] && how=(wheel -w "$kit/peers")
        python3 -m pip "${how[@]}" --quiet --disable-pip-version-check --no-deps "$peer" ||
            echo "pack.sh: $peer is left out: it can't be had for Python $there from here" >&2
    done
fi
du -sh "$kit"
