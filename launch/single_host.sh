#!/usr/bin/env bash
# Trains a recipe on one host, on all of its devices, and starts it again after each preemption.
#
#   launch/single_host.sh --config=configs/calm_m.py [--workdir=runs/calm_m] [--config.KEY=VALUE ...] [--dry_run]
#
# All flags but --dry_run are those of python -m calm_jax.main (--mode=eval too). A run that is asked to stop saves and ends
# with status 75; this script starts it again, and ends with any other status. SIGTERM, Ctrl-C or a hang-up to this script are
# passed on to the run, which saves; the script then ends with the run's status.
#
# Needs: python with calm_jax installed (pip install -c constraints.txt -e . , on accelerators with the extra cuda or tpu); for configs/calm_*.py
# and ar_*.py the text of launch/prepare_pile.sh; for CALM-M's checkpoints some 15 GB of disk (two are kept while a third is
# written).
# Costs: device hours x your price. CALM-M with its autoencoder takes 3.47e20 FLOPs (calm_jax/cost/flops.py): at an assumed MFU of
# 40 %, 244 H100 hours, which are 31 hours on a host of 8. By the step that was measured on one H100 (docs/scaling.md), the language
# model alone takes 262 H100 hours.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

take_flags "$@"

enter_root
keep_running python -m calm_jax.main "${flags[@]}"
exit "$status"
