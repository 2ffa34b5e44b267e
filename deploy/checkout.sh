# shellcheck shell=bash
# --ref of run.sh: the same commit on every host, or on none.
#
# First every host is asked: is the tree clean, and which commit is meant there? Only when all answer the
# same does any of them change. Sourced by run.sh.
# shellcheck disable=SC2154 # run.sh's variables

# What a host does: phase `ask` changes nothing but what git knows of its remote.
on_host() {
    cd -- "$work_dir" 2>/dev/null || { echo "there is no directory $work_dir"; return 1; }
    git rev-parse --git-dir >/dev/null 2>&1 || { echo "$work_dir is no git checkout"; return 1; }
    local dirty remote meant
    dirty=$(git status --porcelain --untracked-files=no) || return 1
    if [[ -n $dirty ]]; then
        echo "$work_dir has changes that are not committed: commit or stash them there (${dirty//$'\n'/, })"
        return 1
    fi
    if [[ $phase == checkout ]]; then
        git checkout --quiet --detach "$commit" -- && git rev-parse HEAD
        return
    fi
    remote=$(git remote | head -n 1)
    if [[ -n $remote ]]; then
        git fetch --quiet --tags --force "$remote" || { echo "git fetch $remote failed in $work_dir"; return 1; }
    fi
    # A branch means the remote's: the one that is here may be old.
    for meant in ${remote:+"refs/remotes/$remote/$ref"} "$ref"; do
        git rev-parse --verify --quiet "$meant^{commit}" && return
    done
    echo "$work_dir has no commit $ref"
    return 1
}

# Runs a phase on every host at once; each one's answer is in $tmp/ref.N.
everywhere() {
    local i phase=$1 commit=$2 pids=() failed=0 answer
    for ((i = 0; i < ${#hosts[@]}; i++)); do
        { settings work_dir ref phase commit; declare -f on_host; echo 'on_host; exit'; } |
            "${ssh[@]}" "${ssh_defaults[@]}" -- "${hosts[i]}" 'exec bash -s' >"$tmp/ref.$i" 2>"$tmp/ref.err.$i" &
        pids+=($!)
    done
    for ((i = 0; i < ${#hosts[@]}; i++)); do
        wait "${pids[i]}" && continue
        answer=$(tail -n 1 "$tmp/ref.$i")
        tell "$(name_of "$i"): ${answer:-$(tail -n 1 "$tmp/ref.err.$i")}"
        failed=1
    done
    ((failed == 0))
}

check_out_everywhere() {
    local i commit other
    everywhere ask '' || { tell "nothing was checked out anywhere, and nothing started"; exit 2; }
    commit=$(tail -n 1 "$tmp/ref.0")
    for ((i = 1; i < ${#hosts[@]}; i++)); do
        other=$(tail -n 1 "$tmp/ref.$i")
        [[ $other == "$commit" ]] && continue
        tell "$1 means $commit on $(name_of 0) and $other on $(name_of "$i"): give the commit itself"
        exit 2
    done
    everywhere checkout "$commit" || { tell "not every host could check out $commit: nothing was started"; exit 2; }
    tell "every host is at $commit"
}
