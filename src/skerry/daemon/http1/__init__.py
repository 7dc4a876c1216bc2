"""HTTP/1.1 and WebSockets: httptools and websockets parse, everything else is here (ADR 29).

`protocol` owns a connection, `exchange` one request and its response, `websocket` what a connection becomes after an
upgrade, `feed` the pace at which received bytes are parsed.
"""
