"""Attack cells: what the server sees of the watched clients, attacked and scored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.parallel import AttackPool
from eval.io import jsonl
from eval.metrics import self_verification
from eval.metrics.baselines import nearest_reference, representable_bound
from eval.metrics.forward_error import forward_error, prediction_error
from eval.metrics.image import psnr
from eval.metrics.lineup import IdentificationLineup
from eval.metrics.perceptual import Perceptual
from eval.metrics.score import Row, score
from eval.run.attack_checkpoint import AttackCheckpoint
from eval.run.federation_data import Target
from eval.run.plan import AttackTask, ObservationSpec, TrainingTask
from eval.run.run_directory import CHECKPOINT
from fl.aggregated_view import combine
from fl.client import Client
from fl.federation import Federation
from fl.runtime.atomic_files import replacing
from fl.seeds import derive
from fl.simulation.client_round import observe
from fl.types import Batch, Truth
from fl.view import ServerView

IMAGES, PICTURES = "images.jsonl", "pictures.npz"


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees of every victim after a round, and what is true.

    Attributes:
        views: one for each victim, or why nothing is sent.
        truths: likewise; None where nothing is sent, and so nothing made.
        errors: how far the attacker's own model of training is from what was observed.
        pictures: for each victim, which image of the data set every true image is: its client and number, and which
            copy if a client feeds several of it.
        lineups: by number of a victim its images among others, made when an attack first asks.
        closest: likewise, those of the reference images that are closest to its own.
    """

    views: tuple[ServerView | NotApplicable, ...]
    truths: tuple[Truth | None, ...]
    errors: tuple[float, ...]
    pictures: tuple[tuple[str, ...], ...]
    lineups: dict[int, IdentificationLineup] = field(default_factory=dict)
    closest: dict[int, Tensor] = field(default_factory=dict)


def observe_targets(
    federation: Federation,
    training: TrainingTask,
    scene: ObservationSpec,
    earlier: Sequence[Sequence[ServerView | NotApplicable]] = (),
) -> Observation:
    """Observe every victim at the federation's present round; each draws its own noise.

    Args:
        federation: at that round.
        training: what is trained.
        scene: whom to watch.
        earlier: what the server saw of every victim in rounds before, oldest first.
    """
    client = Client(training.world.task(training.seed), scene.method, training.defense.item)
    views, truths = list[ServerView | NotApplicable](), list[Truth | None]()
    errors, pictures = list[float](), list[tuple[str, ...]]()
    for i, victim in enumerate(scene.victims):
        if reason := _silent(federation, victim):
            views.append(NotApplicable(reason))
            truths.append(None)
            errors.append(math.nan)
            pictures.append(())
            continue
        past = tuple(view for views in earlier if isinstance(view := views[i], ServerView))
        each = [_observed(federation, client, training, scene, member, past) for member in victim.group]
        off = [_error(federation, client, one, member) for one, member in zip(each, victim.group, strict=True)]
        view, truth = each[0]
        if victim.others:
            view, truth = combine(each, [len(member.data) for member in victim.group])
            off.append(prediction_error(view, truth) or 0.0)
        views.append(view)
        truths.append(truth)
        errors.append(max(off))
        named = zip(each, victim.group, strict=True)
        pictures.append(tuple(name for (_, own), member in named for name in _pictures(member, own)))
    return Observation(tuple(views), tuple(truths), tuple(errors), tuple(pictures))


def run_attack_cell(
    watch: AttackTask,
    training: TrainingTask,
    seen: Observation,
    perceptual: Perceptual | None,
    folder: Path,
    spread: AttackPool,
    tick: Callable[[int], None] = lambda _count: None,
) -> None:
    """Attack every victim; writes `images.jsonl` and, where there are images, `pictures.npz` into `folder`.

    Args:
        watch: which attack, on whom.
        training: on what.
        seen: of the watch's scene and round.
        perceptual: LPIPS, or why there is none.
        folder: empty, or with what an attempt before left: portions that it finished are not attacked again.
        spread: the processes to do it in.
        tick: told how many more updates are done.
    """
    victims = watch.scene.victims
    seeds = [derive(training.seed, "attack", victim.key) for victim in victims]
    results = _attacked(watch.attack.item, seen.views, seeds, spread, folder / CHECKPOINT, tick)
    reference, rows, pairs = training.world.reference(victims), list[Row](), list[tuple[Tensor, Tensor]]()
    told = zip(victims, seen.views, seen.truths, results, seen.errors, seen.pictures, strict=True)
    for i, (victim, view, truth, result, error, pictures) in enumerate(told):
        head = {"round": watch.round, "client": victim.client, "update": victim.key}
        head["forward_error"] = error if math.isfinite(error) else None
        if isinstance(result, NotApplicable):
            limit = {"limit": True} if result.limit else {}
            rows.append({**head, "picture": None, "not_applicable": result.reason, **limit})
            continue
        assert truth is not None  # what was attacked was sent
        assert isinstance(view, ServerView)
        near = _closest(seen, reference).get(i)
        scored = _scored(result, truth, perceptual, near, derive(training.seed, "floor", victim.key))
        if result.inputs is not None:
            scored = _bounded(scored, watch.attack.item, truth)
        if i not in seen.lineups:
            seen.lineups[i] = IdentificationLineup.of(
                view, truth, reference, derive(training.seed, "identify", victim.key)
            )
        scored = seen.lineups[i].rows(scored, result)
        names = [pictures[row["image"]] if "image" in row else None for row in scored]
        rows.extend({**head, "picture": name, **row} for name, row in zip(names, scored, strict=True))
        if result.inputs is not None:
            pairs.append((truth.inputs.cpu(), _in_order(result.inputs.cpu(), scored)))
    jsonl.replace_rows(folder / IMAGES, rows)
    if pairs:
        original, found = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
        with replacing(folder / PICTURES) as file:
            np.savez_compressed(file, original=original, reconstruction=found)


def _observed(
    federation: Federation,
    client: Client,
    training: TrainingTask,
    scene: ObservationSpec,
    victim: Target,
    history: tuple[ServerView, ...],
) -> tuple[ServerView, Truth]:
    view, truth, _ = observe(
        client,
        federation.clients[victim.client],
        federation.download(victim.client),
        victim.data,
        augment=training.world.augment if scene.observe.augment else None,
        threat=replace(scene.threat, history_rounds=len(history)),
        number=victim.client,
        round=federation.server.round,
        seed=derive(training.seed, "observe", victim.key),
        private_init=federation.private_init,
        history=history,
    )
    return view, truth


def _silent(federation: Federation, victim: Target) -> str:
    """Why nothing is sent of a victim any more, or nothing: of a group, that one of it keeps out."""
    silent = federation.client.method.silent
    reasons = (silent(federation.server, member.client) for member in victim.group)
    reason = next((one for one in reasons if one), "")
    return f"nothing is sent: {reason}; watch it in an earlier round (observe.rounds)" if reason else ""


def _attacked(
    attack: Attack,
    views: Sequence[ServerView | NotApplicable],
    seeds: Sequence[int],
    spread: AttackPool,
    folder: Path,
    tick: Callable[[int], None],
) -> list[Result]:
    """What the attack makes of the views; where there is none, why."""
    pairs = [(view, seed) for view, seed in zip(views, seeds, strict=True) if isinstance(view, ServerView)]
    tick(len(views) - len(pairs))
    open_to, own = [view for view, _ in pairs], [seed for _, seed in pairs]
    kept = AttackCheckpoint(folder, open_to)
    found = iter(spread.run(attack, open_to, own, tick, kept.load(), kept.save))
    return [next(found) if isinstance(view, ServerView) else view for view in views]


def _closest(seen: Observation, reference: Batch | None) -> dict[int, Tensor]:
    """By number of a victim the reference images that are closest to its own: the floor `nearest` needs no others.

    A pass through the reference set costs the same for one image as for fifty, so it is made for all victims at once.
    """
    if reference is not None and not seen.closest:
        true = {i: truth.inputs for i, truth in enumerate(seen.truths) if truth is not None}
        found = nearest_reference(torch.cat([*true.values()]), reference.inputs).split(
            [len(own) for own in true.values()]
        )
        # in the reference's order, as the first of several that are equally close is taken
        seen.closest.update((i, reference.inputs[own.unique()]) for i, own in zip(true, found, strict=True))
    return seen.closest


def _scored(
    result: Reconstruction, truth: Truth, perceptual: Perceptual | None, reference: Tensor | None, seed: int
) -> list[Row]:
    """The rows of one attacked update."""
    rows = score(result, truth, perceptual=perceptual, reference=reference, seed=seed)
    return self_verification.columns(result, [{**row, "knowledge": list(result.knowledge)} for row in rows])


def _bounded(rows: list[Row], attack: Attack, truth: Truth) -> list[Row]:
    """The rows with what the attack could show at best, where its parametrization limits it."""
    best = representable_bound(attack, truth.inputs)
    if best is None:
        return rows
    limits = psnr(best, truth.inputs).tolist()
    return [{**row, "bound_psnr": limits[row["image"]]} for row in rows]


def _pictures(victim: Target, truth: Truth) -> list[str]:
    """Which image of the data set every true image is."""
    met: Counter[int] = Counter()
    names = []
    for index in truth.trace.indices.tolist():
        copy = f"#{met[index]}" if met[index] else ""
        names.append(victim.named(f"{int(victim.samples[index])}{copy}"))
        met[index] += 1
    return names


def _error(federation: Federation, client: Client, seen: tuple[ServerView, Truth], victim: Target) -> float:
    """How far the attacker's own model of training is from what one client would have sent."""
    return forward_error(*seen, client, federation.clients[victim.client], federation.download(victim.client))


def _in_order(inputs: Tensor, rows: Sequence[Row]) -> Tensor:
    """Reconstructions in the order of the true images, black where there is none."""
    black = torch.zeros_like(inputs[0])
    return torch.stack([black if row["matched"] is None else inputs[row["matched"]] for row in rows]).clamp(0, 1)
