"""Each check of the doctor on fake machines and environments."""

import errno
import json
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from waits import HANG_SECONDS

pytest.importorskip("packaging")

from lbbsp_core.doctor import diagnose, machine
from lbbsp_core.doctor.cluster import (
    addresses,
    check_addresses,
    check_dmlc,
    check_slurm,
    check_tf_config,
    tf_cluster,
)
from lbbsp_core.doctor.finding import count, figures, note, ok, problem
from lbbsp_core.doctor.packages import (
    FRAMEWORKS,
    check_framework,
    check_optional,
    check_packages,
    check_python,
    check_settings,
)
from lbbsp_core.installation import extra
from lbbsp_core.launch import hosts
from lbbsp_core.launch.cluster import KEEP_FREED_MEMORY
from lbbsp_core.launch.throttle import Throttle
from lbbsp_core.resources.sampler import DEFAULT_NAMES

REQUIRES = [
    "numpy>=1.26",
    'typer>=0.15; extra == "cli"',
    'tomli>=2; python_version < "3" and extra == "cli"',
    'lbbsp[cli]; extra == "tf"',
    'tensorflow>=2.19; extra == "tf"',
    'tensorflow[and-cuda]; extra == "tf"',
    'mxnet==1.9.1; extra == "mx"',
    'numpy<2; extra == "mx"',
    'jinja2>=3.1; extra == "report"',
    'plotly>=5; extra == "report"',
]


def statuses(findings):
    return [finding.status for finding in findings]


def only_problem(findings):
    [found] = [finding for finding in findings if finding.status == "problem"]
    return found


# versions


def packages(extras, **versions):
    return list(check_packages(REQUIRES, extras, versions.get))


def test_versions_that_the_metadata_permit_are_right():
    installed = {"numpy": "1.26.4", "typer": "0.20", "tensorflow": "2.21.0"}
    found = packages(["", "cli", "tf"], **installed)
    assert found == [ok(name, version) for name, version in installed.items()]
    assert statuses(packages([""], numpy="2.1.0")) == ["ok"], "a problem for MXNet only"
    assert statuses(packages(["tf"], tensorflow="2.22.0.dev20260101")) == ["ok"]
    assert statuses(packages(["tf"], tensorflow="unknown")) == ["note"]


@pytest.mark.parametrize(
    ("extras", "versions", "message"),
    [
        (["", "mx"], {"numpy": "2.1.0", "mxnet": "1.9.1"}, "2.1.0 is installed, but lbbsp[mx] nee"),
        (["tf"], {}, "is not installed, but lbbsp[tf] needs tensorflow>=2.19"),
        (["tf"], {"tensorflow": "2.17.1"}, "2.17.1 is installed, but lbbsp[tf] needs tensorflow>"),
    ],
)
def test_other_versions_are_a_problem(extras, versions, message):
    found = only_problem(packages(extras, **versions))
    assert found.message.startswith(message)
    assert found.remedy == f"pip install --upgrade {extra(extras[-1])}"


def test_optional_packages_may_be_missing_but_not_old():
    remedy = f"pip install {extra('report')}"
    missing = "is not installed, but needed for `lbbsp report`, `lbbsp demo` and --plot"
    assert list(check_optional(REQUIRES, lambda _: None)) == [
        note("jinja2", missing, remedy),
        note("plotly", missing, remedy),
    ]
    assert statuses(check_optional(REQUIRES, lambda _: "3.0")) == ["problem", "problem"]


def test_python_must_be_supported():
    assert check_python("3.12.1", ">=3.10,<3.13").status == "ok"
    old = check_python("3.13.0", ">=3.10,<3.13")
    assert (old.status, "needs >=3.10,<3.13" in old.message) == ("problem", True)


# frameworks


def probe(code, seconds=HANG_SECONDS, **environment):
    command = [sys.executable, "-I", "-S", "-c", code]
    return check_framework(FRAMEWORKS["tensorflow"], environment, seconds=seconds, command=command)


def test_a_framework_is_imported_without_the_cluster():
    shown = (
        "import json, os; print('noise'); print('LBBSP_DOCTOR ' + json.dumps([dict(check='x', "
        "status='note', message=','.join(sorted(os.environ.keys() & {'TF_CONFIG', 'DMLC_ROLE', "
        "'KEPT'})), remedy='')]))"
    )
    assert probe(shown, TF_CONFIG="{", DMLC_ROLE="server", KEPT="1") == [note("x", "KEPT")]


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (
            "raise OSError('libgomp.so.1: cannot open shared object file')",
            "fails: OSError: libgomp.so.1: cannot open shared object file",
            "install libgomp1",
        ),
        ("raise ModuleNotFoundError('No module named x')", "No module named x", extra("tf")),
        (
            "raise ImportError('mxnet cannot be imported (why): install it')",
            "mxnet cannot be imported (why)",
            "install it",
        ),
        ("import os; os.kill(os.getpid(), 4)", "an illegal instruction", "a build for this"),
        ("import os; os.kill(os.getpid(), 9)", "memory was exhausted", "more memory"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11", "see `python -c"),
        ("raise SystemExit(3)", "status 3 without a message", "see `python -c"),
        ("pass", "printed no findings", "reinstall lbbsp"),
    ],
)
def test_an_import_that_fails_is_explained(code, message, remedy):
    [found] = probe(code)
    assert (found.check, found.status) == ("import lbbsp_tf", "problem")
    assert message in found.message
    assert remedy in found.remedy


def test_an_import_that_does_not_end_is_a_problem():
    [found] = probe("import time; time.sleep(1e6)", seconds=0.01)
    assert "did not end within 0.01 s" in found.message


def test_no_framework_is_a_problem_unless_none_is_wanted(monkeypatch):
    monkeypatch.setattr("lbbsp_core.doctor.framework_version", lambda _: None)
    monkeypatch.setattr("lbbsp_core.doctor.machine.check_machine", lambda _: [])
    assert diagnose({})["frameworks"][0].message == "none is installed"
    assert "frameworks" not in diagnose({}, framework="none")


def test_a_check_that_fails_does_not_prevent_the_others(monkeypatch):
    monkeypatch.setattr("lbbsp_core.doctor.check_settings", raising(KeyError("x")))
    monkeypatch.setattr("lbbsp_core.doctor.machine.check_machine", lambda _: [ok("CPU", "")])
    found = diagnose({}, framework="none")
    assert "a check has failed: " in only_problem(found["settings"]).message
    assert found["machine"] == [ok("CPU", "")]


# settings


def test_settings_that_break_keras_or_the_record(tmp_path):
    assert statuses(check_settings({"TF_USE_LEGACY_KERAS": "0"})) == ["ok"]
    legacy, backend = check_settings({"TF_USE_LEGACY_KERAS": "1", "KERAS_BACKEND": "jax"})
    assert "unset TF_USE_LEGACY_KERAS" in legacy.remedy
    assert "'jax'" in backend.message
    (tmp_path / "file").touch()
    assert statuses(check_settings({"LBBSP_RUN_DIR": str(tmp_path / "new")})) == ["ok"]
    [folder] = check_settings({"LBBSP_RUN_DIR": str(tmp_path / "file" / "new")})
    assert (folder.check, folder.status) == ("LBBSP_RUN_DIR", "problem")
    assert f"{tmp_path / 'file'} is not a folder" in folder.message
    for text in ("", "dbs", "lbbsp:min_gain=0", "mine:Policy"):
        assert statuses(check_settings({"LBBSP_POLICY": text})) == ["ok"]
    [policy] = check_settings({"LBBSP_POLICY": "observ"})
    assert "did you mean 'observe'?" in policy.message
    [option] = check_settings({"LBBSP_POLICY": "lbbsp:min_gian=0"})
    assert "min_gain" in option.message


@pytest.mark.parametrize(
    ("text", "status"),
    [('{"backend": "torch"}', "problem"), ('{"backend": "tensorflow"}', "ok"), ("{", "ok"),
     ("[1]", "problem"), ("{}", "ok"), (None, "ok")],
)  # fmt: skip
def test_the_backend_is_that_of_the_variable_or_else_of_the_file(tmp_path, text, status):
    file = tmp_path / "keras.json"
    if text is not None:
        file.write_text(text)
    home = {"KERAS_HOME": str(tmp_path)}
    for variable in ({}, {"KERAS_BACKEND": ""}):
        [found] = check_settings({**home, **variable})
        assert found.status == status
    if status == "problem":
        assert found.check == str(file)
    assert statuses(check_settings({**home, "KERAS_BACKEND": "tensorflow"})) == ["ok"]


@pytest.mark.parametrize(("framework", "status"), [("mxnet", "ok"), ("none", "problem")])
def test_settings_of_keras_do_not_matter_for_mxnet_alone(monkeypatch, framework, status):
    for other in ("machine.check_machine", "check_framework", "check_versions"):
        monkeypatch.setattr(f"lbbsp_core.doctor.{other}", lambda *_: [])
    assert statuses(diagnose({"KERAS_BACKEND": "jax"}, framework=framework)["settings"]) == [status]


@pytest.mark.parametrize(
    ("flags", "found"),
    [("--tf_xla_auto_jit=0", ""), ("--tf_xla_auto_jit=-1", ""),
     ("--tf_xla_cpu_global_jit --tf_xla_auto_jit=2 --tf_xla_auto_jit=off", ""),
     ("--x=1 --tf_xla_auto_jit=single-gpu(1) --y", "--tf_xla_auto_jit=single-gpu(1)")],
)  # fmt: skip
def test_compiling_each_batch_size_anew_is_noted(flags, found):
    home = {"KERAS_HOME": "/none", "TF_XLA_FLAGS": flags}
    [noted] = check_settings(home)
    assert noted.status == ("note" if found else "ok")
    assert not found or f"has {found}: on GPUs, XLA compiles" in noted.message
    assert statuses(check_settings(home, ["mxnet"])) == ["ok"]


# TF_CONFIG


def config(cluster, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


THREE = {"worker": ["a:1111", "b:2222"], "chief": ["c:3333"]}


def test_tasks_are_listed_with_the_chief_first():
    [found] = check_tf_config(config(THREE, index=1))
    assert found.message == "3 tasks (chief 0, worker 0, worker 1); this is worker 1"
    assert str(tf_cluster(config(THREE, index=1)).own) == "worker 1 (b:2222)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"cluster": {"worker": ["a:1"]}}', "has the task type None"),
        (config(THREE, index=2), "must have a task index in [0, 2)"),
        (config({"worker": ["a:1", "a:1"]}), "names the address 'a:1' twice"),
        (config({"worker": ["a:1", "b:70000"]}), "has the port 70000"),
        (config({"ps": ["a:1"], "worker": ["b:1"]}), "names parameter servers"),
    ],
)
def test_a_wrong_tf_config_is_a_problem(text, message):
    found = only_problem(check_tf_config(text))
    assert message in found.message
    assert found.remedy


@pytest.mark.parametrize("ports", [(70000, 1), (1, 70000), (0, 1)])
def test_addresses_with_ports_that_do_not_exist_are_not_tried(monkeypatch, ports):
    monkeypatch.setattr("lbbsp_core.doctor.machine.check_machine", lambda _: [])
    workers = [f"127.0.0.1:{port}" for port in ports]
    environment = {"TF_CONFIG": config({"worker": workers}), "SLURM_JOB_ID": "9"}
    found = diagnose(environment, framework="none")["cluster"]
    assert "must be in [1, 65535]" in only_problem(found).message
    assert found[-1].check == "Slurm"


def test_no_cluster_and_single_workers():
    assert statuses(check_tf_config("")) == ["ok"]
    assert statuses(check_tf_config(config({"worker": ["a:1"]}))) == ["ok", "note"]
    [found] = check_tf_config(config(THREE, kind="evaluator"))
    assert "an evaluator" in found.message


def test_all_names_have_one_limit_of_time(monkeypatch):
    clock = SimpleNamespace(now=100.0)

    class Silent:
        """A thread in virtual time, whose name service does not answer."""

        def __init__(self, **_):
            self.start = lambda: None

        def join(self, seconds):
            clock.now += seconds

    monkeypatch.setattr(addresses, "threading", SimpleNamespace(Thread=Silent))
    monkeypatch.setattr(addresses, "monotonic", lambda: clock.now)
    found = addresses.resolve([f"host{index}" for index in range(8)], 0.5)
    assert set(found.values()) == {"the name service did not answer within 0.5 s"}
    assert clock.now == 100.5


@pytest.mark.parametrize(
    ("error", "own"),
    [(0, True), (errno.EADDRNOTAVAIL, False), (errno.EAFNOSUPPORT, False), (-2, False)],
)
def test_a_number_is_own_only_if_it_can_be_bound(monkeypatch, error, own):
    def new_socket(family, _):
        if error:
            raise OSError(error, "no such socket")
        return real(family, socket.SOCK_STREAM)

    real = socket.socket
    monkeypatch.setattr(hosts, "socket", SimpleNamespace(**{**vars(socket), "socket": new_socket}))
    assert addresses.is_own("127.0.0.1") == own


@pytest.fixture
def network(monkeypatch):
    """Names and numbers of a fake network, in which 10.0.0.1 is this machine."""
    names = {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "10.0.0.9": ["10.0.0.9"]}
    state = SimpleNamespace(names=names, bound=0, route="")

    def bind_error(number, port):
        if port == 0:
            return 0 if number in ("10.0.0.1", "127.0.0.1") else errno.EADDRNOTAVAIL
        return state.bound

    state.resolve = lambda hosts: {host: state.names.get(host, "unknown name") for host in hosts}
    monkeypatch.setattr(addresses, "bind_error", bind_error)
    monkeypatch.setattr(addresses, "no_route", lambda _: state.route)
    monkeypatch.setattr(addresses, "user_of", lambda _: ("process 7 (python)", False))
    return state


def of_addresses(network, index=0):
    cluster = tf_cluster(config({"worker": ["a:1111", "b:2222"]}, index=index))
    return list(check_addresses(cluster, network.resolve))


def test_who_listens_on_a_port(tmp_path):
    """A process that waits for others on behalf of a worker yields the port to that worker."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); "
    for name in ("worker.py", "_start_watch.py"):
        script = tmp_path / name
        script.write_text(code + "import sys; sys.stdout.flush(); sys.stdin.read()")
        command = [sys.executable, str(script)]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
            port = int(process.stdout.readline())
            user, yields = addresses.user_of(port)
            (finding,) = addresses.check_port("worker 1", port, "TF_CONFIG", ["127.0.0.1"])
            process.communicate("")
        assert re.fullmatch(rf"process {process.pid} \(.*\)", user)
        assert yields == (name == "_start_watch.py")
        assert finding.status == ("note" if yields else "problem")


def test_addresses_that_are_right(network):
    own, peer = of_addresses(network)
    assert own.message == "is 10.0.0.1 on this machine, and port 1111 is free"
    assert peer.message == "is 10.0.0.2, to which there is a route"
    assert statuses([own, peer]) == ["ok", "ok"]
    network.names["a"] = ["127.0.0.1"]
    assert statuses(of_addresses(network)) == ["note", "ok"]
    network.names["b"] = ["127.0.0.1"]
    assert statuses(of_addresses(network)) == ["ok", "ok"], "all on one machine"


@pytest.mark.parametrize(
    ("change", "index", "message", "remedy"),
    [
        ({}, 1, "10.0.0.2 is not an address of this machine", "correct the task's index"),
        ({"bound": errno.EADDRINUSE}, 0, "is used by process 7 (python)", "ss -ltnp 'sport = :1"),
        ({"bound": errno.EACCES}, 0, "may not be opened by this user", "above 1023"),
        ({"route": "Network is unreachable"}, 0, "there is no route to 10.0.0.2", "connect this"),
        ({"names": {"a": ["10.0.0.1"]}}, 0, "'b' has no address: unknown name", "/etc/hosts"),
        (
            {"names": {"a": ["10.0.0.1"], "b": ["127.0.0.1"]}}, 0,
            "127.0.0.1 is this machine itself", "all hosts reach it",
        ),
    ],
)  # fmt: skip
def test_addresses_that_are_wrong(network, change, index, message, remedy):
    vars(network).update(change)
    found = only_problem(of_addresses(network, index))
    assert message in found.message
    assert remedy in found.remedy


def test_another_task_of_the_own_host_is_noted_as_the_own_one(network):
    network.names = {"a": ["127.0.0.1"], "b": ["10.0.0.1"]}
    for index, expected in ((0, ["note", "note", "ok"]), (2, ["problem", "problem", "ok"])):
        workers = {"worker": ["a:1111", "a:1112", "b:2222"]}
        cluster = tf_cluster(config(workers, index=index))
        assert statuses(check_addresses(cluster, network.resolve)) == expected


PORT_ERRORS = {
    errno.EADDRINUSE: "is used by process 7 (python)",
    errno.EACCES: "may not be opened by this user",
    errno.EADDRNOTAVAIL: "cannot be opened: ",
}


@pytest.mark.parametrize("number", ["10.0.0.1", "127.0.0.1"])
@pytest.mark.parametrize(("error", "message"), PORT_ERRORS.items())
def test_a_port_is_checked_whatever_is_noted_of_its_address(network, error, message, number):
    network.names["a"], network.bound = [number], error
    scheduler = {**DMLC, "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "a"}
    for found, port, where in (
        (of_addresses(network), 1111, "all TF_CONFIGs"),
        (list(check_dmlc(scheduler, network.resolve)), 9000, "DMLC_PS_ROOT_PORT everywhere"),
    ):
        assert only_problem(found).message.startswith(f"port {port} {message}")
        assert where in only_problem(found).remedy
        assert statuses(found).count("note") == (number == "127.0.0.1")


# DMLC_* and Slurm

DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "b",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_SERVER": "1",
    "DMLC_NUM_WORKER": "2",
}


def test_dmlc_variables_that_are_right(network):
    assert statuses(check_dmlc({})) == ["ok"]
    assert statuses(check_dmlc(DMLC, network.resolve)) == ["ok", "ok"]
    scheduler = {**DMLC, "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "a"}
    assert statuses(check_dmlc(scheduler, network.resolve)) == ["ok", "ok"]
    assert statuses(check_dmlc({**DMLC, "DMLC_NODE_HOST": "a"}, network.resolve)) == ["ok", "ok"]
    network.names["b"] = ["127.0.0.1"]
    assert statuses(check_dmlc(DMLC, network.resolve)) == ["ok", "note"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DMLC_NUM_WORKER": ""}, "DMLC_NUM_WORKER must be set together with"),
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE must be one of"),
        ({"DMLC_PS_ROOT_PORT": "x"}, "DMLC_PS_ROOT_PORT must be a port"),
        ({"DMLC_PS_ROOT_URI": "elsewhere"}, "'elsewhere' has no address"),
        ({"DMLC_ROLE": "scheduler"}, "10.0.0.2 is not an address of this machine"),
        ({"DMLC_NODE_HOST": "10.0.0.9"}, "'10.0.0.9' is not an address of this machine"),
        ({"DMLC_NODE_HOST": "elsewhere"}, "'elsewhere' has no address: unknown name"),
        ({"DMLC_INTERFACE": "none0"}, "got 'none0'"),
    ],
)
def test_dmlc_variables_that_are_wrong(network, change, message):
    found = only_problem(check_dmlc({**DMLC, **change}, network.resolve))
    assert message in found.message
    assert found.remedy


def test_slurm():
    step = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}  # fmt: skip
    assert statuses(check_slurm({})) == ["ok"]
    [found] = check_slurm(step)
    assert found.message == "job 9, task 1 of 3 on n[1-2] (2,1 a node)"
    step["SLURM_STEP_TASKS_PER_NODE"] = "1(x2),1"
    assert statuses(check_slurm(step)) == ["ok"]
    for wrong in (
        {"SLURM_PROCID": "3"},
        {"SLURM_PROCID": "-1"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
        {"SLURM_STEP_TASKS_PER_NODE": "2,1,many"},
        {"SLURM_STEP_TASKS_PER_NODE": "x2,1"},
        {"SLURM_PROCID": "9" * 5000},
    ):
        found = only_problem(check_slurm({**step, **wrong}))
        assert all(f"{name}={value}" in found.message for name, value in wrong.items())
    [found] = check_slurm({"SLURM_JOB_ID": "9", "SLURM_PROCID": "0"})
    assert (found.status, "no task of srun" in found.message) == ("note", True)


# the machine


@pytest.mark.parametrize(
    ("quotas", "status", "text"),
    [
        ([], "ok", "4 of 8 cores"),
        ([6.0], "ok", "a CPU quota of 6 cores"),
        ([8.0, 1.5], "note", "but a CPU quota of 1.5 cores"),
        ([0.05], "problem", "the import of a framework takes minutes"),
    ],
)
def test_cores(quotas, status, text):
    found = machine.check_cores(4, 8, quotas)
    assert found.status == status
    assert text in found.message


def test_memory():
    assert machine.check_memory(64 << 30, 32 << 30, None).status == "ok"
    assert machine.check_memory(64 << 30, 32 << 30, 1 << 62).message.count("limit") == 0
    assert machine.check_memory(64 << 30, 32 << 30, 500 << 20).status == "note"
    assert machine.check_memory(64 << 30, 100 << 20, None).status == "note"


def nvml(**changes):
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: [b"H100", "H200"][handle],
        "nvmlSystemGetDriverVersion": lambda: b"570.86.10",
    }
    return SimpleNamespace(**{**functions, **changes})


def raising(error):
    def fail(*_):
        raise error

    return fail


def gpus(library, environment=None):
    return list(machine.check_gpus(environment or {}, True, library))


def test_gpus():
    assert statuses(machine.check_gpus({}, False, raising(AssertionError()))) == ["ok"]
    assert gpus(nvml) == [ok("GPU", "H100, H200; driver 570.86.10")]
    assert gpus(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,-1"}) == gpus(nvml)
    for hidden in ("", "-1", "-1,0", "NoDevFiles"):  # NVML is not asked
        [found] = gpus(raising(AssertionError()), {"CUDA_VISIBLE_DEVICES": hidden})
        assert (found.status, "hides all" in found.message) == ("ok", True)


def test_gpus_whose_use_cannot_be_measured():
    [missing] = gpus(raising(ModuleNotFoundError("pynvml")))
    assert (missing.status, "pip install nvidia-ml-py" in missing.remedy) == ("note", True)
    [broken] = gpus(lambda: nvml(nvmlInit=raising(RuntimeError("Driver Not Loaded"))))
    assert (broken.status, "NVML does not start: Driver" in broken.message) == ("note", True)
    [failing] = gpus(lambda: nvml(nvmlDeviceGetCount=raising(RuntimeError("lost"))))
    assert failing == problem("GPU", "NVML fails: lost", "see `nvidia-smi`")


def test_cgroups_drivers_and_the_allocator(monkeypatch):
    monkeypatch.setattr(machine, "available_cores", lambda: 0.3)
    permitted = lambda shares, _: Throttle() if sum(shares) <= 0.3 else None  # noqa: E731
    assert machine.check_speeds(permitted).status == "ok"
    assert "coarser" in machine.check_speeds(lambda *_: None).message
    assert machine.check_drivers([*DEFAULT_NAMES, "gpu_percent"]).status == "ok"
    missing = machine.check_drivers(DEFAULT_NAMES[1:])
    assert (missing.status, f"unavailable: {DEFAULT_NAMES[0]}" in missing.message) == ("note", True)
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    plain = machine.check_allocator(hidden)
    assert plain.status == "note"
    assert "export MALLOC_MMAP_MAX_=0 MALLOC_TRIM" in plain.remedy
    assert machine.check_allocator({**hidden, **KEEP_FREED_MEMORY}).status == "ok"


def test_the_figures_count_by_status():
    diagnosis = {"one": [ok("a", "b"), note("c", "d")], "two": [problem("e", "f", "g")]}
    assert count(diagnosis, "problem") == 1
    found = figures(diagnosis)
    assert (found["schema"], found["problems"], found["notes"]) == (1, 1, 1)
    known = {"check": "e", "status": "problem", "message": "f", "remedy": "g"}
    assert found["topics"]["two"] == [known]
    assert [each["status"] for each in found["topics"]["one"]] == ["ok", "note"]
