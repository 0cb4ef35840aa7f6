"""The scripts of examples/cluster, with network namespaces as hosts, and a Slurm of our own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
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
step = {
    "SLURM_STEP_NODELIST": ",".join(nodes),
    "SLURM_STEP_NUM_TASKS": str(len(nodes)),
    "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(nodes)})",
}
tasks = [
    subprocess.Popen(
        [*os.environ.get("ENTER", "").format(node).split(), *sys.argv[1:]],
        env={**os.environ, **step, "SLURM_PROCID": str(rank)},
    )
    for rank, node in enumerate(nodes)
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


def test_the_first_status_that_is_not_zero_is_that_of_the_job(tmp_path, programs):
    """Also with words that a shell would split, and in the folder that is named."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "print(rank, os.getcwd(), sys.argv[1:])\n"
        "sys.exit(3 * rank)\n"
    )
    (tmp_path / "here").write_text('#!/bin/sh\nexec sh -c "$2"\n')
    (tmp_path / "here").chmod(0o755)
    status, said = run(
        [
            sys.executable, CLUSTER / "ssh_job.py", "--ssh", "here", "--hosts", "a,b",
            "--directory", tmp_path, "--python", sys.executable, "train.py", "a b", "$HOME",
        ],
        programs,
    )  # fmt: skip
    assert status == 3
    assert f"[a] 0 {tmp_path} ['a b', '$HOME']" in said
    assert f"[b] 1 {tmp_path} ['a b', '$HOME']" in said


def test_the_resolver_of_slurm_trains_with_lbbsp(hosts, programs):
    slurm = {"SLURM_JOB_NODELIST": ",".join(hosts), "ENTER": "ip netns exec {}"}
    status, said = run(["srun", sys.executable, CLUSTER / "keras_slurm.py"], {**programs, **slurm})
    assert status == 0
    assert float(re.findall(r" val_accuracy: ([\d.]+)", said)[-1]) > 0.8


@pytest.mark.parametrize("left", [0, 143])
def test_the_slurm_job_starts_each_task_and_is_queued_again(programs, tmp_path, left):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "sys.stdout.write(f\"{os.environ['TF_CONFIG']} {sys.argv[1:]}\\n\")\n"
        f"sys.exit({left})\n"
    )
    slurm = {
        "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_JOB_ID": "41007", "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip
    status, said = run(
        ["bash", CLUSTER / "slurm.sbatch", script, "--rate", "a b"], {**programs, **slurm}
    )
    assert status == left
    lines = [line for line in said.splitlines() if line.startswith("{")]
    configs = [json.JSONDecoder().raw_decode(line)[0] for line in lines]
    assert all(line.endswith(" ['--rate', 'a b']") for line in lines)
    workers = [f"n{i}:21007" for i in (1, 2, 3)]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 3
    assert sorted(config["task"]["index"] for config in configs) == [0, 1, 2]
    assert ("scontrol requeue 41007" in said) == (left == 143)


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


@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
def test_two_hosts_train_the_gluon_example(hosts, programs):
    status, said = run(
        [
            sys.executable, CLUSTER / "ssh_job.py", "--ssh", "ssh", "--hosts", ",".join(hosts),
            "--directory", ROOT, "--python", sys.executable, "--framework", "mxnet",
            "examples/gluon_digits_balanced.py",
        ],
        programs,
    )  # fmt: skip
    assert status == 0
    assert float(re.search(r"accuracy: ([\d.]+)", said)[1]) > 0.8


@pytest.mark.parametrize("names", [["--hosts", "a,b", "--rank", "2", "x.py"], ["--hosts", "a,,b",
    "--rank", "0", "x.py"], ["--hosts", "a,b", "--rank", "0"]])  # fmt: skip
def test_a_wrong_rank_host_or_missing_script_is_refused(names, programs):
    status, said = run([sys.executable, CLUSTER / "worker.py", *names], programs)
    assert status == 2
    assert "--rank must be from 0 to " in said


# --- files that only a container runtime can execute ----------------------------------------------


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
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    options = [arguments(service["command"]) for service in services.values()]
    assert [one["hosts"].split(",") for one in options] == [list(services)] * 3
    assert [one["rank"] for one in options] == ["0", "1", "2"]
    for service in services.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert service["networks"] == ["job"]


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
    assert container["volumeMounts"][0]["name"] == volume["name"]


# --- spot instances -------------------------------------------------------------------------------

WORKER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
time.sleep(float(sys.argv[1]))
"""


class Metadata(BaseHTTPRequestHandler):
    """Answers as a provider does: a token, and from the third question on that the end is near."""

    asked = 0

    def do_PUT(self):
        self.answer(200, b"secret")

    def do_GET(self):
        Metadata.asked += 1
        allowed = self.headers.get("X-aws-ec2-metadata-token") == "secret"
        self.answer(200 if allowed and Metadata.asked > 2 else 404, b'{"action": "terminate"}')

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    """Address of a server that announces the end of this machine."""
    Metadata.asked = 0
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def spot(seconds, metadata):
    variables = {"SPOT_NOTICE": metadata, "SPOT_TOKEN": metadata, "SPOT_SECONDS": "0.2"}
    command = ["bash", CLUSTER / "spot.sh", sys.executable, "-c", WORKER, seconds]
    return run(command, {**os.environ, **variables})[0]


@pytest.mark.skipif(os.system("command -v curl > /dev/null") != 0, reason="needs curl")
def test_a_spot_instance_ends_its_worker_in_time(metadata):
    assert spot("60", metadata) == 143
    assert Metadata.asked == 3


@pytest.mark.skipif(os.system("command -v curl > /dev/null") != 0, reason="needs curl")
def test_a_worker_that_ends_ends_the_watch(metadata):
    assert spot("0.1", metadata) == 0
