"""What is measured is read from committed cells, and counts only where every setting agrees."""

import io
import json
import tarfile

import pytest
from support.runs import run, tiny
from support.tiny import Registered

from eval.experiment.spec import Experiment
from eval.reproduce.cells import planned_cells
from eval.reproduce.committed import CommittedRun, cells_by_row, count_measured, read_committed, runs_of
from eval.reproduce.cost import experiment_cost
from eval.reproduce.items import PaperRow

CALM = ("observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1, batch_size: 6}]")


@pytest.fixture
def committed(tmp_path):
    """Cells of the tiny experiment from seed 0, in an archive."""
    with Registered():
        run(tiny(*CALM), tmp_path / "run")
        yield archive(tmp_path)


def archive(tmp_path, command="hyperleak run reproduce/toy/table1 --set seeds=0 --out there"):
    folder = tmp_path / "run"
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "command": command}))
    (tmp_path / "cells").mkdir(exist_ok=True)
    with tarfile.open(tmp_path / "cells" / "toy.tar.xz", "w:xz") as file:
        for path in [folder / "run.json", *(folder / "cells").rglob("*")]:
            if path.suffix in {".json", ".jsonl"}:
                file.add(path, path.relative_to(folder).as_posix())
    return tmp_path / "cells"


def test_rows_count_where_every_cell_is_there_with_these_settings(committed):
    found = read_committed(committed)
    assert count_measured(tiny(*CALM), found) == 2  # `guess` and `refuse`
    assert count_measured(tiny(*CALM, "attack=guess"), found) == 1
    for other in ("seeds=[0, 1]", "federation.rounds=3", "observe.images=2", "threat.knows_labels=true", "seeds=1"):
        assert count_measured(tiny(*CALM, other), found) == 0, other
    assert count_measured(tiny(*CALM, "attack=[guess, {name: guess, spread: 0.3, as: wide}]"), found) == 1


def test_rows_that_a_paper_prints_are_counted_as_it_has_them(committed):
    found = read_committed(committed)
    printed = 'published=[{method: fedavg, accuracy: 0.5, source: "Toy, Table 1"}]'
    assert count_measured(tiny(*CALM, printed), found) == 1
    attacked = 'published=[{method: fedavg, attack: guess, psnr: 9, source: "Toy, Table 2"}]'
    assert count_measured(tiny(*CALM, attacked), found) == 1
    assert count_measured(tiny(*CALM, attacked, "attack.guess.spread=0.3"), found) == 0


def test_an_attack_has_the_cell_of_its_training_among_its_own():
    with Registered():
        cells = cells_by_row(planned_cells(tiny(*CALM)))
    training, attack = cells[PaperRow("fedavg")], cells[PaperRow("fedavg", "guess")]
    assert len(training) == 1
    assert len(attack) == 2
    assert training < attack


def test_cells_of_the_same_kind_say_what_others_cost(committed):
    times = read_committed(committed).times
    cells = [json.loads(path.read_text()) for path in committed.parent.glob("run/cells/*/cell.json")]
    known = experiment_cost(tiny(*CALM), times)
    assert known.seconds == pytest.approx(sum(cell["seconds"] for cell in cells))
    assert (known.trainings, known.attacks) == (1, 2)
    longer = experiment_cost(tiny(*CALM, "federation.rounds=4", "attack=[]"), times)
    (training,) = [cell["seconds"] for cell in cells if cell["settings"]["kind"] == "training"]
    assert longer.seconds == pytest.approx(2 * training)
    assert experiment_cost(tiny(*CALM), None).seconds != known.seconds


def test_runs_are_known_by_the_config_of_their_command(committed):
    (found,) = runs_of("toy/table1", read_committed(committed))
    rows = {PaperRow("fedavg"), PaperRow("fedavg", "guess"), PaperRow("fedavg", "refuse")}
    assert found == CommittedRun("reproduce/toy/table1", ("seeds=0",), frozenset(rows))
    assert runs_of("toy/table11", read_committed(committed)) == []
    assert runs_of("toy/other", read_committed(committed)) == []


def test_there_need_be_no_archives(tmp_path):
    assert read_committed(tmp_path / "none").keys == frozenset()


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "cut.tar.xz").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"cut\.tar\.xz can't be read as an archive of cells"):
        read_committed(tmp_path)
    with tarfile.open(tmp_path / "cut.tar.xz", "w:xz") as file:
        member = tarfile.TarInfo("cells/a/cell.json")
        member.size = 2
        file.addfile(member, io.BytesIO(b"[]"))
    with pytest.raises(ValueError, match=r"cut\.tar\.xz"):
        read_committed(tmp_path)


def test_more_attacks_ask_no_more_of_the_methods(monkeypatch):
    """Of a table of ten methods under as many attacks, all methods would be built a hundred times."""
    calls = []
    own = Experiment.observed_methods
    with Registered():
        few, many = (
            tiny(*CALM, f"attack=[{', '.join(f'{{name: guess, as: g{i}}}' for i in range(n))}]") for n in (2, 9)
        )
        monkeypatch.setattr(Experiment, "observed_methods", lambda self: calls.append(self) or own(self))
        counts = []
        for experiment, cells in ((few, 3), (many, 10)):
            calls.clear()
            assert len(planned_cells(experiment)) == cells
            counts.append(len(calls))
    assert counts[0] == counts[1]
