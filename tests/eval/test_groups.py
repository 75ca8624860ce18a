"""Runs under secure aggregation, from end to end."""

import pytest
from support.runs import run, tiny
from support.tiny import Registered

from eval import config, report


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


FAST = ("attack=ig", "attack.iterations=2", "federation.rounds=1", "observe.rounds=[1]")


def test_the_images_of_a_whole_group_are_attacked_and_scored(tmp_path):
    words = ("defense=secagg", "defense.clients=2", "observe.clients=[2]")
    rows = run(tiny(*FAST, *words), tmp_path / "a")
    assert {row["method"] for row in rows} == {"fedavg", "hyperfl"}
    for method in ("fedavg", "hyperfl"):
        mine = [row for row in rows if row["method"] == method]
        assert [row["picture"].split(":")[0] for row in mine] == ["2", "2", "0", "0"] * 2  # two updates of two groups
        assert len({row["picture"] for row in mine}) == 8
        for row in mine:
            assert row["images"] == 4
            assert row["forward_error"] < 1e-6
    hyperfl = [row["private_errors"] for row in rows if row["method"] == "hyperfl"]
    assert {name.split("/")[1] for name in hyperfl[0]} == {"0", "1"}
    report.write(tmp_path / "a")
    assert "no single update" in (tmp_path / "a" / "report.md").read_text()


def test_the_accuracy_is_that_without_it(tmp_path):
    both = {**config.plain(tiny(*FAST)), "defense": ["none", {"name": "secagg", "clients": 2}]}
    rows = run(config.read(both), tmp_path / "a")
    found = {(row["method"], row["defense"]): row["accuracy_last"] for row in rows}
    assert {defense for _, defense in found} == {"none", "secagg"}
    for method in ("fedavg", "hyperfl"):
        assert found[method, "secagg"] == found[method, "none"]


def test_a_group_larger_than_the_federation_is_refused(tmp_path):
    experiment = tiny(*FAST, "defense=secagg", "defense.clients=3", "federation.outsiders=1")
    with pytest.raises(ValueError, match="expected groups of at most the 2 clients that take part, got 3"):
        run(experiment, tmp_path / "a")
