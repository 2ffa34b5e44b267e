#!/usr/bin/env bash
# Starts a job's ranks on hosts over ssh, with a coordinator on the first, and ends them together.
#
#   deploy/run.sh --hosts node-0,node-1 --ranks-per-host 8 --run fused -- python train.py
#
# deploy/ssh.md has the page. Not a job scheduler: no queue, no restarts.
#
#   --hosts A,B,C            hosts, as ssh knows them; or
#   --hosts-file FILE        one a line: HOST [RANKS]; # begins a comment
#   --ranks-per-host N       ranks on each host (1)
#   --dir DIR                where the command runs, on every host (the directory this runs in)
#   --run NAME               name of the run (run-DATE-TIME)
#   --store DIR|URL          what holds the dumps: a directory on the first host (DIR/dumps), or a bucket
#   --ref REF                first check out this git ref in DIR, the same commit on every host
#   --setup COMMANDS         shell commands before the rank's own, such as 'source venv/bin/activate'
#   --env NAME[=VALUE]       a variable for the ranks; BACKTAPE_* that are set here go along by themselves
#   --address HOST           by which ranks reach the first host (its name in --hosts)
#   --port N                 the coordinator's (7447)
#   --listen ADDRESS         where it listens (0.0.0.0)
#   --master-port N          for MASTER_PORT and JAX_COORDINATOR_ADDRESS, on the first host (29500)
#   --coordinator HOST:PORT  use this one, start none
#   --no-coordinator         start none, name none
#   --coordinator-bin PATH   the program, on the first host (coordinator)
#   --coordinator-arg WORD   one more argument for it; may be repeated
#   --world-size N           processes that record, where each rank starts more (all ranks)
#   --credentials DIR        folder made by `coordinator certs`; without one they are made for this launch
#   --insecure               neither encryption nor authentication: anyone who reaches the port may write
#   --collect DIR            at the end fetch the run's dumps into DIR here, and verify them (collect.sh)
#   --replay PATH            the program that verifies (replay)
#   --grace SECONDS          between the request to end and the kill (10)
#   --lost-after SECONDS     a host that hears nothing from here for so long ends its ranks (120)
#   --ssh-config FILE        for ssh -F
#   --ssh-option WORD        for ssh -o; may be repeated
#   --dry-run                say what would be done
#
# Exit code: the first failed rank's; 2 wrong usage or environment; 3 what was collected is not whole;
# 255 a host was lost; 128 + signal when this was stopped.
# shellcheck disable=SC2034 # settings of the guards are read by name
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=hosts.sh
source "$here/hosts.sh"
# shellcheck source-path=SCRIPTDIR source=checkout.sh
source "$here/checkout.sh"

hosts=() ranks_of=() hosts_file='' ranks_per_host=1 work_dir=$PWD run=run-$(date -u +%Y%m%d-%H%M%S) store=''
ref='' setup='' variables=() address='' port=7447 listen=0.0.0.0 master_port=29500 coordinator_at=''
with_coordinator=1 coordinator=coordinator coordinator_words=() world_size='' credentials_dir='' insecure=0
collect='' replay=replay grace=10 lost_after=120 dry_run=0 command=()

usage() {
    tell "$1; deploy/run.sh --help says how"
    exit 2
}

# A whole number from $2 on, of at most nine digits: it goes into arithmetic.
number() {
    if ! [[ $3 =~ ^[0-9]{1,9}$ ]] || ((10#$3 < $2)); then usage "$1 $3: give a whole number of at least $2"; fi
}

parse() {
    while (($#)); do
        case $1 in
        --help | -h) sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --insecure) insecure=1; shift; continue ;;
        --no-coordinator) with_coordinator=0; shift; continue ;;
        --dry-run) dry_run=1; shift; continue ;;
        --) shift; command=("$@"); return ;;
        --*) (($# > 1)) || usage "$1 wants a value" ;;
        *) usage "$1 is no option: the command comes after --" ;;
        esac
        case $1 in
        --hosts) IFS=, read -r -a hosts <<<"$2" ;;
        --hosts-file) hosts_file=$2 ;;
        --ranks-per-host) number "$1" 1 "$2"; ranks_per_host=$((10#$2)) ;;
        --dir) work_dir=$2 ;;
        --run) run=$2 ;;
        --store) store=$2 ;;
        --ref) ref=$2 ;;
        --setup) setup=$2 ;;
        --env) variables+=("$2") ;;
        --address) address=$2 ;;
        --port) number "$1" 1 "$2"; port=$((10#$2)) ;;
        --listen) listen=$2 ;;
        --master-port) number "$1" 1 "$2"; master_port=$((10#$2)) ;;
        --coordinator) coordinator_at=$2 with_coordinator=0 ;;
        --coordinator-bin) coordinator=$2 ;;
        --coordinator-arg) coordinator_words+=("$2") ;;
        --world-size) number "$1" 1 "$2"; world_size=$((10#$2)) ;;
        --credentials) credentials_dir=$2 ;;
        --collect) collect=$2 ;;
        --replay) replay=$2 ;;
        --grace) number "$1" 1 "$2"; grace=$((10#$2)) ;;
        --lost-after) number "$1" 15 "$2"; lost_after=$((10#$2)) ;;
        --ssh-config) ssh+=(-F "$2"); ssh_words+=("$1" "$2") ;;
        --ssh-option) ssh+=(-o "$2"); ssh_words+=("$1" "$2") ;;
        *) usage "$1 is no option" ;;
        esac
        shift 2
    done
}

# Hosts and their numbers of ranks, from the file or the list.
read_hosts() {
    local line host ranks more seen=' '
    if [[ -n $hosts_file ]]; then
        [[ -r $hosts_file ]] || usage "--hosts-file $hosts_file cannot be read"
        ((${#hosts[@]} == 0)) || usage "give --hosts or --hosts-file, not both"
        while IFS= read -r line || [[ -n $line ]]; do
            read -r host ranks more <<<"${line%%#*}" || true
            [[ -n $host ]] || continue
            [[ -z $more ]] || usage "$hosts_file: '$line' is not HOST [RANKS]"
            [[ -z $ranks ]] || number "$hosts_file: $host" 1 "$ranks"
            hosts+=("$host") ranks_of+=("${ranks:-$ranks_per_host}")
        done <"$hosts_file"
    fi
    ((${#hosts[@]})) || usage "no hosts: give --hosts A,B or --hosts-file FILE"
    for host in "${hosts[@]}"; do
        # A name that begins with a dash would be an option of ssh.
        [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_:][A-Za-z0-9._:%-]*$ ]] ||
            usage "'$host' is no name of a host"
        [[ $seen != *" $host "* ]] || usage "$host is listed twice: give it more ranks instead"
        seen+="$host "
        ((${#ranks_of[@]} >= ${#hosts[@]})) || ranks_of+=("$ranks_per_host")
    done
}

# Refuses what cannot be, before anything is started anywhere.
check() {
    ((${#command[@]})) || usage "no command: it comes after --"
    [[ $run =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$ ]] || usage "--run '$run': letters, digits, dot, dash, underscore"
    [[ $work_dir == /* ]] || usage "--dir $work_dir: give it from the root, it is a directory of other hosts"
    [[ $ref != -* ]] || usage "--ref '$ref' is no name of a commit"
    [[ $store == /* || $store == *://* ]] || usage "--store $store: give it from the root, or a bucket's URL"
    [[ $address =~ ^[A-Za-z0-9_:][A-Za-z0-9._:%-]*$ ]] || usage "--address '$address' is no name of a host"
    if [[ -n $credentials_dir ]]; then
        ((insecure == 0)) || usage "give --credentials or --insecure, not both"
        [[ -r $credentials_dir/rank/token ]] ||
            usage "$credentials_dir/rank/token cannot be read: coordinator certs makes such a folder"
    fi
    [[ -n $collect ]] || return 0
    ((with_coordinator)) || usage "--collect wants the coordinator that this starts: see collect.sh"
    [[ $store != *://* ]] || usage "--collect is for a directory: replay reads $store where it is"
    [[ ! -e $collect/$run ]] || usage "$collect/$run is there already: choose another --collect or --run"
    type -P "$replay" >/dev/null || usage "$replay is not here to verify what is collected: give --replay PATH"
}

# The variables that go along: BACKTAPE_* of here, those of --env, then what this run decides.
gather_variables() {
    local name found=()
    for name in $(compgen -e BACKTAPE_ || true) ${variables[@]+"${variables[@]}"}; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*(=|$) ]] || usage "--env '$name' is no name of a variable"
        case $name in
        BACKTAPE_DIR) tell "BACKTAPE_DIR of here is not used: --store and --run say where dumps go"; continue ;;
        BACKTAPE_RUN | BACKTAPE_COORDINATOR | BACKTAPE_CREDENTIALS | BACKTAPE_RANK | BACKTAPE_WORLD_SIZE) continue ;;
        esac
        [[ $name == *=* ]] || name="$name=${!name-}"
        found+=("$name")
    done
    found+=("BACKTAPE_DIR=$store/$run")
    [[ -z $coordinator_at ]] || found+=("BACKTAPE_COORDINATOR=$coordinator_at")
    variables=("${found[@]}")
}

settle() {
    local i
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || usage "this needs bash 4.4 or newer"
    read_hosts
    ranks_total=0
    for ((i = 0; i < ${#hosts[@]}; i++)); do ranks_total=$((ranks_total + 10#${ranks_of[i]})); done
    world_size=${world_size:-$ranks_total}
    store=${store:-$work_dir/dumps}
    address=${address:-${hosts[0]##*@}}
    check
    [[ $address != *:* ]] || address="[$address]"
    [[ $listen != *:* || $listen == \[* ]] || listen="[$listen]"
    ((with_coordinator == 0)) || coordinator_at=$address:$port
    gather_variables
}

describe() {
    local i first=0
    for ((i = 0; i < ${#hosts[@]}; i++)); do
        tell "H$i is ${hosts[i]}: ranks $first to $((first + 10#${ranks_of[i]} - 1)) in $work_dir"
        first=$((first + 10#${ranks_of[i]}))
    done
    [[ -z $ref ]] || tell "every host checks out $ref first"
    ((with_coordinator == 0)) || tell "coordinator on H0, listening on $listen:$port, called $coordinator_at"
    tell "dumps in $store/$run"
    ((insecure == 0)) || [[ -z $coordinator_at ]] ||
        tell "INSECURE: whoever reaches $coordinator_at may write dumps and steer the job, unencrypted"
    tell "command: $(printf '%q ' "${command[@]}")"
    [[ $(printf '%s ' "${variables[@]}") =~ BACKTAPE_(STEPS|WATCH|RING|SCALARS)= ]] ||
        tell "nothing asks for a record: set BACKTAPE_STEPS, _WATCH, _RING or _SCALARS, or the script does"
}

# Settings of one host's guard, then the guard, as one program for `bash -s`.
program() {
    local unit=$1 host_index=$2 first_rank=$3 ranks=$4 credentials=$5 host_count=${#hosts[@]}
    local master_address=$address
    settings launch unit host_index host_count first_rank ranks ranks_total world_size credentials setup \
        grace lost_after work_dir master_address master_port run store address port insecure coordinator
    printf 'listen=%q ready_tries=50\n' "$listen:$port"
    array variables "${variables[@]}"
    if [[ $unit == C ]]; then
        array command ${coordinator_words[@]+"${coordinator_words[@]}"}
    else
        array command "${command[@]}"
    fi
    cat "$here/queue.sh" "$here/guard.sh"
    echo guard
}

# The run from the coordinator's start to the last rank's end.
launch_all() {
    local i first=0 given='' for_ranks=''
    if [[ -n $credentials_dir ]]; then
        given=$(tar -C "$credentials_dir" -cf - . | base64)
        for_ranks=$(tar -C "$credentials_dir" -cf - rank | base64)
    fi
    if ((with_coordinator)); then
        connect C "${hosts[0]}" "$(program C 0 0 0 "$given")"
        until [[ -n $coordinator_state || -n $stopping ]]; do pump; done
        if [[ $coordinator_state != ready ]]; then
            [[ -n $stopping ]] || fail 2 "the coordinator on $(name_of 0) did not start: see above"
            return 0
        fi
        tell "the coordinator answers at $coordinator_at"
        for_ranks=${for_ranks:-$credentials_made}
    fi
    for ((i = 0; i < ${#hosts[@]}; i++)); do
        [[ -z $stopping ]] || return 0
        connect "$i" "${hosts[i]}" "$(program "H$i" "$i" "$first" "$((10#${ranks_of[i]}))" "$for_ranks")"
        first=$((first + 10#${ranks_of[i]}))
    done
    while [[ -z $stopping ]] && ranks_alive; do pump; done
}

main() {
    parse "$@"
    settle
    describe
    ((dry_run == 0)) || exit 0
    prepare
    [[ -z $ref ]] || check_out_everywhere "$ref"
    launch_all
    finish
    if [[ -n $collect && $coordinator_state == ready ]]; then
        local code=0
        "$here/collect.sh" --replay "$replay" "${ssh_words[@]}" "${hosts[0]}" "$store/$run" "$collect" || code=$?
        ((failure != 0)) || failure=$code
    fi
    exit "$failure"
}

main "$@"
