"""How an audit is carried out: the cells of its plan are run, and what they hold is read; one way for every source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from attacks.base import Attack
from attacks.network.normalization_modes import normalization_mode
from attacks.result import Remark
from eval.audit import findings
from eval.audit.attack_selection import EarlyStopping, leave_out_settled
from eval.audit.capture_plan import CaptureRequest, plan_updates
from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.stated_training import describe_training
from eval.audit.user_model import Subject
from eval.experiment.capture_spec import CaptureSpec
from eval.io import jsonl, manifest
from eval.metrics.score import Row
from eval.run import results, runner
from eval.run.attack_cell import LABELS
from eval.run.execute import run_and_publish
from eval.run.lpips_columns import with_finished_cells
from eval.run.plan import Plan
from eval.run.run_directory import RunDir
from eval.run.runner import Failure
from fl.view import ServerView

NOT_COUNTED = "preparing what is attacked took {:.0f} seconds, which the time limit does not count"
"""Of a model's checks and its step on the images: none of it can be cut, or there is nothing to attack."""
NOTED_SHARE = 0.1
"""Share of the time limit above which the time that preparing took is noted."""
FINDINGS = "audit.json"
"""File in an audit's folder with what `--json` prints, without limits."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How an audit is carried out; none of it changes a number.

    Attributes:
        options: of the run; with the name of the audit.
        progress: told how far it is.
        keep_outputs: whether the folder stays, so that table, report and tracebacks are of use.
        early_stop: whether attacks are left out that could add nothing to those before them.
        preparation: seconds that it took until there was something to attack.
    """

    options: runner.Options
    progress: runner.Progress = runner.silent
    keep_outputs: bool = False
    early_stop: bool = False
    preparation: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know of how long it took."""
        noted = self.preparation > NOTED_SHARE * self.options.control.time_limit
        return (NOT_COUNTED.format(self.preparation),) if noted else ()


def run_audit(plan: Plan, folder: RunDir, execution: Execution) -> AuditReport:
    """Run the plan of an audit, and read what came out; an attack that fails is among the findings.

    Where the time limit of its options ends it, the findings say of each attack whether it was cut short or not tried.
    Where Ctrl-C ends it, the findings are those of the attacks that were done, and `stopped` names the one it came at.

    Args:
        plan: of the audit.
        folder: to run it in.
        execution: how.
    """
    stopping, options = EarlyStopping(folder), execution.options
    if execution.early_stop:
        plan, options = leave_out_settled(plan), replace(options, needed=stopping)
    with folder.locked(), folder.logged():
        plan = with_finished_cells(plan, folder)
        outcome = run_and_publish(
            plan,
            folder,
            options,
            execution.progress,
            reported_part=stopping.remaining,
            with_report=execution.keep_outputs,
            publish_when_stopped=True,
        )
        report = _report(outcome.plan, folder, outcome.rows, options.name)
        others = _failed(plan, folder, outcome.failures, keep=execution.keep_outputs)
        if outcome.is_stopped:
            report = replace(report, stopped=_stopped_at(plan, folder, outcome.failures, stopping))
        else:
            others += _not_begun(outcome.plan, folder, outcome.failures)
        report = _with_others(report, plan, stopping.left_out(plan), others)
        report = replace(report, notes=(*report.notes, *execution.notes))
        if execution.keep_outputs:
            _write_findings(folder.path, report)
    return report


def audit_updates(
    name: str,
    subjects: Sequence[Subject],
    attacks: Mapping[str, Attack],
    *,
    seed: int = 0,
    execution: Execution | None = None,
    out: Path | None = None,
) -> AuditReport:
    """Audit updates that are there already, without the command line.

    Args:
        name: of what is audited.
        subjects: the updates, at least one.
        attacks: by label.
        seed: of all randomness.
        execution: how; its folder stays where `out` is given.
        out: folder for report, table and pictures; nothing is kept without.
    """
    source = {"model": name, **({"update": "captured"} if subjects[0].captured else {})}
    request = CaptureRequest(name=name, source=source, seed=seed, device=subjects[0].view.device.type)
    plan = plan_updates(subjects, attacks, request)
    execution = execution or Execution(options=runner.Options())
    named = replace(execution, options=replace(execution.options, name=name), keep_outputs=out is not None)
    with TemporaryDirectory() as temporary:
        folder = RunDir(Path(temporary) / "audit" if out is None else out)
        check_folder(folder, plan)
        make_folder(out)
        return run_audit(plan, folder, named)


def make_folder(path: Path | None) -> None:
    """Make the folder for pictures, so that no attack runs for nothing.

    Raises:
        ValueError: it is a file, or can't be made or written.
    """
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"expected --out as a folder to write to, got {path}: {error.strerror}") from error


def check_folder(folder: RunDir, plan: Plan) -> None:
    """Check that an audit may be written to a folder: a new one, or one of the same audit, which then goes on.

    Raises:
        ValueError: it holds something else.
    """
    folder.check()
    before = folder.about_run()
    if not before and not (folder.path / results.CONFIG).exists():
        return
    if before.get("title") != plan.experiment.title:
        name = before.get("title") or before.get("name") or "no title"
        raise ValueError(f"{folder.path} holds another run ({name}), not this audit; choose another --out, or empty it")
    if before.get("updates", []) != [capture.digest for capture in plan.captures]:
        raise ValueError(
            f"{folder.path} holds an audit of the same with other settings, weights or images (those of a model that "
            "draws its weights anew each time are never the same: seed it); choose another --out, or empty it"
        )


def _stopped_at(plan: Plan, folder: RunDir, failures: Sequence[Failure], stopping: EarlyStopping) -> str:
    """Return the attack at which a run was stopped."""
    failed = {failure.id for failure in failures}
    left = [task for task in plan.attacks if task.cell.id not in failed | set(stopping.reasons)]
    return next((task.attack.label for task in left if not folder.finished(task.cell)), "the end")


def _report(plan: Plan, folder: RunDir, rows: Sequence[Row], name: str) -> AuditReport:
    """Return what the rows of a plan amount to, with what is known of its updates."""
    defended = any(entry.item.name != "none" for entry in plan.experiment.defense)
    labels = _recovered_labels(plan, folder)
    report = findings.report_from_rows(name, rows, threat=plan.experiment.threat, defended=defended, labels=labels)
    contradiction = plan.contradiction
    if plan.captures and not contradiction:
        against = [
            f"{one.attack}: {one.words}"
            for finding in report.findings
            for one in finding.outcomes
            if Remark.CONTRADICTED in one.remarks
        ]
        contradiction = next(iter(against), "")
    spec, notes, captured = plan.experiment, plan.notes, False
    if isinstance(spec, CaptureSpec) and "update" in spec.source:
        captured = True
        if spec.images is None and not _is_shown(report):  # the true images would tell wrong facts
            view = plan.captures[0].observation.updates[0].view
            open_size = isinstance(view, ServerView) and (view.scale_unknown or not view.threat.knows_optimizer)
            how = spec.method[0].item
            mode = normalization_mode(view) if isinstance(view, ServerView) else ""
            rests = describe_training(how, loss="", examples=spec.batch_size, scale_unknown=open_size, mode=mode)
            notes = (*notes, rests)
    return replace(report, mismatch=contradiction, notes=notes, captured=captured)


def _is_shown(report: AuditReport) -> bool:
    """Return whether some attack shows that images leaked, by itself or by the true images."""
    outcomes = [one for found in report.findings for one in found.outcomes]
    return any(found.leaked for found in report.findings) or any(
        one.kind in {"settled", "borne out"} for one in outcomes
    )


def _recovered_labels(plan: Plan, folder: RunDir) -> dict[str, list[list[int]]]:
    """Return the labels that every attack recovered, update by update, whether or not the true ones are known."""
    found: dict[str, list[list[int]]] = {}
    for task in plan.attacks:
        cell = folder.latest(task.cell)
        path = None if cell is None else folder.file(cell, LABELS)
        if path is not None and path.is_file():
            found.setdefault(task.attack.label, []).extend(row["labels"] for row in jsonl.read_rows(path))
    return found


def _failed(plan: Plan, folder: RunDir, failures: Sequence[Failure], *, keep: bool) -> list[AttackFinding]:
    names = {task.cell.id: task.attack.label for task in plan.attacks}
    return [
        AttackFinding.from_failure(
            names.get(failure.id, failure.name),
            failure.reason,
            failure.origin,
            folder.path / failure.traceback if keep else None,
        )
        for failure in failures
    ]


def _not_begun(plan: Plan, folder: RunDir, failures: Sequence[Failure]) -> list[AttackFinding]:
    """Return the attacks that the time limit came before; where a training failed it was that."""
    failed = {failure.id for failure in failures}
    if any(training.cell.id in failed for training in plan.trainings):
        return []
    left = [task for task in plan.attacks if task.cell.id not in failed and folder.latest(task.cell) is None]
    return [AttackFinding.of_not_begun(label) for label in dict.fromkeys(task.attack.label for task in left)]


def _with_others(
    report: AuditReport, plan: Plan, left_out: Mapping[str, str], others: Sequence[AttackFinding]
) -> AuditReport:
    """Return the report with attacks that failed or were left out, in the plan's order, a failed training first."""
    order = [task.attack.label for task in plan.attacks]
    gone = [AttackFinding.from_skip(label, reason) for label, reason in left_out.items()]
    found = [*report.findings, *others, *gone]
    found.sort(key=lambda one: order.index(one.attack) if one.attack in order else -1)
    return replace(report, findings=found)


def _write_findings(folder: Path, report: AuditReport) -> None:
    """Keep what was found in plain data, beside table and report; paths in it are relative to the folder."""
    said = report.plain()
    for finding in said["findings"]:
        if finding["traceback"] is not None:
            finding["traceback"] = Path(finding["traceback"]).relative_to(folder).as_posix()
    jsonl.write_text(folder / FINDINGS, json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    manifest.add_files(folder, FINDINGS)
