"""Programs that others wrote: the tests that come with the sources of interpreters (`setup_test_deps.sh` fetches them).

Taken are those that need nothing but themselves, evenly from all there are, always the same ones. Left out is what asks
for more than a program has in both places, by a pattern, and what was seen to differ from run to run, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FETCHED = Path(__file__).parents[2] / ".cache" / "programs"
LARGEST = 16_000
"""Bytes: they are to be small ones."""
SLOW = "it takes seconds"


@dataclass(frozen=True)
class Foreign:
    name: str
    language: str
    code: str
    files: Mapping[str, str]


def _whole(text: str) -> str | None:
    return text


def _php(text: str) -> str | None:
    """Its tests are files with sections; those with options, input or conditions of their own are not taken."""
    sections = re.split(r"^--([A-Z_]+)--\n", text, flags=re.MULTILINE)
    if set(sections[1::2]) - {"TEST", "FILE", "EXPECT", "EXPECTF"} or "FILE" not in sections:
        return None
    return sections[sections.index("FILE") + 1]


def _nodejs(text: str) -> str | None:
    """What they share lies beside them here, and not above."""
    return text.replace("'../common'", "'./common'") if "'../common'" in text else None


def _go(text: str) -> str | None:
    """Of its tests, those that are to be run, and of a single file."""
    return text if text.startswith("// run\n") else None


@dataclass(frozen=True)
class Suite:
    """The programs of one language, and which of them are taken."""

    language: str
    count: int
    place: Path
    pattern: str
    needs: str
    """What asks for more: other files, a terminal, a network, children, rights, a directory that can be written."""
    left_out: Mapping[str, str]
    """By name, with the reason."""
    read: Callable[[str], str | None] = _whole
    """The program in a file's text, if there is one."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Files of the suite that every program finds beside it: names, and where they come from."""

    def programs(self) -> list[Foreign]:
        """As many as `count` says, or all if there are fewer."""
        found = list(self._all())
        step = max(1.0, len(found) / self.count)
        return [found[int(number * step)] for number in range(min(self.count, len(found)))]

    def _all(self) -> Iterator[Foreign]:
        if not self.place.exists():
            return
        files = {name: (self.place / path).read_text() for name, path in self.beside.items()}
        for path in sorted(self.place.glob(self.pattern)):
            name = str(path.relative_to(self.place))
            if name in self.left_out or not path.is_file() or path.stat().st_size > LARGEST:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a request carries text
            code = self.read(text)
            if code is not None and not re.search(self.needs, text, re.MULTILINE):
                yield Foreign(f"{self.language}: {name}", self.language, code, files)


SUITES = (
    Suite(
        "bash",
        100,
        FETCHED / "bash" / "tests",
        "*.*s*",
        r"THIS_SH|[rz]echo|/dev/tty|\$\$|/tmp|\./|\.sub|set -m|ulimit|umask|coproc|_intl|SHELL|HOME|UID|PWD",
        {"assoc18.sub": SLOW, "jobs4.sub": SLOW, "jobs6.sub": SLOW, "trap4.sub": SLOW},
    ),
    Suite(
        "php",
        120,
        FETCHED / "php8.2" / "Zend" / "tests",
        "**/*.phpt",
        r"__DIR__|__FILE__|include|require|getmypid",
        {},
        _php,
    ),
    Suite(
        "python",
        70,
        FETCHED / "python3.11" / "Lib" / "test",
        "test_*.py",
        r"from test\b(?! import support|\.support)|TESTFN|os_helper|socket|sleep",
        {
            "test_crypt.py": SLOW,
            "test_resource.py": "it tries to raise limits",
            "test_sort.py": "it tells what it sorted, which is random",
            "test_spwd.py": "it reads the passwords of the machine",
            "test_strftime.py": "it tells the time",
        },
    ),
    Suite(
        "nodejs",
        80,
        FETCHED / "nodejs" / "test" / "parallel",
        "test-*.js",
        r"^// Flags|common/|fixtures|child_process|worker|net'|https?2?'|tls|dgram|cluster|dns|crypto|tmpdir|repl"
        r"|inspector|tty|__(file|dir)name",
        {
            "test-process-euid-egid.js": "it becomes another user, or is told that it may not",
            "test-process-uid-gid.js": "it becomes another user, or is told that it may not",
            "test-signal-handler.js": "it tells its process id",
        },
        _nodejs,
        {"common/index.js": "../common/index.js", "common/tmpdir.js": "../common/tmpdir.js"},
    ),
    Suite(
        "ruby",
        50,
        FETCHED / "ruby3.1",
        "**/*.rb",
        r"assert_(separately|in_out_err|raise_with_message|warn|normal_exit)|EnvUtil|require_relative|drb|socket|openssl|pty|Thread",
        {
            "sample/from.rb": "it reads the user's mail",
            "sample/logger/log.rb": "it tells the time",
            "sample/logger/shifting.rb": "it writes beside itself",
            "sample/mine.rb": "it needs a terminal",
            "sample/pi.rb": "it has no end",
            "sample/pstore.rb": "it keeps a file in /tmp",
            "sample/timeout.rb": SLOW,
            "sample/trick2013/mame/entry.rb": "it opens a device",
            "sample/trick2015/kinaba/entry.rb": SLOW,
            "sample/trick2018/02-mame/entry.rb": SLOW,
            "sample/trick2018/05-tompng/entry.rb": "it writes beside itself",
            "test/ruby/test_fnmatch.rb": "it shows what is random in objects",
            "test/ruby/test_integer_comb.rb": SLOW,
            "test/ruby/test_sleep.rb": SLOW,
            "test/ruby/test_weakmap.rb": "it shows what is random in objects",
            "test/ruby/test_whileuntil.rb": "it shows what is random in objects",
        },
    ),
    Suite(
        "go",
        20,
        next(Path("/usr/share").glob("go-*/test"), Path("/usr/share/go/test")),
        "**/*.go",
        r'^//\s?(go:build|\+build)|"os/exec"',
        {},
        _go,
    ),
)
