"""Runs under secure aggregation, from end to end."""

import pytest
from support.runs import run, tiny
from support.tiny import Registered

from eval.experiment import yaml_config
from eval.report.writer import write_report


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


FAST = ("attack=ig", "attack.iterations=2", "federation.rounds=1", "observe.rounds=[1]")


def test_the_images_of_a_whole_group_are_attacked_and_scored(tmp_path):
    words = ("defense=secagg", "defense.group_size=2", "observe.clients=[2, 0]")
    rows = run(tiny(*FAST, *words), tmp_path / "a")
    assert {row["method"] for row in rows} == {"fedavg", "hyperfl"}
    for method in ("fedavg", "hyperfl"):
        mine = [row for row in rows if row["method"] == method]
        assert [row["picture"].split(":")[0] for row in mine] == ["0", "0", "1", "1", "2", "2"] * 2  # two updates
        assert len({row["picture"] for row in mine}) == 12
        for row in mine:
            assert row["images"] == 6
            assert row["forward_error"] < 1e-6
    hyperfl = [row["private_errors"] for row in rows if row["method"] == "hyperfl"]
    assert {name.split("/")[1] for name in hyperfl[0]} == {"0", "1", "2"}
    write_report(tmp_path / "a")
    told = (tmp_path / "a" / "report.md").read_text()
    assert "No single update" in told
    assert "groups of 2" in told


def test_the_accuracy_is_that_without_it(tmp_path):
    both = {**yaml_config.to_plain(tiny(*FAST)), "defense": ["none", {"name": "secagg", "group_size": 2}]}
    rows = run(yaml_config.read(both), tmp_path / "a")
    found = {(row["method"], row["defense"]): row["accuracy_last"] for row in rows}
    assert {defense for _, defense in found} == {"none", "secagg"}
    for method in ("fedavg", "hyperfl"):
        assert found[method, "secagg"] == found[method, "none"]


def test_a_run_goes_on_where_the_numbers_of_images_are_withheld(tmp_path):
    words = ("defense=secagg", "defense.group_size=2", "threat.knows_batch_size=false")
    rows = run(tiny(*FAST, *words), tmp_path / "a")
    assert rows
    assert all(row["not_applicable"] for row in rows)


def test_a_chain_is_reported_as_aggregated(tmp_path):
    parts = [{"name": "clip", "max_norm": 0.02}, {"name": "secagg", "group_size": 3}]
    chain = {"name": "chain", "parts": parts, "as": "both"}
    run(yaml_config.read({**yaml_config.to_plain(tiny(*FAST)), "defense": chain}), tmp_path / "a")
    write_report(tmp_path / "a")
    told = (tmp_path / "a" / "report.md").read_text()
    assert "groups of 3 (both)" in told
    assert "the update that comes back" not in told


def test_a_group_larger_than_the_federation_is_refused(tmp_path):
    experiment = tiny(*FAST, "defense=secagg", "defense.group_size=3", "federation.held_out_clients=1")
    with pytest.raises(ValueError, match="defense: expected groups of at most the 2 clients of a round, got 3"):
        run(experiment, tmp_path / "a")
    rare = tiny(*FAST, "defense=secagg", "defense.group_size=3", "federation.client_fraction=0.34")
    with pytest.raises(ValueError, match="defense: expected groups of at most the 1 clients of a round, got 3"):
        run(rare, tmp_path / "b")
