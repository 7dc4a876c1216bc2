"""The store: names, digests, atomic arrival and removal, and what a crash leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.errors import Conflict, DiskFull, ImageNotFound, InvalidRequest
from skerry.images import store as store_module
from skerry.images.store import Image, ImageStore


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def add(store: ImageStore, name: str, content: str = "content") -> Image:
    with store.staging() as staging:
        (staging / "rootfs").mkdir()
        (staging / "rootfs" / "file").write_text(content)
        return store.commit(staging, name, env={"PATH": "/bin"}, description="a test")


def unused(_: Image) -> bool:
    return False


def left(store: ImageStore) -> list[str]:
    return sorted(p.name for p in store.root.iterdir() if p.name not in (".lock", "names"))


def test_nobody_else_can_open_what_is_locked(tmp_path: Path) -> None:
    """Not even in a home that others may read."""
    (tmp_path / "images").mkdir(mode=0o755)
    assert ImageStore(tmp_path / "images").root.stat().st_mode & 0o777 == 0o700


def test_commit_and_get(store: ImageStore) -> None:
    image = add(store, "base")
    assert store.get("base") == image
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", image.digest)
    assert image.rootfs is not None
    assert (image.rootfs / "file").read_text() == "content"
    assert image.env == {"PATH": "/bin"}
    assert image.size >= 4096
    assert image.info().to_dict() == {
        "name": "base",
        "digest": image.digest,
        "kind": "rootfs",
        "size": image.size,
        "created_at": image.created_at,
        "description": "a test",
    }
    assert left(store) == [image.digest.removeprefix("sha256:")]


def test_get_by_digest(store: ImageStore) -> None:
    image = add(store, "base")
    for ref in (image.digest, image.digest[:20], image.digest.removeprefix("sha256:")[:8]):
        assert store.get(ref) == image


def test_an_ambiguous_digest_is_refused(store: ImageStore) -> None:
    digests = [add(store, "many", str(i)).digest.removeprefix("sha256:") for i in range(17)]
    first = next(d[0] for d in digests if sum(e[0] == d[0] for e in digests) > 1)
    with pytest.raises(InvalidRequest, match=f"images begin with 'sha256:{first}'"):
        store.get(f"sha256:{first}")


def test_tags_and_latest(store: ImageStore) -> None:
    one, two = add(store, "base:1.0", "one"), add(store, "base:latest", "two")
    assert store.get("base:1.0").digest == one.digest
    assert store.get("base").digest == store.get("base:latest").digest == two.digest


def test_host_is_always_there(store: ImageStore) -> None:
    image = store.get("host")
    assert (image.kind, image.rootfs, image.name) == ("host", None, "host")
    assert "/usr/bin" in image.env["PATH"]
    assert store.list() == [image]
    with pytest.raises(InvalidRequest):
        store.remove("host", unused)
    with pytest.raises(InvalidRequest):
        add(store, "host")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "A",
        "-x",
        ".x",
        "a" * 65,
        "a:b:c",
        "a:",
        "a\n",
        "a\0",
        "sha256:abc",
        "host:x",
    ],
)
def test_bad_names(store: ImageStore, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        add(store, name)
    assert left(store) == []
    with pytest.raises(ImageNotFound):
        store.get(name)


def test_a_missing_image_names_the_command(store: ImageStore) -> None:
    with pytest.raises(ImageNotFound) as caught:
        store.get("dev")
    assert "skerry image build dev" in caught.value.hint
    assert "skerry image ls" in caught.value.hint


def test_a_path_is_no_reference(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("0" * 64)
    for ref in ("../../evil", str(tmp_path / "evil"), "names", ".lock", "*", "[0-9]*"):
        with pytest.raises(ImageNotFound):
            store.get(ref)


def test_a_name_is_pointed_elsewhere_and_the_old_image_stays(store: ImageStore) -> None:
    old, new = add(store, "base", "old"), add(store, "base", "new")
    assert store.get("base").digest == new.digest
    assert store.get(old.digest).name == ""
    assert [(i.name, i.digest) for i in store.list()[1:]] == [("base", new.digest), ("", old.digest)]


def test_equal_content_is_stored_once(store: ImageStore) -> None:
    one, two = add(store, "one"), add(store, "two")
    assert one.digest == two.digest
    assert len(left(store)) == 1
    store.remove("one", in_use=lambda _: True)
    assert store.get("two").digest == one.digest
    store.remove("two", unused)
    assert left(store) == []


def test_removal_by_digest_takes_all_names(store: ImageStore) -> None:
    digest = add(store, "one").digest
    add(store, "two")
    store.remove(digest[:30], unused)
    assert [i.name for i in store.list()] == ["host"]
    assert left(store) == []


def test_an_image_in_use_stays(store: ImageStore) -> None:
    image = add(store, "base")
    with pytest.raises(Conflict, match="in use"):
        store.remove("base", in_use=lambda asked: asked.digest == image.digest)
    assert store.get("base") == image
    with pytest.raises(ImageNotFound):
        store.remove("other", unused)


def test_staging_is_gone_after_a_failure(store: ImageStore) -> None:
    def fail() -> None:
        with store.staging() as staging:
            (staging / "rootfs" / "deep").mkdir(parents=True)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert left(store) == []


def test_a_full_disk_leaves_nothing(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "sync", full)
    with pytest.raises(DiskFull):
        add(store, "base")
    assert left(store) == []


_CRASH = """
import os, signal, sys
from pathlib import Path
from skerry.images import store as module
store = module.ImageStore(Path(sys.argv[1]))
with store.staging() as staging:
    (staging / "rootfs").mkdir()
    (staging / "rootfs" / "file").touch()
    setattr(module, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    store.commit(staging, "base", env={}, description="")
"""


@pytest.mark.parametrize("step", ["normalize", "tree_digest", "sync"])
def test_a_crash_leaves_staging_that_the_sweep_removes(store: ImageStore, step: str) -> None:
    source = Path(store_module.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", _CRASH, str(store.root), step], env={"PYTHONPATH": str(source)}, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert [name[:9] for name in left(store)] == [".staging-"]
    assert [i.name for i in store.list()] == ["host"]
    store.sweep()
    assert left(store) == []


def test_the_sweep_spares_what_is_being_worked_on(store: ImageStore) -> None:
    image = add(store, "base")
    with store.staging() as staging:
        (staging / "rootfs").mkdir()
        store.sweep()
        assert staging.exists()
        subprocess.run(
            [sys.executable, "-c", "import sys; from pathlib import Path; from skerry.images.store import ImageStore;"
             "ImageStore(Path(sys.argv[1])).sweep()", str(store.root)],
            env={"PYTHONPATH": str(Path(store_module.__file__).parents[2])},
            check=True,
        )  # fmt: skip
        assert staging.exists()
    assert store.get("base") == image


def test_others_can_enter_what_is_stored(store: ImageStore) -> None:
    """An environment's user is not the owner."""
    old = os.umask(0o077)
    try:
        image = add(store, "base")
    finally:
        os.umask(old)
    assert image.rootfs is not None
    for path in (image.rootfs, image.rootfs.parent):
        assert path.stat().st_mode & 0o777 == 0o755
