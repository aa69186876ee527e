#!/usr/bin/env bash
# Makes .venv: an interpreter with the pinned requirements, and each SGLang release in a directory of its own.
#
# Every step is skipped when its result is there, and no half-made result is ever taken for a whole one, so the script
# can be interrupted and run again. PYTHON chooses the interpreter for a new .venv (default: python3); a .venv that is
# there keeps its own, and a PYTHON that names another one is an error.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly python=${PYTHON:-python3}
readonly sglang_releases=(0.5.12 0.5.23)
requirement_files=(requirements-dev.txt)
if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    requirement_files+=(requirements-gpu.txt)
fi
readonly requirement_files

say() {
    printf '==> %s\n' "$*"
}

# One line a sentence, so that they can be read in a log as well.
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '       %s\n' "$@" >&2
    exit 1
}

# What the requirements say now; .venv/.installed holds what they said when they were last installed.
requirements_digest() {
    cat "${requirement_files[@]}" requirements.txt constraints.txt | cksum
}

requirements_are_installed() {
    [[ -f $venv/.installed && $(<"$venv/.installed") == "$(requirements_digest)" ]]
}

sglang_is_unpacked() {
    [[ -f $venv/sglang-$1/sglang-$1.dist-info/RECORD ]]
}

all_is_there() {
    local release
    requirements_are_installed || return 1
    for release in "${sglang_releases[@]}"; do
        sglang_is_unpacked "$release" || return 1
    done
    "$venv/bin/python" -c pass 2>/dev/null
}

check_the_machine() {
    [[ $(uname -s) == Linux ]] || fail "this needs Linux: SGLang, Triton and CUDA do."
    command -v "${CXX:-g++}" >/dev/null ||
        fail "${CXX:-g++} is missing: the kernel is also compiled for the CPU, where the demo and the tests run it." \
            "Debian and Ubuntu: apt-get install g++    Fedora and RHEL: dnf install gcc-c++"
}

# The program behind the links: that of a virtual environment is the one it was made with.
real_program() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null
}

check_the_choice() {
    [[ -n ${PYTHON:-} ]] || return 0
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is missing: name a Python 3.10 to 3.13, or leave PYTHON out."
    local chosen made_with
    chosen=$(real_program "$PYTHON") || fail "PYTHON=$PYTHON does not run: name another one, or leave PYTHON out."
    made_with=$(real_program "$venv/bin/python") || return 0
    [[ $chosen == "$made_with" ]] ||
        fail "PYTHON=$PYTHON is $chosen, but $venv was made with $made_with: delete $venv, or leave PYTHON out."
}

check_the_interpreter() {
    command -v "$python" >/dev/null ||
        fail "$python is missing: install Python 3.10 to 3.13, or name one: make PYTHON=/path/to/python3.11"
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$python is $("$python" --version 2>&1), and Python 3.10 to 3.13 is needed." \
            "Name another one: make PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: its modules venv and ensurepip are missing." \
            "Debian and Ubuntu: apt-get install python3-venv"
}

make_the_environment() {
    if [[ ! -x $venv/bin/pip ]]; then
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    "$venv/bin/python" -c pass ||
        fail "$venv/bin/python does not run any more; its interpreter has gone. Delete $venv and run make again."
}

# On a terminal pip shows how far it has come; in a log its lines for 130 packages would only hide the rest.
pip_install() {
    local quiet=()
    [[ -t 1 ]] || quiet=(-qq)
    "$venv/bin/pip" install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} "$@"
}

install_the_requirements() {
    requirements_are_installed && return
    say "installing the pinned requirements (PyTorch with CUDA, CuPy, SGLang's dependencies, the test tools)"
    pip_install "${requirement_files[@]/#/--requirement=}" --constraint constraints.txt
    requirements_digest >"$venv/.installed"
}

# `pip --target` moves a package in piece by piece, so it works beside the place and the whole is renamed into it.
unpack_sglang() {
    local release=$1 place=$venv/sglang-$1
    sglang_is_unpacked "$release" && return
    # SGLang 0.5.23 is built for Python 3.11 and later. Only its compiled extensions are, which the Triton backend does
    # not touch, so that the tests on Python 3.10 can do with the build for 3.11.
    local for_python=(--only-binary=:all:)
    if [[ $release == 0.5.23 ]] && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then
        for_python+=(--python-version 3.11 --ignore-requires-python)
    fi
    say "unpacking SGLang $release"
    rm -rf "$place" "$place.part"
    pip_install --no-deps "${for_python[@]}" --target "$place.part" "sglang==$release"
    mv "$place.part" "$place"
}

main() {
    check_the_machine
    check_the_choice
    all_is_there && return
    [[ -x $venv/bin/pip ]] || check_the_interpreter
    # Two makes at once: the second waits and then finds everything there.
    mkdir -p "$venv"
    if command -v flock >/dev/null; then
        exec 9>"$venv/.lock"
        flock 9
    fi
    [[ -f $venv/.installed ]] || say "setting up $venv: the first time, this downloads about 3 GB and fills 7 GB of disk"
    make_the_environment
    install_the_requirements
    local release
    for release in "${sglang_releases[@]}"; do
        unpack_sglang "$release"
    done
    say "$venv is ready"
}

main
