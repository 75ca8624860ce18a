"""Attack cells: what the server sees of the watched clients, attacked and scored, whatever source it came from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.parallel import AttackPool
from attacks.search_control import SearchControl
from eval.io import jsonl
from eval.io.text import join_words
from eval.metrics import self_verification
from eval.metrics.baselines import mean_images, nearest_reference, representable_bound
from eval.metrics.image import psnr
from eval.metrics.lineup import IdentificationLineup
from eval.metrics.own_pictures import add_own_pictures
from eval.metrics.perceptual import Perceptual
from eval.metrics.score import Row, score, score_without_truth
from eval.metrics.update_prediction_error import forward_error, prediction_error
from eval.metrics.validity_flags import CHANGED_BY, COPY_OF, TOLERANCE
from eval.run.attack_checkpoint import AttackCheckpoint
from eval.run.federation_data import Target
from eval.run.observation import Observation, WatchedUpdate
from eval.run.plan import AttackTask, ObservationSpec, TrainingTask
from eval.run.run_directory import CHECKPOINT
from fl.aggregated_view import combine_views
from fl.client import Client
from fl.defense import Defense, overrides
from fl.federation import Federation
from fl.runtime.atomic_files import atomic_write
from fl.seeds import derive_seed
from fl.simulation.client_round import observe, prepare
from fl.types import Truth
from fl.view import ServerView

IMAGES, PICTURES, LABELS = "images.jsonl", "pictures.npz", "labels.jsonl"


def observe_targets(
    federation: Federation,
    training: TrainingTask,
    spec: ObservationSpec,
    earlier: Sequence[Sequence[ServerView | NotApplicable]] = (),
) -> Observation:
    """Observe every target at the federation's present round; each draws its own noise.

    Args:
        federation: at that round.
        training: what is trained.
        spec: whom to watch.
        earlier: what the server saw of every target in rounds before, oldest first.
    """
    client = Client(training.data.task(training.seed), spec.method, training.defense.item)
    updates = []
    for i, target in enumerate(spec.targets):
        if reason := _silence_reason(federation, target):
            updates.append(WatchedUpdate(target.key, target.client, NotApplicable(reason), None, math.nan))
            continue
        past = tuple(view for views in earlier if isinstance(view := views[i], ServerView))
        each = [_observed(federation, client, training, spec, member, past) for member in target.group]
        off = [_error(federation, client, one, member) for one, member in zip(each, target.group, strict=True)]
        view, truth = each[0]
        if target.others:
            view, truth = combine_views(each, [len(member.data) for member in target.group])
            off.append(prediction_error(view, truth) or 0.0)
        named = zip(each, target.group, strict=True)
        pictures = tuple(name for (_, own), member in named for name in _pictures(member, own))
        updates.append(WatchedUpdate(target.key, target.client, view, truth, max(off), pictures))
    return Observation(tuple(updates), training.seed, training.data.reference(spec.targets))


@dataclass(frozen=True)
class AttackExecution:
    """Tools and limits with which the updates of a cell are attacked.

    Attributes:
        pool: the processes to do it in.
        tick: told how many more updates are done.
        control: time limit, interruption and progress of its searches.
    """

    pool: AttackPool
    tick: Callable[[int], None] = lambda _count: None
    control: SearchControl = field(default_factory=SearchControl)

    def attack(self, attack: Attack, updates: AttackedUpdates, kept: AttackCheckpoint) -> list[Result]:
        """Return what the attack makes of each update; what `kept` has of an attempt before is not attacked again."""
        return self.pool.run(
            attack, updates.views, updates.seeds, self.tick, kept.load(), kept.save, control=self.control
        )


@dataclass(frozen=True)
class AttackedUpdates:
    """The updates of an observation that an attack is made on.

    Attributes:
        views: what the server sees of them.
        seeds: one for each.
    """

    views: Sequence[ServerView]
    seeds: Sequence[int]

    @staticmethod
    def of(observation: Observation, settled: Mapping[str | int, str] = MappingProxyType({})) -> AttackedUpdates:
        """Return those that were sent and are not settled."""
        sent = [(update.view, update.key) for update in observation.updates if update.key not in settled]
        views = [(view, key) for view, key in sent if isinstance(view, ServerView)]
        return AttackedUpdates(
            [view for view, _ in views], [derive_seed(observation.seed, "attack", key) for _, key in views]
        )


def run_attack_cell(
    task: AttackTask,
    observation: Observation,
    perceptual: Perceptual | None,
    folder: Path,
    execution: AttackExecution,
    settled: Mapping[str | int, str] = MappingProxyType({}),
) -> bool:
    """Attack every watched update, score what comes back, and write it down.

    `folder` gets `images.jsonl`, a row for every true image (where the truth is not known, for every reconstruction),
    `labels.jsonl`, the labels that the attack recovered, and, where there are images, `pictures.npz`.

    Args:
        task: which attack.
        observation: of its source and round.
        perceptual: LPIPS, or why there is none.
        folder: empty, or with what an attempt before left: portions that it finished are not attacked again.
        execution: how they are attacked.
        settled: updates that are not attacked, by key, and why.

    Returns:
        Whether some update was attacked to the end only in part, or not at all, for a time limit or an interrupt.
    """
    results = _attack_updates(task.attack.item, observation, settled, folder / CHECKPOINT, execution)
    rows, labels, pictures = list[Row](), list[Row](), list[tuple[Tensor | None, Tensor]]()
    public = mean_images(task.attack.item.auxiliary_images())
    for i, (update, result) in enumerate(zip(observation.updates, results, strict=True)):
        head = _head(task.round, update)
        if isinstance(result, NotApplicable):
            limit = {"limit": True} if result.limit else {}
            spared = {"spared": True} if update.key in settled else {}
            cut = {"cut_short": result.cut_short} if result.cut_short else {}
            rows.append({**head, "picture": None, "not_applicable": result.reason, **limit, **spared, **cut})
            continue
        scored = _score_update(task, observation, i, result, perceptual, public)
        if isinstance(update.view, ServerView) and (changed := _changing(update.view.defense)):
            head[CHANGED_BY] = changed
        named = [{**head, "picture": _picture(update, row), **row} for row in scored]
        copies = observation.copies
        rows.extend({**row, COPY_OF: copies[row["picture"]]} if row["picture"] in copies else row for row in named)
        if result.labels is not None:
            labels.append({"update": update.key, "labels": result.labels.tolist()})
        if result.inputs is not None and _is_shown(update):
            pictures.append(_shown(update, result.inputs.cpu(), scored))
    jsonl.replace_rows(folder / IMAGES, rows)
    jsonl.replace_rows(folder / LABELS, labels)
    if pictures:
        _write_pictures(folder / PICTURES, pictures)
    return any(result.cut_short for result in results)


def _head(number: int, update: WatchedUpdate) -> Row:
    """Return what every row of an update says of it."""
    head: Row = {"round": number, "client": update.client, "update": update.key}
    if (error := update.forward_error) is not None:
        head["forward_error"] = error if math.isfinite(error) else None
    if update.tolerance != TOLERANCE:
        head["forward_tolerance"] = update.tolerance
    return head


def _changing(defense: Defense) -> str:
    """Return the names of the defenses that change pictures before these are fed, or nothing."""
    names = [part.name for part in defense.members() if overrides(part, "transform_batch")]
    return join_words(names) if names else ""


def _picture(update: WatchedUpdate, row: Row) -> str | None:
    """Return the name of the row's image; where nobody knows the true one, of its reconstruction."""
    if "image" not in row:
        return None
    return f"{update.key}:{row['image']}" if update.truth is None else update.pictures[row["image"]]


def _is_shown(update: WatchedUpdate) -> bool:
    """Return whether what attacks recover can be looked at: pictures can, rows of a table can't."""
    return isinstance(update.view, NotApplicable) or update.view.task.inputs.is_image


def _shown(update: WatchedUpdate, found: Tensor, rows: Sequence[Row]) -> tuple[Tensor | None, Tensor]:
    """Return the true images, where they are known, and the reconstructions beside them."""
    if update.truth is None:
        return None, found.clamp(0, 1)
    return update.truth.inputs.cpu(), _in_order(found, rows)


def _write_pictures(path: Path, pictures: Sequence[tuple[Tensor | None, Tensor]]) -> None:
    """Keep reconstructions, and the originals if there are any; in a type that NumPy has, too."""
    parts = {
        "original": [original for original, _ in pictures if original is not None],
        "reconstruction": [found for _, found in pictures],
    }
    joined = {name: torch.cat(images) for name, images in parts.items() if images}
    arrays = {name: (x.float() if x.dtype is torch.bfloat16 else x).detach().numpy() for name, x in joined.items()}
    with atomic_write(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _observed(
    federation: Federation,
    client: Client,
    training: TrainingTask,
    spec: ObservationSpec,
    target: Target,
    history: tuple[ServerView, ...],
) -> tuple[ServerView, Truth]:
    start = prepare(
        client,
        federation.clients[target.client],
        federation.download(target.client),
        target.data,
        augment=training.data.augment if spec.observe.augment else None,
        key=federation.round_key(target.client, derive_seed(training.seed, "observe", target.key)),
    )
    threat = replace(spec.threat, history_rounds=len(history))
    view, truth, _ = observe(start, threat=threat, private_init=federation.private_init, history=history)
    return view, truth


def _silence_reason(federation: Federation, target: Target) -> str:
    """Return why a target sends nothing any more, or nothing; a group is silent where one of it is."""
    silent = federation.client.method.exclusion_reason
    reasons = (silent(federation.server, member.client) for member in target.group)
    reason = next((one for one in reasons if one), "")
    return f"nothing is sent: {reason}; watch it in an earlier round (observe.rounds)" if reason else ""


def _attack_updates(
    attack: Attack,
    observation: Observation,
    settled: Mapping[str | int, str],
    folder: Path,
    execution: AttackExecution,
) -> list[Result]:
    """Attack every update, or say why there is nothing to attack in it, or no need to."""
    left = [
        NotApplicable(settled[update.key]) if update.key in settled else update.view for update in observation.updates
    ]
    attacked = AttackedUpdates.of(observation, settled)
    execution.tick(len(left) - len(attacked.views))
    kept = AttackCheckpoint(folder, attacked.views)
    results = execution.attack(attack, attacked, kept)
    if any(result.cut_short for result in results):
        kept.flush()
    found = iter(results)
    return [next(found) if isinstance(view, ServerView) else view for view in left]


def _score_update(
    task: AttackTask,
    observation: Observation,
    number: int,
    result: Reconstruction,
    perceptual: Perceptual | None,
    public: Tensor | None,
) -> list[Row]:
    """Return the rows of one attacked update."""
    update = observation.updates[number]
    truth, knowledge = update.truth, list(result.knowledge)
    if truth is None:
        rows = score_without_truth(
            result, update.size, update.view.task if isinstance(update.view, ServerView) else None
        )
        if result.misfit is not None and math.isfinite(result.misfit):
            rows = [{**row, "misfit": result.misfit} for row in rows]
        return self_verification.add_self_check_columns(result, [{**row, "knowledge": knowledge} for row in rows])
    assert isinstance(update.view, ServerView)  # what was attacked was sent
    floor = derive_seed(observation.seed, "floor", update.key)
    near = _closest(observation).get(number)
    rows = score(result, truth, perceptual=perceptual, reference=near, public=public, seed=floor, task=update.view.task)
    rows = self_verification.add_self_check_columns(result, [{**row, "knowledge": knowledge} for row in rows])
    if result.inputs is not None:
        rows = _bounded(rows, task.attack.item, truth)
        if (own := truth.trace.own) is not None and update.view.task.inputs.is_image:
            rows = add_own_pictures(rows, result.inputs, own, seed=floor, reference=near, public=public)
    if number not in observation.lineups:
        observation.lineups[number] = IdentificationLineup.of(
            update.view, truth, observation.reference, derive_seed(observation.seed, "identify", update.key)
        )
    return observation.lineups[number].rows(rows, result)


def _closest(observation: Observation) -> dict[int, Tensor]:
    """Return, by number of an update, the reference images closest to its own: all that the baseline `nearest` needs.

    A pass through the reference set costs the same for one image as for fifty, so it is made for all updates at once.
    """
    reference = observation.reference
    if reference is not None and not observation.closest:
        truths = {i: update.truth for i, update in enumerate(observation.updates)}
        true = {i: truth.inputs for i, truth in truths.items() if truth is not None}
        found = nearest_reference(torch.cat([*true.values()]), reference.inputs).split(
            [len(own) for own in true.values()]
        )
        # in the reference's order, as the first of several that are equally close is taken
        observation.closest.update((i, reference.inputs[own.unique()]) for i, own in zip(true, found, strict=True))
    return observation.closest


def _bounded(rows: list[Row], attack: Attack, truth: Truth) -> list[Row]:
    """Return the rows with what the attack could show at best, where its parametrization limits it."""
    best = representable_bound(attack, truth.inputs)
    if best is None:
        return rows
    limits = psnr(best, truth.inputs).tolist()
    return [{**row, "bound_psnr": limits[row["image"]]} for row in rows]


def _pictures(target: Target, truth: Truth) -> list[str]:
    """Return which image of the data set every true image is."""
    met: Counter[int] = Counter()
    names = []
    for index in truth.trace.indices.tolist():
        copy = f"#{met[index]}" if met[index] else ""
        names.append(target.named(f"{int(target.samples[index])}{copy}"))
        met[index] += 1
    return names


def _error(federation: Federation, client: Client, seen: tuple[ServerView, Truth], target: Target) -> float:
    """Return how far the attacker's own model of training is from what one client would have sent."""
    return forward_error(*seen, client, federation.clients[target.client], federation.download(target.client))


def _in_order(inputs: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return reconstructions in the order of the true images, black where there is none."""
    black = torch.zeros_like(inputs[0])
    return torch.stack([black if row["matched"] is None else inputs[row["matched"]] for row in rows]).clamp(0, 1)
