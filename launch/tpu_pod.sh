#!/usr/bin/env bash
# Trains a recipe on a slice of Cloud TPU VMs, requested as a queued resource, and requests another after each preemption.
#
#   launch/tpu_pod.sh create --name=calm --zone=ZONE --accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite [--spot]
#   launch/tpu_pod.sh setup  --name=calm --zone=ZONE [--mount=COMMAND]   # installs the committed state of this checkout
#   launch/tpu_pod.sh run    --name=calm --zone=ZONE --config=configs/calm_m.py --workdir=/mnt/calm/runs/calm_m [...]
#   launch/tpu_pod.sh resume [the flags of create, setup and run]        # repeats all three until the run has ended
#   launch/tpu_pod.sh status|logs|stop|delete --name=calm --zone=ZONE
#
# All commands take --project=PROJECT (default: gcloud's) and --dry_run; logs takes --worker=N (0), resume --poll=SECONDS (60).
# --accelerator and --runtime are v5litepod-N and v2-alpha-tpuv5-lite for N chips of v5e, v6e-N and v2-alpha-tpuv6e for N chips of v6e,
# and v5p-N and v2-alpha-tpuv5 for N/2 chips of v5p, as N counts cores, two a chip (cloud.google.com/tpu/docs/runtimes and
# cloud.google.com/tpu/docs/v5p).
# Every other flag of run and resume is one of python -m calm_jax.main. The paper's recipes read the folder prepared/ of the checkout,
# which the hosts do not have. Name the text on the shared file system:
#   --config.data.train_files=/mnt/calm/prepared/pile/lm --config.data.autoencoder_files=/mnt/calm/prepared/pile/autoencoder \
#   --config.data.validation_files=/mnt/calm/prepared/wikitext.jsonl
#
# run starts launch/single_host.sh on every host and returns; its output is in ~/calm_jax/run.log of the host. stop asks all hosts
# to save and to end. resume does not return: it waits for the slice, sets it up, starts the run, and polls it. It deletes a queued
# resource that is SUSPENDED (preempted) or FAILED and creates it again, at most ten times in a row without becoming ACTIVE, and
# starts the run again on hosts that were rebooted. It ends with the run's status, or with 75 after stop. Ctrl-C ends resume only;
# the run goes on, and another resume finds it or starts it again.
#
# --mount=COMMAND runs on every host before the installation. It has to mount a file system that all hosts share, for the prepared
# text and the workdir, because a preempted slice loses its disks. Filestore, for example:
#   --mount='sudo apt-get -qq install nfs-common && sudo mkdir -p /mnt/calm && sudo mount -t nfs ADDRESS:/SHARE /mnt/calm'
# A bucket mounted by gcsfuse should have a hierarchical namespace, because saving a checkpoint ends with renaming a folder.
#
# Needs: gcloud, logged in, with an SSH key; a project with the TPU API and quota for the slice in the zone; a shared file system
# as above, with 1.2 TB for CALM's prepared text; hosts that reach PyPI and GitHub (uv installs Python 3.12 beside their 3.10).
# Costs: chip hours x your price from ACTIVE until delete, also while nothing runs, so delete it afterwards. CALM-M with its
# autoencoder takes 3.47e20 FLOPs (calm_jax/cost/flops.py): at an assumed MFU of 40 %, 1224 v5e, 525 v5p or 263 v6e chip hours; on
# 256 v5e, 4.8 hours.
# Tested by dry runs and with a stub of gcloud, but never in a cloud. The flags are those of gcloud's reference of 2025
# (cloud.google.com/sdk/gcloud/reference/compute/tpus).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Folder on each host with the run's pid and status. A reboot empties /tmp, so that no pid is left of an earlier boot.
marks=/tmp/calm_jax_run
most_failures=10

command=${1:-}
case $command in
    create | setup | run | resume | status | logs | stop | delete) shift ;;
    *) fail "'$command' is none of create, setup, run, resume, status, logs, stop, delete" ;;
esac
name="" zone="" project="" accelerator="" runtime="" spot=0 mount="" worker=0 poll=60 flags=()
for flag in "$@"; do
    case $flag in
        --name=*) name=${flag#*=} ;;
        --zone=*) zone=${flag#*=} ;;
        --project=*) project=${flag#*=} ;;
        --accelerator=*) accelerator=${flag#*=} ;;
        --runtime=*) runtime=${flag#*=} ;;
        --spot) spot=1 ;;
        --mount=*) mount=${flag#*=} ;;
        --worker=*) worker=${flag#*=} ;;
        --poll=*) poll=${flag#*=} ;;
        --dry_run) dry_run=1 ;;
        *) flags+=("$flag") ;;
    esac
done
[[ -n $name && -n $zone ]] || fail "give --name=NAME and --zone=ZONE"
if [[ $command == create || $command == resume ]]; then
    [[ -n $accelerator && -n $runtime ]] || fail "give --accelerator=TYPE and --runtime=VERSION"
fi
if [[ $command == run || $command == resume ]]; then
    need_recipe "in the checkout" ${flags[@]+"${flags[@]}"}
    [[ " ${flags[*]}" == *" --workdir=/"* ]] || fail "give --workdir=DIR, absolute, on a file system that all hosts share"
    need_text "${flags[@]}"
elif ((${#flags[@]})); then
    fail "$command takes no ${flags[0]}"
fi
[[ $poll =~ ^[0-9]+$ && $worker =~ ^[0-9]+$ ]] || fail "--poll=$poll and --worker=$worker must be whole numbers"
where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")

# Runs the command $2 on host $1, a number or `all`.
on_hosts() {
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

create() {
    local request=("$name" --node-id="$name" --accelerator-type="$accelerator" --runtime-version="$runtime")
    ((!spot)) || request+=(--spot)
    run gcloud compute tpus queued-resources create "${request[@]}" "${where[@]}"
}

# Deletes the queued resource and its TPU VMs.
delete() {
    run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

# Prints the state of the queued resource; nothing if it does not exist.
state() {
    run gcloud compute tpus queued-resources list "${where[@]}" --filter="name~/$name\$" --format="value(state.state)"
}

setup() {
    local folder=${TMPDIR:-/tmp} install failed=0
    ((dry_run)) || folder=$(mktemp -d)
    install="mkdir -p calm_jax && tar -xzf calm_jax.tar.gz -C calm_jax && cd calm_jax"
    install+=" && python3 -m pip install --quiet --user uv && python3 -m uv venv --quiet --allow-existing --python=3.12 .venv"
    install+=" && python3 -m uv pip install --quiet --python=.venv/bin/python -c constraints.txt -e '.[tpu]' && touch .venv/ready"
    [[ -z $mount ]] || install="( $mount ) && $install"
    # Chained by &&, because `set -e` has no effect where `look` calls this.
    run git -C "$root" archive --format=tar.gz --output="$folder/calm_jax.tar.gz" HEAD &&
        run gcloud compute tpus tpu-vm scp "$folder/calm_jax.tar.gz" "$name:" "${where[@]}" --worker=all &&
        on_hosts all "$install" || failed=1
    ((dry_run)) || rm -r "$folder"
    return "$failed"
}

# Starts the run on all hosts. On each, a shell that outlives the SSH connection writes the run's pid and status to files.
start() {
    # In single quotes, because the host's shell expands it.
    # shellcheck disable=SC2016
    local body='launch/single_host.sh "$@" >> run.log 2>&1 & echo $! > MARKS/pid; wait $!; echo $? > MARKS/status' begin
    begin="if kill -0 \"\$(cat $marks/pid 2>/dev/null)\" 2>/dev/null; then echo 'it is running already' >&2; exit 1; fi"
    begin+="; cd calm_jax && . .venv/bin/activate && mkdir -p $marks && rm -f $marks/*"
    begin+=" && (nohup $(quoted bash -c "${body//MARKS/$marks}" calm_jax --distributed=on "${flags[@]}") > /dev/null 2>&1 < /dev/null &)"
    on_hosts all "$begin"
}

# Prints a line from each host: calm_jax:absent (not set up), idle, running, stopped, or the exit status of its run.
ask() {
    local question="test -e calm_jax/.venv/ready || { echo calm_jax:absent; exit; }; cd $marks 2>/dev/null || { echo calm_jax:idle; exit; }"
    question+="; if kill -0 \"\$(cat pid 2>/dev/null)\" 2>/dev/null; then echo calm_jax:running; elif test -e stopped; then echo calm_jax:stopped"
    question+="; elif test -e status; then echo calm_jax:\$(cat status); else echo calm_jax:idle; fi"
    on_hosts all "$question"
}

stop() {
    on_hosts all "cd $marks && touch stopped && kill -TERM \"\$(cat pid)\""
}

# Polls an ACTIVE slice once: starts the run where it does not run, and ends the script when the run has ended.
# `begun` is 1 once this call of the script has started the run or found it running.
begun=0
look() {
    local hosts word worst=0
    # A host that does not answer is booting, or being preempted.
    hosts=$(ask | grep -o 'calm_jax:[a-z0-9]*') || return 0
    if [[ $hosts == *running* ]]; then
        # Another call of the script may have started the run. If a host is missing, the run ends on the others.
        begun=1
    elif [[ $hosts == *absent* ]]; then
        setup && begin
    elif ((!begun)) || [[ $hosts == *idle* ]]; then
        begin
    elif [[ $hosts == *stopped* ]]; then
        exit 75
    else
        for word in $hosts; do
            word=${word#*:}
            ((word == 0)) || worst=$word
            # A host with 75 was asked to stop; the other hosts' errors follow from that.
            ((word != 75)) || break
        done
        ((worst == 75)) || exit "$worst"
        begin
    fi
}

begin() {
    start && begun=1
}

resume() {
    local now seen="" failures=0
    while :; do
        # Without an answer from gcloud, nothing is done.
        now=$(state) || now=UNKNOWN
        [[ $now == "$seen" ]] || echo "launch: $name is ${now:-not there}" >&2
        seen=$now
        case $now in
            ACTIVE)
                failures=0
                look || echo "launch: that failed, trying again" >&2
                ;;
            SUSPENDED | FAILED | "")
                failures=$((failures + 1))
                if ((failures > most_failures)); then
                    echo "error: $name did not become ACTIVE $most_failures times" >&2
                    exit 1
                fi
                { [[ -z $now ]] || delete; } && create || echo "launch: that failed, trying again" >&2
                ;;
        esac
        sleep "$poll"
    done
}

case $command in
    create) create ;;
    setup) setup ;;
    run) start ;;
    status)
        state
        ask
        ;;
    logs) on_hosts "$worker" "tail -n 100 -f calm_jax/run.log" ;;
    stop) stop ;;
    delete) delete ;;
    resume)
        if ((dry_run)); then
            note "every $poll s, until the run has ended:"
            state
            note "if it is SUSPENDED or FAILED:"
            delete
            note "then, or if it does not exist:"
            create
            note "if it is ACTIVE:"
            ask
            note "if a host has no calm_jax:"
            setup
            note "if no host runs it:"
            start
        else
            resume
        fi
        ;;
esac
