#!/usr/bin/env bash
# Fetches a run's dumps from the host that holds them, and verifies them here.
#
#   deploy/collect.sh [--replay PATH] [--ssh-config FILE] [--ssh-option WORD] HOST RUN-DIRECTORY DIR
#
# The run comes to DIR/.RUN.part file by file and takes its name DIR/RUN when it is whole and on disk. Called
# again after an interruption it asks only for the files that are not there in full. It replaces nothing.
#
# Exit code: 0 fetched, every step verified; 3 fetched, but a step is incomplete or corrupt, as it is there
# (replay verify says how); 2 wrong usage or environment; 1 not fetched.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=hosts.sh
source "$here/hosts.sh"

replay=replay
while (($# > 3)); do
    case $1 in
    --replay) replay=$2 ;;
    --ssh-config) ssh+=(-F "$2") ;;
    --ssh-option) ssh+=(-o "$2") ;;
    *) break ;;
    esac
    shift 2
done
if (($# != 3)); then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
host=$1 run_dir=$2 into=$3
[[ $host != -* && $run_dir == /* ]] || { tell "give a host, and the run's directory there from the root"; exit 2; }
type -P "$replay" >/dev/null || { tell "$replay is not here to verify what is fetched: --replay PATH"; exit 2; }
run=$(basename -- "$run_dir")
whole=$into/$run part=$into/.$run.part
[[ ! -e $whole ]] || { tell "$whole is there already: choose another folder"; exit 2; }
umask 077

# Asks the host with a program for its bash; `run_dir` and what else is named are its settings.
ask() {
    local program=$1
    shift
    { settings run_dir; printf '%s\n' "$program"; (($# == 0)) || cat -- "$@"; } |
        "${ssh[@]}" "${ssh_defaults[@]}" -- "$host" 'exec bash -s'
}

# `SIZE ./path`, each ended by a NUL: names of a run hold no newline, a stray file's might.
sizes_of() { (cd -- "$1" && find . -type f -printf '%s %p\0' | LC_ALL=C sort -z); }

fetch() {
    # shellcheck disable=SC2016 # expanded there
    ask 'cd -- "$run_dir" && find . -type f -printf "%s %p\0"; exit' | LC_ALL=C sort -z >"$part.there" || return
    sizes_of "$part" >"$part.here"
    LC_ALL=C comm -z -23 "$part.there" "$part.here" | sed -z 's/^[0-9]* //' >"$part.wanted"
    [[ -s $part.wanted ]] || return 0
    # shellcheck disable=SC2016 # expanded there
    ask 'cd -- "$run_dir" && tar --null --no-recursion --verbatim-files-from -T - -cf -; exit' "$part.wanted" |
        tar -C "$part" --no-same-owner -xf - || return
    sizes_of "$part" >"$part.here"
    cmp -s "$part.there" "$part.here"
}

# shellcheck disable=SC2016 # expanded there
there=$(ask '[[ -d $run_dir ]] && echo yes; exit 0') || { tell "$host cannot be asked for $run_dir"; exit 1; }
[[ $there == yes ]] || { tell "there is no $run_dir on $host: nothing was recorded there"; exit 1; }
mkdir -p -- "$part"
code=0
# A second round is for files that grew or went while they were read; what never comes to rest is said.
fetch || fetch || {
    tell "$run_dir on $host was not fetched in full: $part keeps what came, call this again"
    exit 1
}
sync -f -- "$part"
rm -f -- "$part.there" "$part.here" "$part.wanted"
mv -T -- "$part" "$whole"
sync -f -- "$into"
tell "fetched $host:$run_dir to $whole, $(du -sh -- "$whole" | cut -f1)"

shopt -s nullglob
steps=0
for step_dir in "$whole"/step-* "$whole"/attempt-*/step-*; do
    words=(--dump "$whole" --step "$((10#${step_dir##*/step-}))")
    attempt=${step_dir%/step-*}
    [[ $attempt != */attempt-* ]] || words+=(--attempt "$((10#${attempt##*/attempt-}))")
    steps=$((steps + 1))
    if said=$("$replay" verify "${words[@]}" 2>&1); then
        tell "verified: ${words[*]:2}"
    else
        code=3
        printf '%s\n' "$said"
        tell "${words[*]:2} is not whole, as it is on $host: see above"
    fi
done
((steps > 0)) || { tell "$whole holds no step: nothing was recorded"; code=3; }
exit "$code"
