# shellcheck shell=bash
# The connections of run.sh: one ssh for each host and one for the coordinator, each with guard.sh at its
# other end, and the queue in which they all say what happened.
#
# ssh's stdin is a pipe that only run.sh keeps open: when run.sh is killed, whatever the signal, it closes,
# and the guards end their ranks. Sourced by run.sh and collect.sh; starts nothing by itself.
# shellcheck disable=SC2034,SC2154 # run.sh and this file share their variables

# shellcheck source-path=SCRIPTDIR source=queue.sh
source "$here/queue.sh"

# The caller's words for ssh come first, because ssh takes the first of several; and the same as options
# of collect.sh. A host that stopped answering is noticed within a minute; nobody is asked for a password.
ssh=(ssh) ssh_words=()
ssh_defaults=(-T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4
    -o ControlMaster=no -o ControlPath=none)

# By connection: where its guard listens, ssh's process, when it was last heard of, whether there was a guard
# at all, whether it said that nothing is left.
declare -A lines=() ssh_pid=() heard_at=() begun=() clean=()
connections=()
stopping='' closing='' failure=0 coordinator_state='' credentials_made='' forced_at=0 beat=0 interrupted=''
# A line this often tells a guard that run.sh lives.
BEAT_SECONDS=5

tell() { printf '[backtape] %s\n' "$*" >&2; }

# `name=value` for each variable named, such that another bash reads the same.
settings() {
    local name
    for name; do printf '%s=%q\n' "$name" "${!name}"; done
}

# The same for an array.
array() {
    local name=$1
    shift
    printf '%s=(' "$name"
    (($# == 0)) || printf '%q ' "$@"
    printf ')\n'
}

prepare() {
    umask 077
    tmp=$(mktemp -d "${TMPDIR:-/tmp}/backtape-run.XXXXXX")
    mkfifo "$tmp/queue"
    exec {queue}<>"$tmp/queue"
    launch=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    trap 'rm -rf -- "$tmp"' EXIT
    local signal
    for signal in INT TERM HUP; do
        # shellcheck disable=SC2064 # the signal's name is known now
        trap "interrupt $signal" "$signal"
    done
}

interrupt() {
    [[ -z $interrupted ]] || forced_at=1
    interrupted=$1
}

name_of() {
    if [[ $1 == C ]]; then echo "the coordinator's host ${hosts[0]}"; else echo "H$1 (${hosts[$1]})"; fi
}

# One write a line; what a login shell says of itself gets the host's prefix.
relayed() {
    if command -v perl >/dev/null; then
        exec perl -e 'my $p = shift; while (my $line = <STDIN>) { chomp $line;
            $line = "$p $line" unless $line =~ /\A\[backtape\]\[H/; syswrite STDOUT, "$line\n" or last }' "$1"
    fi
    local text
    while IFS= read -r text || [[ -n $text ]]; do
        [[ $text == '[backtape][H'* ]] || text="$1 $text"
        printf '%s\n' "$text"
    done
}

# What a guard says goes into the queue, what anybody else says to the terminal.
heard() {
    local text
    while IFS= read -r text || [[ -n $text ]]; do
        case $text in
        'backtape-guard '*) echo "$1 ${text#backtape-guard }" >&"$queue" ;;
        *) printf '[backtape][H%s] %s\n' "${1/C/0}" "$text" >&2 ;;
        esac
    done
}

# Opens a connection and gives it its program. Whoever reads the queue hears of its end.
connect() {
    local conn=$1 host=$2 program=$3 line other
    ((${#program} < 60000)) || { fail 2 "command and environment are too long to send: ${#program} bytes"; return; }
    mkfifo "$tmp/line.$conn"
    exec {line}<>"$tmp/line.$conn"
    lines[$conn]=$line
    (
        trap '' INT HUP
        trap - EXIT TERM
        # Only run.sh holds the other ends.
        for other in "${lines[@]}"; do exec {other}>&-; done
        set +e
        exec {out}> >(relayed "[backtape][H${conn/C/0}]")
        (
            exec <"$tmp/line.$conn" 2>&1 >&"$out" {out}>&-
            echo "$conn ssh $BASHPID" >&"$queue"
            exec {queue}>&-
            exec "${ssh[@]}" "${ssh_defaults[@]}" -- "$host" 'exec bash -s'
        ) | heard "$conn"
        code=${PIPESTATUS[0]}
        printer=$!
        exec {out}>&-
        wait "$printer"
        echo "$conn gone $code" >&"$queue"
    ) &
    connections+=("$conn")
    heard_at[$conn]=$SECONDS
    printf '%s\n' "$program" >&"$line"
}

# Ranks' hosts whose connection is there still.
ranks_alive() {
    local others=("${!lines[@]}")
    ((${#others[@]} > ${lines[C]:+1}+0))
}

hang_up() {
    local line=${lines[$1]-}
    [[ -n $line ]] || return 0
    exec {line}>&-
    unset "lines[$1]"
}

# The first failure is the one that counts; all ranks end with it.
fail() {
    if [[ -z $stopping ]]; then
        failure=$1
        tell "$2"
    fi
    stop_ranks
}

stop_ranks() {
    local conn
    [[ -z $stopping ]] || return 0
    stopping=1
    forced_at=$((SECONDS + grace + 20))
    for conn in "${!lines[@]}"; do
        [[ $conn == C ]] || printf 'stop\n' >&"${lines[$conn]}"
    done
}

# One word of the queue, or a second without one; keeps the guards assured.
pump() {
    local conn line what rest
    if next_line 1 "$queue"; then
        IFS=' ' read -r conn what rest <<<"$line"
        event "$conn" "$what" "$rest"
    fi
    if [[ -n $interrupted && -z $stopping ]]; then
        fail "$((128 + $(kill -l "$interrupted")))" "stopped by SIG$interrupted: ending the ranks"
    fi
    if ((SECONDS >= beat)); then
        beat=$((SECONDS + BEAT_SECONDS))
        for conn in "${!lines[@]}"; do
            printf '.\n' >&"${lines[$conn]}"
            ((SECONDS - heard_at[$conn] <= lost_after)) || kill "${ssh_pid[$conn]-}" 2>/dev/null || true
        done
    fi
    if ((forced_at > 0 && SECONDS >= forced_at)); then
        forced_at=$((SECONDS + 5))
        for conn in "${!lines[@]}"; do
            [[ $conn == C && -z $closing ]] || kill "${ssh_pid[$conn]-}" 2>/dev/null || true
        done
    fi
}

event() {
    local conn=$1 what=$2 rest=$3
    heard_at[$conn]=$SECONDS
    [[ $what == ssh || $what == gone ]] || begun[$conn]=1
    case $what in
    ssh) ssh_pid[$conn]=$rest ;;
    started | alive) ;;
    ended)
        local rank=${rest% *} code=${rest##* }
        if [[ $rank == coordinator ]]; then
            if [[ $coordinator_state == ready && -z $closing ]]; then
                tell "the coordinator ended with $code: training goes on, recording does not"
            fi
            coordinator_state=${coordinator_state:-ended}
        elif [[ $code != 0 ]]; then
            fail "$code" "rank $rank on $(name_of "$conn") ended with $code$(signal_of "$code"): ending the others"
        fi ;;
    done) clean[$conn]=1 ;;
    gone)
        hang_up "$conn"
        [[ $conn != C ]] || coordinator_state=${coordinator_state:-ended}
        [[ -z ${clean[$conn]-} ]] || return 0
        if [[ -z ${begun[$conn]-} ]]; then
            fail 255 "$(name_of "$conn") cannot be used: ssh ended with $rest"
        elif [[ $conn != C ]]; then
            fail 255 "$(name_of "$conn") is lost: ssh ended with $rest before its ranks did; ending the others"
        elif [[ -z $closing ]]; then
            tell "the connection to $(name_of C) ended with $rest: training goes on, recording does not"
        fi ;;
    ready) coordinator_state=${coordinator_state:-ready} ;;
    unready)
        tell "no coordinator answers at $coordinator_at: $rest"
        coordinator_state=${coordinator_state:-unready} ;;
    cannot)
        clean[$conn]=1
        fail 2 "$(name_of "$conn") cannot $rest" ;;
    credentials) credentials_made+="$rest"$'\n' ;;
    left) tell "$(name_of "$conn"): $rest processes that outlived their ranks were ended" ;;
    stays) tell "$(name_of "$conn"): cannot be ended, look after them: $rest" ;;
    *) tell "$(name_of "$conn"): $what $rest" ;;
    esac
}

signal_of() { (($1 <= 128 || $1 > 192)) || printf ' (SIG%s)' "$(kill -l "$(($1 - 128))")"; }

# Waits for the guards' ends, then the coordinator's, and looks after hosts whose guard said no farewell.
finish() {
    local conn
    while ranks_alive; do pump; done
    closing=1
    if [[ -n ${lines[C]-} ]]; then
        forced_at=$((SECONDS + grace + 20))
        printf 'stop\n' >&"${lines[C]}"
        while [[ -n ${lines[C]-} ]]; do pump; done
    fi
    for conn in "${connections[@]}"; do
        [[ -n ${clean[$conn]-} || -z ${begun[$conn]-} ]] || sweep_again "$conn"
    done
}

# A guard that was killed, or a connection that broke, left ranks behind: once more, on a new one.
sweep_again() {
    local conn=$1 unit=$1 host=${hosts[${1/C/0}]} said
    [[ $conn == C ]] || unit=H$conn
    # shellcheck disable=SC2016 # expanded there
    local end='sweep; rm -rf -- "$private"; exit 0'
    if said=$({ settings launch unit; cat "$here/queue.sh" "$here/guard.sh"; echo "$end"; } |
        "${ssh[@]}" "${ssh_defaults[@]}" -- "$host" 'exec bash -s' 2>&1); then
        tell "$(name_of "$conn") was looked at again: ${said:-nothing of the job is left there}"
    else
        tell "$(name_of "$conn") cannot be asked whether ranks are left: they end by themselves $lost_after s" \
            "after they heard the last of this, unless their guard was killed (${said##*$'\n'})"
    fi
}
