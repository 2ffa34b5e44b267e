# shellcheck shell=bash
# How run.sh and its guards read a queue. hosts.sh sources this file, and run.sh sends it ahead of guard.sh.

# What had come of a line when the time for it was over. bash has taken it from the queue by then.
unfinished=''

# Puts the next line of file descriptor $2 into the caller's `line`. Fails as `read` does when none has ended
# within $1 seconds; the part that had come is then kept and stands at the front of the line once it ends.
next_line() {
    local part code=0
    IFS= read -r -t "$1" -u "$2" part || code=$?
    if ((code > 0)); then
        unfinished+=$part
        return "$code"
    fi
    # shellcheck disable=SC2034 # the caller's
    line=$unfinished$part
    unfinished=''
}
