#!/usr/bin/env bash
# Trains a recipe on one host, and starts it again after each preemption.
#
#   launch/single_host.sh --config=configs/calm_m.py --workdir=runs/calm_m [--config.KEY=VALUE ...]
#
# Needs an installed calm_jax (pip install -e . , with the extra cuda or tpu on such a machine).
# A run that was asked to stop saves and exits with status 75; anything else ends this script too.
set -euo pipefail
cd "$(dirname "$0")/.."

stopped=0
trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM
# A terminal sends Ctrl-C to the run as well; a second signal would end it before it has saved.
trap 'stopped=1' INT
while true; do
    python -m calm_jax.main "$@" &
    child=$!
    status=0
    wait "$child" || status=$?
    # A signal to this script ends the first wait early; the second one has the status.
    if ((stopped)); then
        wait "$child" || status=$?
        exit "$status"
    fi
    ((status == 75)) || exit "$status"
    echo "launch: stopped by a signal, going on" >&2
done
