"""Programs that run once, in a real daemon: languages, limits, files, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import skerry
from skerry.host.trees import remove_tree
from skerry.tools.aio.execute_code import AsyncExecuteCode
from skerry.tools.sync.execute_code import ExecuteCode
from tests import support
from tests.conformance.test_instances import on_host
from tests.integration.daemon import Daemon, started

HELLO = {
    "python": "print('hello')",
    "nodejs": "console.log('hello')",
    "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println("hello") }',
    "bash": "echo hello",
    "ruby": "puts 'hello'",
    "php": '<?php echo "hello\\n";',
    "rust": 'fn main() { println!("hello"); }',
}
PROGRAMS = {"nodejs": "node", "go": "go", "ruby": "ruby", "php": "php", "rust": "rustc"}
PACKAGES = {"go": "golang-go", "php": "php-cli", "rust": "rustc", "nodejs": "nodejs", "ruby": "ruby"}


def require(language: str) -> None:
    """Its interpreter must be one of the machine's own, which environments see."""
    if (program := PROGRAMS.get(language)) and not os.path.exists(f"/usr/bin/{program}"):
        support.missing(f"/usr/bin/{program} is not installed (apt-get install {PACKAGES[language]})")


def execute(daemon: Daemon, language: str, code: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = daemon.call("POST", "/execute", {"language": language, "code": code, **more})
    return found


def environments(daemon: Daemon, query: str = "") -> set[str]:
    return {each["environment_id"] for each in daemon.call("GET", f"/environments{query}")["environments"]}


def settled(daemon: Daemon, others: Container[str] = ()) -> None:
    """Returns when no environment of a program is there any more."""
    while any(each not in others for each in environments(daemon)):
        time.sleep(0.005)


@contextmanager
def under_way(daemon: Daemon, **more: Any) -> Iterator[str]:
    """While a program runs whose answer nobody reads: the id of its environment."""
    others = environments(daemon)
    execute(daemon, "bash", "true")  # so that nothing is left to be found out about the language
    settled(daemon, others)
    with daemon.asked("POST", "/execute", {"language": "bash", "code": "echo begun; sleep 1000", **more}):
        while not (found := environments(daemon, "?state=running") - others):
            time.sleep(0.005)
        [environment] = found
        daemon.wait_for_output(environment, "begun")
        yield environment


@pytest.fixture(scope="module")
def real() -> Iterator[Daemon]:
    """One with isolation."""
    with support.temporary_home() as home, started(home) as running:
        yield running


@pytest.mark.requirement("R60", "R61", "R62", "R63", "R76", "R90", "F2")
@pytest.mark.parametrize("language", list(HELLO))
def test_hello_in_every_language(daemon: Daemon, language: str) -> None:
    require(language)
    result = execute(daemon, language, HELLO[language])
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("hello\n", "", 0)
    assert (result["outcome"], result["language"]) == ("completed", language)
    assert result["version"][0].isdigit()


def test_the_languages_and_their_versions(daemon: Daemon) -> None:
    found = {each["name"]: each for each in daemon.call("GET", "/languages")["languages"]}
    assert [*HELLO, "typescript"] == list(found)
    for name, each in found.items():
        assert each["available"] == bool(each["version"]) == (not each["reason"])
        if not each["available"]:
            problem = daemon.call("POST", "/execute", {"language": name, "code": ""}, expect=404)
            assert problem["code"] == "language_not_found"
            assert each["reason"] == f"{problem['message']} ({problem['hint']})"
    assert found["python"]["version"] == execute(daemon, "py", "")["version"]
    settled(daemon)


def test_an_operator_adds_a_language(daemon: Daemon) -> None:
    path = daemon.home / "languages.toml"
    path.write_text(
        '[awk]\nfile = "main.awk"\ncommand = ["awk", "-f", "main.awk"]\nversion = ["sh", "-c", "echo awk 7.8"]\n'
        '[nothing]\nfile = "x"\ncommand = ["x"]\nversion = ["no-such-program"]\ninstall = "that"\n'
        '[far]\nfile = "x"\ncommand = ["x"]\nversion = ["x"]\nimage = "away"\n'
    )
    try:
        result = execute(daemon, "awk", "{ print $1 * 2 }", stdin="21\n")
        assert (result["stdout"], result["version"]) == ("42\n", "7.8")
        problem = daemon.call("POST", "/execute", {"language": "nothing", "code": ""}, expect=404)
        assert problem["message"] == "the image 'host' cannot run nothing: it has no no-such-program"
        assert problem["hint"].startswith("install that on the daemon's machine")
        problem = daemon.call("POST", "/execute", {"language": "far", "code": ""}, expect=404)
        assert problem["code"] == "image_not_found"
        listed = {each["name"]: each for each in daemon.call("GET", "/languages")["languages"]}
        assert "no image 'away'" in listed["far"]["reason"]
        path.write_text("[awk]\nfile = 1\n")
        problem = daemon.call("POST", "/execute", {"language": "python", "code": ""}, expect=500)
        assert problem["message"] == f"{path}: [awk] file must be a string, not 1"
    finally:
        path.unlink()


@pytest.mark.requirement("R69")
def test_stdin(daemon: Daemon) -> None:
    code = "import sys\ndata = sys.stdin.buffer.read()\nprint(data)"
    assert execute(daemon, "python", code)["stdout"] == "b''\n"
    assert execute(daemon, "python", code, stdin="a\nb")["stdout"] == "b'a\\nb'\n"
    result = execute(daemon, "python", code, stdin="/w==", stdin_encoding="base64")
    assert result["stdout"] == "b'\\xff'\n"
    big = "import sys\nprint(len(sys.stdin.read()))"
    assert execute(daemon, "python", big, stdin="x" * 3_000_000)["stdout"] == "3000000\n"


@pytest.mark.requirement("R70", "R90")
def test_files(daemon: Daemon) -> None:
    files = {"data.txt": "one", "lib/helper.py": "VALUE = 'two'", "deep/er/est/x": "three", "odd \n": "four"}
    code = (
        "import os\nfrom lib.helper import VALUE\n"
        "print(open('data.txt').read(), VALUE, open('deep/er/est/x').read(), open('odd \\n').read())\n"
        "print(sorted(os.listdir()))"
    )
    result = execute(daemon, "python", code, files=files)
    assert result["stdout"].startswith(
        "one two three four\n['data.txt', 'deep', 'lib', 'main.py', 'odd \\n']"
    )


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"files": {"main.py": ""}}, "invalid_request", "would replace the program"),
        ({"files": {"../x": ""}}, "path_outside", "outside of the program's directory"),
        ({"files": {"/etc/x": ""}}, "path_outside", "outside"),
        ({"files": {"x" * 300: ""}}, "invalid_request", "too long"),
        ({"timeout": 301}, "invalid_request", "at most 300 seconds"),
        ({"timeout": 0}, "invalid_request", "timeout"),
        ({"cpu_limit": 0}, "invalid_request", "cpu_limit"),
        ({"mem_limit": 1}, "invalid_request", "mem_limit"),
        ({"network": "some"}, "invalid_request", "unknown network"),
        ({"isolation": "some"}, "invalid_request", "unknown isolation"),
        ({"output_limit": -1}, "invalid_request", "output_limit"),
        ({"stdin": "%", "stdin_encoding": "base64"}, "invalid_request", "stdin is not base64"),
        ({"package": []}, "invalid_request", "unknown field 'package'"),
        ({"packages": "x"}, "invalid_request", "packages"),
        ({"packages": ["--pre"]}, "install_failed", "'--pre' is not a package that pip can be asked for"),
    ],
)
@pytest.mark.requirement("R90")
def test_wrong_requests(daemon: Daemon, body: dict[str, Any], code: str, words: str) -> None:
    problem = daemon.call("POST", "/execute", {"language": "python", "code": "", **body}, expect=400)
    assert problem["code"] == code
    assert words in problem["message"]
    settled(daemon)


@pytest.mark.requirement("R71", "R90")
def test_output_and_exit_code(daemon: Daemon) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)"
    result = execute(daemon, "python", code)
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 7)
    assert (result["outcome"], result["error"]) == ("failed", True)
    result = execute(daemon, "python", "print('x' * 1000)", output_limit=10)
    assert (result["stdout"], result["stdout_size"], result["stdout_truncated"]) == ("x" * 10, 1001, True)
    assert execute(daemon, "bash", "kill -9 $$")["outcome"] == "signaled"


@pytest.mark.requirement("R64", "R85", "R90")
def test_a_timeout_ends_everything(real: Daemon) -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    code = f"setsid -f sh -c 'setsid -f sh -c \"sleep 1000; : {marker}\"'\necho begun\nwhile :; do :; done"
    result = execute(real, "bash", code, timeout=3)
    assert (result["outcome"], result["exit_code"], result["message"]) == (
        "timed_out",
        124,
        "killed after 3 s",
    )
    assert result["stdout"] == "begun\n"
    settled(real)
    assert not on_host(f"sleep 1000; : {marker}")


@pytest.mark.requirement("R64")
def test_what_was_printed_before_a_timeout_is_not_lost(real: Daemon) -> None:
    result = execute(real, "python", "print('so far')\nwhile True: pass", timeout=4)
    assert (result["outcome"], result["stdout"]) == ("timed_out", "so far\n")


@pytest.mark.root
@pytest.mark.limits
@pytest.mark.requirement("R66", "R86", "R90")
def test_memory(real: Daemon) -> None:
    code = "x = bytearray(200 << 20)\nprint(len(x))"
    assert execute(real, "python", code)["stdout"] == f"{200 << 20}\n"
    result = execute(real, "python", code, mem_limit=64)
    assert (result["outcome"], result["exit_code"]) == ("oom_killed", 137)
    filling = "import os\nwith open('/tmp/x', 'wb') as f:\n  for _ in range(1000): f.write(bytes(1 << 20))"
    result = execute(real, "python", filling, mem_limit=64)
    assert result["outcome"] in ("failed", "oom_killed")


@pytest.mark.root
@pytest.mark.requirement("R67", "R86")
def test_processes(real: Daemon) -> None:
    code = (
        "import os, time\ncount = 0\n"
        "try:\n  while True:\n    if os.fork() == 0: time.sleep(100)\n    count += 1\n"
        "except OSError as error:\n  print(count, error.strerror)"
    )
    count, _, words = execute(real, "python", code)["stdout"].partition(" ")
    assert 90 <= int(count) < 100
    assert words == "Resource temporarily unavailable\n"
    settled(real)


@pytest.mark.requirement("R68")
def test_open_files(real: Daemon) -> None:
    code = (
        "import os\nfound = []\n"
        "try:\n  while True: found.append(os.open('/dev/null', 0))\n"
        "except OSError as error:\n  print(found[-1], error.strerror)"
    )
    assert execute(real, "python", code)["stdout"] == "1023 Too many open files\n"


@pytest.mark.root
@pytest.mark.requirement("R65", "R82")
def test_its_environment_has_the_limits_that_it_says(real: Daemon) -> None:
    settled(real)
    with under_way(real, cpu_limit=500, mem_limit=256) as environment:
        info = real.call("GET", f"/environments/{environment}")
        limits = {name: info["limits"][name] for name in ("cpus", "memory", "pids", "fds")}
        assert limits == {"cpus": 0.5, "memory": 256 << 20, "pids": 100, "fds": 1024}
        assert (info["network"], info["workspace"], info["lifetime"]) == ("none", "program", 90.0)
        enforced = {row["name"]: row["value"] for row in info["enforced"] if row["enforced"]}
        assert enforced["workspace"] == "read-only"
        assert (enforced["pids"], enforced["cpu"]) == ("100", "0.5")
        assert enforced["memory"] == str(256 << 20)
    settled(real)


@pytest.mark.requirement("R82", "R84")
def test_neither_network_nor_files_of_the_host(real: Daemon) -> None:
    code = (
        "import os\nprint([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])\n"
        f"print([p for p in ('/root', '/home', {str(real.home)!r}, {os.getcwd()!r}) if os.path.exists(p)])"
    )
    assert execute(real, "python", code)["stdout"] == "['lo']\n[]\n"


@pytest.mark.requirement("R87")
def test_the_standard_library_is_there_and_nothing_can_be_installed(real: Daemon) -> None:
    result = execute(real, "python", "import asyncio, json, sqlite3, ssl, zlib\nprint('all')")
    assert (result["stdout"], result["stderr"]) == ("all\n", "")
    support.require("pip3", "python3-pip")
    install = (
        "python3 -m pip install --retries 0 --break-system-packages --target /tmp/new iniconfig; ls /tmp/new"
    )
    result = execute(real, "bash", install)
    assert "No matching distribution found for iniconfig" in result["stderr"]
    assert (result["stdout"].count("Successfully"), result["exit_code"]) == (0, 2)


@pytest.mark.requirement("R83")
def test_nothing_but_tmp_can_be_written(real: Daemon) -> None:
    code = (
        "import os, tempfile\n"
        "for path in ('main.py', 'new', 'data', '/etc/x', '/usr/x', '/new'):\n"
        "  try:\n    open(path, 'w')\n    print('wrote', path)\n  except OSError as error: print(error.strerror)\n"
        "acts = lambda: os.chmod('main.py', 0o777), lambda: os.unlink('main.py'), lambda: os.rename('data', 'x')\n"
        "for act in acts:\n"
        "  try:\n    act()\n    print('did it')\n  except OSError as error: print(error.strerror)\n"
        "with tempfile.NamedTemporaryFile('w+') as file:\n  file.write('x')\n  print(os.path.dirname(file.name))\n"
        "print(os.path.expanduser('~'))"
    )
    words = execute(real, "python", code, files={"data": "x"})["stdout"].splitlines()
    assert set(words[:-2]) == {"Read-only file system"}
    assert len(words) == 11
    assert words[-2:] == ["/tmp", "/tmp"]


@pytest.mark.requirement("R38")
def test_nothing_is_left_for_the_next_one(real: Daemon) -> None:
    execute(real, "bash", "echo secret > /tmp/x; sleep 1000 >/dev/null 2>&1 &")
    code = "cat /tmp/x; ls -A /tmp /workspace; ps ax 2>/dev/null | grep -c '[s]leep 1000'"
    result = execute(real, "bash", code)
    assert result["stdout"] == "/tmp:\n\n/workspace:\nmain.sh\n0\n"
    settled(real)


def test_a_client_that_goes_away_takes_the_program_along(daemon: Daemon) -> None:
    settled(daemon)
    with under_way(daemon) as environment:
        log = daemon.stream(f"/environments/{environment}/logs?follow=1")
        reading = log.__enter__()
    try:
        assert b"begun" in reading.read()  # to its end, which is that of the environment
    finally:
        log.__exit__(None, None, None)
    settled(daemon)
    ended = daemon.call("GET", f"/environments/{environment}")
    assert (ended["state"], ended["ended_reason"]) == ("ended", "deleted")
    _, _, rows = daemon.raw("GET", f"/audit?environment={environment}&action=execution")
    results = [json.loads(row)["outcome"] for row in rows.splitlines() if json.loads(row)["kind"] == "result"]
    assert results == ["canceled"]


def test_the_audit_tells_of_it(daemon: Daemon) -> None:
    answer = execute(daemon, "bash", "exit 3", stdin="secret words")
    settled(daemon)
    _, _, body = daemon.raw("GET", "/audit?last=20")
    rows = [json.loads(row) for row in body.splitlines()]
    assert b"secret words" not in body
    [execution] = [row for row in rows if row["detail"].get("execution_id") == answer["execution_id"]][-1:]
    ours = [row for row in rows if row["environment_id"] == execution["environment_id"]]
    assert [(row["kind"], row["action"]) for row in ours if row["kind"] == "intent"] == [
        ("intent", "environment.create"),
        ("intent", "execution"),
        ("intent", "environment.delete"),
    ]
    assert (execution["outcome"], execution["detail"]["exit_code"]) == ("failed", 3)


def test_programs_beside_each_other(real: Daemon) -> None:
    async def main() -> list[str]:
        async with skerry.AsyncClient(str(real.home)) as client:
            code = "import os, sys\nprint(sys.stdin.read(), os.listdir('/tmp'), open('/tmp/x', 'w').name)"
            runs = [client.execute_code("python", code, stdin=str(number)) for number in range(8)]
            return [result.stdout for result in await asyncio.gather(*runs)]

    assert asyncio.run(main()) == [f"{number} [] /tmp/x\n" for number in range(8)]


@pytest.mark.requirement("R62")
def test_go_does_not_compile_the_standard_library_again(real: Daemon) -> None:
    """What a second run compiles is in no cache: of the packages only the program's own."""
    require("go")
    execute(real, "go", HELLO["go"])
    [cache] = [path for path in (real.home / "caches").iterdir() if not path.name.startswith(".")]
    before = sorted(path.name for path in cache.rglob("*"))
    code = (
        'package main\nimport ("fmt"; "net/http"; "os"; "os/exec")\n'
        "func main() {\n"
        '  fmt.Println(http.MethodGet, os.Getenv("GOCACHE"))\n'
        '  out, _ := exec.Command("go", "build", "-x", "-o", "/tmp/again", "main.go").CombinedOutput()\n'
        "  os.Stdout.Write(out)\n"
        '  fmt.Println(os.WriteFile(os.Getenv("GOCACHE") + "/x", nil, 0644))\n}'
    )
    result = execute(real, "go", code)
    assert (result["exit_code"], result["stderr"]) == (0, "")
    lines = result["stdout"].splitlines()
    assert lines[0] == "GET /run/go-cache"
    assert lines[-1] == "open /run/go-cache/x: read-only file system"
    compiled = [line for line in lines if "/compile " in line]
    assert ["-p main" in line for line in compiled] == [True]
    assert before == sorted(path.name for path in cache.rglob("*"))


def test_a_cache_that_cannot_be_made_is_done_without(real: Daemon) -> None:
    path = real.home / "languages.toml"
    path.write_text(
        '[odd]\nfile = "main.sh"\ncommand = ["sh", "main.sh"]\nversion = ["sh", "-c", "echo 1.0"]\n'
        '[odd.cache]\nvariable = "ODD"\ncommand = ["false"]\n'
        '[even]\nfile = "main.sh"\ncommand = ["sh", "main.sh"]\nversion = ["sh", "-c", "echo 1.0"]\n'
        '[even.cache]\nvariable = "EVEN"\nclock = "now"\n'
        "command = ['sh', '-c', 'mkdir -p $EVEN/a; umask 077; echo made > $EVEN/a/b; ln -s /etc/passwd $EVEN/link']\n"
    )
    try:
        assert execute(real, "odd", "echo ${ODD-unset}")["stdout"] == "unset\n"
        code = "cat $EVEN/a/b; date +%s; cat $EVEN/now; readlink $EVEN/link"
        made, now, clock, link = execute(real, "even", code)["stdout"].splitlines()
        assert (made, link) == ("made", "/etc/passwd")
        assert abs(int(now) - int(clock)) < 300
        [cache] = (real.home / "caches").glob("*/a")
        remove_tree(cache.parent)
        assert execute(real, "even", "cat $EVEN/a/b")["stdout"] == "made\n"
    finally:
        path.unlink()


def test_a_daemon_that_is_told_to_stop_leaves_no_program_behind() -> None:
    """SIGTERM leaves environments to the next daemon, but none whose caller waits."""
    with support.temporary_home() as home:
        with started(home) as daemon:
            kept = daemon.create()
            with under_way(daemon) as other:
                daemon.process.send_signal(signal.SIGTERM)
                daemon.process.wait()
        with started(home) as daemon:
            assert environments(daemon) == {kept}
            assert daemon.call("GET", f"/environments/{other}")["state"] == "ended"


def test_without_root(as_nobody: support.Nobody) -> None:
    """The program can only be read, though inside there is one user alone, and it is that one's."""
    program = as_nobody.home / "program.sh"
    program.write_text(
        "id -u; ls -A; cat data/x\n"
        "for change in 'rm main.sh' 'chmod 777 main.sh' 'sh -c \":>main.sh\"' 'mv data x' 'touch new'; do\n"
        "  $change 2>/dev/null && echo $change\n"
        "done\nexit 9\n"
    )
    (as_nobody.home / "x").write_text("content\n")
    done = as_nobody.skerry("code", "run", "-l", "bash", "--file", "data/x=x", "program.sh")
    assert (done.stdout, done.stderr) == ("1000\ndata\nmain.sh\ncontent\n", "")
    assert done.returncode == 9
    if os.path.exists("/usr/bin/go"):
        (as_nobody.home / "hello.go").write_text(HELLO["go"])
        done = as_nobody.skerry("code", "run", "-l", "go", "hello.go")
        assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "", 0)


EXAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "average": (
        {
            "language": "python",
            "code": "\nimport json\n\ndata = [1, 2, 3, 4, 5]\nresult = sum(data) / len(data)\n"
            'print(f"Average: {result}")\n',
            "timeout": 10,
        },
        "Average: 3.0",
    ),
    "sum": (
        {
            "language": "nodejs",
            "code": "\nasync function process() {\n    const data = [1, 2, 3, 4, 5];\n"
            "    const sum = data.reduce((a, b) => a + b, 0);\n    console.log('Sum:', sum);\n}\nprocess();\n",
            "timeout": 10,
        },
        "Sum: 15",
    ),
    "fibonacci": (
        {
            "language": "go",
            "code": '\npackage main\nimport "fmt"\n\nfunc fibonacci(n int) int {\n    if n <= 1 {\n'
            "        return n\n    }\n    return fibonacci(n-1) + fibonacci(n-2)\n}\n\nfunc main() {\n"
            '    fmt.Println("Fib(10):", fibonacci(10))\n}\n',
            "timeout": 15,
        },
        "Fib(10): 55",
    ),
    "file": (
        {
            "language": "python",
            "code": "\nwith open('data.json', 'r') as f:\n    import json\n    data = json.load(f)\n"
            "    print(data['message'])\n",
            "files": {"data.json": '{"message": "Hello from file!"}'},
            "timeout": 30,
        },
        "Hello from file!",
    ),
    "stdin": (
        {
            "language": "python",
            "code": '\nimport sys\ndata = sys.stdin.read()\nprint(f"Received: {data}")\n',
            "stdin": "test input",
            "timeout": 30,
        },
        "Received: test input",
    ),
    "hello": (
        {"language": "python", "code": 'print("Hello, World!")', "timeout": 30},
        "Hello, World!",
    ),
    "limits": (
        {
            "language": "python",
            "code": "print('test')",
            "cpu_limit": 500,
            "mem_limit": 256,
            "timeout": 60,
        },
        "test",
    ),
}


@pytest.mark.requirement("R88")
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_the_examples_of_the_document(real: Daemon, name: str) -> None:
    given, output = EXAMPLES[name]
    require(given["language"])
    with skerry.Client(str(real.home)) as client, ExecuteCode(client=client) as tool:
        result = tool.execute(json.dumps(given))
    assert (result.content, result.is_error) == (f"STDOUT:\n{output}\nExit code: 0", False)


@pytest.mark.requirement("R58", "R73")
def test_the_tool_in_an_event_loop(real: Daemon) -> None:
    async def main() -> list[str]:
        async with skerry.AsyncClient(str(real.home)) as client, AsyncExecuteCode(client=client) as tool:
            calls = [tool.execute({"language": "bash", "code": f"exit {number}"}) for number in range(4)]
            return [result.content for result in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [f"Exit code: {number}" for number in range(4)]


@pytest.mark.requirement("R58", "R71", "R91")
def test_the_tool_tells_what_went_wrong(real: Daemon) -> None:
    with skerry.Client(str(real.home)) as client:
        tool = ExecuteCode(client=client)
        endless = {"language": "bash", "code": "echo one; while :; do :; done", "timeout": 3}
        assert tool.execute(endless).content == "Execution timed out\nSTDOUT:\none\nExit code: 124"
        failing = tool.execute({"language": "nodejs", "code": "throw new Error('no')"})
        assert failing.is_error
        assert "STDERR:\n" in failing.content
        assert "Error: no" in failing.content
        assert failing.content.endswith("\nExit code: 1")
        stepping = tool.execute({"language": "python", "code": "", "files": {"../x": ""}})
        assert stepping.content.startswith("Invalid parameters: the file '../x' would be outside")
        much = tool.execute({"language": "python", "code": "print('x' * 3_000_000)"})
        assert len(much.content) < 25_000
        assert "characters cut" in much.content
        assert "more bytes were cut" in much.content
        stronger = ExecuteCode(client=client, backend="microvm").execute({"language": "bash", "code": ""})
        assert stronger.content.startswith("Execution failed: isolation 'microvm' is not available here")
        assert "skerry doctor" in stronger.content
    nobody = ExecuteCode(url=f"http://127.0.0.1:{support.free_port()}")
    assert nobody.execute({"language": "bash", "code": ""}).content.startswith("Execution failed: ")
    nobody.close()
