"""Ends of a worker: at once if it has failed, else together with its peers."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NoReturn

logger = logging.getLogger("lbbsp.liveness")

LEFT: Final = 128 + signal.SIGTERM  # status of workers that have left on request, as after SIGTERM
_PATIENCE_SECONDS = 2.0  # a reader of our output, say, may delay an end for as long
_SECOND_SECONDS = 30.0  # longer than any end takes
_ending: list[int] = []  # statuses with which the process was to end
_failing: list[BaseException] = []  # the exception that is passed to the hooks
_endings: list[Callable[[], None]] = []
_messengers: list[Callable[[], None]] = []


def fail_fast() -> None:
    """Makes an uncaught exception end the process at once, after what `sys.excepthook` says.

    An ordinary exit waits in the framework's shutdown barrier for peers that in turn wait for
    this worker's gradients: over a minute in TensorFlow, indefinitely in MXNet (measured). The
    peers, or the launcher, detect a dead process within seconds.
    """
    hook = sys.excepthook
    if getattr(hook, "func", None) is not _fail_after:
        sys.excepthook = functools.partial(_fail_after, hook)


def on_exit(leave: Callable[[], None]) -> None:
    """Calls `leave` when the script has ended; a script that fails ends the process at once.

    An exit by `sys.exit` with a failure counts as one, and an uncaught exception. An exception in
    `leave`, which waits for the other workers, is a failure, too.
    """
    _note_exits()

    def at_exit() -> None:
        status = exit_status()
        # The end of the script must not overtake a thread that ends the process for a reason.
        if status or _ending:
            _fail(status)
        try:
            leave()
        except BaseException:  # Python would only print it, and exit with status 0
            _fail(1, traceback.print_exc)

    atexit.register(_unless_forked(at_exit))


def exit_status() -> int:
    """Returns the status with which this process ends, to a function of `before_end`."""
    # The interpreter notes an uncaught exception before it calls the hook; where a user types
    # commands, it may be one of a command before.
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    return _ending[0] if _ending else _requested[0] or _status_of(uncaught)


class _Exit(SystemExit):
    """Exit that notes its status when the interpreter itself reads it: nothing has caught it."""

    @property
    def code(self) -> str | int | None:
        status: str | int | None = self.__dict__.get("code", self.args[0])
        try:
            sys._getframe(1)
        except ValueError:  # not called from Python
            _requested[0] = status if isinstance(status, int) else int(status is not None)
        return status

    @code.setter
    def code(self, status: str | int | None) -> None:
        self.__dict__["code"] = status


_requested = [0]  # status of the last exit by `sys.exit`; functions at exit cannot ask for it


@functools.cache
def _note_exits() -> None:
    """Wraps `sys.exit`: a call on the main thread notes its status, unless it is caught."""
    exit_with = sys.exit

    @functools.wraps(exit_with)
    def exit_and_note(status: str | int | None = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            raise _Exit(status)
        exit_with(status)

    sys.exit = exit_and_note


def on_failure(tell: Callable[[], None]) -> None:
    """Calls `tell`, for a moment at most, when the script has failed, before the process ends.

    A script that leaves with status 143, because a SIGTERM has asked it to, has not failed.
    """
    _messengers.append(_unless_forked(tell))


def before_end(clean: Callable[[], None]) -> None:
    """Calls `clean` at the end of this process, also by `end_now`."""
    _note_exits()
    ending = _unless_forked(clean)
    atexit.register(ending)
    _endings.append(ending)


def _unless_forked(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call` in this process, but not in forks of it."""
    owner = os.getpid()
    return lambda: call() if os.getpid() == owner else None


def end_now(status: int, message: str = "", *, linger_seconds: float = 0.0) -> NoReturn:
    """Ends the process at once, without the framework's exit barrier, after flushing the output.

    With the logger ``lbbsp.liveness`` at debug level, the stacks of all threads follow the message.
    Other threads run on for `linger_seconds` after the message.
    """
    report = functools.partial(_print_message, message)
    linger = functools.partial(time.sleep, linger_seconds)
    _end_after(status, report, linger, linger_seconds=linger_seconds)


def _fail(status: int, *say: Callable[[], object]) -> NoReturn:
    _end_after(status, *say, *(_messengers if status != LEFT else ()))


def _end_after(status: int, *calls: Callable[[], object], linger_seconds: float = 0.0) -> NoReturn:
    """Ends the process after calls, which do not delay it for long even if they block."""
    _ending.append(status)
    if len(_ending) > 1:  # another thread ends the process, for the reason of this one
        time.sleep(_SECOND_SECONDS)
        os._exit(_ending[0])
    patience = _PATIENCE_SECONDS + linger_seconds
    with suppress(OSError, ValueError, RuntimeError):
        # The status is 1 if a call keeps the interpreter's lock.
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.dump_traceback_later(_PATIENCE_SECONDS + patience, exit=True, file=nowhere)
    with suppress(RuntimeError):  # from Python 3.12 on, no thread can be started at exit
        timer = threading.Timer(patience, os._exit, [status])
        timer.daemon = True
        timer.start()
    for call in (*calls, *_endings, sys.stdout.flush, sys.stderr.flush):
        with suppress(Exception):
            call()
    os._exit(status)


def _print_message(message: str) -> None:
    if message:
        print(message.rstrip(), file=sys.stderr, flush=True)
        if logger.isEnabledFor(logging.DEBUG):
            faulthandler.dump_traceback()


def _fail_after(
    hook: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Ends the process after another hook of uncaught exceptions, such as the user's.

    That one may call the hook that it has replaced, which is this function, too.
    """
    if _failing:
        hook(kind, error, trace)
        return
    _failing.append(error)
    _fail(_status_of(kind), functools.partial(hook, kind, error, trace))


def _status_of(kind: type[BaseException] | None) -> int:
    if kind is None:
        return 0
    return 130 if issubclass(kind, KeyboardInterrupt) else 1
