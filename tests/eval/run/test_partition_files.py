"""The partition that a run leaves: lists, words, and what is said where clients share images."""

import json
import shutil
from pathlib import Path

import pytest
from support.reports import blocks
from support.runs import run, tiny
from support.tiny import Registered

from eval.io.run_layout import PARTITIONS
from eval.report.assemble import build_report
from eval.report.blocks import Note
from eval.report.results_table import to_markdown
from eval.report.sections import partition_notes
from eval.run import results, runner
from eval.run.run_directory import RunDir
from fl.data.partitions.partition import Partition

SHARED = "federation.partition={name: dominant, clients: 4, groups: [[0], [1]], disjoint: false, train_size: 60, "
SHARED += "test_size: 20}"
QUICK = ("federation.rounds=0", "attack=guess", "observe.method={steps: 1}", "method={name: fedavg, lr: 0.1}")


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def whole(folder: Path, *overrides: str, **changed) -> dict[str, str]:
    """A run with table and report; returns what its log and its readers' files say."""
    experiment, place = tiny(*QUICK, *overrides, **changed), RunDir(folder)
    with place.locked(), place.logged():
        plan = runner.prepare(experiment, device="cpu")
        assert not runner.run(plan, place)
        table = results.write_table_and_report(results.assemble(plan, place), [], plan, place)
    assert to_markdown(table) == (folder / "table.md").read_text()
    return {name: (folder / name).read_text() for name in ("log.txt", "table.md", "report.md", "report.html")}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / PARTITIONS).iterdir()}


def test_shared_images_are_said_everywhere(tmp_path):
    said = whole(tmp_path / "a", SHARED)
    world = runner.prepare(tiny(*QUICK, SHARED), device="cpu").trainings[0].data
    train, test = world.partition.overlap["train"], world.partition.overlap["test"]
    assert min(train, test) > 0
    sentence = (
        f"Clients share images: {train} of {len(world.dataset.train)} training images and {test} of "
        f"{len(world.dataset.test)} test images belong to more than one client, so that accuracy and leakage of"
    )
    for name, text in said.items():
        assert text.count(sentence) == 1, name
    assert f"WARNING eval.run.runner: {sentence}" in said["log.txt"]
    words = (tmp_path / "a" / "partitions" / "1.txt").read_text()
    assert words.startswith("methods: fedavg\n4 clients, partition ")
    assert f"{train} images have more than one owner: " in words
    again = Partition.load(tmp_path / "a" / "partitions" / "1.json", world.dataset)
    assert again.digest == world.partition.digest


def test_nothing_is_said_where_images_have_one_owner(tmp_path):
    for name, text in whole(tmp_path / "a").items():
        assert "share images" not in text, name
    assert "no image has more than one owner" in (tmp_path / "a" / "partitions" / "1.txt").read_text()
    assert json.loads((tmp_path / "a" / "partitions" / "1.json").read_text())["shared"] == {"train": 0, "test": 0}


def test_every_split_has_a_file_of_its_own(tmp_path):
    methods = "method=[{name: fedavg, lr: 0.1}, {name: fedavg, as: b, with: {federation.partition.seed: 1}}, "
    methods += "{name: fedavg, as: c, with: {federation.augment: crop-flip}}]"  # other pictures, the same split
    run(tiny(*QUICK, methods), tmp_path / "a")
    assert sorted(files(tmp_path / "a")) == ["1.json", "1.txt", "2.json", "2.txt"]
    found = [json.loads((tmp_path / "a" / "partitions" / f"{number}.json").read_text()) for number in (1, 2)]
    assert [about["methods"] for about in found] == [["fedavg", "c"], ["b"]]
    assert found[0]["digest"] != found[1]["digest"]
    shared = [{**about, "shared": {"train": number, "test": 0}} for number, about in enumerate(found)]
    (said,) = partition_notes.shared_images(shared)
    assert said.startswith(f"Clients share images (b): 1 of {found[1]['images']['train']} training images belong to")
    run(tiny(*QUICK), tmp_path / "a")  # another config in the same folder
    assert sorted(files(tmp_path / "a")) == ["1.json", "1.txt"]


def test_a_run_again_leaves_the_same_bytes_and_no_path(tmp_path):
    first = whole(tmp_path / "a", SHARED)
    before = files(tmp_path / "a")
    again = whole(tmp_path / "a", SHARED)
    assert files(tmp_path / "a") == before
    assert {**first, "log.txt": ""} == {**again, "log.txt": ""}
    whole(tmp_path / "b", SHARED)
    assert files(tmp_path / "b") == before
    assert str(tmp_path).encode() not in b"".join(before.values())


def test_a_folder_from_before_needs_none_and_a_damaged_file_is_named(tmp_path):
    whole(tmp_path / "a", SHARED)
    (tmp_path / "a" / "partitions" / "1.json").write_text("{}")
    with pytest.raises(ValueError, match=r"partitions/1\.json has changed"):
        build_report(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "partitions")
    (tmp_path / "a" / "manifest.json").unlink()
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    about.pop("sha256")  # which folders from before do not state
    (tmp_path / "a" / "run.json").write_text(json.dumps(about))
    assert not [note for note in blocks(build_report(tmp_path / "a"), Note) if "split" in note.title]
