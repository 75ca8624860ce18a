"""The filter inside NVFlare's simulator: one of two clients makes an update of a single picture."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nvflare")

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "nvflare_job"
FILTERS = "task_result_filters"
SERVER, CLIENT = "app/config/config_fed_server.json", "app/config/config_fed_client.json"
SIMULATOR = "nvflare.private.fed.app.simulator.simulator"
ROUNDS = 2


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A copy of the job, to be changed."""
    return Path(shutil.copytree(JOB, tmp_path / "job", ignore=shutil.ignore_patterns("__pycache__")))


def read(job: Path, name: str) -> Any:
    return json.loads((job / name).read_text())


def write(job: Path, name: str, config: object) -> None:
    (job / name).write_text(json.dumps(config))


def simulate(job: Path, workspace: Path) -> str:
    """Run a job with two clients, each in a process of its own; return what was logged."""
    command = [sys.executable, "-m", SIMULATOR, str(job), "-w", str(workspace), "-n", "2", "-t", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


def global_model(workspace: Path) -> dict[str, Tensor]:
    (path,) = workspace.rglob("FL_global_model.pt")
    saved = torch.load(path, weights_only=True)
    return dict(saved["model"])


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The global model if the client that makes no leak had trained alone."""
    monkeypatch.syspath_prepend(str(JOB / "app/custom"))
    import tiny_model
    import tiny_trainer

    weights = {name: value.detach() for name, value in tiny_model.TinyNet().state_dict().items()}
    for _ in range(ROUNDS):
        weights, _ = tiny_trainer.train(weights, n_images=64, epochs=tiny_trainer.EPOCHS)
    return weights


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(torch.as_tensor(found[name]), value, atol=1e-6)


def screenings(site: Path, round: int) -> dict[str, dict[str, Any]]:
    """What the rows of a round say, by client, in the one folder of reports that a site has."""
    (folder,) = [path for path in site.rglob("hyperleak") if path.is_dir()]
    lines = (folder / f"round-{round}/screenings.jsonl").read_text().splitlines()
    return {row["client"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_client_keeps_its_leak_and_the_rounds_go_on(job: Path, tmp_path: Path, expected: dict[str, Tensor]) -> None:
    workspace = tmp_path / "workspace"
    log = simulate(job, workspace)
    assert log.count("Aggregated 2/2 results") == ROUNDS, log
    assert_same(global_model(workspace), expected)
    for number in range(ROUNDS):
        leak, other = (screenings(workspace / name, number)[name] for name in ("site-2", "site-1"))
        assert (leak["verdict"], leak["response"][:9]) == ("leaked", "withheld:")
        # the trainer says how many, the filter sees the optimizer
        assert leak["training"].items() >= {"steps": 1, "examples": 1, "lr": 0.1, "optimizer": "sgd"}.items()
        assert leak["exposures"][-1]["kind"] == "images"
        assert (other["verdict"], other["response"][:5]) == ("not shown to leak", "sent:")
        (page,) = (workspace / "site-2").rglob(f"hyperleak/round-{number}/report.html")
        assert "Shown to leak: site-2." in page.read_text()


@pytest.mark.slow
def test_server_keeps_a_leak_out_of_the_mean(job: Path, tmp_path: Path, expected: dict[str, Tensor]) -> None:
    """Differences as tensors, an aggregator of its own, and the filter on the server."""
    client, server = read(job, CLIENT), read(job, SERVER)
    client["executors"][0]["executor"]["args"]["sends_difference"] = True
    server[FILTERS], client[FILTERS] = client[FILTERS], []
    server[FILTERS][0]["filters"][0]["args"]["training"] = {"optimizer": "sgd", "lr": 0.1}
    server["components"][0]["args"]["allow_numpy_conversion"] = False
    server["workflows"] = [
        {
            "id": "scatter_and_gather",
            "path": "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather",
            "args": {
                "min_clients": 2,
                "num_rounds": ROUNDS,
                "wait_time_after_min_received": 0,
                "aggregator_id": "aggregator",
                "persistor_id": "persistor",
                "shareable_generator_id": "generator",
                "train_task_name": "train",
            },
        }
    ]
    common = "nvflare.app_common"
    server["components"] += [
        {
            "id": "aggregator",
            "path": f"{common}.aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator",
            "args": {"expected_data_kind": "WEIGHT_DIFF"},
        },
        {
            "id": "generator",
            "path": f"{common}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
            "args": {},
        },
    ]
    write(job, CLIENT, client)
    write(job, SERVER, server)
    workspace = tmp_path / "workspace"
    log = simulate(job, workspace)
    assert "Finished ScatterAndGather Training" in log, log
    assert_same(global_model(workspace), expected)
    for number in range(ROUNDS):
        found = screenings(workspace / "server", number)
        assert {name: row["verdict"] for name, row in found.items()} == {
            "site-1": "not shown to leak",
            "site-2": "leaked",
        }


@pytest.mark.slow
def test_stop_ends_the_job(job: Path, tmp_path: Path) -> None:
    client = read(job, CLIENT)
    client[FILTERS][0]["filters"][0]["args"]["on_leak"] = "stop"
    write(job, CLIENT, client)
    log = simulate(job, tmp_path / "workspace")
    assert "UNSAFE_JOB" in log, log
    assert "Finished FedAvg" not in log
    assert not [*(tmp_path / "workspace").rglob("FL_global_model.pt")]
