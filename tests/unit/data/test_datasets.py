"""The catalogue and its downloads, against a server on this machine that misbehaves on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.data import datasets
from levelhead.data.datasets import Dataset, cache_folder, catalogue, get, remembered_checksum

CONTENT = np.random.default_rng(3).bytes(1_000_003)
SUM = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """What the server holds and how it behaves; what it was asked and how much it sent."""

    content: bytes = CONTENT
    ranges: bool = True
    tag: str | None = '"one"'
    length: bool = True
    cut: int | None = None
    status: int = 200
    leads_to: str | None = None
    stall: threading.Event | None = None
    asked: list[str | None] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.headers.get("Range"))
        if self.stall:
            self.stall.wait(30)
        if self.leads_to or self.status != 200:
            request.send_response(302 if self.leads_to else self.status)
            request.send_header("Location", self.leads_to or "")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body, start, size = self.content, 0, len(self.content)
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        still = request.headers.get("If-Range") in (None, self.tag)
        if asked and self.ranges and still:
            start = int(asked[1])
            if start >= size:
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{size}")
                request.end_headers()
                return
            body = body[start:]
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        else:
            request.send_response(200)
        if self.tag:
            request.send_header("ETag", self.tag)
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        body = body[: self.cut]
        self.sent.append(len(body))  # first, so that a client that has its bytes finds the count
        request.wfile.write(body)


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    behaviour = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # some tests hang up in the middle
                behaviour.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    behaviour.url = f"http://127.0.0.1:{running.server_port}/some/set.csv"
    yield behaviour
    if behaviour.stall:
        behaviour.stall.set()
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def dataset(server: Server) -> Dataset:
    return replace(
        catalogue()[0],
        name="set",
        file="set.csv",
        url=server.url,
        bytes=len(CONTENT),
        sha256=SUM,
        other_sha256=(),
    )


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# ── the catalogue ──


def test_the_catalogue_is_complete_and_consistent():
    names = [dataset.name for dataset in catalogue()]
    assert names == [
        *("ETTh1", "ETTh2", "ETTm1", "ETTm2"),
        *("exchange_rate", "weather", "electricity", "traffic", "illness"),
    ]
    for dataset in catalogue():
        assert re.fullmatch(r"[0-9a-f]{64}", dataset.sha256)
        assert dataset.url.startswith("https://")
        assert dataset.url.endswith("/" + dataset.file)
        assert dataset.pedigree
        if dataset.name.startswith("ETT"):
            per_day = {"1 h": 24, "15 min": 96}[dataset.step]
            assert dataset.split == (360 * per_day, 120 * per_day, 120 * per_day)
        else:
            assert sum(dataset.split) == dataset.rows
            np.testing.assert_allclose(
                np.array(dataset.split) / dataset.rows, [0.7, 0.1, 0.2], atol=2e-3
            )
    sums = [s for dataset in catalogue() for s in (dataset.sha256, *dataset.other_sha256)]
    assert len(set(sums)) == len(sums) == 12


def test_measured_sets_are_what_the_catalogue_says(real_data, tmp_path):
    for name in ("ETTh1", "exchange_rate", "weather"):
        [dataset] = [one for one in catalogue() if one.name == name]
        content = (real_data / dataset.file).read_bytes()
        (tmp_path / dataset.file).write_bytes(content)
        assert get(name, cache=tmp_path) == tmp_path / dataset.file
        lines = content.decode("latin-1").splitlines()
        assert (len(lines) - 1, lines[0].count(",")) == (dataset.rows, dataset.channels)
        unix = content.replace(b"\r\n", b"\n")
        copies = {
            len(c): hashlib.sha256(c).hexdigest() for c in (unix, unix.replace(b"\n", b"\r\n"))
        }
        assert copies.pop(dataset.bytes) == dataset.sha256
        assert tuple(copies.values()) == dataset.other_sha256


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"no data set named 'ETTh3'.*ETTh1, ETTh2.*illness"):
        get("ETTh3", cache=tmp_path)


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"LEVELHEAD_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/levelhead"),
        ("linux", {}, "/home/u/.cache/levelhead"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/u/Library/Caches/levelhead"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/levelhead"),
        ("win32", {}, "/home/u/AppData/Local/levelhead"),
    ],
)
def test_the_cache_lies_where_the_platform_wants_it(monkeypatch, platform, environment, expected):
    for name in ("LEVELHEAD_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(datasets.sys, "platform", platform)
    monkeypatch.setattr(datasets.Path, "home", lambda: Path("/home/u"))
    assert cache_folder() == Path(expected)


# ── downloads that go well ──


def test_a_set_is_downloaded_once_and_verified_whenever_it_is_asked_for(
    server, dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "deep" / "cache"))
    seen: list[tuple[int, int | None]] = []
    path = get(dataset, progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "deep" / "cache" / "set.csv"
    assert path.read_bytes() == CONTENT
    assert _left(path.parent) == ["set.csv"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert get(dataset) == path
    assert server.asked == [None]
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(StoredFileError, match=f"is not the expected file .*expected {SUM}.*delete"):
        get(dataset)
    assert server.asked == [None]


def test_a_set_of_the_catalogue_can_come_from_another_address(server, tmp_path):
    base = server.url.rpartition("/")[0]
    with pytest.raises(StoredFileError, match=f"holds {len(CONTENT)} bytes, 2589657 are expected"):
        get("etth1", cache=tmp_path, base_url=base + "/")
    path = get("ETTh1", cache=tmp_path, base_url=base, sha256=SUM.upper())
    assert path.name == "ETTh1.csv"
    assert path.read_bytes() == CONTENT


def test_an_answer_without_a_length_is_accepted(server, dataset, tmp_path):
    server.length = False
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT


# ── going on where it stopped ──


@pytest.mark.parametrize("tag", ['"one"', 'W/"weak"', None])
def test_a_truncated_download_goes_on_where_it_stopped(server, dataset, tmp_path, tag):
    server.cut, server.tag = 400_000, tag
    with pytest.raises(StoredFileError, match=f"stopped at 400000 of {len(CONTENT)} bytes: ask"):
        get(dataset, cache=tmp_path)
    assert _left(tmp_path) == ["set.csv.part", "set.csv.part.json"]
    server.cut = None
    seen: list[int] = []
    path = get(dataset, cache=tmp_path, progress=lambda done, _: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=400000-"]
    assert server.sent == [400_000, len(CONTENT) - 400_000]
    assert seen[0] > 400_000
    assert _left(tmp_path) == ["set.csv"]


def test_a_change_of_equal_size_is_noticed_by_the_checksum_or_the_tag(server, dataset, tmp_path):
    server.cut = 400_000
    with pytest.raises(StoredFileError, match="stopped at"):
        get(dataset, cache=tmp_path)
    server.content, server.cut, server.tag = CONTENT[::-1], None, '"two"'
    wanted = hashlib.sha256(server.content).hexdigest()
    assert get(dataset, cache=tmp_path, sha256=wanted).read_bytes() == server.content


def test_a_server_without_ranges_sends_the_whole_file_again(server, dataset, tmp_path):
    server.cut, server.ranges = 400_000, False
    with pytest.raises(StoredFileError, match="stopped at 400000"):
        get(dataset, cache=tmp_path)
    server.cut = None
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=400000-"]


@pytest.mark.parametrize("tag", ['"two"', None])
@pytest.mark.parametrize("size", [1_500_000, len(CONTENT), 300_000])
def test_a_file_that_changed_in_between_is_begun_anew(server, dataset, tmp_path, tag, size):
    dataset = replace(dataset, bytes=None, sha256=None)
    arguments = {"cache": tmp_path, "trust_on_first_use": True}
    server.cut = 400_000
    if tag is None:
        server.tag = None
    with pytest.raises(StoredFileError, match="stopped at"):
        get(dataset, **arguments)
    server.content, server.cut, server.tag = CONTENT[::-1].ljust(size, b"!")[:size], None, tag
    assert get(dataset, **arguments).read_bytes() == server.content


def test_a_part_of_another_address_is_not_continued(server, dataset, tmp_path):
    server.cut = 400_000
    with pytest.raises(StoredFileError, match="stopped at"):
        get(dataset, cache=tmp_path)
    server.cut = None
    other = replace(dataset, url=server.url + "?other")
    assert get(replace(other, file="set.csv"), cache=tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, None]


def test_a_complete_part_is_used_without_asking_again(server, dataset, tmp_path):
    (tmp_path / "set.csv.part").write_bytes(CONTENT)
    notes = {"url": server.url, "total": len(CONTENT), "validator": None}
    (tmp_path / "set.csv.part.json").write_text(json.dumps(notes))
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("notes", ["", "[]", '{"url": 3}'])
def test_a_part_of_unknown_origin_is_begun_anew(server, dataset, tmp_path, notes):
    (tmp_path / "set.csv.part").write_bytes(b"x" * 500)
    (tmp_path / "set.csv.part.json").write_text(notes)
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT
    assert server.asked == [None]


# ── downloads that do not ──


def test_a_tampered_file_is_deleted_and_both_sums_are_named(server, dataset, tmp_path):
    server.content = CONTENT[:-1] + b"x"
    found = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(StoredFileError, match=f"sha256 {found}, expected {SUM}") as caught:
        get(dataset, cache=tmp_path)
    assert _left(tmp_path) == []
    assert str(caught.value).count("\n") == 0
    server.content = CONTENT
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT


def test_a_part_that_was_tampered_with_does_not_survive(server, dataset, tmp_path):
    server.cut = 400_000
    with pytest.raises(StoredFileError, match="stopped at"):
        get(dataset, cache=tmp_path)
    part = tmp_path / "set.csv.part"
    part.write_bytes(b"x" * 400_000)
    server.cut = None
    with pytest.raises(StoredFileError, match=f"expected {SUM}"):
        get(dataset, cache=tmp_path)
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("length", [True, False])
def test_a_file_of_another_size_is_refused_before_it_is_complete(server, dataset, tmp_path, length):
    server.content, server.length = CONTENT * 3, length
    with pytest.raises(StoredFileError, match=f"{len(CONTENT)} are expected|more than"):
        get(dataset, cache=tmp_path)
    assert _left(tmp_path) == []


@pytest.mark.parametrize(("status", "words"), [(404, "404 .Not Found"), (503, "503")])
def test_an_error_of_the_server_is_one_sentence(server, dataset, tmp_path, status, words):
    server.status = status
    with pytest.raises(LevelheadError, match=f"answered {words}.*{re.escape(server.url)}"):
        get(dataset, cache=tmp_path)
    assert _left(tmp_path) == []


def test_no_network_is_one_sentence_and_keeps_what_has_arrived(server, dataset, tmp_path):
    server.cut = 400_000
    with pytest.raises(StoredFileError, match="stopped at"):
        get(dataset, cache=tmp_path)
    notes = tmp_path / "set.csv.part.json"
    nobody = "http://127.0.0.1:9/set.csv"  # port 9 of this machine: nobody listens
    notes.write_text(notes.read_text().replace(server.url, nobody))
    with pytest.raises(LevelheadError, match=r"cannot be reached \(Connection refused\)"):
        get(replace(dataset, url=nobody), cache=tmp_path)
    assert (tmp_path / "set.csv.part").read_bytes() == CONTENT[:400_000]


def test_a_server_that_falls_silent_is_given_up(server, dataset, tmp_path):
    server.stall = threading.Event()
    with pytest.raises(LevelheadError, match=r"cannot be reached \(timed out\)"):
        get(dataset, cache=tmp_path, timeout=0.2)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://host/set.csv", "set.csv"])
def test_only_http_addresses_are_used(dataset, tmp_path, url):
    with pytest.raises(InputError, match="http or https is expected"):
        get(replace(dataset, url=url), cache=tmp_path)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/set.csv"])
def test_a_redirection_does_not_lead_out_of_http(server, dataset, tmp_path, target):
    server.leads_to = target
    with pytest.raises(LevelheadError, match=r"leads on to|answered 302"):
        get(dataset, cache=tmp_path)
    assert _left(tmp_path) == []


def test_a_disk_that_refuses_is_one_sentence(server, dataset, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LevelheadError, match="could not be written"):
        get(dataset, cache=tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(server, dataset, tmp_path):
    (tmp_path / "set.csv.part").symlink_to("/dev/full")
    with pytest.raises(LevelheadError, match=r"could not be written \(No space left on device\)"):
        get(dataset, cache=tmp_path)
    assert not (tmp_path / "set.csv").exists()


def test_a_set_without_an_address_says_where_to_put_it(dataset, tmp_path):
    dataset = replace(dataset, url=None, source="ask the authors")
    with pytest.raises(InputError, match=r"obtain set\.csv \(ask the authors\) and put it into"):
        get(dataset, cache=tmp_path)
    (tmp_path / "set.csv").write_bytes(CONTENT)
    assert get(dataset, cache=tmp_path) == tmp_path / "set.csv"


# ── sets without a checksum ──


def test_without_a_checksum_nothing_is_downloaded_silently(server, dataset, tmp_path):
    dataset = replace(dataset, sha256=None)
    for present in (False, True):
        if present:
            (tmp_path / "set.csv").write_bytes(CONTENT)
        with pytest.raises(InputError, match="No checksum of set is known: give sha256=…"):
            get(dataset, cache=tmp_path)
    assert server.asked == []
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        get(dataset, cache=tmp_path, sha256="abc")


@pytest.mark.parametrize("by_hand", [False, True])
def test_trust_on_first_use_holds_the_file_to_its_first_checksum(
    server, dataset, tmp_path, by_hand
):
    dataset = replace(dataset, sha256=None)
    if by_hand:
        (tmp_path / "set.csv").write_bytes(CONTENT)
    assert remembered_checksum(dataset, cache=tmp_path) is None
    path = get(dataset, cache=tmp_path, trust_on_first_use=True)
    assert remembered_checksum(dataset, cache=tmp_path) == SUM
    assert (tmp_path / "set.csv.sha256").read_text() == f"{SUM}  set.csv\n"
    assert get(dataset, cache=tmp_path) == path
    path.write_bytes(b"altered")
    for trust in (False, True):
        with pytest.raises(StoredFileError, match=f"expected {SUM}"):
            get(dataset, cache=tmp_path, trust_on_first_use=trust)
    path.unlink()
    server.content = CONTENT[::-1]
    with pytest.raises(StoredFileError, match=f"expected {SUM}"):
        get(dataset, cache=tmp_path, trust_on_first_use=True)


def test_a_given_checksum_is_remembered_for_a_set_that_has_none(server, dataset, tmp_path):
    dataset = replace(dataset, sha256=None)
    get(dataset, cache=tmp_path, sha256=SUM)
    assert get(dataset, cache=tmp_path).read_bytes() == CONTENT


# ── several at once ──


def test_several_downloads_at_once_do_not_disturb_each_other(server, dataset, tmp_path):
    all_asked = threading.Barrier(4, timeout=30)
    first = threading.local()

    def meet(done: int, total: int | None) -> None:
        if not hasattr(first, "met"):  # every thread is in the middle of its download here
            first.met = True
            all_asked.wait()

    results: list[bytes] = []

    def work() -> None:
        results.append(get(dataset, cache=tmp_path, progress=meet).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [CONTENT] * 4
    assert server.asked == [None] * 4
    assert _left(tmp_path) == ["set.csv"]


def test_the_catalogue_needs_nothing_heavy():
    code = "import sys, levelhead.data.datasets; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "levelhead.data.datasets" in done.stdout.split()
    assert not {"torch", "pandas", "scipy", "sklearn", "numpy"} & set(done.stdout.split())
