"""The Python face: run an experiment, audit a model or an update, load what either left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.experiment import config_catalog, yaml_config
from eval.experiment.spec import Experiment
from eval.report.load import load as read_run
from eval.run import results, runner
from eval.run.plan import prepare
from eval.run.resources import choose_workers
from eval.run.run_directory import RUN, RunDir

if TYPE_CHECKING:
    import pandas as pd

REPORT, TABLE = "report.html", "table.md"
ROW_KINDS = ("images", "rounds", "privacy")
"""What a run has rows of: attacked images, rounds of training, claims of differential privacy."""


@dataclass(frozen=True)
class RunResult:
    """What a run left in its folder.

    Attributes:
        folder: of the run.
        failures: one line for each cell that could not be finished; empty for a folder that was loaded.
    """

    folder: Path
    failures: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        """The report, a page for the browser."""
        return self.folder / REPORT

    @property
    def table(self) -> str:
        """The results table in Markdown."""
        return (self.folder / TABLE).read_text(encoding="utf-8")

    def rows(self, kind: str = "images") -> list[dict[str, Any]]:
        """Return the run's figures as one dictionary a row.

        Args:
            kind: "images" (a row for every attacked image), "rounds" (for every round of training) or "privacy" (for
                every claim of differential privacy).

        Raises:
            ValueError: an unknown kind, or files that are damaged.
        """
        if kind not in ROW_KINDS:
            raise ValueError(f"expected rows of {', '.join(ROW_KINDS)}, got {kind!r}")
        found = read_run(self.folder)
        chosen = {"images": found.rows, "rounds": found.rounds, "privacy": found.privacy}[kind]
        return [dict(row) for row in chosen]

    def frame(self, kind: str = "images") -> pd.DataFrame:
        """Return the run's figures as a pandas table, a row each as in `rows`.

        Raises:
            ImportError: pandas is not installed.
            ValueError: as `rows`.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("tables need pandas: pip install 'hyperleak[frames]'") from error
        return pd.DataFrame(self.rows(kind))


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    workers: int | None = None,
    progress: runner.Progress = runner.silent,
) -> RunResult:
    """Run an experiment: train its methods, attack what the server sees, write table and report.

    A run that was stopped goes on where it was when it is called again with the same folder.

    Args:
        experiment: the name of a shipped config (`"quickstart"`), a file, its content as plain data, or an object.
        out: folder of the run; `results/NAME` by default, for plain data `results/experiment`.
        overrides: settings as `"key=value"`, as `--set` of the command takes them; for names and files only.
        device: "auto", "cpu" or "cuda".
        workers: processes to spread clients and attacks over; None takes what the machine has.
        progress: called with the stage, how much of it is done, and how much there is.

    Returns:
        The folder's content; cells that failed are named in `failures`.

    Raises:
        FileNotFoundError: no such config or data.
        ValueError: settings that are wrong or do not fit each other, or a folder that holds something else.
        RuntimeError: nothing could be finished; names the first cause.
    """
    if isinstance(experiment, str | Path):
        path = config_catalog.resolve(str(experiment))
        name, described = path.stem, yaml_config.load(path, overrides)
    elif overrides:
        raise ValueError("overrides go with the name of a config or a file; change plain data or the object itself")
    else:
        name = "experiment"
        described = experiment if isinstance(experiment, Experiment) else yaml_config.read(dict(experiment))
    folder = RunDir(Path("results") / name if out is None else Path(out))
    plan = prepare(described, device=device)
    options = runner.Options(workers=choose_workers(workers, plan.device), name=name)
    with folder.locked(), folder.logged():
        failed = runner.run(plan, folder, options, progress)
        rows = results.assemble(plan, folder)
        if rows:
            results.publish(rows, failed, plan, folder)
    failures = tuple(f"{failure.name}: {failure.reason}" for failure in failed)
    if not rows:
        raise RuntimeError(
            f"nothing could be finished: {failures[0] if failures else 'the experiment asks for nothing'}"
        )
    return RunResult(folder.path, failures)


def load(folder: str | Path) -> RunResult:
    """Load what a run or an audit left in its folder.

    Raises:
        FileNotFoundError: there is no run in this folder.
    """
    path = Path(folder)
    if not (path / RUN).is_file():
        raise FileNotFoundError(f"{path} holds no run: there is no {RUN} in it")
    return RunResult(path)
