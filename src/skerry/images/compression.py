"""The bytes of an archive, whatever they were compressed with."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import BinaryIO, Self

from skerry.errors import InvalidRequest
from skerry.tarstream import CHUNK, Readable

_XZ_MEMORY = 256 << 20
"""What `xz -9` needs four times over; a header can ask for 4 GiB."""


class ArchiveStream:
    """Reads an open file from its start, decompressing gzip, bzip2, xz and zstd by their magic numbers.

    `advance` is told which fraction of the file has been read, each whole percent once. Making one raises
    InvalidRequest when a program is missing that the compression needs, `read` when the data is damaged.
    """

    def __init__(self, file: BinaryIO, advance: Callable[[float], None]) -> None:
        self._fd = file.fileno()
        self._size = os.fstat(self._fd).st_size
        self._advance = advance
        self._percent = 0
        self._exits = ExitStack()
        self._zstd: subprocess.Popen[bytes] | None = None
        magic = os.pread(self._fd, 6, 0)
        self._stream: Readable
        if magic.startswith(b"\x1f\x8b"):
            self._stream = self._exits.enter_context(gzip.GzipFile(fileobj=file))
        elif magic.startswith(b"BZh"):
            self._stream = self._exits.enter_context(bz2.BZ2File(file))
        elif magic == b"\xfd7zXZ\0" or magic.startswith(b"]\0\0"):
            self._stream = _Xz(file)
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            self._stream = self._start_zstd(file)
        else:
            self._stream = file

    def _start_zstd(self, file: BinaryIO) -> Readable:
        program = shutil.which("zstd")
        if program is None:
            raise InvalidRequest("the archive is compressed with zstd", hint="install it: apt install zstd")
        self._zstd = subprocess.Popen(
            [program, "-dcq"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._exits.enter_context(self._zstd)
        self._exits.callback(self._zstd.kill)
        assert self._zstd.stdout is not None
        return self._zstd.stdout

    def read(self, size: int, /) -> bytes:
        try:
            data = self._stream.read(size)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise InvalidRequest(f"the archive is damaged: {error}") from error
        if not data and self._zstd is not None and self._zstd.wait() != 0:
            raise InvalidRequest("the archive is damaged: zstd cannot read it")
        percent = os.lseek(self._fd, 0, os.SEEK_CUR) * 100 // self._size if self._size else 100
        if percent > self._percent:
            self._percent = percent
            self._advance(percent / 100)
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()


class _Xz:
    """As lzma.LZMAFile, with a limit of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = self._begin()

    @staticmethod
    def _begin() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def read(self, size: int, /) -> bytes:
        while True:
            given = b""
            if self._decoder.eof:
                # Another stream may follow, and zeros that pad the first.
                given = self._decoder.unused_data.lstrip(b"\0") or self._file.read(CHUNK).lstrip(b"\0")
                if not given:
                    return b""
                self._decoder = self._begin()
            elif self._decoder.needs_input:
                given = self._file.read(CHUNK)
                if not given:
                    raise EOFError("it ends too early")
            if data := self._decoder.decompress(given, size):
                return data
