"""What an OCI layout or a `docker save` archive, unpacked into a directory, says about its image.

Everything in it is a stranger's: paths are resolved inside the directory, documents are small, digests are
checked before what they name is looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from skerry.errors import InvalidRequest
from skerry.host.trees import open_file_in_root, open_in_root

_DOCUMENT_MAX = 4 << 20
_NESTING_MAX = 4
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "i686": "386",
    "armv7l": "arm",
    "loongarch64": "loong64",
}
_FAULTS = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)


@dataclass(frozen=True, slots=True)
class Packed:
    """An image that is still in layers."""

    layers: tuple[tuple[bytes, str], ...]
    """(path in the directory, digest of the layer's tar), the lowest first."""
    env: dict[str, str]


def read_packed(root_fd: int) -> Packed | None:
    """The image in a directory; None where there is neither of the two formats. Raises InvalidRequest."""
    try:
        if _exists(root_fd, b"oci-layout"):
            return _read_oci(root_fd)
        if _exists(root_fd, b"manifest.json"):
            manifest = _document(root_fd, b"manifest.json")
            if isinstance(manifest, list) and manifest and "Layers" in manifest[0]:
                return _read_docker(root_fd, manifest)
    except _FAULTS as error:
        raise InvalidRequest(f"the image's description cannot be understood: {error!r}") from error
    return None


def open_file(root_fd: int, path: bytes) -> BufferedReader:
    """A regular file of the directory. Raises InvalidRequest when there is none of that path."""
    try:
        return open_file_in_root(root_fd, path)
    except OSError as error:
        raise InvalidRequest(f"the image lacks {os.fsdecode(path)!r}: {error.strerror}") from error


def _exists(root_fd: int, path: bytes) -> bool:
    try:
        os.close(open_in_root(root_fd, path, os.O_PATH))
    except OSError:
        return False
    return True


def _document(root_fd: int, path: bytes) -> Any:
    with open_file(root_fd, path) as file:
        data = file.read(_DOCUMENT_MAX + 1)
    if len(data) > _DOCUMENT_MAX:
        raise InvalidRequest(f"the image's {os.fsdecode(path)!r} is larger than {_DOCUMENT_MAX} bytes")
    return json.loads(data)


def _blob(root_fd: int, descriptor: dict[str, Any]) -> bytes:
    """The path of what a descriptor names, once its content is known to be what the digest says."""
    match = _DIGEST.fullmatch(descriptor["digest"])
    if match is None:
        raise InvalidRequest(f"the image uses a digest that is not SHA-256: {descriptor['digest']!r}")
    path = f"blobs/sha256/{match[1]}".encode()
    with open_file(root_fd, path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != match[1]:
            raise InvalidRequest(f"the image is damaged: {descriptor['digest']} has other content")
    return path


def _read_oci(root_fd: int) -> Packed:
    document = _document(root_fd, b"index.json")
    descriptors = {d["digest"]: d for d in _fitting(document)}
    if len(descriptors) > 1:
        raise InvalidRequest(
            f"the archive holds {len(descriptors)} images", hint="write an archive with one image only"
        )
    for _ in range(_NESTING_MAX):
        document = _document(root_fd, _blob(root_fd, _fitting(document)[0]))
        if "manifests" not in document:
            break
    config = _document(root_fd, _blob(root_fd, document["config"]))
    return _packed(config, [_blob(root_fd, layer) for layer in document["layers"]])


def _fitting(index: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of an index for this platform, else those without a platform."""
    ours = _architecture()
    named: list[dict[str, Any]] = []
    unnamed: list[dict[str, Any]] = []
    for descriptor in index["manifests"]:
        its = descriptor.get("platform")
        if its is None:
            unnamed.append(descriptor)
        elif (its["os"], its["architecture"]) == ("linux", ours):
            named.append(descriptor)
    if not named and not unnamed:
        raise InvalidRequest(f"the archive has no image for linux/{ours}")
    return named or unnamed


def _read_docker(root_fd: int, manifest: list[dict[str, Any]]) -> Packed:
    if len(manifest) > 1:
        raise InvalidRequest(f"the archive holds {len(manifest)} images", hint="docker save one image only")
    config = _document(root_fd, manifest[0]["Config"].encode())
    return _packed(config, [layer.encode() for layer in manifest[0]["Layers"]])


def _packed(config: dict[str, Any], layers: list[bytes]) -> Packed:
    if (config.get("os", "linux"), config["architecture"]) != ("linux", _architecture()):
        raise InvalidRequest(
            f"the image is for {config.get('os', 'linux')}/{config['architecture']}, "
            f"this machine is linux/{_architecture()}"
        )
    digests = [str(digest) for digest in config["rootfs"]["diff_ids"]]
    variables = (config.get("config") or {}).get("Env") or []
    env = dict(variable.partition("=")[::2] for variable in variables)
    sound = {name: value for name, value in env.items() if _VARIABLE.fullmatch(name) and "\0" not in value}
    return Packed(tuple(zip(layers, digests, strict=True)), sound)


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)
