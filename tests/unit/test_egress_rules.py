"""Names, ranges and rules."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from skerry.egress.addresses import Ranges
from skerry.egress.names import canonical, from_person
from skerry.egress.rules import RULES_MAX, Rule, Rules
from skerry.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("example.com", "example.com"), ("EXAMPLE.Com", "example.com"), ("example.com.", "example.com")),
        *(("a_b.example", "a_b.example"), ("localhost", "localhost"), ("1.2.3.4.example", "1.2.3.4.example")),
        *(("xn--bcher-kva.example", "xn--bcher-kva.example"), ("3com", "3com"), ("a" * 63, "a" * 63)),
        *(
            (text, None)
            for text in ("", ".", "..", "a..b", ".a", "a..", "-a.b", "a-.b", "a b", "a\0b", "a\nb")
        ),
        *(
            (text, None)
            for text in ("a.b\n", "a" * 64, "a." * 127 + "a", "1.2.3.4", "127.1", "0x7f.1", "1.0X7F")
        ),
        *(
            (text, None)
            for text in ("0x", "2130706433", "a.1", "a:80", "[::1]", "::1", "u@a.b", "a/b", "*.a", "a%b")
        ),
        *((text, None) for text in ("bücher.example", "ex\xaample.com", "e\u212aample", "a\u3002b", "１.２")),
    ],
)
def test_names_as_they_are_sent(text: str, name: str | None) -> None:
    assert canonical(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("bücher.example", "xn--bcher-kva.example"), ("BÜCHER.example", "xn--bcher-kva.example")),
        *(
            ("Example.com", "example.com"),
            ("straße.example", None),
            ("ex\xaample.com", None),
            ("a\u3002b", None),
        ),
        *(
            ("１.example", None),
            ("a\u200d.example", None),
            ("\u2488com", None),
            ("ü" * 70, None),
            ("ü..a", None),
        ),
    ],
)
def test_names_as_people_write_them(text: str, name: str | None) -> None:
    assert from_person(text) == name


@pytest.mark.parametrize(
    ("text", "what", "ports"),
    [
        ("example.com", "example.com", (80, 443)),
        ("*.example.com", "*.example.com", (80, 443)),
        ("example.com:8443", "example.com", (8443,)),
        ("example.com:*", "example.com", None),
        ("93.184.216.34", "93.184.216.34/32", (80, 443)),
        ("93.184.216.0/24:22", "93.184.216.0/24", (22,)),
        ("2606:2800::5", "2606:2800::5/128", (80, 443)),
        ("2606:2800::5:22", "2606:2800::5:22/128", (80, 443)),
        ("[2606:2800::5]:22", "2606:2800::5/128", (22,)),
        ("[2606:2800::/32]:*", "2606:2800::/32", None),
        ("2606:2800::/32:22", "2606:2800::/32", (22,)),
        ("2606:2800::/32", "2606:2800::/32", (80, 443)),
        ("fe80::1", "fe80::1/128", (80, 443)),
    ],
)
def test_rules(text: str, what: str, ports: tuple[int, ...] | None) -> None:
    rule = Rule.parse(text)
    assert rule.ports == ports
    if rule.network is None:
        assert ("*." if rule.below else "") + rule.name == what
    else:
        assert (rule.network, rule.name) == (ip_network(what), "")


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.com", "*.", "a*.example.com", "*.*.example.com", "example.com:", "example.com:0"),
        *("example.com:65536", "example.com:http", "example.com:-1", "example.com: 80", "example.com:８０"),
        *("93.184.216.34/24", "93.184.216.34/33", "93.184.216", "1572395042", "0x5d.1", "1.2.3.4.5"),
        *("[example.com]", "[1.2.3.4]", "[2606::1", "2606::1]", "[2606::1]22", "http://example.com", "a/b"),
        *("example.com/path", "user@example.com", "example.com\n", "fe80::1%eth0", "straße.example", "a b"),
    ],
)
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Rule.parse(text)


def test_what_is_no_policy() -> None:
    for kind, allowed in (("all", []), ("public", ["a.example"]), ("none", ["a.example"])):
        with pytest.raises(InvalidRequest):
            Rules.parse(kind, allowed, Ranges())
    with pytest.raises(InvalidRequest, match="too many"):
        Rules.parse("allowlist", ["a.example"] * (RULES_MAX + 1), Ranges())


def test_what_an_operator_says() -> None:
    own = ip_address("93.184.200.2")
    ranges = Ranges((ip_network("10.1.0.0/16"),), (ip_network("8.8.0.0/16"),), lambda: {own})
    rules = Rules.parse("public", [], ranges)

    def why(text: str) -> str:
        return rules.why_not_address(ip_address(text), 80, by_name=False)

    assert why("10.1.2.3") == ""
    assert why("9.9.9.9") == ""
    assert "private" in why("10.2.0.1")
    assert "internal" in why("8.8.8.8")
    assert "this machine" in why(str(own))
    assert "another form" in why("::ffff:10.1.2.3")


def test_what_no_operator_can_say() -> None:
    """That everything is public: this machine is not, by whatever address its loopback is reached."""
    ranges = Ranges((ip_network("0.0.0.0/0"), ip_network("::/0")))
    rules = Rules.parse("public", [], ranges)
    inside = (
        *("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "0.0.0.1", "224.0.0.1", "239.1.2.3"),
        *("::", "::1", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "::ffff:10.0.0.1", "ff02::1"),
    )
    for text in inside:
        assert rules.why_not_address(ip_address(text), 80, by_name=True), text
    for text in ("10.0.0.1", "169.254.169.254", "fd00::1", "64:ff9b::a00:1"):
        assert rules.why_not_address(ip_address(text), 80, by_name=True) == "", text


def test_who_asks_by_name_is_not_told_the_address() -> None:
    rules = Rules.parse("public", [], Ranges())
    assert "10.2.0.1" not in rules.why_not_address(ip_address("10.2.0.1"), 80, by_name=True)
