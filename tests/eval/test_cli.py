import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

from eval import cli
from eval.store import read_rows


@pytest.fixture(autouse=True)
def _guesses(monkeypatch):
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "160")
    with Registered():
        yield


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    return file


def call(*words: object):
    return CliRunner().invoke(cli.app, list(map(str, words)))


def run(path: Path, *words: object):
    return call("run", path, "--out", path.parent / "out", "--device", "cpu", *words)


def left_behind(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p != path)


def test_run_prints_the_table_and_writes_the_results(path):
    result = run(path, "--set", "seeds=3", "--set", "attack.guess.spread=0")
    assert result.exit_code == 0, result.output
    for part in ("A tiny experiment", "fedavg", "mean colour", "PSNR (dB): how close", "fedavg: training (2/2)"):
        assert part in result.output
    rows = read_rows(path.parent / "out" / "images.jsonl")
    assert {row["seed"] for row in rows} == {3}
    assert left_behind(path) == ["out"]
    assert run(path).exit_code == cli.USER_ERROR  # other settings
    assert "expected device" in run(path, "--device", "tpu").output
    assert "expected lr >= 0, got -1.0" in run(path, "--set", "method.lr=-1").output


def test_no_figure_is_cut_off_on_80_columns(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = run(path).output
    rows = read_rows(path.parent / "out" / "images.jsonl")
    psnr = [row["psnr"] for row in rows if row["attack"] == "guess" and row["method"] == "hyperfl"]
    assert f"{sum(psnr) / len(psnr):.1f} [" in output
    for part in ("hyperfl", "nearest image", "accuracy", "labels", "fedavg, refuse: not in the mood"):
        assert part in output
    assert "\u2026" not in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "method.lrr=1"], "did you mean 'method.lr'"),
        (["--set", "task.dataset=cifar"], "did you mean 'cifar10'"),
        (["--set", "task.dataset={name: npz, train: none.npz}"], "HYPERLEAK_DATA"),
        (["--device", "gpu"], "expected device"),
        (["--set", "method.lr=-1"], "method 'fedavg': expected lr >= 0, got -1.0"),
        (["--set", "method.fedavg.batch_size=0"], "expected batch_size >= 1, got 0"),
        (["--set", "method.fedavg.epochs=0"], "expected epochs >= 1, got 0"),
        (["--set", "observe.method={steps: 0}"], "observe.method 'fedavg': expected steps >= 1, got 0"),
        (["--set", "method=local", "--set", "attack=guess"], "`against` is a setting of 'refuse' in the config"),
        (["--set", "nothing"], "expected key=value"),
    ],
)
def test_user_errors_are_one_line(path, words, said):
    result = run(path, *words)
    assert result.exit_code == cli.USER_ERROR
    assert said in result.output
    assert result.output.count("\n") == 1
    assert "Traceback" not in result.output
    assert not left_behind(path)


def test_failures_leave_nothing_behind(path):
    result = run(path, "--set", "attack=crash")
    assert result.exit_code == cli.FAILURE
    assert "error: expected the sky to hold, got rain" in result.output
    assert not left_behind(path)


def test_faults_keep_their_traceback_and_leave_nothing_behind(path):
    result = run(path, "--set", "attack={name: crash, fault: true}")
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == cli.FAILURE
    assert not left_behind(path)


def test_config_by_name():
    assert cli.find_config("quickstart") == cli.CONFIGS / "quickstart.yaml"
    with pytest.raises(FileNotFoundError, match="did you mean 'quickstart'"):
        cli.find_config("quickstrat")
    result = call("run", "quickstrat")
    assert result.exit_code == cli.USER_ERROR


def test_list():
    everything = call("list")
    assert everything.exit_code == 0
    for name in ("fedavg", "hyperfl", "ig", "none", "faces", "hyperfl-grey"):
        assert name in everything.output
    only = call("list", "methods")
    assert "fedavg" in only.output
    assert "faces" not in only.output
    wrong = call("list", "atacks")
    assert wrong.exit_code == cli.USER_ERROR
    assert "did you mean 'attacks'" in wrong.output


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from eval.cli import app; "
        "r = CliRunner().invoke(app, ['--help']); "
        "sys.exit(r.exit_code or {'torch', 'pydantic', 'numpy'} & set(sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
