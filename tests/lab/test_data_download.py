"""Downloads from a server on loopback: whole, broken and resumed, without ranges, corrupted, offline."""

import gzip
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedlaw.data import DataError, download, fetch
from fedlaw.data.catalog import SOURCES, Remote, Source

CONTENT = bytes(i * 7919 % 251 for i in range(300_000))
NAME = "images.gz"


class Server:
    """Serves `files`; `ranges` off ignores Range; `breaks` closes the next so many answers halfway."""

    def __init__(self):
        self.files = {}
        self.ranges, self.breaks, self.requests = True, 0, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, handler):
        wanted = handler.headers.get("Range")
        self.requests.append(wanted)
        content = self.files.get(handler.path)
        if content is None:
            handler.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        body = content[start:]
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if self.breaks:
            self.breaks -= 1
            body = body[: len(body) // 2]
        handler.wfile.write(body)

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("FEDLAW_DATA_MIRROR", raising=False)
    running = Server()
    yield running
    running.close()


@pytest.fixture
def offer(server, monkeypatch):
    """Make the data set 'tiny' known, of one file with the right digest, and serve it (or something else)."""

    def add(content=CONTENT, served=None, members=None):
        remote = Remote(NAME, len(content), hashlib.sha256(content).hexdigest(), members or {})
        monkeypatch.setitem(
            SOURCES, "tiny", Source((f"{server.url}/tiny",), "Tiny" if not members else "", (remote,))
        )
        server.files[f"/tiny/{NAME}"] = content if served is None else served

    return add


def test_a_download_arrives_whole_and_reports_progress(server, offer, tmp_path):
    offer()
    seen = []
    folder = download("tiny", tmp_path, progress=lambda *step: seen.append(step))
    assert folder == tmp_path / "Tiny"
    assert (folder / NAME).read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert seen[0] == (NAME, 0, len(CONTENT))
    assert seen[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_what_is_there_and_right_is_not_fetched_again(server, offer, tmp_path):
    offer()
    download("tiny", tmp_path)
    asked = len(server.requests)
    download("tiny", tmp_path)
    assert len(server.requests) == asked
    (tmp_path / "Tiny" / NAME).write_bytes(b"damaged")
    download("tiny", tmp_path)
    assert (tmp_path / "Tiny" / NAME).read_bytes() == CONTENT


def test_a_connection_that_breaks_is_taken_up_where_it_broke(server, offer, tmp_path):
    offer()
    server.breaks = 2
    folder = download("tiny", tmp_path)
    assert (folder / NAME).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=150000-", "bytes=225000-"]


def test_an_interrupted_download_is_resumed_by_the_next_call(server, offer, tmp_path):
    offer()
    (tmp_path / "Tiny").mkdir()
    (tmp_path / "Tiny" / f"{NAME}.part").write_bytes(CONTENT[:1000])
    folder = download("tiny", tmp_path)
    assert server.requests == ["bytes=1000-"]
    assert (folder / NAME).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_it_all_again(server, offer, tmp_path):
    offer()
    server.ranges, server.breaks = False, 1
    folder = download("tiny", tmp_path)
    assert server.requests == [None, "bytes=150000-"]
    assert (folder / NAME).read_bytes() == CONTENT


def test_a_server_that_always_breaks_leaves_what_came_and_says_so(server, offer, tmp_path):
    offer()
    server.breaks = 10**6
    with pytest.raises(DataError, match="of 300000 bytes are kept, so check the connection and run the same"):
        download("tiny", tmp_path)
    part = tmp_path / "Tiny" / f"{NAME}.part"
    assert 150_000 < part.stat().st_size < 300_000
    server.breaks = 0
    download("tiny", tmp_path)
    assert (tmp_path / "Tiny" / NAME).read_bytes() == CONTENT
    assert not part.exists()


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"?", b"!" * len(CONTENT)], ids=["last byte", "all"])
def test_wrong_content_is_removed(server, offer, tmp_path, served):
    offer(CONTENT, served)
    with pytest.raises(DataError, match="wrong digest") as caught:
        download("tiny", tmp_path)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "Tiny").iterdir()) == []


def test_a_part_of_something_else_is_thrown_away(server, offer, tmp_path):
    offer()
    (tmp_path / "Tiny").mkdir()
    part = tmp_path / "Tiny" / f"{NAME}.part"
    part.write_bytes(bytes(len(CONTENT) + 5))
    download("tiny", tmp_path)
    assert (tmp_path / "Tiny" / NAME).read_bytes() == CONTENT
    assert server.requests == [None]


def test_a_part_longer_than_the_server_s_file_starts_again(server, offer, tmp_path):
    offer(CONTENT, CONTENT[:1000])
    (tmp_path / "Tiny").mkdir()
    (tmp_path / "Tiny" / f"{NAME}.part").write_bytes(bytes(2000))
    with pytest.raises(DataError, match="cannot download"):
        download("tiny", tmp_path)


def test_no_connection_is_one_clear_line(tmp_path, monkeypatch, server, offer):
    offer()
    server.close()
    with pytest.raises(DataError) as caught:
        download("tiny", tmp_path, timeout=2)
    message = str(caught.value)
    assert "\n" not in message
    for part in (NAME, "127.0.0.1", "refused", "check the connection", str(tmp_path)):
        assert part in message


def test_the_next_address_is_tried(server, offer, tmp_path, monkeypatch):
    offer()
    tiny = SOURCES["tiny"]
    monkeypatch.setitem(
        SOURCES, "tiny", Source((f"{server.url}/nothing", *tiny.bases), tiny.folder, tiny.files)
    )
    assert (download("tiny", tmp_path) / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_mirror_replaces_the_canonical_addresses(server, offer, tmp_path, monkeypatch, by):
    offer()
    server.files = {f"/copy/tiny/{NAME}": CONTENT}
    if by == "environment":
        monkeypatch.setenv("FEDLAW_DATA_MIRROR", f"{server.url}/copy/")
    download("tiny", tmp_path, mirror=f"{server.url}/copy" if by == "argument" else None)
    assert (tmp_path / "Tiny" / NAME).read_bytes() == CONTENT


def test_only_http_addresses_are_opened(offer, tmp_path):
    offer()
    with pytest.raises(DataError, match="http or https"):
        download("tiny", tmp_path, mirror="file:///etc")


def archive(entries):
    """A tar.gz of (name, bytes) pairs and of ready TarInfo entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return buffer.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


MEMBERS = {"set/train": hashlib.md5(b"a" * 100).hexdigest(), "set/test": hashlib.md5(b"b" * 50).hexdigest()}
WANTED = [("set/train", b"a" * 100), ("set/test", b"b" * 50)]


def test_of_an_archive_only_what_is_expected_is_taken_out(server, offer, tmp_path):
    root = tmp_path / "data"
    hostile = [
        ("../escaped", b"x"),
        (str(tmp_path / "absolute"), b"x"),
        ("set/readme.html", b"x"),
        link("set/x", "/etc"),
    ]
    offer(archive([*hostile, *WANTED]), members=MEMBERS)
    assert download("tiny", root) == root / "set"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "data/set/test",
        "data/set/train",
    ]
    asked = len(server.requests)
    download("tiny", root)  # the archive is gone; the files' own digests say that all is there
    assert len(server.requests) == asked


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE], ids=["sym", "hard", "fifo"]
)
def test_an_expected_name_that_is_no_file_is_not_taken(server, offer, tmp_path, kind):
    offer(archive([link("set/train", "/etc/passwd", kind), WANTED[1]]), members=MEMBERS)
    with pytest.raises(DataError, match="has no set/train"):
        download("tiny", tmp_path)
    assert not (tmp_path / "set" / "train").exists()


def test_a_member_that_is_too_large_is_not_written(server, offer, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_MEMBER_BYTES", 99)
    offer(archive(WANTED), members=MEMBERS)
    with pytest.raises(DataError, match="has no set/train"):
        download("tiny", tmp_path)


def test_a_damaged_archive_is_said(server, offer, tmp_path):
    for content in (b"no archive", gzip.compress(b"no tar"), archive(WANTED)[:-30]):
        offer(content, members=MEMBERS)
        with pytest.raises(DataError, match="remove it and run the same command again"):
            download("tiny", tmp_path)


def test_unknown_names_and_unwritable_folders(offer, tmp_path, monkeypatch):
    offer()
    with pytest.raises(DataError, match="there are: mnist"):
        download("imagenet", tmp_path)
    with pytest.raises(DataError, match="nothing to get"):
        download("digits", tmp_path)
    monkeypatch.delenv("FEDLAW_DATA", raising=False)
    with pytest.raises(DataError, match="--data-dir"):
        download("mnist")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"--data-dir .*cannot write there"):
        download("tiny", tmp_path / "file")


def test_every_known_file_has_a_size_and_digests():
    for name, source in SOURCES.items():
        for remote in source.files:
            assert remote.size > 1000, name
            assert len(bytes.fromhex(remote.sha256)) == 32
            assert all(len(bytes.fromhex(md5)) == 16 for md5 in remote.members.values())
        assert all(base.startswith("http") for base in source.bases)
