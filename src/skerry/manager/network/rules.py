"""What a policy allows of the network, and changes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from skerry.egress import presets
from skerry.egress.addresses import Ranges
from skerry.egress.presets import Preset
from skerry.egress.rules import RULES_MAX, Rules
from skerry.errors import InvalidRequest
from skerry.policy import Policy


@dataclass(frozen=True, slots=True)
class Meaning:
    """The network of a policy, with its presets expanded."""

    rules: Rules
    variables: dict[str, str]
    files: dict[str, bytes]


async def understand(policy: Policy, ranges: Ranges, preset: Callable[[str], Preset]) -> Meaning:
    """Expand a policy. Raises InvalidRequest, and PlatformError if a preset cannot be determined."""
    check_count(policy.allow)
    rules: list[str] = []
    variables: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for text in policy.allow:
        if text not in presets.names():
            rules.append(_checked(text))
            continue
        found = await asyncio.to_thread(preset, text)
        rules += found.rules
        variables |= found.variables
        files |= dict(found.files)
    return Meaning(Rules.parse(policy.network, rules, ranges), variables, files)


def check_count(rules: Collection[str]) -> None:
    """Raises InvalidRequest if there are too many."""
    if len(rules) > RULES_MAX:
        raise InvalidRequest(f"{len(rules)} rules are too many", hint=f"at most {RULES_MAX}")


def _checked(text: str) -> str:
    """Explain two common mistakes. Raises InvalidRequest."""
    if "://" in text:
        raise InvalidRequest(
            f"{text!r} is a URL, and not a rule", hint="write its host alone: api.example.com"
        )
    if not any(mark in text for mark in ".:/"):
        raise InvalidRequest(
            f"{text!r} is neither a preset nor the full name of a host",
            hint=f"presets: {', '.join(presets.names())}",
        )
    return text


def with_network(policy: Policy, network: str | None, allow: Collection[str] | None, **limits: Any) -> Policy:
    """The policy with another kind, rules or limits; None leaves each as it is. Raises InvalidRequest."""
    kind = policy.network if network is None else network
    kept = policy.allow if allow is None and kind == "allowlist" else tuple(dict.fromkeys(allow or ()))
    return replace(policy, network=kind, allow=kept, limits=policy.limits.changed(limits))


def with_rules(policy: Policy, add: Collection[str], remove: Collection[str]) -> Policy:
    """The policy with rules added and removed; adding turns `none` into `allowlist`. Raises InvalidRequest."""
    if policy.network == "public":
        raise InvalidRequest(
            "every public address is allowed already, and single ones cannot be taken away",
            hint="set the network to 'allowlist' first",
        )
    check_count(add)
    check_count(remove)
    unknown = [rule for rule in remove if rule not in policy.allow]
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]!r} is not in the allowlist", hint=f"in it: {', '.join(policy.allow) or 'nothing'}"
        )
    kept = [rule for rule in policy.allow if rule not in remove]
    kind = "allowlist" if add else policy.network
    return replace(policy, network=kind, allow=tuple(dict.fromkeys((*kept, *add))))
