"""Preemption: SIGTERM asks a worker to leave, and all workers save a checkpoint first.

Schedulers send it before they take a machine away, and wait (Slurm's KillWait and Kubernetes'
terminationGracePeriodSeconds are 30 s) before they kill. The request travels with the exchange of
a step, so that all workers leave after the same step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Final

from lbbsp_core.runtime.reliability.exit import LEFT, end_now
from lbbsp_core.runtime.reliability.liveness import daemon_thread
from lbbsp_core.runtime.reliability.marks import note_preempted

logger = logging.getLogger("lbbsp.checkpoint")

STATUS: Final = LEFT  # of workers that have saved their checkpoint and left
REPEAT_SECONDS: Final = 1.0  # in which signals of the scheduler and the launcher are one request
_STEP_SECONDS: Final = 15.0  # after which no step is expected any more; schedulers wait twice that
_LOOK_SECONDS: Final = 0.2
_PARENT_SECONDS: Final = 1.0


def keep_forks() -> None:
    """Lets processes that `multiprocessing` forks from this one end only with it, or by its order.

    A scheduler may signal all processes. Those that load data must not end before the last step.
    """
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Frameworks may start threads within the fork, which inherit what is blocked then.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)
    register_after_fork(keep_forks, lambda _: _follow_parent())


def _follow_parent() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    daemon_thread(partial(_end_with, os.getppid()), "lbbsp-parent").start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, or sends SIGTERM; handlers cannot tell that."""
    while os.getppid() == parent:
        siginfo = signal.sigtimedwait([signal.SIGTERM], _PARENT_SECONDS)
        if siginfo is not None and siginfo.si_pid == parent:
            break
    os._exit(STATUS)


@dataclass(eq=False)
class PreemptionHandler:
    """Handler of SIGTERM while a training can save its state; it is opened and closed.

    A second signal, later, ends the process at once, or all workers, see `end_with_peers`. Several
    trainings of a process each have one.

    Where the end of a training is not known, a signal may arrive after its last step. A thread then
    ends the process if no step has followed for some time.

    Args:
        request: Called at the first signal, on the main thread between two instructions of Python.
        is_idle: Returns whether no step is running or certain to follow; None if one always does.
        save: Called on that thread as soon as the training is idle.
        leave: Called on that thread; returns whether it may end the process now.
    """

    request: Callable[[], None]
    is_idle: Callable[[], bool] | None = None
    save: Callable[[], None] = lambda: None
    leave: Callable[[], bool] = lambda: True

    def open(self, *, alone: bool = False) -> None:
        """Handles SIGTERM from now on, unless the script has a handler of its own.

        `alone` says that this process has no other training now: one that failed has not closed its
        handler.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if alone:
            _open[:] = [handler for handler in _open if handler is self]
        if self in _open:
            return
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _handle):
            logger.debug("SIGTERM has a handler already: it does not save a checkpoint")
            return
        _open.append(self)
        signal.signal(signal.SIGTERM, _handle)
        if _first_signal:
            self._pass_on()

    def close(self, *, leaves: bool = False) -> None:
        """Restores the default: SIGTERM ends the process, or all workers, see `end_with_peers`.

        With `leaves`, the process ends now, because a signal has arrived after the last moment at
        which the training could leave.
        """
        if self in _open:
            _open.remove(self)
            _first_signal.clear()  # every training has got the request, and this one has left
            if not (_open or _peers) and signal.getsignal(signal.SIGTERM) is _handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if leaves:
            _end()

    def _pass_on(self) -> None:
        """Passes the request on to the training."""
        self.request()
        if self.is_idle is not None:
            wait = partial(self._wait_for_step, self.is_idle)
            daemon_thread(wait, "lbbsp-preemption").start()

    def _wait_for_step(self, is_idle: Callable[[], bool]) -> None:
        """Ends the process once no step has followed for some time."""
        since = None
        while self in _open:
            now = time.monotonic()
            if not is_idle():
                since = None
            elif since is None:
                since = now
                try:
                    self.save()
                except Exception:  # the process must end nevertheless
                    logger.warning("no checkpoint before this worker leaves", exc_info=True)
            elif now >= since + _STEP_SECONDS and self.leave():
                end_now(STATUS)
                return
            time.sleep(_LOOK_SECONDS)


def end_with_peers(end: Callable[[], None]) -> None:
    """Handles SIGTERM outside of trainings, too, unless the script has a handler of its own.

    `end` makes all workers end at once, with `STATUS`: at a signal outside of trainings that can
    save their state, and at a second one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _handle):
        _peers[:] = [end]
        signal.signal(signal.SIGTERM, _handle)


_peers: list[Callable[[], None]] = []
_open: list[PreemptionHandler] = []
_first_signal: list[float] = []  # time of it, if it has arrived


def _handle(_signum: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _first_signal:
        _first_signal.append(now)
        note_preempted()
        for handler in _open:
            handler._pass_on()
        if not _open:
            _end()
    elif now > _first_signal[0] + REPEAT_SECONDS:
        _end()


def _end() -> None:
    for end in _peers:
        end()
    if not _peers:
        end_now(STATUS)
