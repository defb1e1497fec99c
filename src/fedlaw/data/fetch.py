"""Downloads of the named data sets: known digests, resumed where they broke, nothing half-written."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fedlaw.data.base import DataError
from fedlaw.data.catalog import SOURCES, Remote
from fedlaw.data.sources import resolve_data_dir

MIRROR = "FEDLAW_DATA_MIRROR"
MAX_MEMBER_BYTES = 1 << 28
_CHUNK = 1 << 18
_CONNECTIONS = 8  # to one address, for one file, in one call
_BROKEN = (OSError, http.client.HTTPException)  # what a connection that fails midway raises

Progress = Callable[[str, int, int], None]


def download(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    mirror: str | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download a named data set into `data_dir` (else FEDLAW_DATA), and say which folder holds it.

    A file is written as NAME.part and renamed once its SHA-256 is right, so a file under its own name is whole.
    What is there and right is kept; a .part is continued where it broke, if the server can. Of an archive only
    the expected files are taken out, then it is removed.

    Args:
        name: mnist, fashion_mnist, cifar10 or cifar100 (digits needs no download).
        progress: called as progress(file, bytes so far, bytes in all).
        mirror: address of a copy, with the files at MIRROR/NAME/FILE; else the environment variable
            FEDLAW_DATA_MIRROR, else the canonical places. Digests are checked all the same.
        timeout: seconds without an answer after which an address is given up.

    Raises:
        DataError: no connection, a wrong digest, a folder that cannot be written.
    """
    if name not in SOURCES:
        known = ", ".join(SOURCES)
        extra = " (digits comes with scikit-learn, there is nothing to get)" if name == "digits" else ""
        raise DataError(f"dataset {name!r} cannot be downloaded{extra}; there are: {known}")
    source = SOURCES[name]
    root = resolve_data_dir(data_dir, name)
    mirror = mirror or os.environ.get(MIRROR)
    bases = (f"{mirror.rstrip('/')}/{name}",) if mirror else source.bases
    folder = root / source.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remote in source.files:
            if not _present(remote, folder):
                _fetch(remote, folder, bases, progress or (lambda *_: None), timeout)
                if remote.members:
                    _extract(remote, folder)
    except OSError as error:
        raise DataError(
            f"--data-dir {root}: cannot write there ({error.strerror or error}); name another folder"
        ) from None
    return folder if source.folder else folder / next(iter(source.files[0].members)).split("/")[0]


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _present(remote: Remote, folder: Path) -> bool:
    """Whether the file, or all that is wanted of the archive, is there already and right."""
    if remote.members:
        wanted = [(folder / member, md5, "md5") for member, md5 in remote.members.items()]
    else:
        wanted = [(folder / remote.file, remote.sha256, "sha256")]
    return all(path.is_file() and _digest(path, how) == digest for path, digest, how in wanted)


def _fetch(remote: Remote, folder: Path, bases: tuple[str, ...], progress: Progress, timeout: float) -> None:
    """Bring the whole file to its place, from the first address that can give it."""
    part = folder / f"{remote.file}.part"
    reasons = []
    for base in bases:
        if not base.startswith(("https://", "http://")):
            raise DataError(f"mirror ({MIRROR}) must be an http or https address, got {base!r}")
        try:
            _continue(f"{base}/{remote.file}", part, remote, progress, timeout)
            break
        except _Unreachable as error:
            reasons.append(f"{base}: {error}")
    else:
        kept = f"; {part.stat().st_size} of {remote.size} bytes are kept, so" if part.is_file() else ";"
        raise DataError(
            f"cannot download {remote.file} ({' | '.join(reasons)}){kept} check the connection and run the same "
            f"command again, or copy the file into {folder} from elsewhere"
        )
    if _digest(part, "sha256") != remote.sha256:
        part.unlink()
        raise DataError(
            f"{remote.file}: what was downloaded has the wrong digest and was removed; run the same command again, "
            f"or name another source with {MIRROR}"
        )
    part.replace(folder / remote.file)


class _Unreachable(Exception):
    """An address that does not give the file; the next may."""


def _continue(url: str, part: Path, remote: Remote, progress: Progress, timeout: float) -> None:
    """Append to `part` until it has all bytes; a connection that breaks midway is taken up again, a few times."""
    reason = ""
    for _ in range(_CONNECTIONS):
        have = part.stat().st_size if part.is_file() else 0
        if have > remote.size:
            part.unlink()
            have = 0
        if have == remote.size:
            return
        request = urllib.request.Request(url, headers={"User-Agent": "fedlaw"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # the server's file is shorter than what we have: ours is of something else
                part.unlink()
                continue
            raise _Unreachable(f"HTTP {error.code} {error.reason}") from None
        except _BROKEN as error:
            raise _Unreachable(str(getattr(error, "reason", "") or error or type(error).__name__)) from None
        with response:
            start = have if _continues(response, have) else 0  # else the server sends all of it again
            with part.open("r+b" if part.is_file() else "wb") as file:
                file.truncate(start)
                file.seek(start)
                reason = _receive(response, file, remote, start, progress)
        if not reason:
            return
    raise _Unreachable(reason or "it has less of the file than we have")


def _continues(response: http.client.HTTPResponse, have: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _receive(
    response: http.client.HTTPResponse, file: IO[bytes], remote: Remote, have: int, progress: Progress
) -> str:
    """Write what arrives, never more than the file's known size; why it ended early, or ''."""
    progress(remote.file, have, remote.size)
    while have < remote.size:
        try:
            chunk = response.read(min(_CHUNK, remote.size - have))
        except _BROKEN as error:
            return f"the connection broke after {have} bytes ({type(error).__name__})"
        if not chunk:
            return f"the connection ended after {have} of {remote.size} bytes"
        file.write(chunk)
        have += len(chunk)
        progress(remote.file, have, remote.size)
    return ""


def _extract(remote: Remote, folder: Path) -> None:
    """Take the expected regular files out of the archive, each renamed into place when whole; remove the archive.

    Names come from our list, not from the archive, so no member can land elsewhere.
    """
    archive = folder / remote.file
    missing = set(remote.members)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                name = entry.name.removeprefix("./")
                content = tar.extractfile(entry) if name in missing and entry.isreg() else None
                if content is None or entry.size > MAX_MEMBER_BYTES:
                    continue
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                try:
                    with content, part.open("wb") as file:
                        shutil.copyfileobj(content, file, _CHUNK)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
                missing.discard(name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive}: damaged archive ({error}); remove it and run the same command again"
        ) from None
    if missing:
        raise DataError(
            f"{archive}: has no {', '.join(sorted(missing))}; remove it and run the same command again"
        )
    archive.unlink()
