"""Which executor computes a run: name, options, workers and GPUs; and the process that each of them starts."""

import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import ModuleType

import pytest
from support.runs import tiny
from support.tiny import Registered

import hyperleak
from eval.experiment import yaml_config
from eval.run.executors import MissingPackageError, in_words, open_executor
from eval.run.executors.choice import ExecutorChoice, choose_executor, visible_gpus
from eval.run.shared import job as jobs

JOB = {
    "worker": "w-1",
    "gpu": None,
    "current_folder": ".",
    "variables": {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": None},
}


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("dask", "dask"), ("ray", "ray")])
def test_a_missing_package_is_said_with_the_extra_that_brings_it(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackageError, match=rf"--executor {name} needs .*: pip install '\.\[{name}\]' in the folder of hyperleak"
    ):
        open_executor(name, {}, workers=1, device="cpu", folder=tmp_path)


def test_an_error_is_said_with_its_first_cause_also_where_that_is_its_own():
    first, last = ValueError("at first"), RuntimeError("at last")
    last.__cause__, first.__cause__ = first, first
    assert in_words(last) == "at last (at first)"
    assert in_words(first) == "at first"


def test_an_unknown_executor_is_refused():
    with pytest.raises(ValueError, match=r"expected an executor of local, slurm, dask, ray, got 'slrum'; did you mean"):
        ExecutorChoice(name="slrum")


def test_the_command_line_goes_before_the_config():
    section = yaml_config.executor_section({"executor": {"name": "slurm", "partition": "gpu", "timeout_min": 60}})
    assert choose_executor(None, {}, {}, 4) is None
    found = choose_executor(None, section, {"timeout_min": 5}, 4)
    assert found == ExecutorChoice(name="slurm", options={"partition": "gpu", "timeout_min": 5}, workers=4)
    assert choose_executor("slurm", section, {}, None).options == {"partition": "gpu", "timeout_min": 60}
    assert choose_executor("local", section, {}, None).options == {}  # options of another engine are none of its own
    assert yaml_config.executor_section({"executor": "dask"}) == {"name": "dask"}
    with pytest.raises(ValueError, match="expected an executor for the option partition"):
        choose_executor(None, {}, {"partition": "gpu"}, None)


def test_a_config_s_executor_is_no_part_of_the_experiment():
    data = {"task": {"dataset": "faces", "model": "mlp"}, "federation": {}, "method": "fedavg"}
    plain = yaml_config.read(data)
    assert yaml_config.read({**data, "executor": {"name": "slurm", "partition": "gpu"}}) == plain
    assert "executor" not in yaml_config.to_plain(plain)


def test_gpus_are_given_out_one_a_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert visible_gpus() == ["4", "7"]
    assert ExecutorChoice(name="local").count("cuda") == 2
    assert ExecutorChoice(name="local", workers=1).count("cuda") == 1
    with pytest.raises(ValueError, match="expected at most 2 workers, one for each GPU here, got 3"):
        ExecutorChoice(name="local", workers=3).count("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="expected at most 0 workers"):
        ExecutorChoice(name="local").count("cuda")


def test_how_many_workers_run_elsewhere_has_to_be_said():
    with pytest.raises(ValueError, match="say how many workers --executor slurm is to start"):
        ExecutorChoice(name="slurm").count("cuda")
    assert ExecutorChoice(name="slurm", workers=9).count("cuda") == 9
    assert ExecutorChoice(name="ray", options={"address": "auto"}, workers=9).is_elsewhere
    assert not ExecutorChoice(name="slurm", options={"cluster": "local"}).is_elsewhere


def test_the_local_executor_takes_no_options(tmp_path):
    with pytest.raises(ValueError, match="expected no options for --executor local, got partition"):
        open_executor("local", {"partition": "gpu"}, workers=1, device="cpu", folder=tmp_path)
    executor = open_executor("local", {}, workers=2, device="cpu", folder=tmp_path)
    futures: list[Future[int]] = [executor.submit(pow, 2, number) for number in range(4)]
    assert [future.result() for future in futures] == [1, 2, 4, 8]
    executor.close()


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Have the worker's process be a script of a few lines."""

    def run(code: str, **changed: object) -> tuple[str, str]:
        (tmp_path / "stands_in.py").write_text(f"import os, sys, json\njob = json.loads(sys.stdin.readline())\n{code}")
        (tmp_path / "shared").mkdir(exist_ok=True)
        monkeypatch.setattr(jobs, "MODULE", "stands_in")
        monkeypatch.syspath_prepend(tmp_path)
        return jobs.run_worker({**JOB, "folder": str(tmp_path), **changed})

    return run


def test_a_worker_has_its_caller_s_threads_and_one_gpu(run_script):
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    code = f"sys.stdout.write(json.dumps([os.environ.get(name) for name in {names}]))"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKL_NUM_THREADS", "8")  # of the engine's process
        assert run_script(code, gpu="7") == (jobs.DONE, '["3", null, "7"]')


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("sys.stdout.write('other data'); sys.exit(3)", (jobs.REFUSAL, "other data")),
        ("sys.exit(4)", (jobs.STOPPED, "")),
        ("os.kill(os.getpid(), 9)", (jobs.DEATH, f"signal {int(signal.SIGKILL)}")),
        ("sys.stderr.write('no memory\\n'); sys.exit(1)", (jobs.DEATH, "exit code 1 | no memory")),
    ],
)
def test_it_is_told_how_a_worker_has_ended(run_script, code, ended):
    assert run_script(code) == ended


def test_a_worker_leaves_with_the_process_that_started_it():
    """Its stdin ends then, however that process has ended; what it holds is given up."""
    program = (
        "import sys; from eval.run.shared import job\n"
        "job.AT_PARENTS_END.append(lambda: sys.stdout.write('given up') and sys.stdout.flush())\n"
        "job.leave_with_parent()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    told, _ = process.communicate()
    assert (process.returncode, told) == (1, b"given up")


def test_what_starts_a_worker_imports_little():
    """An engine's process waits beside each worker."""
    program = "import sys; import eval.run.shared.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Recorded:
    """Stands for an engine: keeps what it is asked for, and calls what is submitted at once."""

    def __init__(self, **kept: object) -> None:
        self.asked: dict[str, object] = {}
        self.__dict__.update(kept)

    def __call__(self, *_: object, **named: object) -> "Recorded":
        self.asked |= named
        return self

    def __getattr__(self, name: str) -> object:
        return self


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **parts: object) -> None:
    """Have a package be a module of these parts."""
    module = ModuleType(name)
    module.__dict__.update(parts)
    monkeypatch.setitem(sys.modules, name, module)


class RefusedError(RuntimeError):
    """Stands for submitit's error of a command that has failed."""


SUBMITIT_ERRORS = dict.fromkeys(("UncompletedJobError", "FailedJobError", "FailedSubmissionError"), RefusedError)


class Refusing(Recorded):
    """Stands for submitit where Slurm takes no job: what was put together is never submitted."""

    @contextmanager
    def batch(self):
        """Submit at the end of the block."""
        yield
        raise RefusedError("sbatch: error:\n invalid partition")

    def submit(self, *_: object) -> object:
        """Return a job of which nothing is known."""
        return object()


def test_a_refusal_of_slurm_is_said_and_jobs_that_never_were_can_be_cancelled(tmp_path, monkeypatch):
    stand_in(monkeypatch, "submitit", AutoExecutor=Refusing(_typed_parameters=dict))
    stand_in(monkeypatch, "submitit.core.utils", **SUBMITIT_ERRORS)
    executor = open_executor("slurm", {"partition": "typo"}, workers=2, device="cpu", folder=tmp_path)
    made = []
    with (
        pytest.raises(
            ValueError, match="--executor slurm: no job could be submitted: sbatch: error: invalid partition"
        ),
        executor.together(),
    ):
        made.append(executor.submit(print))
    made[0].cancel()
    assert made[0].done()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slurm_is_asked_for_one_gpu_a_job_by_submitit_s_words(tmp_path, monkeypatch, device):
    generic = dict.fromkeys(("name", "timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb"))
    engine = Recorded(_typed_parameters=lambda: generic)
    stand_in(monkeypatch, "submitit", AutoExecutor=engine)
    stand_in(monkeypatch, "submitit.core.utils", **SUBMITIT_ERRORS)
    options = {"partition": "gpu", "timeout_min": 9, "array_parallelism": 4, "mem_gb": 8}
    open_executor("slurm", options, workers=3, device=device, folder=tmp_path)
    assert engine.asked == {
        "folder": tmp_path / "submitit",
        "cluster": "slurm",
        "name": "hyperleak",
        "timeout_min": 9,
        "cpus_per_task": 1,
        "gpus_per_node": int(device == "cuda"),
        "mem_gb": 8,
        "slurm_partition": "gpu",
        "slurm_array_parallelism": 4,
    }


def submit_job(partition: str | None = None, setup: list[str] | None = None, array_parallelism: int = 256) -> None:
    """Stands for submitit's list of Slurm's own options."""


def connect(address: str | None = None, *, num_cpus: "int | None" = None, **_: object) -> None:
    """Stands for `ray.init`."""


class Spread:
    """Stands for Dask's classes, of which only the workers' have annotations."""

    def __init__(self, n_workers=None, memory_limit: "str | float" = "auto", **_: object) -> None:
        """Take options."""


@pytest.fixture
def engines(monkeypatch):
    """Packages of all engines, as far as options are checked."""
    generic = {"name": str, "timeout_min": int, "mem_gb": float, "cpus_per_task": int, "gpus_per_node": int}
    stand_in(monkeypatch, "submitit", AutoExecutor=Recorded(_typed_parameters=lambda: generic))
    stand_in(monkeypatch, "submitit.core.utils", **SUBMITIT_ERRORS)
    slurm = Recorded(_valid_parameters=lambda: {"partition", "setup", "array_parallelism"})
    stand_in(monkeypatch, "submitit.slurm.slurm", SlurmExecutor=slurm, _make_sbatch_string=submit_job)
    stand_in(monkeypatch, "distributed", LocalCluster=Spread, Nanny=Spread, Worker=Spread, Client=Spread)
    stand_in(monkeypatch, "dask")
    stand_in(monkeypatch, "ray", init=connect, is_initialized=lambda: False)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("slurm", {"cluster": "lsf"}, "executor option cluster: expected slurm or local, got 'lsf'"),
        ("slurm", {"partiton": "gpu"}, "--executor slurm has no option 'partiton'; did you mean 'partition'?"),
        ("slurm", {"zzz": 1}, "no option 'zzz'; it has array_parallelism, cpus_per_task, gpus_per_node, mem_gb"),
        ("slurm", {"timeout_min": "an hour"}, "expected int for the option timeout_min, got 'an hour'"),
        ("slurm", {"array_parallelism": True}, "expected int for the option array_parallelism, got True"),
        ("slurm", {"setup": "module load"}, "expected list for the option setup, got 'module load'"),
        ("dask", {"n_worker": 2}, "no option 'n_worker'; did you mean 'n_workers'?"),
        ("dask", {"n_workers": "two"}, "expected int for the option n_workers, got 'two'"),
        ("ray", {"num_cpu": 2}, "no option 'num_cpu'; did you mean 'num_cpus'?"),
        ("ray", {"num_cpus": 2.5}, "expected int for the option num_cpus, got 2.5"),
        ("local", {"partition": "gpu"}, "expected no options for --executor local, got partition"),
        ("slurm", {"partition": 7, "mem_gb": 8, "timeout_min": None, "setup": ["module load"]}, None),
        ("dask", {"memory_limit": "4GB"}, None),
        ("ray", {"num_cpus": 2, "_temp_dir": "/scratch"}, None),
        ("ray", {"address": "local"}, None),
        ("ray", {"address": "host:port"}, "expected an address such as 10.0.0.1:8786, got 'host:port'"),
        ("dask", {"address": "tcp://[::1"}, "expected an address such as 10.0.0.1:8786, got 'tcp://[::1'"),
    ],
)
def test_options_are_checked_without_starting_anything(engines, name, options, said):
    choice = ExecutorChoice(name=name, options=options, workers=2)
    if said is None:
        choice.check()
    else:
        with pytest.raises(ValueError, match=re.escape(said)):
            choice.check()


class Answering:
    """Takes connections at an address; sends `words` to each, or hangs up where there are none."""

    def __init__(self, words: bytes) -> None:
        self.words, self.server = words, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self.answer, daemon=True).start()
        return self.address

    def answer(self) -> None:
        """Answer until it is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                with connection:
                    connection.sendall(self.words)

    def __exit__(self, *_: object) -> None:
        self.server.close()


def refused_address() -> str:
    """An address of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("name", "scheme"), [("dask", "tcp://"), ("dask", ""), ("ray", ""), ("ray", "ray://")])
def test_an_address_where_no_cluster_is_is_noticed_before_anything_is_written(engines, tmp_path, name, scheme):
    out = tmp_path / "out"
    address = f"{scheme}{refused_address()}"
    executor = {"name": name, "address": address}
    said = f"^executor {name}: no cluster answers at {address} .*(dask scheduler|ray start --head)"
    with Registered(), pytest.raises(ValueError, match=said):
        hyperleak.run(tiny(), out, workers=2, executor=executor)
    assert not out.exists()


def test_dask_is_told_from_what_hangs_up_or_talks_otherwise(engines, monkeypatch):
    class Client:
        def __init__(self, **options: object) -> None:
            raise MemoryError

    with Answering(b"") as address, pytest.raises(ValueError, match="it hangs up"):
        ExecutorChoice(name="dask", options={"address": f"tcp://{address}"}, workers=2).check()
    stand_in(monkeypatch, "distributed", Client=Client)
    with Answering(b"HTTP/1.1 400") as address, pytest.raises(ValueError, match="is no scheduler of Dask's"):
        ExecutorChoice(name="dask", options={"address": f"tcp://{address}"}, workers=2).check()


def test_a_cluster_that_answers_is_left_again(engines, monkeypatch):
    client, calls = Recorded(), list[str]()
    stand_in(monkeypatch, "distributed", Client=client)
    ray = {"is_initialized": lambda: False, "shutdown": lambda: calls.append("shutdown")}
    stand_in(monkeypatch, "ray", init=lambda address, **_: calls.append(address), **ray)
    with Answering(b"hello") as address:
        ExecutorChoice(name="dask", options={"address": f"tcp://{address}"}, workers=2).check()
        assert client.asked == {"address": f"tcp://{address}"}
        ExecutorChoice(name="ray", options={"address": address}, workers=2).check()
        assert calls == [address, "shutdown"]


def test_dask_is_asked_for_its_resource_gpu(tmp_path, monkeypatch):
    client = Recorded()
    stand_in(monkeypatch, "distributed", Client=client, LocalCluster=Recorded())
    stand_in(monkeypatch, "dask")
    executor = open_executor("dask", {"address": "tcp://a:1"}, workers=3, device="cuda", folder=tmp_path)
    executor.submit(pow, 2, 3)
    assert executor.gives_gpus
    assert client.asked == {"address": "tcp://a:1", "pure": False, "retries": 0, "resources": {"GPU": 1}}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ray_is_asked_for_one_gpu_a_task(tmp_path, monkeypatch, device):
    engine = Recorded(is_initialized=lambda: False)
    stand_in(monkeypatch, "ray", **{name: getattr(engine, name) for name in ("is_initialized", "init", "remote")})
    executor = open_executor("ray", {"address": "auto"}, workers=3, device=device, folder=tmp_path)
    executor.submit(pow, 2, 3)
    assert engine.asked["address"] == "auto"
    assert "num_cpus" in engine.asked  # of the task; the cluster has what it has
    assert engine.asked["num_gpus"] == int(device == "cuda")
    assert engine.asked["max_retries"] == 0
