"""Without this docs/reproduction.md differs from what its command prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reproduction
from reproduction_tables import Table

DOCUMENT = Path(__file__).parents[3] / "docs" / "reproduction.md"
VIRTUAL = Table("steps", ("sync", "gain"), [("bsp", "1.00x"), ("asp", "1.10x"), ("", "1.20x")])
TIMED = Table("times", ("n", "us", "paper"), [("10", "64", "149"), ("100", "174", "")], labels=1)


@pytest.mark.campaign
def test_the_document_has_the_figures_that_the_simulator_gives(capsys: Any) -> None:
    cheap = ["dynamic-batching", "elasticbsp-links"]
    status = reproduction.main(["--only", *cheap, "--check", str(DOCUMENT)])
    assert status == 0, capsys.readouterr().err


def test_each_table_of_the_document_belongs_to_a_section() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    names = [line.split()[2] for line in lines if line.startswith("<!-- table: ")]
    assert len(names) == len(set(names))
    for section in reproduction.SECTIONS:
        assert section in names
    for name in names:
        assert any(name.startswith(section) for section in reproduction.SECTIONS)
    tables = sum(line.startswith("|---") for line in lines)
    assert tables == len(names), "every table has a marker above it"


def test_a_virtual_table_must_be_the_same_line_by_line() -> None:
    document = f"text\n\n{VIRTUAL.markdown()}\n\ntext"
    assert "| | 1.20x |" in document
    assert VIRTUAL.differences(document) == []
    (_, _, _, old, new) = VIRTUAL.differences(document.replace("1.10x", "1.11x"))
    assert (old, new) == ("-| asp | 1.11x |", "+| asp | 1.10x |")
    assert VIRTUAL.differences(document.replace("| asp | 1.10x |\n", ""))
    assert "paste the table" in VIRTUAL.differences("text")[0]


def test_measured_times_are_compared_in_their_labels() -> None:
    document = TIMED.markdown()
    assert TIMED.differences(document.replace("| 64 |", "| 1,000 |")) == []
    assert TIMED.differences(document.replace("| 100 |", "| 101 |"))
    assert TIMED.differences(document.replace("| us |", "| ms |"))
    assert TIMED.differences(document.replace("| 64 |", "| |"))
    assert TIMED.differences(document.replace("| 10 | 64 | 149 |\n", ""))


def test_the_exit_status(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def section() -> Iterator[Table]:
        yield VIRTUAL
        yield TIMED

    monkeypatch.setattr(reproduction, "SECTIONS", {"mine": section})
    assert reproduction.main([]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "same.md").write_text(printed)
    assert reproduction.main(["--check", str(tmp_path / "same.md")]) == 0
    (tmp_path / "other.md").write_text(printed.replace("1.20x", "1.3x"))
    assert reproduction.main(["--only", "mine", "--check", str(tmp_path / "other.md")]) == 1
    assert "-| | 1.3x |" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reproduction.main(["--only", "nothing"])
