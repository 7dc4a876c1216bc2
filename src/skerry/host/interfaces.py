"""The addresses that this machine has itself."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def own_addresses() -> frozenset[Address]:
    """Of all devices, as the kernel knows them now. Raises OSError."""
    found: set[Address] = set()
    candidate = ""
    with open("/proc/thread-self/net/fib_trie") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["|--"]:
                candidate = words[1]
            elif words[:3] == ["/32", "host", "LOCAL"]:
                found.add(ipaddress.IPv4Address(candidate))
    try:
        with open("/proc/thread-self/net/if_inet6") as file:
            found |= {ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in file}
    except FileNotFoundError:
        pass  # a kernel without IPv6
    return frozenset(found)
