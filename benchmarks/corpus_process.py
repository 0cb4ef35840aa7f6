"""What the processes of the corpora share: stand-ins for absent modules, and reports of errors."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from unittest import mock

from corpus_runs import RESULT


class Anything(ModuleType):
    """Module with every name."""

    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("tqdm", "trange"):
            return lambda iterable=(), *args, **options: iterable
        return mock.MagicMock(name=name)


def stand_in(names: Iterable[str]) -> None:
    """Replaces modules by objects that accept any call."""
    for name in names:
        sys.modules[name] = Anything(name)


def report(error: BaseException | None) -> None:
    """Prints the outcome of this process for `corpus_runs.run`."""
    print(RESULT + json.dumps({"error": None} if error is None else describe(error)), flush=True)


def describe(error: BaseException) -> dict[str, object]:
    """Returns what an error says, and whether lbbsp raised it on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    refusal = isinstance(error, (ValueError, RuntimeError, NotImplementedError))
    own = refusal and bool(frames) and "/lbbsp_" in frames[-1].filename
    message = str(error).strip().split("\n")
    return {"error": type(error).__name__, "message": message[0], "own": own,
            "frames": [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-4:]]}  # fmt: skip
