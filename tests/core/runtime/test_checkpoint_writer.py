"""Checkpoints are written in the background, one at a time, and never end the training."""

import logging
import threading

import numpy as np

from lbbsp_core.runtime import checkpoint_writer
from lbbsp_core.runtime.checkpoint import Checkpoint, newest_checkpoint
from lbbsp_core.runtime.checkpoint_writer import CheckpointWriter


def checkpoint(step):
    return Checkpoint(step, arrays={"a": np.arange(step)})


def test_a_write_does_not_hold_up_the_caller(tmp_path, monkeypatch):
    may_write, write = threading.Event(), checkpoint_writer.write_checkpoint

    def slow(folder, given):
        may_write.wait(30)
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
