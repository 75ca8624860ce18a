"""A grid of 40 cells under every executor: the same bytes, though workers are killed, and no cell finished twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.grid import CELLS, CONFIG, Killer, counted, whole

import hyperleak
from eval.io import yaml12
from eval.run.executors import open_executor
from eval.run.members import SHARED, WORKER, Members
from eval.run.shared.job import caller_variables

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ENGINES = {
    "local": ("torch", {"name": "local"}),
    "slurm": ("submitit", {"name": "slurm", "cluster": "local", "timeout_min": 20}),
    "dask": ("distributed", {"name": "dask"}),
    "ray": ("ray", {"name": "ray"}),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "grid.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """What one process leaves."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    assert not hyperleak.run(config, folder, workers=1).failures
    return whole(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_executor_leaves_the_same_bytes_though_workers_are_killed(config, alone, tmp_path, engine):
    package, executor = ENGINES[engine]
    pytest.importorskip(package)
    out = tmp_path / "out"
    killer = Killer(out, engine_too=engine != "local")
    killer.start()
    assert not hyperleak.run(config, out, workers=2, executor=executor).failures
    assert len(killer.killed) == 2
    assert whole(out) == alone
    found = counted(out)
    assert len(found) == CELLS
    assert set(found.values()) == {1}
    assert (out / "log.txt").read_text().count("has died") == 2
    assert not (out / SHARED).exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_executor_leaves_the_variables_that_workers_get_as_they_are(engine, tmp_path):
    package, executor = ENGINES[engine]
    pytest.importorskip(package)
    options = {key: value for key, value in executor.items() if key != "name"}
    before = caller_variables()
    opened = open_executor(engine, options, workers=1, device="cpu", folder=tmp_path)
    try:
        assert caller_variables() == before
    finally:
        opened.close()


def begin(config: Path, out: Path, *words: str) -> subprocess.Popen:
    """The command, once two of its workers are at work."""
    command = [sys.executable, "-m", "hyperleak", "run", str(config), "--out", str(out), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    members = Members(out)
    for _ in range(600):
        if sum(one.kind == WORKER and "stages" in one.about for one in members.states()) == 2:
            return process
        time.sleep(0.1)
    raise AssertionError(process.communicate())


def test_ctrl_c_ends_the_workers_and_the_same_command_goes_on(config, alone, tmp_path):
    out = tmp_path / "out"
    process = begin(config, out, "--executor", "local", "--workers", "2")
    pids = [one.about["pid"] for one in Members(out).states() if one.kind == WORKER]
    process.send_signal(signal.SIGINT)
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert "the same command goes on from here" in words
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (out / SHARED).exists()
    hyperleak.run(config, out, workers=1)
    assert whole(out) == alone


def test_a_second_caller_joins_a_run_and_another_process_watches_it(config, alone, tmp_path):
    out = tmp_path / "out"
    first = begin(config, out, "--executor", "local", "--workers", "2")
    watching = subprocess.Popen(
        [sys.executable, "-m", "hyperleak", "run", "--watch", str(out)], stdout=subprocess.PIPE, text=True
    )
    result = hyperleak.run(config, out, workers=1, executor="local")
    assert not result.failures
    words, _ = first.communicate(timeout=120)
    assert first.returncode == 0, words
    seen, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0, seen
    assert f"{CELLS} of {CELLS} cells are finished" in seen
    assert "training" in seen
    assert whole(out) == alone


WIDE = """
method: {name: fedavg, lr: 0.1, batch_size: 6}
attack: {name: slow-guess, seconds: 1.0}
federation: {partition: {name: iid, clients: 3, train_size: 12, test_size: 6}, rounds: 1}
observe: {images: 12, batch_size: 1, method: {steps: 1}}
seeds: [0]
"""


def kill_who_is_helped(out: Path, killed: list[str]) -> None:
    """Kill the worker that has claimed the attack, once another has claimed a portion of it."""
    members = Members(out)
    for _ in range(6000):
        held = {path.name: path.read_text() for path in (out / SHARED / "claims").glob("*")}
        portions = {name for name in held if "-" in name}
        cells = {name.partition("-")[0] for name in portions}
        owners = {member for name, member in held.items() if name.partition(".")[0] in cells}
        helpers = {held[name] for name in portions} - owners - {""}
        if owners and helpers and (state := members.state(owners.pop())) is not None:
            os.kill(int(state.about["pid"]), signal.SIGKILL)
            killed.append(state.name)
            return
        time.sleep(0.02)


def test_an_attack_on_many_updates_survives_the_worker_that_began_it(tmp_path):
    experiment = yaml12.parse(CONFIG) | yaml12.parse(WIDE)
    assert not hyperleak.run(experiment, tmp_path / "alone", workers=1).failures
    out, killed = tmp_path / "out", []
    thread = threading.Thread(target=kill_who_is_helped, args=(out, killed), daemon=True)
    thread.start()
    assert not hyperleak.run(experiment, out, workers=2, executor="local").failures
    assert len(killed) == 1
    assert whole(out) == whole(tmp_path / "alone")
    assert set(counted(out).values()) == {1}
