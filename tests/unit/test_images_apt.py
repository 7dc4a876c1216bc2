"""A build takes the host's mirrors for its suite and nothing else of the host's archives."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.images import apt

MODERN = """\
# a comment
Types: deb deb-src
URIs: https://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports trixie
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb-src
URIs: https://mirror.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: https://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: https://other.example/linux
Suites: bookworm
Components: stable
"""
CLASSIC = """\
# deb https://commented.example/debian bookworm main
deb [signed-by=/usr/share/keyrings/a.gpg arch=amd64] https://mirror.example/debian bookworm main non-free
deb-src https://mirror.example/debian bookworm main
deb https://mirror.example/security bookworm-security main # and a comment
deb https://other.example/apt cloud-bookworm main
deb https://other.example/linux bookworm stable
deb https://broken.example
"""


def test_both_notations(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(CLASSIC)
    (tmp_path / "sources.list.d/debian.sources").write_text(MODERN)
    found = apt.sources("bookworm", tmp_path)
    assert found.lines.splitlines() == [CLASSIC.splitlines()[1], CLASSIC.splitlines()[3]]
    assert found.stanzas.splitlines() == [
        "Types: deb",
        "Uris: https://mirror.example/debian",
        "Suites: bookworm bookworm-updates",
        "Components: main contrib",
        "Signed-By: ",
        " -----BEGIN PGP PUBLIC KEY BLOCK-----",
        " .",
        " mQINBF",
        " -----END PGP PUBLIC KEY BLOCK-----",
    ]


def test_no_sources_at_all(tmp_path: Path) -> None:
    assert apt.sources("bookworm", tmp_path) == apt.Sources("", "")


def test_transports_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "apt-config"
    fake.write_text(
        '#!/bin/sh\ncat <<\'END\'\nAPT::Architecture "amd64";\nAcquire "";\n'
        'Acquire::http::Proxy "http://proxy.example:3128";\nAcquire::https::CaInfo "/etc/ssl/ca.pem";\n'
        'Acquire::Languages:: "none";\nAcquire::IndexTargets::deb::Packages "";\nEND\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert apt.settings().splitlines() == [
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::https::CaInfo "/etc/ssl/ca.pem";',
        'Dir::Etc::netrc "/etc/apt/auth.conf";',
        'Dir::Etc::netrcparts "/etc/apt/auth.conf.d";',
    ]
