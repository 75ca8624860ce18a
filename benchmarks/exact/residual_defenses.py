"""Which defenses stop exact inversion of a residual network: `python -m benchmarks.exact.residual_defenses`.

Needs HYPERLEAK_DATA. Each defense is measured at several strengths, on the victims of the row `resnet18-1` of
`benchmarks.exact.residual`. The attacker knows the defense. A victim is written to the results as soon as it is done,
and the same call goes on where it was stopped (`--victims`, `--only`, `--again`, `--rewrite`).

`--accuracy FOLDER` trains a ResNet-20 under defenses that stop the attack (four CPU minutes each, kept in that folder)
and puts what it classifies right into the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hyperleak
from attacks.base import attacks
from benchmarks.common import RESULTS, publish, rewrite, table
from benchmarks.exact.residual import attempt
from benchmarks.exact.residual_victims import CASES, observe_defended
from defenses import defenses
from eval.io.jsonl import locked
from fl.tensors import Tensors, dense

PAGE, TESTED = "residual_defenses", "backsolve"
CASE = next(case for case in CASES if case.name == "resnet18-1")
TRAINING: dict[str, Any] = {
    "title": "What defenses against exact inversion cost, ResNet-20 on CIFAR-10",
    "task": {"dataset": "cifar10", "model": "resnet20"},
    "federation": {
        "partition": {"name": "iid", "clients": 5, "train_size": 1000},
        "rounds": 12,
        "evaluate_every": 4,
    },
    "method": [
        {"name": "fedavg", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 1, "batch_size": 50},
    ],
}
"""The federation in which accuracy is measured, but for the defense."""
WITHOUT_ACCURACY = {
    *("soteria", "clip", "dp-sgd", "precode"),
    *(f"noise, std {std:g} of each tensor" for std in (1e-6, 1e-5, 1e-4)),
    *("quantize, 16 bits", "quantize, float16", "prune, smallest 1% not sent", "prune, smallest 10% not sent"),
}
"""Defenses, or strengths of one, that do not stop the attack, or can't be used with this network: `dp-sgd` not with
batch normalization."""
MAX_SECONDS = 300.0
"""CPU seconds of a victim, after which nothing was found."""
Row = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Strength:
    """A defense at one setting.

    Attributes:
        name: of the defense.
        words: the setting, as the page has it.
        settings: of the defense.
    """

    name: str
    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What tells it from others."""
        return f"{self.name}, {self.words}" if self.words else self.name


STRENGTHS = (
    Strength("none", ""),
    *(Strength("noise", f"std {std:g} of each tensor", {"std": std}) for std in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)),
    *(Strength("quantize", f"{bits} bits", {"bits": bits}) for bits in (16, 12, 8)),
    *(Strength("quantize", kind, {"format": kind}) for kind in ("float16", "bfloat16")),
    *(Strength("qsgd", f"{bits} bits", {"bits": bits}) for bits in (16, 8)),
    *(Strength("prune", f"smallest {ratio:.0%} not sent", {"ratio": ratio}) for ratio in (0.01, 0.1, 0.5, 0.9)),
    *(
        Strength("prune", f"random {ratio:.0%} not sent", {"ratio": ratio, "keep": "random"})
        for ratio in (0.01, 0.1, 0.5, 0.9)
    ),
    *(Strength("soteria", f"{ratio:.0%} of the units", {"ratio": ratio}) for ratio in (0.1, 0.6, 0.9)),
    *(Strength("clip", f"norm {norm:g}", {"max_norm": norm}) for norm in (1.0, 0.01)),
    *(Strength("dp-sgd", f"clip 1, noise {z:g}", {"clip": 1.0, "noise_multiplier": z}) for z in (1e-6, 1e-4, 1e-2)),
    Strength("signsgd", ""),
    Strength("precode", "256 wide", {"latent": 256}),
)


def measure(strength: Strength, number: int) -> Row:
    """Return what the attack makes of a victim behind a defense, and how far the defense moved the update."""
    defense = None if strength.name == "none" else defenses.build({"name": strength.name, **strength.settings})
    victim = observe_defended(CASE, number, defense)
    row: Row = {"defense": strength.key, "victim": number}
    if defense is not None:
        row["moved"] = _distance(victim.view.update, observe_defended(CASE, number, None).view.update)
    attack = attacks.build({"name": TESTED})
    return row | attempt(lambda: attack(victim.view, seed=number), victim.images, MAX_SECONDS)


def _distance(sent: Tensors, plain: Tensors) -> float | None:
    """Return how far an update is from the undefended one, relative to that; None where they have other tensors."""
    if sent.keys() != plain.keys():
        return None
    off = sum(float((dense(sent[name]) - dense(value)).double().square().sum()) for name, value in plain.items())
    return (off / sum(float(dense(value).double().square().sum()) for value in plain.values())) ** 0.5


def train(folder: Path) -> dict[str, float]:
    """Return the accuracy that the federation reaches under each defense, training those that the folder lacks."""
    trained = [strength for strength in STRENGTHS if not {strength.name, strength.key} & WITHOUT_ACCURACY]
    chosen = [{"name": s.name, "as": _label(s), **s.settings} for s in trained]
    rounds = hyperleak.run({**TRAINING, "defense": chosen}, folder, workers=1).rows("rounds")
    reached = {row["defense"]: row["accuracy"] for row in rounds if row["round"] == TRAINING["federation"]["rounds"]}
    return {s.key: float(reached[_label(s)]) for s in trained if _label(s) in reached}


def _label(strength: Strength) -> str:
    """Return what a run calls a defense."""
    return "-".join([strength.name, *(f"{key}-{value}" for key, value in strength.settings.items())])


def document(rows: Sequence[Row], accuracy: Mapping[str, float] | None = None) -> list[str]:
    """Return the results in words."""
    accuracy = accuracy or {}
    lines = [
        _line(strength, [row for row in rows if row["defense"] == strength.key], accuracy) for strength in STRENGTHS
    ]
    head = ["defense", "strength", "victims", "exact", "median dB (least)", "verified", "false"]
    reasons = [(row["defense"], row.get("reason") or row.get("error") or row["note"]) for row in reversed(rows)]
    states = ", ".join(sorted({f"`{row['attacks'][:7]}`" for row in rows if "attacks" in row}))
    notes = {defense: reason for defense, reason in reasons if reason}
    told = [f"- {key}: `{notes[key]}`" for key in (s.key for s in STRENGTHS) if key in notes]
    return [
        "# Defenses against exact inversion",
        "",
        f"One picture's step of an untrained ResNet-18, attacked by `{TESTED}`. The attacker knows the network, that "
        "the step is of one picture, and the defense with its settings. Victims are the first of the row `resnet18-1` "
        "of [the benchmark of deep networks](residual.md), and send weights before minus after at a step of 1. "
        "Numbers that pruning left out by chance are unknown to the attack; those that were sent have their equations. "
        "Where the least number that was sent shows that the smallest were left out, these count as zero. An attack "
        "that knows better may be built, so no row says that this is safe.",
        "",
        "Exact: every pixel to 8 bits. No picture counts as 0 dB. PSNR ends at 100 dB. The update moved by: the "
        "distance between what is sent and what would be sent without the defense, relative to the latter. "
        f"The attacks' code was of state {states or '-'} (as `git rev-parse --short HEAD:attacks` names it).",
        "",
        "Accuracy is of a ResNet-20 on CIFAR-10, trained under the defense: by five clients of 1,000 pictures, over "
        "rounds of an epoch. There is one seed and no search for a step size. It is the share of test images that the "
        "model gets right after twelve rounds (- where none was trained). Differences of a few points may be chance.",
        "",
        *table([*head, "update moved by", "accuracy", "median seconds"], [line for line in lines if line]),
        "",
        "## What the attack said",
        "",
        *told,
    ]


def _line(strength: Strength, rows: Sequence[Row], accuracy: Mapping[str, float]) -> list[object]:
    """Return one row of the table; empty where nothing was measured."""
    if not rows:
        return []
    psnr = [row["psnr"][0] if row.get("psnr") else 0.0 for row in rows]
    moved = [row["moved"] for row in rows if row.get("moved") is not None]
    return [
        strength.name,
        strength.words or "-",
        len(rows),
        f"{sum(all(row.get('exact', [False])) for row in rows)} of {len(rows)}",
        f"{statistics.median(psnr):.0f} ({min(psnr):.0f})",
        sum(row.get("verified", False) for row in rows),
        sum(row.get("false", False) for row in rows),
        f"{statistics.median(moved):.1g}" if moved else "-",
        f"{accuracy[strength.key]:.1%}" if strength.key in accuracy else "-",
        f"{statistics.median(row['seconds'] for row in rows):.1f}",
    ]


def known() -> dict[str, Any]:
    """Return what has been measured: rows, and accuracy by defense."""
    path = RESULTS / f"{PAGE}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {"rows": found.get("rows", []), "accuracy": found.get("accuracy", {})}


def add(row: Row) -> None:
    """Put a row in the place of the last one of the same victim, and write the page anew."""
    RESULTS.mkdir(exist_ok=True)
    order = [strength.key for strength in STRENGTHS]
    with locked(RESULTS):
        before = known()
        rows = {(old["defense"], old["victim"]): old for old in before["rows"]}
        rows[row["defense"], row["victim"]] = row
        kept = [rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1])) if key[0] in order]
        publish(PAGE, {**before, "rows": kept}, document(kept, before["accuracy"]))


def add_accuracy(reached: Mapping[str, float]) -> None:
    """Note the accuracy by defense, and write the page anew."""
    with locked(RESULTS):
        before = known()
        accuracy = {**before["accuracy"], **reached}
        publish(PAGE, {**before, "accuracy": accuracy}, document(before["rows"], accuracy))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=3, help="of each strength")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="defenses")
    parser.add_argument("--again", action="store_true", help="measure anew what the results have")
    parser.add_argument("--list", action="store_true", help="name the strengths")
    parser.add_argument("--accuracy", type=Path, metavar="FOLDER", help="train under each defense, in this folder")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if chosen.list:
        sys.stdout.write("\n".join(strength.key for strength in STRENGTHS) + "\n")
        return
    if chosen.rewrite:
        rewrite(PAGE, lambda results: document(results["rows"], results.get("accuracy")))
        return
    if chosen.accuracy:
        add_accuracy(train(chosen.accuracy))
        return
    before = set() if chosen.again else {(row["defense"], row["victim"]) for row in known()["rows"]}
    for number in range(chosen.victims):
        for strength in STRENGTHS:
            if (strength.key, number) in before or (chosen.only and strength.name not in chosen.only):
                continue
            row = measure(strength, number)
            add(row)
            log.info("%s", json.dumps(row))


if __name__ == "__main__":
    main()
