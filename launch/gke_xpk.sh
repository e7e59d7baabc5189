#!/usr/bin/env bash
# Trains a recipe on TPU slices of a GKE cluster, as a workload of xpk, which starts it again after each preemption.
#
#   launch/gke_xpk.sh create --cluster=NAME --workload=calm-m --zone=ZONE --tpu_type=v5litepod-256 --storage=NAME \
#       --config=configs/calm_m.py --workdir=/mnt/calm/runs/calm_m [--config.KEY=VALUE ...]
#   launch/gke_xpk.sh list   --cluster=NAME --zone=ZONE
#   launch/gke_xpk.sh delete --cluster=NAME --workload=calm-m --zone=ZONE
#
# For all: --project=PROJECT (gcloud's own unless given) and --dry_run. For create: --num_slices=N (1); --max_restarts=N (100);
# --storage=NAME, a storage of the cluster to mount (leave it out where one mounts itself); --docker_image=IMAGE, one with
# calm_jax in its working directory and installed; or --base_docker_image=IMAGE (python:3.12), to which xpk adds this checkout with
# everything in it, runs/ and prepared/ too, and which installs calm_jax each time that it starts.
# Every other flag of create is one of python -m calm_jax.main.
#
# A pod that is told to go gets SIGTERM; all save at one step and end with status 75, on which the workload is started again, as it is
# when a pod is killed or its node goes away. Another status ends it. Starts are counted by --max_restarts: give the same command
# under another --workload when they are used up, and the run goes on.
#
# Needs: xpk (pip install xpk), gcloud, kubectl and docker, logged in; a cluster:
#   xpk cluster create --cluster=NAME --zone=ZONE --tpu-type=v5litepod-256 --num-slices=1 --spot --enable-gcpfilestore-csi-driver
# and a file system that all pods see, for the prepared text (1.2 TB for CALM's) and the workdir: a storage that the cluster knows, by
# xpk storage create or attach, with a mount point and not read-only (docs/usage/storage.md of xpk).
# Costs: chip hours x your price, for as long as the cluster has its nodes: delete it. CALM-M with its autoencoder is 3.47e20 FLOPs
# (calm_jax/flops.py): 1224 v5e, 525 v5p or 263 v6e chip hours at an MFU of 40 %, an assumption; 4.8 hours on 256 v5e.
# Tested by dry runs and with a stand-in for xpk; flags as in the sources of xpk of October 2025 (github.com/AI-Hypercomputer/
# xpk). Never run against a cloud.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command=${1:-}
case $command in
    create | list | delete) shift ;;
    *) fail "'$command' is none of create, list, delete" ;;
esac
cluster="" workload="" zone="" project="" tpu_type="" num_slices=1 storage="" max_restarts=100 image="" base=python:3.12 flags=()
for flag in "$@"; do
    case $flag in
        --cluster=*) cluster=${flag#*=} ;;
        --workload=*) workload=${flag#*=} ;;
        --zone=*) zone=${flag#*=} ;;
        --project=*) project=${flag#*=} ;;
        --tpu_type=*) tpu_type=${flag#*=} ;;
        --num_slices=*) num_slices=${flag#*=} ;;
        --storage=*) storage=${flag#*=} ;;
        --max_restarts=*) max_restarts=${flag#*=} ;;
        --docker_image=*) image=${flag#*=} ;;
        --base_docker_image=*) base=${flag#*=} ;;
        --dry_run) dry_run=1 ;;
        *) flags+=("$flag") ;;
    esac
done
[[ -n $cluster && -n $zone ]] || fail "give --cluster=NAME and --zone=ZONE"
[[ -n $workload || $command == list ]] || fail "give --workload=NAME"
where=("--cluster=$cluster" "--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")
if [[ $command != create ]] && ((${#flags[@]})); then
    fail "$command takes no ${flags[0]}"
fi

create() {
    [[ -n $tpu_type ]] || fail "give --tpu_type=TYPE, such as v5litepod-256"
    [[ $num_slices =~ ^[1-9][0-9]*$ ]] || fail "--num_slices=$num_slices must be a positive whole number"
    [[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max_restarts=$max_restarts must be a whole number"
    need_recipe ${flags[@]+"${flags[@]}"}
    [[ " ${flags[*]}" == *" --workdir=/"* ]] || fail "give --workdir=DIR, absolute, where all pods see it"
    local request=("${where[@]}" "--workload=$workload" "--tpu-type=$tpu_type" "--num-slices=$num_slices")
    # xpk starts again on 42 and from 127 on by itself: killed pods are there, 75 is not.
    request+=("--max-restarts=$max_restarts" --restart-on-exit-codes=75 --termination-grace-period-seconds=120)
    [[ -z $storage ]] || request+=("--storage=$storage")
    # SIGTERM reaches the shell that xpk starts the command in: python has to take its place.
    local main
    main="exec $(quoted python -m calm_jax.main "${flags[@]}")"
    if [[ -n $image ]]; then
        request+=("--docker-image=$image")
    else
        request+=("--base-docker-image=$base" "--script-dir=$root")
        main="pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tpu]' && $main"
    fi
    run xpk workload create "${request[@]}" "--command=$main"
}

case $command in
    create) create ;;
    list) run xpk workload list "${where[@]}" ;;
    # It asks otherwise.
    delete) run xpk workload delete "${where[@]}" "--workload=$workload" --force ;;
esac
