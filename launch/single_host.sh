#!/usr/bin/env bash
# Trains a recipe on one host, on all of its devices, and starts it again after each preemption.
#
#   launch/single_host.sh --config=configs/calm_m.py [--workdir=runs/calm_m] [--config.KEY=VALUE ...] [--dry_run]
#
# All flags but --dry_run are those of python -m calm_jax.main (--mode=eval, too). A run that was asked to stop saves and ends
# with status 75, and is started again; any other status ends this script. SIGTERM, Ctrl-C and a hang-up reach the run, which
# saves, and this script then ends with its status; so it does where a scheduler runs it.
#
# Needs: python with calm_jax installed (pip install -e . , with the extra cuda or tpu on such a machine); for configs/calm_*.py
# and ar_*.py the text of launch/prepare_pile.sh; for CALM-M's checkpoints some 15 GB of disk (two are kept, a third is written).
# Costs: what the recipe does. CALM-M with its autoencoder is 3.47e20 FLOPs (calm_jax/flops.py): 244 H100 hours at an MFU of
# 40 %, an assumption, which are 31 hours on a host of 8. Device hours x your price.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

take_flags "$@"

enter_root
keep_running python -m calm_jax.main "${flags[@]}"
exit "$status"
