"""Import of the simulator."""

from __future__ import annotations

import subprocess
import sys


def test_the_simulator_imports_no_heavy_libraries() -> None:
    script = "import sys, lbbsp_core.sim; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    )
    heavy = {"scipy", "sklearn", "matplotlib", "statsmodels", "typer", "rich"}
    assert not heavy & set(result.stdout.split())
