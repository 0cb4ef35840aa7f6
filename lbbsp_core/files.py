"""Files that are written as a whole, and the check beforehand that they can be written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the other end of a pipe

UNFINISHED: Final = ".unfinished"
"""End of the name under which a file is written; a process that is killed leaves one behind."""


def write_whole(
    path: str | Path, content: bytes | Callable[[BinaryIO], object], *, durable: bool = False
) -> None:
    """Writes a file, which is complete or stays as it was. Its folder is created.

    Several processes may write to one name at the same time: the file of the last one stays. A link
    is followed; what is no regular file, such as a device, is written to itself.

    Args:
        path: Path of the file.
        content: Content of the file, or what writes it to the open file.
        durable: The file is on the disk at the end, also if the machine then fails.
    """
    write = content if callable(content) else lambda file: file.write(content)
    try:
        if _is_device(path):
            with open(path, "wb") as device:
                write(device)
            return
        unfinished, final = _names(path)
        try:
            with unfinished.open("xb") as file:
                write(file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(final)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        if durable:
            _flush_names(final.parent)
    except OSError as error:
        if error.errno is not None:  # that of a full disk names no file
            error.filename = str(path)
        raise


def require_writable(name: str, path: str | Path, *, is_folder: bool = False) -> None:
    """Checks that a file can be written, before a long computation.

    It tries what `write_whole` does, so that both agree on any file system, in a folder of its own,
    so that it leaves nothing behind and several processes do not disturb each other.

    Args:
        name: Name of the option, for the error.
        path: Path of the file.
        is_folder: It is that of a folder for files, which may have to be created.

    Raises:
        ValueError: The file cannot be written; names the reason.
    """
    if os.path.isdir(path) and not is_folder:
        raise ValueError(f"{name} must be a file, but {path} is a folder: name a file in it")
    try:
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write it")
        if is_folder or not _is_device(path):
            whole = Path(os.path.realpath(path), "file" if is_folder else "")
            existing = next(folder for folder in whole.parents if os.path.lexists(folder))
            if not existing.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a folder")
            with TemporaryDirectory(dir=existing, suffix=UNFINISHED) as trial:
                unfinished, _ = _names(trial / whole.relative_to(existing))
                unfinished.open("xb").close()
    except (OSError, ValueError) as error:  # ValueError: of a null character
        reason = getattr(error, "strerror", error)
        raise ValueError(
            f"{name} cannot be written to {path}: {reason}: name another path"
        ) from None


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a file to read it; a pipe or a device, which may never end, is an OSError."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: str | Path) -> bytes:
    """Reads a file as a whole.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is larger than ``LBBSP_LARGEST_FILE``, in bytes; 2 GiB if that is not set.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > (most := _largest()):
            raise ValueError(
                f"{path} has {size:,} bytes, more than {most:,}: if that is right, set "
                f"LBBSP_LARGEST_FILE={size} in the environment"
            )
        return file.read()


def _largest() -> int:
    text = os.environ.get("LBBSP_LARGEST_FILE", "") or str(1 << 31)
    if not text.isdecimal():
        raise ValueError(f"LBBSP_LARGEST_FILE must be a number of bytes, got {text!r}")
    return int(text)


def is_file_name(text: str, suffix: str) -> bool:
    """Returns whether a text that may be the name of something else names a file.

    Args:
        text: Text of an option.
        suffix: Suffix of the files that the option takes.
    """
    return os.sep in text or text.endswith(suffix) or os.path.exists(text)


def _is_device(path: str | Path) -> bool:
    """Returns whether a path is that of something that a file cannot replace."""
    return os.path.exists(path) and not os.path.isfile(path)


def _names(path: str | Path) -> tuple[Path, Path]:
    """Creates a file's folder, and returns its names while it is written and afterwards."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}{UNFINISHED}"), path


def _flush_names(folder: Path) -> None:
    """Flushes the names of files in a folder to the disk, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
