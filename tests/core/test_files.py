"""Files that are written as a whole, and the check that agrees with the writing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from waits import HANG_SECONDS

from lbbsp_core.files import require_writable, write_whole


def test_a_file_is_complete_or_stays_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "new" / "deep" / "file", tmp_path / "link"
    link.symlink_to(path)
    write_whole(link, b"old", durable=True)

    def fail(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
    write_whole(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


def test_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    threads = [threading.Thread(target=write_whole, args=(path, text)) for text in texts * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert path.read_bytes() in texts
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_is_written_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    require_writable("--json", tmp_path / "link")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "link", b"text")
    require_writable("--json", os.devnull)
    write_whole(os.devnull, b"text")
    assert Path(os.devnull).is_char_device()
    monkeypatch.delattr(Path, "open")  # no file can be created beside it
    require_writable("--json", os.devnull)


WRITABLE = ["x", "file", "new/x", "new/deep/x", "link", "folder/x", "folder/../x", "é \n"]
REFUSED = {
    "folder": "a folder",
    ".": "a folder",
    "file/x": "/(file|null) is not a folder",
    "file/below/x": "/(file|null) is not a folder",
    "/dev/null/x": "/(file|null) is not a folder",
    "/proc/new/x": "No such file",
    "x" * 300: "too long",
    "a\0b": "null",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("new/linked")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("path", WRITABLE)
def test_what_passes_the_check_can_be_written(here: Path, path: str) -> None:
    before = names(here)
    require_writable("--json", path)
    assert names(here) == before
    write_whole(path, b"text")
    assert Path(path).read_bytes() == b"text"


def test_a_folder_that_another_process_creates_meanwhile_stays(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_later(path: Path, mode: str) -> object:
        (here / "new").mkdir(exist_ok=True)
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", open_later)
    require_writable("--json", "new/x")
    assert os.listdir("new") == []


@pytest.mark.parametrize("path", REFUSED)
def test_what_fails_the_check_cannot_be_written(here: Path, path: str) -> None:
    before = names(here)
    with pytest.raises(ValueError, match=f"^--json .*{REFUSED[path]}.*: name a"):
        require_writable("--json", path)
    with pytest.raises((OSError, ValueError)):
        write_whole(path, b"text")
    assert names(here) == before


def test_a_folder_for_files_may_have_any_content(here: Path) -> None:
    (here / "folder" / "file").mkdir()
    before = names(here)
    for path in ("folder", "new/deep", "."):
        require_writable("--run-dir", path, is_folder=True)
    for path in ("file", "file/below", os.devnull):
        with pytest.raises(ValueError, match=f"written to {path}: /.* is not a folder: name"):
            require_writable("--run-dir", path, is_folder=True)
    assert names(here) == before


@pytest.mark.parametrize("place", ["file", "folder/x", "new/x"])
def test_permissions_are_checked(here: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so that what the system says is replaced."""

    def refuse(*_: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "here")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"^--json cannot be written to .*ermission.*: name"):
        require_writable("--json", place)
