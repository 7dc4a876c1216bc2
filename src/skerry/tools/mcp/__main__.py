"""What `skerry mcp` becomes: `python -m skerry.tools.mcp REQUEST`, JSON with `environment`, `wanted` and `listen`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from skerry.errors import SkerryError
from skerry.tools.mcp.place import Place
from skerry.tools.mcp.serving import serve_http, serve_stdio


async def main(environment: str, wanted: dict[str, Any], listen: str) -> None:
    place = Place(environment, wanted)
    if listen:
        await serve_http(place, listen)
    else:
        await serve_stdio(place)


if __name__ == "__main__":
    try:
        asyncio.run(main(**json.loads(sys.argv[1])))
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(2) from None
