"""How long the soaks run."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
"""Of all soaks together; they run at the same time."""
DAY = float(os.environ.get("DAY_SECONDS", "30"))
"""What a day is to the daemon of `compressed`."""
