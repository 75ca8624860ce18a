"""Rounds and numbers until an accuracy, against counts by hand, and beside a paper's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fakerun import CONFIG, FakeRun

from eval.experiment import yaml_config
from eval.report.assemble import build_report
from eval.report.blocks import DefinitionList, TableBlock
from eval.report.formatting import NO_VALUE
from eval.report.load import load
from eval.report.sections import rounds_to_accuracy
from eval.report.sections.rounds_to_accuracy import Milestone, best_round, first_reaching

UP, DOWN = 1000, 2000  # of every round of a `FakeRun`


def rows(*course: float | None, up: int = 10, down: int = 3) -> list[dict[str, float | None]]:
    """A training in which the server sends one more number after every round."""
    return [
        {"round": n, "accuracy": accuracy, "numbers_up": up if n else 0, "numbers_down": down + n}
        for n, accuracy in enumerate(course)
    ]


def test_a_level_is_reached_in_the_first_round_at_or_above_it() -> None:
    found = rows(0.1, 0.3, None, 0.5, 0.4, 0.6)
    assert first_reaching(found, "accuracy", 0.1) == Milestone(0, 0)  # before anything was sent
    assert first_reaching(found, "accuracy", 0.2) == Milestone(1, 3 + 10)  # received before round 1, sent in it
    assert first_reaching(found, "accuracy", 0.5) == Milestone(
        3, 3 + 4 + 5 + 30
    )  # round 2 counts, though it was not scored
    assert first_reaching(found, "accuracy", 0.6) == Milestone(5, 3 + 4 + 5 + 6 + 7 + 50)
    assert first_reaching(found, "accuracy", 0.61) is None
    assert first_reaching(found, "accuracy_tuned", 0.1) is None


def test_the_best_round_is_the_first_of_equals() -> None:
    assert best_round(rows(0.1, 0.6, 0.5, 0.6), "accuracy") == Milestone(1, 13)
    assert best_round(rows(None, None), "accuracy") is None


def built(tmp_path: Path, words: str, *trainings: tuple[str, list[float], int]) -> FakeRun:
    run = FakeRun()
    for method, course, seed in trainings:
        run.train(method, course, seed=seed)
        run.attack(method, "ig", [20.0], seed=seed, accuracy=course[-1])
    run.config = CONFIG.replace("score: {lpips: auto}", words)
    run.write(tmp_path / "run")
    return run


def grid(folder: Path, caption: str) -> TableBlock | None:
    blocks = [block for section in build_report(folder).sections for block in section.blocks]
    return next((block for block in blocks if isinstance(block, TableBlock) and block.caption == caption), None)


COURSE = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3]  # rounds 0 to 10


def test_the_table_has_means_over_seeds_and_a_papers_rows(tmp_path: Path) -> None:
    words = """
score: {target_accuracies: [0.1, 0.3, 0.7]}
published:
- {method: hyperfl, rounds_to_accuracy: {0.1: 1, 0.3: 14, 0.7: null}, cpr: 0.57e6, source: Table III}
"""
    slow = [0.1, 0.1, *COURSE[:-2]]
    lower = [0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    ours = [("fedavg", COURSE, 0), ("fedavg", slow, 1), ("hyperfl", COURSE, 0), ("hyperfl", lower, 1)]
    built(tmp_path, words, *ours)
    found = grid(tmp_path / "run", "Rounds until an accuracy")
    assert found is not None
    assert [name.replace("\N{NO-BREAK SPACE}", "") for name in found.column_names[3:]] == [
        "10%",
        "30%",
        "70%",
        "its best",
    ]
    assert found.rows == [
        ["fedavg", "none", "here", "0 (0.00 M)", "3 (0.01 M)", "7 (0.02 M)", "7 (0.02 M)"],
        ["hyperfl", "none", "here", "0 (0.00 M)", "3 (0.01 M)", "1 of 2 seeds", "5 (0.01 M)"],
        ["hyperfl", "none", "Table III", "1 (0.57 M)", "14 (7.98 M)", NO_VALUE, NO_VALUE],
    ]


def test_without_levels_there_is_no_table_and_a_paper_may_name_them(tmp_path: Path) -> None:
    built(tmp_path / "a", "score: {lpips: auto}", ("fedavg", COURSE, 0))
    assert grid(tmp_path / "a" / "run", "Rounds until an accuracy") is None
    words = "published:\n- {method: fedavg, rounds_to_accuracy: {0.2: 3}, source: Table III}\n"
    built(tmp_path / "b", words, ("fedavg", COURSE, 0))
    found = grid(tmp_path / "b" / "run", "Rounds until an accuracy")
    assert found is not None
    assert [row[3] for row in found.rows] == ["1 (0.00 M)", "3"]
    assert grid(tmp_path / "b" / "run", "Published figures and ours") is None  # it would hold nothing


def test_what_a_method_takes_until_its_best_round_as_a_share_of_anothers(tmp_path: Path) -> None:
    words = """
published:
- {method: hyperfl, communication_share: 0.1515, reference_method: fedavg, source: Table IV}
- {method: fedavg, accuracy: 0.8, best: true, cpr: 155508, seconds: 23, source: Table II}
"""
    built(tmp_path, words, ("fedavg", COURSE, 0), ("hyperfl", [0.1, 0.2, 0.9, *[0.3] * 8], 0))
    run = load(tmp_path / "run")
    assert rounds_to_accuracy.communication_share(run, ("hyperfl", "none"), "fedavg") == pytest.approx(2 / 6)
    assert rounds_to_accuracy.communication_share(run, ("fedavg", "none"), "hyperfl") == pytest.approx(6 / 2)
    assert rounds_to_accuracy.communication_share(run, ("fedavg", "none"), "fedprox") is None
    found = grid(tmp_path / "run", "Published figures and ours")
    assert found is not None
    cells = [
        dict(zip(found.column_names[3::2], zip(row[3::2], row[4::2], strict=True), strict=True)) for row in found.rows
    ]
    of = {name.removesuffix(" there"): [one[name] for one in cells] for name in cells[0]}
    assert of["numbers until the best round, as a share of another's"][0] == (
        "15.15\N{NO-BREAK SPACE}%",
        "33.3\N{NO-BREAK SPACE}%",
    )
    assert of["numbers up and down a round"][1] == ("155,508", f"{UP + DOWN:,}")
    assert of["seconds a round"][1] == ("23.00", "0.50")
    assert of["accuracy, best round"][1][0] == "80.00\N{NO-BREAK SPACE}%"
    assert "accuracy after the last round" not in of


def test_a_papers_figures_are_of_all_that_a_sweep_made(tmp_path: Path) -> None:
    words = "published:\n- {method: fedavg, rounds_to_accuracy: {0.2: 3}, source: Table III}\n"
    courses = [("fedavg@lr=0.1", COURSE, 0), ("hyperfl@lr=0.1", [0.1, 0.2, 0.9, *[0.3] * 8], 0)]
    built(tmp_path, words, *courses, ("fedavg@lr=1", COURSE[::-1], 0), ("hyperfl@steps=1", COURSE, 0))
    found = grid(tmp_path / "run", "Rounds until an accuracy")
    assert found is not None
    assert [row[0] for row in found.rows if row[2] == "Table III"] == ["fedavg@lr=0.1", "fedavg@lr=1"]
    run = load(tmp_path / "run")
    assert rounds_to_accuracy.communication_share(run, ("hyperfl@lr=0.1", "none"), "fedavg") == pytest.approx(2 / 6)
    assert (
        rounds_to_accuracy.communication_share(run, ("hyperfl@steps=1", "none"), "fedavg") is None
    )  # of which one can't be told
    built(tmp_path / "one", words, ("fedavg@lr=0.1", COURSE, 0), ("hyperfl", COURSE, 0))
    assert rounds_to_accuracy.communication_share(load(tmp_path / "one" / "run"), ("hyperfl", "none"), "fedavg") == 1


def test_what_a_paper_adds_to_its_rounds_stands_once(tmp_path: Path) -> None:
    words = """
published:
- {method: fedavg, rounds_to_accuracy: {0.2: 3}, source: Table III, note: Never said of which}
- {method: fedavg, accuracy: 0.8, rounds_to_accuracy: {0.2: 3}, source: Table II, note: Of the other}
"""
    built(tmp_path, words, ("fedavg", COURSE, 0))
    sections = build_report(tmp_path / "run").sections
    items = [
        item
        for section in sections
        for block in section.blocks
        if isinstance(block, DefinitionList)
        for item in block.entries
    ]
    assert [item for item in items if "Never said" in item[1]] == [("fedavg, Table III", "Never said of which")]
    assert len([item for item in items if "Of the other" in item[1]]) == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("accuracy_tuned", {"fine_tune_epochs": 1}),
        ("accuracy_unseen", {"held_out_clients": 1}),
        ("accuracy_unseen_tuned", {"held_out_clients": 1, "fine_tune_epochs": 1}),
        ("accuracy_global", {"global_test": True}),
    ],
)
def test_levels_are_of_an_accuracy_that_is_taken(name: str, settings: dict[str, object]) -> None:
    asked = {**BASE, "score": {"target_metric": name}}
    assert yaml_config.read({**asked, "federation": settings}).score.target_metric == name
    for key in settings:
        with pytest.raises(ValueError, match=f"{name} is only taken with federation.{key}: set that first"):
            yaml_config.read({**asked, "federation": {k: v for k, v in settings.items() if k != key}})


def test_nobody_is_compared_with_one_that_was_best_before_training(tmp_path: Path) -> None:
    built(tmp_path, "score: {lpips: auto}", ("fedavg", [0.9, 0.2, 0.1], 0), ("hyperfl", COURSE, 0))
    assert rounds_to_accuracy.communication_share(load(tmp_path / "run"), ("hyperfl", "none"), "fedavg") is None


BASE = {"task": {"dataset": "faces", "model": "tiny"}, "method": ["fedavg", "hyperfl"]}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"rounds_to_accuracy": {70: 3}}, "published.rounds_to_accuracy: expected a number in"),
        ({"rounds_to_accuracy": {0.7: -1}}, "published.rounds_to_accuracy.0.7: expected a whole number >= 0"),
        ({"cpr": -1.0}, "published.cpr: expected a number >= 0"),
        ({"best": True}, "expected an accuracy beside it"),
        ({"communication_share": 0.5}, "expected both communication_share and reference_method"),
        ({"communication_share": 0.5, "reference_method": "hyperlf"}, "did you mean 'hyperfl'"),
    ],
)
def test_what_is_published_of_rounds_is_checked(figures: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        yaml_config.read({**BASE, "published": {"method": "fedavg", "source": "Table III", **figures}})


def test_levels_are_shares_and_survive_the_round_trip() -> None:
    figures = {"method": "fedavg", "source": "Table III", "rounds_to_accuracy": {0.1: 0, 0.7: None}, "cpr": 1.13e6}
    found = yaml_config.read(
        {**BASE, "score": {"target_accuracies": [0.1, 0.7], "target_metric": "accuracy_local"}, "published": figures}
    )
    assert yaml_config.read(yaml_config.to_plain(found)) == found
    assert found.published[0].rounds_to_accuracy == {0.1: 0, 0.7: None}
    with pytest.raises(ValueError, match=r"score\.target_accuracies\.0: expected a number in"):
        yaml_config.read({**BASE, "score": {"target_accuracies": [10]}})
