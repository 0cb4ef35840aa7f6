"""Program that runs the steps of a script in a process that may be killed when memory runs out.

It is started by its path. Requests and answers are lines on two separate pipes, so that the
script may print anything. The first answer reports that the script is loaded; every request after
that is a batch size, and runs one step:

    32  ->  {"seconds": 0.04, "device": TEXT} | {"out_of_memory": TEXT} | {"error": TEXT}
"""

import functools
import importlib.util
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

Step = Callable[[int], object]

MODULE = "__lbbsp_profile__"
"""Name of the script as a module: code under ``if __name__ == "__main__"`` does not run."""

OUT_OF_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")
OUT_OF_MEMORY = re.compile(
    "out[ _]of[ _]memory|resource_exhausted|bad_alloc|alloc_failed|can('|no)t allocate memory"
    "|not enough memory|memory allocation failed",
    re.IGNORECASE,
)


def main(arguments: list[str]) -> None:
    """Runs steps until the requests end; ``script function requests_fd answers_fd arguments``."""
    script, function, requests_fd, answers_fd, *script_arguments = arguments
    for fd in (int(requests_fd), int(answers_fd)):
        os.set_inheritable(fd, False)  # processes started by the script must not keep them open
    prefer_oom_kill()
    sys.argv[:] = [script, *script_arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with os.fdopen(int(requests_fd)) as requests, os.fdopen(int(answers_fd), "w") as answers:

        def answer(message: dict[str, object]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            step = load(script, function)
        except BaseException as error:
            answer({"error": describe_error(error)})
            return
        answer({"ready": True})
        for line in requests:
            answer(run_step(step, int(line)))


def load(script: str, function: str) -> Step:
    """Runs the script as a module and returns its step function."""
    spec = importlib.util.spec_from_file_location(MODULE, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is not a Python script: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    step: Step | None = getattr(module, function, None)
    if not callable(step):
        raise NameError(f"{script} defines no function {function}(batch_size)")
    return step


def run_step(step: Step, batch: int) -> dict[str, object]:
    """Runs a timed step and returns the answer to send."""
    try:
        return {"seconds": timed(step, batch), "device": device()}
    except BaseException as error:
        kind = "out_of_memory" if is_out_of_memory(error) else "error"
        return {kind: describe_error(error)}


def timed(step: Step, batch: int) -> float:
    """Returns the seconds of one step, including the work that it has started on a GPU."""
    start = time.perf_counter()
    synchronize(step(batch))
    return max(time.perf_counter() - start, 1e-9)


def synchronize(result: object) -> None:
    """Waits for asynchronous work of the frameworks that are loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    mxnet = sys.modules.get("mxnet")
    if mxnet is not None:
        mxnet.nd.waitall()
    for array in _arrays(result):
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()
        elif type(array).__module__.startswith("tensorflow") and hasattr(array, "numpy"):
            array.numpy()


def _arrays(result: object) -> Iterator[object]:
    """Yields the leaves of nested tuples, lists and dictionaries."""
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from _arrays(part)
    elif isinstance(result, dict):
        yield from _arrays(list(result.values()))
    else:
        yield result


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an exception or one of its causes reports that memory ran out."""
    while error is not None:
        if any(kind.__name__ in OUT_OF_MEMORY_TYPES for kind in type(error).__mro__):
            return True
        speaks = isinstance(error, (RuntimeError, OSError)) or "XlaRuntime" in type(error).__name__
        if speaks and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: BaseException) -> str:
    """Returns the error message and the file and line that raised it."""
    if isinstance(error, SystemExit):
        return f"the script called exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == __file__:  # one of the errors above says all
        location = ""
    else:
        location = f" ({frames[-1].filename}:{frames[-1].lineno})"
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return (text[:1500] or type(error).__name__) + location


def device() -> str:
    """Returns the name of the GPU that a framework uses, or else of the processor."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    try:
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
        if tensorflow is not None:
            for gpu in tensorflow.config.list_physical_devices("GPU"):
                details = tensorflow.config.experimental.get_device_details(gpu)
                return str(details.get("device_name", gpu.name))
    except Exception as error:  # the name is only informative
        print(f"the name of the GPU is unavailable: {error}", file=sys.stderr)
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


@functools.cache
def processor() -> str:
    """Returns the model name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            names = [line.split(":", 1)[1].strip() for line in stream if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def prefer_oom_kill() -> None:
    """Makes the kernel kill this process first when the machine runs out of memory."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
        stream.write("1000")  # Linux only


if __name__ == "__main__":
    main(sys.argv[1:])
