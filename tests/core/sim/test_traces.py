"""Trace files: reading, repairs, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbbsp_core.sim import TraceError, read_trace

HEADER = "worker,step,samples,busy_seconds,load\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_workers_that_have_names_are_numbered_by_them(tmp_path: Path) -> None:
    rows = "node10,0,32,1,1\n node9,0,32,2,1\nnode10,1,32,1,1\n"
    trace = read_trace(written(tmp_path, HEADER + rows))
    assert [(each.worker, len(each.steps)) for each in trace.series] == [(0, 1), (1, 2)]
    assert trace.notes == ("workers are numbered from 0 on by name: 'node9', 'node10'",)


def test_reads_workers_steps_and_drivers(tmp_path: Path) -> None:
    text = HEADER + "1,0,32,0.5,7\n0,0,32,0.25,9\n0,1,64,0.5,8\n1,1,64,1,6\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.drivers == ("load",)
    assert [series.worker for series in trace.series] == [0, 1]
    assert trace.series[0].speeds.tolist() == [128, 128]
    assert [m.drivers for m in trace.series[1].measurements] == [(7,), (6,)]
    assert trace.series[1].steps.tolist() == [0, 1]
    assert trace.notes == ()


def test_columns_may_be_in_any_order_and_without_drivers(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "busy_seconds, step,worker,samples\n0.5,3,2,32\n"))
    (series,) = trace.series
    assert (series.worker, series.steps.tolist(), series.speeds.tolist()) == (2, [3], [64])
    assert trace.drivers == ()
    assert series.measurements[0].drivers == ()


def test_a_byte_order_mark_blank_lines_and_windows_ends_are_fine(tmp_path: Path) -> None:
    text = "\ufeff" + (HEADER + "0,0,32,0.5,1\n\n0,1,32,0.5,1\n").replace("\n", "\r\n")
    assert len(read_trace(written(tmp_path, text)).series[0]) == 2


def test_sorts_and_says_so(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEADER + "0,1,32,0.5,1\n0,0,32,1,1\n0,2,32,2,1\n"))
    assert trace.series[0].speeds.tolist() == [32, 64, 16]
    assert trace.notes == ("worker 0: steps out of order from line 3: sorted by step",)


def test_skips_gaps_and_says_so(tmp_path: Path) -> None:
    text = HEADER + "0,4,32,0.5,1\n0,5,32,0.5,1\n0,8,32,0.5,1\n1,4,32,0.5,1\n"
    trace = read_trace(written(tmp_path, text))
    assert len(trace.series[0]) == 3
    assert trace.notes == (
        "worker 0: 2 steps missing, the first is 6: its rows are taken as consecutive iterations",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: the file is empty"),
        ("\n\n", r"line 1: the file is empty"),
        (HEADER, r"line 2: no rows"),
        ("worker,step,samples\n0,0,32\n", r"line 1: no column 'busy_seconds' among worker, step"),
        ("worker,step,step,samples,busy_seconds\n", r"line 1, column 3: 'step' .* twice"),
        ("worker,step,samples,busy_seconds,\n", r"line 1, column 5: '' is empty"),
        (
            HEADER + "0,0,32,0.5,1\n0,1,32",
            r"line 3, column 'samples': 3 of 5 .* does not match the header",
        ),
        (HEADER + "0,0,32,0.5,1,9\n", r"line 2, column 'load': 6 of 5 columns"),
        (HEADER + "0,0,32,fast,1\n", r"line 2, column 'busy_seconds': .* got 'fast'"),
        (HEADER + "0,0,32,0.5,\n", r"line 2, column 'load': .* got ''"),
        (HEADER + "0,0,32,0.5,V100\n", r"'load': .* got 'V100': remove the column"),
        (HEADER + "a,0,32,1,1\n1,0,32,1,1\n", r"line 2, column 'worker': .* got 'a'"),
        (HEADER + ",0,32,1,1\n", r"line 2, column 'worker': .* got ''"),
        (HEADER + "0,0,32,nan,1\n", r"line 2, column 'busy_seconds': .* finite"),
        (HEADER + "0,0,32,0.5,inf\n", r"line 2, column 'load': .* finite"),
        (HEADER + "0,0,0,0.5,1\n", r"line 2, column 'samples': must be > 0, got '0'"),
        (HEADER + "0,0,32,-1,1\n", r"line 2, column 'busy_seconds': must be > 0, got '-1'"),
        (HEADER + "0,0.5,32,1,1\n", r"line 2, column 'step': must be a whole number"),
        (HEADER + "-1,0,32,1,1\n", r"line 2, column 'worker': must be a whole number"),
        (HEADER + "10000000000000000,0,32,1,1\n", r"line 2, column 'worker': .* below 2\^53"),
        (HEADER + "0,9223372036854775808,32,1,1\n", r"line 2, column 'step': .* below 1e\+18"),
        (HEADER + "0,0,32,1e-320,1\n", r"line 2, column 'busy_seconds': must be between 1e-12"),
        (HEADER + "0,0,1e13,1,1\n", r"line 2, column 'samples': must be .* correct the unit"),
        (HEADER + "0,0,32,1,1e308\n", r"line 2, column 'load': .* below 1e\+18"),
        (HEADER + "0,7,32,1,1\n1,7,32,1,1\n0,7,32,2,1\n", r"line 4, .* step 7 already in line 2"),
        (HEADER + '0,0,32,"0.5,1\n', r"cannot be read as a CSV"),
    ],
)
def test_an_error_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"worker,step\xff\xfe\n")
    for name in ("x.csv", "none.csv", "."):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path / name)
