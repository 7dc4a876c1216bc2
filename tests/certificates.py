"""A certificate for this machine's loopback, and the CA that signed it: made by openssl, once a run."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from tests.support import require


@dataclass(frozen=True)
class Certificates:
    """Paths. `other_ca` has signed nothing."""

    ca: str
    cert: str
    key: str
    other_ca: str


@functools.cache
def make() -> Certificates:
    """Skips the test where there is no openssl."""
    require("openssl")
    folder = tempfile.mkdtemp(prefix="skerry-test-", dir="/tmp")
    atexit.register(shutil.rmtree, folder)
    ca = _self_signed(folder, "ca")
    names = "subjectAltName=DNS:localhost,DNS:skerry.test,IP:127.0.0.1,IP:::1"
    _request(
        folder,
        "cert",
        *("-CA", ca, "-CAkey", f"{folder}/ca.key", "-addext", names),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return Certificates(ca, f"{folder}/cert.pem", f"{folder}/cert.key", _self_signed(folder, "other"))


def _self_signed(folder: str, name: str) -> str:
    _request(folder, name, "-addext", "keyUsage=critical,keyCertSign")
    return f"{folder}/{name}.pem"


def _request(folder: str, name: str, *more: str) -> None:
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-subj", f"/CN=skerry test {name}"),
            *("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem", *more),
        ],
        check=True,
        capture_output=True,
    )
