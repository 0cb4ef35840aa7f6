"""Runs blocks of documents that share a set-up: ``run_blocks.py SET_UP < BLOCKS``, both of JSON.

Reads a list of ``[document, line, code]`` and writes, as the last line, the list of tracebacks, ""
for each block that has run. All blocks of a document share one namespace, which the set-up fills.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def run(code: str, name: str, line: int, namespace: dict[str, object]) -> str:
    """Runs code as if it began at this line of the file; returns the traceback of an error."""
    try:
        exec(compile("\n" * (line - 1) + code, name, "exec"), namespace)
    except Exception:
        return traceback.format_exc()
    return ""


def main(set_up: Path) -> None:
    """Runs the blocks on standard input."""
    namespaces: dict[str, dict[str, object]] = {}
    failures = []
    for document, line, code in json.load(sys.stdin):
        failure = ""
        if document not in namespaces:
            namespaces[document] = {"__name__": "document"}
            failure = run(set_up.read_text("utf-8"), str(set_up), 1, namespaces[document])
        failures.append(failure or run(code, document, line, namespaces[document]))
    print("\n" + json.dumps(failures), flush=True)


if __name__ == "__main__":
    main(Path(__file__).with_name(f"{sys.argv[1]}_setup.py"))
