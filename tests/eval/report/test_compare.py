import json

import pytest
from support.fakerun import CONFIG, FakeRun

from eval.report.compare import NOT_SET, PAIRED, UNPAIRED, compare


def test_only_what_differs_is_shown(tmp_path):
    first = FakeRun().attack("fedavg", "ig", [20.0, 22.0, 24.0])
    config = CONFIG.replace("lr: 0.1", "lr: 0.2").replace("rounds: 10", "rounds: 10, client_fraction: 0.5")
    second = FakeRun(config=config).attack("fedavg", "ig", [21.0, 23.0, 26.0], accuracy=0.7)
    found = compare([first.write(tmp_path / "a"), second.write(tmp_path / "b")])
    assert found.runs == ["a", "b"]
    assert found.settings == {"federation.client_fraction": [NOT_SET, 0.5], "method.fedavg.lr": [0.1, 0.2]}
    one, two = found.lines
    assert one.difference is None
    assert two.difference is not None
    assert two.difference.how == PAIRED
    gains = [new["psnr"] - old["psnr"] for new, old in zip(second.rows, first.rows, strict=True)]
    assert two.difference.psnr.value == pytest.approx(sum(gains) / 3)
    # image by image: Student's lower end of three differences, whose longer tail is above
    assert two.difference.psnr.low == pytest.approx(4 / 3 - 4.3027 * 3**-0.5 / 3**0.5, abs=1e-3)
    assert two.difference.psnr.high - two.difference.psnr.low < one.group.psnr.high - one.group.psnr.low


def test_other_images_or_seeds_are_not_paired(tmp_path):
    runs = [
        FakeRun().attack("fedavg", "ig", [20.0, 22.0, 24.0]),
        FakeRun(shape=(1, 14, 14)).attack("fedavg", "ig", [20.0, 22.0, 24.0]),  # the same names of other images
        FakeRun().attack("fedavg", "ig", [20.0, 22.0, 24.0], seed=1),
        FakeRun().attack("fedavg", "ig", [20.0, 22.0]),
    ]
    found = compare([run.write(tmp_path / str(i)) for i, run in enumerate(runs)])
    assert [line.difference.how for line in found.lines[1:]] == [UNPAIRED] * 3
    apart = found.lines[1].difference.psnr
    assert apart.low < apart.value < apart.high
    assert "unpaired" in found.to_text()


def test_copies_of_an_image_count_as_one_image_of_a_difference(tmp_path):
    runs = [FakeRun().attack("fedavg", "ig", psnr) for psnr in ([20.0, 22.0, 24.0, 26.0], [21.0, 23.0, 26.0, 29.0])]
    for run in runs:
        for row in run.rows[2:]:  # the last two are the second one
            row |= {"copy_of": run.rows[1]["picture"]} | {key: run.rows[1][key] for key in row if "floor_" in key}
    plain = FakeRun().attack("fedavg", "ig", [20.0, 22.0, 24.0, 26.0])  # a run from before copies were told
    found = compare([run.write(tmp_path / str(i)) for i, run in enumerate([runs[0], runs[1], plain])])
    copies, unmarked = (line.difference for line in found.lines[1:])
    assert copies.how == unmarked.how == PAIRED
    assert copies.psnr.images == unmarked.psnr.images == 2
    assert copies.psnr.value == pytest.approx((1.0 + (1.0 + 2.0 + 3.0) / 3) / 2)


def test_what_a_run_lacks(tmp_path):
    first = FakeRun().attack("fedavg", "ig", [20.0]).refuse("local", "ig", "nothing is sent")
    second = FakeRun().attack("hyperfl", "ig", [10.0])
    found = compare([first.write(tmp_path / "x" / "out"), second.write(tmp_path / "y" / "out")])
    assert found.runs == ["x/out", "y/out"]
    text = found.to_text()
    assert text.count("not run") == 3
    assert "not applicable" in text
    assert all(line.difference is None for line in found.lines)


def test_accuracies_are_those_of_the_round(tmp_path):
    runs = [FakeRun(), FakeRun()]
    for run in runs:
        for number, accuracy in ((0, 0.1), (10, 0.6)):
            run.attack("fedavg", "ig", [20.0], round=number, accuracy=accuracy, accuracy_last=0.6)
        run.train("fedavg", [0.1, 0.5, 0.6])
    found = compare([run.write(tmp_path / str(i)) for i, run in enumerate(runs)])
    assert [(line.round, line.accuracy[:4]) for line in found.lines] == [(0, "10.0")] * 2 + [(10, "60.0")] * 2


def test_all_three_forms(tmp_path):
    config = CONFIG.replace("lr: 0.1", "lr: .inf").replace("A made-up run", '"a | b"')
    runs = [FakeRun(), FakeRun(config=config)]
    folders = [run.attack("fedavg", "ig", [20.0]).write(tmp_path / str(i)) for i, run in enumerate(runs)]
    found = compare(folders)
    plain = json.loads(json.dumps(found.to_plain(), allow_nan=False))
    assert plain["settings"]["method.fedavg.lr"] == [0.1, "inf"]
    assert plain["lines"][1]["difference"] == {"value": 0.0, "low": None, "high": None, "images": 1, "how": "paired"}
    markdown = found.to_markdown()
    assert "a \\| b" in markdown
    widths = {line.count("|") for line in found.to_markdown().splitlines() if line.startswith("| fedavg")}
    assert widths == {15}
    assert found.to_plain() == compare(folders).to_plain()


def test_ssim_and_lpips_stand_beside_psnr_with_the_backbone(tmp_path):
    runs = [FakeRun().attack("fedavg", "ig", [20.0, 22.0]) for _ in range(3)]
    for name, run in zip(("lpips_alex@64", "lpips_squeeze@64"), runs, strict=False):
        run.rows = [{**row, name: 0.25} for row in run.rows]
    found = compare([run.write(tmp_path / str(i)) for i, run in enumerate(runs)])
    (_, columns, rows) = found.tables()[1]
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [cell["LPIPS"].split()[0] + " " + cell["LPIPS"].split()[-1] for cell in cells[:2]] == [
        "0.25 alex@64",
        "0.25 squeeze@64",
    ]
    assert cells[2]["LPIPS"] == "\N{EN DASH}"
    assert all(cell["SSIM"].startswith("0.99") for cell in cells)
    plain = found.to_plain()["lines"]
    assert plain[1]["lpips_squeeze@64"]["value"] == 0.25
    assert not any(key.startswith("lpips") for key in plain[2])


def test_it_takes_two_different_runs(tmp_path):
    folder = FakeRun().attack("fedavg", "ig", [20.0]).write(tmp_path / "a")
    with pytest.raises(ValueError, match="expected two or more"):
        compare([folder])
    with pytest.raises(ValueError, match="expected different"):
        compare([folder, folder])
    with pytest.raises(FileNotFoundError, match=r"no config.yaml"):
        compare([folder, tmp_path])
