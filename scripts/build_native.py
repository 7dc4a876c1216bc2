"""Compile native/*.c into the one static program that every environment starts from.

The build hook (hatch_build.py) and `make native` both come here. The first compiler that can really make a
static program is used, position-independent where it can: `musl-gcc`, then `cc`, then `ziglang` from PyPI.
Nothing is compiled while the sources are those of the last build.

    build_native.py                build src/skerry/_native/skerry-guest
    build_native.py --check        compile with every C compiler found, warnings are errors, keep nothing
    build_native.py --requires     print what must come from PyPI for a build here (nothing, or ziglang)
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "native"
OUTPUT = ROOT / "src" / "skerry" / "_native" / "skerry-guest"

CODE = [
    "-std=gnu11",
    "-Os",
    "-fno-plt",
    "-ffunction-sections",
    "-fdata-sections",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wformat=2",
    "-Wvla",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
]
LINK = ["-s", "-Wl,--gc-sections,-z,noexecstack,-z,relro,-z,now"]

ELF64_LITTLE = b"\x7fELF\x02\x01"
PT_INTERP = 3


class BuildError(Exception):
    """The program cannot be built here; the message says what to install or what the compiler said."""


@dataclass(frozen=True)
class Toolchain:
    """One way to make a static program."""

    name: str
    command: tuple[str, ...]
    before: tuple[str, ...]
    """What goes before the sources: how to link statically, and our choice of start files."""
    after: tuple[str, ...] = ()

    def compile(self, sources: list[Path], output: Path, *extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(*self.command, *CODE, *extra, *self.before),
                *(*map(str, sources), *self.after, *LINK, "-o", str(output)),
            ],
            capture_output=True,
            text=True,
        )


def _candidates() -> Iterator[Toolchain]:
    """All ways that could work here, best first."""
    if musl := shutil.which("musl-gcc"):
        verbose = subprocess.run([musl, "-###", "x.c"], capture_output=True, text=True).stderr
        start = next(
            (Path(word.strip('"')) for word in verbose.split() if word.strip('"').endswith("crt1.o")), None
        )
        if start and (start.parent / "rcrt1.o").exists():
            # musl-gcc does not know -static-pie (it links a dynamic program without a word), so by hand.
            yield Toolchain(
                "musl-gcc",
                (musl,),
                (
                    *("-static", "-fPIE", "-Wl,-pie,--no-dynamic-linker,-z,text", "-nostartfiles"),
                    *(str(start.parent / name) for name in ("rcrt1.o", "crti.o")),
                ),
                (str(start.parent / "crtn.o"),),
            )
        yield Toolchain("musl-gcc", (musl,), ("-static",))
    if cc := shutil.which("cc"):
        yield Toolchain("cc", (cc,), ("-static-pie", "-fPIE"))
        yield Toolchain("cc", (cc,), ("-static",))
    if importlib.util.find_spec("ziglang"):
        target = f"{platform.machine()}-linux-musl"
        command = (sys.executable, "-m", "ziglang", "cc", "-target", target)
        yield Toolchain("ziglang", command, ("-static", "-fPIE", "-pie"))


def _is_static(program: Path) -> bool:
    """Whether the kernel alone can start it: an ELF file that names no interpreter."""
    data = program.read_bytes()
    if not data.startswith(ELF64_LITTLE):
        return False
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    return all(struct.unpack_from("<I", data, offset + size * i) != (PT_INTERP,) for i in range(count))


def _works(toolchain: Toolchain) -> bool:
    with tempfile.TemporaryDirectory(prefix="skerry-native-") as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text("#include <stdio.h>\nint main(void) { return puts(__FILE__) < 0; }\n")
        if toolchain.compile([source], program).returncode != 0 or not _is_static(program):
            return False
        return subprocess.run([program], stdout=subprocess.DEVNULL).returncode == 0


def toolchains() -> Iterator[Toolchain]:
    """The best working toolchain of each compiler found here, best first."""
    seen: set[str] = set()
    for toolchain in _candidates():
        if toolchain.name not in seen and _works(toolchain):
            seen.add(toolchain.name)
            yield toolchain


def requires() -> list[str]:
    """What a build on this machine needs from PyPI."""
    return [] if next(toolchains(), None) else ["ziglang>=0.13"]


def _digest() -> str:
    """Of everything the result depends on: the sources and, by way of this file, the flags."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in [Path(__file__), *sorted(SOURCES.glob("*.[ch]"))]:
        data = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _compile(toolchain: Toolchain, output: Path, *extra: str) -> None:
    """Compile all of native/ and say what the compiler says. Raises BuildError."""
    sources = sorted(SOURCES.glob("*.c"))
    if not sources:
        raise BuildError(f"no C sources in {SOURCES}")
    done = toolchain.compile(sources, output, *WARNINGS, *extra)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise BuildError(
            f"{toolchain.name} could not compile native/ (its messages are above)\n{done.stderr}"
        )
    if not _is_static(output):
        raise BuildError(f"{toolchain.name} did not link statically")


def build(output: Path = OUTPUT) -> Path:
    """Bring `output` up to date with the sources. Raises BuildError."""
    if sys.platform != "linux":
        raise BuildError("Skerry's environments are made of Linux namespaces: install it on Linux")
    stamp, digest = output.with_name(output.name + ".sha256"), _digest()
    if output.exists() and stamp.exists() and stamp.read_text() == digest:
        return output
    toolchain = next(toolchains(), None)
    if toolchain is None:
        raise BuildError(
            "no C compiler here can make a static program; any one of these is enough:\n"
            "  apt-get install musl-tools    (Debian, Ubuntu)\n"
            "  apk add build-base            (Alpine)\n"
            "  pip install ziglang           (anywhere)"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="skerry-native-", dir=output.parent) as folder:
        fresh = Path(folder, output.name)
        _compile(toolchain, fresh)
        fresh.chmod(0o755)
        # A rename, not a write: running environments keep the program that they were started from.
        fresh.replace(output)
    stamp.write_text(digest)
    print(f"{toolchain.name} made {output} ({output.stat().st_size // 1024} KiB)", file=sys.stderr)
    return output


def check() -> None:
    """Compile with every compiler found, warnings being errors. Raises BuildError."""
    names = []
    for toolchain in toolchains():
        with tempfile.TemporaryDirectory(prefix="skerry-native-") as folder:
            _compile(toolchain, Path(folder, "skerry-guest"), "-Werror")
        names.append(toolchain.name)
    if not names:
        raise BuildError("no C compiler found to check native/ with")
    print(f"native/ compiles without warnings: {', '.join(names)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build Skerry's native program.")
    parser.add_argument("--check", action="store_true", help="only compile, warnings are errors")
    parser.add_argument("--requires", action="store_true", help="print what a build needs from PyPI")
    arguments = parser.parse_args()
    try:
        if arguments.requires:
            print("\n".join(requires()))
        elif arguments.check:
            check()
        else:
            build()
    except BuildError as error:
        print(f"build_native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
