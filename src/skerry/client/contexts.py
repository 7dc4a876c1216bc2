"""Named daemons: `$XDG_CONFIG_HOME/skerry/contexts.json`, private to its user.

    {"current": "work", "contexts": {"work": {"url": "https://...", "token": "...", "ca": "/path"}}}

The context `default` is not in the file: it is the home on this machine.
"""

from __future__ import annotations

import os

from skerry.errors import InvalidRequest, NotFound

DEFAULT = "default"
_KEYS = ("url", "token", "ca")


class Contexts:
    """The content of the file; `save()` replaces it."""

    __slots__ = ("current", "entries", "path")

    def __init__(self, path: str, current: str, entries: dict[str, dict[str, str]]) -> None:
        self.path = path
        self.current = current
        self.entries = entries

    @classmethod
    def load(cls) -> Contexts:
        """Read the file. Raises InvalidRequest if it is invalid, or readable or writable by others."""
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
        path = f"{config}/skerry/contexts.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return cls(path, DEFAULT, {})
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint=_hint()) from error
        import json

        with open(fd, "rb") as file:
            info = os.fstat(fd)
            try:
                raw = json.load(file)
                current = str(raw.get("current", DEFAULT))
                entries = {
                    str(name): {key: str(entry[key]) for key in _KEYS if entry.get(key)}
                    for name, entry in raw["contexts"].items()
                }
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise InvalidRequest(f"{path} is not a valid contexts file", hint=_hint()) from error
        if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
            raise InvalidRequest(f"{path} is writable by others", hint=f"chmod 600 {path}")
        if info.st_mode & 0o044 and any("token" in entry for entry in entries.values()):
            raise InvalidRequest(
                f"the tokens in {path} are readable by others",
                hint=f"chmod 600 {path}, and replace the tokens",
            )
        return cls(path, current, entries)

    def get(self, name: str) -> dict[str, str]:
        """Raises NotFound."""
        entry = self.entries.get(name)
        if entry is None or "url" not in entry:
            raise NotFound(f"unknown context {name!r}", hint="`skerry context ls` lists them")
        return entry

    def save(self) -> None:
        """Write the file atomically, private to this user. Raises OSError."""
        import json

        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        new = f"{self.path}.{os.getpid()}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                json.dump({"current": self.current, "contexts": self.entries}, file, indent=2)
                file.flush()
                os.fsync(fd)
            os.replace(new, self.path)
        except BaseException:
            os.unlink(new)
            raise


def _hint() -> str:
    return "fix or remove it, or select a daemon with SKERRY_URL or SKERRY_CONTEXT=default"
