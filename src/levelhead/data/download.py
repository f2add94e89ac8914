"""A download that goes on where it stopped, never mixes two files, and has one writer at a time.

`fetch` fills a part file; what it knows of the source stands beside it in `<part>.json`. Whether
the result is the right file is for the caller to find out, by its checksum.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import urlsplit

from levelhead.base.errors import LevelheadError, StoredFileError
from levelhead.base.files import write_json

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["Progress", "claim", "fetch", "forget"]

Progress = Callable[[int, int | None], object]
_Response = http.client.HTTPResponse

_CHUNK = 1 << 18


def fetch(
    url: str,
    part: Path,
    *,
    size: int | None,
    verified: bool,
    timeout: float,
    progress: Progress | None,
) -> None:
    """Fill `part` with what lies at `url`, an http(s) address.

    An earlier attempt for the same address is continued with a Range request. The file is begun
    anew when the server does not do ranges, or when its size or validator has changed. `size`
    is the number of bytes expected, if known; `verified` tells that the caller has a checksum,
    without which a part is continued only if the server itself vouches for its being the same.

    Raises `StoredFileError` when the server closes too early (the part is kept) or its file has
    another size (the part is removed), `LevelheadError` when it cannot be reached or refuses;
    `OSError` of the disk passes through.
    """
    _Download(url, part, size, verified, timeout, progress).run()


def forget(part: Path) -> None:
    """Remove a part file and what is known about it."""
    part.unlink(missing_ok=True)
    _notes_of(part).unlink(missing_ok=True)


@contextmanager
def claim(path: Path) -> Iterator[Path]:
    """The part file to fill for `path`: the one that can be continued, if nobody else is at it.

    Otherwise a private one, which is removed at the end. The claim is a lock that the system
    gives back when a process dies.
    """
    with open(path.with_name(f".{path.name}.lock"), "ab") as file:
        if _lock(file):
            yield path.with_name(path.name + ".part")
            return
    private = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        yield private
    finally:
        forget(private)


def _lock(file: IO[bytes]) -> bool:
    """Take the lock of an open file if it is free; closing the file gives it back."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _notes_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow a server to http(s) only, and never from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme != "https" and (scheme != "http" or req.type == "https"):
            raise LevelheadError(
                f"{req.full_url} leads on to {newurl!r}, which is not followed: "
                "https is expected, or http from http."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@dataclass(frozen=True)
class _Download:
    url: str
    part: Path
    size: int | None
    verified: bool
    timeout: float
    progress: Progress | None

    def run(self) -> None:
        notes = self._notes()
        have = self.part.stat().st_size if notes and self.part.exists() else 0
        if have and have == notes.get("total"):
            return
        rest = self._rest(have, notes) if have else None
        with rest or self._ask({}) as response:
            start = have if response.status == 206 else 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            if None not in (self.size, total) and total != self.size:
                self._changed(f"holds {total} bytes")
            notes = {"url": self.url, "total": total, "validator": _validator(response)}
            write_json(_notes_of(self.part), notes)
            with open(self.part, "ab" if start else "wb") as file:
                done = self._copy(response, file, start, total)
        expected = self.size if total is None else total
        if expected is not None and done < expected:
            raise StoredFileError(
                f"The download of {self.url} stopped at {done} of {expected} bytes: "
                "ask again to go on from there."
            )

    def _notes(self) -> Mapping[str, Any]:
        """What is known of an earlier attempt; empty if it was for another address."""
        try:
            notes = json.loads(_notes_of(self.part).read_bytes())
        except (OSError, ValueError):
            return {}
        same = isinstance(notes, dict) and notes.get("url") == self.url
        return notes if same and (self.verified or notes.get("validator")) else {}

    def _rest(self, have: int, notes: Mapping[str, Any]) -> _Response | None:
        """The rest of the same file (206), or all of it (200); None if neither came."""
        headers = {"Range": f"bytes={have}-"}
        if notes.get("validator"):
            headers["If-Range"] = str(notes["validator"])
        try:
            response = self._ask(headers)
        except _Unsatisfiable:
            return None
        if response.status != 206:
            return response
        bounds, _, total = response.headers.get("Content-Range", "").partition("/")
        same = notes.get("total") is None or total == str(notes["total"])
        if bounds.startswith(f"bytes {have}-") and same:
            return response
        response.close()
        return None

    def _ask(self, headers: Mapping[str, str]) -> _Response:
        own = {"User-Agent": "levelhead", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.url, headers={**own, **headers})
        opener = urllib.request.build_opener(_SafeRedirects)
        try:
            response: _Response = opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            kind = _Unsatisfiable if error.code == 416 and "Range" in headers else LevelheadError
            raise kind(
                f"The server answered {error.code} ({error.reason}) for {self.url}: "
                "check the address, or try again later."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        return response

    def _copy(self, response: _Response, file: BinaryIO, done: int, total: int | None) -> int:
        """Write what arrives; the number of bytes in the file when nothing more does."""
        while piece := self._read(response):
            file.write(piece)
            done += len(piece)
            if self.size is not None and done > self.size:
                self._changed(f"sends more than {self.size} bytes")
            if self.progress:
                self.progress(done, total)
        return done

    def _read(self, response: _Response) -> bytes:
        try:
            return response.read(_CHUNK)
        except http.client.IncompleteRead as error:
            return error.partial
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _changed(self, what: str) -> None:
        forget(self.part)
        raise StoredFileError(
            f"{self.url} {what}, {self.size} are expected: the source has changed; "
            "give the sha256 of the new file if it is the one you want."
        )

    def _unreachable(self, error: Exception) -> LevelheadError:
        cause = getattr(error, "reason", error)
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        return LevelheadError(
            f"{self.url} cannot be reached ({reason}): check the network and ask again; "
            "what has arrived is kept."
        )


class _Unsatisfiable(LevelheadError):
    """The server has nothing at the place from which the file was to be continued."""


def _validator(response: _Response) -> str | None:
    """What tells a server whether its file is still the same; a weak tag does not (RFC 9110)."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")
