"""What tenants are charged for."""

from __future__ import annotations

from skerry.daemon.accounts import NOBODY, OTHERS, TENANTS_MAX, Accounts
from skerry.daemon.metrics import Metrics
from skerry.fairness import STRANGERS


def test_loop_time_is_charged_to_tenants_and_that_of_strangers_to_nobody() -> None:
    accounts = Accounts()
    accounts.charge("one", 0.5)
    accounts.charge("one", 0.25)
    accounts.charge(STRANGERS, 1.0)
    accounts.charge("", 2.0)
    assert accounts.of("one").loop_seconds == 0.75
    assert accounts.nobody.loop_seconds == 3.0
    assert {tenant for _, _, values in accounts.families() for (tenant,) in values} == {NOBODY, "one"}


def test_the_number_of_labels_is_bounded() -> None:
    metrics = Metrics()
    for number in range(10 * TENANTS_MAX):
        metrics.accounts.of(f"t{number}").requests += 1
    lines = [line for line in metrics.lines() if line.startswith("skerry_tenant_requests_total{")]
    assert len(lines) <= TENANTS_MAX + 1
    assert metrics.accounts.of("one more") is metrics.accounts.of("and another")
    assert sum(float(line.split()[-1]) for line in lines) == 10 * TENANTS_MAX
    assert any(OTHERS in line for line in lines)
    assert Accounts().told("nobody knows")["requests"] == 0
