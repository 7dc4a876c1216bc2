"""A server that has packages of every kind, as the registries of this world serve them: below one name, over HTTPS.

There is `/simple/` for pip, `/npm/`, `/go/`, `/git/`, which asks `git http-backend`, and `/debian/`, also over HTTP.
The files of the last are in the folder `debian`, as they must be signed: by a key that nobody has any more.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import ssl
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests import certificates

NAME = "skerry.test"
URL = f"https://{NAME}"
MODULE = "example.test/tiny"
VERSION = "v1.0.0"
DEBIAN = Path(__file__).parent / "debian"
_AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@example.test")


def make_packages(folder: Path) -> None:
    """One of each kind, `tiny`, as a library and as a program."""
    for name in ("simple/tiny", "npm", f"go/{MODULE}/@v", "git"):
        (folder / name).mkdir(parents=True)
    _make_wheel(folder / "simple/tiny")
    _make_npm(folder / "npm")
    _make_module(folder / f"go/{MODULE}/@v")
    _make_repository(folder)
    _make_archive(folder / "debian")


def _make_archive(folder: Path) -> None:
    places = {"tiny.deb": ["pool"], "InRelease": ["dists/stable"]}
    places["Packages"] = [f"dists/stable/main/binary-{name}" for name in ("amd64", "arm64")]
    for name, copies in places.items():
        for copy in copies:
            (folder / copy).mkdir(parents=True, exist_ok=True)
            shutil.copy(DEBIAN / name, folder / copy)


def _make_wheel(folder: Path) -> None:
    name, info = "tiny-1.0-py3-none-any.whl", "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("tiny.py", "def main():\n    print('from pip')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\ntiny-pip = tiny:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>'
    )


def _make_npm(folder: Path) -> None:
    package = {"name": "tiny", "version": "1.0.0", "bin": {"tiny-npm": "cli.js"}}
    with tarfile.open(folder / "tiny-1.0.0.tgz", "w:gz") as archive:
        for name, text in {
            "package.json": json.dumps(package),
            "cli.js": "#!/usr/bin/env node\nconsole.log('from npm')\n",
            "index.js": "module.exports = 'required'\n",
        }.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha512((folder / "tiny-1.0.0.tgz").read_bytes()).digest()
    dist = {
        "tarball": f"{URL}/npm/tiny-1.0.0.tgz",
        "integrity": f"sha512-{base64.b64encode(digest).decode()}",
    }
    document = {
        "name": "tiny",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": {**package, "dist": dist}},
    }
    (folder / "tiny").write_text(json.dumps(document))


def _make_module(folder: Path) -> None:
    """A library, and a program below it."""
    mod = f"module {MODULE}\n\ngo 1.18\n"
    (folder / "list").write_text(f"{VERSION}\n")
    (folder / f"{VERSION}.info").write_text(json.dumps({"Version": VERSION}))
    (folder / f"{VERSION}.mod").write_text(mod)
    with zipfile.ZipFile(folder / f"{VERSION}.zip", "w") as source:
        for name, text in {
            "go.mod": mod,
            "tiny.go": 'package tiny\n\nconst Word = "from go"\n',
            "cmd/tiny-go/main.go": f'package main\n\nimport "{MODULE}"\n\nfunc main() {{ println(tiny.Word) }}\n',
        }.items():
            source.writestr(f"{MODULE}@{VERSION}/{name}", text)


def _make_repository(folder: Path) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "README").write_text("from git\n")
    for words in (["init", "-q"], ["add", "."], [*_AUTHOR, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, folder / "git/tiny.git"], check=True)


def serve(folder: Path, stack: ExitStack, seen: Callable[[str], object] = lambda path: None) -> None:
    """On ports 80 and 443 of every address of this thread's network, until the stack is closed.

    `seen` is called with the path of everything that is asked for, and answered when it returns.
    """

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            seen(self.path)
            if self.path.startswith("/git/"):
                self.do_POST()
            else:
                super().do_GET()

        def do_POST(self) -> None:
            self.wfile.write(self._from_git(self.rfile.read(int(self.headers.get("content-length", 0)))))

        def _from_git(self, body: bytes) -> bytes:
            path, _, query = self.path.partition("?")
            asked = {
                "GIT_PROJECT_ROOT": str(folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("content-type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""),
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
            }
            answer = subprocess.run(
                ["git", "http-backend"], input=body, env={**os.environ, **asked}, stdout=subprocess.PIPE
            ).stdout
            head, _, content = answer.partition(b"\r\n\r\n")
            return b"HTTP/1.1 200 OK\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(content), content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    plain, secure = Server(("0.0.0.0", 80), Handler), Server(("0.0.0.0", 443), Handler)
    made = certificates.make()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
    for server in (plain, secure):
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients come and go as they like."""
