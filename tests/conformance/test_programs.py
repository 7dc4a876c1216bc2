"""Instances for one program: what is delivered can be read and not changed, and so can what lies beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from skerry.backends.base import Layer
from skerry.errors import InvalidRequest
from skerry.guest.channel import Channel
from tests.conformance.harness import Box, Site, needs

FILES = {"main.py": b"print(1)\n", "data/deep/er.bin": b"\xff\0", "data/x": b"x", "\udcff\n": b"odd"}
CHANGES = """
echo x > main.py
echo x >> main.py
: > data/x
chmod 777 main.py
chmod 777 .
chmod 777 data
touch main.py
rm main.py
rm -r data
mv main.py other
mv data other
ln -s /tmp/x link
ln main.py link
mkdir new
echo x > new
cp /bin/sh main.py
rmdir data/deep
mount -o remount,rw /workspace
mount -o remount,rw,bind /workspace
mount --bind /tmp /workspace
umount /workspace
umount -l /workspace
unshare -Ur mount -o remount,rw,bind /workspace
mv /tmp/bait /workspace/main.py
"""
"""Each tried in the workspace; none may succeed."""


@contextlib.asynccontextmanager
async def program(site: Site, files: dict[str, bytes], *layers: Layer) -> AsyncIterator[Box]:
    spec = replace(site.spec(), program=True, layers=layers)
    instance = await site.backend.start(spec)
    try:
        await site.backend.deliver(spec.environment_id, files, {})
        channel = await Channel.open(await site.backend.connect(spec.environment_id))
        try:
            yield Box(site.backend, instance, channel)
        finally:
            await channel.close()
    finally:
        await site.backend.stop(spec.environment_id)


async def test_what_is_delivered_is_there(site: Site) -> None:
    async with program(site, FILES) as box:
        assert box.instance.workspace == "program"
        for name, content in FILES.items():
            assert (await box.run("cat", f"./{name}")).stdout == content
        found = await box.sh("find . -type f | wc -l; pwd")
        assert found.stdout.decode() == f"5\n{box.instance.workspace_path}\n"


async def test_what_is_delivered_later_is_there_as_well(site: Site) -> None:
    """So that an instance can be made before its program is known."""
    async with program(site, {}) as box:
        assert (await box.run("ls", "-A")).stdout == b""
        await site.backend.deliver(box.id, {"a/b": b"1"}, {})
        assert (await box.run("cat", "a/b")).stdout == b"1"


@pytest.mark.requirement("R83")
@needs("own_root")
async def test_nothing_of_it_can_be_changed(site: Site) -> None:
    async with program(site, FILES) as box:
        users = (None, 0) if "users" in site.kind.gives else (None,)
        for uid in users:
            await box.sh("echo bait > /tmp/bait", uid=uid)
            for change in CHANGES.strip().splitlines():
                result = await box.sh(change, uid=uid)
                assert result.code != 0, (uid, change)
        tree = await box.sh(
            "find . -print0 | LC_ALL=C sort -z; cat main.py data/x; stat -c %a . main.py data"
        )
        assert tree.stdout == (
            b".\0./data\0./data/deep\0./data/deep/er.bin\0./data/x\0./main.py\0./\xff\n\0"
            b"print(1)\nx755\n644\n755\n"
        )


@needs("own_root")
async def test_the_file_api_cannot_change_it_either(site: Site) -> None:
    async with program(site, FILES) as box:
        for change in (
            box.channel.write("main.py", b"x"),
            box.channel.write("new", b"x"),
            box.channel.remove("main.py"),
            box.channel.mkdir("new"),
            box.channel.rename("main.py", "/tmp/x"),
        ):
            with pytest.raises(Exception, match=r"read-only|another file system|permission denied"):
                await change


@needs("own_root")
async def test_its_place_to_write_is_tmp(site: Site) -> None:
    async with program(site, {}) as box:
        script = "cp /bin/true /tmp/it && /tmp/it && echo $?"
        assert (await box.sh(script)).stdout == b"0\n"
        assert (box.instance.tmp_path, box.instance.run_path) == ("/tmp", "/run")


async def test_a_name_that_is_too_long(site: Site) -> None:
    async with program(site, {}) as box:
        with pytest.raises(InvalidRequest, match="too long"):
            await site.backend.deliver(box.id, {"x" * 256: b""}, {})


async def test_a_layer_is_there(site: Site, layer: Layer) -> None:
    async with program(site, {}, layer) as box:
        place = f"{box.instance.run_path}/{layer.name}"
        assert (await box.run("cat", f"{place}/sub/file")).stdout == b"shared"


@needs("own_root")
async def test_a_layer_can_only_be_read(site: Site, layer: Layer) -> None:
    async with program(site, {}, layer) as box:
        place = f"{box.instance.run_path}/{layer.name}"
        for change in (
            "echo x > {0}/sub/file",
            "echo x > {0}/new",
            "rm -r {0}/sub",
            "chmod 777 {0}",
            "mv {0} /run/other",
            "mv {0}/sub {0}/other",
            "umount {0}",
            "mount -o remount,rw,bind {0}",
        ):
            assert (await box.sh(change.format(place))).code != 0, change
    async with program(site, {}, layer) as box:
        found = await box.sh('cd "$1" && find . && cat sub/file', place)
        assert found.stdout == b".\n./sub\n./sub/file\nshared"


@needs("own_root")
async def test_a_lock_in_a_layer_holds_up_nobody_else(site: Site, layer: Layer) -> None:
    async with program(site, {}, layer) as one, program(site, {}, layer) as other:
        file = f"{one.instance.run_path}/{layer.name}/sub/file"
        holder = await one.start("flock", "-x", file, "cat", stdin=True)
        assert (await one.sh(f"until ! flock -xn {file} true; do :; done")).code == 0
        assert (await other.run("flock", "-xn", file, "true")).code == 0
        await holder.kill()


@pytest.fixture
def layer(site: Site) -> Layer:
    """A directory of the daemon's."""
    source = site.home / "layer"
    (source / "sub").mkdir(parents=True, exist_ok=True)
    (source / "sub" / "file").write_text("shared")
    return Layer("some-layer", str(source))
