"""What is damaged in a run directory is computed again or named, and nothing is written through links."""

import json

import pytest
from support.runs import finished, reader_files, run, tiny, unstated
from support.tiny import Registered
from typer.testing import CliRunner

from eval.cli import app
from eval.report.writer import write_report
from eval.run import runner
from eval.run.run_directory import LostLockError, RunDir


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def test_damaged_pictures_of_an_older_cell_are_left_out(tmp_path, caplog):
    finished(tmp_path / "a")
    first = runner.prepare(tiny(), device="cpu").trainings[0]
    cell = tmp_path / "a" / "cells" / first.attack_tasks[0].cell.id
    unstated(cell)
    (cell / "pictures.npz").write_bytes(b"PK\x03\x04 cut off")
    rows = run(tiny(), tmp_path / "a")
    assert {path.stem for path in (tmp_path / "a" / "images").iterdir()} == {"hyperfl-none-guess-round2-seed0"}
    assert {row["method"] for row in rows if "psnr" in row} == {"fedavg", "hyperfl"}
    assert "pictures.npz can't be read; they are left out" in caplog.text
    assert "1 finished cells are of an older version" in caplog.text
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert [cell["checked"] for cell in about["cells"] if "checked" in cell] == [False]


def test_lost_pictures_are_named_and_the_cell_stays(tmp_path, caplog):
    finished(tmp_path / "a")
    first = runner.prepare(tiny(), device="cpu").trainings[0]
    (tmp_path / "a" / "cells" / first.attack_tasks[0].cell.id / "pictures.npz").unlink()
    run(tiny(), tmp_path / "a")
    assert f"are gone from cells/{first.attack_tasks[0].cell.id}" in caplog.text
    assert len(list((tmp_path / "a" / "images").glob("*.npz"))) == 1


def flipped(content: bytes) -> bytes:
    data = bytearray(content)
    data[len(data) // 2] ^= 1
    return bytes(data)


def better(content: bytes) -> bytes:
    rows = [json.loads(line) for line in content.splitlines()]
    return b"".join(json.dumps({**row, "psnr": 93.0}).encode() + b"\n" for row in rows)


DAMAGES = {
    "better": ("images.jsonl", better),
    "a row less": ("images.jsonl", lambda content: content[: content.rindex(b"\n", 0, -1) + 1]),
    "empty": ("images.jsonl", lambda _: b""),
    "pictures": ("pictures.npz", flipped),
    "cell": ("cell.json", flipped),
    "seconds": ("cell.json", lambda content: content.replace(b'"code": "', b'"code": "0', 1)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_cell_is_computed_again(tmp_path, caplog, kind):
    finished(tmp_path / "a")
    before = reader_files(tmp_path / "a")
    watch = runner.prepare(tiny(), device="cpu").trainings[0].attack_tasks[0]
    name, change = DAMAGES[kind]
    path = tmp_path / "a" / "cells" / watch.cell.id / name
    path.write_bytes(change(path.read_bytes()))
    run(tiny(), tmp_path / "a")
    assert reader_files(tmp_path / "a") == before
    assert caplog.text.count("so the cell is computed again") == 1


def test_a_training_with_a_row_less_is_trained_again_in_older_cells_too(tmp_path, rounds):
    finished(tmp_path / "a")
    before = reader_files(tmp_path / "a")
    first = runner.prepare(tiny(), device="cpu").trainings[0]
    cell = tmp_path / "a" / "cells" / first.cell.id
    unstated(cell)
    rows = (cell / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (cell / "rounds.jsonl").write_bytes(b"".join(rows[:-1]))
    rounds.clear()
    run(tiny(), tmp_path / "a")
    assert rounds == [0, 1]
    assert reader_files(tmp_path / "a") == before


def test_swapped_cells_are_computed_again(tmp_path, caplog):
    finished(tmp_path / "a")
    before = reader_files(tmp_path / "a")
    plan = runner.prepare(tiny(), device="cpu")
    one, other = (tmp_path / "a" / "cells" / training.attack_tasks[0].cell.id for training in plan.trainings)
    for path in (one, other):
        unstated(path)
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    run(tiny(), tmp_path / "a")
    assert reader_files(tmp_path / "a") == before
    assert caplog.text.count("its settings are those of another cell") == 2


def test_emptied_cells_do_not_wait_for_ever(tmp_path):
    finished(tmp_path / "a")
    before = reader_files(tmp_path / "a")
    for path in (tmp_path / "a" / "cells").glob("*/*.jsonl"):
        path.write_bytes(b"")
    run(tiny(), tmp_path / "a")
    assert reader_files(tmp_path / "a") == before


def test_a_lock_that_is_taken_away_ends_the_run(tmp_path):
    def remove(stage, done, total):
        (tmp_path / "a" / ".lock").unlink(missing_ok=True)

    with pytest.raises(LostLockError, match="another process may be writing"):
        run(tiny(), tmp_path / "a", progress=remove)
    assert not [path for path in (tmp_path / "a" / "cells").iterdir() if path.suffix != ".part"]
    run(tiny(), tmp_path / "a")
    run(tiny(), tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


@pytest.mark.parametrize("name", ["cells", "checkpoints", "images", "partitions", "report", "cells/0123456789ab.part"])
def test_folders_that_are_links_are_refused_before_anything_is_written(tmp_path, name):
    finished(tmp_path / "a", "attack=guess")
    place, elsewhere = tmp_path / "a" / name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    if place.exists():
        place.rename(tmp_path / "before")
    place.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"), RunDir(tmp_path / "a").locked():
        pass
    assert not list(elsewhere.iterdir())
    if name == "report":
        with pytest.raises(ValueError, match="is a link"):
            write_report(tmp_path / "a")
        assert not list(elsewhere.iterdir())


def test_what_a_killed_process_left_goes_away(tmp_path):
    finished(tmp_path / "a", "attack=guess")
    (tmp_path / "a" / "report").mkdir()
    left = [
        tmp_path / "a" / place / f".x.{'0' * 16}.part"
        for place in ("", "report", "images", next((tmp_path / "a" / "cells").iterdir()).relative_to(tmp_path / "a"))
    ]
    for path in left:
        path.write_text("cut o")
    with RunDir(tmp_path / "a").locked():
        pass
    assert not [path for path in left if path.exists()]


def test_a_link_to_nothing_in_a_cell_is_damage(tmp_path):
    finished(tmp_path / "a", "attack=guess")
    rows = next((tmp_path / "a" / "cells").glob("*/images.jsonl"))
    content = rows.read_bytes()
    rows.unlink()
    rows.symlink_to(tmp_path / "nothing")
    run(tiny("attack=guess"), tmp_path / "a")
    assert not rows.is_symlink()
    assert rows.read_bytes() == content


@pytest.mark.parametrize("name", ["cells", "images", "partitions", "report"])
def test_a_file_in_place_of_a_folder_is_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"{name} as a folder, got a file; remove it"), RunDir(tmp_path).locked():
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", name}


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    finished(tmp_path / "a", "attack=guess")
    (tmp_path / "a" / "report.html").mkdir()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a")])
    assert done.exit_code == 2
    assert "a/report.html: Is a directory; a folder is where a file belongs: remove it" in done.output.replace("\n", "")
