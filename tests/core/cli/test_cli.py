"""The command line: parsing, errors, exit statuses."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from report_runs import line as step_line
from report_runs import save
from rich.console import Console
from typer.testing import CliRunner
from waits import HANG_SECONDS

from lbbsp_core import Profile
from lbbsp_core.cli import launch as launch_module
from lbbsp_core.cli.app import COMMANDS, application
from lbbsp_core.cli.demo import Progress
from lbbsp_core.demo import comparison
from lbbsp_core.installation import extra
from lbbsp_core.launch.contention import bursty
from lbbsp_core.runtime.record.record import Run, run_header


def run(*arguments):
    return CliRunner().invoke(application(), [str(argument) for argument in arguments])


@pytest.fixture
def jobs(monkeypatch):
    """What `launch` was asked for, instead of launching it."""
    asked = []

    def job(command, **options):
        asked.append((command, options))
        return 7

    monkeypatch.setattr(launch_module, "launch_job", job)
    return asked


# lbbsp launch


def test_launch_hands_everything_on(jobs):
    result = run(
        "launch", "-n", 3, "--speeds", "1,1,0.5", "--speeds-at", "30:0.5,1,1",
        "--contention", "bursty:4", "--devices", "0,1+2,none",
        "--speeds-at", "60:1,1,1", "--run-dir", "here", "--timeout", 9,
        "--max-restarts", 3, "--elastic", 2, "--grace", 5, "--log-dir", "logs", "--ranks", "0,2",
        "--hosts", "a,b,c", "--rank", 1, "--port", 7000, "--env", "A", "--env", "B", "train.py",
    )  # fmt: skip
    assert result.exit_code == 7
    options = {
        "workers": 3, "framework": "tensorflow", "servers": None, "speeds": [1.0, 1.0, 0.5],
        "speeds_at": [(30.0, [0.5, 1.0, 1.0]), (60.0, [1.0, 1.0, 1.0])],
        "contention": [bursty(worker, 4) for worker in range(3)], "devices": "0,1+2,none",
        "run_dir": Path("here"), "timeout": 9.0, "max_restarts": 3, "elastic": 2, "grace": 5.0,
        "log_dir": Path("logs"), "ranks": [0, 2], "hosts": "a,b,c", "rank": 1, "port": 7000,
        "env": ["A", "B"],
    }  # fmt: skip
    assert jobs == [(["train.py"], options)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "5", "--speeds", "fast"],
        ["--help"],
        ["--", "-x", "--", "y z", ""],
        ["-v", "plain", "--timeout=1", "--run-dir", "there"],
    ],
)
def test_the_arguments_of_the_script_are_its_own(jobs, arguments):
    result = run("launch", "-n", 1, "train.py", *arguments)
    [(command, options)] = jobs
    assert command == ["train.py", *arguments]
    assert options["speeds"] is options["run_dir"] is options["devices"] is None
    assert options["speeds_at"] == []
    noted = "the script gets --speeds, which follows it: options of lbbsp launch come first"
    assert (noted in result.stderr) == ("--speeds" in arguments)


@pytest.mark.parametrize("option", ["-n", "--workers", "--workers=2"])
def test_workers_behind_the_script_are_noted_where_they_are_missing(jobs, option):
    noted = "options of lbbsp launch come first"
    assert noted in run("launch", "train.py", option, 2).stderr
    assert noted not in run("launch", "-n", 1, "train.py", option, 2).stderr


def test_a_module_is_handed_on_as_to_python(jobs):
    run("launch", "-n", 1, "-m", "package.train", "-m", "--epochs", "5")
    run("launch", "-n", 1, "--module", "train")
    assert [command for command, _ in jobs] == [
        ["-m", "package.train", "-m", "--epochs", "5"],
        ["-m", "train"],
    ]


@pytest.mark.slow
def test_launch_runs_a_script(tmp_path):
    (tmp_path / "script.py").write_text(
        "import json, os, sys, time\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "with open(f'{sys.argv[1]}/{rank}.part', 'w') as file: json.dump(sys.argv[2:], file)\n"
        "os.rename(file.name, f'{sys.argv[1]}/{rank}')\n"
        "while rank and not os.path.exists(f'{sys.argv[1]}/0'): time.sleep(0.01)\n"
        "sys.exit(5 if rank else 0)\n"
    )
    command = [sys.executable, "-c", "from lbbsp_core.cli import main; main()", "launch", "-n", "2"]
    arguments = ["-n", "--", "--speeds", "x y"]
    done = subprocess.run(
        [*command, "-m", "script", tmp_path, *arguments],
        timeout=HANG_SECONDS,
        cwd=tmp_path,  # where python -m finds the module
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 5
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [arguments] * 2


# lbbsp demo


def write_lines(folder, *lines, workers=2, total=8):
    save(
        folder,
        Run(run_header("none", workers=workers, global_batch_size=total, versions={}), lines),
    )


def pretend(seconds_a_sample, status=0, hidden=0.0):
    """A `launch` that leaves behind what the demo's workers would."""

    def job(command, *, workers, speeds, run_dir, **options):
        if status:
            return status
        policy = command[command.index("--policy") + 1]
        sizes = [4] * workers if policy == "bsp" else [6, 2]
        steps = range(int(command[command.index("--steps") + 1]))
        busy = [x * cost for x, cost in zip(sizes, seconds_a_sample, strict=True)]
        lines = [step_line(k, sizes, busy, max(busy) + 0.01) for k in steps]
        hides = hidden * (policy != "bsp")
        lines = [replace(each, hidden_seconds=hides) for each in lines]
        write_lines(run_dir, *lines, workers=workers, total=sum(sizes))
        np.savez(run_dir / "final.npz", accuracy=0.97, weights_0=np.array([[-2.0, 1.0]]))
        options["output"](0, "a word from a worker")
        return 0

    return job


@pytest.fixture
def complete(monkeypatch):
    monkeypatch.setattr(comparison, "find_spec", lambda name: 1)


def test_demo_writes_figures_records_and_a_picture(monkeypatch, tmp_path, complete):
    pytest.importorskip("plotly")
    monkeypatch.setattr(comparison, "launch", pretend([0.01, 0.03], hidden=0.014))
    folder, copy = tmp_path / "out", tmp_path / "deep" / "figures.json"
    result = run(
        "demo", "--workers", 2, "--speeds", "1,0.33", "--steps", 20, "--run-dir", folder,
        "--json", copy,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads((folder / "summary.json").read_text())
    assert figures["speedup"] == pytest.approx(0.13 / 0.07)
    assert figures["efficiency"] == pytest.approx(1)
    assert figures["max_weight_difference"] == 0
    assert json.loads(copy.read_text()) == figures
    assert "LB-BSP trains 1.9 times as fast as plain BSP" in (folder / "demo.html").read_text()
    for name in ("bsp", "lbbsp"):
        assert (folder / name / "run.jsonl").exists()
        assert (folder / name / "output.log").read_text() == "[0] a word from a worker\n"
    assert "LB-BSP trains 1.9 times as fast as plain BSP" in result.output
    for name in ("waiting for other workers", "waiting and communication", "speed-up, measured"):
        assert name in result.output
    [row] = [row for row in result.output.splitlines() if "hidden communication" in row]
    assert re.findall(r"[0-9.]+ %", row) == ["0.0 %", "20.0 %"]
    assert "Balanced: 1.4 to 1.9 times as fast" in (folder / "report.html").read_text()
    assert f"open{folder / 'report.html'}" in "".join(result.output.split())


@pytest.mark.parametrize(("slow", "said"), [(0.012, True), (0.03, False)])
def test_demo_says_when_its_workers_were_hardly_unequal(
    monkeypatch, tmp_path, complete, slow, said
):
    monkeypatch.setattr(comparison, "launch", pretend([0.01, slow]))
    result = run("demo", "--workers", 2, "--speeds", "1,0.33", "--steps", 20, "--run-dir", tmp_path)
    text = "only 1.2 times as long as the fastest one, though 3.0 times were emulated"
    assert (text in " ".join(result.output.split())) == said
    assert (text in (tmp_path / "demo.html").read_text()) == said


def test_demo_fails_as_its_workers_do(monkeypatch, tmp_path, complete):
    monkeypatch.setattr(comparison, "launch", pretend([], status=137))
    stale = tmp_path / "bsp" / "run.jsonl"
    stale.parent.mkdir()
    stale.write_text("of an older run\n")
    result = run("demo", "--run-dir", tmp_path)
    assert result.exit_code == 137
    assert "plain BSP run failed" in result.output
    assert "output.log" in result.output
    assert not stale.exists()


@pytest.mark.parametrize(
    ("missing", "cure"),
    [("tensorflow", "tf-cpu"), ("sklearn", "demo"), ("plotly", "demo")],
)
def test_demo_says_what_to_install(monkeypatch, tmp_path, missing, cure):
    monkeypatch.setattr(comparison, "find_spec", lambda name: None if name == missing else 1)
    result = run("demo", "--run-dir", tmp_path)
    assert result.exit_code == 2
    [line] = result.output.splitlines()
    assert f"pip install {extra(cure)}" in line


@pytest.mark.parametrize(
    ("version", "where"),
    [((3, 12, 1), ""), ((3, 13, 0), " in a virtual environment with Python 3.12 or earlier")],
)
def test_demo_says_which_python_its_framework_needs(monkeypatch, version, where):
    monkeypatch.setattr(comparison, "find_spec", lambda name: None)
    monkeypatch.setattr(comparison.sys, "version_info", version)
    with pytest.raises(ModuleNotFoundError) as raised:
        comparison.require_packages("mxnet")
    assert str(raised.value) == (f"mxnet is not installed: run pip install {extra('mx')}{where}")


def test_progress_follows_a_record_that_grows(tmp_path):
    path = tmp_path / "run.jsonl"
    progress = Progress("LB-BSP", 20, path)

    def shown():
        console = Console(width=120)
        with console.capture() as capture:
            console.print(progress)
        return capture.get()

    assert "starting" in shown()
    write_lines(tmp_path, step_line(0, (3, 5), (0.1, 0.2), 0.25))
    with path.open("a") as stream:
        stream.write('{"step": 1, "si')
    assert "step 1/20" in shown()
    assert "250 ms" in shown()
    assert "3 + 5" in shown()


# Tables


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "simulate --scenario constant --workers 4 --steps 9 --sync bsp,elasticbsp:15",
            "bsp,proportional:ratings=1/1/0.5/0.5",
        ),
        ("evaluate trace.csv", "ema0.2,narx:hidden=1:window=20"),
    ],
)
def test_tables_fold_names_and_never_cut_figures(monkeypatch, tmp_path, command, names):
    option = "--policies" if "simulate" in command else "--predictors"
    monkeypatch.chdir(tmp_path)
    rows = [f"{worker},{step},8,{1 + worker + step % 3}" for worker in (0, 1) for step in range(30)]
    Path("trace.csv").write_text("\n".join(["worker,step,samples,busy_seconds", *rows]))

    def output(columns):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", False)
        text = run(*command.split(), option, names).output
        return text, Counter(re.findall(r"\d+\.\d\d s|\d+\.\d%|\d\.\d{4}", text))

    whole, figures = output(None)
    assert len(figures) > 5
    assert all(name in whole for name in names.split(","))
    for columns in ("60", "80"):
        text, shown = output(columns)
        assert shown == figures
        assert max(map(len, text.splitlines())) <= int(columns)


# Texts of files

EVIL = "cpu\x1b[2J\x07\x9b[red]"


def recorded(folder, driver):
    """Writes the record of a run with a driving factor."""
    lines = [
        step_line(k, (8, 8), (0.1, 0.2 + 0.1 * (k % 3)), 0.5, drivers={driver: (k % 5, 99.0)})
        for k in range(40)
    ]
    header = run_header("none", workers=2, global_batch_size=16, versions={}, drivers=[driver])
    save(folder, Run(header, lines))
    return folder


def test_what_files_contain_is_shown_without_escapes(tmp_path):
    """In names of drivers, columns and files, and in errors."""
    folder = recorded(tmp_path / EVIL, EVIL)
    trace = tmp_path / f"{EVIL}.csv"
    for command in (
        ("simulate", "--from-run", folder, "--predictors", "last"),
        ("evaluate", "--from-run", folder, "--predictors", "last", "--export", trace),
        ("watch", folder, "--once"),
        ("report", folder),
        ("simulate", "--trace", trace, "--predictors", "last"),
        ("simulate", "--trace", tmp_path / f"{EVIL}{EVIL}.csv"),
        ("evaluate", trace, "--predictors", EVIL),
    ):
        done = run(*command)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.output), command
    assert len(run("evaluate", f"{EVIL}/{'long' * 9999}").output) < 2500


@pytest.mark.parametrize("words", ["evaluate --from-run", "simulate --from-run", "watch", "report"])
def test_a_record_may_have_a_factor_that_this_version_does_not_know(tmp_path, words):
    pytest.importorskip("plotly")
    once = ("--once",) * (words == "watch")
    done = run(*words.split(), recorded(tmp_path, "cpu_pressure_percent"), *once)
    assert done.exit_code == 0, done.output


# lbbsp profile


@pytest.fixture
def step_script(tmp_path):
    """A script whose step takes a second a sample, of a clock of its own."""
    path = tmp_path / "train.py"
    path.write_text(
        "import time\n"
        "now = 0.0\n"
        "time.perf_counter = lambda: now\n"
        "def step(batch_size):\n"
        "    global now\n"
        "    if batch_size > 5:\n"
        "        raise MemoryError\n"
        "    now += batch_size\n"
    )
    return path


@pytest.mark.slow
def test_profile_writes_what_it_prints(tmp_path, step_script):
    pytest.importorskip("plotly")
    out, figures, picture = (tmp_path / name for name in ("gpu.json", "copy.json", "curve.html"))
    done = run(
        "profile", step_script, "--json", figures, "-o", out, "--plot", picture,
        "--max-batch", 64, "--repeats", 2, "--rounds", 1, "--longest-step", 1e9,
        "--timeout", HANG_SECONDS, "--", "--own",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert json.loads(figures.read_text()) == document
    assert document["out_of_memory_at"] == 6
    measured = [(point["batch"], point["seconds"]) for point in document["points"]]
    assert measured == [(batch, float(batch)) for batch in range(1, 6)]
    assert Profile.load(out).limits().maximum == 5
    assert "out of memory at 6" in done.output
    assert f"{document['best']} (best)" in done.output
    assert "Time of a step" in picture.read_text()


@pytest.mark.slow
def test_profile_writes_to_profile_json_where_nothing_is_said(tmp_path, step_script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("profile", step_script, "--max-batch", 2, "--rounds", 1).exit_code == 0
    assert json.loads((tmp_path / "profile.json").read_text())["out_of_memory_at"] is None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_and_says_what_its_values_are(command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: root {command} [OPTIONS]")
    assert not re.search(r"<|x>=|TEXT|INTEGER|FLOAT|PATH", done.output), "names of types"
    assert run(command, "-h").output == done.output


# Paths and numbers that cannot be right


@pytest.fixture
def places(tmp_path, monkeypatch, step_script):
    """A folder to be in, with a file, a folder, a trace and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    rows = [f"{w},{k},32,0.{5 + w}" for k in range(12) for w in range(2)]
    (tmp_path / "trace.csv").write_text("worker,step,samples,busy_seconds\n" + "\n".join(rows))
    (tmp_path / "slow.toml").write_text("workers = 1000000\nsteps = 1000000\n")
    (tmp_path / "run.jsonl").write_text("{")
    lines = [step_line(k, [4, 4], [0.1, 0.3], 0.31) for k in range(12)]
    for folder in ("recorded", "linked"):
        write_lines(tmp_path / folder, *lines, workers=2, total=8)
    (tmp_path / "linked" / "report.html").symlink_to("elsewhere.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch -n 2 --run-dir file train.py", ""),
        ("launch -n 2 --run-dir /proc/new train.py", ""),
        ("launch -n 2 --contention folder train.py", ""),
        ("launch -n 2 --framework MXNet train.py", "there is no framework 'MXNet': did you mean"),
        ("launch -n 2 --env HOME train.py", "env = ['HOME'] is for processes on other hosts, and"),
        ("launch -n 2 --ranks x train.py", "--ranks must be a list of integers separated by"),
        (
            "launch -n 2 --speeds 1,fast train.py",
            "--speeds must be a list of numbers separated by commas, got '1,fast': give the speed "
            "of each worker relative to the fastest, such as 1,1,0.5",
        ),
        ("launch -n 2 --speeds 1;2 train.py", "--speeds must be a list of numbers"),
        ("launch -n 2 --speeds 1,0 train.py", "speeds must be positive, between 1e-12 and 1e12"),
        ("launch -n 2 --speeds-at 0.5,1 train.py", "--speeds-at must be SECONDS:SPEEDS, got '0.5,"),
        ("launch -n 2 --speeds-at soon:0.5,1 train.py", "--speeds-at must be SECONDS:SPEEDS, got"),
        ("launch -n 2 --speeds-at 30: train.py", "--speeds-at must be SECONDS:SPEEDS, got '30:': "),
        ("launch -n 99999999999999999999 train.py", "a number is too large: "),
        ("launch -n 2 trian.py", ""),
        ("launch -n 2 -m trian", ""),
        ("launch train.py", "workers must be given: -n N starts N"),
        ("demo --run-dir file", ""),
        ("demo --run-dir file/new", "--run-dir cannot be written to file/new: /"),
        ("demo --json folder", ""),
        ("demo --framework MXNet", "there is no framework 'MXNet': did you mean 'mxnet'? Known"),
        ("demo --speeds x", "--speeds must be a list of numbers separated by commas, got 'x'"),
        ("demo --workers 2 --speeds 1,1,1", "--speeds must hold one speed for each of the 2 wo"),
        ("demo --speeds 1,0,1", "speeds must be positive, between 1e-12 and 1e12, got 0.0"),
        ("demo --workers 1", "workers must be an integer >= 2, got 1"),
        ("demo --workers 99999999999999999999", ""),
        ("demo --steps 0", ""),
        ("doctor --framework MXNet", "there is no framework 'MXNet': did you mean 'mxnet'? Known"),
        ("doctor --framework none --json file/below.json", ""),
        ("doctor --framework none --json /dev/full", "/dev/full: No space left on device"),
        ("evaluate none.csv", "none.csv: cannot be read as a CSV text file: No such file or dir"),
        ("evaluate folder", ""),
        ("evaluate run.jsonl", ""),
        ("evaluate trace.csv --json folder", ""),
        ("evaluate trace.csv --json trace.csv", ""),
        ("evaluate trace.csv --predictors nrx", ""),
        ("evaluate trace.csv --predictors ,", ""),
        ("evaluate trace.csv --export folder", ""),
        ("evaluate trace.csv --export out.csv", ""),
        ("evaluate trace.csv --horizon 99999999999999999999", ""),
        ("evaluate --from-run recorded --export recorded/run.jsonl", ""),
        ("evaluate --from-run none", "none has no run record (run.jsonl): name the --run-dir of"),
        ("evaluate", ""),
        ("simulate --trace none.csv", ""),
        ("simulate --trace trace.csv --json folder", ""),
        ("simulate --trace trace.csv --json trace.csv", ""),
        ("simulate --trace trace.csv --plot picture.docx", ""),
        ("simulate --trace trace.csv --plots file", ""),
        ("simulate --trace trace.csv --workers 9223372036854775808", ""),
        ("simulate --trace trace.csv --workers 3,,4", "--workers must be whole numbers >= 2 sep"),
        ("simulate --trace trace.csv --communication inf", ""),
        ("simulate --trace trace.csv --communication 1e308", ""),
        ("simulate --trace trace.csv --lag 99999999999999999999", ""),
        ("simulate --trace trace.csv --lag=0", "lag must be an integer >= 1, got 0"),
        ("simulate --scenario constant --first-use-seconds 1e308", ""),
        ("simulate --scenario constant --steps 9223372036854775808", ""),
        ("simulate --scenario constant --seed -1", ""),
        ("simulate --scenario marcov", "there is no scenario 'marcov': did you mean 'markov'?"),
        ("simulate --scenario folder", ""),
        ("simulate --scenario slow.toml", ""),
        ("simulate --from-run none", "none has no run record (run.jsonl): name the --run-dir of"),
        ("profile none.py", "none.py: there is no such file"),
        ("profile folder", "folder: there is no such file"),
        ("profile file", "file:step: the script cannot be loaded: ImportError: file is not a Pyt"),
        ("profile train.py --out folder", ""),
        ("profile train.py --plot picture.docx", ""),
        ("profile train.py:step --out train.py", ""),
        ("profile train.py --max-batch 0", "max_batch must be an integer >= 1, got 0"),
        ("profile train.py --timeout 1e300", ""),
        ("report none", "none has no run record (run.jsonl): name the --run-dir of"),
        ("report file", ""),
        ("report folder -o folder", ""),
        ("report linked", "linked/report.html is a link to /"),
        ("report run.jsonl -o run.jsonl", "--out must not be a file that is read, got run.jsonl"),
        ("report recorded --json recorded/run.jsonl", ""),
        ("watch none --once", ""),
        ("watch folder --once", ""),
        ("watch trace.csv --once", ""),
        ("watch recorded --interval 1e300", ""),
        ("watch recorded --once --timeout -1", ""),
        ("watch recorded --once --json recorded/run.jsonl", ""),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(places, monkeypatch, arguments, message):
    monkeypatch.setattr(comparison, "find_spec", lambda name: 1)
    done = run(*arguments.split())
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True), done.output
    [line] = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith(f"lbbsp {arguments.split()[0]}: {message}")
    assert len(line) < 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lunch", "No such command 'lunch'"),
        ("launch -n 2 --run-dir= train.py", "the path is empty: name a folder, or set the variab"),
        ("launch -n 2", "Missing argument 'SCRIPT.py [ARGS]...'"),
        ("profile", "Missing argument 'SCRIPT.py[:FUNCTION] [-- ARGS]...'"),
        ("demo --steps x", "Invalid value for '--steps': must be an integer, got 'x'"),
        ("simulate --lag x", "Invalid value for '--lag': must be an integer, got 'x'"),
        ("simulate --lag=", "Invalid value for '--lag': must be an integer, got ''"),
        ("simulate --lag 1.5", "Invalid value for '--lag': must be an integer, got '1.5'"),
    ],
)
def test_wrong_usage_has_status_2(arguments, message):
    done = run(*arguments.split())
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]


# --json -: a command line for each command that has the option; its figures are all of the output

FIGURES_OF = {
    "doctor": "doctor --framework none",
    "report": "report recorded",
    "watch": "watch recorded",
    "demo": "demo --workers 2 --steps 20 --run-dir folder",
    "evaluate": "evaluate trace.csv --predictors last,ema0.5",
    "profile": "profile train.py --max-batch 2 --rounds 1",
    "simulate": "simulate --trace trace.csv --policies bsp --predictors last",
}


def test_each_command_with_figures_is_tested():
    commands = typer.main.get_command(application()).commands
    have = {
        name for name, it in commands.items() if any("--json" in p.opts for p in it.loaded.params)
    }
    assert have == set(FIGURES_OF)


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "profile")) for name in FIGURES_OF],
)
def test_figures_are_all_of_standard_output(places, tmp_path, monkeypatch, complete, command):
    if command in ("demo", "report"):
        pytest.importorskip("plotly")
    monkeypatch.setattr(comparison, "launch", pretend([0.01, 0.03]))
    done = run(*FIGURES_OF[command].split(), "--json", "-")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert done.stderr.strip(), "the tables"
    assert not {"-", "profile.json"} & {path.name for path in tmp_path.iterdir()}
    assert run(*FIGURES_OF[command].split(), "--json", "as_file.json").exit_code == 0
    in_file = json.loads((tmp_path / "as_file.json").read_text())
    assert shown.keys() == in_file.keys()


@pytest.mark.parametrize(
    "command",
    [
        "profile train.py --out",
        "profile train.py --plot",
        "report recorded --out",
        "evaluate trace.csv --export",
        "simulate --scenario constant --plot",
    ],
)
def test_only_figures_can_go_to_standard_output(places, tmp_path, command):
    done = run(*command.split(), "-")
    assert (done.exit_code, done.stdout) == (2, "")
    option = command.split()[-1]
    assert f"{option} must be a file, got -: name one, only --json can" in done.stderr
    assert not (tmp_path / "-").exists()


@pytest.mark.slow
def test_a_full_disk_under_the_figures(places, tmp_path):
    (tmp_path / "figures.json").symlink_to("/dev/full")
    done = run("simulate", "--scenario", "constant", "--steps", 20, "--json", "figures.json")
    assert done.exit_code == 2
    assert "efficiency" in done.stdout, "what was computed is shown"
    assert "No space left on device" in done.stderr


def test_the_demo_needs_no_picture(monkeypatch, tmp_path, complete, caplog):
    pytest.importorskip("plotly")
    monkeypatch.setattr(comparison, "launch", pretend([0.01, 0.03]))
    for name in ("summary.json", "demo.html"):
        (tmp_path / name).symlink_to("/dev/full")
    done = run("demo", "--workers", 2, "--steps", 20, "--run-dir", tmp_path)
    assert done.exit_code == 0, done.output
    assert "LB-BSP trains 1.9 times as fast as plain BSP" in done.output
    assert "summary.json" in caplog.text
    assert "demo.html" in caplog.text
