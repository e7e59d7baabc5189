#!/usr/bin/env bash
# Trains a recipe on the GPUs of one or more Slurm nodes, and resumes by itself after preemption and time limits.
#
#   sbatch [--nodes=4 --time=24:00:00 --partition=...] launch/slurm_gpu.sh --config=configs/calm_m.py \
#       --workdir=/shared/runs/calm_m [--config.KEY=VALUE ...]
#   launch/slurm_gpu.sh --dry_run --config=configs/calm_m.py   # prints what the job would run; nothing is submitted
#
# Submit from the root of the checkout, in the Python environment that has calm_jax: sbatch passes both on to the job. All flags
# after the script are those of python -m calm_jax.main. For nodes of G GPUs give sbatch --gpus-per-node=G --ntasks-per-node=G.
#
# The job runs one process for each GPU, and every process sees all GPUs of its node: JAX uses the one whose number is
# SLURM_LOCALID. Do not give --gpus-per-task, which would hide all GPUs but one and number that one 0.
#
# 300 s before the time limit, and at preemption, every process gets SIGTERM; all save at the same step and end with status 75.
# The job is then requeued, unless it was cancelled, and resumes from the checkpoint. Any other status ends the job. scancel JOB
# ends it for good, and leaves KillWait seconds (30 by Slurm's default) to save.
#
# Needs: an account on a Slurm cluster (21.08 or later) with NVIDIA GPUs that allows requeueing; the checkout, the Python
# environment (pip install -c constraints.txt -e '.[cuda]'), the prepared text and the workdir on a file system that all nodes share.
# Costs: GPU hours x your price. CALM-M with its autoencoder takes 3.47e20 FLOPs (calm_jax/cost/flops.py): at an assumed MFU of
# 40 %, 244 H100 hours or 773 A100 hours; on 4 nodes of 8 H100, 8 hours. By the step that was measured on one H100
# (docs/scaling.md), the language model alone takes 262 H100 hours. The job takes whole nodes.
# Tested by dry runs and with stubs of Slurm's commands, but never on a cluster. The flags are those of Slurm 23.11's manual pages.
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
# sbatch runs a copy of this script, in another folder.
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

# Signals go to the tasks, not to srun, which would end its tasks by SIGKILL.
stop_child() {
    scancel --signal=TERM "$job"
}

enter_root
# --kill-on-bad-exit=0: the first task that has saved and ends with 75 must not end the others. --wait=300: tasks still running
# 300 s later hang, because another one crashed. --cpu-bind=none: Slurm would bind each task to one core.
attend srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none python -m calm_jax.main "${flags[@]}"

note "if that ends with status 75, and the job was not cancelled:"
if ((dry_run)); then
    run squeue --noheader --format=%T --jobs="$job"
    run scontrol requeue "$job"
elif ((status == 75)); then
    # A job is RUNNING also while it is being preempted; after scancel it is CANCELLED or COMPLETING.
    state=$(squeue --noheader --format=%T --jobs="$job" || true)
    if [[ $state == RUNNING ]]; then
        echo "launch: saved, requeueing the job" >&2
        scontrol requeue "$job" || echo "launch: the job cannot be requeued: submit it again to resume" >&2
    fi
fi
exit "$status"
