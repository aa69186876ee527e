#!/usr/bin/env bash
# Makes .venv/deploy, the small environment of `make deploy` and its sisters. An operator's machine needs nothing else:
# no GPU, no compiler, no torch. PYTHON chooses the interpreter (default: python3, 3.10 or later).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv/deploy
readonly python=${PYTHON:-python3}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

digest() {
    cat requirements-deploy.txt constraints.txt | cksum
}

is_ready() {
    [[ -f $venv/.installed && $(<"$venv/.installed") == "$(digest)" ]] && "$venv/bin/python" -c pass 2>/dev/null
}

main() {
    is_ready && return
    command -v git >/dev/null || fail "git is missing: a release is named after the commit it was made from."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is missing or too old: make PYTHON=/path/to/python3.11 deploy ..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments. Debian and Ubuntu: apt-get install python3-venv"
    mkdir -p .venv
    if command -v flock >/dev/null; then
        exec 9>".venv/.deploy.lock"
        flock 9
        is_ready && return
    fi
    printf '==> setting up %s\n' "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --disable-pip-version-check -qq -r requirements-deploy.txt -c constraints.txt
    digest >"$venv/.installed"
}

main
