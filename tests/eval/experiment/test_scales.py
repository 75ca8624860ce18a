"""Experiments at a scale: what is cut, by which rule, and what a config says of that itself."""

import dataclasses
import math
from pathlib import Path

import pytest
from support.runs import tiny
from support.tiny import CONFIG, Registered

from eval.experiment import yaml_config
from eval.experiment.scale_names import SCALES
from eval.experiment.scales import RULES, Cut, OwnScales, at_scale, parse_scales, read_scales

PAPER = (
    "seeds=[0, 1, 2]",
    "federation={partition: {name: iid, clients: 50, train_size: 600, test_size: 300}, rounds: 200, "
    "evaluate_every: 20, client_fraction: 0.3}",
    "observe={images: 50, batch_size: 1, rounds: [0, 50, 200], method: {steps: 1}}",
    "method=[{name: fedavg, lr: 0.1}, {name: pfedsim, warmup: 75}, "
    "{name: fedavg, as: long, with: {federation.rounds: 4000, federation.partition.clients: 8}}]",
    "attack=[{name: ig, iterations: 4000}, {name: ig, as: batch, iterations: 300, with: {observe.batch_size: 10}}, "
    "{name: rog, as: own, with: {observe.rounds: [0, 200]}}]",
)


ONE = ("observe.method={steps: 1}", "attack=guess")


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def paper():
    return tiny(*PAPER)


@pytest.mark.parametrize(
    ("cut", "number", "left"),
    [
        (Cut(), 7, 7),
        (Cut(most=2), 7, 2),
        (Cut(share=0.1), 7, 1),
        (Cut(share=0.1, least=2), 200, 20),
        (Cut(share=0.1, least=2), 1, 1),  # never more than there was
        (Cut(share=0.5, least=2, most=20), 100, 20),
    ],
)
def test_a_cut_leaves_a_share_within_limits(cut, number, left):
    assert cut.of(number) == left


def test_small_is_a_tenth_of_the_rounds_and_fewer_of_everything():
    small = at_scale(paper(), "small")
    assert small.seeds == (0,)
    assert (small.federation.rounds, small.federation.evaluate_every) == (20, 20)
    assert small.federation.client_fraction == 0.3
    partition = small.federation.partition
    assert (partition.clients, partition.train_size, partition.test_size) == (20, 200, 100)
    assert (small.observe.images, small.observe.rounds) == (8, (0, 20))
    _, pfedsim, long = small.method
    assert pfedsim.item.warmup == 8
    assert long.changes == {"federation.rounds": 400, "federation.partition.clients": 4}
    ig, batch, own = small.attack
    assert (ig.item.iterations, batch.item.iterations) == (400, 100)
    assert batch.changes == {"observe.batch_size": 10, "observe.images": 10}
    assert own.changes == {"observe.rounds": [0, 20]}


def test_smoke_is_a_round_of_two_clients():
    smoke = at_scale(paper(), "smoke")
    assert (smoke.federation.rounds, smoke.federation.partition.clients, smoke.seeds) == (1, 2, (0,))
    assert (smoke.observe.images, smoke.observe.rounds) == (1, (0, 1))
    assert smoke.attack[0].item.iterations == 5
    assert at_scale(tiny("federation.rounds=0"), "smoke").federation.rounds == 0


def test_clients_that_never_take_part_are_cut_by_themselves():
    cut = at_scale(tiny("federation.partition.clients=15", "federation.held_out_clients=5"), "smoke").federation
    assert (cut.partition.clients, cut.held_out_clients) == (3, 1)


def test_what_the_partition_does_not_size_is_cut_by_the_data_set():
    plain = at_scale(
        tiny("task.dataset={name: pooled, source: mnist}", "federation.partition={name: dirichlet, clients: 100}"),
        "smoke",
    )
    assert (plain.task.dataset.source.limit, plain.task.dataset.source.test_limit) == (200, 40)


def test_what_a_method_has_of_its_own_is_cut_as_well():
    own = "{federation.partition: {name: iid, clients: 100, train_size: 600}, task.dataset.test_limit: 4800}"
    cut = at_scale(tiny(*ONE, "task.dataset=mnist", f"method=[{{name: fedavg, lr: 0.1, with: {own}}}]"), "smoke")
    assert cut.method[0].changes == {
        "federation.partition": {"name": "iid", "clients": 2, "train_size": 100},
        "task.dataset.test_limit": 40,
    }
    sizes = "{federation.partition.train_size: 600, federation.held_out_clients: 3}"
    nine = tiny(*ONE, "federation.partition.clients=9", f"method=[{{name: fedavg, lr: 0.1, with: {sizes}}}]")
    both = at_scale(nine, "smoke")
    assert both.method[0].changes == {"federation.partition.train_size": 100, "federation.held_out_clients": 1}


def test_the_papers_scale_changes_nothing():
    assert at_scale(paper(), "paper") == paper()


def test_a_config_says_what_differs_at_a_scale():
    own = parse_scales({"smoke": {"federation.rounds": 3, "method.fedavg.lr": 0.5}})
    smoke = at_scale(paper(), "smoke", own)
    assert smoke.federation.rounds == 3
    assert smoke.method[0].item.lr == 0.5
    assert at_scale(paper(), "small", own).federation.rounds == 20


def test_a_config_smaller_than_the_paper_is_its_own_scale():
    own = parse_scales({"config": "small", "paper": {"federation.rounds": 2000}})
    assert own.scales == SCALES
    assert at_scale(paper(), "small", own) == paper()
    assert at_scale(paper(), "paper", own).federation.rounds == 2000
    assert at_scale(paper(), "smoke", own).federation.rounds == 1
    alone = OwnScales(config="small")
    assert alone.scales == ("smoke", "small")
    with pytest.raises(ValueError, match="none as large as the paper's"):
        at_scale(paper(), "paper", alone)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{smal: {}}", "did you mean 'small'"),
        ("{config: smal}", "did you mean 'small'"),
        ("{small: 3}", "scales.small: expected settings"),
        ("3", "scales: expected settings"),
    ],
)
def test_other_sections_are_refused_wherever_the_config_is_read(text, said, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"{CONFIG}\nscales: {text}\n")
    for read in (read_scales, yaml_config.load):
        with pytest.raises(ValueError, match=said):
            read(path)


def test_an_experiment_is_the_same_whatever_its_config_says_of_scales(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"{CONFIG}\nscales: {{small: {{federation.rounds: 1}}}}\n")
    assert yaml_config.load(path) == tiny()
    assert read_scales(path).changes == {"small": {"federation.rounds": 1}}


DESCRIBED = {
    "rounds": "rounds",
    "clients that take part": "clients",
    "held-out clients": "held_out",
    "training images of a client": "train_images",
    "test images of a client": "test_images",
    "attacked images of a client": "images",
    "iterations of a search": "iterations",
    "seeds": "seeds",
}
SHARES = {1.0: "", 0.5: "half", 0.1: "a tenth"}


def words(cut: Cut) -> str:
    """A rule as the page on papers has it."""
    least = f"at least {cut.least}" if cut.least > 1 else ""
    most = "" if math.isinf(cut.most) else f"at most {cut.most}"
    return ", ".join(filter(None, [SHARES[cut.share], least, most]))


def test_the_page_on_papers_has_every_rule_of_every_scale():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "redo-a-paper.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    start = rows.index(["", *SCALES]) + 2
    table = {row[0]: dict(zip(SCALES, row[1:], strict=True)) for row in rows[start:] if len(row) == 1 + len(SCALES)}
    rules = {DESCRIBED[name]: cells for name, cells in table.items()}
    assert set(rules) == {field.name for field in dataclasses.fields(RULES["smoke"])}
    for key, cells in rules.items():
        assert cells == {**{scale: words(getattr(own, key)) for scale, own in RULES.items()}, "paper": "as there"}, key
