#!/usr/bin/env bash
# One stage of first-light.sh, which has unpacked programs to $programs, writes to $out and has set the search paths.
set -uo pipefail
: "${programs:?is set by first-light.sh}" "${out:?is set by first-light.sh}"

# A crate's device tests on the GPU. Those of the stand-in are another machine's.
device_tests() {
    BACKTAPE_TEST_GPU=1 BACKTAPE_TEST_NVRTC=1 "$programs/$1" device:: --skip standin
}

case $1 in
doctor)
    python3 -m backtape doctor && nvidia-smi
    ;;
device)
    device_tests replayer-tests
    ;;
capture)
    device_tests dumper-tests
    ;;
python)
    BACKTAPE_TEST_GPU=1 python3 -m pytest -q -p no:cacheprovider python/tests_gpu
    ;;
sanitizer)
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not installed: nothing was run"
        exit 0
    fi
    # A hundred runs of the same bits add nothing here and take hours.
    BACKTAPE_TEST_GPU=1 compute-sanitizer --error-exitcode 7 "$programs/replayer-tests" \
        on_cuda --skip same_bits --test-threads 1
    ;;
*)
    # shellcheck disable=SC2086 # several words
    python3 -m gpu --lines "$1" --reference "$programs/reference" --xla-python "$(command -v python3)" \
        --json "$out/$1.json" ${OPTIONS:-}
    ;;
esac
