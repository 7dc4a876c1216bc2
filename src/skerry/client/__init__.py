"""The client of the daemon, used by the SDK, the CLI and the tools. Standard library only.

    endpoint            which daemon to use: arguments, SKERRY_* variables, the current context, the default home
    contexts            the file of named daemons
    autostart           connects to the daemon of a home, and starts it when none is running
    remote              connects to a daemon by URL
    wire, tls           one connection: a socket, and the TLS on it
    http1, frames       HTTP/1.1 and WebSocket frames as bytes, without I/O
    archive             local files to tar and back; a received tar is not trusted
    aio/                the asynchronous client, written by hand
    sync/               the synchronous client, generated from aio/ (except sync/stream.py)

To keep the CLI's start short, modules import asyncio, dataclasses and typing only where they are needed; a test checks
that.
"""
