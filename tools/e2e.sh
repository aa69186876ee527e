#!/usr/bin/env bash
# Makes .venv/e2e, in which `make e2e` runs: an interpreter with a SGLang as it is installed on a server.
#
# Needs a machine with TP NVIDIA GPUs (default: 1; `make e2e TP=2` hands it on) and network. Skipped when its result is
# there. PYTHON chooses the interpreter (default: python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv/e2e
readonly python=${PYTHON:-python3}
readonly wanted=${TP:-1}

# As a command says it that has not done what it was asked.
fail() {
    printf 'e2e: %s; nothing has been done: %s\n' "$1" "$2" >&2
    exit 2
}

# What the requirements say now; .installed holds what they said when they were last installed.
digest() {
    cat requirements-e2e.txt requirements.txt | cksum
}

if [[ -f $venv/.installed && $(<"$venv/.installed") == "$(digest)" ]]; then
    exit 0
fi
[[ $wanted =~ ^[1-8]$ ]] || fail "TP=$wanted is not a number of GPUs, from 1 to 8" 'leave it out for one GPU'
gpus=$(compgen -G '/dev/nvidia[0-9]*' | wc -l) || true # compgen fails where there is none
((gpus >= wanted)) ||
    fail "make e2e TP=$wanted needs as many NVIDIA GPUs, and this machine has $gpus" \
        'run it where there are as many; E2E_PYTHON=/path/to/python skips this check'
printf '==> setting up %s: SGLang and PyTorch with CUDA, a download of about 4 GB\n' "$venv"
[[ -x $venv/bin/pip ]] || "$python" -m venv "$venv"
"$venv/bin/pip" install --disable-pip-version-check --quiet --requirement requirements-e2e.txt
digest >"$venv/.installed"
