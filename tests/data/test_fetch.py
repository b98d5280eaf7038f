"""Fetching: both ways with stand-ins for the network, failures, and several jobs at once."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from slipstream.data import fashion, fetch, fetch_ways, prepare
from slipstream.data.fetch_ways import WayFailed, from_debian, from_torchvision
from slipstream.errors import DataError

WriteFashion = Callable[..., dict[str, str]]


@pytest.fixture
def published(tmp_path: Path, write_fashion: WriteFashion, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files that pass for the published ones."""
    folder = tmp_path / "published"
    for name, digest in write_fashion(folder).items():
        monkeypatch.setitem(fashion.PUBLISHED, name, digest)
    return folder


@pytest.fixture
def fake_tools(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`apt-get` and `dpkg-deb` that append their arguments to calls.txt and need no network.

    The downloads fail as without package lists until `update` was called, where the file
    no-lists exists; everything fails where the file offline exists.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text(
        f"""#!/bin/sh
echo "apt-get $*" >> {tmp_path}/calls.txt
if [ -e {tmp_path}/offline ]; then echo "E: no network here"; exit 100; fi
case "$*" in
  *update*) rm -f {tmp_path}/no-lists ;;
  *download*)
    if [ -e {tmp_path}/no-lists ]; then echo "E: Unable to locate package"; exit 100; fi
    : > dataset-fashion-mnist_1_all.deb ;;
esac
"""
    )
    (tools / "dpkg-deb").write_text(
        f"""#!/bin/sh
echo "dpkg-deb $*" >> {tmp_path}/calls.txt
mkdir -p "$3/usr/share/datasets" && cp -r {published} "$3/usr/share/datasets/fashion-mnist"
"""
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path


def fails(way: str) -> Callable[[Path], Path]:
    def way_that_fails(_: Path) -> Path:
        raise WayFailed(f"{way}: no network")

    return way_that_fails


@pytest.mark.usefixtures("no_system_folder")
@pytest.mark.parametrize("lists", [True, False])
def test_the_debian_package_is_unpacked_into_the_cache(fake_tools: Path, lists: bool) -> None:
    if not lists:
        (fake_tools / "no-lists").touch()
    cache, notes = fake_tools / "deep" / "cache", list[str]()
    assert prepare("fashion", cache=cache, note=notes.append) == cache / "fashion-mnist"
    assert sorted(os.listdir(cache)) == [".fetching.lock", "fashion-mnist"]
    names = sorted(f"{name}.gz" for name in fashion.PUBLISHED)
    assert sorted(os.listdir(cache / "fashion-mnist")) == names
    assert len(notes) == 1 and "fetching Fashion-MNIST" in notes[0]
    calls = (fake_tools / "calls.txt").read_text().splitlines()
    assert len(calls) == (2 if lists else 4)
    if not lists:
        assert all(f"Dir::State::Lists={cache}" in call for call in calls[1:3])
    # A second time nothing is fetched.
    prepare("fashion", cache=cache, note=notes.append)
    assert len(notes) == 1


@pytest.mark.usefixtures("no_system_folder")
def test_a_failure_of_both_ways_names_both_and_the_ways_out(
    fake_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_tools / "offline").touch()
    monkeypatch.setattr(fetch, "from_torchvision", fails("torchvision's download"))
    with pytest.raises(DataError) as caught:
        prepare("fashion", cache=fake_tools / "cache", note=lambda _: None)
    for part in (
        "apt-get failed (E: no network here)",
        "torchvision's download: no network",
        "apt-get install dataset-fashion-mnist",
        "data.folder=",
    ):
        assert part in str(caught.value)
    assert os.listdir(fake_tools / "cache") == [".fetching.lock"]


def test_missing_and_frozen_tools_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(WayFailed, match="there is no apt-get"):
        from_debian(tmp_path)
    for name in ("apt-get", "dpkg-deb"):
        (tools / name).write_text("#!/bin/sh\nexec /bin/sleep 60\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr(fetch_ways, "_DOWNLOAD_SECONDS", 0.1)
    monkeypatch.setattr(fetch_ways, "_UPDATE_SECONDS", 0.1)
    with pytest.raises(WayFailed, match="apt-get did not end within"):
        from_debian(tmp_path)


@pytest.fixture
def mirror(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serves the small files on this machine as torchvision's source."""
    from torchvision.datasets import FashionMNIST

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing on standard error."""

    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(published)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in published.iterdir()]
    monkeypatch.setattr(FashionMNIST, "resources", sums)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("no_system_folder", "mirror")
def test_torchvisions_download_is_used_where_there_is_no_apt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "from_debian", fails("Debian package"))
    found = prepare("fashion", cache=tmp_path / "cache", note=lambda _: None)
    assert found == tmp_path / "cache" / "fashion-mnist"
    assert capsys.readouterr().out == ""


def test_a_source_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(fetch_ways, "_CONNECT_SECONDS", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{port}/"])
        with pytest.raises(WayFailed, match=r"torchvision's download: .*timed out"):
            from_torchvision(tmp_path)
    assert socket.getdefaulttimeout() is None


def copies(published: Path, calls: list[str], spoil: str = "") -> Callable[[Path], Path]:
    """A way that copies the files, except `spoil`, whose content it changes."""

    def way(work: Path) -> Path:
        calls.append(work.name)
        folder = work / "fetched"
        folder.mkdir()
        for path in published.iterdir():
            content = path.read_bytes()
            if path.name == spoil:
                content = gzip.compress(gzip.decompress(content)[:-1] + b"\x09")
            (folder / path.name).write_bytes(content)
        return folder

    return way


@pytest.mark.usefixtures("no_system_folder")
def test_what_is_not_the_published_data_is_not_kept(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    spoilt = copies(published, calls, spoil="train-labels-idx1-ubyte.gz")
    monkeypatch.setattr(fetch, "from_debian", spoilt)
    monkeypatch.setattr(fetch, "from_torchvision", fails("torchvision's download"))
    with pytest.raises(DataError, match=r"not the published Fashion-MNIST.*it was refused"):
        prepare("fashion", cache=tmp_path / "cache", note=lambda _: None)
    assert os.listdir(tmp_path / "cache") == [".fetching.lock"]
    (published / "train-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setattr(fetch, "from_debian", copies(published, calls))
    with pytest.raises(DataError, match=r"lacks the file train-labels-idx1-ubyte\.gz"):
        prepare("fashion", cache=tmp_path / "cache", note=lambda _: None)


@pytest.mark.usefixtures("no_system_folder")
def test_jobs_at_the_same_time_fetch_once_and_all_succeed(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fetch, "from_debian", copies(published, calls))
    found: list[Path | None] = []
    jobs = [
        threading.Thread(
            target=lambda: found.append(
                prepare("fashion", cache=tmp_path / "cache", note=lambda _: None)
            )
        )
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert found == [tmp_path / "cache" / "fashion-mnist"] * 4
    assert len(calls) == 1


@pytest.mark.usefixtures("no_system_folder")
def test_without_locks_the_second_job_uses_what_the_first_put_there(
    tmp_path: Path, published: Path, write_fashion: WriteFashion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    cache, calls = tmp_path / "cache", list[str]()
    cache.mkdir()
    (cache / ".fetching-alive").mkdir()

    def overtaken(work: Path) -> Path:
        write_fashion(cache / "fashion-mnist")
        return copies(published, calls)(work)

    monkeypatch.setattr(fetch, "from_debian", overtaken)
    assert prepare("fashion", cache=cache, note=lambda _: None) == cache / "fashion-mnist"
    # Without the lock nobody knows whose folder that is.
    assert (cache / ".fetching-alive").exists()


@pytest.mark.usefixtures("no_system_folder")
def test_what_a_killed_job_left_is_removed(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "from_debian", copies(published, []))
    cache = tmp_path / "cache"
    (cache / ".fetching-dead").mkdir(parents=True)
    (cache / ".fetching-dead" / "half.deb").write_bytes(b"half")
    prepare("fashion", cache=cache, note=lambda _: None)
    assert sorted(os.listdir(cache)) == [".fetching.lock", "fashion-mnist"]


@pytest.mark.usefixtures("no_system_folder", "published")
def test_an_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the cache folder .*file/cache cannot be used") as caught:
        prepare("fashion", cache=tmp_path / "file" / "cache", note=lambda _: None)
    assert "XDG_CACHE_HOME" in str(caught.value)


@pytest.mark.usefixtures("no_system_folder", "published")
def test_waiting_for_another_job_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fetch, "_LOCK_SECONDS", 0.0)
    notes: list[str] = []
    with (tmp_path / ".fetching.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another job has been fetching"):
            prepare("fashion", cache=tmp_path, note=notes.append)
    assert len(notes) == 1 and "waiting for another job" in notes[0]
