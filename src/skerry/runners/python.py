"""The interpreter of a Python session. It runs inside the environment, with the Python of its image: 3.8 or newer.

Requests come through `requests`, one JSON object a line. Replies go to descriptor 9: a JSON object a line, behind
which come as many bytes as its `size` says. Neither is inherited by programs that are started here, and neither is
stdin, stdout or stderr: those belong to the user's code, which may close or replace them.

Everything here can be reached by the user's code. The daemon knows that, and believes none of it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import reprlib
import signal
import sys
import threading
import traceback
import types
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

REPLIES = 9
TEXT_MAX = 64 << 10
TRACEBACK_MAX = 16 << 10
VALUE_MAX = 4 << 10
"""Characters of what an exception says."""
PIECE_MAX = 4 << 20
CALL_MAX = 8 << 20
"""Bytes of one form of one value, and of everything that one call shows."""
HELD_MAX = 32 << 10
VALUES_MAX = 32
ROWS_MAX = 1000
VARIABLES_MAX = 500
CALL = "<call "
"""With its number and a `>`: the name of the file that a call's code seems to be in."""
COROUTINE = 0x80
VALUE = "__value__"
"""The name that the last expression's value has until it is shown."""
FORMS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}


class SessionRunner:
    """Serves one session until its requests end."""

    def __init__(self, requests: Any) -> None:
        self._requests = requests
        os.set_inheritable(REPLIES, False)
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._spare = {1: os.dup(1), 2: os.dup(2)}
        self._armed = False
        """Whether an interrupt may be raised where it comes: only while the user's code runs."""
        self._missed = False
        self._token = ""
        self._held = b""
        self._calls = self._values = self._room = 0
        self._loop: Any = None
        self._main = types.ModuleType("__main__")
        vars(self._main).update(display=self.display)
        sys.modules["__main__"] = self._main
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._stdin: Any = sys.stdin
        self._null = os.stat(os.devnull).st_rdev
        self._feed(None)
        os.environ.setdefault("MPLBACKEND", "Agg")
        warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")

    def serve(self) -> None:
        signal.signal(signal.SIGINT, self._interrupted)
        self._send({"ready": sys.version.split()[0]})
        for line in self._requests:
            try:
                self._handle(json.loads(line))
            except KeyboardInterrupt:  # a second one, on the heels of the first
                self._armed = False
                self._send({"token": self._token, "end": _error("KeyboardInterrupt")})

    def _handle(self, request: dict[str, Any]) -> None:
        self._token, self._values, self._room = request["token"], 0, CALL_MAX
        signal.signal(signal.SIGINT, self._interrupted)
        if request["interrupted"]:
            # An interrupt of the call before may have come after its end: it is not for this one.
            self._missed = False
            self._send({"token": self._token, "begun": True})
        if request["op"] == "variables":
            error = self._guarded(self._list)
        else:
            self._calls += 1
            unlimited = _limit_memory(request["memory"])
            error = self._guarded(self._run, request["code"], request["stdin"])
            unlimited()
            shown = self._guarded(self._show_figures)
            error = error or shown
        flushed = self._guarded(_flush)
        error = error or flushed
        if os.getpid() != self._pid:  # a fork of the user's code has come to its end
            os._exit(0 if error is None else 1)
        self._send({"token": self._token, "end": self._explained(error)})

    # ---- the user's code ----

    def _guarded(self, function: Callable[..., None], *args: Any) -> BaseException | None:
        """Call something that is, or calls, the user's code; returns what it raised."""
        try:
            try:
                self._arm()
                function(*args)
            finally:
                self._armed = False
        except BaseException as error:
            self._armed = False
            return error
        return None

    def _explained(self, error: BaseException | None) -> dict[str, str] | None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return None
        try:
            try:
                self._armed = True
                return _explain(error)
            finally:
                self._armed = False
        except BaseException:
            self._armed = False
            return _error(type(error).__name__)

    def _run(self, code: str, stdin: str | None) -> None:
        self._repair()
        self._feed(None if stdin is None else base64.b64decode(stdin))
        name = f"{CALL}{self._calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree = ast.parse(code, name)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body[-1]
            name_of_it = ast.copy_location(ast.Name(id=VALUE, ctx=ast.Store()), last)
            tree.body[-1] = ast.copy_location(ast.Assign(targets=[name_of_it], value=last.value), last)
        compiled = compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
        scope = vars(self._main)
        scope.pop(VALUE, None)
        # With an `await` on its top level this gives a coroutine, and has run nothing yet.
        coroutine = eval(compiled, scope)  # noqa: S307 (what this program is for)
        if compiled.co_flags & COROUTINE:
            self._await(coroutine)
        value = scope.pop(VALUE, None)
        if value is not None:
            self._show(value, "value")

    def _await(self, coroutine: Any) -> None:
        """On one loop for all calls, so that what one has begun goes on while the next awaits something."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(coroutine)
        try:
            self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.cancel():
                self._loop.run_until_complete(self._ended(task))
            raise

    async def _ended(self, task: Any) -> None:
        import asyncio

        await asyncio.wait((task,))

    def _arm(self) -> None:
        self._armed = True
        if self._missed:
            self._missed = False
            raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: object) -> None:
        if self._armed:
            raise KeyboardInterrupt
        self._missed = True

    # ---- its streams ----

    def _repair(self) -> None:
        """What an earlier call closed is there again. What it replaced stays replaced."""
        for number, name in ((1, "stdout"), (2, "stderr")):
            try:
                os.fstat(number)
            except OSError:
                os.dup2(self._spare[number], number)
            if _closed(getattr(sys, name)):
                setattr(sys, name, _text(open(number, "wb", closefd=False)))  # noqa: SIM115

    def _feed(self, data: bytes | None) -> None:
        """A stdin of its own for each call; there is an end of it, and no waiting."""
        if data is None:
            if self._has_end():
                return
            file = os.open(os.devnull, os.O_RDONLY)
        else:
            file = os.memfd_create("stdin")
            with open(file, "wb", closefd=False) as stream:
                stream.write(data)
            os.lseek(file, 0, os.SEEK_SET)
        if file == 0:  # it was closed
            os.set_inheritable(0, True)
        else:
            os.dup2(file, 0)
            os.close(file)
        if sys.stdin is self._stdin or sys.stdin is None:
            self._stdin = sys.stdin = _text(open(0, "rb", closefd=False))  # noqa: SIM115

    def _has_end(self) -> bool:
        """Whether stdin is as a call without any left it."""
        try:
            return os.fstat(0).st_rdev == self._null and sys.stdin is self._stdin and not sys.stdin.closed
        except (OSError, ValueError):  # closed, or taken apart
            return False

    # ---- what it shows ----

    def display(self, *values: Any) -> None:
        """Show values as the result of a call shows its last."""
        for value in values:
            self._show(value, "display")

    def _show(self, value: Any, kind: str) -> None:
        forms = [("text/plain", repr(value).encode("utf-8", "backslashreplace"), False)]
        if not isinstance(value, type):
            forms += _forms(value)
        self._tell(kind, forms)

    def _show_figures(self) -> None:
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            self._tell(
                "display", [("text/plain", repr(figure).encode(), False), ("image/png", _png(figure), False)]
            )
        pyplot.close("all")

    def _tell(self, kind: str, forms: list[tuple[str, bytes, bool]]) -> None:
        if self._values >= VALUES_MAX or os.getpid() != self._pid:
            return
        self._values += 1
        for media, data, cut in forms:
            if media == "text/plain" and len(data) > TEXT_MAX:
                data, cut = data[:TEXT_MAX], True
            if len(data) > min(PIECE_MAX, self._room):
                data, cut = b"", True
            self._room -= len(data)
            head = {"token": self._token, "value": self._values, "kind": kind, "type": media, "cut": cut}
            self._send({**head, "size": len(data)}, data, more=kind == "value")

    def _list(self) -> None:
        short = reprlib.Repr()
        short.maxstring = short.maxother = short.maxlong = 80
        found = [
            (name, value)
            for name, value in list(vars(self._main).items())
            if not name.startswith("_") and name != "display" and not isinstance(value, types.ModuleType)
        ]
        for name, value in found[:VARIABLES_MAX]:
            try:
                text, size = short.repr(value), sys.getsizeof(value, 0)
            except Exception as error:
                text, size = f"<{type(error).__name__} in its repr>", 0
            about = {"name": name[:200], "type": type(value).__name__[:200], "text": text[:200], "size": size}
            self._send({"token": self._token, "variable": about}, more=True)

    def _send(self, head: dict[str, Any], data: bytes = b"", more: bool = False) -> None:
        """Whole, whatever interrupts it: an interrupt that comes meanwhile is raised afterwards.

        `more`: something follows soon, and this may go along with it.
        """
        armed, self._armed = self._armed, False
        with self._turn:
            line = json.dumps(head, ensure_ascii=False).encode("utf-8", "backslashreplace")
            self._held += line + b"\n" + data
            if not more or len(self._held) > HELD_MAX:
                left, self._held = memoryview(self._held), b""
                while left:
                    left = left[os.write(REPLIES, left) :]
        if armed:
            self._arm()


def _forms(value: Any) -> Iterator[tuple[str, bytes, bool]]:
    """(media type, bytes, whether something is missing) of all forms that a value has beside its repr."""
    pandas: Any = sys.modules.get("pandas")
    figure: Any = sys.modules.get("matplotlib.figure")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        with contextlib.suppress(Exception):  # columns that have the same name, say
            records = value.head(ROWS_MAX).to_json(orient="records", date_format="iso", default_handler=str)
            yield "application/json", records.encode(), len(value) > ROWS_MAX
    if figure is not None and isinstance(value, figure.Figure):
        yield "image/png", _png(value), False
        return
    for method, media in FORMS.items():
        try:
            found = getattr(value, method)()
        except Exception:  # noqa: S112 (most have none; those of others may fail, and the repr is there)
            continue
        if media == "application/json" and found is not None:
            try:
                yield media, json.dumps(found).encode(), False
            except (TypeError, ValueError, RecursionError):
                continue
        elif isinstance(found, bytes) and media.startswith("image/"):
            yield media, found, False
        elif isinstance(found, str):
            yield media, found.encode("utf-8", "backslashreplace"), False


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def _text(binary: Any) -> Any:
    return io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", line_buffering=True)


def _closed(stream: Any) -> bool:
    try:
        return stream is None or bool(stream.closed)
    except Exception:  # the user's own
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced or broken: the user's code has heard of it
            stream.flush()


def _limit_memory(size: int | None) -> Callable[[], None]:
    """Until what is returned is called, this process has no more than so many bytes."""
    if size is None:
        return lambda: None
    import mmap
    import resource

    def limit(kind: int, most: int) -> Callable[[], None]:
        before = resource.getrlimit(kind)
        most = most if before[1] == resource.RLIM_INFINITY else min(most, before[1])
        resource.setrlimit(kind, (most, before[1]))
        return lambda: resource.setrlimit(kind, before)

    undo = limit(resource.RLIMIT_DATA, size)
    try:
        mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError):
        return undo
    undo()  # gVisor counts only what brk(2) gives: there the address space is limited instead
    with open("/proc/self/statm", "rb") as file:
        pages, resident = map(int, file.read().split()[:2])
    return limit(resource.RLIMIT_AS, max(pages, pages - resident + size // mmap.PAGESIZE) * mmap.PAGESIZE)


def _error(name: str, value: str = "", trace: str = "") -> dict[str, str]:
    return {"name": name[:200], "value": value[:VALUE_MAX], "traceback": trace}


def _explain(error: BaseException) -> dict[str, str]:
    """Its name, its words, and where in the user's code it came from."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(CALL):
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace)
    found.stack[:] = [frame for frame in found.stack if frame.filename != __file__]
    lines = "".join(found.format()).encode("utf-8", "backslashreplace").decode()
    if len(lines) > TRACEBACK_MAX:
        lines = f"{lines[: TRACEBACK_MAX // 2]}\n...\n{lines[-TRACEBACK_MAX // 2 :]}"
    return _error(type(error).__name__, str(error).encode("utf-8", "backslashreplace").decode(), lines)
