"""Start a program in the background, read its output as it comes, and write to it.

python examples/stream.py
"""

from __future__ import annotations

import skerry

PROGRAM = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
"""

with skerry.Environment() as env, env.start(["python3", "-c", PROGRAM], stdin=True) as process:
    for stream, data in process:
        print(f"{stream}: {data.decode().strip()}")
        if data == b"ready\n":
            process.write("one\n")
        elif data == b"got one\n":
            process.close_stdin()
    print("exit code", process.wait().exit_code)
