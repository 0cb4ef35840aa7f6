"""Checkpoints are complete or absent, whatever interrupts a write or damages a file."""

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbbsp_core.runtime.checkpoint.checkpoint import (
    FORMAT,
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

WRITES = {"open", "mkdir", "write", "flush", "fsync", "replace", "rename", "close", "unlink"}
"""C functions before each of which a process is killed: those that change what is on disk."""


def checkpoint(step=7):
    rng = np.random.default_rng(step)
    arrays = {"dense/kernel": rng.normal(size=(40, 30)), "seed": np.array([1, 2], np.uint32)}
    return Checkpoint(step, {"seed": 0}, {"plans": [[3, 5]], "x": 0.1 + step}, arrays)


def assert_same(found, expected):
    assert (found.step, found.facts, found.state) == (expected.step, expected.facts, expected.state)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_it_is_read_as_it_was_written(tmp_path):
    write_checkpoint(tmp_path / "new" / "folder", checkpoint())
    assert_same(newest_checkpoint(tmp_path / "new" / "folder"), checkpoint())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_numpy_lacks_are_kept(tmp_path, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(6.0).reshape(2, 3).astype(getattr(ml_dtypes, name))
    write_checkpoint(tmp_path, Checkpoint(1, arrays={"x": values, "scalar": values[1, 2]}))
    found = newest_checkpoint(tmp_path).arrays
    assert found["x"].dtype == found["scalar"].dtype == values.dtype
    np.testing.assert_array_equal(found["x"], values)
    assert found["scalar"].shape == ()


def test_there_is_none_in_a_folder_that_is_empty_or_missing(tmp_path):
    (tmp_path / "step-1.npz.bak").touch()
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


def test_the_two_newest_are_kept(tmp_path):
    for step in (9, 10, 100, 1_000_000_000):
        write_checkpoint(tmp_path, checkpoint(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000100.npz",
        "step-1000000000.npz",
    ]
    assert newest_checkpoint(tmp_path).step == 1_000_000_000


def test_later_ones_of_another_training_are_kept_under_another_name(tmp_path, caplog):
    for step in (100, 200, 50):
        write_checkpoint(tmp_path, checkpoint(step))
    assert newest_checkpoint(tmp_path).step == 50
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000050.npz",
        "step-000000100.npz.replaced",
        "step-000000200.npz.replaced",
    ]
    assert "step-000000200.npz is of another training" in caplog.text


def test_the_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_checkpoint(tmp_path, checkpoint())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_the_old_or_the_new_one(tmp_path):
    outcomes = []
    for step in (1, 2):
        write_checkpoint(tmp_path / "before", checkpoint(step))
    for number in range(1000):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        killed = _write_and_die(folder, checkpoint(3), number)
        found = newest_checkpoint(folder)
        outcomes.append(found.step)
        assert_same(found, checkpoint(found.step))
        if not killed:
            break
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (2, 3)
    write_checkpoint(tmp_path / "0", checkpoint(4))
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == [
        "step-000000002.npz",
        "step-000000004.npz",
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of zipfile
def test_an_error_of_any_call_leaves_the_old_or_the_new_one_and_nothing_half_written(tmp_path):
    failed = []
    for number in range(1000):
        folder = tmp_path / str(number)
        write_checkpoint(folder, checkpoint(1))
        failed.append(_write_and_fail(folder, checkpoint(2), number))
        names = sorted(path.name for path in folder.iterdir())
        found = newest_checkpoint(folder)
        assert_same(found, checkpoint(found.step))
        if failed[-1] is None:
            break
        if failed[-1] != "unlink":  # the file that failed could not be removed either
            assert names in (["step-000000001.npz"], ["step-000000001.npz", "step-000000002.npz"])
    assert {"open", "mkdir", "write", "fsync", "replace", "close", None} <= set(failed)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_a_damaged_one_is_skipped_with_its_name_if_there_is_another(tmp_path, caplog):
    first, second = (write_checkpoint(tmp_path, checkpoint(step)) for step in (1, 2))
    cut(second)
    assert_same(newest_checkpoint(tmp_path), checkpoint(1))
    assert str(second) in caplog.text
    cut(first)
    with pytest.raises(ValueError, match=r"step-000000002.npz is damaged.*delete its step-\*"):
        newest_checkpoint(tmp_path)


def make_a_folder(path, patch):
    path.unlink()
    path.mkdir()  # an OSError for all users, root included


def fail(error):
    """Lets a read in the middle of the file raise an error."""

    def fail_in(path, patch):
        def crc32(*_):
            raise error

        patch.setattr(zipfile, "crc32", crc32)

    return fail_in


@pytest.mark.parametrize(
    ("prevent", "error", "said"),
    [
        (make_a_folder, OSError, "Is a directory: .*step-000000002.npz"),
        (fail(OSError(errno.EIO, "Input/output error")), OSError, "^.Errno 5. Input/output error"),
        (fail(MemoryError("no more")), MemoryError, "^no more$"),
    ],
)
def test_one_that_may_be_complete_is_not_skipped_but_its_error_shown(
    tmp_path, monkeypatch, prevent, error, said
):
    for step in (1, 2):
        path = write_checkpoint(tmp_path, checkpoint(step))
    prevent(path, monkeypatch)
    with pytest.raises(error, match=said):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(("other", "when"), [(FORMAT + 1, "a later"), (1, "an earlier")])
def test_another_format_is_refused_and_not_skipped(other, when, tmp_path, monkeypatch):
    write_checkpoint(tmp_path, checkpoint(1))
    monkeypatch.setattr("lbbsp_core.runtime.checkpoint.checkpoint.FORMAT", other)
    write_checkpoint(tmp_path, checkpoint(2))
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=rf"{when} version of lbbsp \(format {other}, here {FORMAT}"
    ):
        newest_checkpoint(tmp_path)


def change_header(path, **changes):
    """Changes the header of a checkpoint, as damage might."""
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].tobytes()) | changes
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)
    return header, arrays


@pytest.mark.parametrize("claimed", [1, 2, FORMAT + 1, "3", None])
def test_one_whose_format_is_damaged_is_skipped(claimed, tmp_path, caplog):
    for step in (1, 2):
        path = write_checkpoint(tmp_path, checkpoint(step))
    change_header(path, format=claimed)
    assert_same(newest_checkpoint(tmp_path), checkpoint(1))
    assert f"{path} is damaged or no checkpoint" in caplog.text
    assert f"does not match its checksum, as format {claimed}" in caplog.text


def test_those_whose_checksum_does_not_cover_the_format_are_read(tmp_path):
    path = write_checkpoint(tmp_path, checkpoint())
    header, arrays = change_header(path)
    covered = {name: header[name] for name in ("step", "facts", "state", "types")}
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(arrays.keys() - {"header"}):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    change_header(path, format=2, checksum=digest.hexdigest())
    assert_same(read_checkpoint(path), checkpoint())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint, and what is in its file."""
    path = write_checkpoint(tmp_path_factory.mktemp("folder"), checkpoint())
    return path, path.read_bytes()


@settings(max_examples=100)
@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_changed_byte_is_noticed_or_without_effect(whole, place, bits):
    path, data = whole[0], bytearray(whole[1])
    data[int(place * len(data))] ^= bits
    path.write_bytes(data)
    try:
        found = read_checkpoint(path)
    except ValueError as error:
        found = error
    if isinstance(found, ValueError):
        assert str(path) in str(found)
    else:
        assert_same(found, checkpoint())


@settings(max_examples=50)
@given(data=st.binary(max_size=300))
def test_other_files_are_value_errors(whole, data):
    whole[0].write_bytes(data)
    with pytest.raises(ValueError, match=r"step-000000007.npz"):
        read_checkpoint(whole[0])


def test_pickled_objects_are_not_loaded(tmp_path):
    path = tmp_path / "step-1.npz"
    np.savez(path, header=np.array([{"format": 1}], object))
    with pytest.raises(ValueError, match="damaged or no checkpoint"):
        read_checkpoint(path)


def interrupt(number, interruption):
    """Lets the next call of `WRITES` after so many be interrupted, of this thread."""
    calls = count()

    def profile(frame, event, function):
        if event == "c_call" and function.__name__ in WRITES and next(calls) == number:
            sys.setprofile(None)
            interruption(function.__name__)

    sys.setprofile(profile)


def _write_and_die(folder, written, number):
    """Writes in a child process that ends before the given call of `WRITES`; returns if it has."""
    child = os.fork()
    if child == 0:
        interrupt(number, lambda name: os._exit(9))
        write_checkpoint(folder, written)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_nothing_is_left_open_when_the_disk_is_full(tmp_path):
    """`numpy.savez` leaves its archive open, which then complains on standard error."""
    (tmp_path / "full").symlink_to("/dev/full")
    code = (
        "import sys, numpy; from lbbsp_core.runtime.checkpoint import checkpoint\n"
        "try:\n checkpoint.write_whole(sys.argv[1], lambda file: checkpoint._save_arrays("
        "{'a': numpy.ones(9999), 'b': numpy.ones(9)}, file))\n"
        "except OSError as error:\n print(error.strerror)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "full")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("No space left on device\n", "")


def _write_and_fail(folder, written, number):
    """Writes with an error in the given call of `WRITES`; returns its name, None without one."""
    failed = []

    def fail(name):
        failed.append(name)
        raise OSError(28, "No space left on device")

    before = sys.getprofile()
    interrupt(number, fail)
    try:
        write_checkpoint(folder, written)
    except OSError:
        assert failed
    finally:
        sys.setprofile(before)
    return failed[0] if failed else None
