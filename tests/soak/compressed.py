"""`python -m tests.soak.compressed`: a daemon for which a day takes `DAY_SECONDS`.

What is kept for a day is kept for that long, the audit too, so that minutes of load reach the same steady state as
days.
"""

from __future__ import annotations

import os
import sys

from skerry.daemon import __main__ as daemon
from skerry.daemon import app
from skerry.manager.audit import retention
from skerry.manager.environments import catalogue, records
from skerry.store import environments, executions
from tests.soak.durations import DAY

catalogue.REMEMBER_FOR = DAY
for module in (environments, executions):
    vars(module)["DAY"] = DAY  # imported there by name
records.PURGE_SECONDS = DAY / 24
retention.DAY = DAY
app.RETAIN_EVERY = DAY / 24
os.environ[retention.DAYS] = "1"

if __name__ == "__main__":
    sys.exit(daemon.main())
