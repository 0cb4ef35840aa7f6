"""The scripts of examples/cluster, with network namespaces as hosts, and a Slurm of our own."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from namespaces import namespaces

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
ADDRESSES = ("10.231.78.1", "10.231.78.2")
SECONDS = 200

SSH = """#!/bin/sh
exec ip netns exec "$1" sh -c "$2"
"""

SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
counts = [int(count) for count in os.environ.get("TASKS", "1").split(",")]
places = [node for node, count in zip(nodes, counts * len(nodes)) for _ in range(count)]
step = {
    "SLURM_STEP_NODELIST": ",".join(nodes),
    "SLURM_STEP_NUM_TASKS": str(len(places)),
    "SLURM_STEP_TASKS_PER_NODE": ",".join(str(places.count(node)) for node in nodes),
}
command = sys.argv[1:]
while command[0].startswith("--"):
    print("srun", command.pop(0), flush=True)
tasks = [
    subprocess.Popen(
        [*os.environ.get("ENTER", "").format(node).split(), *command],
        env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": node},
    )
    for rank, node in enumerate(places)
]
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """#!/bin/sh
case "$1" in
    show) echo "$3" | tr , '\\n' ;;
    *) echo "scontrol $*" ;;
esac
"""


@pytest.fixture
def hosts():
    """Names of two namespaces that a link connects."""
    with namespaces(*ADDRESSES) as names:
        yield names


@pytest.fixture
def programs(tmp_path):
    """Variables with a PATH on which the cluster's own programs are."""
    for name, text in ("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}


def run(command, env):
    """Runs a command, and returns its status and its output."""
    done = subprocess.run(
        [str(part) for part in command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    print(done.stdout)
    return done.returncode, done.stdout


# --- ssh ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path):
    """A command that takes the place of ssh, and runs everything on this machine."""
    (tmp_path / "here").write_text('#!/bin/sh\nexec sh -c "$2"\n')
    (tmp_path / "here").chmod(0o755)
    return tmp_path / "here"


def test_the_first_status_that_is_not_zero_is_that_of_the_job(tmp_path, programs, here):
    """Also with words that a shell would split, and in the folder that is named."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import json, os, sys\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "print(rank, os.getcwd(), sys.argv[1:], os.environ['A'], os.environ['B'])\n"
        "sys.exit(3 * rank)\n"
    )
    status, said = run(
        [
            sys.executable, CLUSTER / "ssh_job.py", "--ssh", here, "--hosts", "a, b",
            "--directory", "~/my project", "--python", sys.executable,
            "--env", "A=1 '2' $HOME", "--env", "B", "--", "train.py", "a b", "--", "$HOME",
        ],
        {**programs, "HOME": str(tmp_path), "B": 'x="y"'},
    )  # fmt: skip
    assert status == 3
    for rank, host in enumerate("ab"):
        words = f"{rank} {folder} ['a b', '--', '$HOME'] 1 '2' $HOME x=\"y\""
        assert f"[{host}] {words}" in said


def test_workers_that_wait_for_one_that_has_failed_are_ended(tmp_path, programs, here):
    """They would wait indefinitely for a worker that fails before it has joined the job."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nsys.exit(3) if '1}' in os.environ['TF_CONFIG'] else time.sleep(99)\n"
    )
    status, said = run(
        [
            *in_a_hurry("ssh_job"), "--ssh", here, "--hosts", "a,b", "--directory", tmp_path,
            "--python", sys.executable, "train.py",
        ],
        programs,
    )  # fmt: skip
    assert status == 3
    ending = "ending worker 0 on a, still running 0.5 s later"
    assert f"worker 1 on b ended with status 3; {ending}" in said


@pytest.mark.parametrize("place", ["/dev/full", "closed"])
def test_a_job_whose_output_cannot_be_written_ends(tmp_path, programs, here, place):
    (tmp_path / "train.py").write_text("while True: print('x' * 1000)\n")
    command = [
        sys.executable, CLUSTER / "ssh_job.py", "--ssh", here, "--hosts", "a,b",
        "--directory", tmp_path, "--python", sys.executable, "train.py",
    ]  # fmt: skip
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing if place == "closed" else place, "w") as stdout:
        job = subprocess.Popen(
            list(map(str, command)), env=programs, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    if place != "closed":
        os.close(writing)
    try:
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode == 143
    assert "the output cannot be written" in said


def test_output_that_this_terminal_cannot_show_is_replaced(tmp_path, programs, here):
    text = "import sys; sys.stdout.buffer.write('a\u2501b\\n'.encode())\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    words = ["--ssh", here, "--hosts", "a", "--directory", tmp_path, "--python", sys.executable]
    status, said = run(
        [sys.executable, CLUSTER / "ssh_job.py", *words, "train.py"],
        {**programs, "PYTHONIOENCODING": "latin-1"},
    )
    assert (status, "[a] a?" in said) == (0, True)


def in_a_hurry(name):
    """Returns the command of a script of this folder whose patience is half a second."""
    code = (
        f"import sys; sys.path.insert(0, {str(CLUSTER)!r})\n"
        f"import worker, {name}; worker.END_SECONDS = 0.5\n"
        f"sys.exit({name}.main())"
    )
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(("text", "message"), [("9A=1", "must be NAME or NAME=VALUE, got 9A=1"),
    ("LBBSP_UNSET", "LBBSP_UNSET is not set here")])  # fmt: skip
def test_variables_that_cannot_be_set_are_refused(programs, text, message):
    command = [sys.executable, CLUSTER / "ssh_job.py", "--hosts", "a", "--env", text, "x.py"]
    status, said = run(command, programs)
    assert status == 2
    assert message in said


# --- Slurm ----------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "41007", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_TASKS_PER_NODE": "1(x3)"}


@pytest.mark.campaign
def test_the_resolver_of_slurm_trains_with_lbbsp(hosts, programs):
    slurm = {**JOB, "SLURM_JOB_NODELIST": ",".join(hosts), "ENTER": "ip netns exec {}"}
    status, said = run(["srun", sys.executable, CLUSTER / "keras_slurm.py"], {**programs, **slurm})
    assert status == 0
    assert float(re.findall(r" val_accuracy: ([\d.]+)", said)[-1]) > 0.8


def test_host_names_that_tensorflow_sorts_otherwise_than_slurm_are_refused(programs):
    task = {
        "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURMD_NODENAME": "node1",
        "SLURM_STEP_NODELIST": "node1,node9,node10", "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    }  # fmt: skip
    status, said = run([sys.executable, CLUSTER / "keras_slurm.py"], {**programs, **task})
    assert status == 1
    assert "TensorFlow takes node1, node10, node9 for the hosts of tasks 0 to 2" in said
    assert "Slurm's order is node1, node9, node10" in said
    assert "use slurm.sbatch" in said


SHOW = (
    "import os, sys\n"
    "sys.stdout.write(f\"{os.environ['TF_CONFIG']} {sys.argv[1:]}\\n\")\n"
    "sys.exit(int(os.environ.get('LEFT', 0)))\n"
)


def submit(programs, tmp_path, **variables):
    """Runs the batch script; returns its status, its output and the TF_CONFIG of each task."""
    (tmp_path / "train.py").write_text(SHOW)
    words = [CLUSTER / "slurm.sbatch", tmp_path / "train.py", "--rate", "a b"]
    status, said = run(["bash", *words], {**programs, **JOB, **variables})
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert all(line.endswith(" ['--rate', 'a b']") for line in lines)
    return status, said, [json.JSONDecoder().raw_decode(line)[0] for line in lines]


@pytest.mark.parametrize(
    ("left", "restarts", "again"),
    [(0, None, False), (143, None, True), (143, "29", True), (143, "30", False), (1, None, False)],
)
def test_the_slurm_job_starts_each_task_and_is_queued_again(
    programs, tmp_path, left, restarts, again
):
    count = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    status, said, configs = submit(
        programs, tmp_path, SLURM_JOB_NODELIST="n1,n2,n3", LEFT=str(left), **count
    )
    assert status == left
    workers = [f"n{i}:28112" for i in (1, 2, 3)]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 3
    assert sorted(config["task"]["index"] for config in configs) == [0, 1, 2]
    assert ("scontrol requeue 41007" in said) == again
    bounded = "not queued again after 30 restarts: raise LBBSP_MAX_RESTARTS" in said
    assert bounded == (restarts == "30")


def test_a_slurm_node_is_listed_as_often_as_it_has_tasks(programs, tmp_path):
    status, said, configs = submit(
        programs, tmp_path, SLURM_JOB_NODELIST="n1,n2,n9,n10", SLURM_TASKS_PER_NODE="2(x2),3,1",
        TASKS="2,2,3,1", SLURM_CPUS_PER_TASK="6", SLURM_SUBMIT_DIR="/", LBBSP_CLUSTER=str(CLUSTER),
    )  # fmt: skip
    assert status == 0
    assert {"srun --distribution=block", "srun --cpus-per-task=6"} <= set(said.splitlines())
    places = ("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1), ("n9", 0), ("n9", 1), ("n9", 2), ("n10", 0)
    workers = [f"{node}:{28112 + number}" for node, number in places]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 8
    assert sorted(config["task"]["index"] for config in configs) == list(range(8))


def test_slurm_tasks_that_are_not_where_the_list_says_are_refused(programs, tmp_path):
    status, said, configs = submit(
        programs, tmp_path, SLURM_JOB_NODELIST="n1,n2", SLURM_TASKS_PER_NODE="1,2", TASKS="2,1"
    )
    assert status == 2
    assert "task 1 of 3 is on n1, but the list of hosts is n1,n2,n2: set --nodes and" in said
    assert len(configs) == 2


def test_the_python_of_a_slurm_job_can_be_named(programs, tmp_path):
    status, said, _ = submit(programs, tmp_path, SLURM_JOB_NODELIST="n1", PYTHON="no-such-python")
    assert status == 127
    assert "no-such-python" in said


# --- worker.py ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker():
    """The module examples/cluster/worker.py."""
    spec = importlib.util.spec_from_file_location("worker", CLUSTER / "worker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workers_of_one_host_have_ports_of_their_own(worker):
    config = json.loads(worker.tf_config(["a", "b", "a"], 2, 7000)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["a:7000", "b:7000", "a:7001"]
    assert config["task"] == {"type": "worker", "index": 2}


def test_addresses_of_ipv6_have_brackets(worker):
    config = json.loads(worker.tf_config(["fd00::1", "[fd00::2]", "a"], 0, 7000)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["[fd00::1]:7000", "[fd00::2]:7000", "a:7000"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "example", "printed", "first"),
    [
        ("tensorflow", "keras_digits_balanced.py", "val_accuracy:", 0),
        # MXNet sorts addresses as text, the last one first.
        ("mxnet", "gluon_digits_balanced.py", "] accuracy:", 1),
    ],
)
def test_two_hosts_train_an_example(hosts, programs, framework, example, printed, first):
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    status, said = run(
        [
            sys.executable, CLUSTER / "ssh_job.py", "--ssh", "ssh", "--hosts", ",".join(hosts),
            "--directory", ROOT, "--python", sys.executable, "--framework", framework,
            f"examples/{example}",
        ],
        programs,
    )  # fmt: skip
    assert status == 0
    found = [line for line in said.splitlines() if printed in line]
    assert {line.partition("]")[0] for line in found} == {f"[{hosts[first]}"}, "that of rank 0"
    assert float(found[-1].partition(printed)[2].split()[0]) > 0.8


@pytest.mark.parametrize(("words", "message"), [
    (["--hosts", "a,b", "--rank", "2", "x.py"], "--rank must be from 0 to 1, got 2"),
    (["--hosts", "a,,b", "--rank", "0", "x.py"], "--hosts must have a name between two commas"),
    (["--hosts", "a,b", "--rank", "0"], "a script must follow the options"),
    (["--hosts", "a,b", "--rank", "0", "--"], "a script must follow the options"),
    (["--hosts", "a", "--rank", "0", "--port", "0", "x.py"], "must be from 1 to 65535, got 0"),
    (["--hosts", "a,b", "--rank", "0", "--port", "70000", "x.py"], "to 65535, got 70000"),
    (["--hosts", "a:1,b", "--rank", "0", "x.py"], "addresses without a port, which --port sets"),
    (["--hosts", "127.0.0.1,b", "--rank", "0", "x.py"], "under which the workers reach each other"),
    (["--hosts", "a,localhost", "--rank", "0", "x.py"], "other, got localhost"),
    (["--hosts", "::1,fd00::2", "--rank", "0", "x.py"], "other, got ::1"),
    (["--framework", "mxnet", "--hosts", "fd00::1,b", "--rank", "0", "x.py"], "or IPv4 addresses"),
    (["--hosts", "a,b,a,a", "--rank", "0", "--port", "65534", "x.py"], "to 65533, got 65534"),
])  # fmt: skip
def test_wrong_options_are_refused(words, message, programs):
    status, said = run([sys.executable, CLUSTER / "worker.py", *words], programs)
    assert status == 2
    assert message in said


def test_a_script_can_follow_two_dashes(programs, tmp_path):
    (tmp_path / "train.py").write_text(SHOW)
    words = ["--hosts", "a", "--rank", "0", "--", tmp_path / "train.py", "--", "x"]
    status, said = run([sys.executable, CLUSTER / "worker.py", *words], programs)
    assert status == 0
    assert said.endswith(" ['--', 'x']\n")


def test_mxnet_refuses_a_name_that_is_a_loopback_address(worker, monkeypatch):
    known = {"mine": "127.0.1.1", "other": "10.0.0.2", "localhost": "127.0.0.1"}
    monkeypatch.setattr(worker.socket, "gethostbyname", known.get)
    with pytest.raises(SystemExit, match=r"mine is 127\.0\.1\.1 on .*: list addresses"):
        worker.reachable(["other", "mine"])
    assert worker.reachable(["other", "other"]) == ["10.0.0.2"] * 2
    assert worker.reachable(["localhost", "localhost"]) == ["127.0.0.1"] * 2


SERVER = """
import os, pathlib, sys, time
if os.environ["FAILS"] == os.environ["DMLC_ROLE"]:
    sys.exit(5)
open(os.environ["DMLC_ROLE"], "w")
while not pathlib.Path("left").exists():
    time.sleep(0.05)
open(os.environ["DMLC_ROLE"] + "-left", "w")
"""

LEAVES = """
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.5)
    open("left", "w")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
while not all(pathlib.Path(name).exists() for name in ("scheduler", "server")):
    time.sleep(0.05)
open("started", "w")
time.sleep(99)
"""


@pytest.fixture
def mxnet_job(tmp_path):
    """A function that starts a worker of MXNet, whose servers are programs of our own."""
    (tmp_path / "lbbsp_mx").mkdir()
    (tmp_path / "lbbsp_mx" / "__init__.py").touch()
    (tmp_path / "lbbsp_mx" / "server.py").write_text(SERVER)
    (tmp_path / "train.py").write_text(LEAVES)
    words = ["--framework", "mxnet", "--hosts", "127.0.0.1", "--rank", "0", "train.py"]

    jobs = []

    def start(fails="", command=None):
        job = subprocess.Popen(
            [*(command or in_a_hurry("worker")), *words],
            env={**os.environ, "FAILS": fails, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def test_a_scheduler_may_signal_all_processes_of_an_mxnet_job(mxnet_job, tmp_path):
    """The worker writes its checkpoint, for which it needs the servers, and these end after it."""
    job = mxnet_job()
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGTERM)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 143, said
    assert (tmp_path / "scheduler-left").exists()
    assert (tmp_path / "server-left").exists()


@pytest.mark.parametrize("fails", ["scheduler", "server"])
def test_a_server_that_fails_ends_the_worker_that_waits_for_it(mxnet_job, fails):
    job = mxnet_job(fails)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 5, said
    assert f"the {fails} ended with status 5; ending the worker and the " in said


def test_sigterm_before_the_worker_of_mxnet_exists_ends_it(mxnet_job, tmp_path):
    code = in_a_hurry("worker")[-1]
    head, last = code.rsplit("\n", 1)
    wrapped = (
        "import os\nreal = worker.subprocess.Popen\n"
        "def popen(*words, **options):\n"
        "    os.kill(os.getpid(), 15) if 'preexec_fn' in options else None\n"
        "    return real(*words, **options)\n"
        "worker.subprocess.Popen = popen\n"
    )
    job = mxnet_job(command=[sys.executable, "-c", f"{head}\n{wrapped}{last}"])
    job.communicate(timeout=60)
    assert job.returncode == 143
    assert not (tmp_path / "started").exists()


# --- files that only a container runtime can execute ----------------------------------------------


DOCKERFILE = (CLUSTER / "Dockerfile").read_text()
STATE = "/home/trainer/state"


def arguments(words):
    """Returns the options of a worker's command, and its script."""
    found = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
    rest = [word for word in words if "=" not in word]
    while rest[0].startswith("--"):
        found[rest[0].removeprefix("--")] = rest[1]
        del rest[:2]
    (script,) = rest
    assert (ROOT / script.removeprefix("/lbbsp/")).is_file()
    return found


def test_the_services_of_compose_are_the_hosts():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
    services = compose["services"]
    options = [arguments(service["command"]) for service in services.values()]
    assert [one["hosts"].split(",") for one in options] == [list(services)] * 3
    assert [one["rank"] for one in options] == ["0", "1", "2"]
    for service in services.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert service["networks"] == ["job"]
        assert service["volumes"] == ["state:/home/trainer/state"]
        assert "ports" not in service
    assert compose["networks"] == {"job": {"internal": True}}


def test_the_pods_of_kubernetes_are_the_hosts():
    yaml = pytest.importorskip("yaml")
    parts = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))
    service, policy, claim, job = parts
    pods, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pods["containers"]
    options = arguments(container["args"])
    assert options["hosts"].split(",") == [f"{name}-{i}.{pods['subdomain']}" for i in range(3)]
    assert options["rank"] == "$(JOB_COMPLETION_INDEX)"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert pods["subdomain"] == service["metadata"]["name"]
    label = {"job-name": name}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == label
    (volume,) = pods["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": STATE}]
    user = int(re.search(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)[1])
    assert user > 0
    assert pods["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_the_image_has_a_folder_that_its_user_can_write():
    user = re.search(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)[1]
    assert f"useradd --create-home --uid {user} --user-group trainer" in DOCKERFILE
    assert f"install --directory --owner=trainer --group=trainer {STATE}\n" in DOCKERFILE


def test_the_image_passes_signals_on():
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])
    assert entry[:2] == ["tini", "--"]
    assert (ROOT / entry[-1].removeprefix("/lbbsp/")).is_file()
    assert "--no-install-recommends tini " in DOCKERFILE


def test_what_git_ignores_is_left_out_of_the_image():
    lines = set((CLUSTER / "Dockerfile.dockerignore").read_text().splitlines())
    anywhere = {"__pycache__/", "*.egg-info/"}
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        assert (f"**/{name}" if line in anywhere else name) in lines
    assert ".git" in lines


# --- spot instances -------------------------------------------------------------------------------

WORKER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("started", flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


class Metadata(BaseHTTPRequestHandler):
    """Answers as a provider does: a token, and from the third question on that the end is near."""

    asked = 0
    status = 200

    def do_PUT(self):
        self.answer(200, b"secret")

    def do_GET(self):
        Metadata.asked += 1
        allowed = self.headers.get("X-aws-ec2-metadata-token") == "secret"
        near = allowed and Metadata.asked > 2
        self.answer(Metadata.status if near else 404, b'{"action": "terminate"}')

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    """Address of a server that announces the end of this machine."""
    Metadata.asked, Metadata.status = 0, 200
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def spot(seconds, metadata, **variables):
    variables = {
        "SPOT_NOTICE": metadata,
        "SPOT_TOKEN": metadata,
        "SPOT_SECONDS": "0.2",
        **variables,
    }
    command = ["bash", CLUSTER / "spot.sh", sys.executable, "-c", WORKER, seconds]
    return run(command, {**os.environ, **variables})


@needs_curl
def test_a_spot_instance_ends_its_worker_in_time(metadata):
    """Also where a proxy is set, which does not know the provider's server."""
    assert spot("60", metadata, http_proxy="http://127.0.0.1:9/")[0] == 143
    assert Metadata.asked == 3


@needs_curl
def test_a_worker_that_ends_ends_the_watch(metadata):
    status, said = spot("0.1", metadata, SPOT_SECONDS="60")
    assert status == 7
    assert said == "started\n"


@needs_curl
def test_a_redirect_does_not_announce_the_end(metadata):
    Metadata.status = 302
    assert spot("2", metadata, SPOT_SECONDS="0.05")[0] == 7
    assert Metadata.asked > 3


@needs_curl
def test_a_provider_that_does_not_answer_is_reported_once():
    status, said = spot("1", "http://127.0.0.1:9/", SPOT_SECONDS="0.05")
    assert status == 7
    assert said.count("spot.sh: the provider does not answer at http://127.0.0.1:9/") == 1


@needs_curl
def test_a_worker_gets_the_signals_of_the_script_that_watches():
    """Also while the provider's server keeps its answer back; the status is the worker's own."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"SPOT_NOTICE": f"http://127.0.0.1:{silent.getsockname()[1]}/"}
        worker = WORKER.replace("143", "9")
        with subprocess.Popen(
            ["bash", CLUSTER / "spot.sh", sys.executable, "-c", worker, "60"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
        ) as job:
            assert job.stdout.readline() == b"started\n"
            job.terminate()
            assert job.wait(timeout=60) == 9
