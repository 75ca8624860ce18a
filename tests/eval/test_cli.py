import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.brief import one_chart_of_a_kind
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

from eval import cli
from eval.commands import run as running
from eval.commands import terminal
from eval.experiment import config_catalog
from eval.experiment.docstrings import summarize
from eval.io.jsonl import read_rows
from eval.report.charts.render import render_svg
from eval.report.results_table import Table
from eval.run.run_directory import BusyError, RunDir
from fl.method import methods

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _guesses(monkeypatch):
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "160")
    with Registered(), one_chart_of_a_kind():
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
    for part in ("A tiny experiment", "fedavg", "mean color", "PSNR (dB): how close", "fedavg: training (2/2)"):
        assert part in result.output
    rows = read_rows(path.parent / "out" / "images.jsonl")
    assert {row["seed"] for row in rows} == {3}
    assert left_behind(path) == ["out"]
    names = {entry.name for entry in (path.parent / "out").iterdir()}
    expected = {"cells", "config.yaml", "run.json", "env.json", "log.txt", "rounds.jsonl", "images.jsonl", "images"}
    assert names >= expected | {"table.md", "report.html", "report.md"}
    assert "expected device" in run(path, "--device", "tpu").output
    assert "method.fedavg.lr: expected a number >= 0, got -1" in run(path, "--set", "method.lr=-1").output


def test_flags_say_which_defense_they_are_raised_under():
    rows = [("fedavg", defense, "ig", "below-floor") for defense in ("none", "prune")]
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    terminal.show_table(screen, Table("x", ("method", "defense", "attack", "flags"), rows, [], []))
    for defense in ("none", "prune"):
        assert f"\nfedavg, {defense}, ig: below-floor\n" in screen.file.getvalue()


def test_run_goes_on_in_its_folder(path):
    first = run(path, "--seeds", 2, "--set", "attack=guess")
    table = (path.parent / "out" / "table.md").read_bytes()
    again = call("run", path.parent / "out" / "config.yaml", "--device", "cpu")  # into its own folder
    assert (first.exit_code, again.exit_code) == (0, 0), again.output
    assert "training" not in again.output
    assert (path.parent / "out" / "table.md").read_bytes() == table
    assert {row["seed"] for row in read_rows(path.parent / "out" / "images.jsonl")} == {0, 1}
    assert left_behind(path) == ["out"]


def test_run_spreads_lists_over_a_grid(path):
    result = run(path, "--set", "attack.guess.spread=[0, 0.3]", "--set", "method.fedavg.lr=[0.1, 0.2]")
    assert result.exit_code == 0, result.output
    for label in ("guess@spread=0", "guess@spread=0.3", "fedavg@lr=0.1", "fedavg@lr=0.2"):
        assert label in result.output
    assert len(read_rows(path.parent / "out" / "images.jsonl")) == 3 * 2 * 4 + 2 * 2


def test_run_spreads_clients_over_processes(path):
    words = ("--set", "attack=guess", "--set", "observe.method={steps: 1}", "--set", "method={name: fedavg, lr: 0.1}")
    assert run(path, *words).exit_code == 0
    other = call("run", path, "--out", path.parent / "other", "--device", "cpu", "--workers", 2, *words)
    assert other.exit_code == 0, other.output
    assert (path.parent / "other" / "images.jsonl").read_bytes() == (path.parent / "out" / "images.jsonl").read_bytes()


def test_json_goes_to_stdout_and_words_to_stderr(path):
    result = run(path, "--json")
    found = json.loads(result.stdout)
    assert found["status"] == "finished"
    assert len(found["table"]["rows"]) == 3
    assert found["id"] == json.loads((path.parent / "out" / "run.json").read_text())["id"]
    assert "fedavg: training (2/2)" in result.stderr
    failed = run(path, "--json", "--set", "attack=crash")
    assert failed.exit_code == terminal.FAILURE
    assert [failure["name"] for failure in json.loads(failed.stdout)["failures"]] == ["fedavg: crash", "hyperfl: crash"]


def test_no_figure_is_cut_off_on_80_columns(path, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, no colors
    output = run(path).output
    rows = read_rows(path.parent / "out" / "images.jsonl")
    psnr = [row["psnr"] for row in rows if row["attack"] == "guess" and row["method"] == "hyperfl"]
    assert f"{sum(psnr) / len(psnr):.1f} [" in output
    for part in ("hyperfl", "nearest image", "accuracy", "labels", "fedavg, refuse: not in the mood"):
        assert part in output
    assert "\u2026" not in output


def test_without_a_terminal_an_entry_is_a_line(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(path).stdout.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    head = lines.index("A tiny experiment") + 1
    table = [line.split("\t") for line in lines[head : head + 4]]
    assert [row[:2] for row in table[:2]] == [["method", "attack"], ["fedavg", "guess"]]
    assert table[2][-2:] == ["-", "not in the mood"]
    assert {len(row) for row in table} == {len(table[0])}
    assert any(line.startswith("• Baseline: ") and len(line) > 200 for line in lines)  # not wrapped
    listed = [line.split("\t") for line in call("list", "methods").stdout.splitlines()]
    assert [name for name, _ in listed] == list(json.loads(call("list", "methods", "--json").stdout)["methods"])
    assert ["partitions", "iid"] in [line.split("\t")[:2] for line in call("list").stdout.splitlines()]
    shown = [line.split("\t") for line in call("show", "ig").stdout.splitlines() if "\t" in line]
    assert ["iterations", "3000", "of the search."] in shown
    assert {len(row) for row in shown} == {3}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "method.lrr=1"], "did you mean 'method.lr'"),
        (["--set", "task.dataset=cifar"], "did you mean 'cifar10'"),
        (["--set", "task.dataset={name: npz, train: none.npz}"], "HYPERLEAK_DATA"),
        (["--device", "gpu"], "expected device"),
        (["--set", "method.lr=-1"], "method.fedavg.lr: expected a number >= 0, got -1"),
        (
            ["--set", "method.fedavg.batch_size=0"],
            "method.fedavg.batch_size=0: expected a whole number >= 1",
        ),
        (["--set", "method.fedavg.epochs=0"], "expected epochs >= 1, got 0"),
        (["--set", "observe.method={steps: 0}"], "observe.method.steps: expected a whole number >= 1 or null, got 0"),
        (["--set", "method=local"], "`against` is a setting of 'refuse' in the config"),
        (["--set", "method=local", "--set", "attack=guess"], "unknown key of observe.method 'head_epochs'"),
        (["--set", "nothing"], "expected key=value"),
        (
            ["--set", "seeds=[99999999999999999999999]"],
            "seeds.0: expected a whole number >= -2^63 and < 2^64, got 99999999999",
        ),
        (
            ["--set", "attack=guess", "--set", "observe.method={batch_size: null}", "--set", "method=dp-fedavg"],
            "got 1 from batch_size; lower batch_size, or leave rate out to calibrate anew; an observed round can't",
        ),
        (["--set", "threat.knows_labels=[true, false]"], "hyperleak compare"),
    ],
)
def test_user_errors_are_one_line(path, words, said):
    result = run(path, *words)
    assert result.exit_code == terminal.USAGE
    assert said in result.output
    assert result.output.count("\n") == 1
    assert "Traceback" not in result.output
    assert not left_behind(path)


def test_someone_elses_folder_is_left_alone(path):
    (path.parent / "out").mkdir()
    (path.parent / "out" / "thesis.txt").touch()
    result = run(path)
    assert result.exit_code == terminal.USAGE
    assert "something other than results" in result.output
    assert [entry.name for entry in (path.parent / "out").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fault", [False, True])
def test_a_failure_is_named_and_leaves_the_rest(path, fault):
    result = run(path, "--set", f"attack=[guess, {{name: crash, fault: {str(fault).lower()}, against: fedavg}}]")
    assert result.exit_code == terminal.FAILURE
    error = "RuntimeError" if fault else "ValueError"
    assert (
        f"failed: fedavg: crash: {error}: expected the sky to hold, got rain (tests/support/tiny.py, line "
        in result.output
    )
    assert "Incomplete: 1 of 5 parts of this run failed" in (path.parent / "out" / "table.md").read_text()
    assert {row["attack"] for row in read_rows(path.parent / "out" / "images.jsonl")} == {"guess"}
    assert list((path.parent / "out" / "cells").glob("*.part/traceback.txt"))


def test_a_key_pressed_stops_the_run_where_it_is(path, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.run.attack_cell.run_attack_cell", pressed)
    result = run(path)
    assert result.exit_code == 130
    assert "the same command goes on from here" in result.output
    monkeypatch.undo()
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)
    assert "fedavg: training" not in run(path).output


def test_two_runs_do_not_share_a_folder(path, monkeypatch):
    def busy(self):
        raise BusyError("out is in use by another process")

    monkeypatch.setattr(RunDir, "locked", busy)
    result = run(path)
    assert result.exit_code == terminal.FAILURE
    assert "error: out is in use by another process" in result.output


def test_a_folder_that_cannot_be_written_is_one_line(path, monkeypatch):
    result = call("run", path, "--out", "/proc/hyperleak", "--device", "cpu")
    assert result.exit_code == terminal.USAGE
    assert "error: /proc/hyperleak can't be written to (" in result.output
    assert result.output.count("\n") == 1


def test_another_run_in_the_folder_is_said(path):
    assert "warning" not in run(path, "--set", "attack=guess").stderr
    assert "warning" not in run(path, "--set", "attack=guess").stderr
    own = call("run", path.parent / "out" / "config.yaml", "--device", "cpu")
    assert "warning" not in own.stderr + run(path, "--set", "attack=guess").stderr
    other = path.with_name("other.yaml")
    other.write_text(CONFIG.replace("A tiny experiment", "Another"))
    said = run(other, "--set", "attack=guess").stderr
    assert "out holds the run 'tiny' (A tiny experiment): its table, report," in said
    assert "fedavg: training" not in said


def test_config_by_name():
    assert config_catalog.find_config("quickstart") == config_catalog.CONFIGS / "quickstart.yaml"
    with pytest.raises(FileNotFoundError, match="did you mean 'quickstart'"):
        config_catalog.find_config("quickstrat")
    result = call("run", "quickstrat")
    assert result.exit_code == terminal.USAGE


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["quickstart", "--out", "HERE/out/a"], ["quickstart", "--out", "out/a"]),
        (["HERE/tiny.yaml", "--out=HERE/a b", "--seeds", "2"], ["tiny.yaml", "--out=a b", "--seeds", "2"]),
        (["--out", "ABOVE/secret/a", "ABOVE/secret/tiny.yaml"], ["--out", "a", "tiny.yaml"]),
        (["tiny.yaml", "--out", "../a"], ["tiny.yaml", "--out", "a"]),
        (["out/config.yaml", "--out", "out"], ["out/config.yaml", "--out", "out"]),
        (["../tiny.yaml", "--set", "attack.tv_weight=1"], ["../tiny.yaml", "--set", "attack.tv_weight=1"]),
    ],
)
def test_the_command_that_is_kept_tells_nothing_of_the_machine(tmp_path, monkeypatch, words, kept):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = [word.replace("HERE", str(tmp_path / "here")).replace("ABOVE", str(tmp_path)) for word in words]
    config = next(word for word in given if word.endswith(("yaml", "quickstart")))
    assert shlex.split(terminal.shareable_command(["run", *given], config)) == ["hyperleak", "run", *kept]


def test_no_report_holds_a_path_of_the_machine(path, monkeypatch):
    monkeypatch.setattr(running.sys, "argv", ["hyperleak", "run", str(path), "--out", str(path.parent / "out")])
    monkeypatch.setattr("eval.report.blocks.render_svg", render_svg)  # charts of this very run
    assert run(path, "--set", "attack=guess").exit_code == 0
    assert json.loads((path.parent / "out" / "run.json").read_text())["command"] == "hyperleak run tiny.yaml --out out"
    for name in ("run.json", "report.md", "report.html", "config.yaml", "env.json", "table.md"):
        assert str(path.parent) not in (path.parent / "out" / name).read_text(), name


def test_report_writes_both_files_anew(path):
    run(path)
    for name in ("report.html", "report.md"):
        (path.parent / "out" / name).unlink()
    result = call("report", path.parent / "out")
    assert result.exit_code == 0, result.output
    assert (path.parent / "out" / "report.html").is_file()
    assert json.loads(call("report", path.parent / "out", "--json").stdout)[1].endswith("report.md")
    for folder in (path.parent / "nowhere", path.parent):  # none there, and one without a run
        assert call("report", folder).exit_code == call("compare", folder, folder / "b").exit_code == terminal.USAGE


def test_list_prints_registered_names():
    everything = call("list")
    assert everything.exit_code == 0
    for name in ("fedavg", "hyperfl", "ig", "none", "faces", "hyperfl-grey", "iid", "crop-flip"):
        assert name in everything.output
    only = call("list", "methods")
    assert "fedavg" in only.output
    assert "faces" not in only.output
    wrong = call("list", "atacks")
    assert wrong.exit_code == terminal.USAGE
    assert "did you mean 'attacks'" in wrong.output
    found = json.loads(call("list", "--json").stdout)
    assert found["methods"]["fedavg"] == summarize(methods.get("fedavg"))


def test_show_prints_source_settings_and_defaults():
    shown = call("show", "hyperfl")
    assert shown.exit_code == 0
    for part in (
        "hyperfl (method)",
        "Guo et al., AAAI 2025",
        "head_lr",
        "0.1",
        "step size of the classifier",
        "train_mode",
    ):
        assert part in shown.output
    (found,) = json.loads(call("show", "ig", "--json").stdout)
    assert found["fields"]["iterations"] == {"required": False, "default": 3000, "meaning": "of the search."}
    assert found["papers"] == ["Geiping et al., NeurIPS 2020"]
    (section,) = json.loads(call("show", "federation", "--json").stdout)
    assert section["fields"]["partition"]["default"]["name"] == "iid"
    assert [about["kind"] for about in json.loads(call("show", "none", "--json").stdout)] == ["defense", "augmentation"]
    assert [about["name"] for about in json.loads(call("show", "peel+ig", "--json").stdout)] == ["peel", "ig"]
    (files,) = json.loads(call("show", "npz", "--json").stdout)
    assert files["fields"]["train"]["required"]
    wrong = call("show", "hyperf")
    assert wrong.exit_code == terminal.USAGE
    assert "did you mean 'hyperfl'" in wrong.output


def test_an_unknown_name_may_be_one_of_the_user_s_own(tmp_path):
    own = tmp_path / "nothing_registered.py"
    own.write_text("")
    for words in (("show", "my-attack"), ("list", "attacks", "my-attack")):
        assert "--import FILE" in call(*words).stderr, words
        assert "--import FILE" not in call(*words, "--import", own).stderr, words
    assert call("list", "configs", "nothing-such").stderr.strip() == "no configs whose name begins with 'nothing-such'"


def test_every_setting_has_a_meaning():
    for kind, entries in json.loads(call("list", "--json").stdout).items():
        for name in sorted(set(entries) - {"guess", "refuse", "crash"}):
            for about in json.loads(call("show", name, "--json").stdout):
                for field, what in about["fields"].items():
                    assert what["meaning"], f"{kind} {name}: {field} is not in the docstring"


COMMANDS = ("run", "audit", "report", "compare", "list", "show", "doctor")


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS)])
def test_help_is_quick_and_imports_nothing_heavy(words):
    code = (
        "import sys; from eval.cli import app\n"
        "try: app([*sys.argv[1:], '--help'])\n"
        "except SystemExit as error: code = error.code\n"
        "import resource; used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = {'torch', 'numpy', 'yaml', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(code or str(heavy or '') or (used.ru_utime > 0.5 and 'slow') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert "╭" not in done.stdout  # plain lines where there is no terminal


def test_figures_as_files(path):
    run(path, "--set", "attack=guess", "--without", "hyperfl")
    for kind in ("png", "svg"):
        result = call("report", path.parent / "out", "--figures", kind)
        assert result.exit_code == 0, result.output
        written = list((path.parent / "out" / "figures").iterdir())
        assert {file.name for file in written} >= {f"images.{kind}", f"images-column.{kind}"}
        assert all(file.stat().st_size for file in written)
    assert call("report", path.parent / "out", "--figures", "gif").exit_code == 2


def test_a_plan_says_what_there_is_to_compute_and_computes_nothing(path):
    result = run(path, "--plan")
    assert result.exit_code == 0, result.output
    assert left_behind(path) == []
    lines = result.output.splitlines()
    assert lines[0].split("\t") == ["cell", "kind", "cost on one worker", "known from"]
    assert "fedavg\ttraining\tabout 1 s\tcounts, timed here" in lines
    assert "fedavg: guess after round 2\tattack\tunknown\tunknown" in lines
    assert "5 of 5 cells are to be computed" in result.output
    assert "what 3 of them cost is unknown" in result.output
    assert run(path).exit_code == 0
    told = json.loads(run(path, "--plan", "--json").output)
    assert [cell["is_finished"] for cell in told["cells"]] == [True] * 5
    assert told["open"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--executor", "slrm"), "expected an executor of local, slurm, dask, ray, got 'slrm'; did you mean 'slurm'?"),
        (("--executor-option", "partition"), "expected KEY=VALUE such as partition=gpu, got 'partition'"),
        (("--executor-option", "partition=gpu"), "expected an executor for the option partition"),
        (("--executor", "local", "--executor-option", "partition=gpu"), "expected no options for --executor local"),
        (
            ("--executor", "slurm", "--workers", 2),
            "needs the package submitit: pip install '.[slurm]' in the folder of hyperleak",
        ),
        (
            ("--executor", "dask", "--workers", 2),
            "needs the package distributed: pip install '.[dask]' in the folder of hyperleak",
        ),
    ],
)
def test_a_wrong_executor_is_refused_before_anything_is_written(path, monkeypatch, words, said):
    for package in ("submitit", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    result = run(path, *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert left_behind(path) == []


def test_a_number_of_workers_elsewhere_has_to_be_said_before_anything_is_written_but_for_a_plan(path, monkeypatch):
    monkeypatch.setattr("eval.run.executors.choice.check_executor", lambda *_: None)
    result = run(path, "--executor", "slurm")
    assert result.exit_code == 2
    assert "say how many workers --executor slurm is to start: --workers 8" in " ".join(result.output.split())
    plan = run(path, "--executor", "slurm", "--plan")
    assert plan.exit_code == 0, plan.output
    assert "on 1 worker (say --workers N for more)" in plan.output
    assert "on 4 workers" in run(path, "--executor", "slurm", "--plan", "--workers", 4).output
    assert json.loads(run(path, "--executor", "slurm", "--plan", "--json").output)["workers"] is None
    assert left_behind(path) == []


def test_options_that_a_watched_run_can_not_take_are_refused(path):
    result = call("run", path, "--watch", path.parent / "out", "--set", "seeds=1", "--workers", 2, "--plan", "--json")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"takes --json alone; got the config {path}, --set, --workers, --plan beside it" in said


def test_only_a_run_can_be_watched(path):
    result = call("run", "--watch", path.parent / "nothing")
    assert result.exit_code == 2
    assert "expected the folder of a run, found no run.json" in " ".join(result.output.split())
    assert run(path).exit_code == 0
    seen = call("run", "--watch", path.parent / "out")
    assert seen.exit_code == 0, seen.output
    assert "5 of 5 cells are finished; nobody is at work" in " ".join(seen.output.split())
    assert call("run").exit_code == 2
