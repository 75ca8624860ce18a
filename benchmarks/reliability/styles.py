"""Audits of models in styles that exact attacks refuse: none may end as if all was tried.

`python -m benchmarks.reliability.styles` audits 200 models through the command, in this process: every style of
`odd_models` with activations, numbers of channels, images an update and limits drawn from a seed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks.reliability.odd_models import ACTIVATIONS, STYLES, written
from benchmarks.reliability.page import Figure, record
from eval import cli
from eval.commands.terminal import FAILURE, USAGE
from fl.seeds import stream

CASES = 200
LIMIT = 60
"""In dB: so far that only what is nearly exact exceeds it."""
EXACT = {"analytic", "rconv", "spear", "cascade"}
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """One audit.

    Attributes:
        number: of the case, from which all follows.
        style: of the model.
        channels: of its images.
        activation: number of `ACTIVATIONS`.
        images: in one update.
        limited: whether a limit is set.
    """

    number: int
    style: str
    channels: int
    activation: int
    images: int
    limited: bool

    @classmethod
    def drawn(cls, number: int) -> Case:
        """Return the case of a number."""
        draw, names = Random(number), list(STYLES)
        return cls(
            number,
            names[number % len(names)],
            draw.choice((1, 3)),
            draw.randrange(len(ACTIVATIONS)),
            draw.choice((1, 1, 2)),
            draw.random() < 0.5,
        )

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, images and labels."""
        model = written(self.style, self.channels, CLASSES, ACTIVATIONS[self.activation](), self.number)
        draw = stream(self.number, "styles")
        labels = torch.randint(CLASSES, (self.images,), generator=draw)
        return model, torch.rand(self.images, self.channels, 8, 8, generator=draw), labels

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        exact = ("analytic", "spear" if self.images > 1 else "rconv", "cascade")
        found = [f"{__name__}:case_{self.number}", "--batch-size", str(self.images), "--json", "--device", "cpu"]
        found += ["--max-psnr", str(LIMIT)] * self.limited
        for attack in (*exact, "{name: ig, iterations: 400}"):
            found += ["--attack", attack]
        return found


@dataclass(frozen=True)
class Answer:
    """What an audit ended with.

    Attributes:
        case: which.
        code: of the exit.
        crashed: whether it ended by an exception, or an attack did.
        leaked: whether images came back, by the bar of reports.
        ran: whether an exact attack brought images, right or not.
        stopped: exact attacks stopped by limits of theirs.
        named: whether the verdict says that they could not be tried.
        said: the last line on stderr.
    """

    case: Case
    code: int
    crashed: bool
    leaked: bool
    ran: bool
    stopped: tuple[str, ...]
    named: bool
    said: str

    @property
    def wrong(self) -> bool:
        """Whether it reads as if all was tried, and was not."""
        return self.code == 0 and not self.leaked and not self.ran


def audited(case: Case) -> Answer:
    """Return the answer of the command."""
    result = CliRunner().invoke(cli.app, ["audit", *case.words])
    said = (result.stderr.strip().splitlines() or [""])[-1]
    try:
        found: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        crashed = result.exception is not None and result.exit_code != USAGE
        return Answer(case, result.exit_code, crashed, leaked=False, ran=False, stopped=(), named=False, said=said)
    findings = found["findings"]
    kinds = {one["attack"]: [outcome["kind"] for outcome in one["outcomes"]] for one in findings}
    return Answer(
        case,
        result.exit_code,
        any(one["failed"] for one in findings),
        any(one["leaked"] for one in findings),
        any("ran" in kinds[name] or "settled" in kinds[name] for name in EXACT & set(kinds)),
        tuple(name for name in kinds if name in EXACT and "limit" in kinds[name]),
        any("could not be tried" in one["what"] for one in found["undecided"]),
        said,
    )


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    """`case_17` builds the model of case 17, as the command asks for it."""
    if name.startswith("case_"):
        return Case.drawn(int(name.removeprefix("case_"))).build
    raise AttributeError(name)


def figures(answers: list[Answer]) -> list[Figure]:
    """Return what is published of the answers."""
    wrong, crashed = sum(one.wrong for one in answers), sum(one.crashed for one in answers)
    held = [one for one in answers if one.stopped and not (one.leaked or one.ran)]
    silent = sum(one.code == 0 for one in held)
    return [
        Figure(
            "exit 0 in audits of models in styles that exact attacks refuse; nothing leaked, no exact attack ran",
            len(answers),
            "0",
            str(wrong),
            wrong == 0,
        ),
        Figure(
            "of these, exact attacks stopped by how the model is written and nothing found: exit 0",
            len(held),
            "0",
            str(silent),
            silent == 0,
        ),
        Figure("attacks that end by an error in these audits", len(answers), "0", str(crashed), crashed == 0),
    ]


def main() -> None:
    """Audit all cases and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--dry", action="store_true", help="print what is wrong, write nothing")
    given = parser.parse_args()
    answers = [audited(Case.drawn(number)) for number in range(given.cases)]
    codes = {str(code): count for code, count in sorted(Counter(one.code for one in answers).items())}
    odd = [
        f"{one.case}: {one.code} {one.said}"
        for one in answers
        if one.wrong or one.crashed or one.code in {FAILURE, USAGE}
    ]
    if given.dry:
        for line in (*map(str, figures(answers)), str(codes), *odd):
            typer.echo(line)
        return
    refused = sum(one.code == USAGE for one in answers)
    details = {"exit codes": codes, "refused before anything ran": refused, "odd": odd}
    record("styles", "python -m benchmarks.reliability.styles", figures(answers), details)


if __name__ == "__main__":
    main()
