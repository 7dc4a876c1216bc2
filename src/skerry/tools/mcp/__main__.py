"""What `skerry mcp` becomes: `python -m skerry.tools.mcp FD`.

The descriptor holds the request as JSON (see `main`): arguments could be read by every user of the machine, and the
request has values of variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from typing import Any

from skerry.errors import SkerryError
from skerry.tools.mcp.place import Place
from skerry.tools.mcp.serving import SESSION_IDLE, serve_http, serve_stdio


async def main(
    environment: str, wanted: dict[str, Any], listen: str, per_session: bool, idle: float | None
) -> None:
    place = Place(environment, wanted)
    if listen:
        make = partial(Place, "", wanted) if per_session else None
        await serve_http(place, listen, make, SESSION_IDLE if idle is None else idle)
    else:
        await serve_stdio(place)


def _request(fd: int) -> dict[str, Any]:
    with os.fdopen(fd, "rb") as file:
        request: dict[str, Any] = json.load(file)
    return request


if __name__ == "__main__":
    try:
        asyncio.run(main(**_request(int(sys.argv[1]))))
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(2) from None
