"""Edits of a script's text: the changes for lbbsp that the README describes, and their count.

A script is changed by general rules (the import, the strategy, the balancer, and the arguments of
`fit`) and by patterns of its own: where a ``with strategy.scope():`` begins and ends, and any
replacement of text.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

FIT_ARGUMENTS = ("x", "y", "batch_size", "epochs")
BY_DATASET = ("x", "y", "sample_weight", "validation_split")
DROPPED = ("batch_size", "shuffle", "steps_per_epoch")


def read_script(path: Path) -> str:
    """Returns the text of a script, or of a notebook's code cells without shell commands."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = (c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code")
    lines = "\n\n".join("".join(source) for source in cells).split("\n")
    return "\n".join(line for line in lines if not re.match(r"\s*[!%]", line))


def replace(text: str, edits: Sequence[tuple[str, str]]) -> str:
    """Applies replacements of text.

    Raises:
        ValueError: A pattern does not occur in the text.
    """
    for old, new in edits:
        if old not in text:
            raise ValueError(f"the pattern {old!r} does not occur: the script has changed")
        text = text.replace(old, new)
    return text


def cut(text: str, parts: Sequence[tuple[str, str]]) -> str:
    """Removes each part that begins with one pattern and ends before another.

    Raises:
        ValueError: A pattern does not occur in the text.
    """
    for first, last in parts:
        head, found, rest = text.partition(first)
        _, end, tail = rest.partition(last)
        if not (found and (end or not last)):
            raise ValueError(f"{first!r} to {last!r} does not occur: the script has changed")
        text = head + (last + tail if last else "")
    return text


def add_header(text: str, global_batch_size: int) -> str:
    """Adds a seed, the strategy and the balancer before the first import."""
    header = (
        "import tensorflow as tf",
        "import lbbsp_tf",
        "tf.keras.utils.set_random_seed(0)",
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()",
        f"balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size={global_batch_size})",
    )
    imports = (n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom)))
    lines, place = text.split("\n"), next(imports).lineno - 1
    return "\n".join([*lines[:place], *header, *lines[place:]])


def enter_scope(text: str, first: str, last: str | None = None) -> str:
    """Puts ``with strategy.scope():`` around statements of one block, wherever they occur.

    Args:
        text: Text of the script.
        first: Pattern in the first line of the first statement.
        last: Pattern in the first line of the last statement; None for one statement.

    Raises:
        ValueError: No statement matches.
    """
    places = _statements(text, first)
    if not places:
        raise ValueError(f"no statement begins with {first!r}: the script has changed")
    for begin in reversed(places):
        ends = [begin] if last is None else _statements(text, last)
        end = next((node for node in ends if node.lineno >= begin.lineno), None)
        if end is None:
            raise ValueError(f"no statement after {first!r} begins with {last!r}")
        text = _indented(text, begin, end)
    return text


def rewrite_fits(text: str, of: Sequence[str] = ()) -> str:
    """Changes the arguments of calls of `fit`: the data set, the steps and the callback.

    Args:
        text: Text of the script.
        of: Expressions whose `fit` is changed; by default all that are called with `epochs`.
    """
    while True:
        calls = (node for node in ast.walk(ast.parse(text)) if _is_fit(node, text, of))
        call = next(calls, None)
        if call is None:
            return text
        text = _spliced(text, call, _rewritten_call(text, call))


def seed_shuffles(text: str) -> str:
    """Gives a seed to every shuffle of a `tf.data.Dataset`, so that workers read the same order."""
    while True:
        calls = (node for node in ast.walk(ast.parse(text)) if _is_unseeded_shuffle(node))
        call = next(calls, None)
        if call is None:
            return text
        source = ast.get_source_segment(text, call) or ""
        text = _spliced(text, call, source[:-1].rstrip().rstrip(",") + ", seed=0)")


def changed_lines(before: str, after: str) -> int:
    """Returns the number of lines that were added or changed, other than by indentation."""
    lines = [
        [line.strip() for line in text.split("\n") if line.strip()] for text in (before, after)
    ]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def _statements(text: str, pattern: str) -> list[ast.stmt]:
    lines = text.split("\n")
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and pattern in lines[node.lineno - 1]
    ]
    return sorted(found, key=lambda node: node.lineno)


def _indented(text: str, begin: ast.stmt, end: ast.stmt) -> str:
    lines, strings = text.split("\n"), _inside_strings(text)
    moved = [
        line if not line.strip() or number in strings else "    " + line
        for number, line in enumerate(lines[begin.lineno - 1 : end.end_lineno], begin.lineno)
    ]
    scope = " " * begin.col_offset + "with strategy.scope():"
    return "\n".join([*lines[: begin.lineno - 1], scope, *moved, *lines[end.end_lineno :]])


def _inside_strings(text: str) -> set[int]:
    """Returns the numbers of lines that begin inside a string, whose indentation is its text."""
    constants = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {
        line
        for node in constants
        if isinstance(node.value, str)
        for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)
    }


def _is_unseeded_shuffle(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "shuffle"
        and ast.unparse(node.func.value) not in ("random", "np.random", "rng")
        and "Random(" not in ast.unparse(node.func.value)
        and not any(keyword.arg == "seed" for keyword in node.keywords)
    )


def _is_fit(node: ast.AST, text: str, of: Sequence[str]) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr != "fit" or "balancer" in (ast.get_source_segment(text, node) or ""):
        return False
    if of:
        return ast.unparse(node.func.value) in of
    return any(keyword.arg == "epochs" for keyword in node.keywords)


def _rewritten_call(text: str, call: ast.Call) -> str:
    source = lambda node: ast.get_source_segment(text, node)  # noqa: E731
    given = dict(zip(FIT_ARGUMENTS, map(source, call.args), strict=False))
    given |= {str(keyword.arg): source(keyword.value) for keyword in call.keywords}
    if "validation_split" in given:
        given["validation_data"] = "balancer.validation_data"
    data = ", ".join(_data_arguments(given))
    callbacks = given.pop("callbacks", "")
    rest = [f"{name}={value}" for name, value in given.items()
            if name not in (*BY_DATASET, *DROPPED)]  # fmt: skip
    if callbacks.startswith("["):
        callbacks = "[balancer, " + callbacks[1:].lstrip()
    elif callbacks:
        callbacks = f"[balancer, *{callbacks}]"
    arguments = [
        f"balancer.dataset({data})",
        "steps_per_epoch=balancer.steps_per_epoch",
        *rest,
        f"callbacks={callbacks or '[balancer]'}",
    ]
    before = source(call) or ""
    one_line = before.count("\n") < len(call.args) + len(call.keywords)
    margin = "\n" + " " * (call.col_offset + 4)
    joined = ", ".join(arguments) if one_line else margin + ("," + margin).join(arguments) + ",\n"
    return f"{source(call.func)}({joined})"


def _data_arguments(given: dict[str, str]) -> Iterator[str]:
    positional = True
    for name in BY_DATASET:
        if name in given:
            yield given[name] if positional else f"{name}={given[name]}"
        else:
            positional = False


def _spliced(text: str, node: ast.expr, new: str) -> str:
    lines = text.split("\n")
    head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    tail = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode()
    return "\n".join([*lines[: node.lineno - 1], head + new + tail, *lines[node.end_lineno :]])
