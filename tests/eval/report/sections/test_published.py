from __future__ import annotations

from pathlib import Path

import pytest
from support.fakerun import CONFIG, FakeRun

from eval.experiment import yaml_config
from eval.metrics import statistics
from eval.report.assemble import build_report
from eval.report.blocks import TableBlock
from eval.report.formatting import NO_VALUE, format_interval
from eval.report.result_groups import IMAGE
from eval.report.writer import write_report

BASE = {"task": {"dataset": "faces", "model": "tiny"}, "method": ["fedavg", "hyperfl"], "attack": ["ig"]}
FIGURES = {"method": "fedavg", "attack": "ig", "psnr": 16.16, "source": "Paper, Table 3"}


def test_published_figures_survive_the_round_trip_and_a_sweep() -> None:
    found = yaml_config.read({**BASE, "published": FIGURES})
    assert found.published[0].psnr == 16.16
    assert yaml_config.read(yaml_config.to_plain(found)) == found
    assert "published" not in yaml_config.to_plain(yaml_config.read(BASE))
    swept = yaml_config.read({**BASE, "published": [FIGURES], "sweep": {"attack.ig.tv_weight": [1e-4, 1e-2]}})
    assert [entry.label for entry in swept.attack] == ["ig@tv_weight=0.0001", "ig@tv_weight=0.01"]
    assert swept.published == found.published


def test_they_may_be_of_one_value_of_a_sweep() -> None:
    sweep = {"attack.ig.tv_weight": [1e-4, 1e-2], "method.fedavg.lr": [0.1, 1]}
    figures = {**FIGURES, "method": "fedavg@lr=0.1", "attack": "ig@tv_weight=0.01"}
    swept = yaml_config.read({**BASE, "published": figures, "sweep": sweep})
    assert (swept.published[0].method, swept.published[0].attack) == ("fedavg@lr=0.1", "ig@tv_weight=0.01")
    assert yaml_config.read(yaml_config.to_plain(swept)) == swept
    for wrong in ({"attack": "ig@tv_weight=0.1"}, {"method": "fedavg@lr=2"}, {"method": "fedavg@lr"}):
        with pytest.raises(ValueError, match="in published"):
            yaml_config.read({**BASE, "published": {**figures, **wrong}, "sweep": sweep})
    with pytest.raises(ValueError, match="in published"):
        yaml_config.read({**BASE, "published": figures})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "fedagv"}, "did you mean 'fedavg'"),
        ({"method": ""}, "method in published"),
        ({"attack": ""}, "attack in published"),
        ({"attack": "gi"}, "did you mean 'ig'"),
        ({"pnsr": 3.0}, "did you mean 'psnr'"),
        ({"accuracy": 73.03}, r"in \[0, 1\]"),
        ({"accuracy_local": -0.1}, "published.accuracy_local: expected a number"),
        ({"source": None}, "published.source"),
    ],
)
def test_published_figures_are_checked(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        yaml_config.read({**BASE, "published": [{**FIGURES, **change}]})


def test_published_figures_stand_beside_ours(tmp_path: Path) -> None:
    run = FakeRun()
    run.attack("fedavg", "ig", [24.0, 21.0, 23.0, 22.0, 25.0, 20.5], accuracy=0.62)
    run.attack("hyperfl", "ig", [4.0, 5.0, 3.0, 6.0, 5.0, 4.0], accuracy=0.71)
    run.config = (
        CONFIG
        + """
published:
- {method: fedavg, attack: ig, psnr: 16.16, ssim: 0.6415, source: "Paper, Table 3", note: "Another metric."}
- {method: hyperfl, attack: joint, psnr: 8.35, source: "Paper, Table 3"}
- {method: hyperfl, accuracy: 0.7303, source: "Paper, Table 1"}
"""
    )
    built = build_report(run.write(tmp_path / "run"))
    grids = [block for section in built.sections for block in section.blocks if isinstance(block, TableBlock)]
    (grid,) = [grid for grid in grids if grid.caption == "Published figures and ours"]
    assert grid.column_names[:6] == ["method", "attack", "source", "after round", "PSNR (dB) there", "here"]
    assert "LPIPS there" not in grid.column_names
    fedavg, joint, *accuracies = grid.rows
    ours = statistics.mean_interval([row for row in run.rows if row["method"] == "fedavg"], image=IMAGE)
    assert fedavg[4:6] == ["16.16", format_interval(ours, 2)]
    assert joint[3:6] == [NO_VALUE, "8.35", NO_VALUE]
    assert {(row[0], row[1], row[-2]) for row in accuracies} == {("hyperfl", NO_VALUE, "73.03\N{NO-BREAK SPACE}%")}
    assert [row[-1] for row in accuracies] == ["71.0\N{NO-BREAK SPACE}%"]
    assert "Another metric." in (write_report(tmp_path / "run")[0]).read_text()


def test_accuracies_stand_once_for_every_method(tmp_path: Path) -> None:
    run = FakeRun()
    for number, accuracy in ((0, 0.1), (10, 0.62)):
        for attack in ("ig", "peel+ig"):
            ends = {"accuracy_last": 0.62, "accuracy_local": 0.0, "accuracy_local_last": 0.7}
            run.attack("hyperfl", attack, [20.0, 21.0], round=number, accuracy=accuracy, **ends)
    run.config = (
        CONFIG
        + """
published:
- {method: hyperfl, accuracy: 0.7303, source: "Table 1"}
- {method: hyperfl, accuracy_local: 0.74, source: "Table 2"}
"""
    )
    built = build_report(run.write(tmp_path / "run"))
    grids = [block for section in built.sections for block in section.blocks if isinstance(block, TableBlock)]
    (grid,) = [grid for grid in grids if grid.caption == "Published figures and ours"]
    assert "after round" not in grid.column_names
    assert [[cell.replace("\N{NO-BREAK SPACE}", "") for cell in row] for row in grid.rows] == [
        ["hyperfl", NO_VALUE, "Table 1", "73.03%", "62.0%", NO_VALUE, NO_VALUE],
        ["hyperfl", NO_VALUE, "Table 2", NO_VALUE, NO_VALUE, "74.00%", "70.0%"],
    ]
