"""The files of examples/cluster, and a Slurm of our own."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from namespaces import namespaces
from waits import HANG_SECONDS, until

from lbbsp_core.launch.cluster import free_ports

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"

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
def programs(tmp_path):
    """Variables with a PATH on which the cluster's own programs are."""
    for name, text in ("srun", SRUN), ("scontrol", SCONTROL):
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
        timeout=HANG_SECONDS,
        check=False,
    )
    print(done.stdout)
    return done.returncode, done.stdout


# --- Slurm ----------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "41007", "SLURM_JOB_NODELIST": "n1,n2,n3"}


@pytest.fixture
def hosts():
    """Names of two namespaces that a link connects."""
    with namespaces("10.231.78.1", "10.231.78.2") as names:
        yield names


SHOW = (
    "import os, sys\nassert 'LBBSP_MARKS' not in os.environ, 'others watch this worker, too'\n"
    "sys.stdout.write(f\"{os.environ['TF_CONFIG']} {sys.argv[1:]}\\n\")\n"
    "sys.exit(int(os.environ.get('LEFT', 0)))\n"
)


def submit(programs, tmp_path, **variables):
    """Runs the batch script; returns its status, its output and the TF_CONFIG of each task."""
    (tmp_path / "train.py").write_text(SHOW)
    words = [CLUSTER / "slurm.sbatch", tmp_path / "train.py", "--rate", "a b"]
    status, said = run(["bash", *words], {**programs, **JOB, **variables})
    lines = dict(re.findall(r"^\[(\d+)\] (\{.*) \['--rate', 'a b'\]$", said, re.MULTILINE))
    configs = {int(rank): json.loads(config) for rank, config in lines.items()}
    assert [configs[rank]["task"]["index"] for rank in configs] == list(configs)
    return status, said, [configs[rank]["cluster"]["worker"] for rank in sorted(configs)]


@pytest.mark.parametrize(
    ("nodes", "left", "restarts", "again"),
    [
        (3, 0, None, False),
        (1, 143, None, True),
        (1, 143, "29", True),
        (1, 143, "30", False),
        (1, 1, None, False),
    ],
)
def test_the_slurm_job_starts_each_task_and_is_queued_again(
    programs, tmp_path, nodes, left, restarts, again
):
    names = [f"n{1 + number}" for number in range(nodes)]
    variables = {"SLURM_JOB_NODELIST": ",".join(names), "LEFT": str(left)}
    if restarts is not None:
        variables["SLURM_RESTART_COUNT"] = restarts
    status, said, workers = submit(programs, tmp_path, **variables)
    assert status == left
    assert workers == [[f"{name}:28112" for name in names]] * nodes
    assert ("scontrol requeue 41007" in said) == again
    bounded = "not queued again after 30 restarts: raise LBBSP_MAX_RESTARTS" in said
    assert bounded == (restarts == "30")


def test_a_slurm_node_is_listed_as_often_as_it_has_tasks(programs, tmp_path):
    status, said, workers = submit(
        programs, tmp_path, SLURM_JOB_NODELIST="n1,n9,n10", TASKS="2,2,1", SLURM_CPUS_PER_TASK="6"
    )
    assert status == 0
    assert {"srun --distribution=block", "srun --cpus-per-task=6"} <= set(said.splitlines())
    places = ("n1", 0), ("n1", 1), ("n9", 0), ("n9", 1), ("n10", 0)
    assert workers == [[f"{node}:{28112 + number}" for node, number in places]] * 5


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "example", "printed"),
    [
        ("tensorflow", "keras_digits_balanced.py", "val_accuracy:"),
        ("mxnet", "gluon_digits_balanced.py", "] accuracy:"),
    ],
)
def test_two_tasks_of_slurm_train_an_example(hosts, programs, framework, example, printed):
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    slurm = {**JOB, "SLURM_JOB_NODELIST": ",".join(hosts), "ENTER": "ip netns exec {}"}
    words = ["--framework", framework, "--ranks", "0", ROOT / "examples" / example]
    status, said = run(["bash", CLUSTER / "slurm.sbatch", *words], {**programs, **slurm})
    assert status == 0
    found = [line for line in said.splitlines() if printed in line]
    assert all(line.startswith("[0]") for line in found), "that of rank 0"
    assert float(found[-1].partition(printed)[2].split()[0]) > 0.8


# --- Kubeflow -------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_chief_and_a_worker_of_kubeflow_train_an_example(programs, popen):
    """TFJob gives each pod such a TF_CONFIG, and starts its command, without a launcher."""
    chief, worker = free_ports(2)
    cluster = {"chief": [f"127.0.0.1:{chief}"], "worker": [f"127.0.0.1:{worker}"]}
    pods = []
    for kind in cluster:
        task = {"cluster": cluster, "task": {"type": kind, "index": 0}, "environment": "cloud"}
        command = [sys.executable, ROOT / "examples" / "keras_digits_balanced.py"]
        pods.append(popen(command, env={**programs, "TF_CONFIG": json.dumps(task)}))
    said = [pod.communicate(timeout=HANG_SECONDS)[0] for pod in pods]
    print(*said)
    assert [pod.returncode for pod in pods] == [0, 0]
    accuracy = float(said[0].rpartition("val_accuracy: ")[2].split()[0])
    assert accuracy > 0.8
    assert "val_accuracy" not in said[1], "that of the chief"


# --- a launcher for each worker, as schedulers start them -----------------------------------------

SERVER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    wait_for("may-leave")
    open("left", "w")
    wait_for("scheduler-left", "server-left")  # which run on as long as this worker needs them
    sys.exit(143)
def wait_for(*names):
    while not all(pathlib.Path(name).exists() for name in names):
        time.sleep(0.05)
signal.signal(signal.SIGTERM, leave)
wait_for("scheduler", "server")
open("started", "w")
time.sleep(300)
"""


@pytest.fixture
def mxnet_job(tmp_path, popen):
    """A function that starts the launcher of one worker of MXNet, whose servers are our own."""
    (tmp_path / "lbbsp_mx").mkdir()
    (tmp_path / "lbbsp_mx" / "__init__.py").touch()
    (tmp_path / "lbbsp_mx" / "server.py").write_text(SERVER)
    (tmp_path / "train.py").write_text(LEAVES)
    words = ["--hosts", "127.0.0.1", "--rank", "0", "--grace", HANG_SECONDS, "train.py"]

    def start(fails=""):
        launch = [sys.executable, "-m", "lbbsp_core", "launch", "--framework", "mxnet"]
        return popen(
            [*launch, "--port", free_ports(1)[0], *words],
            env={**os.environ, "FAILS": fails, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            cwd=tmp_path,
        )

    return start


def test_a_scheduler_may_signal_all_processes_of_an_mxnet_job(mxnet_job, tmp_path):
    """The worker writes its checkpoint, for which it needs the servers, and these end after it."""
    job = mxnet_job()
    until((tmp_path / "started").exists)
    for process in (psutil.Process(job.pid), *psutil.Process(job.pid).children()):
        process.terminate()
    for line in job.stdout:
        if "waiting up to 300 s" in line:
            (tmp_path / "may-leave").touch()
    assert job.wait() == 143
    assert (tmp_path / "scheduler-left").exists()
    assert (tmp_path / "server-left").exists()


@pytest.mark.parametrize("fails", ["scheduler", "server"])
def test_a_server_that_fails_ends_the_worker_that_waits_for_it(mxnet_job, fails):
    job = mxnet_job(fails)
    said = job.communicate()[0]
    assert job.returncode == 5, said
    assert f"{fails}{' 0' if fails == 'server' else ''} failed with exit status 5" in said


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
    assert entry == ["tini", "--", "lbbsp", "launch"]
    assert "--no-install-recommends tini " in DOCKERFILE


def test_what_git_ignores_is_left_out_of_the_image():
    lines = set((CLUSTER / "Dockerfile.dockerignore").read_text().splitlines())
    anywhere = {"__pycache__/", "*.egg-info/"}
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        assert (f"**/{name}" if line in anywhere else name) in lines
    assert ".git" in lines


# --- spot instances -------------------------------------------------------------------------------

# Ends when the provider has been asked so often.
WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("started", flush=True)
for _ in range(30_000):
    if os.path.exists("asked") and os.path.getsize("asked") >= int(sys.argv[1]):
        sys.exit(7)
    time.sleep(0.01)
"""
NEVER = "9999"
CURL = f"""#!/bin/sh
printf . >>asked
exec {shutil.which("curl")} "$@" --max-time 300  # the last one counts
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


@pytest.fixture
def spot(tmp_path, popen, monkeypatch):
    """A function that watches a worker which ends after some questions to the provider."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    (tmp_path / "curl").write_text(CURL)
    (tmp_path / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def start(questions, address, seconds="0.05", token="", worker=WORKER):
        provider = {"SPOT_NOTICE": address, "SPOT_TOKEN": token, "SPOT_SECONDS": seconds}
        command = ["bash", CLUSTER / "spot.sh", sys.executable, "-c", worker, questions]
        return popen(command, env={**os.environ, **provider}, cwd=tmp_path)

    return start


def test_a_spot_instance_ends_its_worker_in_time(spot, metadata, monkeypatch):
    """Also where a proxy is set, which does not know the provider's server."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    assert spot(NEVER, metadata, token=metadata).wait() == 143
    assert Metadata.asked == 3


def test_a_worker_that_ends_ends_the_watch(spot, metadata):
    job = spot("2", metadata, token=metadata, seconds="9999")
    assert job.communicate()[0] == "started\n"
    assert job.returncode == 7


def test_a_redirect_does_not_announce_the_end(spot, metadata):
    Metadata.status = 302
    assert spot("10", metadata, token=metadata).wait() == 7  # two questions each time
    assert Metadata.asked > 3


def test_a_provider_that_does_not_answer_is_reported_once(spot):
    job = spot("3", "http://127.0.0.1:9/")
    warning = "spot.sh: the provider does not answer at http://127.0.0.1:9/"
    assert job.communicate()[0].count(warning) == 1
    assert job.returncode == 7


def test_a_worker_gets_the_signals_of_the_script_that_watches(spot):
    """Also while the provider's server keeps its answer back; the status is the worker's own."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        job = spot(NEVER, address, worker=WORKER.replace("143", "9"))
        assert job.stdout.readline() == "started\n"
        job.terminate()
        assert job.wait() == 9
