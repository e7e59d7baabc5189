#!/usr/bin/env bash
# Trains a recipe on a slice of Cloud TPU VMs, got as a queued resource, and gets another one after each preemption.
#
#   launch/tpu_pod.sh create --name=calm --zone=ZONE --accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite [--spot]
#   launch/tpu_pod.sh setup  --name=calm --zone=ZONE [--mount=COMMAND]   # installs the committed state of this checkout
#   launch/tpu_pod.sh run    --name=calm --zone=ZONE --config=configs/calm_m.py --workdir=/mnt/calm/runs/calm_m [...]
#   launch/tpu_pod.sh resume [the flags of create, setup and run]        # all of it, again and again, until the run has ended
#   launch/tpu_pod.sh status|logs|stop|delete --name=calm --zone=ZONE
#
# For all: --project=PROJECT (gcloud's own unless given) and --dry_run. For logs --worker=N (0). For resume --poll=SECONDS (60).
# Every other flag of run and resume is one of python -m calm_jax.main.
#
# run starts launch/single_host.sh on every host and comes back; what it prints is in ~/calm_jax/run.log there. stop asks all to
# save and to end. resume stays: it waits for the slice, sets it up, runs, and watches. A queued resource that is SUSPENDED
# (preempted) or FAILED is deleted and created again, at most ten times in a row without becoming ACTIVE; hosts that came back from
# a reboot are set going again. It ends with the run's status, or with 75 after stop. Ctrl-C ends resume and leaves the run alone;
# given again, it watches what runs, and starts what does not.
#
# --mount=COMMAND runs on every host before the installation, and has to mount what all hosts share: the prepared text and the
# workdir, as a preempted slice loses its disks. Filestore, for example:
#   --mount='sudo apt-get -qq install nfs-common && sudo mkdir -p /mnt/calm && sudo mount -t nfs ADDRESS:/SHARE /mnt/calm'
# A bucket by gcsfuse should have a hierarchical namespace: checkpoints become valid by the renaming of a folder.
#
# Needs: gcloud, logged in, with an SSH key; a project with the TPU API, quota for the slice in the zone; a share as above, 1.2 TB
# for CALM's prepared text; hosts that reach PyPI and GitHub (they have Python 3.10, and get 3.12 by uv).
# Costs: chip hours x your price, from ACTIVE until delete, also while nothing runs: delete it. CALM-M with its autoencoder is
# 3.47e20 FLOPs (calm_jax/flops.py): 1224 v5e, 525 v5p or 263 v6e chip hours at an MFU of 40 %, an assumption; 4.8 hours on 256 v5e.
# Tested by dry runs and with stand-ins for gcloud; flags as in its reference of 2025 (cloud.google.com/sdk/gcloud/reference/
# compute/tpus). Never run against a cloud.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# On the hosts. /tmp is emptied when one boots, so that what it says is true of this boot.
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
    need_recipe ${flags[@]+"${flags[@]}"}
    [[ " ${flags[*]}" == *" --workdir=/"* ]] || fail "give --workdir=DIR, absolute, where all hosts see it"
elif ((${#flags[@]})); then
    fail "$command takes no ${flags[0]}"
fi
[[ $poll =~ ^[0-9]+$ && $worker =~ ^[0-9]+$ ]] || fail "--poll=$poll and --worker=$worker must be whole numbers"
where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")

on_hosts() {
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

create() {
    local request=("$name" --node-id="$name" --accelerator-type="$accelerator" --runtime-version="$runtime")
    ((!spot)) || request+=(--spot)
    run gcloud compute tpus queued-resources create "${request[@]}" "${where[@]}"
}

# Also its node.
delete() {
    run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

# Its state; nothing if there is no such resource.
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
    # Chained, as `resume` calls this where a failure does not end the script.
    run git -C "$root" archive --format=tar.gz --output="$folder/calm_jax.tar.gz" HEAD &&
        run gcloud compute tpus tpu-vm scp "$folder/calm_jax.tar.gz" "$name:" "${where[@]}" --worker=all &&
        on_hosts all "$install" || failed=1
    ((dry_run)) || rm -r "$folder"
    return "$failed"
}

# A host's process notes its number and how it ends, and outlives the connection.
start() {
    # Not expanded here: a host's shell does.
    # shellcheck disable=SC2016
    local body='launch/single_host.sh "$@" >> run.log 2>&1 & echo $! > MARKS/pid; wait $!; echo $? > MARKS/status' begin
    begin="if kill -0 \"\$(cat $marks/pid 2>/dev/null)\" 2>/dev/null; then echo 'it is running already' >&2; exit 1; fi"
    begin+="; cd calm_jax && . .venv/bin/activate && mkdir -p $marks && rm -f $marks/*"
    begin+=" && (nohup $(quoted bash -c "${body//MARKS/$marks}" calm_jax --distributed=on "${flags[@]}") > /dev/null 2>&1 < /dev/null &)"
    on_hosts all "$begin"
}

# A line from each host: calm_jax:absent, idle, running, stopped or the status that its run ended with.
ask() {
    local question="test -e calm_jax/.venv/ready || { echo calm_jax:absent; exit; }; cd $marks 2>/dev/null || { echo calm_jax:idle; exit; }"
    question+="; if kill -0 \"\$(cat pid 2>/dev/null)\" 2>/dev/null; then echo calm_jax:running; elif test -e stopped; then echo calm_jax:stopped"
    question+="; elif test -e status; then echo calm_jax:\$(cat status); else echo calm_jax:idle; fi"
    on_hosts all "$question"
}

stop() {
    on_hosts all "cd $marks && touch stopped && kill -TERM \"\$(cat pid)\""
}

# One look at an ACTIVE slice: sets going what does not run, and ends the script when the run has ended.
begun=0
look() {
    local hosts word worst=0
    # A host that does not answer is booting, or about to be taken away.
    hosts=$(ask | grep -o 'calm_jax:[a-z0-9]*') || return 0
    if [[ $hosts == *running* ]]; then
        # Also one that another call has started. Where a host is missing the others end by themselves.
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
            # That a run was asked to stop is the cause; what became of the others follows from it.
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
        # No answer says nothing.
        now=$(state) || now=UNKNOWN
        [[ $now == "$seen" ]] || echo "launch: $name is ${now:-not there}" >&2
        seen=$now
        case $now in
            ACTIVE)
                failures=0
                look || echo "launch: not yet, trying again" >&2
                ;;
            SUSPENDED | FAILED | "")
                failures=$((failures + 1))
                if ((failures > most_failures)); then
                    echo "error: $name did not become ACTIVE $most_failures times" >&2
                    exit 1
                fi
                { [[ -z $now ]] || delete; } && create || echo "launch: not yet, trying again" >&2
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
            note "where it is SUSPENDED or FAILED:"
            delete
            note "then, and where there is none:"
            create
            note "where it is ACTIVE:"
            ask
            note "where hosts have no calm_jax:"
            setup
            note "where none runs:"
            start
        else
            resume
        fi
        ;;
esac
