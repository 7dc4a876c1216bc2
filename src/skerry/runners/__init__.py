"""The programs that are the interpreters of sessions. They run inside environments, where nothing of Skerry is."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files

# A module of the user's in the working directory must not be taken for one that the runner needs.
_PYTHON = """\
import os, sys
own = sys.path[:1] == [''] and sys.path.pop(0)
requests = os.fdopen(os.dup(0), 'rb')
scope = {'__name__': 'session', '__file__': '<session>'}
exec(compile(requests.read(int(requests.readline())), scope['__file__'], 'exec'), scope)
if own == '': sys.path.insert(0, own)
scope['SessionRunner'](requests).serve()
"""

# Node cannot copy a descriptor, but it can open it again, and closes what it opened in programs that it starts.
_NODE = """\
const fs = require('fs');
const requests = fs.openSync('/proc/self/fd/0', 'r'), replies = fs.openSync('/proc/self/fd/9', 'w');
fs.closeSync(9);
const read = (size) => { const data = Buffer.alloc(size); let at = 0;
  while (at < size) at += fs.readSync(requests, data, at, size - at); return data; };
let size = '', digit;
while ((digit = read(1).toString()) !== '\\n') size += digit;
const own = { exports: {} };
require('vm').runInThisContext(`(function (module, require) {${read(Number(size))}\\n})`, '<session>')(own, require);
own.exports(requests, replies);
"""


# The directory of the user's packages is looked at when the interpreter starts, and may not have been there.
_FIND_PACKAGES = (
    "__import__('site').addsitedir(__import__('site').getusersitepackages());"
    " __import__('importlib').invalidate_caches()"
)


class Runner:
    """How an interpreter is started: its arguments, and what it must read before all requests.

    `finds_packages` is code that makes it see those that were installed since.
    """

    def __init__(
        self, file: str, *argv: str, forgets_interrupts: bool = False, finds_packages: str = ""
    ) -> None:
        self.argv = list(argv)
        self.forgets_interrupts = forgets_interrupts
        self.finds_packages = finds_packages
        self._file = file

    @cached_property
    def opening(self) -> bytes:
        source = files(__name__).joinpath(self._file).read_bytes()
        return b"%d\n%s" % (len(source), source)


RUNNERS = {
    "python": Runner("python.py", "python3", "-c", _PYTHON, finds_packages=_FIND_PACKAGES),
    # Node loses one that comes just as code ends.
    "nodejs": Runner("node.js", "node", "-e", _NODE, forgets_interrupts=True),
}
"""By language."""
