"""Exact inversion of the networks people train, batches included: `python -m benchmarks.exact.residual`.

Every row of the table is a kind of victim (`--list` names them; needs HYPERLEAK_DATA): ResNets, VGGs, DenseNet and
others on pictures that no change of the attack had seen, one step each, no label given. `--attack` names any attack,
so that searches stand beside on the same victims; `breaching` is the peer's own code, from the folder that
HYPERLEAK_PEERS names. A victim is written to the results as soon as it is done, and the same call goes on where it was
stopped; `--outdated` also measures again what other states of the attacks' code (as git names them) have left.
`--limit` bounds the victims of each row, `--seconds` the whole call; processes with rows of their own may run at once.
Networks that were trained come from `python -m benchmarks.exact.residual_training`. `--smoke` tries the machinery on
small networks and made-up pictures, and shows the page.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attacks import Reconstruction
from attacks.base import Result, attacks
from benchmarks.common import RESULTS, machine, publish, rewrite
from benchmarks.exact.residual_page import PEER, TESTED, document, state
from benchmarks.exact.residual_training import NotTrainedError
from benchmarks.exact.residual_victims import CASES, SMOKE, Case, Victim, observe
from benchmarks.peers.adapters import Setting, breaching
from benchmarks.peers.victims import Victim as PeersVictim
from eval.io.jsonl import locked
from eval.metrics import image
from eval.metrics.matching import assign
from fl.types import Batch

PAGE = "residual"
Row = dict[str, Any]
Attack = Callable[[Victim, int], Result]
log = logging.getLogger(__name__)


class TooLongError(Exception):
    """A victim takes more time than it may."""


# ---- one victim ------------------------------------------------------------------------------------------------------
def measure(case: Case, number: int, name: str, attack: Attack, most: float = math.inf) -> Row:
    """Return what an attack makes of victim `number`.

    Args:
        case: the row.
        number: of the victim; its network's seed, too.
        name: of the attack, with its settings.
        attack: takes a victim and a seed.
        most: CPU seconds after which it is stopped, which counts as nothing found.
    """
    victim = observe(case, number)
    row: Row = {"case": case.name, "attack": name, "victim": number}
    return row | attempt(lambda: attack(victim, number), victim.images, most)


def attempt(attack: Callable[[], Result], images: Batch, most: float) -> Row:
    """Return what an attack makes of these images, or why nothing, and what it took.

    Args:
        attack: it knows everything but the images.
        images: the truth.
        most: CPU seconds after which it is stopped.
    """
    row: Row = {}
    began = time.process_time()
    try:
        with stopped_after(most):
            result = attack()
    except TooLongError:
        row["reason"] = f"not done after {most:g} CPU seconds, at which it was stopped"
    except Exception as error:
        log.exception("the attack failed")
        row["error"] = f"{type(error).__name__}: {error}"
    spent = time.process_time() - began
    if not row:
        row = scored(result, images)
    return {**row, "seconds": spent, "processor": machine()["processor"], "attacks": attacks_state()}


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """What runs inside is ended by `TooLongError` after so many CPU seconds."""
    if seconds == math.inf:
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(*_: object) -> None:
    raise TooLongError


def scored(result: Result, images: Batch) -> Row:
    """Return what a result has of a batch, matched once, or why it has nothing."""
    if not isinstance(result, Reconstruction):
        return {"reason": result.reason}
    row: Row = {
        "labels": labels_right(result.labels, images.labels),
        "verified": bool(result.verified),
        "note": "; ".join(filter(None, (result.note, result.given_up, result.cut_short))),
    }
    if result.inputs is None:
        return {**row, "verified": False}  # features or labels alone, if anything
    pairs = [(i, found) for i, found in enumerate(assign(result.inputs, images.inputs)) if found is not None]
    true = images.inputs[[i for i, _ in pairs]].double()
    found = result.inputs[[j for _, j in pairs]].double()
    exact = [bool(value) for value in image.exact8(found, true)]
    right = len(pairs) == len(result.inputs) and all(exact)
    return {
        **row,
        "psnr": image.psnr(found, true).tolist(),
        "exact": exact,
        "off": float((found - true).abs().max()) if pairs else None,
        "false": bool(result.verified) and not right,
    }


def labels_right(found: Tensor | None, true: Tensor) -> int | None:
    """Return how many labels of a batch are right, whatever their order; None where none are told."""
    if found is None:
        return None
    told = (found.argmax(-1) if found.ndim == 2 else found).tolist()
    return sum(min(told.count(label), true.tolist().count(label)) for label in set(true.tolist()))


# ---- attacks ---------------------------------------------------------------------------------------------------------
def named(chosen: argparse.Namespace, case: Case) -> tuple[str, Attack]:
    """Return the attack that the command line asks for or the row is for, and its name with its settings."""
    asked = chosen.attack or case.attack(TESTED)
    given = {"preset": chosen.preset, "iterations": chosen.iterations}
    settings = {key: value for key, value in given.items() if value is not None}
    words = ", ".join(f"{key} {value}" for key, value in settings.items())
    name = f"{asked} ({words})" if words else asked
    if asked == PEER:
        return name, lambda victim, seed: peers(victim, seed, chosen.iterations or 24_000)
    attack = attacks.build({"name": asked, **settings})
    return name, lambda victim, seed: attack(victim.view, seed=seed)


def peers(victim: Victim, seed: int, iterations: int) -> Result:
    """Return what breaching's `invertinggradients` finds at its own total variation, given the label.

    Raises:
        ValueError: weights were sent: it takes gradients.
    """
    if victim.gradient is None:
        raise ValueError(f"expected a victim that sends a gradient for {PEER}")
    images = victim.images
    run = breaching(Setting(victim.view.task, iterations, 0.2))(
        PeersVictim(images.inputs, images.labels, victim.view, victim.gradient, seed)
    )
    return Reconstruction(run.image, labels=images.labels)


# ---- results ---------------------------------------------------------------------------------------------------------
def known_rows() -> list[Row]:
    """Return what has been measured."""
    path = RESULTS / f"{PAGE}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def add(row: Row) -> None:
    """Put a row in the place of the last one of the same victim and attack, and write the page anew."""
    RESULTS.mkdir(exist_ok=True)
    with locked(RESULTS):
        rows = {key(known): known for known in known_rows()}
        rows[key(row)] = row
        found = [rows[place] for place in sorted(rows, key=_order)]
        publish(PAGE, {"rows": found}, document(CASES, found))


def key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return what tells rows apart."""
    return row["case"], row["attack"], row["victim"]


def _order(place: tuple[str, str, int]) -> tuple[int, str, int]:
    names = [case.name for case in CASES]
    return names.index(place[0]) if place[0] in names else len(names), *place[1:]


def attacks_state() -> str:
    """Return the state of the attacks as git names it; empty outside a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD:attacks"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---- command line ----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if chosen.list:
        sys.stdout.write("\n".join(listed(known_rows())) + "\n")
    elif chosen.rewrite:
        rewrite(PAGE, lambda known: document(CASES, known["rows"]))
    elif chosen.smoke:
        rows = [
            measure(case, number, *named(chosen, case), chosen.most) for case in SMOKE for number in range(case.count)
        ]
        sys.stdout.write("\n".join(document(SMOKE, rows, rows[0]["attack"])) + "\n")
    else:
        run(chosen)


def run(chosen: argparse.Namespace) -> None:
    """Measure what the results lack, row by row."""
    until = time.monotonic() + chosen.seconds
    known = [] if chosen.again else known_rows()
    today = attacks_state()[:7]
    before = {key(row) for row in known if not chosen.outdated or state(row) == today}
    for case in CASES:
        if case.name not in chosen.rows:
            continue
        name, attack = named(chosen, case)
        for number in range(chosen.begin, min(chosen.limit, case.count)):
            if time.monotonic() > until:
                log.info("stopped; the same call goes on")
                return
            if (case.name, name, number) in before:
                continue
            try:
                row = measure(case, number, name, attack, chosen.most)
            except NotTrainedError as error:
                log.info("%s is left out: %s", case.name, error)
                break
            add(row)
            log.info("%s", json.dumps(row))


def listed(rows: Sequence[Row]) -> list[str]:
    """Return every row of the table by name, with how many victims have been measured by which attack."""
    lines = []
    for case in CASES:
        done: dict[str, int] = {}
        for row in rows:
            if row["case"] == case.name:
                done[row["attack"]] = done.get(row["attack"], 0) + 1
        words = ", ".join(f"{attack} {count}" for attack, count in done.items()) or "none"
        lines.append(f"{case.name}: {case.title}, batch {case.batch}, {case.setting}; of {case.count}: {words}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--list", action="store_true", help="name the rows and how far they are")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="of the table")
    parser.add_argument("--limit", type=int, default=10**6, help="victims of each row")
    parser.add_argument("--begin", type=int, default=0, help="number of the first victim")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further victim begins")
    parser.add_argument("--most", type=float, default=math.inf, help="CPU seconds of a victim; more are none found")
    parser.add_argument("--attack", help="registered name, or `breaching`; by default what the row is for")
    parser.add_argument("--preset", help="of the attack")
    parser.add_argument("--iterations", type=int, help="of a search")
    parser.add_argument("--again", action="store_true", help="measure anew what the results have")
    parser.add_argument("--outdated", action="store_true", help="likewise what another state of the attacks made")
    parser.add_argument("--smoke", action="store_true", help="small networks, made-up pictures; writes no results")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    return parser


if __name__ == "__main__":
    main()
