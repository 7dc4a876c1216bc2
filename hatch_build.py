"""The build hook: compiles the native program and puts it into the wheel.

The program is static, so the wheel fits every Python 3 and every libc of its processor.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
import build_native


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """ziglang, on a machine whose own compilers cannot make a static program."""
        return build_native.requires()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        program = build_native.build()
        build_data["pure_python"] = False
        build_data["artifacts"].append(f"/{program.relative_to(self.root)}")
        machine = platform.machine()
        build_data["tag"] = f"py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"
