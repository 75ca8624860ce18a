"""What differential privacy a training may claim, and what follows of it for the attacks: plain data for a run's files.

A claim is that of the method, or else of its defense, for the rounds that clients took part in. What an attacker of one
update sees of a record is more than that update: the weights it was sent come from rounds in which the record took
part. Both are charged before anything is said of what an attack can reach.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from eval.io import jsonl
from eval.metrics.score import Row
from eval.privacy import canaries
from eval.privacy.claim_rows import BOUND, EPSILON, OF_UPDATE
from eval.privacy.reconstruction_robustness import bound_from_charges
from eval.run.federation_data import Target
from eval.run.plan import AttackTask, TrainingTask
from fl.client import Client
from fl.defense import overrides, record_reader
from fl.method import Method
from fl.privacy.accounting import Charge, compute_epsilon, merge_charges
from fl.privacy.private_method import PrivateMethod
from fl.privacy_statement import PrivacyStatement

CLAIM = "privacy.json"
"""File in a training's cell with its claim; `null` where the method claims nothing."""
DISTINGUISHABLE_PARTITIONS = {
    "domains": "clients hold images of different domains, so that candidates can be told apart by their style"
}
"""Partitions under which images of a class are not alike across clients, and why."""


def write_claim(training: TrainingTask, rounds: Sequence[Row], folder: Path) -> None:
    """Keep a training's claim in its cell."""
    jsonl.write_text(folder / CLAIM, json.dumps(privacy_claim(training, rounds), indent=2, allow_nan=False) + "\n")


def read_claim(folder: Path, training: TrainingTask, rounds: Sequence[Row]) -> Row | None:
    """Return a training's claim from its cell; of one that was trained before claims were kept, without an audit."""
    path = folder / CLAIM
    if not path.is_file():
        return privacy_claim(training, rounds, audit=False)
    found: Row | None = json.loads(path.read_text(encoding="utf-8"))
    return found


def privacy_claim(training: TrainingTask, rounds: Sequence[Row], *, audit: bool = True) -> Row | None:
    """Return the columns of `PrivacyStatement`, with the rounds charged and what an audit by canaries found.

    Args:
        training: whose method and defense.
        rounds: its rows of `rounds.jsonl`.
        audit: whether to audit, which takes some 10 ms for every noisy step of a client, at client level 0.1 s a round.

    Returns:
        None where the method claims nothing.
    """
    data = training.data
    clients = range(len(data.clients) - training.federation.held_out_clients)
    taken = participations(rounds)
    most, sizes = max((taken[c] for c in clients), default=0), [len(data.clients[c].train) for c in clients]
    statement = privacy_statement(training, training.method.item, sizes, most)
    if statement is None:
        return None
    row: Row = {**_plain(statement), "rounds": most, "audit": None, "missing": {}}
    if statement.epsilon is None:
        row["missing"]["audit"] = "there is no epsilon to hold it against"
    elif not audit:
        row["missing"]["audit"] = "the training is older than this audit; remove its cell and run it again"
    else:
        try:
            row["audit"] = asdict(_audited(training, sizes, most))
        except ValueError as error:
            row["missing"]["audit"] = str(error)
    return row


def participations(rounds: Sequence[Row], until: int | None = None) -> Counter[int]:
    """Return in how many rounds each client took part, up to round `until`."""
    return Counter(c for row in rounds if until is None or row["round"] <= until for c in row["clients"])


def privacy_statement(
    training: TrainingTask, method: Method, sizes: Sequence[int], rounds: int
) -> PrivacyStatement | None:
    """Return what a method of the training claims under its defense, or the defense where the method claims nothing.

    Args:
        training: whose task and defense.
        method: as it is trained, or as it is watched.
        sizes: the clients' numbers of images.
        rounds: how many a client took part in, at most.
    """
    defense = training.defense.item
    own = method.privacy(sizes, rounds, record_reader=record_reader(defense))
    if own is not None or not overrides(defense, "privacy"):
        return own
    client = Client(training.data.task(training.seed), method, defense)
    return defense.privacy(method, client.task, sizes, rounds)


def _audited(training: TrainingTask, sizes: Sequence[int], rounds: int) -> canaries.CanaryAudit:
    """Audit by canaries the noisy steps of the method or of the defense, whichever claims something."""
    method, defense = training.method.item, training.defense.item
    if isinstance(method, PrivateMethod):
        return canaries.audit(method, sizes, rounds, seed=training.seed)
    client = Client(training.data.task(training.seed), method, defense)
    return canaries.audit_defense(client, sizes, rounds, seed=training.seed)


def _plain(statement: PrivacyStatement) -> Row:
    """Return a statement in values that JSON has."""
    if statement.epsilon is not None and not math.isfinite(statement.epsilon):
        reason = "there is so little noise that no finite epsilon can be proved"
        statement = replace(statement, epsilon=None, epsilon_rdp=None, reason=reason)
    if statement.epsilon_rdp is not None and not math.isfinite(statement.epsilon_rdp):
        statement = replace(statement, epsilon_rdp=None)
    return asdict(statement)


class IdentificationBounds:
    """How often an image can be named at most, of all updates of a training that are watched.

    Args:
        training: whose.
        rounds: its rows of `rounds.jsonl`.
    """

    def __init__(self, training: TrainingTask, rounds: Sequence[Row]) -> None:
        self.training, self.rounds = training, rounds

    @cached_property
    def claims(self) -> PrivacyStatement | None:
        """What method or defense claim for one round of one image; None where there is nothing to be said."""
        return privacy_statement(self.training, self.training.method.item, [1], 1)

    def of(self, task: AttackTask, rows: Sequence[Row]) -> list[Row]:
        """Return an attack's rows with `BOUND`, `OF_UPDATE` and `EPSILON` wherever an image could be named."""
        if self.claims is None:
            return [*rows]
        named = {row["update"] for row in rows if "identified_among" in row}
        reason = (self.obstacle or self._objection(task)) if named else ""
        charged: dict[str, list[tuple[tuple[Charge, ...], Charge]]] = {}
        if not reason:
            taken = participations(self.rounds, task.round)
            groups = {target.key: target.group for target in task.observation_spec.targets}
            charged = {key: [self._charges(task, member, taken) for member in groups[key]] for key in named}
        return [self._with(row, reason, charged) if "identified_among" in row else row for row in rows]

    def _with(self, row: Row, reason: str, charged: Mapping[str, list[tuple[tuple[Charge, ...], Charge]]]) -> Row:
        if reason:
            return {**row, BOUND: None, "missing": {**row.get("missing", {}), BOUND: reason}}
        assert self.claims is not None
        chance, delta = 1 / row["identified_among"], self.claims.delta
        found = charged[row["update"]]
        return {
            **row,
            BOUND: max(bound_from_charges(chance, merge_charges([*before, update])) for before, update in found),
            OF_UPDATE: max(bound_from_charges(chance, (update,)) for _, update in found),
            EPSILON: max(compute_epsilon([*before, update], delta) for before, update in found),
        }

    @cached_property
    def obstacle(self) -> str:
        """Why nothing bounds how often an image is named, whatever the method; empty where something does."""
        name = getattr(self.training.federation.partition, "name", "")
        if name in DISTINGUISHABLE_PARTITIONS:
            return f"{DISTINGUISHABLE_PARTITIONS[name]}; use a partition by classes"
        if shared := self.training.data.partition.overlap["train"]:
            return f"{shared} images are held by several clients, and each tells of them; use disjoint ones"
        return ""

    def _objection(self, task: AttackTask) -> str:
        """Return why no guarantee holds against this attacker."""
        for statement in (self.claims, privacy_statement(self.training, task.observation_spec.method, [1], 1)):
            if statement is None or statement.reason:
                return statement.reason if statement is not None else "the observed round claims nothing"
            if statement.unit == "client":
                return "the guarantee is not against the server, which is trusted and here the attacker; use dp-joint"
        if task.observation_spec.threat.knows_randomness and isinstance(task.observation_spec.method, PrivateMethod):
            return "the attacker knows the noise (threat.knows_randomness), which no guarantee survives"
        if task.observation_spec.observe.split == "test" and task.round:
            return (
                "candidates were trained on and the watched images were not (observe.split), which may tell them apart"
            )
        return ""

    def _charges(self, task: AttackTask, member: Target, rounds: Counter[int]) -> tuple[tuple[Charge, ...], Charge]:
        """Return what one client's record is in: the rounds before, and the updates that the attacker sees.

        Sampling hides nothing from who knows which images are in a step, or how many.
        """
        method, spec = self.training.method.item, task.observation_spec
        size = len(self.training.data.clients[member.client].train)
        before = privacy_statement(self.training, method, [size], rounds[member.client])
        update = privacy_statement(self.training, spec.method, [len(member.data)], 1)
        assert before is not None
        assert update is not None
        rate = 1.0 if spec.threat.knows_schedule or spec.threat.knows_order else update.rate
        seen = Charge(update.noise_multiplier, rate, update.steps * (1 + len(task.history_rounds)))
        return (Charge(before.noise_multiplier, before.rate, before.steps),), seen
