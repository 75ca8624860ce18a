"""Every committed config is read, fits together, and sets published figures beside something that it runs."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from eval.experiment import sweep, yaml_config
from eval.experiment.spec import ACCURACIES, Entry, Experiment, FederationSpec
from fl.simulation.protocol import OPTIONAL_SCORES

CONFIGS = Path(__file__).parents[3] / "configs"
PATHS = sorted(CONFIGS.rglob("*.yaml"))
OF_COSTS = ("cpr", "communication_share", "seconds", "rounds_to_accuracy")
PAPERS = {
    "hfedf": "hFedF (Bartholet et al., 2024)",
    "hyperfednet": "HyperFedNet (Chen et al., 2024)",
    "hyperfedzero": "HyperFedZero (Zhou et al., 2025)",
    "hyperfl": "HyperFL (Guo et al., 2025)",
    "hypergenfl": "HyperGenFL (Chen et al., 2025)",
}
every = pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(CONFIGS).with_suffix("")))


@cache
def loaded(path: Path) -> Experiment:
    return yaml_config.load(path)


_ENTRIES: dict[tuple[int, int, int], Experiment] = {}


def entry_of(found: Experiment, method: Entry, attack: Entry | None) -> Experiment:
    """The experiment of one entry of a committed config, made once."""
    key = (id(found), id(method), id(attack))  # what is loaded stays
    if key not in _ENTRIES:
        _ENTRIES[key] = sweep.experiment_of(found, method, attack)
    return _ENTRIES[key]


def called(label: str, entry: Entry) -> bool:
    """Whether a label is an entry's, or that of what a sweep made the entry of."""
    return label in {entry.label, entry.label.partition("@")[0]}


def test_there_are_configs_for_every_paper():
    assert {path.parent.name for path in PATHS if path.parent.parent == CONFIGS / "reproduce"} == set(PAPERS)


@every
def test_it_is_read_and_its_entries_fit_the_rest(path):
    found = loaded(path)
    assert found.title
    for method in found.method:
        own = entry_of(found, method, None)
        assert own.federation.fine_tune_epochs or not asked(found, method, "tuned")
        assert own.federation.held_out_clients or not asked(found, method, "unseen")
        assert own.federation.global_test or not asked(found, method, "global")
        for attack in found.attack:
            if not attack.against or method.label in attack.against:
                entry_of(found, method, attack)


def asked(found: Experiment, method: Entry, kind: str) -> bool:
    """Whether figures of this kind, which a federation takes only where it is told to, are published of a method."""
    own = [figures for figures in found.published if called(figures.method, method)]
    return any(
        getattr(figures, f"accuracy_{name}") is not None for figures in own for name in OPTIONAL_SCORES if kind in name
    )


@every
def test_published_figures_are_of_what_is_run(path):
    found = loaded(path)
    for figures in found.published:
        methods = [entry for entry in found.method if called(figures.method, entry)]
        assert methods, figures.method
        if figures.attack is None:
            continue
        attacks = [entry for entry in found.attack if called(figures.attack, entry)]
        assert attacks, figures.attack
        for method in methods:
            run_on = [not attack.against or method.label in attack.against for attack in attacks]
            assert any(run_on), f"{figures.attack} is not run on {method.label}"


@every
def test_published_figures_have_a_source_and_are_in_range(path):
    found = loaded(path)
    seen = set()
    for figures in found.published:
        assert path.parent.name not in PAPERS or figures.source.startswith(PAPERS[path.parent.name])
        given = [value for name in ACCURACIES if (value := getattr(figures, name)) is not None]
        assert all(0 <= value <= 1 for value in given)
        pictures = [figures.psnr, figures.ssim, figures.lpips]
        costs = [value for name in OF_COSTS if (value := getattr(figures, name)) not in (None, {})]
        assert given or costs or any(value is not None for value in pictures), figures.method
        assert (figures.attack is not None) or pictures == [None] * 3, "figures of pictures need an attack"
        assert figures.psnr is None or 0 < figures.psnr <= 100
        assert figures.ssim is None or -1 <= figures.ssim <= 1
        assert figures.lpips is None or 0 <= figures.lpips <= 2
        key = (figures.method, figures.attack, figures.source)
        assert key not in seen, f"{key} is there twice"
        seen.add(key)


@every
def test_what_is_published_of_rounds_can_be_had(path):
    found = loaded(path)
    for figures in found.published:
        (method, *_) = [entry for entry in found.method if called(figures.method, entry)]
        own = entry_of(found, method, None).federation
        if figures.rounds_to_accuracy:
            assert own.evaluate_every == 1, "an accuracy is reached in rounds that are scored"
            assert set(figures.rounds_to_accuracy) <= set(found.score.target_accuracies)
            assert max(rounds or 0 for rounds in figures.rounds_to_accuracy.values()) <= own.rounds
        if figures.rounds_to_accuracy or figures.communication_share is not None:
            assert asked_for(found.score.target_metric, own)


def asked_for(accuracy: str, own: FederationSpec) -> bool:
    """Whether a federation takes this accuracy."""
    name = accuracy.removeprefix("accuracy").removeprefix("_")
    return {"": True, "local": True, "tuned": bool(own.fine_tune_epochs), "global": own.global_test}.get(
        name, bool(own.held_out_clients)
    )


def test_hypergenfl_is_compared_with_the_best_round_as_the_paper_takes_it():
    found = [figures for path in PATHS if path.parent.name == "hypergenfl" for figures in loaded(path).published]
    assert found
    assert all(figures.best for figures in found)


def listed(paper: str) -> list[str]:
    """Names and patterns of configs in the list of a paper's tables and figures."""
    page = (CONFIGS.parent / "docs" / "results" / "papers.md").read_text()
    rows = page.split(f"\n## {PAPERS[paper].split()[0]}\n")[1].split("\n## ")[0]
    return re.findall(r"`((?:dp-)?(?:table|figure)[^`]*)`", rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_list_of_tables_and_figures_names_every_config_and_no_other(paper):
    names = {path.stem for path in PATHS if path.parent.name == paper and not path.stem.startswith("curves-")}
    patterns = listed(paper)
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("method", "fedagv", "did you mean"), ("attack", "gi", "did you mean"), ("accuracy", 73.03, "a number in")],
)
def test_a_wrong_label_or_a_percentage_is_not_read(key, value, said):
    base = {"task": {"dataset": "faces", "model": "tiny"}, "method": ["fedavg"], "attack": ["ig"]}
    figures = {"method": "fedavg", "attack": "ig", "accuracy": 0.7, "source": "Paper, Table 1", key: value}
    with pytest.raises(ValueError, match=said):
        yaml_config.read({**base, "published": [figures]})
