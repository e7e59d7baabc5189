#!/usr/bin/env bash
# Reproduces the paper's headline result, CALM-M (371.7M parameters, published BrierLM 5.72), from raw text to score and samples.
#
#   launch/reproduce_calm_m.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl [--workdir=runs/calm_m]
#       [--prepared=prepared] [--steps=prepare,autoencoder,lm,evaluate,samples] [--launcher=COMMAND] [--dry_run] [--config.KEY=VALUE ...]
#
#   prepare      the Pile as tokens (launch/prepare_pile.sh describes the three inputs)               PREPARED/pile, PREPARED/wikitext.jsonl
#   autoencoder  30,000 steps                                                                       WORKDIR/autoencoder
#   lm           CALM-M, 250,000 steps                                                              WORKDIR/lm, results.json
#   evaluate     BrierLM as published and at equal context                                          WORKDIR/evaluations.jsonl
#   samples      four prompts at temperature 0.5                                                    WORKDIR/headline_samples.jsonl
#
# The same command resumes after any interruption: each step does what is left of it, and a finished step does nothing. To
# evaluate or sample again, delete that step's file. SIGTERM and Ctrl-C are passed on to the running step; this script then ends
# with the step's status, which is 75 if the step has saved.
#
# The script trains on the devices of this host. --launcher=COMMAND runs autoencoder, lm and evaluate elsewhere: COMMAND is another
# script of this folder with its own flags, gets the flags of calm_jax.main besides, and must return when the run has ended:
#   --launcher='sbatch --wait --nodes=4 launch/slurm_gpu.sh'   # returns at a requeue: repeat the command once the job has ended
#   --launcher=./on_tpus.sh
# COMMAND is split at blanks and runs in the checkout. Flags that hold blanks, such as tpu_pod.sh's --mount, need an executable script of your own, here on_tpus.sh with
#   exec launch/tpu_pod.sh resume --name=calm --zone=ZONE --accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite --spot \
#       --mount='...' "$@"
# Text and workdir must then be on a shared file system that has the same path on this host and there (--prepared=/mnt/calm/prepared
# --workdir=/mnt/calm/runs/calm_m). samples always runs on this host.
# On any devices the batch of 2M tokens is split into as many microbatches as it takes to fit (training.accumulation_steps=0); where one row a
# device does not fit, it ends with an error.
#
# Needs: calm_jax with the extras data and cuda or tpu; 350 GB of the Pile, 1.2 TB for its tokens, 15 GB for checkpoints.
# Costs: device hours x your price, and 60 core hours for preparing. Training takes 3.47e20 FLOPs (calm_jax/cost/flops.py): 6.72e18
# for the autoencoder, 3.41e20 for CALM-M; at an assumed MFU of 40 %, 244 H100 hours (31 hours on 8), 773 A100 hours, 1224 v5e,
# 525 v5p or 263 v6e chip hours. By the step that was measured on one H100 (docs/scaling.md), the 250,000 steps of CALM-M alone take
# 262 H100 hours. Nobody has run it to its end; its steps are tested with stubs.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

every_step=prepare,autoencoder,lm,evaluate,samples
pile="" tokenizer="" validation="" workdir=runs/calm_m prepared=prepared steps=$every_step launcher=launch/single_host.sh flags=()
for flag in "$@"; do
    case $flag in
        --pile=*) pile=${flag#*=} ;;
        --tokenizer=*) tokenizer=${flag#*=} ;;
        --validation=*) validation=${flag#*=} ;;
        --workdir=*) workdir=${flag#*=} ;;
        --prepared=*) prepared=${flag#*=} ;;
        --steps=*) steps=${flag#*=} ;;
        --launcher=*) launcher=${flag#*=} ;;
        --dry_run) dry_run=1 ;;
        --config.*=*) flags+=("$(with_absolute_paths "$flag")") ;;
        *) fail "$flag is no flag of this script; keys of the recipe are --config.KEY=VALUE" ;;
    esac
done
for step in ${steps//,/ }; do
    [[ ,$every_step, == *,$step,* ]] || fail "--steps=$steps: '$step' is none of $every_step"
done
[[ -n ${steps//,/} ]] || fail "--steps= names none of $every_step"
has() { [[ ,$steps, == *,$1,* ]]; }
if has prepare && [[ -z $pile || -z $tokenizer || -z $validation ]]; then
    fail "give --pile=DIR, --tokenizer=FILE and --validation=FILE, or leave prepare out of --steps"
fi
[[ -n $workdir && -n $prepared && -n ${launcher// /} ]] || fail "--workdir, --prepared and --launcher must not be empty"
need_local --workdir "$workdir"
need_local --prepared "$prepared"
read -ra launch <<< "$launcher"
pile=$(absolute "$pile") tokenizer=$(absolute "$tokenizer") validation=$(absolute "$validation")
workdir=$(absolute "$workdir") prepared=$(absolute "$prepared")

# Runs one step. If it fails, the script ends with its status.
step() {
    local name=$1
    shift
    attend "$@"
    if ((status)); then
        ((dry_run)) || echo "launch: the step $name ended with status $status; the same command resumes there" >&2
        exit "$status"
    fi
}

train() {
    step "$1" "${launch[@]}" --config=configs/calm_m.py --workdir="$workdir" --config.stage="$1" \
        --config.data.train_files="$prepared/pile/lm" --config.data.autoencoder_files="$prepared/pile/autoencoder" \
        --config.data.validation_files="$prepared/wikitext.jsonl" ${flags[@]+"${flags[@]}"}
}

enter_root
if has prepare; then
    preparing=(launch/prepare_pile.sh --pile="$pile" --tokenizer="$tokenizer" --validation="$validation")
    preparing+=(--output="$prepared" "--parts=autoencoder,lm")
    if ((dry_run)); then
        "${preparing[@]}" --dry_run
    else
        step prepare "${preparing[@]}"
    fi
fi
if has autoencoder; then train autoencoder; fi
if has lm; then train lm; fi
if has evaluate && [[ ! -s $workdir/evaluations.jsonl ]]; then
    step evaluate "${launch[@]}" --mode=eval --config="configs/workdir.py:$workdir" --workdir="$workdir"
fi
if has samples && [[ ! -s $workdir/headline_samples.jsonl ]]; then
    step samples python -m calm_jax.generate --workdir="$workdir" --output="$workdir/headline_samples.jsonl" \
        --temperature=0.5 --max_tokens=128 --prompt="The" --prompt="In the year" --prompt="The capital of France is" \
        --prompt="Once upon a time"
fi
