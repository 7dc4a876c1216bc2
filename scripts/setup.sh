#!/usr/bin/env bash
# Make .venv and install Skerry into it, editable, and the dependency groups that are named (dev, bench).
# Safe to run again: it only adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022 # other users run the same interpreter: unprivileged environments are tested as one of them
say() { printf 'setup: %s\n' "$*"; }

# An interpreter is good when it is new enough and, for root, when other users can start it too (one below
# /root is not). By way of env: what setpriv itself starts is looked up with root's rights still.
good() {
    command -v "$1" >/dev/null || return 1
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || return 1
    [ "$(id -u)" -ne 0 ] || ! command -v setpriv >/dev/null ||
        setpriv --reuid=65534 --regid=65534 --clear-groups env \
            "$("$1" -c 'import sys; print(sys.executable)')" -c '' 2>/dev/null
}

has_venv() { "$1" -c 'import ensurepip, venv; ensurepip.version()' 2>/dev/null; }

interpreter() {
    local candidate fallback=""
    for candidate in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do
        good "$candidate" || continue
        if ! has_venv "$candidate" && [ "$candidate" = /usr/bin/python3 ] && [ "$(id -u)" -eq 0 ] &&
            command -v apt-get >/dev/null; then
            say "installing python3-venv" >&2
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null 2>&1 ||
                { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; } >/dev/null 2>&1 || true
        fi
        if has_venv "$candidate"; then
            echo "$candidate"
            return
        fi
        fallback="$candidate"
    done
    if [ -n "$fallback" ]; then
        echo "setup: $fallback cannot make virtual environments: install its venv module (apt-get install python3-venv)" >&2
    else
        echo "setup: no Python 3.11 or newer found: install one (apt-get install python3 python3-venv)" >&2
    fi
    return 1
}

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python="$(interpreter)"
    say "making .venv with $python ($("$python" --version))"
    rm -rf .venv
    "$python" -m venv .venv
fi
# Only errors, and without the addresses of this machine's package index.
pip() { .venv/bin/python -m pip -qq --disable-pip-version-check "$@" 2>&1 | sed -E 's#[a-z+]+://[^ ]*#(index)#g' >&2; }

say "installing Skerry and what it needs"
pip install --editable .
# Without a C compiler, later builds of the native program need the one from PyPI at hand.
.venv/bin/python scripts/build_native.py --requires | pip install --requirement /dev/stdin

for group in "$@"; do
    say "installing the dependency group $group"
    .venv/bin/python -c '
import sys, tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]]))' "$group" |
        pip install --requirement /dev/stdin
done
