"""`pool`: environments that are started before they are requested."""

from __future__ import annotations

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say, show_json, show_table
from skerry.client.sync.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser


def _stats(args: SimpleNamespace) -> int:
    return _shown([stats.to_dict() for stats in Client().pools()], args)


def _shown(found: list[dict[str, Any]], args: SimpleNamespace) -> int:
    if args.json:
        show_json(found)
        return 0
    show_table(
        (
            "POOL",
            "IMAGE",
            "AVAILABLE",
            "CREATING",
            "ACTIVE",
            "MIN",
            "MAX",
            "HITS",
            "MISSES",
            "WAIT P50",
            "P95",
        ),
        (
            (
                *(stats[name] for name in ("pool", "image", "available", "creating", "active")),
                *(stats[name] for name in ("minimum", "maximum", "hits", "misses")),
                *(f"{1000 * stats[f'wait_{name}_seconds']:.1f} ms" for name in ("p50", "p95")),
            )
            for stats in found
        ),
    )
    for stats in found:
        if stats["error"]:
            say(f"{stats['pool']}: {clean(stats['error'])}")
    return 0


def _count_arguments(parser: Parser) -> None:
    parser.argument("pool", "POOL", "name of a pool")
    parser.argument("count", "COUNT", "number of ready environments", convert=int)
    add_json(parser)


def _warmup_arguments(parser: Parser) -> None:
    _count_arguments(parser)
    parser.option(
        "--maximum", takes="COUNT", convert=int, help="limit of the pool: ready, starting and in use together"
    )


def _warmup(args: SimpleNamespace) -> int:
    return _shown([Client().warm_up_pool(args.pool, args.count, args.maximum).to_dict()], args)


def _shrink(args: SimpleNamespace) -> int:
    return _shown([Client().shrink_pool(args.pool, args.count).to_dict()], args)


def _health_arguments(parser: Parser) -> None:
    parser.argument("pools", "POOL", "names (default: all)", count="*")
    add_json(parser)


def _health(args: SimpleNamespace) -> int:
    with Client() as client:
        names = args.pools or [stats.pool for stats in client.pools()]
        found = {name: client.check_pool(name) for name in names}
    if args.json:
        show_json({name: health.to_dict() for name, health in found.items()})
    else:
        for name, health in found.items():
            what = f"healthy, {1000 * health.seconds:.1f} ms" if health.healthy else clean(health.error)
            print(f"{name}  {what}")
    return 0 if all(health.healthy for health in found.values()) else 1


VERBS = {
    "pool stats": Verb(
        "skerry pool stats [--json]",
        "Show the ready environments of each pool, with hits and misses.",
        "skerry pool stats",
        add_json,
        _stats,
    ),
    "pool warmup": Verb(
        "skerry pool warmup POOL COUNT [OPTIONS]",
        "Warm the pool up to COUNT environments, and keep that many ready until the daemon stops.",
        "skerry pool warmup default 8",
        _warmup_arguments,
        _warmup,
    ),
    "pool shrink": Verb(
        "skerry pool shrink POOL COUNT [--json]",
        "Shrink the pool to COUNT ready environments. Environments that are in use stay.",
        "skerry pool shrink default 0",
        _count_arguments,
        _shrink,
    ),
    "pool health": Verb(
        "skerry pool health [POOL...] [--json]",
        "Start an environment as the pool does, run a program in it and delete it (exit code 1 if that fails).",
        "skerry pool health",
        _health_arguments,
        _health,
    ),
}
