#!/usr/bin/env bash
# Trains a recipe on TPU slices of a GKE cluster, as an xpk workload, which is restarted after each preemption.
#
#   launch/gke_xpk.sh create --cluster=NAME --workload=calm-m --zone=ZONE --tpu_type=v5litepod-256 --storage=NAME \
#       --config=configs/calm_m.py --workdir=/mnt/calm/runs/calm_m [--config.KEY=VALUE ...]
#   launch/gke_xpk.sh list   --cluster=NAME --zone=ZONE
#   launch/gke_xpk.sh delete --cluster=NAME --workload=calm-m --zone=ZONE
#
# All commands take --project=PROJECT (default: gcloud's) and --dry_run. create takes:
#   --tpu_type=TYPE: v5litepod-N or v6e-N for N chips, v5p-N for N/2 chips, as N counts cores, two a chip;
#   --num_slices=N (1), --max_restarts=N (100);
#   --storage=NAME: a storage of the cluster to mount; leave it out if the storage mounts itself;
#   --docker_image=IMAGE: an image with the checkout as working directory and calm_jax installed; or
#   --base_docker_image=IMAGE (python:3.12): xpk adds all of this checkout to it, with runs/ and prepared/, and every start of the
#       container installs calm_jax;
#   all other flags: those of python -m calm_jax.main. The paper's recipes read the folder prepared/ of the checkout. Keep it out of
#       an image, as it has more than 1 TB, and name the text on the storage: --config.data.train_files=/mnt/calm/prepared/pile/lm
#       --config.data.autoencoder_files=/mnt/calm/prepared/pile/autoencoder
#       --config.data.validation_files=/mnt/calm/prepared/wikitext.jsonl
#
# A pod that has to leave gets SIGTERM; all pods save at the same step and end with status 75, and the workload is restarted. It is
# also restarted when a pod is killed or loses its node. Any other status ends the workload. After --max_restarts restarts, give
# the same command with another --workload: the run resumes.
#
# Needs: xpk (pip install xpk), gcloud, kubectl and docker, logged in; a cluster:
#   xpk cluster create --cluster=NAME --zone=ZONE --tpu-type=v5litepod-256 --num-slices=1 --spot --enable-gcpfilestore-csi-driver
# and a file system that all pods share, for the prepared text (1.2 TB for CALM's) and the workdir: a writable storage of the
# cluster with a mount point, made by xpk storage create or attach (docs/usage/storage.md of xpk).
# Costs: chip hours x your price, as long as the cluster has its nodes, so delete it afterwards. CALM-M with its autoencoder takes
# 3.47e20 FLOPs (calm_jax/cost/flops.py): at an assumed MFU of 40 %, 1224 v5e, 525 v5p or 263 v6e chip hours; on 256 v5e, 4.8 hours.
# Tested by dry runs and with a stub of xpk, but never in a cloud. The flags are those in xpk's sources of October 2025
# (github.com/AI-Hypercomputer/xpk).
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
    need_recipe "in the checkout" ${flags[@]+"${flags[@]}"}
    [[ " ${flags[*]}" == *" --workdir=/"* ]] || fail "give --workdir=DIR, absolute, on a file system that all pods share"
    need_text "${flags[@]}"
    local request=("${where[@]}" "--workload=$workload" "--tpu-type=$tpu_type" "--num-slices=$num_slices")
    # xpk itself restarts on 42 and on 127 and above, which includes killed pods, but not on 75.
    request+=("--max-restarts=$max_restarts" --restart-on-exit-codes=75 --termination-grace-period-seconds=120)
    [[ -z $storage ]] || request+=("--storage=$storage")
    # xpk runs the command in a shell, which gets the SIGTERM; `exec` puts python in the shell's place.
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
    # --force: do not ask for confirmation.
    delete) run xpk workload delete "${where[@]}" "--workload=$workload" --force ;;
esac
