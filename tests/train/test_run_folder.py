"""Run folders: made once, owned by one living job; files in them are whole or absent."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.durable import HeldLock, is_dead, publish_new_file
from slipstream.errors import RunFolderError
from slipstream.train.run_folder import (
    claim_run_folder,
    create_run_folder,
    is_claimed,
    refuse_claimed,
    write_text_atomic,
    writing,
)


def test_a_new_folder_and_an_empty_one_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = create_run_folder(Path("runs/one"))
    assert path == tmp_path / "runs" / "one"
    assert create_run_folder(path) == path
    assert list(path.iterdir()) == []


def test_content_is_never_overwritten(tmp_path: Path) -> None:
    for name in ("summary.json", "a", "b", "c"):
        (tmp_path / name).write_text(name)
    with pytest.raises(RunFolderError, match=r"is not empty \(a, b, c, \.\.\.\)") as error:
        create_run_folder(tmp_path)
    assert "--resume" not in str(error.value) and "remove" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "summary.json"]


def test_the_way_out_of_an_old_run_is_one_that_can_be_gone(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunFolderError, match=r"no checkpoint, so --resume cannot .* remove the"):
        create_run_folder(tmp_path)
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    with pytest.raises(RunFolderError, match="go on with that run by --resume") as error:
        create_run_folder(tmp_path)
    assert "remove" not in str(error.value)


def test_a_run_that_goes_on_is_not_offered_another_folder(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with claim_run_folder(tmp_path):
        with pytest.raises(RunFolderError, match=r"still running; stop that job first\.$"):
            claim_run_folder(tmp_path, resumed=True)
        with pytest.raises(RunFolderError, match=r"still running; stop that job first\.$"):
            refuse_claimed(tmp_path)
        (tmp_path / "recipe.toml").write_text("")
        with pytest.raises(RunFolderError, match=r"still running; .* --run-folder") as error:
            create_run_folder(tmp_path)
        assert "remove" not in str(error.value)
    with (
        pytest.raises(RunFolderError, match=r"free space or fix its permissions\.$"),
        writing(tmp_path, resumed=True),
    ):
        raise full


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match=r"run folder .*file.* cannot be"):
        create_run_folder(Path(f"{tmp_path}/file{below}"))
    assert (tmp_path / "file").read_text() == "mine"


def test_where_nothing_can_be_written_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere, so the file system's answer is given in its place.
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(RunFolderError, match=r"cannot be written \(Read-only file system\)"):
        create_run_folder(tmp_path / "run")
    with pytest.raises(RunFolderError, match="cannot be written"):
        create_run_folder(Path("/proc/run"))


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="has a name that is not UTF-8"):
        create_run_folder(tmp_path / "caf\udce9")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_told_by_the_folder(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(RunFolderError, match=r"\(No space left on device\)"), writing(tmp_path):
        raise full


def test_one_living_job_owns_a_folder(tmp_path: Path) -> None:
    owner = claim_run_folder(tmp_path)
    assert is_claimed(tmp_path)
    with pytest.raises(RunFolderError, match="belongs to a job that is still running"):
        claim_run_folder(tmp_path)
    with pytest.raises(RunFolderError, match="belongs to a job that is still running"):
        create_run_folder(tmp_path)
    owner.release()
    owner.release()
    assert not is_claimed(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunFolderError, match="cannot be written"):
        claim_run_folder(tmp_path / "absent")


@pytest.mark.processes
def test_a_killed_owner_blocks_nobody(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from slipstream.train.run_folder import claim_run_folder\n"
        "held = claim_run_folder(Path(sys.argv[1]))\n"
        "Path(sys.argv[1], '.partial-0123-summary.json').write_text('half')\n"
        "assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment)
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert not is_claimed(tmp_path)
    assert create_run_folder(tmp_path) == tmp_path
    with claim_run_folder(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [".owner.lock"]
    assert list(tmp_path.iterdir()) == []


def test_text_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")
    write_text_atomic(path, "new \N{GREEK SMALL LETTER MU}")
    assert path.read_text() == "new \N{GREEK SMALL LETTER MU}"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_never_replaces_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    temporary, final = tmp_path / "temporary", tmp_path / "final"
    temporary.write_text("first")
    publish_new_file(temporary, final)
    assert not temporary.exists()
    temporary.write_text("second")
    with pytest.raises(FileExistsError):
        publish_new_file(temporary, final)
    assert final.read_text() == "first"


def test_without_locks_nobody_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = HeldLock(tmp_path / "lock")
    assert not lock.supported
    assert is_dead(tmp_path / "lock") is None
    lock.release()
    assert is_dead(tmp_path / "lock") is True
