# shellcheck shell=bash
# What run.sh sends to a host, and `bash -s` there reads from ssh: starts this host's ranks (or the
# coordinator), tells run.sh how each ends, and leaves nothing behind.
#
# stdin    this program and its settings; then a line every few seconds while run.sh lives, which is
#          answered by `alive`; `stop` to end
# stdout   lines of the ranks, each with its prefix
# stderr   `backtape-guard WORD ...`: what happened; anything else is somebody's complaint
#
# Three things end the ranks: one of them fails, run.sh says so, or run.sh is heard no more (its end of
# stdin closes when it is killed; a line that does not come in time is a network that is gone).
#
# shellcheck disable=SC2154 # run.sh sends the settings, then queue.sh, before this program
# Settings, as variables: launch host_index host_count work_dir setup grace lost_after first_rank ranks
# world_size ranks_total master_address master_port command[] variables[] of ranks; unit credentials.

say() { printf 'backtape-guard %s\n' "$*" >&2; }

# One write a line, so that lines of two ranks never run into each other. A progress bar that
# redraws its line shows as its last state.
prefixed() {
    if command -v perl >/dev/null; then
        exec perl -e 'my $p = shift; while (my $line = <STDIN>) { $line =~ s/\r?\n?\z//; $line =~ s/.*\r//s;
            $line = "$p $line" unless $line =~ /\A\[backtape\]\[H/ && $p =~ /coordinator/;
            syswrite STDOUT, "$line\n" or last }' "$1"
    fi
    local line
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line%$'\r'}
        [[ $1 == *coordinator* && $line == '[backtape][H'* ]] || line="$1 ${line##*$'\r'}"
        printf '%s\n' "$line"
    done
}

# This user's processes that this guard's unit of the launch began, whatever session they moved to: all of
# a rank's descendants inherit the variable. The guard itself does not have it.
of_launch() { grep -lzxF "BACKTAPE_GUARD=$launch.$unit" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }

# Ends what the launch left on this host: first politely, then for good. Says how many there were.
sweep() {
    local pids round left=0
    for ((round = 0; round < 30; round++)); do
        pids=$(of_launch)
        [[ -n $pids ]] || break
        ((round > 0)) || left=$(wc -w <<<"$pids")
        # shellcheck disable=SC2086 # one word for each process
        kill "-$( ((round < 10)) && echo TERM || echo KILL)" $pids 2>/dev/null
        sleep 0.1
    done
    ((left == 0)) || say "left $left"
    pids=$(of_launch | tr '\n' ' ')
    [[ -z $pids ]] || say "stays $pids"
}

# What a rank is told of its place, in the words of torch, of jax and of backtape's examples.
place_of() {
    export RANK=$1 LOCAL_RANK=$2 WORLD_SIZE=$ranks_total LOCAL_WORLD_SIZE=$ranks
    export NODE_RANK=$host_index GROUP_RANK=$host_index NNODES=$host_count
    export MASTER_ADDR=$master_address MASTER_PORT=$master_port
    export JAX_COORDINATOR_ADDRESS=$master_address:$master_port JAX_NUM_PROCESSES=$ranks_total JAX_PROCESS_ID=$1
    export COORDINATOR_ADDRESS=$master_address:$master_port
}

# Starts a process in a session of its own, and says in the queue when it is there and how it ended.
# Its output goes through a pipe of its own: whatever it leaves behind keeps no ssh connection open.
start() {
    local name=$1 prefix=$2
    shift 2
    (
        trap - TERM INT HUP PIPE
        exec 3<&-
        exec {out}> >(exec 2>/dev/null; prefixed "$prefix")
        printer=$!
        (
            exec </dev/null >&"$out" 2>&1 {out}>&-
            echo "started $name $BASHPID" >&"$queue"
            exec {queue}>&-
            [[ $name == coordinator ]] || place_of "$name" "$((name - first_rank))"
            export BACKTAPE_GUARD=$launch.$unit BACKTAPE_LAUNCH=${BACKTAPE_LAUNCH:-$launch}
            [[ -z $setup ]] || eval "$setup" || exit
            exec setsid -- "$@"
        ) &
        wait $!
        echo "ended $name $?" >&"$queue"
        exec {out}>&-
        wait "$printer"
    ) &
    waiters+=($!)
}

# The private folder of this launch: nobody else may look, and it goes when the guard does. Its name is
# drawn at random by run.sh, which finds it again should the guard be killed.
private=${TMPDIR:-/tmp}/backtape-$launch.$unit

unpack_credentials() {
    [[ -n $credentials ]] || return 0
    mkdir -m 700 -- "$private" || return
    base64 -d <<<"$credentials" | (umask 077 && tar -C "$private" -xf -)
}

listen_to_run() {
    local line='' code=0
    until [[ $line == stop ]] || ((code != 0)); do
        say alive
        next_line "$lost_after" 3
        code=$?
        # Somebody killed the guard itself: this is all that is left of it.
        kill -0 "$$" 2>/dev/null || { sweep; rm -rf -- "$private"; exit; }
    done
    if ((code == 0)); then echo "stop asked" >&"$queue"
    elif ((code > 128)); then echo "stop silent" >&"$queue"
    else echo "stop gone" >&"$queue"; fi
}

end_groups() {
    local name
    for name in "${!group[@]}"; do
        # It leads no group for a moment, until it is in its own session.
        kill "-$1" -- "-${group[$name]}" 2>/dev/null || kill "-$1" "${group[$name]}" 2>/dev/null
    done
}

# Follows the queue until every process has ended; ends them when one failed or somebody says so.
follow() {
    local line what name value running=$1 deadline=0
    while ((running > 0)); do
        if ((deadline > 0 && SECONDS >= deadline)); then
            end_groups KILL
            deadline=$((SECONDS + 5))
        fi
        next_line 1 "$queue" || continue
        IFS=' ' read -r what name value <<<"$line"
        case $what in
        started)
            group[$name]=$value
            say "started $name"
            ((deadline == 0)) || end_groups TERM
            continue ;;
        ended)
            unset "group[$name]"
            running=$((running - 1))
            say "ended $name $value"
            [[ $value != 0 ]] || continue ;;
        stop) [[ $name == asked ]] || say "lost $name" ;;
        esac
        if ((deadline == 0)); then
            deadline=$((SECONDS + grace))
            end_groups TERM
        fi
    done
}

guard() {
    set -u
    declare -A group=()
    declare -a waiters=()
    # Not ignored: what a shell ignores its children ignore too.
    trap : PIPE
    exec 3<&0 </dev/null {queue}<> <(:)
    trap 'echo "stop signal" >&"$queue"' TERM INT HUP
    cd -- "$work_dir" 2>/dev/null || { say "cannot go to $work_dir: there is no such directory"; exit 1; }
    unpack_credentials || { say "cannot keep credentials in $private"; exit 1; }
    listen_to_run &
    local listener=$! variable
    for variable in ${variables[@]+"${variables[@]}"}; do export "${variable?}"; done
    if [[ $unit == C ]]; then coordinate; else launch_ranks; fi
    sweep
    ((${#waiters[@]} == 0)) || wait "${waiters[@]}"
    rm -rf -- "$private"
    say "done"
    kill "$listener" 2>/dev/null
    exit 0
}

launch_ranks() {
    local i
    [[ -z $credentials ]] || export BACKTAPE_CREDENTIALS=$private/rank
    for ((i = 0; i < ranks; i++)); do
        start "$((first_rank + i))" "[backtape][H$host_index][R$((first_rank + i))]" "${command[@]}"
    done
    follow "$ranks"
}

# Makes credentials where there are none yet, hands the ranks' to run.sh, and says when the
# coordinator answers at the address by which ranks call it.
coordinate() {
    local guarded=() asking=() line
    type -P "$coordinator" >/dev/null || { say "cannot run $coordinator: there is no such program"; return; }
    if [[ $insecure == 1 ]]; then
        guarded=(--insecure)
    else
        if [[ -z $credentials ]]; then
            mkdir -m 700 -- "$private" || return
            line=$("$coordinator" certs --out "$private" --host "$address" 2>&1) ||
                { say "cannot make credentials: ${line//$'\n'/ }"; return; }
            while IFS= read -r line; do say "credentials $line"; done < <(tar -C "$private" -cf - rank | base64)
        fi
        guarded=(--credentials "$private/coordinator")
        asking=(--credentials "$private/rank")
    fi
    start coordinator "[backtape][H$host_index][coordinator]" "$coordinator" --listen "$listen" \
        --store "$store" --world-size "$world_size" "${guarded[@]}" ${command[@]+"${command[@]}"}
    answer "${asking[@]}" &
    local answering=$!
    follow 1
    kill "$answering" 2>/dev/null
}

# It answers when it has looked at our certificate and token and knows no such run yet.
answer() {
    local try said
    for ((try = 0; try < ready_tries; try++)); do
        said=$("$coordinator" status --coordinator "$address:$port" --run "$run" "$@" 2>&1) && { say ready; return; }
        [[ $said != *"is not known here"* ]] || { say ready; return; }
        sleep 0.2
    done
    say "unready ${said//$'\n'/ }"
}
