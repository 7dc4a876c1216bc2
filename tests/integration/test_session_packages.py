"""What the usual libraries show in a session: DataFrames as records, figures as pictures."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests.integration.daemon import Daemon
from tests.integration.mirrors import with_python_packages

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.mark.requirement("F4")
def test_data_frames_and_figures(tmp_path: Path) -> None:
    def body(daemon: Daemon) -> None:
        with (
            Client(str(daemon.home)) as client,
            Environment(client=client, memory="2g", disk="2g") as env,
        ):
            env.session("python", packages=["pandas==2.*", "matplotlib"]).close()
            frames(env)
            figures(env)

    with_python_packages(tmp_path, body)


def frames(env: Environment) -> None:
    with env.session("python") as session:
        session.run("import pandas\nframe = pandas.DataFrame({'name': ['a', 'é'], 'n': [1, 2.5]})")
        (value,) = session.run("frame").values
        assert value.json == [{"name": "a", "n": 1.0}, {"name": "é", "n": 2.5}]
        assert "<table" in value.data["text/html"]
        assert value.truncated == []
        when = session.run(
            "frame['at'] = pandas.Timestamp('2026-01-02')\nframe['odd'] = [{1}, None]\nframe"
        ).values[0]
        assert when.json[0]["at"].startswith("2026-01-02T00:00:00")
        (large,) = session.run("pandas.DataFrame({'n': range(100_000)})").values
        assert (len(large.json), large.truncated) == (1000, ["application/json"])
        twice = session.run("pandas.DataFrame([[1, 2]], columns=['a', 'a'])").values[0]
        assert (twice.json, twice.data["text/plain"]) == (None, "   a  a\n0  1  2")


def figures(env: Environment) -> None:
    with env.session("python") as session:
        result = session.run(
            "from matplotlib import pyplot\npyplot.plot([1, 2, 4])\npyplot.title('one')\nNone"
        )
        assert result.ok, result.raised
        (value,) = result.values
        assert (value.kind, value.png is not None) == ("display", True)
        assert value.png is not None
        assert value.png.startswith(b"\x89PNG\r\n")
        assert min(struct.unpack(">II", value.png[16:24])) > 200
        result = session.run("for _ in range(2):\n    pyplot.figure()\n    pyplot.plot([1])\npyplot.show()")
        assert (len(result.values), result.stderr) == (2, "")
        assert session.run("1").values[0].kind == "value"  # they are shown once
        result = session.run("pyplot.plot([1])\n1/0")
        assert (result.raised is not None, [value.kind for value in result.values]) == (True, ["display"])
        (own,) = session.run(
            "from matplotlib.figure import Figure\nf = Figure()\nf.subplots().plot([1])\nf"
        ).values
        assert (own.kind, own.png is not None) == ("value", True)
