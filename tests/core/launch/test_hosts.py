"""Hosts of a job, and what runs on each of them; no process is started."""

import json
import os
import sys
from pathlib import Path

import pytest

from lbbsp_core.launch import cluster, elsewhere, hosts, launch
from lbbsp_core.launch.cluster import cluster_variables, job_spec, listening_port
from lbbsp_core.launch.elsewhere import Elsewhere
from lbbsp_core.launch.hosts import Hosts, find_hosts
from lbbsp_core.launch.output import Output


@pytest.fixture
def names(monkeypatch, tmp_path):
    """Numbers of names of hosts, on a machine with an ssh that is not run."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.touch(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=os.pathsep)
    known = {"a": "10.0.0.10", "b": "10.0.0.9", "c": "10.0.0.2", "mine": "127.0.1.1"}

    def resolve(name):
        if name not in known:
            raise OSError
        return known[name]

    monkeypatch.setattr(hosts.socket, "gethostbyname", resolve)


def keras(given, **options):
    found = find_hosts(given, None, framework="tensorflow", **options)
    configs = [own["TF_CONFIG"] for own in cluster_variables("tensorflow", len(found.names),
               hosts=found).workers]  # fmt: skip
    return found, [json.loads(config) for config in configs]


def test_keras_workers_meet_at_the_names_of_their_hosts():
    found, configs = keras("a, user@b,a")
    assert found.names == ("a", "user@b", "a")
    addresses = ["a:20000", "b:20000", "a:20001"]
    assert [config["cluster"]["worker"] for config in configs] == [addresses] * 3
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    assert found.of([2, 1]).names == ("a", "user@b")


def test_addresses_of_ipv6_have_brackets():
    """That of ssh has none."""
    found, configs = keras(["fd00::1", "user@[fd00::2]", "a"], port=7000)
    assert found.names == ("fd00::1", "user@fd00::2", "a")
    expected = ["[fd00::1]:7000", "[fd00::2]:7000", "a:7000"]
    assert configs[0]["cluster"]["worker"] == expected


def test_mxnet_ranks_are_those_that_its_scheduler_assigns(names):
    """It numbers workers in the descending order of their addresses as text, then by ports."""
    given = "a,b,b,c", None
    found = find_hosts(*given, framework="mxnet", port=7000)
    assert found.names == ("b", "b", "c", "a")
    assert find_hosts(*given, framework="mxnet", rank=0).rank == 3
    made = cluster_variables("mxnet", 4, hosts=found)
    workers = [(own["DMLC_NODE_HOST"], own["PORT"]) for own in made.workers]
    assert workers == [("10.0.0.9", "7001"), ("10.0.0.9", "7002"), ("10.0.0.2", "7000"),
                       ("10.0.0.10", "7000")]  # fmt: skip
    helpers = [(h.name, h.beside, h.environment["DMLC_NODE_HOST"]) for h in made.helpers]
    assert helpers == [("scheduler", 0, "10.0.0.9"), ("server 0", 0, "10.0.0.9"),
                       ("server 1", 2, "10.0.0.2"), ("server 2", 3, "10.0.0.10")]  # fmt: skip
    everyone = [*made.workers, *(helper.environment for helper in made.helpers)]
    for name, value in (("ROOT_URI", "10.0.0.9"), ("ROOT_PORT", "7000")):
        assert {own[f"DMLC_PS_{name}"] for own in everyone} == {value}
    assert {own["DMLC_NUM_SERVER"] for own in everyone} == {"3"}
    places = [(own["DMLC_NODE_HOST"], listening_port(own)) for own in everyone]
    assert len(set(places)) == len(places)
    in_turn = cluster_variables("mxnet", 2, 3, find_hosts("b,c", None, framework="mxnet"))
    assert [helper.beside for helper in in_turn.helpers] == [0, 0, 1, 0]


@pytest.mark.parametrize(("given", "options", "message"), [
    ("a,,b", {}, "must have a name between two commas, got 'a,,b'"),
    ("a:1,b", {}, "addresses without a port, which --port sets, got 'a:1'"),
    ("-oProxyCommand=x,b", {}, "must be names or addresses"),
    ("-Fx@a,b", {}, "must be names or addresses"),
    ("[a],b", {}, "must be names or addresses"),
    ("a b,c", {}, "must be names or addresses"),
    ("127.0.0.1,b", {}, "under which the workers reach each other, got '127.0.0.1'"),
    ("a,localhost", {}, "reach each other, got 'localhost'"),
    ("::1,fd00::2", {}, "reach each other, got '::1'"),
    ("fd00::1,b", {"framework": "mxnet"}, "or IPv4 addresses, because MXNet knows no others"),
    ("b,mine", {"framework": "mxnet"}, "'mine' is 127.0.1.1 on .*: list addresses"),
    ("b,d", {"framework": "mxnet"}, "the host 'd' has no IPv4 address here: correct it"),
    ("a,b", {"workers": 3}, "workers must be the number of hosts = 2, got 3"),
    ("a,b", {"rank": 2}, "rank must be from 0 to 1, .* got 2"),
    ("a", {"port": 0}, "port must be an integer >= 1, got 0"),
    ("a,b,a,a", {"port": 65534}, "port must be at most 65533, got 65534"),
    (None, {"workers": 2, "rank": 1}, "rank = 1 needs hosts"),
    (None, {"workers": 2, "port": 1}, "port = 1 needs hosts"),
    (None, {}, "workers must be given: -n N starts N .* --hosts a,b,c .* `srun lbbsp launch`"),
    ("a,b", {"rank": 0, "max_restarts": 1}, "max_restarts = 1 needs a launcher of all workers"),
    ("a,b", {"rank": 0, "devices": "0,1"}, "devices = '0,1' needs a launcher of all workers"),
    ("a,b", {"speeds": [1, 1]}, "speeds and contention are emulated on one machine"),
    ("a,b", {"devices": "0,none"}, "GPUs for all workers, or none for all"),
    ("a,b", {"devices": "0"}, "one entry per worker = 2, got 1"),
    ("a,b", {"env": ["NO_SUCH"]}, "env must name variables that are set, got 'NO_SUCH'"),
])  # fmt: skip
def test_impossible_hosts(names, given, options, message):
    with pytest.raises(ValueError, match=message):
        launch([__file__], hosts=given, **options)


def test_ssh_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="the program ssh, which is not on PATH: install OpenSSH"):
        launch([__file__], hosts="a,b")


def test_workers_of_one_machine_may_all_be_at_its_loopback(names):
    assert find_hosts("localhost,localhost", None, framework="tensorflow").port == 20000
    assert find_hosts("mine,mine", None, framework="mxnet").addresses == ("127.0.1.1",) * 2


def test_a_host_gets_what_it_needs_of_the_environment(monkeypatch):
    for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "MY_DATA", "MY_SECRET", "LBBSP_HOST",
                 "LBBSP_POLICY", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"):  # fmt: skip
        monkeypatch.setenv(name, "1")
    found = find_hosts("a,b,user@a", None, framework="tensorflow")
    job = job_spec("tensorflow", 3, emulated=False, run_dir=Path("here"), hosts=found)
    how = Elsewhere(found, ["0", "1+2", "none"], ["MY_DATA"])
    *_, relay, description = how.command(["train.py", "x"], job.workers[2], 2, is_worker=True)
    assert Path(relay).name == "_relay.py"
    told = json.loads(description)
    assert {"TF_CONFIG", "LBBSP_RUN_DIR", "LBBSP_RESTART", "NCCL_DEBUG", "MY_DATA",
            "LBBSP_POLICY", "PYTHONPATH"} <= set(told["names"])  # fmt: skip
    assert not {"MY_SECRET", "LBBSP_HOST", "PATH", "HOME", "CUDA_VISIBLE_DEVICES"} & set(
        told["names"]
    )
    named = Elsewhere(found, names=["CUDA_VISIBLE_DEVICES"])
    *_, description = named.command(["train.py"], job.workers[2], 2, is_worker=True)
    assert "CUDA_VISIBLE_DEVICES" in json.loads(description)["names"]
    assert (told["host"], told["command"], told["worker"]) == ("user@a", ["train.py", "x"], 2)
    assert (told["directory"], told["python"]) == (os.getcwd(), sys.executable)
    assert (told["place"], told["devices"]) == ([1, 2], ["0", "none"]), "those of the same host"
    workers = job_spec("torch", 3, emulated=False, run_dir=None, hosts=found).workers
    *_, description = how.command(["train.py"], workers[2], 2, is_worker=True)
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
            "GLOO_SOCKET_IFNAME"} <= set(json.loads(description)["names"])  # fmt: skip
    assert how.of([1]).devices == ["1+2"]
    assert Elsewhere(found, ["all"]).of([1]).devices == ["all"]


def test_settings_of_a_machine_are_made_on_that_machine(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.setattr(cluster, "GPU_DEVICES", ())
    found = find_hosts("a,b", None, framework="tensorflow")
    (own, _) = job_spec("tensorflow", 2, emulated=False, run_dir=None, hosts=found).workers
    assert not {"TF_CPP_MIN_LOG_LEVEL", "MALLOC_TOP_PAD_"} & set(own)
    assert {"TF_CPP_MIN_LOG_LEVEL", "MALLOC_TOP_PAD_"} <= set(cluster.with_defaults(own))


def test_a_scheduler_counts_its_restarts_itself(monkeypatch):
    monkeypatch.setenv("LBBSP_ELASTIC", "3/2")
    found = find_hosts("a,b", None, framework="tensorflow", rank=1)
    (_, own) = job_spec("tensorflow", 2, emulated=False, run_dir=None, hosts=found).workers
    assert own["LBBSP_ELASTIC"] == "3/2"
    assert "LBBSP_RESTART" not in own


# --- Slurm ----------------------------------------------------------------------------------------


@pytest.fixture
def slurm(monkeypatch):
    """Returns a function that finds the hosts in the variables of a step."""

    def scontrol(command, **_):
        names = command[-1].replace("n[1-2]", "n1,n2").split(",")
        return hosts.subprocess.CompletedProcess(command, 0, stdout="\n".join(names) + "\n")

    monkeypatch.setattr(hosts.subprocess, "run", scontrol)

    def find(nodes, tasks, task, node, **options):
        environ = {
            "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_JOB_ID": "761",
            "SLURM_PROCID": str(task), "SLURMD_NODENAME": node,
        }  # fmt: skip
        return find_hosts(None, None, framework="tensorflow", environ=environ, **options)

    return find


def test_a_task_of_slurm_is_a_worker(slurm):
    assert slurm("n[1-2],n9,n10", "2(x2),3,1", 7, "n10") == Hosts(
        names := ("n1", "n1", "n2", "n2", "n9", "n9", "n9", "n10"), names, 20_000 + 11 * 16, 7
    )
    assert slurm("n[1-2]", "1(x2)", 0, "n1", port=9).port == 9


@pytest.mark.parametrize(("task", "node"), [(0, "n2"), (2, "n1")])
def test_tasks_elsewhere_than_in_block_distribution_are_refused(slurm, task, node):
    with pytest.raises(ValueError, match=f"task {task} .* is on {node}, .* --distribution=block"):
        slurm("n[1-2]", "1(x2)", task, node)


def test_without_scontrol_the_hosts_must_be_given(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_STEP_NODELIST": "n1,n2", "SLURM_PROCID": "1"}
    with pytest.raises(ValueError, match=r"\(n1,n2\) cannot be read .* --hosts with --rank 1"):
        find_hosts(None, None, framework="tensorflow", environ=environ)


# --- output ---------------------------------------------------------------------------------------


def test_lines_go_to_the_files_of_all_and_the_screen_of_some(tmp_path):
    shown = []
    for attempt in range(2):
        output = Output(lambda *line: shown.append(line), [1], tmp_path / "logs", attempt)
        for name, rank in (("worker 0", 0), ("worker 1", 1), ("server 0", None)):
            output.of(name, rank)(rank or 0, f"\udcff {name}")
        output.close()
    assert shown == [(1, "\udcff worker 1")] * 2
    files = {file.name: file.read_text().splitlines() for file in (tmp_path / "logs").iterdir()}
    assert set(files) == {"worker-0.log", "worker-1.log", "server-0.log"}
    first, line, second, *_ = files["server-0.log"]
    assert first.endswith("server 0, attempt 1 ---")
    assert line == "\\udcff server 0"
    assert second.endswith("attempt 2 ---")


def test_a_full_disk_ends_no_job(tmp_path, capsys):
    shown = []
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: None)
        take = Output(lambda *line: shown.append(line), None, tmp_path, 0).of("worker 0", 0)
    take(0, "line")
    assert shown == [(0, "line")]
    lacking = f"lbbsp launch: {tmp_path / 'worker-0.log'} lacks lines (No space left on device)"
    assert capsys.readouterr().err.count(lacking) == 1


def test_the_variables_of_a_host_are_those_of_frameworks_and_libraries():
    for name in ("TF_CONFIG", "PYTHONHASHSEED", "OMP_NUM_THREADS", "DMLC_ROLE", "PORT", "LANG"):
        assert elsewhere.FORWARDED.fullmatch(name)
    for name in ("PATH", "HOME", "TMPDIR", "AWS_SECRET_ACCESS_KEY", "SUPPORT", "SLURM_PROCID"):
        assert not elsewhere.FORWARDED.fullmatch(name)
