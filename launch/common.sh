# shellcheck shell=bash
# Sourced by the other scripts of this folder: --help, one-line errors, paths, dry runs, and forwarding of signals. For bash 3.2 and later.

# 1 with --dry_run; set where the arguments are read.
dry_run=0
# 1 after SIGTERM, Ctrl-C or a hang-up.
stopped=0
# The process that `attend` waits for.
child=""
# The exit status of the last command of `attend`.
status=0
# The checkout. Recipes, runs/ and prepared/ are named relative to it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The share of a GPU's memory that JAX allocates at the start; its own default is 0.75. The planner assumes this one
# (GPU_MEMORY_SHARE in calm_jax/planning/topology.py).
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

fail() {
    echo "error: $*" >&2
    exit 2
}

# Prints the comment at the beginning of a script.
print_header() {
    local line
    while IFS= read -r line; do
        case $line in
            "#!"*) ;;
            "#" | "# "*)
                line=${line#"#"}
                echo "${line# }"
                ;;
            *) break ;;
        esac
    done < "$1"
}

# With --help or -h a script prints its comment and does nothing else. A misspelt --dry_run would do what it is to show. A sourced
# file sees the arguments of the script.
for word in "$@"; do
    case $word in
        --help | -h)
            print_header "${BASH_SOURCE[1]}"
            exit 0
            ;;
        --dry | --dry-run | --dryrun) fail "there is no flag $word: write --dry_run" ;;
    esac
done

# Refuses a URL as the value of a flag that names a folder to write to.
need_local() {
    [[ $2 != *://* ]] || fail "$1=$2 must be a path of a file system"
}

# Prints a command with the quotes that a shell needs.
quoted() {
    local word line="" quote="'" escape="'\\''"
    for word in "$@"; do
        [[ $word =~ ^[a-zA-Z0-9_./:=,@%+-]+$ ]] || word="'${word//$quote/$escape}'"
        line+=" $word"
    done
    echo "${line# }"
}

# Runs a command, or prints it in a dry run.
run() {
    if ((dry_run)); then
        quoted "$@"
    else
        "$@"
    fi
}

# A comment that a dry run prints between commands.
note() {
    ((!dry_run)) || echo "# $*"
}

# Makes a path of the caller's folder absolute, for scripts that change to the checkout.
absolute() {
    case $1 in
        # stdlib: is text without a file.
        "" | /* | *://* | stdlib:) echo "$1" ;;
        *) echo "$PWD/$1" ;;
    esac
}

# Whether a flag of calm_jax.main, of which $1 may be the name alone, has paths as its value.
has_paths() {
    case ${1%%=*} in
        --workdir | --config | --config.init_from | --config.tokenizer.path | --config.autoencoder.checkpoint) ;;
        --config.data.train_files | --config.data.autoencoder_files | --config.data.validation_files) ;;
        *) return 1 ;;
    esac
}

# Prints a flag of calm_jax.main with absolute paths. In the checkout it stays as it is, because a run that resumes compares
# its config with the one that it began with.
with_absolute_paths() {
    local name=${1%%=*} value=${1#*=} recipe entry entries list=""
    if [[ . -ef $root ]] || ! has_paths "$1"; then
        echo "$1"
        return
    fi
    case $name in
        --config)
            recipe=${value%%:*} value=${value#"$recipe"}
            # These two recipes have a workdir after the colon.
            case ${recipe##*/} in
                workdir.py | finetune.py) value=${value:0:1}$(absolute "${value:1}") ;;
            esac
            # Other recipes are those of the checkout.
            [[ ! -f $recipe ]] || recipe=$(absolute "$recipe")
            echo "$name=$recipe$value"
            ;;
        --config.data.*)
            IFS=, read -ra entries <<< "$value"
            for entry in ${entries[@]+"${entries[@]}"}; do
                # Blanks around an entry have no meaning.
                entry=${entry#"${entry%%[![:space:]]*}"} entry=${entry%"${entry##*[![:space:]]}"}
                list+=,$(absolute "$entry")
            done
            echo "$name=${list#,}"
            ;;
        *) echo "$name=$(absolute "$value")" ;;
    esac
}

# Changes to the checkout.
enter_root() {
    ((!dry_run)) || quoted cd "$root"
    cd "$root" || exit
}

# Ends the script unless the flags for calm_jax.main name an existing recipe. $1 says where a relative one was looked for.
need_recipe() {
    local where=$1 flag file="" path
    shift
    for flag in "$@"; do
        [[ $flag != --config=* ]] || file=${flag#*=}
    done
    [[ -n $file ]] || fail "give a recipe: --config=configs/calm_m.py"
    # A recipe may have arguments after a colon: configs/calm_m.py:head=flow.
    path=${file%%:*}
    if [[ $path == /* ]]; then
        [[ -f $path ]] || fail "--config=$file: there is no file $path"
    else
        [[ -f $root/$path ]] || fail "--config=$file: there is no file $path $where"
    fi
}

# Ends the script unless the flags for calm_jax.main name the text of a recipe of the paper. The checkout's prepared/ is not on the hosts.
need_text() {
    local all=" $* " keys=(train_files validation_files) key missing="" recipe
    recipe=${all##* --config=} recipe=${recipe%%[: ]*}
    case ${recipe##*/} in
        ar_*.py) ;;
        calm_*.py)
            [[ $all == *head=softmax* || $all == *" --mode=eval "* || $all == *" --config.stage=lm "* || $all == *" --config.autoencoder.checkpoint="* ]] ||
                keys+=(autoencoder_files)
            ;;
        *) return 0 ;;
    esac
    for key in "${keys[@]}"; do
        [[ $all == *" --config.data.$key="* ]] || missing+=" --config.data.$key=..."
    done
    [[ -z $missing ]] || fail "give$missing, on the file system that all hosts share: by default $recipe reads prepared/ of the checkout"
}

# Sets `dry_run`, and `flags` to all other arguments, which are flags of calm_jax.main, with absolute paths. Refuses a URL as the
# workdir.
take_flags() {
    local flag
    flags=()
    for flag in "$@"; do
        case $flag in
            --dry_run) dry_run=1 ;;
            *)
                [[ $flag == *=* ]] || ! has_paths "$flag" || fail "write $flag=VALUE, with an equals sign"
                flags+=("$(with_absolute_paths "$flag")")
                ;;
        esac
        [[ $flag != --workdir=* ]] || need_local --workdir "${flag#*=}"
    done
    need_recipe "here or in the checkout" ${flags[@]+"${flags[@]}"}
}

# Asks the process $1, which `attend` runs, to save and to end.
stop_child() {
    kill -TERM "$1" 2>/dev/null || true
}

# Runs a command to its end and sets `status`. A signal to this script sets `stopped` and is passed on to the command as SIGTERM.
attend() {
    if ((dry_run)); then
        run "$@"
        return
    fi
    local waiting=1
    # The traps stay set, so that no signal between two commands is lost.
    trap 'stopped=1 waiting=1; [[ -z $child ]] || stop_child "$child"' TERM INT HUP
    # `set -m` starts the command in a process group of its own. Otherwise a terminal's Ctrl-C would reach it besides our
    # SIGTERM, and a second signal ends a run before it has saved. A process outside of the terminal's group is stopped when it
    # reads from the terminal, as ssh does; hence < /dev/null.
    set -m
    "$@" < /dev/null &
    child=$!
    set +m
    # A signal that came before `child` was set has not been passed on.
    ((!stopped)) || stop_child "$child"
    # A signal to this script interrupts `wait`.
    while ((waiting)); do
        waiting=0 status=0
        wait "$child" || status=$?
    done
    child=""
}

# Repeats `attend` while the command ends with status 75, which means that it was asked to stop, has saved, and can resume.
keep_running() {
    attend "$@"
    while ((status == 75 && !stopped)); do
        echo "launch: stopped by a signal, resuming" >&2
        attend "$@"
    done
}
