"""When checkpoints are written, and when a worker leaves with one."""

from types import SimpleNamespace

import pytest

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint
from lbbsp_core.runtime.loop.checkpoint_schedule import CheckpointSchedule, CheckpointWriter


class Training:
    """A worker's training, without its framework."""

    def __init__(self, folder, every, *, others=False, rank=0):
        self.left, self.collected = [], []
        self.session = SimpleNamespace(
            rank=rank, step=0, preempted=False, preemption_requested=False,
            any_worker=lambda flag: flag or others,
        )  # fmt: skip
        self.schedule = CheckpointSchedule(
            self.session, self.session, self.collect, self.left.append
        )
        self.schedule.use(CheckpointWriter(folder), every)

    def collect(self, writes):
        self.collected.append(self.session.step)
        return Checkpoint(self.session.step) if writes else None

    def train(self, steps, epoch=5):
        for _ in range(steps):
            self.schedule.begin_step()
            self.session.step += 1
            self.schedule.end_step(self.session.step, ends_epoch=self.session.step % epoch == 0)
            self.schedule.flush()


def written(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize(("every", "steps"), [(4, [8, 11]), ("epoch", [10, 11]), (11, [11])])
def test_checkpoints_are_written_regularly_and_at_the_end(tmp_path, every, steps):
    training = Training(tmp_path, every)
    training.train(11)
    training.schedule.end()
    training.schedule.end()
    assert written(tmp_path) == steps
    assert len(training.collected) == len(set(training.collected)), "each state once"


@pytest.mark.parametrize("asked", ["preempted", "preemption_requested"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_leave_with_a_checkpoint_in_a_step_or_after_an_epoch(tmp_path, asked, rank):
    training = Training(tmp_path, 100, rank=rank)
    training.train(3)
    setattr(training.session, asked, True)
    with pytest.raises(SystemExit) as left:
        training.train(5)
    step = 4 if asked == "preempted" else 5
    assert (left.value.code, training.left, training.collected) == (143, [False], [step])
    assert written(tmp_path) == ([] if rank else [step])


def test_a_step_that_a_script_does_not_end_is_left_in_the_next_one(tmp_path):
    training = Training(tmp_path, 100)
    training.train(3)
    training.session.preempted = True
    training.schedule.begin_step()
    with pytest.raises(SystemExit):
        training.schedule.begin_step()
    assert written(tmp_path) == [3]


def test_a_state_that_cannot_be_saved_is_said_to_be_missing(tmp_path):
    training = Training(tmp_path, 100)
    training.collect = training.schedule.collect = lambda writes: None
    with pytest.raises(SystemExit):
        training.schedule.leave()
    assert training.left == [True]


def test_without_a_folder_nothing_happens(tmp_path):
    training = Training(tmp_path, 1, others=True)
    training.schedule = CheckpointSchedule(
        training.session, training.session, training.collect, pytest.fail
    )
    training.schedule.open()
    training.schedule.end_step(1, ends_epoch=True)
    training.schedule.leave_if_preempted()
    training.schedule.end()
    assert not training.collected
