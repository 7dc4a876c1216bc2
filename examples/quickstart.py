"""Run code in an environment, keep a shell's state, and exchange files with it.

python examples/quickstart.py
"""

from __future__ import annotations

import skerry

with skerry.Environment(memory="512m", cpus=1, lifetime=600) as env:
    env.files.write("src/hello.py", "import os\nprint('hello from', os.getcwd(), 'A =', os.environ['A'])\n")
    env.execute("cd src && export A=1")
    result = env.execute("python3 hello.py")
    print(result.stdout, end="")

    failed = env.run(["python3", "-c", "import sys; sys.exit('something went wrong')"])
    print(f"exit code {failed.exit_code}, outcome {failed.outcome}, stderr {failed.stderr!r}")

    slow = env.execute("sleep 60", timeout=0.5)
    print(f"exit code {slow.exit_code}, outcome {slow.outcome}")

    print(env.execute("pwd").stdout, end="")
