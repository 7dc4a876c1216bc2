"""Write src/skerry/v1/ from proto/skerry/v1/: messages, stubs for clients, and their types.

python scripts/generate_grpc.py            write them
python scripts/generate_grpc.py --check    fail when what is there is not what would be written
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "skerry" / "v1"


def generate(folder: Path) -> None:
    sources = sorted((ROOT / "proto").glob("skerry/v1/*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}"),
            *(f"--python_out={folder}", f"--mypy_out=quiet:{folder}"),
            *(f"--grpc_python_out={folder}", f"--mypy_grpc_out=quiet:{folder}"),
            *map(str, sources),
        ],
        check=True,
        # Where the plugin for types is.
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    for source in sources:
        if "\nservice " not in source.read_text():
            for leftover in folder.glob(f"skerry/v1/{source.stem}_pb2_grpc.*"):
                leftover.unlink()
    (folder / "skerry" / "v1" / "__init__.py").write_text(
        '"""The messages and stubs of gRPC. Written by scripts/generate_grpc.py from proto/skerry/v1."""\n'
    )


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.py*"))}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="skerry-") as folder:
        generate(Path(folder))
        wanted = contents(Path(folder) / "skerry" / "v1")
    found = contents(TARGET)
    if wanted == found:
        return 0
    if "--check" in sys.argv[1:]:
        print("src/skerry/v1 is stale; run python scripts/generate_grpc.py", file=sys.stderr)
        return 1
    TARGET.mkdir(exist_ok=True)
    for name in found.keys() - wanted.keys():
        (TARGET / name).unlink()
    for name, text in wanted.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
