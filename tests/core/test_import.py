"""`import lbbsp_core` is light, and works where POSIX signals and modules are missing."""

import subprocess
import sys

LIGHT = """
import sys
import lbbsp_core
heavy = ("scipy", "psutil", "statsmodels", "sklearn", "matplotlib", "typer", "rich", "tensorflow")
ours = tuple("lbbsp_core." + each for each in ("launch", "profiler", "processes", "report", "cli"))
loaded = sorted(name for name in sys.modules if name.startswith(heavy + ours))
assert not loaded, loaded
"""

WITHOUT_POSIX = """
import signal, sys
for name in ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import lbbsp_core, lbbsp_core.sim
from lbbsp_core import Ema, Measurement, Proportional, allocate
assert allocate([Proportional(1.0), Proportional(3.0)], total=8).tolist() == [2, 6]
predictor = Ema(0.5)
assert predictor.predict(predictor.update(predictor.init(), Measurement(10, 1.0))) == 10.0
"""


def python(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_loaded() -> None:
    python(LIGHT)


def test_the_core_imports_without_posix() -> None:
    python(WITHOUT_POSIX)
