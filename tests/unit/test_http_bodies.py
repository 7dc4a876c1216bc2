"""JSON bodies: the same values as json.loads gives, within limits, whatever the pieces."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from skerry.daemon.http import bodies, requests
from skerry.daemon.http.bodies import ITEMS_MAX, PIECE, SMALL, STRUCTURE_MAX, TEXT_MAX, JsonBody, LongText
from skerry.daemon.http.requests import Body, Content, Texts, TextsByName, parse, read_json
from skerry.errors import InvalidRequest, LimitReached

SIGNS = ["a", '"', "\\", "\n", "é", "\U0001f600", "\ud83d", "\udc80", "\x01", ",", "[", "{", "\u2028"]


class Sent(Body):
    contents = ("content",)
    content: Content = ""
    argv: Texts | None = None
    env: TextsByName | None = None


def read(text: bytes, sizes: list[int]) -> Any:
    body = JsonBody(("content",))
    at = turn = 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        body.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    found = body.finish()
    if isinstance(found, dict) and isinstance(found.get("content"), LongText):
        found["content"] = str(found["content"])
    return found


def sent(text: bytes) -> Sent:
    """What the daemon makes of a body that comes in chunks."""
    chunks = [text[at : at + SMALL] for at in range(0, len(text), SMALL)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def reading() -> Sent:
        return await read_json(receive, Sent, lambda _: True, lambda: asyncio.sleep(0))

    return asyncio.run(reading())


def value(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(7 if depth else 4)
    if kind < 2:
        return "".join(dice.choices(SIGNS, k=dice.randrange(12)))
    if kind < 4:
        return dice.choice([0, -1.5e300, True, None, 10**30])
    if kind < 6:
        return [value(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {"".join(dice.choices(SIGNS, k=3)): value(dice, depth - 1) for _ in range(dice.randrange(4))}


@pytest.mark.parametrize("seed", range(20))
def test_every_text_means_the_same_in_any_pieces(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        what = {"content": value(dice, 3), "argv": value(dice, 3)}
        for ascii_only in (True, False):
            try:
                text = json.dumps(what, ensure_ascii=ascii_only).encode()
            except UnicodeEncodeError:  # a lone surrogate has no UTF-8
                continue
            assert read(text, [dice.randrange(1, 9) for _ in range(5)]) == json.loads(text)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_json_is_refused_in_any_pieces(seed: int) -> None:
    dice = random.Random(seed)
    good = json.dumps({"content": 'a"\\\n\x01é\U0001f600' * 3, "argv": ["x", 1, {"y": []}]})
    for _ in range(100):
        cut = dice.randrange(1, len(good))
        bad = dice.choice([good[:cut], good[:cut] + dice.choice('"\\{}[],:x\n\t') + good[cut:]]).encode()
        try:
            expected: Any = json.loads(bad)
        except ValueError:
            expected = ValueError
        try:
            found: Any = read(bad, [dice.randrange(1, 9) for _ in range(5)])
        except ValueError:
            found = ValueError
        assert found == expected, bad


def test_bytes_that_are_no_utf8_are_refused() -> None:
    for text in (b'{"content": "\xff"}', b'{"content": "\xc3', '{"content": "a"}'.encode("utf-16")):
        with pytest.raises(InvalidRequest, match="not JSON"):
            sent(text)
        with pytest.raises(InvalidRequest, match="not JSON"):
            sent(b" " * SMALL + text)


def test_content_may_be_large() -> None:
    for content in ("x" * (4 << 20), 'é"\n\U0001f600' * (1 << 18), "\udc80" * (1 << 18)):
        assert str(sent(json.dumps({"argv": ["a"], "content": content}).encode()).content) == content


@pytest.mark.parametrize("room", ["", " " * SMALL])
def test_nothing_but_content_may_be_long(room: str) -> None:
    longest = "x" * TEXT_MAX
    assert sent(json.dumps({"argv": [longest]}).encode()).argv == [longest]
    for body in ({"argv": [f"{longest}x"]}, {"env": {"a": f"{longest}x"}}, {"env": {f"{longest}x": ""}}):
        with pytest.raises(InvalidRequest, match="longer than 131072 bytes"):
            sent(room.encode() + json.dumps(body).encode())
    with pytest.raises(LimitReached, match=f"more than {STRUCTURE_MAX} bytes that are no content"):
        sent(room.encode() + json.dumps({"argv": [longest] * 9}).encode())
    with pytest.raises(LimitReached, match=f"more than {STRUCTURE_MAX} bytes that are no content"):
        sent(b" " * (2 * STRUCTURE_MAX) + b"{}")


@pytest.mark.parametrize(
    "text",
    [
        b'{"argv":[' + b"1," * (1 << 20) + b"1]}",
        b'{"argv":[' + b'"",' * (1 << 20) + b'""]}',
        b'{"env":{' + b",".join(b'"%d":""' % number for number in range(1 << 18)) + b"}}",
        b'{"argv":' + b"[" * (1 << 20),
        b'{"argv":' + b'{"":' * (1 << 20),
        b'""' * (1 << 20),
    ],
    ids=["numbers", "texts", "variables", "lists", "objects", "strings"],
)
def test_elements_are_counted_before_they_are_parsed(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.JsonBody, "finish", None)
    with pytest.raises(LimitReached, match=f"more than {ITEMS_MAX} elements"):
        sent(text)


@pytest.mark.parametrize("spaces", [0, SMALL])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"argv": [1] * 9000}, "argv: 0 must be text, not int"),
        ({"argv": ["a", None]}, "argv: 1 must be text, not NoneType"),
        ({"env": {str(number): 1 for number in range(4000)}}, "env: 0 must be text, not int"),
        ({str(number): 1 for number in range(4000)}, "unknown field '0'"),
    ],
    ids=["list", "second", "object", "unknown"],
)
def test_validation_stops_at_the_first_error(body: dict[str, Any], message: str, spaces: int) -> None:
    """pydantic would describe all of them, which takes longer than to parse the body."""
    with pytest.raises(InvalidRequest) as caught:
        sent(b" " * spaces + json.dumps(body).encode())
    assert caught.value.message == message
    cause = caught.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() == 1)


@pytest.mark.parametrize("spaces", [0, SMALL])
def test_field_given_twice_is_refused(spaces: int) -> None:
    for text in ('{"argv":["a"],"argv":["b"]}', '{"env":{"x":"1","y":"","x":"2"}}'):
        with pytest.raises(InvalidRequest, match="is given twice"):
            sent(b" " * spaces + text.encode())
    split = b'{"env":{"' + b"x" * PIECE + b'":"1","' + b"x" * PIECE + b'":"2"}}'
    with pytest.raises(InvalidRequest, match="is given twice"):
        sent(b" " * SMALL + split)


@pytest.mark.parametrize("number", ["1" * 5000, "1" * (1 << 19), "-" + "9" * 5000])
def test_huge_numbers_are_refused(number: str) -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        sent(f'{{"argv":[{number}]}}'.encode())


def test_large_text_of_a_websocket_has_the_same_limits() -> None:
    with pytest.raises(LimitReached, match="elements"):
        parse(Sent, json.dumps({"argv": ["a"] * ITEMS_MAX}))
    with pytest.raises(InvalidRequest, match="longer"):
        parse(Sent, json.dumps({"content": "x" * (TEXT_MAX + 1)}))


@pytest.mark.parametrize("encoding", ["utf-8", "base64"])
def test_large_content_is_decoded_in_turns(encoding: Any) -> None:
    text = {"utf-8": "é\udc80\U0001f600" * 100, "base64": "AAEC" * 100}[encoding]

    async def turns() -> int:
        count = 0
        long = LongText([text[at : at + 61] for at in range(0, len(text), 61)])
        decoding = asyncio.create_task(requests.decode(long, encoding, "it"))
        while not decoding.done():
            await asyncio.sleep(0)
            count += 1
        expected = text.encode("utf-8", "surrogateescape") if encoding == "utf-8" else bytes(range(3)) * 100
        assert decoding.result() == expected
        return count

    assert asyncio.run(turns()) > 4
    wrong = ["=" * 200, "AAE=" * 50] if encoding == "base64" else ["\ud800" * 200]
    for bad in wrong:
        for given in (bad, LongText([bad[:100], bad[100:]])):
            with pytest.raises(InvalidRequest, match="it is not"):
                asyncio.run(requests.decode(given, encoding, "it"))
