#!/usr/bin/env bash
# Runs on a GPU what only a GPU can show, on a bare machine, from what pack.sh gathered. No network is used.
# Usage: deploy/gpu/first-light.sh [--kit FOLDER] [--out FOLDER] [STAGE...]     (all of them, in this order)
#
#   doctor     what works on this machine
#   device     the replayer's device tests on the GPU: every kernel and walk against the CPU, bits of 100 runs,
#              kernels of a user's, a communicator of one GPU
#   capture    the recorder's device tests
#   python     captures of torch and jax, heads that the GPU computed, replays on CPU and GPU (python/tests_gpu)
#   sanitizer  the kernels under compute-sanitizer, where it is installed
#   loss, reference, staging, step, loading, replay
#              the lines of `make bench-gpu`; the card's ceilings come with each of them
#
# FOLDER/first-light.json says of each stage how it ended; FOLDER/STAGE.log is its output. The exit code is 0 where
# all passed, 1 where one did not or ran into its deadline, 2 where the kit is incomplete. Without a GPU it only checks
# the kit and says so, with 0. DEADLINE_S (540) bounds each stage; OPTIONS go to the lines of the benchmark.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

kit=target/first-light out=target/first-light-out
fail() {
    echo "first-light.sh: $*" >&2
    exit 2
}

while [[ ${1:-} == --* ]]; do
    [[ $1 == --kit || $1 == --out ]] || fail "$1 is no option of it; see the top of $0"
    # Of an empty name a folder at the root would be made and emptied.
    [[ -n ${2:-} ]] || fail "$1 wants a folder"
    case $1 in
    --kit) kit=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
tests=(doctor device capture python sanitizer)
lines=(loss reference staging step loading replay)
stages=("$@")
((${#stages[@]})) || stages=("${tests[@]}" "${lines[@]}")
kit=$(realpath -m "$kit") out=$(realpath -m "$out")

for stage in "${stages[@]}"; do
    [[ " ${tests[*]} ${lines[*]} " == *" $stage "* ]] || fail "$stage is no stage; see the top of $0"
done

# Programs travel compressed.
programs=$out/bin
rm -rf "$programs" "$out/libraries"
mkdir -p "$programs" || exit 2
for packed in "$kit"/bin/*.gz; do
    [[ -e $packed ]] || continue
    program=$programs/$(basename "$packed" .gz)
    gzip -dc "$packed" >"$program" || fail "$packed is damaged: pack and carry it again"
    chmod +x "$program"
done
wanted=(replayer-tests dumper-tests)
[[ " ${stages[*]} " != *" reference "* ]] || wanted+=(reference)
for program in "${wanted[@]}"; do
    [[ -x $programs/$program ]] ||
        fail "$kit/bin/$program.gz is missing: make the kit with deploy/gpu/pack.sh, and carry it here"
    "$programs/$program" --help >/dev/null 2>"$out/start.log" ||
        fail "$program does not start here: $(tail -n 1 "$out/start.log")"
done

# Python packages of the kit, beside those of this machine's Python.
site=$out/site
rm -rf "$site"
python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" \
    "$kit"/wheels/*.whl || fail "the wheel of the kit does not install: see above"
for peer in "$kit"/peers/*.whl; do
    [[ -e $peer ]] || continue
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" \
        "$peer" || echo "first-light.sh: ${peer##*/} does not install: it will be a row with its reason" >&2
done
export PYTHONPATH=$site:$PWD/python/benches${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH PYTHONUNBUFFERED=1

# NVIDIA's libraries, as wheels of this Python have them: on no search path, and without the names that are asked for.
libraries=$out/libraries
mkdir -p "$libraries"
while read -r file; do
    ln -sf "$file" "$libraries/"
    name=${file##*/}
    ln -sf "$file" "$libraries/${name%%.so*}.so"
done < <(python3 -c '
from importlib import metadata
names = ("libnvrtc", "libcublas", "libnccl")
for wheel in metadata.distributions():
    for file in wheel.files or () if (wheel.metadata["Name"] or "").startswith("nvidia-") else ():
        if file.name.startswith(names) and ".so" in file.name and ".alt." not in file.name:
            print(wheel.locate_file(file).resolve())')
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    python3 -c 'import backtape; print("the kit is whole: backtape", backtape.__version__, "is installed from it")' ||
        fail "backtape cannot be imported from $site"
    echo "no GPU: nothing was run"
    exit 0
fi

failed=0 said=()
export programs out
for stage in "${stages[@]}"; do
    echo "== $stage"
    began=$SECONDS code=0
    timeout --kill-after 10 "${DEADLINE_S:-540}" deploy/gpu/stage.sh "$stage" >"$out/$stage.log" 2>&1 || code=$?
    ((code == 0)) || failed=1
    case $stage in
    doctor | loss | reference | staging | step | loading | replay) cat "$out/$stage.log" ;;
    *) tail -n "$((code ? 60 : 4))" "$out/$stage.log" ;;
    esac
    echo "== $stage ended with $code after $((SECONDS - began)) s"
    said+=("{\"stage\": \"$stage\", \"exit_code\": $code, \"seconds\": $((SECONDS - began)), \"log\": \"$stage.log\"}")
    (IFS=,; printf '{"stages": [%s]}\n' "${said[*]}") >"$out/first-light.json"
done
exit $failed
