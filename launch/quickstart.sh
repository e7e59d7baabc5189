#!/usr/bin/env bash
# Trains the quickstart recipe on this machine: makes a virtual environment, installs calm_jax in it, and runs both stages.
#
#   launch/quickstart.sh [--config=configs/quickstart.py] [--workdir=runs/quickstart] [--config.KEY=VALUE ...] [--dry_run]
#
# Another recipe, such as --config=configs/quickstart.py:head=energy, has another default workdir.
#
# All flags but --dry_run are those of python -m calm_jax.main. The environment is .venv in the checkout; it is made and filled
# when it is missing, or older than requirements.txt, constraints.txt or pyproject.toml. Given again, the command continues an
# unfinished run from its last checkpoint, and does nothing where the run is finished. SIGTERM and Ctrl-C reach the run, which saves;
# this script then ends with its status.
#
# Needs: Python 3.11, 3.12 or 3.13 with venv (on Debian and Ubuntu the package python3-venv), a connection to PyPI for the
# installation, 3 GB of memory. The installation has no GPU or TPU support: the model is made for a CPU.
# Costs: 11 minutes after the installation for the default recipe on two cores of an Intel Xeon (Ice Lake, 2.8 GHz), about half of
# that on two of an AMD EPYC (Zen 5), 8 with the installation on two of a Xeon with AMX (docs/benchmarks.md); 3.8e13 floating-point
# operations. For comparison: CALM-M with its autoencoder is 3.47e20 FLOPs (calm_jax/cost/flops.py).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

has_recipe=0
for flag in "$@"; do
    [[ $flag != --config=* ]] || has_recipe=1
done
((has_recipe)) || set -- --config=configs/quickstart.py "$@"
take_flags "$@"

# Sets `python` to an interpreter that calm_jax supports and that can make an environment.
find_python() {
    local check='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
    for python in python3 python3.13 python3.12 python3.11; do
        if ((dry_run)) || "$python" -c "$check" 2>/dev/null; then
            return
        fi
    done
    fail "there is no Python 3.11, 3.12 or 3.13 with venv on PATH (on Debian and Ubuntu: apt install python3-venv)"
}

called_from=$PWD
enter_root
# Touched last: an installation that was interrupted is repeated.
installed=.venv/installed_by_quickstart
is_current=1
for file in requirements.txt constraints.txt pyproject.toml; do
    [[ $installed -nt $file ]] || is_current=0
done
if ((!is_current)); then
    find_python
    ((dry_run)) || echo "installing calm_jax into .venv, which takes a minute or two" >&2
    run "$python" -m venv .venv
    run .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
    run touch "$installed"
fi
attend .venv/bin/python -m calm_jax.main "${flags[@]}"
((status || dry_run)) || [[ $called_from == "$root" ]] || echo "These commands are for the folder $root: cd there first."
exit "$status"
