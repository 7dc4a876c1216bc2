"""Archives of every kind become images; damaged, foreign and dishonest ones become errors and leave nothing."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import InvalidRequest, LimitReached, PathOutside
from skerry.images.importer import import_archive
from skerry.images.progress import Progress
from skerry.images.store import Image, ImageStore
from skerry.images.unpack import UnpackLimits
from tests.support import require

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"

Files = dict[str, bytes]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def tar(files: dict[str, str | bytes]) -> bytes:
    """A tar of files; a value that begins with `->` is a symlink."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            data = content.encode() if isinstance(content, str) else content
            if data.startswith(b"->"):
                info.type, info.linkname = tarfile.SYMTYPE, data[2:].decode()
                data = b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


LAYERS = [
    tar({"usr/bin/tool": "one", "bin": "->usr/bin", "etc/old": "x", "gone/file": "x"}),
    tar({"bin/tool2": "two", "etc/.wh.old": "", ".wh.gone": ""}),
]


def config(layers: list[bytes], **changes: Any) -> bytes:
    return dump(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Env": ["PATH=/opt/bin:/bin", "LANG=C", "=bad", "A B=bad", "EMPTY="]},
            "rootfs": {"type": "layers", "diff_ids": [sha(layer) for layer in layers]},
            **changes,
        }
    )


class Layout:
    """An OCI layout as files."""

    def __init__(self) -> None:
        self.files: Files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        self.top: list[dict[str, Any]] = []

    def blob(self, data: bytes, kind: str = "", **more: Any) -> dict[str, Any]:
        self.files[f"blobs/sha256/{sha(data).removeprefix('sha256:')}"] = data
        return {"mediaType": kind, "digest": sha(data), "size": len(data), **more}

    def image(
        self, layers: list[bytes], pack: Callable[[bytes], bytes] = gzip.compress, **more: Any
    ) -> dict[str, Any]:
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(config(layers)),
            "layers": [self.blob(pack(layer)) for layer in layers],
        }
        return self.blob(dump(manifest), MANIFEST, **more)

    def done(self, *top: dict[str, Any]) -> Files:
        return {**self.files, "index.json": dump({"schemaVersion": 2, "manifests": list(top)})}


def plain_layout() -> Files:
    layout = Layout()
    return layout.done(layout.image(LAYERS))


def docker_archive() -> Files:
    """As Docker wrote them before it wrote OCI layouts, an equal layer being a symlink to the first."""
    manifest = [
        {
            "Config": "abc.json",
            "RepoTags": ["x:latest"],
            "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
        }
    ]
    return {
        "1/layer.tar": LAYERS[0],
        "2/layer.tar": b"->../1/layer.tar",
        "3/layer.tar": LAYERS[1],
        "abc.json": config([LAYERS[0], LAYERS[0], LAYERS[1]]),
        "manifest.json": dump(manifest),
        "repositories": b"{}",
    }


def as_file(tmp_path: Path, data: bytes, name: str = "archive") -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def as_folder(tmp_path: Path, files: Files) -> Path:
    folder = tmp_path / "folder"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def check_layers(image: Image) -> None:
    assert image.rootfs is not None
    assert (image.rootfs / "usr/bin/tool").read_text() == "one"
    assert (image.rootfs / "usr/bin/tool2").read_text() == "two"
    assert not (image.rootfs / "etc/old").exists()
    assert not (image.rootfs / "gone").exists()
    assert image.env == {"PATH": "/opt/bin:/bin", "LANG": "C", "EMPTY": ""}
    assert sorted(p.name for p in image.rootfs.parent.iterdir()) == ["image.json", "rootfs"]


def refused(path: Path, store: ImageStore, kind: type[Exception], message: str, **more: Any) -> None:
    with pytest.raises(kind, match=message):
        import_archive(path, "evil", store, **more)
    assert sorted(p.name for p in store.root.iterdir()) == [".lock", "names"]
    assert list((store.root / "names").iterdir()) == []


def zstd(data: bytes) -> bytes:
    return subprocess.run([require("zstd"), "-c"], input=data, capture_output=True, check=True).stdout


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "xz in two streams": lambda data: lzma.compress(data[:600]) + bytes(4) + lzma.compress(data[600:]),
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zstd": zstd,
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
def test_a_root_filesystem(tmp_path: Path, store: ImageStore, pack: Callable[[bytes], bytes]) -> None:
    image = import_archive(as_file(tmp_path, pack(tar({"bin/sh": "x", "a/.wh.kept": ""}))), "base", store)
    assert image.rootfs is not None
    assert (image.rootfs / "bin/sh").read_text() == "x"
    assert (image.rootfs / "a/.wh.kept").exists()
    assert (image.rootfs / "workspace").is_dir()
    assert image == store.get("base")


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
def test_a_cut_archive(tmp_path: Path, store: ImageStore, pack: Callable[[bytes], bytes]) -> None:
    data = pack(tar({f"f{i}": "content" * i for i in range(100)}))
    refused(as_file(tmp_path, data[: len(data) * 2 // 3]), store, InvalidRequest, "cut short|damaged")


def test_an_oci_layout_as_a_directory(tmp_path: Path, store: ImageStore) -> None:
    check_layers(import_archive(as_folder(tmp_path, plain_layout()), "base", store))


@pytest.mark.parametrize("pack", [PACKERS["plain"], PACKERS["gzip"]])
def test_an_oci_layout_as_a_file(tmp_path: Path, store: ImageStore, pack: Callable[[bytes], bytes]) -> None:
    check_layers(import_archive(as_file(tmp_path, pack(tar({**plain_layout()}))), "base", store))


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
def test_layers_packed_in_every_way(
    tmp_path: Path, store: ImageStore, pack: Callable[[bytes], bytes]
) -> None:
    layout = Layout()
    check_layers(import_archive(as_folder(tmp_path, layout.done(layout.image(LAYERS, pack))), "base", store))


def test_what_docker_used_to_save(tmp_path: Path, store: ImageStore) -> None:
    check_layers(import_archive(as_file(tmp_path, tar({**docker_archive()})), "base", store))


def test_what_docker_saves_now(tmp_path: Path, store: ImageStore) -> None:
    """Both descriptions in one archive; the one with digests counts."""
    layout = Layout()
    files = layout.done(layout.image(LAYERS, lambda data: data))
    files["manifest.json"] = dump([{"Config": "none.json", "Layers": ["missing"]}])
    check_layers(import_archive(as_file(tmp_path, tar({**files})), "base", store))


def test_a_nested_index_for_several_platforms(tmp_path: Path, store: ImageStore) -> None:
    layout = Layout()
    manifests = [
        layout.image([tar({"wrong": "x"})], platform={"os": "linux", "architecture": "pdp11"}),
        layout.image([tar({"wrong": "y"})], platform={"os": "windows", "architecture": ARCHITECTURE}),
        layout.image(LAYERS, platform={"os": "linux", "architecture": ARCHITECTURE}),
        layout.image([tar({"wrong": "z"})], platform={"os": "unknown", "architecture": "unknown"}),
    ]
    inner = layout.blob(dump({"manifests": manifests}), INDEX)
    files = layout.done(layout.blob(dump({"manifests": [inner]}), INDEX))
    check_layers(import_archive(as_folder(tmp_path, files), "base", store))


def test_an_index_that_is_nested_without_end(tmp_path: Path, store: ImageStore) -> None:
    layout = Layout()
    inner = layout.image(LAYERS)
    for _ in range(10):
        inner = layout.blob(dump({"manifests": [inner]}), INDEX)
    refused(as_folder(tmp_path, layout.done(inner)), store, InvalidRequest, "cannot be understood")


def test_other_platforms(tmp_path: Path, store: ImageStore) -> None:
    layout = Layout()
    files = layout.done(layout.image(LAYERS, platform={"os": "linux", "architecture": "pdp11"}))
    refused(as_folder(tmp_path, files), store, InvalidRequest, f"no image for linux/{ARCHITECTURE}")
    files = docker_archive() | {"abc.json": config([LAYERS[0], LAYERS[0], LAYERS[1]], architecture="pdp11")}
    refused(as_file(tmp_path, tar({**files})), store, InvalidRequest, "for linux/pdp11")


def test_several_images(tmp_path: Path, store: ImageStore) -> None:
    layout = Layout()
    files = layout.done(layout.image(LAYERS), layout.image(LAYERS[:1]))
    refused(as_folder(tmp_path, files), store, InvalidRequest, "holds 2 images")
    files = docker_archive()
    files["manifest.json"] = dump(json.loads(files["manifest.json"]) * 2)
    refused(as_file(tmp_path, tar({**files})), store, InvalidRequest, "holds 2 images")


@pytest.mark.parametrize("which", range(4), ids=["config", "layer", "other layer", "manifest"])
def test_every_digest_is_checked(tmp_path: Path, store: ImageStore, which: int) -> None:
    files = plain_layout()
    name = [name for name in files if name.startswith("blobs/")][which]
    body = files[name]
    files[name] = body.replace(b"linux", b"linuX") if b"linux" in body else body[:-4] + b"\0\0\0\0"
    if b"schemaVersion" in body:
        files[name] = body + b" "
    assert files[name] != body
    refused(as_folder(tmp_path, files), store, InvalidRequest, "damaged: sha256:.* has other content")


def test_the_digest_of_an_unpacked_layer_is_checked(tmp_path: Path, store: ImageStore) -> None:
    files = docker_archive() | {"3/layer.tar": tar({"evil": "x"})}
    refused(as_file(tmp_path, tar({**files})), store, InvalidRequest, "a layer is not sha256")


@pytest.mark.parametrize("digest", ["sha256:../../../outside", "sha256:" + "A" * 64, "md5:abc", "", 7, None])
def test_digests_are_no_paths(tmp_path: Path, store: ImageStore, digest: Any) -> None:
    (tmp_path / "outside").write_text("secret")
    layout = Layout()
    files = layout.done({**layout.image(LAYERS), "digest": digest})
    refused(as_folder(tmp_path, files), store, InvalidRequest, "digest|understood")


@pytest.mark.parametrize("path", ["../outside", "/outside", "link/outside", "1", "fifo"])
def test_paths_of_layers_stay_in_the_archive(tmp_path: Path, store: ImageStore, path: str) -> None:
    layer = tar({"secret": "x"})
    as_file(tmp_path, layer, "outside")
    files: Files = {
        "1/layer.tar": layer,
        "link": b"->" + bytes(tmp_path),
        "abc.json": config([layer]),
        "manifest.json": dump([{"Config": "abc.json", "Layers": [path]}]),
    }
    refused(as_file(tmp_path, tar({**files})), store, InvalidRequest, "the image lacks")


def test_a_config_outside_the_archive_is_not_read(tmp_path: Path, store: ImageStore) -> None:
    (tmp_path / "outside.json").write_bytes(config(LAYERS))
    for path in ("../../outside.json", str(tmp_path / "outside.json")):
        files = docker_archive() | {"manifest.json": dump([{"Config": path, "Layers": []}])}
        refused(as_file(tmp_path, tar({**files})), store, InvalidRequest, "the image lacks")


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"manifests": 7}',
        b'{"manifests": []}',
        b'{"manifests": [{}]}',
        b"[" * 100_000,
    ],
)
def test_nonsense_for_an_index(tmp_path: Path, store: ImageStore, document: bytes) -> None:
    files = plain_layout() | {"index.json": document}
    refused(as_folder(tmp_path, files), store, InvalidRequest, "understood|no image for")


def test_a_huge_document(tmp_path: Path, store: ImageStore) -> None:
    files = plain_layout() | {"index.json": b" " * (5 << 20)}
    refused(as_folder(tmp_path, files), store, InvalidRequest, "is larger than")


def test_a_manifest_file_in_a_root_filesystem_is_just_a_file(tmp_path: Path, store: ImageStore) -> None:
    image = import_archive(
        as_file(tmp_path, tar({"manifest.json": '{"a": 1}', "bin/sh": "x"})), "base", store
    )
    assert image.rootfs is not None
    assert (image.rootfs / "manifest.json").exists()


def test_what_is_no_archive(tmp_path: Path, store: ImageStore) -> None:
    refused(as_file(tmp_path, b"hello"), store, InvalidRequest, "not a tar archive")
    refused(as_file(tmp_path, b""), store, InvalidRequest, "not a tar archive")
    refused(as_file(tmp_path, bytes(10240)), store, InvalidRequest, "holds no files")
    refused(as_folder(tmp_path, {"x": b""}), store, InvalidRequest, "neither an OCI layout")
    refused(tmp_path / "missing", store, InvalidRequest, "cannot open")
    refused(Path("/dev/zero"), store, InvalidRequest, "not a file")


def test_a_bad_name_is_refused_at_once(tmp_path: Path, store: ImageStore) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        import_archive(tmp_path / "missing", "../evil", store)


def test_an_evil_layer_leaves_nothing(tmp_path: Path, store: ImageStore) -> None:
    layout = Layout()
    layers = [tar({"etc": f"->{tmp_path}"}), tar({"../evil": "x"})]
    refused(as_folder(tmp_path, layout.done(layout.image(layers))), store, PathOutside, "leaves it")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
def test_a_bomb(tmp_path: Path, store: ImageStore, pack: Callable[[bytes], bytes]) -> None:
    path = as_file(tmp_path, pack(tar({"huge": bytes(8 << 20)})))
    refused(path, store, LimitReached, "more than 4.0 MiB", limits=UnpackLimits(bytes=4 << 20))


def test_xz_cannot_ask_for_gigabytes(tmp_path: Path, store: ImageStore) -> None:
    filters = [
        {
            "id": lzma.FILTER_LZMA2,
            "dict_size": 512 << 20,
            "mode": lzma.MODE_FAST,
            "mf": lzma.MF_HC3,
            "nice_len": 3,
        }
    ]
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, filters=filters)
    data = packer.compress(tar({"f": "x"})) + packer.flush()
    refused(as_file(tmp_path, data), store, InvalidRequest, "Memory usage limit")


def test_zstd_missing(tmp_path: Path, store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_file(tmp_path, zstd(tar({"f": "x"})))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InvalidRequest) as caught:
        import_archive(path, "base", store)
    assert "apt install zstd" in caught.value.hint


@pytest.mark.parametrize("files", [plain_layout(), docker_archive(), {"bin/sh": b"x" * 100_000}])
def test_progress_never_falls(tmp_path: Path, store: ImageStore, files: Files) -> None:
    seen: list[Progress] = []
    import_archive(as_file(tmp_path, gzip.compress(tar({**files}))), "base", store, seen.append)
    fractions = [step.fraction for step in seen if step.fraction is not None]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(seen) == len(fractions) < 500


def test_what_progress_raises_ends_the_import(tmp_path: Path, store: ImageStore) -> None:
    def refuse(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_archive(as_file(tmp_path, tar({"f": "x"})), "base", store, refuse)
    assert sorted(p.name for p in store.root.iterdir()) == [".lock", "names"]
