"""Cuts libraries to one GPU's machine code: the rest, PTX too, becomes zeros, which pack into nothing."""

import struct
from collections.abc import Iterator

ARCHITECTURE = 90  # Hopper: sm_90 and sm_90a
FATBIN, ELF = 0xBA55ED50, 2  # a fat binary's magic number; the kind of its entries that are machine code


def thinned(data: bytes) -> bytes:
    """A library of the same length, whose fat binaries hold the machine code for ARCHITECTURE alone.

    A fat binary that has none gets the library's smallest entry for another GPU: it stays what it was, one
    without code for this GPU.
    """
    start, size = section(data, b".nv_fatbin")
    new, place = bytearray(data), start
    entries: list[tuple[int, int, list[tuple[int, bytes]]]] = []
    while place < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, place)
        if magic != FATBIN:
            raise ValueError(f"no fat binary at {place:#x}")
        entries.append((place, place + header, list(code_of(data, place + header, place + header + length))))
        place += header + length
    others = [code for _, _, found in entries for architecture, code in found if architecture != ARCHITECTURE]
    for i, (place, begin, found) in enumerate(entries):
        end = entries[i + 1][0] if i + 1 < len(entries) else start + size
        content = b"".join(code for architecture, code in found if architecture == ARCHITECTURE)
        content = content or min(others, key=len, default=b"")
        new[begin:end] = content.ljust(end - begin, b"\0")
        struct.pack_into("<Q", new, place + 8, len(content))
    return bytes(new)


def code_of(data: bytes, place: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Architecture and bytes of a fat binary's entries that are machine code."""
    while place < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", data, place)
        (architecture,) = struct.unpack_from("<I", data, place + 28)
        if kind == ELF:
            yield architecture, data[place : place + header + length]
        place += header + length


def section(data: bytes, name: bytes) -> tuple[int, int]:
    """Offset and size of an ELF file's section; (0, 0) where there is none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    number, names = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", data, table + 64 * i) for i in range(number)]
    for header in headers:
        place = headers[names][4] + header[0]
        if data[place : data.index(b"\0", place)] == name:
            return header[4], header[5]
    return 0, 0
