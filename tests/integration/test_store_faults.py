"""The store when things break: killed writers, full and read-only disks, servers that stop and start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import InvalidRequest, StoreUnavailable, StoreUnusable
from skerry.store import Connection, Store, audit, quotas
from skerry.store.quotas import Quota
from tests.integration.stores import entry, on, writer
from tests.postgres import Server

KILLS = 50


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    acknowledged: dict[int, tuple[str, str]] = {}
    for kill in range(KILLS):
        with writer(url, "t") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "imported\n"
            # Half of the time while it opens the store or soon after, half while it surely writes.
            lines = [process.stdout.readline() for _ in range(random.randrange(1, 30) * (kill % 2))]
            time.sleep(random.uniform(0, 0.002 if kill % 2 else 0.03))
            process.kill()
            lines += process.stdout.readlines()
        complete = [line.split() for line in lines if line.endswith("\n")]
        acknowledged |= {int(seq): (name, hash_) for name, seq, hash_ in complete}

    async def test(store: Store) -> None:
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None
        rows = {row.seq: row async for page in audit.pages(store, "t") for row in page}
        for seq, (name, hash_) in acknowledged.items():
            assert (rows[seq].request_id, rows[seq].hash) == (name, hash_)
        # Rows come in pairs, of one transaction each: no half of one is there.
        assert set(Counter(row.request_id for row in rows.values()).values()) == {2}

    on(url, test)


def _fill(tx: Connection) -> None:
    for n in range(200):
        audit.append(tx, "t", [entry(detail={"n": n, "x": "x" * 10_000})])


def test_a_full_sqlite_says_so_and_keeps_nothing_half(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await store.write(lambda tx: audit.append(tx, "t", [entry()]))
        # The limit counts from what it has now, so that small writes still fit.
        await store.write(
            lambda tx: tx.rows(f"PRAGMA max_page_count = {tx.rows('PRAGMA page_count')[0][0] + 20}")
        )
        with pytest.raises(StoreUnavailable, match="full") as caught:
            await store.write(_fill)
        assert "make room" in caught.value.hint
        assert caught.value.retryable
        small = [store.write(lambda tx: audit.append(tx, "t", [entry()])) for _ in range(3)]
        large = store.write(_fill)
        small += [store.write(lambda tx: audit.append(tx, "t", [entry()])) for _ in range(3)]
        with pytest.raises(StoreUnavailable, match="full"):
            await large
        assert sorted(head.seq for head in await asyncio.gather(*small)) == [2, 3, 4, 5, 6, 7]
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None

    on(f"sqlite://{tmp_path}/store.db", test)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-test-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "skerry-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def _use_up(path: Path) -> None:
    """Take all room of a disk with one file."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.root
def test_a_full_disk_and_room_again(small_disk: Path) -> None:
    async def test(store: Store) -> None:
        head = await store.write(lambda tx: audit.append(tx, "t", [entry()]))
        _use_up(small_disk / "ballast")
        with pytest.raises(StoreUnavailable, match="full"):
            await store.write(_fill)
        assert await store.read(lambda tx: audit.head(tx, "t")) == head, "it can still be read"
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None
        os.unlink(small_disk / "ballast")
        assert (await store.write(lambda tx: audit.append(tx, "t", [entry()]))).seq == 2

    on(f"sqlite://{small_disk}/store.db", test)


@pytest.mark.root
def test_a_disk_that_becomes_read_only_and_writable_again(small_disk: Path) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    async def nothing(store: Store) -> None: ...

    async def test(store: Store) -> None:
        await store.write(lambda tx: audit.append(tx, "t", [entry()]))

    url = f"sqlite://{small_disk}/store.db"
    on(url, test)
    remount("ro")
    try:
        with pytest.raises(StoreUnavailable, match="Read-only"):
            on(url, nothing)
    finally:
        remount("rw")
    on(url, test)


def test_a_lock_of_another_process_is_waited_for_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.store.sqlite.BUSY_MILLISECONDS", 50)

    async def test(store: Store) -> None:
        other = await Store.open(f"sqlite://{tmp_path}/store.db")
        entered, go = threading.Event(), threading.Event()

        def hold(tx: Connection) -> None:
            entered.set()
            assert go.wait(30)

        holding = other.write(hold)
        await asyncio.to_thread(entered.wait, 30)
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.write(lambda tx: quotas.put(tx, Quota(tenant="t")))
        go.set()
        await holding
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t")))
        await other.close()

    on(f"sqlite://{tmp_path}/store.db", test)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"something else" * 1000)

    async def nothing(store: Store) -> None: ...

    with pytest.raises(StoreUnusable, match="not a database"):
        on(f"sqlite://{tmp_path}/store.db", nothing)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/none", StoreUnavailable),
        ("postgresql://u:hunter2@127.0.0.1/none?nonsense=1", InvalidRequest),
        ("postgresql://u:hunter2@127.0.0.1:x/none", StoreUnavailable),
    ],
)
def test_a_postgres_that_cannot_be_is_told_without_its_password(url: str, error: type[Exception]) -> None:
    async def nothing(store: Store) -> None: ...

    with pytest.raises(error, match="Postgres") as caught:
        on(url, nothing)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
def test_postgres_goes_and_comes_back(postgres_server: Server, how: signal.Signals) -> None:
    """Under load: nothing acknowledged is lost, nothing is written twice, and nobody has to reconnect."""
    done: dict[str, bool | None] = {}
    """True: acknowledged. False: refused. None: nobody knows."""

    async def test(store: Store) -> None:
        enough, refused, back, stopping = (asyncio.Event() for _ in range(4))

        async def write(name: str) -> None:
            n = 0
            while not stopping.is_set():
                key, n = f"{name}-{n}", n + 1
                one = entry(request_id=key)
                try:
                    await store.write(lambda tx, one=one: audit.append(tx, "t", [one]))  # type: ignore[misc]
                except StoreUnavailable as error:
                    done[key] = None if error.detail.get("written") == "unknown" else False
                    refused.set()
                else:
                    done[key] = True
                    (back if refused.is_set() else enough).set()

        writers = [asyncio.create_task(write(f"w{w}")) for w in range(4)]
        await store.read(lambda tx: audit.head(tx, "t"))  # a reader that will be stale
        await enough.wait()
        await asyncio.to_thread(postgres_server.stop, how)
        await refused.wait()
        await asyncio.to_thread(postgres_server.start)
        await back.wait()
        stopping.set()
        await asyncio.gather(*writers)
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None
        written = Counter([row.request_id async for page in audit.pages(store, "t") for row in page])
        for key, value in done.items():
            assert written[key] in {True: (1,), False: (0,), None: (0, 1)}[value], (key, value)

    on(postgres_server.new_database(), test)


class Cable:
    """A connection to Postgres that can be cut: a COMMIT goes through, its answer does not."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut = False

    async def plug(self) -> int:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._listener.sockets[0].getsockname()[1])

    async def unplug(self) -> None:
        self._listener.close()
        await self._listener.wait_closed()
        await asyncio.gather(*self._tasks)

    async def _serve(self, up: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        down, to_server = await asyncio.open_connection("127.0.0.1", self._server.port)
        committing = False

        async def upwards() -> None:
            nonlocal committing
            while data := await up.read(65536):
                committing = self.cut and b"COMMIT" in data
                to_server.write(data)
            to_server.close()

        async def downwards() -> None:
            while data := await down.read(65536):
                if committing:
                    break
                to_client.write(data)
            to_client.close()

        both = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
        self._tasks.update(both)
        await asyncio.gather(*both)
        for end in (to_client, to_server):
            await end.wait_closed()


def test_a_commit_whose_answer_is_lost_is_told_as_unknown_and_not_repeated(postgres_server: Server) -> None:
    async def test() -> None:
        cable = Cable(postgres_server)
        url = postgres_server.new_database().replace(f":{postgres_server.port}/", f":{await cable.plug()}/")
        store = await Store.open(url)
        cable.cut = True
        with pytest.raises(StoreUnavailable) as caught:
            await store.write(lambda tx: audit.append(tx, "t", [entry(request_id="lost")]))
        assert caught.value.detail == {"written": "unknown"}
        cable.cut = False
        await store.write(lambda tx: audit.append(tx, "t", [entry(request_id="next")]))
        rows = await store.read(lambda tx: audit.search(tx, "t"))
        assert [row.request_id for row in rows] == ["lost", "next"]
        await store.close()
        await cable.unplug()

    asyncio.run(test())


def test_an_idle_store_does_not_notice_that_postgres_was_restarted(postgres_server: Server) -> None:
    async def test(store: Store) -> None:
        await store.write(lambda tx: audit.append(tx, "t", [entry()]))
        await store.read(lambda tx: audit.head(tx, "t"))
        await asyncio.to_thread(postgres_server.stop)
        with pytest.raises(StoreUnavailable, match="Postgres"):
            await store.write(lambda tx: audit.append(tx, "t", [entry()]))
        with pytest.raises(StoreUnavailable, match="Postgres"):
            await store.read(lambda tx: audit.head(tx, "t"))
        await asyncio.to_thread(postgres_server.start)
        assert (await store.write(lambda tx: audit.append(tx, "t", [entry()]))).seq == 2
        await asyncio.to_thread(postgres_server.stop)
        await asyncio.to_thread(postgres_server.start)
        assert (await store.write(lambda tx: audit.append(tx, "t", [entry()]))).seq == 3
        assert (await store.read(lambda tx: audit.head(tx, "t"))).seq == 3

    on(postgres_server.new_database(), test)


def test_a_deadlock_of_two_daemons_is_nobodys_problem(postgres_server: Server) -> None:
    url = postgres_server.new_database()

    async def test(store: Store) -> None:
        other = await Store.open(url)
        both = threading.Barrier(2)
        runs = Counter[str]()

        def crossing(first: str, second: str, tx: Connection) -> None:
            runs[first] += 1
            audit.append(tx, first, [entry()])
            if runs[first] == 1:
                both.wait(30)
            audit.append(tx, second, [entry()])

        for tenant in "ab":
            await store.write(lambda tx, t=tenant: audit.append(tx, t, [entry()]))  # type: ignore[misc]
        await asyncio.gather(
            store.write(lambda tx: crossing("a", "b", tx)), other.write(lambda tx: crossing("b", "a", tx))
        )
        await other.close()
        assert sum(runs.values()) > 2, "one of them ran again, or both"
        for tenant in "ab":
            assert (await store.read(lambda tx, t=tenant: audit.head(tx, t))).seq == 3  # type: ignore[misc]
            assert await store.read(lambda tx, t=tenant: audit.verify(tx, t)) is None  # type: ignore[misc]

    on(url, test)


def test_a_postgres_of_another_encoding_is_refused(postgres_server: Server) -> None:
    url = postgres_server.new_database("ENCODING 'SQL_ASCII' LOCALE 'C'")

    async def nothing(store: Store) -> None: ...

    with pytest.raises(StoreUnusable, match="UTF8"):
        on(url, nothing)


def test_postgres_over_its_unix_socket(postgres_server: Server) -> None:
    async def nothing(store: Store) -> None: ...

    name = postgres_server.new_database().rpartition("/")[2]
    on(postgres_server.url(name, over="unix"), nothing)
