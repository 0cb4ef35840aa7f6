"""Jobs on several hosts: small processes behind an ssh of our own, and sshd in namespaces."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from namespaces import LINK, ip, namespaces
from waits import until

from lbbsp_core._version import __version__
from lbbsp_core.launch import launch, restart, supervise

ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
GRACE = 300.0  # only ends what hangs

# As a login does, it greets, and starts from a session and an environment of its own.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    case $1 in -o) shift 2 ;; *) shift ;; esac
done
host=$1
case $host in
    dead) echo "ssh: connect to host dead port 22: No route to host" >&2; exit 255 ;;
    bare) echo "env: python: No such file or directory" >&2; exit 127 ;;
    old) echo "lbbsp agent 0.0.1"; exec cat >&2 ;;
    mute) echo "lbbsp agent @VERSION@"; echo '["line", "hello"]'; exec sleep 300 ;;
    moved) mv "$PWD" "$PWD.moved" ;;
    busy) if mkdir "$0.was-busy" 2>/dev/null; then
        echo "kex_exchange_identification: Connection closed by remote host" >&2; exit 255
    fi ;;
    curt) printf "Hi."; host=Hi. ;;
esac
shift
[ $host = Hi. ] || echo "Welcome to $host."
exec setsid env -i --default-signal=HUP,INT,TERM HOME="$HOME" PATH=/usr/bin:/bin TEST=@TEST@ \\
    ON="$host" sh -c "$*"
"""

RANK = """
import json, os, signal, subprocess, sys, time
from lbbsp_core.runtime.reliability import marks
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def hang(): time.sleep(300)
"""

DRIVER = f"""
import sys
from lbbsp_core.launch import launch, supervise
supervise.TERM_SECONDS = 0.1  # the grace alone lets workers write
sys.exit(launch([sys.argv[1]], hosts="a,b", grace={GRACE}))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Returns a function that writes the script of a worker, in the folder of the job."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.replace("@TEST@", str(tmp_path)).replace("@VERSION@", __version__))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "my project").mkdir()
    monkeypatch.chdir(tmp_path / "my project")

    def write(body):
        Path("train.py").write_text(RANK + body)
        return "train.py"

    yield write
    until(lambda: not left_over(tmp_path))


def left_over(tmp_path):
    """Returns the processes that ssh has started for this test, and what these have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST") == str(tmp_path):
                found.append(f"{process.pid}: {process.cmdline()}")
    return found


@pytest.fixture
def run(monkeypatch):
    """Returns a function that launches a job, and the lines of its workers.

    Attempts follow at once, and workers have all the time that they need to end.
    """
    monkeypatch.setattr(restart, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(supervise, "TERM_SECONDS", GRACE)
    lines = defaultdict(list)

    def start(command, hosts="a,b", **options):
        take = lambda rank, line: lines[rank].append(line)  # noqa: E731
        return launch([command], hosts=hosts, output=take, **options)

    return start, lines


def test_workers_run_on_their_hosts_as_they_would_here(script, run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "x=\"y\" '$HOME'")
    monkeypatch.setenv("DATA", "1")
    monkeypatch.setenv("SECRET", "1")
    start, lines = run
    body = """
names = "ON", "OMP_NUM_THREADS", "DATA", "SECRET", "TF_CPP_MIN_LOG_LEVEL"
print(json.dumps([os.getcwd(), sys.executable, sys.argv, *map(os.environ.get, names)]))
print("\\u2501")
"""
    assert start(script(body), env=["DATA"], run_dir=Path("runs"), log_dir=Path("logs")) == 0
    for rank, host in enumerate("ab"):
        greeting, facts, bar = lines[rank]
        assert greeting == f"Welcome to {host}."
        assert json.loads(facts) == [
            os.getcwd(), sys.executable, ["train.py"], host, os.environ["OMP_NUM_THREADS"], "1",
            None, "2",
        ]  # fmt: skip
        assert bar == "\u2501"
        assert Path(f"logs/worker-{rank}.log").read_text().splitlines()[1:] == lines[rank]
    assert Path("runs").is_dir()


def test_a_worker_that_fails_ends_the_others(script, run, capfd):
    start, lines = run
    body = """
print('here', rank)
def told(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one may come meanwhile
    sys.exit(print(marks.job_has_failed()))
signal.signal(signal.SIGTERM, told)
if not rank: open('ready', 'w')
while not os.path.exists('ready'): time.sleep(0.05)
sys.exit(3) if rank else hang()
"""
    assert start(script(body)) == 3
    assert lines[0][-1] == "True", "the record then says so"
    error = capfd.readouterr().err.splitlines()
    assert error[-2:] == [
        "[1 on b] here 1",
        "lbbsp launch: worker 1 on b failed with exit status 3",
    ]


def test_what_a_killed_worker_has_started_is_ended(script, run, capfd, monkeypatch):
    monkeypatch.setattr(supervise, "TERM_SECONDS", 0.1)
    body = """
subprocess.Popen(["sleep", "300"], start_new_session=True)
if rank: os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hang()
"""
    assert run[0](script(body)) == 137
    assert "worker 1 on b was ended by SIGKILL" in capfd.readouterr().err


def test_what_workers_tell_the_launcher_arrives(script, run, capfd):
    body = "marks.begin()\nif rank: hang()\nmarks.note_lost(1, 'worker 1 was silent')\n"
    assert run[0](script(body + "sys.exit(4)")) == 4
    assert capfd.readouterr().err.splitlines()[-1] == "lbbsp launch: worker 1 was silent"
    body = "marks.begin()\nif rank == 1: sys.exit(0)\nwith marks.waiting(): hang()"
    assert run[0](script(body)) == 1
    assert "worker 1 on b ended with status 0 before training, and worker 0 on a waits for it" in (
        capfd.readouterr().err
    )


def test_a_job_is_restarted_on_the_hosts_that_remain(script, run, capfd):
    start, lines = run
    body = """
print(os.environ["ON"], os.environ["TF_CONFIG"], os.environ["LBBSP_ELASTIC"])
if os.environ["LBBSP_RESTART"] == "0":
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    hang()
"""
    hosts = "a,b,c"
    assert start(script(body), hosts, max_restarts=1, elastic=2, log_dir=Path("logs")) == 0
    assert "restart 1 of 1 with 2 workers, without worker 1" in capfd.readouterr().err
    last = [lines[rank][-1] for rank in range(2)]
    assert [line.split()[0] for line in last] == ["a", "c"]
    assert all('["a:20000", "c:20000"]' in line and line.endswith(" 3/2") for line in last)
    assert Path("logs/worker-1.log").read_text().count("attempt") == 2


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("dead", "dead cannot be reached by ssh: `ssh -o BatchMode=yes dead true` must work"),
        ("bare", "lbbsp cannot be started on bare (exit status 127 of "),
        ("old", "old has lbbsp 0.0.1, and this host "),
        (
            "moved",
            "/my project cannot be entered (No such file or directory): it must be",
        ),
        pytest.param("mute", "mute has given no sign of life for 10 s", marks=pytest.mark.campaign),
    ],
)
def test_a_host_that_differs_is_named_with_the_remedy(script, run, capfd, host, message):
    assert run[0](script("hang()"), host) != 0
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_a_host_may_refuse_a_connection_or_greet_without_a_line(script, run, monkeypatch):
    """As its sshd does while many connect (MaxStartups). Only ASCII may be printed here."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    start, lines = run
    assert start(script("os.write(1, b'\\xe2\\x94\\x81\\n')"), "busy,curt") == 0
    assert lines[0][-3:] == [
        "kex_exchange_identification: Connection closed by remote host", "Welcome to busy.",
        "\u2501",
    ]  # fmt: skip
    assert lines[1] == ["Hi.", "\u2501"]


def test_what_a_host_lacks_is_named(script, run, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    command = script("")
    assert run[0](command, devices="0,1", env=["CUDA_VISIBLE_DEVICES"]) == 2
    assert "CUDA_VISIBLE_DEVICES = '-1', got " in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.campaign
def test_a_port_that_is_in_use_is_named(script, run, capfd):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert run[0](script(""), "a", port=port) == 2
    assert f"port {port} of " in capfd.readouterr().err.splitlines()[-1]


@pytest.fixture
def driver(script, popen):
    """Returns a function that starts a launcher process and waits for both workers' output."""

    def start(body):
        process = popen([sys.executable, "-c", DRIVER, script(body)])
        greetings = 0
        while greetings < 2:
            line = process.stdout.readline()
            assert line, "the launcher ended early"
            greetings += "hello" in line
        return process

    return start


def test_asking_the_launcher_to_end_asks_the_scripts(driver):
    """They get the time that they need to write a checkpoint."""
    body = """
def leave(*_):
    open(f"asked-{rank}", "w")
    while not os.path.exists("may-end"): time.sleep(0.01)
    print("left")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
print("hello")
hang()
"""
    process = driver(body)
    process.send_signal(signal.SIGTERM)
    until(lambda: Path("asked-0").exists() and Path("asked-1").exists())
    Path("may-end").touch()
    output, _ = process.communicate()
    assert process.returncode == 143
    assert output.count("left") == 2


@pytest.mark.parametrize("victim", ["launcher", "connection"])
def test_a_connection_that_ends_ends_its_worker(driver, victim):
    process = driver(
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\nprint('hello')\nhang()"
    )
    if victim == "launcher":
        process.kill()
        process.wait()
        return  # the fixture waits for the end of the workers
    relays = [c for c in psutil.Process(process.pid).children() if "_relay.py" in str(c.cmdline())]
    (ssh,) = relays[0].children()
    ssh.kill()  # here, it is the agent
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "lbbsp launch: the connection to " in output.splitlines()[-1]


@pytest.mark.campaign
def test_output_that_nobody_reads_delays_a_job_and_ends_it_not(driver):
    body = """
print("hello")
while not os.path.exists("go"):
    time.sleep(0.1)
for _ in range(5000):
    print("x" * 1000)
print("end")
"""
    process = driver(body)
    Path("go").touch()  # the fixture has read both greetings, and reads no more
    time.sleep(14)  # more than the silence after which a host counts as lost
    output, _ = process.communicate()
    assert process.returncode == 0
    assert output.count("] end\n") == 2


# --- namespaces -----------------------------------------------------------------------------------

HOSTS = ("10.231.78.1", "10.231.78.2", "10.231.78.3")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Names of three namespaces, in each of which an sshd listens; ssh knows their keys."""
    if SSHD is None or os.getuid() != 0:
        pytest.skip("needs sshd, and root to start it")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", tmp_path / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    config = {
        "HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub",
        "StrictModes": "no", "PidFile": "none", "UsePAM": "no",
        "SetEnv": f"HOME={tmp_path}",  # what starts a shell of this user may print something
    }  # fmt: skip
    (tmp_path / "sshd").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    options = f"-F none -i {tmp_path / 'user'} -o LogLevel=ERROR"
    options += " -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with namespaces(*HOSTS) as names, contextlib.ExitStack() as stack:
        for name in names:
            server = subprocess.Popen(
                ["ip", "netns", "exec", name, SSHD, "-D", "-f", tmp_path / "sshd"]
            )
            stack.callback(server.wait)
            stack.callback(server.terminate)
        for name in names:
            answer = ["ip", "netns", "exec", names[0], ssh, name, "true"]
            until(lambda: subprocess.run(answer).returncode == 0)  # noqa: B023
        yield names


def processes_in(name):
    """Returns the command lines of a namespace, by process."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    found = {}
    for pid in map(int, done.stdout.split()):
        with contextlib.suppress(psutil.Error):
            found[pid] = psutil.Process(pid).cmdline()
    return found


@pytest.fixture
def start_job(cluster, popen):
    """Returns a function that starts a launcher in the first namespace."""
    launcher = ["ip", "netns", "exec", cluster[0], sys.executable, "-m", "lbbsp_core", "launch"]
    return lambda hosts, *words: popen([*launcher, "--hosts", ",".join(hosts), *words], cwd=ROOT)


def unread(pipe):
    """Returns how many bytes a pipe keeps; 65,536 are the most."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("fault", ["kill", pytest.param("unplug", marks=pytest.mark.campaign)])
def test_a_host_that_fails_ends_the_job_on_all(cluster, start_job, tmp_path, fault):
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfor _ in range(500): print('x' * 1000)\nprint('hello')\ntime.sleep(300)\n"
    )
    job = start_job(cluster, "--log-dir", tmp_path / "logs", script)
    until(lambda: unread(job.stdout) > 60_000)  # the pipes are full
    said = [job.stdout.readline().strip("\nx") for _ in range(3 * 501)]
    expected = [f"[{rank}] {word}" for rank in range(3) for word in [""] * 500 + ["hello"]]
    assert sorted(said) == sorted(expected)
    if fault == "kill":
        workers = {pid for pid, words in processes_in(cluster[1]).items() if str(script) in words}
        (worker,) = workers
        os.kill(worker, signal.SIGKILL)
    else:
        ip("-n", cluster[1], "link", "set", LINK, "down")
    output, _ = job.communicate()
    reason = f"worker 1 on {cluster[1]} was ended by SIGKILL"
    if fault == "unplug":
        reason = f"{cluster[1]} has given no sign of life for 10 s"
    assert job.returncode == (137 if fault == "kill" else 1)
    assert output.splitlines()[-1] == f"lbbsp launch: {reason}"
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {
        f"worker-{rank}.log" for rank in range(3)
    }
    until(lambda: all(str(script) not in w for n in cluster for w in processes_in(n).values()))


@pytest.mark.campaign
def test_a_host_runs_more_workers_than_may_connect_at_once(cluster, start_job, tmp_path):
    """By default, sshd refuses some from the eleventh on."""
    (tmp_path / "train.py").write_text("print('hello')")
    job = start_job([cluster[1]] * 24, tmp_path / "train.py")
    output, _ = job.communicate()
    assert job.returncode == 0, output
    assert output.count("] hello\n") == 24


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "example", "printed"),
    [
        ("tensorflow", "keras_digits_balanced.py", "val_accuracy:"),
        ("mxnet", "gluon_digits_balanced.py", "accuracy:"),
    ],
)
def test_three_hosts_train_an_example(cluster, start_job, framework, example, printed):
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    words = ["--framework", framework, "--ranks", "0", f"examples/{example}"]
    job = start_job(cluster, *words)
    said, _ = job.communicate()
    assert job.returncode == 0, said
    found = [line for line in said.splitlines() if printed in line]
    assert all(line.startswith("[0]") for line in found), "MXNet's rank 0 is the launcher's"
    assert float(found[-1].rpartition(printed)[2].split()[0]) > 0.8
