"""Clients watched on images that none has trained on (`observe.split`)."""

import pytest
import torch
from support.runs import run, tiny
from support.tiny import Registered

from eval.report.assemble import build_report
from eval.run import runner


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def victims(*overrides):
    plan = runner.prepare(tiny("observe.split=test", *overrides), device="cpu")
    return plan.trainings[0].data, plan.trainings[0].attack_tasks[0].observation_spec.targets


def test_clients_may_be_watched_on_images_that_none_has_trained_on(tmp_path):
    rows = run(tiny("observe.split=test", "observe.images=2", "observe.batch_size=1", "attack=guess"), tmp_path / "a")
    world, found = victims("observe.images=2", "observe.batch_size=1")
    for victim in found:
        assert torch.isin(victim.samples, world.partition.test[0]).all()
        assert torch.equal(victim.data.inputs, world.dataset.test.take(victim.samples).inputs)
    named = [f"0:test/{int(victim.samples)}" for victim in found]
    assert [row["picture"] for row in rows if row["method"] == "fedavg"] == named
    assert [victim.key for victim in found] == named
    with pytest.raises(ValueError, match=r"observe.images: expected at most the \d+ test images of client 0, got 9000"):
        victims("observe.images=9000", "observe.batch_size=1")
    with pytest.raises(ValueError, match=r"observe\.split"):
        tiny("observe.split=both")


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_report_says_whether_images_were_new(part, tmp_path):
    run(tiny(f"observe.split={part}", "observe.images=2", "observe.batch_size=1", "attack=guess"), tmp_path / "a")
    new = " test images that no client trained on" if part == "test" else ""
    assert dict(build_report(tmp_path / "a").facts)["Images"] == f"2{new}, 1 per update"


def test_the_choice_of_part_renames_no_cell_from_before_there_was_one():
    def settings(*words):
        return runner.prepare(tiny(*words), device="cpu").trainings[0].attack_tasks[0].cell.settings["observe"]

    assert "part" not in settings()
    assert settings("observe.split=test", "observe.images=2")["part"] == "test"


SAME = "{name: lti, iterations: 2, batch_size: 2, width: 4, hash_size: 16, auxiliary: {name: faces, size: 8}, part: %s}"


@pytest.mark.parametrize("attack", [SAME, SAME.replace("lti", "first-step+lti")])
@pytest.mark.parametrize("part", ["train", "test"])
def test_an_attacker_has_none_of_the_watched_images_beforehand(part, attack):
    other = {"train": "test", "test": "train"}[part]
    common = (f"observe.split={part}", "observe.images=2", "observe.batch_size=1")
    runner.prepare(tiny(*common, f"attack={attack % other}"), device="cpu")
    with pytest.raises(ValueError, match=r"lti': expected images that are not attacked, got 2 of the 2 watched ones"):
        runner.prepare(tiny(*common, f"attack={attack % part}"), device="cpu")
