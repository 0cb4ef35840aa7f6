"""Holds the convention for the first lines of function docstrings.

Such a line starts with a verb in the third person ("Returns ...") or, for a property, with the noun
that names the thing, and is a sentence that ends with a full stop. Run as a program, this file
prints the share of lines that start with a closed-class word, and each of them with its place.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("lbbsp_core", "lbbsp_tf", "lbbsp_mx")
MAX_SHARE = 0.10

# Words that do not say what a function does. Ordinals ("Last step of ...") and words that are also
# nouns or adjectives ("Even", "Past") are not counted: properties may be named by them.
CLOSED_CLASS_GROUPS = {
    "articles, determiners, possessives": """
        a an the this that these those such same other another
        my your his her its our their
    """,
    "quantifiers and cardinal numbers": """
        all any both each every either neither no none several some many much more most few fewer
        fewest little less least enough half one two three four five six seven eight nine ten zero
        once twice
    """,
    "pronouns": """
        i you he she it we they me him us them mine yours hers ours theirs
        myself yourself himself herself itself ourselves yourselves themselves
        anybody anyone anything everybody everyone everything nobody nothing somebody someone
        something there here
    """,
    "wh-words": """
        what whatever which whichever who whoever whom whose where wherever when whenever why how
        however whether
    """,
    "prepositions and particles": """
        about above across after against along alongside amid among around as aside at away before
        behind below beneath beside besides between beyond by despite down during except for from
        in inside instead into like near of off on onto opposite out outside over per regarding
        since than through throughout till to toward towards under underneath unlike until unto up
        upon via with within without
    """,
    "conjunctions": """
        and but or nor so yet if unless although though because while whereas lest
    """,
    "auxiliaries and modals": """
        am is are was were be been being has have having had do does did doing done can could may
        might must shall should will would ought cannot
    """,
    "negations, and adverbs that start fragments": """
        not never ever always also again already just only otherwise rather still then therefore
        thus too very now else
    """,
}
CLOSED_CLASS = frozenset(word for group in CLOSED_CLASS_GROUPS.values() for word in group.split())


class FirstLine(NamedTuple):
    """First line of the docstring of a function, and where it stands."""

    path: Path
    line: int
    name: str
    text: str

    @property
    def word(self) -> str:
        """First word in lower case, without the punctuation around it."""
        words = self.text.split()
        return words[0].strip("`'\"*_()[]{}<>.,;:!?-").lower() if words else ""

    @property
    def is_closed_class(self) -> bool:
        """Returns whether the line starts with a closed-class word or a number."""
        return bool({self.word, self.word.split("'")[0]} & CLOSED_CLASS) or self.word.isdigit()

    @property
    def is_sentence(self) -> bool:
        """Returns whether the line has two words or more and ends with a full stop."""
        return len(self.text.split()) >= 2 and self.text.endswith(".")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.text}"


def first_lines(package: str) -> Iterator[FirstLine]:
    """Yields the first line of each function docstring of a package, nested functions included."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring is not None:
                    text = docstring.split("\n", 1)[0].strip()
                    yield FirstLine(path.relative_to(ROOT), node.lineno, node.name, text)


def share(lines: list[FirstLine]) -> float:
    """Returns the share of lines that start with a closed-class word."""
    return sum(line.is_closed_class for line in lines) / len(lines)


def summary(lines: list[FirstLine]) -> str:
    """Returns a sentence with the share, and the files with the most such lines."""
    counts = Counter(str(line.path) for line in lines if line.is_closed_class)
    worst = "".join(f"\n  {count:4d} {path}" for path, count in counts.most_common(10))
    return (
        f"{share(lines):.1%} of {len(lines)} function docstrings start with a closed-class word: "
        f"start them with a verb, as in 'Returns ...'. Files with the most of them:{worst}"
    )


def test_function_docstrings_start_with_a_verb_or_name_the_thing():
    lines = [line for package in PACKAGES for line in first_lines(package)]
    assert len(lines) > 500  # the walk found the packages
    measured = share(lines)
    assert measured <= MAX_SHARE, summary(lines)


def test_first_lines_are_sentences():
    broken = [
        str(line) for package in PACKAGES for line in first_lines(package) if not line.is_sentence
    ]
    message = "first lines must have two words or more and end with a full stop:\n"
    assert broken == [], message + "\n".join(broken)


def test_the_count_distinguishes_verbs_from_closed_class_words():
    def starts_closed(text: str) -> bool:
        return FirstLine(Path("x.py"), 1, "f", text).is_closed_class

    closed = ["The sizes.", "`what` it is.", "Nothing.", "It's done.", "(A) b.", "24 bits."]
    opened = ["Returns the sizes.", "Number of workers.", "``Ema`` of x.", "Worker's rank."]
    assert all(map(starts_closed, closed))
    assert not any(map(starts_closed, opened))


def main() -> None:
    """Prints the share of each package and of all, and each offending line with its place."""
    everything = []
    for package in PACKAGES:
        lines = list(first_lines(package))
        everything += lines
        for line in lines:
            if line.is_closed_class or not line.is_sentence:
                print(line)
        print(f"{package}: {share(lines):.1%} of {len(lines)}")
    print(f"total: {share(everything):.1%} of {len(everything)}")


if __name__ == "__main__":
    main()
