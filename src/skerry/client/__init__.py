"""The client of the daemon: what the SDK and the CLI are made of. Standard library only.

    http1, websocket    bytes in, messages out; no I/O, shared by both worlds
    autostart           finds the daemon's socket, and starts the daemon when there is none
    archive             local files to tar and back; an incoming tar is treated as hostile
    aio/                the asynchronous client, written by hand
    sync/               the synchronous one, generated from aio/ (only its stream.py is written by hand)

The CLI counts its start in milliseconds, so nothing here may import asyncio, dataclasses or typing before
it needs them; a test keeps it so.
"""
