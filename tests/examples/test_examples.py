"""The examples come in pairs: little differs between them, and both run on a cluster."""

import ast
import difflib
import re
import tokenize
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

from lbbsp_core.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "example", ["keras_digits", "gluon_digits", "keras_loop", "keras_sequences", "pytorch_digits"]
)
def test_balancing_costs_a_user_at_most_ten_lines(example):
    plain, balanced = (
        (EXAMPLES / f"{example}_{kind}.py").read_text().splitlines()
        for kind in ("plain", "balanced")
    )
    changes = [
        line
        for line in difflib.unified_diff(plain, balanced, n=0, lineterm="")
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert 0 < len(changes) <= 10


def test_the_plugin_for_pytorch_stays_small():
    code = (EXAMPLES / "pytorch_ddp.py").read_text()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {
        line
        for token in tokenize.generate_tokens(StringIO(code).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + bool(token.string))
    }
    for node in ast.walk(ast.parse(code)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            text = node.body[0]
            lines -= set(range(text.lineno, text.end_lineno + 1))
    assert 200 < len(lines) <= 250


LEARNS = {
    "keras_digits_plain": (r"val_accuracy: (\S+)", 0.8),
    "keras_digits_balanced": (r"val_accuracy: (\S+)", 0.8),
    "keras_loop_plain": (r"epoch 7: accuracy (\S+)", 0.8),
    "keras_loop_balanced": (r"epoch 7: accuracy (\S+)", 0.8),
    "keras_sequences_balanced": (r" accuracy: (\S+).* val_accuracy", 0.6),
    "gluon_digits_plain": (r"^accuracy: (\S+)", 0.8),
    "gluon_digits_balanced": (r"^accuracy: (\S+)", 0.8),
}
"""Examples, what they print of their accuracy, and how much of it they reach."""


@pytest.mark.campaign
@pytest.mark.parametrize("example", LEARNS)
def test_an_example_learns_on_two_workers(example):
    pattern, least = LEARNS[example]
    framework = "mxnet" if example.startswith("gluon") else "tensorflow"
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    lines = []
    status = launch(
        [str(EXAMPLES / f"{example}.py")],
        workers=2,
        framework=framework,
        output=lambda rank, line: lines.append(line),
    )
    print("\n".join(lines))
    assert status == 0
    assert float(re.findall(pattern, "\n".join(lines), re.MULTILINE)[-1]) > least
