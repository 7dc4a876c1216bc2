"""References to images of an engine, and the patterns that allow them."""

from __future__ import annotations

import pytest

from skerry.errors import Denied, InvalidRequest
from skerry.images.references import Allowed, Reference, is_reference
from skerry.images.store import check_name

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("image", "full", "name"),
    [
        ("python", "docker.io/library/python:latest", "python:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim", "python:3.12-slim"),
        ("docker.io/python", "docker.io/library/python:latest", "python:latest"),
        ("index.docker.io/acme/tool", "docker.io/acme/tool:latest", "acme/tool:latest"),
        (f"acme/tool@{DIGEST}", f"docker.io/acme/tool@{DIGEST}", f"acme/tool@{DIGEST}"),
        (f"acme/tool:1@{DIGEST}", f"docker.io/acme/tool@{DIGEST}", f"acme/tool@{DIGEST}"),
        ("ghcr.io/acme/a/b:1", "ghcr.io/acme/a/b:1", "ghcr.io/acme/a/b:1"),
        ("localhost/tool", "localhost/tool:latest", "localhost/tool:latest"),
        ("127.0.0.1:5000/tool", "127.0.0.1:5000/tool:latest", "127.0.0.1:5000/tool:latest"),
        ("0a" * 32, f"docker.io/library/{'0a' * 32}:latest", f"{'0a' * 32}:latest"),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(image: str, full: str, name: str) -> None:
    found = Reference.parse(f"docker://{image}")
    assert (found.full, found.name) == (full, f"docker://{name}")
    assert Reference.parse(found.name) == found


@pytest.mark.parametrize(
    "image",
    [
        *(
            "",
            "Python",
            "a b",
            "a:",
            "a@",
            "a@sha256:1",
            "a:b:c",
            "/a",
            "a//b",
            "a/",
            "-a",
            "a\n",
            "../a",
            "a?b=c",
        ),
        *("%61", "https://a.b/c", "skerry/0a", "docker.io/skerry/0a:latest", "a" * 256, "a:" + "b" * 129),
    ],
)
def test_what_is_no_reference(image: str) -> None:
    with pytest.raises(InvalidRequest):
        Reference.parse(f"docker://{image}")


def test_no_image_of_the_store_can_have_such_a_name() -> None:
    assert is_reference("docker://a")
    assert not is_reference("docker:a")
    with pytest.raises(InvalidRequest):
        check_name("docker://a")


@pytest.mark.parametrize(
    ("patterns", "image", "allowed"),
    [
        ("", "python", False),
        ("*", "ghcr.io/acme/tool", True),
        ("python", "python:3.12", True),
        ("python", f"python@{DIGEST}", True),
        ("python", "python-evil", False),
        ("python", "acme/python", False),
        ("python", "ghcr.io/library/python", False),
        ("docker.io/python", "python", True),
        ("python:3.*", "python:3.12-slim", True),
        ("python:3.*", "python:3x12", False),
        ("python:3.*", "python", False),
        ("python:3.*", f"python@{DIGEST}", False),
        ("python:3.*", f"python:3.12@{DIGEST}", False),
        (f"python@{DIGEST}", f"python@{DIGEST}", True),
        (f"python@{DIGEST}", "python", False),
        ("ghcr.io/acme/*", "ghcr.io/acme/a/b:1", True),
        ("ghcr.io/acme/*", "ghcr.io/acme-evil/a", False),
        ("ghcr.io/acme/*", "evil.io/ghcr.io/acme/a", False),
        ("ghcr.io/acme/*", "ghcr.io:444/acme/a", False),
        ("acme/*:1", "acme/tool:1", True),
        ("acme/*:1", "acme/tool:2", False),
        ("node, python:3", "python:3", True),
    ],
)
def test_a_pattern_allows_what_it_says(patterns: str, image: str, allowed: bool) -> None:
    reference = Reference.parse(f"docker://{image}")
    if allowed:
        Allowed(patterns).check(reference)
        return
    with pytest.raises(Denied) as caught:
        Allowed(patterns).check(reference)
    assert "SKERRY_DOCKER_IMAGES" in caught.value.hint


@pytest.mark.parametrize(
    "patterns", ["*.example.com/tool", "Python", "a::b", "https://a.b/c", "a,/b", "python:3.12 a@"]
)
def test_a_pattern_that_is_none_stops_the_daemon(patterns: str) -> None:
    with pytest.raises(InvalidRequest):
        Allowed(patterns)
