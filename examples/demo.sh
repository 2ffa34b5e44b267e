#!/usr/bin/env bash
# The main job: one training step on four ranks, three times, and the post-mortem of each.
# Usage: examples/demo.sh [folder for the dumps]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
replay=${REPLAY:-.venv/bin/replay}
dumps=${1:-demo}

rm -rf "$dumps"
mkdir -p "$dumps"

train() {
    local name=$1
    shift
    echo "== train $name: step 0 is recorded into $dumps/$name"
    BACKTAPE_STEPS=0 BACKTAPE_DIR="$dumps/$name" BACKTAPE_STRICT=1 \
        "$python" examples/train_jax.py --launch 4 --steps 1 --rows 16 "$@" | tee "$dumps/$name.log"
}

# Runs replay and insists on its exit code: the demo is also a test.
expect() {
    local wanted=$1 code=0
    shift
    echo
    echo "\$ replay $*"
    "$replay" "$@" || code=$?
    echo "exit code $code"
    if [ "$code" != "$wanted" ]; then
        echo "demo: replay was expected to end with $wanted" >&2
        exit 1
    fi
}

train fused-defect --use-fused-xent-loss true --label-gather bf16
train fused-fixed --use-fused-xent-loss true --label-gather f32
train plain --use-fused-xent-loss false

echo
echo "== the same loss, another grad_norm"
for name in fused-defect fused-fixed plain; do
    printf '%-13s %s\n' "$name" "$(grep -o 'loss=.*' "$dumps/$name.log")"
done

for name in fused-defect fused-fixed plain; do
    expect 0 verify --dump "$dumps/$name"
done >"$dumps/verify.txt"
echo
echo "== round trip proved for all three: $dumps/verify.txt"

expect 1 --dump "$dumps/fused-defect" --step 0 --compare dq,dk,label_logits --json "$dumps/fused-defect.json"
expect 0 --dump "$dumps/fused-fixed" --step 0 --compare dq,dk,label_logits
expect 0 --dump "$dumps/plain" --step 0 --compare dq,dk,label_logits
expect 1 --dump "$dumps/fused-defect" --against "$dumps/plain" --step 0 --compare dq,dk,label_logits

"$python" - "$dumps/fused-defect.json" <<'EOF'
import json, sys
first = json.load(open(sys.argv[1]))["first_divergence"]
assert first["stage"] == "dk_label", first
print("\ndemo: the defect was placed at", first["stage"])
EOF
