#!/usr/bin/env bash
# Install the programs that the tests use, or those of the benchmarks ("bench"), from Debian's packages.
# Without root, or elsewhere than on Debian and its like, say what is missing: tests that need it are skipped.
set -euo pipefail
declare -A package=(
    [setpriv]=util-linux [mkfs.ext4]=e2fsprogs [strace]=strace [gcc]=gcc [musl-gcc]=musl-tools
    [bwrap]=bubblewrap [mmdebstrap]=mmdebstrap [qemu-system-x86_64]=qemu-system-x86 [chromium]=chromium
    [git]=git [pip3]=python3-pip [npm]=npm [dockerd]=docker.io [containerd]=containerd [runc]=runc
    [docker-registry]=docker-registry [/usr/bin/node]=nodejs [/usr/bin/go]=golang-go [/usr/bin/ruby]=ruby [/usr/bin/php]=php-cli [/usr/bin/rustc]=rustc
)
[ "${1:-}" != bench ] || package=(
    [bwrap]=bubblewrap [runc]=runc [dockerd]=docker.io [containerd]=containerd [mmdebstrap]=mmdebstrap
)

# The inspector of MCP, with a Node.js that is new enough for it; without npm its tests are skipped.
inspector="$(dirname "$0")/../.cache/inspector"
if [ "${1:-}" != bench ] && [ ! -e "$inspector/installed" ] && command -v npm >/dev/null; then
    echo "setup: installing the inspector of MCP"
    mkdir -p "$inspector"
    if npm install --prefix "$inspector" --no-save --no-fund --no-audit --silent \
        @modelcontextprotocol/inspector@2.12.0 node@22 >/dev/null 2>&1; then
        touch "$inspector/installed"
    else
        echo "setup: npm could not install it; what needs it is skipped"
    fi
fi

# Apt with lists and sources of its own, in a folder: the machine's are not touched.
own_apt() {
    local work="$1"
    mkdir -p "$work/sources" "$work/lists/partial" "$work/cache/archives/partial"
    apt-get -qq -o Acquire::Retries=3 -o APT::Sandbox::User=root -o Dir::Etc::SourceList=/dev/null \
        -o Dir::Etc::SourceParts="$work/sources" -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" "${@:2}"
}
codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"

# Programs of others: the tests in the sources of Debian's interpreters.
programs="$(dirname "$0")/../.cache/programs"
fetch_programs() {
    local work="$1"
    mkdir -p "$work/sources"
    if [ -e /etc/apt/sources.list.d/debian.sources ]; then
        sed 's/^Types:.*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/sources/debian.sources"
    else
        sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$work/sources/debian.list"
    fi
    own_apt "$work" update || true  # one list of several may be out of reach; what is missing is told below
    (cd "$work" && own_apt "$work" source --download-only --tar-only \
        {bash,php8.2,python3.11,nodejs,ruby3.1}/"$codename") || return
    extract_programs bash '*/tests/*.tests' '*/tests/*.sub' &&
        extract_programs php8.2 '*/Zend/tests/*.phpt' &&
        extract_programs python3.11 '*/Lib/test/test_*.py' &&
        extract_programs nodejs '*/test/parallel/test-*.js' '*/test/common/*.js' &&
        extract_programs ruby3.1 '*/test/ruby/test_*.rb' '*/sample/*.rb' && touch "$programs/fetched"
}
extract_programs() {
    mkdir -p "$programs/$1" && tar -xf "$work/$1"_*.orig.tar.* -C "$programs/$1" --strip-components=1 --wildcards "${@:2}"
}
if [ "${1:-}" != bench ] && [ ! -e "$programs/fetched" ] && command -v apt-get >/dev/null; then
    echo "setup: fetching programs of others"
    work="$(mktemp -d)"
    fetch_programs "$work" >"$work/log" 2>&1 || echo "setup: they could not be fetched; what needs them is skipped"
    rm -rf "$work"
fi

# gVisor: the release in Debian 12 is too old, so its backports' is taken. It is one static program.
fetch_runsc() {
    local work="$1" suite="$codename" mirror
    [ "$suite" != bookworm ] || suite=bookworm-backports
    mirror="$(cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources 2>/dev/null |
        sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb [^h]*\(http[^ ]*\) .*/\1/p' | grep -v security | head -1)"
    mkdir -p "$work/sources"
    echo "deb $mirror $suite main" >"$work/sources/debian.list"
    own_apt "$work" update && (cd "$work" && own_apt "$work" download runsc && dpkg -i runsc_*.deb)
}
if ! command -v runsc >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing runsc"
    work="$(mktemp -d)"
    fetch_runsc "$work" >"$work/log" 2>&1 || echo "setup: it could not be installed; what needs it is skipped"
    rm -rf "$work"
fi

# A kernel for virtual machines. It is unpacked, not installed: this machine boots another one.
fetch_kernel() {
    local work="$1" package
    package="$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)"
    (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package" && dpkg-deb -x linux-image-*.deb unpacked) &&
        mkdir -p "$kernel" && cp -r "$work"/unpacked/{boot,lib} "$kernel" && touch "$kernel/fetched"
}
kernel="$(dirname "$0")/../.cache/kernel"
if [ "${1:-}" != bench ] && [ ! -e "$kernel/fetched" ] && [ "$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null; then
    echo "setup: fetching a kernel for virtual machines"
    work="$(mktemp -d)"
    { [ "$(id -u)" -ne 0 ] || apt-get update; } >"$work/log" 2>&1 || true
    fetch_kernel "$work" >>"$work/log" 2>&1 || echo "setup: it could not be fetched; what needs it is skipped"
    rm -rf "$work"
fi

PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in "${!package[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
# Debian keeps the server's programs out of PATH.
if [ "${1:-}" != bench ] && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
    missing+=(postgresql)
fi
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: not installed here: ${missing[*]}; what needs them is skipped"
    exit 0
fi
echo "setup: installing ${missing[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# Packages bring services along; nothing may be started on this machine by a test run.
if ! (apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends "${missing[@]}") >"$log" 2>&1; then
    grep '^E: ' "$log" | sed 's#[a-z]*://[^ ]*#...#g' >&2 || true
    echo "setup: apt-get could not install ${missing[*]}" >&2
    exit 1
fi
