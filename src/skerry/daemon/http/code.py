"""Operations of programs that run once: in which languages, and to run one."""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Watch, reply
from skerry.daemon.http.environments import OPERATIONS as OF_ENVIRONMENTS
from skerry.daemon.http.environments import Isolation, Network
from skerry.daemon.http.executions import OUTPUT_LIMITS, RESULT_EXAMPLE, result_reply
from skerry.daemon.http.operations import INSTALLING, Call, Operation
from skerry.daemon.http.requests import Body, Content, Encoding, Text, Texts, TextsByName, decode
from skerry.errors import LanguageNotFound
from skerry.manager.code import program as programs
from skerry.manager.code.program import Program
from skerry.models import Outcome

Timeout = Annotated[
    float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": programs.TIMEOUT_MAX})
]
Millicores = Annotated[
    int, WithJsonSchema({"type": "integer", "minimum": 10, "maximum": programs.CPU_LIMIT_MAX})
]
Megabytes = Annotated[
    int,
    WithJsonSchema({"type": "integer", "minimum": programs.MEM_LIMIT_MIN, "maximum": programs.MEM_LIMIT_MAX}),
]


class ExecuteCode(Body):
    contents = ("code", "stdin", "files")
    language: Text
    """A name or an alias: `GET /languages` lists them."""
    code: Content
    """The program."""
    stdin: Content | None = None
    stdin_encoding: Encoding = "utf-8"
    files: TextsByName | None = None
    """Other files by their paths, which may have directories: they lie beside the program, and can only be read."""
    timeout: Timeout | None = None
    """Seconds, 30 if not given: then it is killed, with everything it started."""
    cpu_limit: Millicores | None = None
    """Millicores; without it, 1000: one core."""
    mem_limit: Megabytes | None = None
    """MB (of 1024 KiB), 512 if not given, with what it writes to /tmp."""
    network: Network | None = None
    """`none`, which is the default, `allowlist` or `public`; never internal addresses."""
    allow: Texts | None = None
    """The rules of an allowlist."""
    isolation: Isolation | None = None
    """At least this much, or the request fails."""
    image: Text | None = None
    """Name, or beginning of a digest; without it, the one that the language has."""
    output_limit: Annotated[int, WithJsonSchema(OUTPUT_LIMITS)] | None = None
    """Bytes of each stream; what is beyond is cut and flagged."""
    packages: Texts | None = None
    """Installed before it runs, from the registries that the daemon's machine uses: `pandas==2.*`, `lodash@^4`."""

    async def to_program(self) -> Program:
        said = self.model_dump(exclude_none=True, exclude={"stdin", "stdin_encoding", "allow", "packages"})
        stdin = None if self.stdin is None else await decode(self.stdin, self.stdin_encoding, "stdin")
        said["code"] = str(self.code)
        return Program(
            **said, stdin=stdin, allow=tuple(self.allow or ()), packages=tuple(self.packages or ())
        )


async def execute_code(call: Call, body: ExecuteCode) -> Response:
    program = await body.to_program()
    async with call.engine.code.ready(call.caller, program) as ready:
        execution = ready.execution
        with Watch(call.receive, lambda: execution.stop(Outcome.CANCELED, "the client went away")):
            result = await execution.run(program.stdin)
    return await result_reply(call, result, language=ready.language, version=ready.version)


async def list_languages(call: Call) -> Response:
    return reply({"languages": [language.to_dict() for language in await call.engine.code.languages()]})


_CREATING = next(each for each in OF_ENVIRONMENTS if each.name == "create_environment")
LANGUAGE_EXAMPLE = {
    "name": "python",
    "aliases": ["python3", "py"],
    "file": "main.py",
    "image": "host",
    "available": True,
    "version": "3.11.2",
    "reason": "",
}

OPERATIONS = (
    Operation(
        name="execute_code",
        method="POST",
        path="/execute",
        tag="code",
        verb="execute",
        and_verb="create",
        summary="Run a program once",
        text="In an environment that is made for it and removed afterwards. The program and its files can only be "
        "read, `/tmp` can be written; at most 100 processes and 1024 open files of each. A program that fails, hangs "
        "or is killed is a result (200), never an error. The same packages are installed once for all programs of "
        "the tenant and image, with the registries within reach of the installation alone. If the connection breaks, "
        "it is killed.",
        handler=execute_code,
        body=ExecuteCode,
        body_example={
            "language": "python",
            "code": "import sys\nprint(open('data/greeting.txt').read(), sys.stdin.read())",
            "files": {"data/greeting.txt": "hello"},
            "stdin": "world",
            "timeout": 10,
        },
        answer=schemas.CodeResult,
        answer_example={
            **RESULT_EXAMPLE,
            "stdout": "hello world\n",
            "stdout_size": 12,
            "language": "python",
            "version": "3.11.2",
        },
        errors=(*_CREATING.errors, LanguageNotFound, *INSTALLING),
    ),
    Operation(
        name="list_languages",
        method="GET",
        path="/languages",
        tag="code",
        verb="read",
        summary="List the languages that programs can be written in",
        text="Starts each interpreter in its image to find out whether it works.",
        handler=list_languages,
        answer=schemas.LanguageList,
        answer_example={"languages": [LANGUAGE_EXAMPLE]},
        errors=_CREATING.errors,
    ),
)
