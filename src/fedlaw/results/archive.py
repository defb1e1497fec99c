"""Archives: a whole results file, compressed, in a SQLite file of its own; small enough to be committed."""

from __future__ import annotations

import lzma
import os
import sqlite3
from pathlib import Path

_TABLE = "archive"
_LARGEST = 4 << 30  # bytes that an archive may unfold to: what is read may come from anywhere


class DamagedArchive(ValueError):
    """What is in an archive cannot be unfolded."""


def is_archive(connection: sqlite3.Connection) -> bool:
    """Whether the open file is an archive."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    return bool(connection.execute(query, (_TABLE,)).fetchone()[0])


def unfold(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The results file that the open archive holds, in memory."""
    row = connection.execute(f"SELECT data FROM {_TABLE}").fetchone()
    try:
        reader = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        content = reader.decompress(row[0], _LARGEST)
    except (lzma.LZMAError, TypeError) as error:
        raise DamagedArchive(f"the archive is damaged ({error})") from None
    if not reader.eof or content[:16] != b"SQLite format 3\0":
        raise DamagedArchive("the archive is cut off, or holds something else")
    inside = sqlite3.connect(":memory:", isolation_level=None)
    inside.deserialize(content)
    return inside


def fold(path: Path, application: int, version: int) -> None:
    """Put an archive in the place of a results file that nobody has open and that has no journal beside it."""
    packed = lzma.compress(path.read_bytes(), lzma.FORMAT_XZ, preset=9)
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    connection = sqlite3.connect(beside, isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id = {application}")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute(f"CREATE TABLE {_TABLE} (data BLOB NOT NULL)")
        connection.execute(f"INSERT INTO {_TABLE} VALUES (?)", (packed,))
    finally:
        connection.close()
    os.replace(beside, path)
