"""Training cells: a federation's rounds, one row each, with checkpoints to go on from, and their privacy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

from eval.io import jsonl
from eval.metrics.score import Row
from eval.run import privacy_claims
from eval.run.plan import TrainingTask
from eval.run.run_directory import Checkpoints
from fl.client import Client
from fl.federation import Federation
from fl.runtime.atomic_files import remove_path
from fl.simulation import checkpoint
from fl.simulation.protocol import Protocol
from fl.simulation.round_record import Record

log = logging.getLogger(__name__)
ROUNDS = "rounds.jsonl"


class OutOfTimeError(Exception):
    """A training had to end before its last round."""


@contextmanager
def federation_of(training: TrainingTask, workers: int = 1) -> Iterator[Federation]:
    """Yield the federation before its first round; its worker processes end with the context."""
    client = Client(training.data.task(training.seed), training.method.item, training.defense.item)
    spec = training.federation
    whole = training.data.dataset.test if spec.global_test else None
    federation = Federation(
        client,
        training.data.clients,
        training.seed,
        spec.client_fraction,
        engine=spec.engine,
        workers=workers,
        protocol=Protocol(
            held_out_clients=spec.held_out_clients,
            fine_tune_epochs=spec.fine_tune_epochs,
            global_test=whole,
            diagnostics=spec.diagnostics,
        ),
    )
    try:
        yield federation
    finally:
        federation.close()


@dataclass(frozen=True, kw_only=True)
class TrainingExecution:
    """How a training is carried out; none of it changes a number.

    Attributes:
        watched: rounds after which states are kept.
        checkpoint_seconds: between two other checkpoints; each replaces the one before.
        workers: processes to spread clients over.
        tick: told how many rounds are done.
        is_out_of_time: whether it has to end, asked before every round.
        check_writable: called before everything that is written; raises where another process has taken the training.
        on_checkpoint: called when a further state has been kept.
    """

    watched: Collection[int]
    checkpoint_seconds: float = 60.0
    workers: int = 1
    tick: Callable[[int], None] = lambda _done: None
    is_out_of_time: Callable[[], bool] = lambda: False
    check_writable: Callable[[], None] = lambda: None
    on_checkpoint: Callable[[], None] = lambda: None


def train(training: TrainingTask, folder: Path, checkpoints: Checkpoints, execution: TrainingExecution) -> None:
    """Train to the last round; goes on from the last checkpoint whose rows are in `folder`.

    Args:
        training: what is trained.
        folder: gets `rounds.jsonl`, a row for every round and one for the state before the first, and `privacy.json`,
            what the method may claim of them.
        checkpoints: get the states after the rounds that are watched and after the last round.
        execution: how.

    Raises:
        OutOfTimeError: it had to end; the last round is in a checkpoint.
    """
    watched = execution.watched
    spec, path = training.federation, folder / ROUNDS
    with federation_of(training, execution.workers) as federation:
        rows = _resume(federation, checkpoints, jsonl.read_rows(path) if path.exists() else [])
        if not rows:
            rows = [round_row(federation.record())]
        jsonl.replace_rows(path, rows)
        execution.tick(federation.server.round)
        saved = time.monotonic()
        while True:
            number = federation.server.round
            stopped = number < spec.rounds and execution.is_out_of_time()
            is_due = stopped or time.monotonic() - saved > execution.checkpoint_seconds
            if number in watched or number == spec.rounds or is_due:
                execution.check_writable()
                if number not in checkpoints.rounds():
                    checkpoint.save(checkpoints.path(number), federation)
                    execution.on_checkpoint()
                checkpoints.keep({*watched, number})
                saved = time.monotonic()
            if number == spec.rounds:
                privacy_claims.write_claim(training, jsonl.read_rows(path), folder)
                return
            if stopped:
                raise OutOfTimeError
            scored = (number + 1) % spec.evaluate_every == 0 or number + 1 == spec.rounds
            row = round_row(_step(training, federation, evaluate=scored))
            execution.check_writable()
            jsonl.write_rows(path, [row])
            execution.tick(number + 1)


def load(
    federation: Federation,
    training: TrainingTask,
    checkpoints: Checkpoints,
    number: int,
    rows: Sequence[Row],
    *,
    workers: int = 1,
    tick: Callable[[int], None] = lambda _done: None,
) -> None:
    """Bring the federation to its state after `number` rounds, from a checkpoint.

    One that is gone or damaged is made again, by training from the last one before it. That need not be the network
    of `rows`, the training's rounds: other source code or another processor round otherwise. Where `rows` have clients'
    accuracies after that round, the log says how many of them differ.
    """
    if _restore(federation, checkpoints, number) == number:
        return
    log.info("%s: trained again up to round %d; --keep-checkpoints spares this", training.name, number)
    with federation_of(training, workers) as again:
        _restore(again, checkpoints, number)
        tick(again.server.round)
        while again.server.round < number:
            _step(training, again, evaluate=False)
            tick(again.server.round)
        checkpoint.save(checkpoints.path(number), again)
        said = rows[number].get("accuracies") if number < len(rows) else None
        if said is not None and (found := again.accuracy()) != said:
            differ = sum(now != then for now, then in zip(found, said, strict=True))
            log.warning(
                "%s: trained again, the network after %d rounds is not the one of the table: the accuracy of %d of %d "
                "clients is another (%.2f %% in the mean, not %.2f); attacks are on this one; remove cells/%s to have "
                "both of one",
                *(training.name, number, differ, len(said), 100 * fmean(found), 100 * fmean(said), training.cell.id),
            )
    checkpoint.load(checkpoints.path(number), federation)


def round_row(record: Record) -> Row:
    """Return a round as `rounds.jsonl` has it, without the labels of its training."""
    return {
        "round": record.round,
        "clients": list(record.clients),
        "accuracy": None if record.accuracy is None else fmean(record.accuracy),
        "accuracies": None if record.accuracy is None else list(record.accuracy),
        "accuracy_local": None if record.accuracy_local is None else fmean(record.accuracy_local),
        **{f"accuracy_{name}": fmean(values) for name, values in record.further.items()},
        **({"accuracies_further": {k: list(v) for k, v in record.further.items()}} if record.further else {}),
        **record.measured,
        "diagnostics": {name: value if isfinite(value) else None for name, value in record.diagnostics.items()},
        "numbers_up": record.numbers_up,
        "numbers_down": record.numbers_down,
        "seconds": round(record.seconds, 3),
    }


def _step(training: TrainingTask, federation: Federation, *, evaluate: bool) -> Record:
    spec = training.federation
    last = federation.server.round + 1 == spec.rounds
    return federation.step(everyone=last and spec.full_last_round, evaluate=evaluate)


def _resume(federation: Federation, checkpoints: Checkpoints, rows: list[Row]) -> list[Row]:
    """Bring the federation to the latest state that has all rows up to it; returns these rows."""
    number = _restore(federation, checkpoints, len(rows) - 1)
    if number is None:
        return []
    log.info("going on from round %d", number)
    return rows[: number + 1]


def _restore(federation: Federation, checkpoints: Checkpoints, limit: int) -> int | None:
    """Load the latest whole checkpoint up to round `limit`; returns its round, or None if there is none."""
    for number in reversed(checkpoints.rounds()):
        if number > limit:
            continue
        try:
            checkpoint.load(checkpoints.path(number), federation)
        except ValueError as error:
            log.warning("%s is left out: %s", checkpoints.path(number).name, error)
            remove_path(checkpoints.path(number))
            continue
        return number
    return None
