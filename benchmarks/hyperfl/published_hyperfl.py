"""HyperFL's algorithm as published, whole.

Run it by `python -m benchmarks.hyperfl.published_hyperfl --rows FILE` (needs HYPERLEAK_DATA).

Algorithm 1 trains the classifier for an epoch before hypernetwork and embedding move. That epoch makes the network
certain of the images it then sends an update of, so it is measured here and not left out. Rows are kept in FILE as they
are measured; the same command goes on where it was stopped. `--page` writes the page from the rows there are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch

import fl.data
import fl.models
from attacks.base import NotApplicable, Reconstruction, build
from attacks.hypernetworks.peel import HypernetPeel
from benchmarks.common import publish, table
from benchmarks.exact.cascade import FIRST, SETS, score_image
from benchmarks.hyperfl.peel import error, uploaded
from eval.metrics.baselines import baseline_images
from eval.metrics.image import psnr
from eval.metrics.matching import assign
from fl.client import Client
from fl.data import Dataset
from fl.data.partitions.dominant_classes import DominantGroups
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.simulation.client_round import prepare, train
from fl.tensors import dense
from fl.types import Batch, Truth
from fl.view import ServerView

LEARNING_RATES = {"fashion_mnist": 0.01, "handwritten62": 0.01, "cifar10": 0.02}
"""Of hypernetwork and embedding, from the authors' code; the classifier's is 0.1."""
INITIALIZATIONS = ("published", "scaled")
IMAGES = 10
CLIENT_IMAGES = {"fashion_mnist": 600, "handwritten62": 600, "cifar10": 592}
"""Training images of a client: as published, or as many as the set allows."""
SEARCH = {"name": "peel+ig", "iterations": 500}
LOCAL = {"name": "peel+surrogate+ig", "iterations": 200}
ROUND_SIZES = ("1", "50", "all")
ROUND_CLIENTS = 5
Classifier = Literal["same images", "all images", "at rest"]


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        dataset: whose images.
        method: "HyperFL", or "FedAvg" beside it.
        init: of the hypernetwork's heads.
        classifier: what its epoch before the update sees: the images of the update, all images of the client, or
            nothing, as it stays at rest.
        work: of hypernetwork and embedding: "step" or "round" (5 epochs).
        images: that the update is of: "1", "50" or "all" of the client's.
        normalize: whether the network normalizes its input.
        number: of the image or client.
    """

    dataset: str
    method: str
    init: str
    classifier: Classifier
    work: str
    images: str
    normalize: bool
    number: int


def cases() -> Iterator[Case]:
    """All measurements, those of one gray image first."""
    for dataset in SETS:
        for number in range(IMAGES):
            for init in INITIALIZATIONS:
                for classifier in ("same images", "all images", "at rest"):
                    yield Case(dataset, "HyperFL", init, classifier, "step", "1", True, number)
        for number in range(ROUND_CLIENTS):
            for init in INITIALIZATIONS:
                yield Case(dataset, "HyperFL", init, "same images", "step", "50", True, number)
                for size in ROUND_SIZES:
                    yield Case(dataset, "HyperFL", init, "same images", "round", size, True, number)
    for number in range(IMAGES):
        for normalize in (True, False):
            yield Case("cifar10", "FedAvg", "-", "at rest", "step", "1", normalize, number)
        yield Case("cifar10", "HyperFL", "scaled", "at rest", "step", "1", False, number)


def measure(case: Case, data: Dataset) -> dict[str, Any]:
    """Return the row of one case."""
    federation, rule, images = _victim(case, data)
    began = time.process_time()
    view, truth = federation.observe(0, data=images, client=Client(federation.client.base, rule))
    row: dict[str, Any] = asdict(case)
    if isinstance(rule, HyperFL):
        view = uploaded(view)
        row |= _peeled(federation, view, truth)
    if case.images == "1":
        exact = build(_exact(case))(view)
        row |= score_image(exact, images)
        if isinstance(exact, Reconstruction):
            row["verified"] = bool(exact.verified)
        if case.work == "round":
            row["search"] = _searched(SEARCH, view, images, case.number)
    elif case.images == "50" and case.work == "round" and case.number == 0:
        row["search"] = _searched(LOCAL, view, images, case.number)
    if "search" in row:
        row["floor"] = float(psnr(baseline_images(images.inputs)["mean"], images.inputs).mean())
    return {**row, "seconds": time.process_time() - began}


def _peeled(federation: Federation, view: ServerView, truth: Truth) -> dict[str, Any]:
    """Return what `peel` makes of a client's update, and how many units of its hypernetwork were active."""
    method = federation.client.method
    assert isinstance(method.parametrization, Hypernetwork)
    params = {**federation.download(0).shared, **federation.clients[0].private}
    row: dict[str, Any] = {"active": int((method.parametrization.preactivation(params) > 0).sum())}
    peeled = HypernetPeel().solve(view)
    row["signal"] = not isinstance(peeled, NotApplicable)
    if isinstance(peeled, NotApplicable):
        return {**row, "peel": peeled.reason}
    found, true = (
        torch.cat([part[n].flatten() for n in truth.extractor]) for part in (peeled.extractor, truth.extractor)
    )
    row |= {"extractor": error(found, true), "peel_verified": bool(peeled.verified)}
    if peeled.embedding is not None:
        row["embedding"] = error(peeled.embedding.float(), dense(truth.private[EMBEDDING]))
    return row


def _exact(case: Case) -> str:
    """Return the attack that solves for the picture."""
    if case.method == "FedAvg":
        return "cascade"
    return "peel+cascade" if case.work == "step" else "peel+surrogate+cascade"


def _searched(attack: Mapping[str, Any], view: Any, images: Batch, seed: int) -> float | str:
    """Return mean PSNR of a search, or why there is none."""
    result = build(attack)(view, seed=seed)
    if isinstance(result, NotApplicable) or result.inputs is None:
        return getattr(result, "reason", "no image")
    pairs = [(found, true) for true, found in enumerate(assign(result.inputs, images.inputs)) if found is not None]
    found, true = (torch.tensor(part) for part in zip(*pairs, strict=True))
    return float(psnr(result.inputs[found], images.inputs[true]).mean())


def _victim(case: Case, data: Dataset) -> tuple[Federation, Method, Batch]:
    """Return the client before its update, the local rule of the update and the images it is of."""
    rate = LEARNING_RATES[case.dataset] if case.method == "HyperFL" else 0.02
    task = fl.models.build(SETS[case.dataset], num_classes=data.num_classes, seed=case.number, normalize=case.normalize)
    if case.method == "FedAvg":
        image = data.test.take(torch.tensor([FIRST[case.dataset] + case.number]))
        plain = FedAvg(lr=rate, steps=1)
        return Federation(Client(task, plain), [ClientData(image, image)], seed=case.number), plain, image
    method = HyperFL(lr=rate, parametrization=Hypernetwork(init=case.init))  # type: ignore[arg-type]
    own = _client_images(case, data)
    federation = Federation(Client(task, method), [ClientData(own, own)], seed=case.number)
    if case.work == "round":
        count = len(own) if case.images == "all" else int(case.images)
        return federation, method, own.take(torch.arange(count))
    one = replace(method, steps=1, batch_size=None)
    if case.images != "1":
        return federation, one, own.take(torch.arange(int(case.images)))
    image = data.test.take(torch.tensor([FIRST[case.dataset] + case.number]))
    if case.classifier == "same images":
        return federation, one, image
    if case.classifier == "all images":
        first = method.phases(federation.client.task, 0)[:1]
        start = prepare(federation.client, federation.clients[0], federation.download(0), own, phases=first)
        federation.clients[0] = train(start).state
    return federation, replace(one, head_epochs=0), image


def _client_images(case: Case, data: Dataset) -> Batch:
    """Return the training images of client `number`, in HyperFL's groups of dominant classes."""
    size = CLIENT_IMAGES[case.dataset]
    if case.dataset == "handwritten62":  # too few of a class for its groups: any 600
        some = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(case.number))[:size]
        return data.train.take(some)
    split = DominantGroups(train_size=size, test_size=min(size, 197))(data)
    return data.train.take(split.train[case.number])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are there; a last one cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _group(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _middle(rows: Sequence[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if isinstance(row.get(key), float)]
    return f"{median(values):.1e}" if values else "-"


def _pictures(rows: Sequence[dict[str, Any]]) -> list[object]:
    """Counts of what came back of single images."""
    found = [row for row in rows if "psnr" in row]
    wrong = sum(bool(row.get("verified")) and not row["exact"] for row in found)
    return [
        sum(row["exact"] for row in found),
        sum(row["psnr"] > 40 for row in found),
        sum(bool(row.get("verified")) for row in found),
        wrong,
    ]


WORDS = {
    "same images": "the same image",
    "all images": "all images of the client",
    "at rest": "nothing (at rest)",
}
"""What the classifier's epoch sees, as the page has it."""


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many pictures come back of one step on one image, over all sets."""
    body = []
    for init in INITIALIZATIONS:
        for classifier, words in WORDS.items():
            own = _group(rows, method="HyperFL", init=init, classifier=classifier, work="step", images="1")
            own = _group(own, normalize=True)
            if own:
                close = sum(row.get("psnr", 0) > 40 for row in own)
                body.append([f"`{init}`", words, f"{close} of {len(own)}"])
    return table(["init", "classifier's epoch on", "pictures above 40 dB"], body) if body else []


def document(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the page."""
    return [
        "# HyperFL's algorithm as published, whole",
        "",
        "`python -m benchmarks.hyperfl.published_hyperfl --rows FILE`, with `HYPERLEAK_DATA` set, measures this page.",
        "",
        "Algorithm 1 trains the classifier for an epoch (SGD, 0.1) and then moves hypernetwork and embedding. The",
        "tables show what one client's first update gives away, with that epoch and with the classifier at rest",
        "(`head_epochs: 0`). Constants are the authors': momentum .5 and weight decay 5e-4. Gradients are clipped at",
        "50, and batches are of 50. Hypernetwork and embedding move by 0.01 in gray and 0.02 in color. The networks",
        "normalize their inputs. Uploads are differences of float32 weights. Networks are untrained. `cascade` uses no",
        "total variation, the searches their default of 3e-3. Clients have the published groups of classes: in",
        "CIFAR-10",
        "592 images, as there are no more, and in handwriting any 600.",
        "",
        *summary(rows),
        "",
        *_single_images(rows),
        *_rounds(rows),
        *_normalization(rows),
    ]


def _single_images(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section on one step on one image."""
    head = ["images", "init", "classifier's epoch on", "tried", "a gradient arrives", "embedding", "extractor"]
    head += ["exact", "above 40 dB", "verified", "verified wrongly"]
    body = []
    for dataset, init, classifier in product(SETS, INITIALIZATIONS, WORDS):
        own = _group(rows, dataset=dataset, init=init, classifier=classifier, work="step", images="1")
        own = _group(own, normalize=True, method="HyperFL")
        if own:
            arrives = sum(row["signal"] for row in own)
            errors = [_middle(own, "embedding"), _middle(own, "extractor")]
            body.append([dataset, init, WORDS[classifier], len(own), arrives, *errors, *_pictures(own)])
    return [
        "## One step on one image",
        "",
        "Ten test images a row, each meets a network of its own. A gradient arrives where the hypernetwork's update is",
        "more than weight decay and rounding. `peel+cascade` finds the picture; exact is to the 8-bit pixel.",
        "",
        *table(head, body),
        "",
        "Errors are relative, medians over what could be peeled.",
        "",
    ]


def _rounds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section on whole rounds, and on a step on fifty images."""
    head = ["images", "init", "work", "on", "clients", "a gradient arrives", "active", "embedding", "extractor"]
    head += ["peel verified", "exact", "above 40 dB", "search, dB", "baseline, dB"]
    works = (("step", "50"), *(("round", size) for size in ROUND_SIZES))
    body = []
    for dataset, init, (work, size) in product(SETS, INITIALIZATIONS, works):
        own = _group(rows, dataset=dataset, init=init, work=work, images=size, method="HyperFL")
        if own:
            body.append(_round_line(own, size))
    return [
        "## Whole rounds, and a step on fifty images",
        "",
        "The classifier's epoch comes first and sees the same images. Active units are those of 128 at the start.",
        "A round is five epochs. `peel+surrogate+cascade` finds pictures of single images, which takes the round for",
        "one step; what solves exactly for several steps needs the classifier. Searches: `peel+ig` with 500",
        "iterations on single images, `peel+surrogate+ig` with 200 on one client of fifty. Their figures are means,",
        "over as many pictures; the baseline is each image's mean color. A dash was not measured, or no gradient "
        "arrived.",
        "",
        *table(head, body),
        "",
    ]


def _round_line(own: Sequence[dict[str, Any]], size: str) -> list[object]:
    """Return the line of one kind of round."""
    first = own[0]
    searched = [row for row in own if isinstance(row.get("search"), float)]
    means = [f"{mean(row[key] for row in searched):.1f}" if searched else "-" for key in ("search", "floor")]
    return [
        *(first["dataset"], first["init"], first["work"]),
        str(CLIENT_IMAGES[first["dataset"]]) if size == "all" else size,
        len(own),
        sum(row["signal"] for row in own),
        f"{median(row['active'] for row in own):g}",
        _middle(own, "embedding"),
        _middle(own, "extractor"),
        sum(bool(row.get("peel_verified")) for row in own),
        *(_pictures(own)[:2] if size == "1" else ["-", "-"]),
        *means,
    ]


def _normalization(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section on normalized inputs."""
    head = ["method", "normalized", "tried", "exact", "above 40 dB", "verified", "verified wrongly"]
    body = []
    for (method, init), normalize in product((("FedAvg", "-"), ("HyperFL", "scaled")), (True, False)):
        own = _group(rows, dataset="cifar10", method=method, init=init, classifier="at rest", normalize=normalize)
        if own:
            body.append([method, "yes" if normalize else "no", len(own), *_pictures(own)])
    return [
        "## Normalized inputs and float32's rounding",
        "",
        "CIFAR-10, one step of 0.02 on one image, classifier at rest, scaled heads. An update is a difference of",
        "float32 weights, whose rounding hides the last digits of a gradient. FedAvg sends each number of it once,",
        "HyperFL once for every active unit.",
        "",
        *table(head, body),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="file of the rows, which grows")
    parser.add_argument("--page", action="store_true", help="write the page only")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(asked.rows)
    done = {json.dumps({key: row[key] for key in Case.__annotations__}) for row in rows}
    if not asked.page:
        loaded: dict[str, Dataset] = {}
        with asked.rows.open("a", encoding="utf-8") as file:
            for case in cases():
                if json.dumps(asdict(case)) in done:
                    continue
                if case.dataset not in loaded:
                    loaded[case.dataset] = fl.data.load(case.dataset)
                rows.append(measure(case, loaded[case.dataset]))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    publish("published_hyperfl", {"rows": rows}, document(rows))


if __name__ == "__main__":
    main()
