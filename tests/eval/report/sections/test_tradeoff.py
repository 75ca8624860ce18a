"""Accuracy against PSNR, SSIM and LPIPS: the same points, each by its own measure."""

from statistics import fmean

import pytest
from support.fakerun import FakeRun
from support.reports import blocks

from eval.report.assemble import build_report
from eval.report.blocks import FigureBlock
from eval.report.charts import draw
from eval.report.charts.specs import Baseline, Marker, Measure, Point, ScatterPlot

NAME = "lpips_squeeze@64"


def scatters(folder):
    return {block.name: block for block in blocks(build_report(folder), FigureBlock) if "tradeoff" in block.name}


def test_each_measure_has_a_figure_and_the_first_legend_all_of_them(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [24.0, 21.0], accuracy=0.62).attack("hyperfl", "ig", [4.0, 5.0])
    for i, row in enumerate(run.rows):
        row |= {NAME: 0.1 * i, f"floor_mean_{NAME}": 0.6}
    found = scatters(run.write(tmp_path / "a"))
    assert [*found] == ["tradeoff", "tradeoff-ssim", "tradeoff-lpips"]
    assert found["tradeoff"].legend.columns[-3:] == [">PSNR (dB)", ">SSIM", ">LPIPS squeeze@64"]
    assert found["tradeoff-lpips"].legend.columns[-1] == ">LPIPS squeeze@64"
    points = {name: figure.chart.points for name, figure in found.items()}
    for column, name in (("ssim", "tradeoff-ssim"), (NAME, "tradeoff-lpips")):
        means = [fmean(row[column] for row in run.rows if row["method"] == m) for m in ("fedavg", "hyperfl")]
        assert [point.x for point in points[name]] == pytest.approx(means)
        assert [(p.number, p.label, p.y) for p in points[name]] == [
            (p.number, p.label, p.y) for p in points["tradeoff"]
        ]
    assert [(line.guess, line.value) for line in found["tradeoff-lpips"].chart.baselines] == [("mean", 0.6)]
    assert "(0.60)" in found["tradeoff-lpips"].caption
    assert "LPIPS squeeze@64" in found["tradeoff-lpips"].alt


def test_there_is_none_of_lpips_where_it_was_not_taken(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [24.0, 21.0])
    assert [*scatters(run.write(tmp_path / "a"))] == ["tradeoff", "tradeoff-ssim"]


def test_what_falls_is_drawn_from_right_to_left():
    points = [Point(i, f"attack {i}", Marker(i), 0.2 * i, 50.0, (0.1 * i, 0.3 * i)) for i in (1, 2)]
    chart = ScatterPlot(points, [Baseline("mean", "mean color", 0.7)], Measure("LPIPS", falling=True))
    with draw.chart_style():
        (axes,) = draw.draw(chart, 360).axes
    low, high = axes.get_xlim()
    assert low >= 0.7
    assert high <= 0.1
    assert axes.get_xlabel() == "LPIPS"
