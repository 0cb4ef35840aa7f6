"""The process that calls the step, and may die of it. A program of its own, started by its path.

Requests and answers are JSON lines on two pipes of their own, so that a script may print what it
likes. The first answer says that the script is loaded; every request then is one step:

    {"batch": 32}  ->  {"seconds": 0.04} | {"out_of_memory": TEXT} | {"error": TEXT}
    {"device": 1}  ->  {"device": TEXT}
"""

import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[[int], object]

MODULE = "__lbbsp_profile__"
"""The script's ``__name__``: what is under ``if __name__ == "__main__"`` does not run."""

OUT_OF_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")
OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "memory allocation failed",
    "bad_alloc",
)


def main(arguments: list[str]) -> None:
    """Serve steps until the requests end: ``script function requests_fd answers_fd args...``."""
    script, function, requests_fd, answers_fd, *own = arguments
    for fd in (int(requests_fd), int(answers_fd)):
        os.set_inheritable(fd, False)  # what the script starts must not keep them open
    die_first()
    sys.argv[:] = [script, *own]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with os.fdopen(int(requests_fd)) as requests, os.fdopen(int(answers_fd), "w") as answers:

        def answer(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            step = load(script, function)
        except BaseException as error:
            answer({"error": story(error)})
            return
        answer({"ready": True})
        for line in requests:
            request = json.loads(line)
            answer({"device": device()} if "device" in request else attempt(step, request["batch"]))


def load(script: str, function: str) -> Step:
    """The script's function, once the script has run as a module."""
    spec = importlib.util.spec_from_file_location(MODULE, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is no Python script: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    step: Step | None = getattr(module, function, None)
    if not callable(step):
        raise NameError(f"{script} defines no function {function}(batch_size)")
    return step


def attempt(step: Step, batch: int) -> dict[str, Any]:
    """One timed step, as an answer."""
    try:
        return {"seconds": timed(step, batch)}
    except BaseException as error:
        kind = "out_of_memory" if is_out_of_memory(error) else "error"
        return {kind: story(error)}


def timed(step: Step, batch: int) -> float:
    """Seconds of one step, until what it has started on a GPU is done as well."""
    began = time.perf_counter()
    settle(step(batch))
    return max(time.perf_counter() - began, 1e-9)


def settle(result: object) -> None:
    """Wait for asynchronous work, where we know how."""
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
    """What a nest of tuples, lists and dictionaries holds."""
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from _arrays(part)
    elif isinstance(result, dict):
        yield from _arrays(list(result.values()))
    else:
        yield result


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or what it came from, tells of missing memory, in any framework."""
    while error is not None:
        if any(kind.__name__ in OUT_OF_MEMORY_TYPES for kind in type(error).__mro__):
            return True
        if isinstance(error, (RuntimeError, OSError)) or "XlaRuntimeError" in type(error).__name__:
            text = str(error).lower()
            if any(words in text for words in OUT_OF_MEMORY_WORDS):
                return True
        error = error.__cause__ or error.__context__
    return False


def story(error: BaseException) -> str:
    """What happened and where, in a few lines."""
    if isinstance(error, SystemExit):
        return f"it ended itself: exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    where = [f" ({frames[-1].filename}:{frames[-1].lineno})"] if frames else [""]
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return (text[:1500] or type(error).__name__) + where[0]


def device() -> str:
    """What the step runs on: the GPU that a framework has taken, else the processor."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    try:
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
        if tensorflow is not None:
            for gpu in tensorflow.config.list_physical_devices("GPU"):
                details = tensorflow.config.experimental.get_device_details(gpu)
                return str(details.get("device_name", gpu.name))
    except Exception as error:  # a name is no reason to fail
        print(f"no name of a GPU: {error}", file=sys.stderr)
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def processor() -> str:
    """The name of the processor's model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            names = [line.split(":", 1)[1].strip() for line in stream if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def die_first() -> None:
    """When memory ends, have the kernel kill this process and not its neighbours."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
            stream.write("1000")
    except OSError:  # not this kernel's way
        return


if __name__ == "__main__":
    main(sys.argv[1:])
