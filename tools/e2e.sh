#!/usr/bin/env bash
# Makes .venv/e2e, in which `make e2e` runs: an interpreter with a SGLang as it is installed on a server.
#
# Needs a machine with an NVIDIA GPU and network. Skipped when its result is there. PYTHON chooses the interpreter (default:
# python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv/e2e
readonly python=${PYTHON:-python3}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# What the requirements say now; .installed holds what they said when they were last installed.
digest() {
    cat requirements-e2e.txt requirements.txt | cksum
}

if [[ -f $venv/.installed && $(<"$venv/.installed") == "$(digest)" ]]; then
    exit 0
fi
compgen -G '/dev/nvidia[0-9]*' >/dev/null ||
    fail "make e2e needs an NVIDIA GPU, and this machine has none. E2E_PYTHON=/path/to/python skips this check."
printf '==> setting up %s: SGLang and PyTorch with CUDA, a download of about 4 GB\n' "$venv"
[[ -x $venv/bin/pip ]] || "$python" -m venv "$venv"
"$venv/bin/pip" install --disable-pip-version-check --quiet --requirement requirements-e2e.txt
digest >"$venv/.installed"
