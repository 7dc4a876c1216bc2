"""Environments, executions, tokens and quotas, on SQLite and on Postgres."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from skerry.errors import Conflict, InvalidRequest, IsolationUnavailable, QuotaExceeded
from skerry.ids import new_id
from skerry.models import Outcome, State
from skerry.store import Store, environments, executions, quotas, tokens
from skerry.store.environments import EnvironmentRecord
from skerry.store.executions import ExecutionRecord
from skerry.store.quotas import Quota
from skerry.store.table import DAY
from tests.integration.stores import NOW, on, record


async def insert(store: Store, *records: EnvironmentRecord) -> None:
    for one in records:
        await store.write(lambda tx, one=one: environments.insert(tx, one))  # type: ignore[misc]


@pytest.mark.requirement("R24")
def test_an_environment_comes_back_as_it_was(store_url: str) -> None:
    one = record(name="n", instance={"pid": 7}, created_by="uid 0", boot_id="b")

    async def test(store: Store) -> None:
        await insert(store, one)
        assert await store.read(lambda tx: environments.get(tx, one.id)) == one
        assert await store.read(lambda tx: environments.get(tx, one.id, tenant="t")) == one
        assert await store.read(lambda tx: environments.get(tx, one.id, tenant="other")) is None
        assert await store.read(lambda tx: environments.get(tx, "nothing")) is None

    on(store_url, test)
    on(store_url, lambda store: _is(store, one))


async def _is(store: Store, one: EnvironmentRecord) -> None:
    """After the store was closed and opened again."""
    assert await store.read(lambda tx: environments.get(tx, one.id)) == one


def test_a_name_is_unique_among_the_live_of_a_tenant(store_url: str) -> None:
    async def test(store: Store) -> None:
        first = record(name="n")
        await insert(store, first, record(name="n", tenant="other"), record(name=""), record(name=""))
        with pytest.raises(Conflict, match="'n'"):
            await insert(store, record(name="n"))
        assert await store.write(
            lambda tx: environments.change(
                tx, first.id, host="h", states=[State.CREATING], to=State.ENDED, ended_at=NOW
            )
        )
        await insert(store, record(name="n"))

    on(store_url, test)


def test_a_state_changes_only_from_where_it_is_and_by_its_host(store_url: str) -> None:
    one = record()

    async def change(store: Store, states: list[str], to: str | None, host: str = "h", **values: Any) -> bool:
        return await store.write(
            lambda tx: environments.change(tx, one.id, host=host, states=states, to=to, **values)
        )

    async def test(store: Store) -> None:
        await insert(store, one)
        assert not await change(store, [State.RUNNING], State.DELETING)
        assert not await change(store, [State.CREATING], State.RUNNING, host="another")
        assert await change(store, [State.CREATING], State.RUNNING, instance={"pid": 8}, boot_id="b")
        assert not await change(store, [State.CREATING], State.RUNNING)
        assert await change(store, [State.RUNNING], None, boot_id="c")
        usage = {"cpu_seconds": 0.1, "pids": None}
        assert await change(
            store, ["creating", "running"], "ended", ended_at=NOW, ended_reason="why", usage=usage
        )
        assert await store.read(lambda tx: environments.get(tx, one.id)) == replace(
            one,
            state="ended",
            instance={"pid": 8},
            boot_id="c",
            ended_at=NOW,
            ended_reason="why",
            usage=usage,
        )
        with pytest.raises(TypeError, match="tenant"):
            await change(store, ["ended"], None, tenant="stolen")

    on(store_url, test)


def test_no_row_goes_back_to_an_earlier_state(store_url: str) -> None:
    order = [State.CREATING, State.RUNNING, State.DELETING, State.ENDED]

    async def test(store: Store) -> None:
        for was in order:
            for to in order:
                one = record(state=str(was))
                await insert(store, one)
                change = partial(environments.change, environment_id=one.id, host="h", states=order, to=to)
                moved = await store.write(change)
                found = await store.read(partial(environments.get, environment_id=one.id))
                assert found is not None
                forwards = order.index(to) >= order.index(was) and was != State.ENDED
                assert (moved, found.state) == (forwards, to if forwards else was)

    on(store_url, test)


def test_of_many_that_change_a_state_at_once_one_does(store_url: str) -> None:
    one = record(state="running")

    async def test(store: Store) -> None:
        await insert(store, one)
        other = await Store.open(store_url)
        changed = await asyncio.gather(
            *(
                where.write(
                    lambda tx: environments.change(tx, one.id, host="h", states=["running"], to="deleting")
                )
                for where in [store, other] * 20
            )
        )
        await other.close()
        assert sum(changed) == 1

    on(store_url, test)


def test_a_heartbeat_in_time_wins_over_expiry(store_url: str) -> None:
    one = record(state="running", expires_at=NOW + 10)

    async def expire(store: Store, at: float) -> bool:
        return await store.write(
            lambda tx: environments.change(
                tx, one.id, host="h", states=["running"], to="deleting", expired_at=at
            )
        )

    async def renew(store: Store, at: float, host: str = "h") -> bool:
        return await store.write(
            lambda tx: environments.renew(tx, one.id, host=host, active_at=at, expires_at=at + 10)
        )

    async def test(store: Store) -> None:
        await insert(store, one)
        assert not await renew(store, NOW + 5, host="another")
        assert await renew(store, NOW + 5)
        assert not await expire(store, NOW + 11)
        assert await renew(store, NOW + 1), "an older heartbeat that comes late"
        found = await store.read(lambda tx: environments.get(tx, one.id))
        assert found == replace(one, active_at=NOW + 5, expires_at=NOW + 15)
        assert await expire(store, NOW + 15)
        assert not await renew(store, NOW + 15), "too late"

    on(store_url, test)


def test_lists_have_filters_and_pages(store_url: str) -> None:
    # Three of each instant, so that pages end between equal times.
    many = [record(created_at=NOW + n // 3, name=f"n{n}", host=f"h{n % 2}") for n in range(10)]
    ended = record(state="ended", image="other", created_at=NOW - 1)
    foreign = record(tenant="other")

    async def test(store: Store) -> None:
        await insert(store, *many, ended, foreign)

        async def ids(**filters: Any) -> list[str]:
            out, cursor = [], ""
            while True:
                page = await store.read(
                    lambda tx: environments.find(tx, cursor=cursor, limit=2, **filters)  # noqa: B023
                )
                assert 0 < len(page.items) <= 2 or not page.next
                out += [one.id for one in page.items]
                cursor = page.next
                if not cursor:
                    return out

        newest_first = sorted(many, key=lambda one: (one.created_at, one.id), reverse=True)
        assert await ids(tenant="t", ended=False) == [one.id for one in newest_first]
        assert await ids(tenant="t") == [one.id for one in newest_first] + [ended.id]
        assert await ids(tenant="t", ended=True) == await ids(tenant="t", states=["ended"]) == [ended.id]
        assert await ids(tenant="t", image="other") == [ended.id]
        assert await ids(tenant="t", name="n4") == [many[4].id]
        assert await ids(tenant="t", states=[]) == []
        assert set(await ids(host="h1")) == {one.id for one in many[1::2]}
        assert [one.id for one in await store.read(lambda tx: environments.live(tx, "h"))] == [foreign.id]
        with pytest.raises(InvalidRequest):
            await store.read(lambda tx: environments.find(tx, cursor="!"))

    on(store_url, test)


def test_what_ended_is_forgotten_after_a_day(store_url: str) -> None:
    old, young, alive = (
        record(state="ended", ended_at=NOW - DAY - 1),
        record(state="ended", ended_at=NOW - DAY + 1),
        record(),
    )

    async def test(store: Store) -> None:
        await insert(store, old, young, alive)
        for one in (old, young):
            await store.write(
                lambda tx, one=one: executions.insert(tx, execution(one))  # type: ignore[misc]
            )
        assert await store.write(lambda tx: environments.purge(tx, now=NOW)) == 1
        assert await store.read(lambda tx: environments.get(tx, old.id)) is None
        assert await store.read(lambda tx: executions.find(tx, old.id)) == []
        assert len(await store.read(lambda tx: executions.find(tx, young.id))) == 1
        assert {e.id for e in (await store.read(environments.find)).items} == {young.id, alive.id}

    on(store_url, test)


def test_one_idempotency_key_makes_one_environment(store_url: str) -> None:
    async def claim(
        store: Store, name: str, body: str = "b", at: float = NOW, tenant: str = "t"
    ) -> str | None:
        return await store.write(
            lambda tx: environments.claim_key(
                tx, tenant=tenant, key="k", body_hash=body, environment_id=name, now=at
            )
        )

    async def test(store: Store) -> None:
        other = await Store.open(store_url)
        first = await asyncio.gather(*(claim(s, f"e{n}") for n, s in enumerate([store, other] * 10)))
        await other.close()
        assert first.count(None) == 1
        winner = f"e{first.index(None)}"
        assert set(first) == {None, winner}
        with pytest.raises(Conflict, match="another request"):
            await claim(store, "e", body="c")
        assert await claim(store, "e", tenant="other") is None
        release = environments.release_key
        await store.write(lambda tx: release(tx, "not its"))
        assert await claim(store, "e") == winner
        await store.write(lambda tx: release(tx, winner))
        assert await claim(store, "again") is None
        assert await claim(store, "tomorrow", body="c", at=NOW + DAY + 1) is None

    on(store_url, test)


def execution(environment: EnvironmentRecord, **values: Any) -> ExecutionRecord:
    return ExecutionRecord(
        **{"id": new_id(), "environment_id": environment.id, "command": "true", "started_at": NOW, **values}
    )


def test_executions_that_ran_in_a_crash_are_told(store_url: str) -> None:
    one, two = record(), record()
    done, lost, elsewhere = execution(one), execution(one, command="sleep \udcff\0" * 500), execution(two)

    async def test(store: Store) -> None:
        await insert(store, one, two)
        for each in (done, lost, elsewhere):
            await store.write(lambda tx, each=each: executions.insert(tx, each))  # type: ignore[misc]
        assert await store.write(
            lambda tx: executions.finish(
                tx, done.id, outcome=Outcome.COMPLETED, exit_code=0, ended_at=NOW + 1
            )
        )
        [found] = await store.write(lambda tx: executions.mark_lost(tx, [one.id], now=NOW + 2))
        assert (found.id, found.outcome, found.exit_code, found.ended_at) == (
            lost.id,
            "internal",
            None,
            NOW + 2,
        )
        assert found.command.startswith("sleep \\udcff\\0")
        assert await store.write(lambda tx: executions.mark_lost(tx, [one.id], now=NOW + 3)) == []
        finish = executions.finish
        assert not await store.write(
            lambda tx: finish(tx, lost.id, outcome="completed", exit_code=0, ended_at=NOW + 4)
        )
        ended = await store.read(lambda tx: executions.find(tx, one.id, running=False))
        assert {e.id: e.outcome for e in ended} == {done.id: "completed", lost.id: "internal"}
        running = await store.read(lambda tx: executions.find(tx, two.id, running=True))
        assert running == [elsewhere]
        assert await store.write(lambda tx: executions.purge(tx, now=NOW + DAY + 1.5)) == 1
        with pytest.raises(Conflict):
            await store.write(lambda tx: executions.insert(tx, execution(record())))

    on(store_url, test)


def test_a_token_is_shown_once_and_checked(store_url: str) -> None:
    async def test(store: Store) -> None:
        token, text = await store.write(
            lambda tx: tokens.create(
                tx, tenant="t", name="ci", verbs=["read", "execute"], now=NOW, expires_at=NOW + 60
            )
        )
        other, other_text = await store.write(
            lambda tx: tokens.create(tx, tenant="u", name="", verbs=["read"], now=NOW)
        )

        async def check(text: str, at: float = NOW) -> tokens.Token | None:
            return await store.read(lambda tx: tokens.check(tx, text, now=at))

        prefix, token_id, secret = text.split("_", 2)
        assert (prefix, token_id, len(secret)) == ("skt", token.id, 43)
        assert token.verbs == ["execute", "read"]
        assert await check(text) == token
        assert await check(other_text) == other
        for wrong in (
            "", "skt", "skt_", f"skt_{token_id}", f"skt_{token_id}_", text[:-1], text + "x", f"x{text}",
            f"skt_{other.id}_{secret}", f"skt_nothing_{secret}", text + "\0", text + "\udcff", f"Skt_{text[4:]}",
        ):  # fmt: skip
            assert await check(wrong) is None, wrong
        assert await check(text, NOW + 60) is None
        await store.write(lambda tx: tokens.used(tx, {token.id: NOW + 5, other.id: NOW + 6}))
        await store.write(lambda tx: tokens.used(tx, {token.id: NOW + 4, "gone": NOW}))
        used = await store.read(tokens.find)
        assert [(t.id, t.last_used_at) for t in used] == sorted([(token.id, NOW + 5), (other.id, NOW + 6)])
        assert not await store.write(lambda tx: tokens.revoke(tx, token.id, now=NOW, tenant="u"))
        assert await store.write(lambda tx: tokens.revoke(tx, token.id, now=NOW + 7, tenant="t"))
        assert not await store.write(lambda tx: tokens.revoke(tx, token.id, now=NOW + 8))
        assert await check(text) is None
        [listed] = await store.read(lambda tx: tokens.find(tx, tenant="t"))
        assert listed == replace(token, revoked_at=NOW + 7, last_used_at=NOW + 5)
        rows = await store.read(lambda tx: tx.rows("SELECT * FROM tokens"))
        assert secret not in repr(rows)

    on(store_url, test)


def test_the_digest_of_another_token_opens_nothing(store_url: str) -> None:
    async def test(store: Store) -> None:
        mine, text = await store.write(
            lambda tx: tokens.create(tx, tenant="t", name="mine", verbs=[], now=NOW)
        )
        admin, _ = await store.write(
            lambda tx: tokens.create(tx, tenant="t", name="admin", verbs=["all"], now=NOW)
        )
        await store.write(
            lambda tx: tx.run(
                "UPDATE tokens SET digest = (SELECT digest FROM tokens WHERE id = :mine) WHERE id = :admin",
                {"mine": mine.id, "admin": admin.id},
            )
        )
        forged = text.replace(mine.id, admin.id)
        assert await store.read(lambda tx: tokens.check(tx, forged, now=NOW)) is None

    on(store_url, test)


def test_a_quota_holds_with_two_daemons_creating(store_url: str) -> None:
    async def create(store: Store) -> None:
        one = record(cpus=0.1, memory=1 << 20, disk=1 << 30)

        def work(tx: Any) -> None:
            quotas.check(tx, "t", cpus=one.cpus, memory=one.memory, disk=one.disk, isolation="namespace")
            time.sleep(0.002)  # where the other daemon would slip in
            environments.insert(tx, one)

        await store.write(work)

    async def test(store: Store) -> None:
        other = await Store.open(store_url)
        await create(store)
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t", environments=99)))
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t", environments=5, cpus=0.5)))
        made = await asyncio.gather(*(create(s) for s in [store, other] * 6), return_exceptions=True)
        await other.close()
        assert made.count(None) == 4
        assert all(isinstance(error, QuotaExceeded) for error in made if error is not None)
        used = await store.read(lambda tx: quotas.in_use(tx, "t"))
        assert (used.environments, used.memory, used.disk) == (5, 5 << 20, 5 << 30)
        assert await store.read(lambda tx: quotas.get(tx, "t")) == Quota(tenant="t", environments=5, cpus=0.5)
        assert await store.read(lambda tx: quotas.get(tx, "u")) == Quota(tenant="u")
        for what, quota in {
            "cpus": Quota(tenant="t", cpus=0.55), "memory": Quota(tenant="t", memory=6 << 20 - 1),
            "disk": Quota(tenant="t", disk=(6 << 30) - 1),
        }.items():  # fmt: skip
            await store.write(lambda tx, quota=quota: quotas.put(tx, quota))  # type: ignore[misc]
            with pytest.raises(QuotaExceeded, match=what):
                await create(store)

    on(store_url, test)


def test_what_is_kept_on_disk_counts_and_gives_way_to_workspaces(store_url: str) -> None:
    async def test(store: Store) -> None:
        def keep(host: str, **sizes: int) -> Any:
            def work(tx: Any) -> None:
                quotas.keep(tx, host, "packages", sizes)
                quotas.check_kept(tx, "t")

            return store.write(work)

        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t", disk=100)))
        await keep("one", t=60, u=1000)
        await keep("two", t=30)
        with pytest.raises(QuotaExceeded, match="disk"):
            await keep("one", t=80)
        used = await store.read(lambda tx: (quotas.in_use(tx, "t").disk, quotas.in_use(tx, "u").disk))
        assert used == (90, 1000)
        assert not await store.read(lambda tx: quotas.crowded(tx, "t"))
        one = record(disk=50)

        def create(tx: Any) -> None:
            quotas.check(tx, "t", cpus=0, memory=0, disk=50, isolation="namespace")
            environments.insert(tx, one)

        await store.write(create)
        assert await store.read(lambda tx: quotas.crowded(tx, "t"))
        await keep("one")
        assert not await store.read(lambda tx: quotas.crowded(tx, "t"))


def test_an_environment_with_less_isolation_than_its_tenants_least_is_refused(store_url: str) -> None:
    async def test(store: Store) -> None:
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t", isolation="gvisor")))

        def check(isolation: str) -> Any:
            return store.write(
                lambda tx: quotas.check(tx, "t", cpus=0, memory=0, disk=0, isolation=isolation)
            )

        for weak in ("namespace", "none"):
            with pytest.raises(IsolationUnavailable, match="at least isolation 'gvisor'"):
                await check(weak)
        for strong in ("gvisor", "microvm"):
            await check(strong)

    on(store_url, test)


def test_ended_environments_of_earlier_versions_keep_only_what_tells_of_their_end(store_url: str) -> None:
    rules = {"network": "allowlist", "allow": ["example.com"], "limits": {}}
    old = record(state="ended", ended_reason="why", policy=rules, variables={"A": "1"})
    older = record(state="ended", policy={"limits": {}}, variables={})
    live = record(state="running", policy=rules, variables={"A": "1"})
    foreign = replace(old, id=new_id(), host="other")

    async def test(store: Store) -> None:
        await insert(store, old, older, live, foreign)
        await store.write(lambda tx: environments.forget_means(tx, "h"))
        kept = {**rules, "allow": []}
        for one, policy, variables in (
            (old, kept, {}),
            (older, {"allow": [], "limits": {}}, {}),
            (live, rules, {"A": "1"}),
            (foreign, rules, {"A": "1"}),
        ):
            expected = replace(one, policy=policy, variables=variables)
            found = await store.read(lambda tx, id=one.id: environments.get(tx, id))  # type: ignore[misc]
            assert found == expected

    on(store_url, test)
