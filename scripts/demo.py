"""Demonstration of `make run`: an environment, some languages, the time of each step, the enforced limits."""

from __future__ import annotations

import platform
import sys
import time

import skerry

GO = """package main

import "fmt"

func main() { fmt.Println(6 * 7) }
"""
LANGUAGES = {
    "python3": ["python3", "-c", "print(6 * 7)"],
    "bash": ["bash", "-c", "echo $((6 * 7))"],
    "node": ["node", "-e", "console.log(6 * 7)"],
    "go": ["go", "run", "answer.go"],
}
NEEDED = {"python3", "bash"}


class Clock:
    """Prints each step with the time since the step before it."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def step(self, what: str, result: str = "") -> None:
        spent = (time.perf_counter() - self.last) * 1000
        print(f"  {what:<34} {spent:>8.1f} ms   {result}".rstrip(), flush=True)
        self.last = time.perf_counter()


def main() -> int:
    print(f"\nSkerry {skerry.__version__} on Linux {platform.release()}, {platform.machine()}\n")
    failed: list[str] = []
    clock = Clock()
    with skerry.Client() as client:
        client.version()
        clock.step("daemon running")
        with skerry.Environment(memory="1g", cpus=2, lifetime=600, client=client) as env:
            clock.step("environment created", env.id)
            clock.step("first command: id -un", env.run(["id", "-un"]).stdout.strip())
            here = env.execute(f"command -v {' '.join(LANGUAGES)}").stdout.split()
            env.files.write("answer.go", GO)
            clock.step("languages found, file written")
            for name, argv in LANGUAGES.items():
                if not any(path.endswith(f"/{name}") for path in here):
                    print(f"  {name:<34} {'-':>8}      not on this machine")
                    failed += [name] if name in NEEDED else []
                    continue
                result = env.run(argv, timeout=120)
                clock.step(name, result.stdout.strip() or result.stderr.strip())
                failed += [name] if result.stdout != "42\n" else []
            env.execute("mkdir -p src && cd src && export ANSWER=42")
            clock.step("shell keeps its state", env.execute("echo $ANSWER in $PWD").stdout.strip())
            show(env.info())
            clock = Clock()
        print()
        clock.step("environment deleted")
    if failed:
        print(f"\nFailed: {', '.join(failed)}. Run `skerry doctor` to find the cause.", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


def show(info: skerry.EnvironmentInfo) -> None:
    """Prints each limit with its value, and whether the kernel enforces it."""
    print(f"\nIsolation: {info.isolation}. Limits as read back from the kernel (yes = enforced):\n")
    rows = [skerry.Enforcement.from_dict(raw) for raw in info.enforced]
    names, values = (max(len(getattr(row, column)) for row in rows) for column in ("name", "value"))
    for row in rows:
        print(
            f"  {'yes' if row.enforced else 'NO ':<4} {row.name:<{names}}  {row.value:<{values}}  {row.by}".rstrip()
        )


NEXT = """
Try next:
  source .venv/bin/activate
  skerry run -- python3 -c 'print(6*7)'     one command in an environment of its own
  skerry run -it -- bash                    a terminal in one
  skerry doctor                             what this machine can do
  skerry --help

Documentation: docs/README.md. The daemon exits by itself when idle.
"""

if __name__ == "__main__":
    try:
        sys.exit(main())
    except skerry.SkerryError as error:
        sys.exit(f"skerry: {error}")
