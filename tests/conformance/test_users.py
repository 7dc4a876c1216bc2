"""Who does the work."""

from __future__ import annotations

import pytest

from skerry.errors import InvalidRequest
from tests.conformance.harness import Box, needs


@pytest.mark.requirement("R39")
@needs("users")
async def test_work_is_done_by_the_user_of_the_environment_unless_another_is_named(box: Box) -> None:
    assert (await box.run("id", "-u")).stdout == b"1000\n"
    assert (await box.run("id", "-u", uid=0)).stdout == b"0\n"
    assert (await box.shell("id -u", "as-root", uid=0)).stdout == b"0\n"


@needs("users")
async def test_a_user_without_a_name_is_served_too(box: Box) -> None:
    assert (await box.run("id", "-u", uid=12345)).stdout == b"12345\n"


async def test_a_user_that_is_not_allowed_is_the_callers_fault(box: Box) -> None:
    for n in range(30):
        with pytest.raises(InvalidRequest, match="user"):
            await box.run("id", uid=70000)
        with pytest.raises(InvalidRequest, match="user"):
            await box.shell("id", f"other-{n}", uid=70000)
