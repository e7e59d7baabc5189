# shellcheck shell=bash
# Sourced by the scripts beside it: errors of one line, dry runs, and signals that reach what runs. For bash 3.2 and later.

# Set by the loops over arguments.
dry_run=0
# Set by SIGTERM, Ctrl-C or a hang-up.
stopped=0
# The process that `attend` waits for.
child=""
# How the last command of `attend` ended.
status=0
# The checkout, which recipes are named relative to.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Of a GPU's memory, what JAX takes at the start: three quarters unless it is told otherwise, and the planner plans with this.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

fail() {
    echo "error: $*" >&2
    exit 2
}

# A command, as a shell reads it.
quoted() {
    local word line="" quote="'" escape="'\\''"
    for word in "$@"; do
        [[ $word =~ ^[a-zA-Z0-9_./:=,@%+-]+$ ]] || word="'${word//$quote/$escape}'"
        line+=" $word"
    done
    echo "${line# }"
}

# Runs a command; a dry run prints it.
run() {
    if ((dry_run)); then
        quoted "$@"
    else
        "$@"
    fi
}

# What a dry run says between commands.
note() {
    ((!dry_run)) || echo "# $*"
}

# Recipes, runs/ and prepared/ are named relative to the checkout.
enter_root() {
    ((!dry_run)) || quoted cd "$root"
    cd "$root" || exit
}

# Ends the script unless the flags for calm_jax.main name a recipe that is there.
need_recipe() {
    local flag file=""
    for flag in "$@"; do
        [[ $flag != --config=* ]] || file=${flag#*=}
    done
    [[ -n $file ]] || fail "give a recipe: --config=configs/calm_m.py"
    # configs/calm_m.py:head=flow has an argument behind the colon.
    [[ -f $root/${file%%:*} || -f ${file%%:*} ]] || fail "--config=$file: there is no file ${file%%:*}"
}

# Sets `flags`, those for calm_jax.main, and `dry_run`.
take_flags() {
    local flag
    flags=()
    for flag in "$@"; do
        case $flag in
            --dry_run) dry_run=1 ;;
            *) flags+=("$flag") ;;
        esac
    done
    need_recipe ${flags[@]+"${flags[@]}"}
}

# Asks what `attend` runs to save and to end; $1 is its process.
stop_child() {
    kill -TERM "$1" 2>/dev/null || true
}

# Runs a command to its end and sets `status`. A signal to this script sets `stopped`, and is passed on as SIGTERM.
attend() {
    if ((dry_run)); then
        run "$@"
        return
    fi
    local waiting=1
    # They stay: between two commands, too, a signal must not be lost.
    trap 'stopped=1 waiting=1; [[ -z $child ]] || stop_child "$child"' TERM INT HUP
    # In a process group of its own: a terminal's Ctrl-C would reach it beside the SIGTERM, and a second signal ends a run
    # before it has saved. Such a process would be stopped when it reads from the terminal, as ssh does.
    set -m
    "$@" < /dev/null &
    child=$!
    set +m
    # The signal came before there was anything to pass it on to.
    ((!stopped)) || stop_child "$child"
    # A signal to this script ends a wait early.
    while ((waiting)); do
        waiting=0 status=0
        wait "$child" || status=$?
    done
    child=""
}

# `attend` again and again while the command ends with status 75: it was asked to stop, has saved, and can go on.
keep_running() {
    attend "$@"
    while ((status == 75 && !stopped)); do
        echo "launch: stopped by a signal, going on" >&2
        attend "$@"
    done
}
