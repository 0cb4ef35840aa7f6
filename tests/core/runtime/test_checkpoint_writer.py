"""Checkpoints are written in the background, one at a time, and never end the training."""

import errno
import fcntl
import logging
import os
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from waits import HANG_SECONDS

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, newest_checkpoint
from lbbsp_core.runtime.loop import checkpoint_schedule as checkpoint_writer
from lbbsp_core.runtime.loop.checkpoint_schedule import (
    CheckpointWriter,
    claim_folder,
    require_every,
)


def checkpoint(step):
    return Checkpoint(step, arrays={"a": np.arange(step)})


def test_a_write_does_not_hold_up_the_caller(tmp_path, monkeypatch):
    may_write, write = threading.Event(), checkpoint_writer.write_checkpoint

    def slow(folder, given):
        assert may_write.wait(HANG_SECONDS)
        return write(folder, given)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", slow)
    writer = CheckpointWriter(tmp_path)
    writer.start(checkpoint(1))
    assert writer.is_busy
    assert newest_checkpoint(tmp_path) is None
    may_write.set()
    writer.start(checkpoint(2))  # waits for the first one
    assert writer.flush()
    assert not writer.is_busy
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_warns_once_and_the_next_one_may_succeed(tmp_path, caplog):
    folder = tmp_path / "file" / "checkpoints"
    folder.parent.touch()
    writer = CheckpointWriter(folder)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            writer.start(checkpoint(step))
            assert not writer.flush()
    assert len(caplog.records) == 1
    assert "step 1 cannot be written" in caplog.text
    assert "training continues" in caplog.text
    folder.parent.unlink()
    writer.start(checkpoint(3))
    assert writer.flush()
    assert newest_checkpoint(folder).step == 3


def test_a_folder_is_a_path_and_needed_for_checkpoints_every_few_steps():
    with pytest.raises(TypeError, match="checkpoint must be a path, got True"):
        CheckpointWriter(True)
    require_every("epoch", None)
    require_every(10, "folder")
    with pytest.raises(ValueError, match="every = 10 has no effect without a folder"):
        require_every(10, None)
    for wrong in (0, 1.5, "epochs"):
        with pytest.raises(ValueError, match="every must be 'epoch' or a number of steps >= 1"):
            require_every(wrong, "folder")


def test_a_folder_belongs_to_one_process_until_that_ends(tmp_path, owned_folder):
    folder, owner = owned_folder
    for _ in range(2):
        with pytest.raises(ValueError, match=f"process {owner.pid} on the-host writes its checkp"):
            claim_folder(folder)
    claim_folder(tmp_path)
    owner.kill()
    owner.wait()
    claim_folder(folder)


def test_a_process_that_is_forked_does_not_have_the_folder(tmp_path):
    claim_folder(tmp_path)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        claim = pool.submit(claim_folder, tmp_path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} on .* writes its checkpoints"):
        claim.result()


def test_a_folder_that_was_removed_is_claimed_again_with_the_next_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    first, writer = claim_folder(folder), CheckpointWriter(folder)
    assert claim_folder(folder) is first
    shutil.rmtree(folder)
    writer.start(checkpoint(1))
    assert writer.flush()
    assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert claim_folder(folder) is not first


def test_a_folder_whose_file_system_has_no_locks_is_used_by_all(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    claim_folder(tmp_path)
    assert "process" in (tmp_path / "lock").read_text()
    (tmp_path / "file").touch()
    assert claim_folder(tmp_path / "file" / "folder") is None
