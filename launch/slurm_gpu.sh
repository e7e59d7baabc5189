#!/usr/bin/env bash
# Trains a recipe on the GPUs of one or more Slurm nodes, and goes on by itself after preemption and time limits.
#
#   sbatch [--nodes=4 --time=24:00:00 --partition=...] launch/slurm_gpu.sh --config=configs/calm_m.py \
#       --workdir=/shared/runs/calm_m [--config.KEY=VALUE ...]
#   launch/slurm_gpu.sh --dry_run --config=configs/calm_m.py   # prints what the job would run; nothing is submitted
#
# Submit from the root of the checkout, with the environment active that has calm_jax: sbatch hands both on. All flags behind the
# script are those of python -m calm_jax.main. For nodes of G GPUs give sbatch --gpus-per-node=G --ntasks-per-node=G.
#
# One process a GPU, each of which sees all of its node's: JAX takes a Slurm task for one device, the one that SLURM_LOCALID
# names. Then no --gpus-per-task, which would hide the others and number the one that is left 0.
#
# 300 s before the time limit, and at preemption, every process gets SIGTERM; they save at one step and end with status 75. The
# job then goes back into the queue, unless it was cancelled; the next one goes on from the checkpoint. Any other status ends the
# job. scancel JOB ends it for good: there are KillWait seconds (30, unless the site says otherwise) to save.
#
# Needs: an account on a Slurm cluster (21.08 or later) with NVIDIA GPUs, jobs that may be requeued; a checkout, Python
# environment (pip install -e '.[cuda]'), prepared text and workdir on a file system that all nodes see.
# Costs: GPU hours x your price. CALM-M with its autoencoder is 3.47e20 FLOPs (calm_jax/flops.py): 244 H100 hours or 773 A100
# hours at an MFU of 40 %, an assumption; for 4 nodes of 8 H100 that is 8 hours. Whole nodes are taken, whatever runs on them.
# Tested by dry runs and with stand-ins for Slurm's commands; flags as in the manual pages of Slurm 23.11. Never run on a cluster.
#
#SBATCH --job-name=calm_jax
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
set -euo pipefail
# sbatch runs a copy of this script, which lies elsewhere.
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/common.sh ]] || here=${SLURM_SUBMIT_DIR:-.}/launch
if [[ ! -f $here/common.sh ]]; then
    echo "error: there is no $here/common.sh: submit from the root of the checkout" >&2
    exit 2
fi
# shellcheck source=launch/common.sh
. "$here/common.sh"

take_flags "$@"
job=${SLURM_JOB_ID:-}
if [[ -z $job ]]; then
    ((dry_run)) || fail "this is no Slurm job: give sbatch before $0"
    job=JOB
fi
gpus=${SLURM_GPUS_ON_NODE:-} tasks=${SLURM_NTASKS_PER_NODE:-}
if [[ -n $gpus && -n $tasks && $gpus != "$tasks" ]]; then
    fail "--gpus-per-node=$gpus and --ntasks-per-node=$tasks must be equal: one process a GPU"
fi

# Not through srun, which ends its tasks by SIGKILL when it gets SIGTERM itself.
stop_child() {
    scancel --signal=TERM "$job"
}

enter_root
# All end with 75 when they have saved, not at the same moment: the first must not take the others down. Those that are left
# after 300 s hang, as one that crashed has left them.
# Tasks may use all cores: Slurm binds each to one.
attend srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none python -m calm_jax.main "${flags[@]}"

note "where that ends with status 75, and the job is not cancelled:"
if ((dry_run)); then
    run squeue --noheader --format=%T --jobs="$job"
    run scontrol requeue "$job"
elif ((status == 75)); then
    # RUNNING also while it is being preempted; one that scancel ended is CANCELLED or COMPLETING.
    state=$(squeue --noheader --format=%T --jobs="$job" || true)
    if [[ $state == RUNNING ]]; then
        echo "launch: saved, back into the queue" >&2
        scontrol requeue "$job" || echo "launch: it cannot be requeued: submit it again, and it goes on" >&2
    fi
fi
exit "$status"
