import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import blocks, grid

from eval.audit.findings import verdict
from eval.experiment import yaml_config
from eval.io import yaml12
from eval.report import results_table
from eval.report.assemble import build_report
from eval.report.blocks import FindingBlock, TableBlock
from eval.report.formatting import NO_VALUE, format_error
from eval.report.result_groups import BASELINES


def experiment(text: str = CONFIG):
    return yaml_config.read(yaml12.parse(text))


def run() -> FakeRun:
    made = FakeRun().attack("fedavg", "ig", [22.0, 24.0, 23.0, 21.0, 25.0, 22.0], accuracy=0.62)
    made.refuse("fedavg", "peel+ig", "not in the mood", accuracy=0.62)
    return made.attack("hyperfl", "peel+ig", [4.0, 5.0, 3.0, 6.0, 5.0, 4.0], extractor_error=2e-7)


def legend(made: FakeRun) -> str:
    return "\n".join(results_table.build_table(made.rows, experiment()).legend)


def test_it_is_readable_without_the_papers():
    found = results_table.build_table(run().rows, experiment())
    assert [row[:2] for row in found.rows] == [("fedavg", "ig"), ("fedavg", "peel+ig"), ("hyperfl", "peel+ig")]
    assert not {"defense", "LPIPS"} & set(found.columns)
    assert found.rows[1][-1] == "not in the mood"
    assert found.rows[0][2] == "62.0%"
    assert found.rows[0][3].startswith("22.8 [")
    assert [row[1] for row in found.baselines] == list(BASELINES.values())
    words = "\n".join(found.legend)
    for part in ("PSNR (dB)", "Baseline", "Method fedavg: clients train", "Attack peel+ig: computes"):
        assert part in words
    assert "LPIPS:" not in words
    text = results_table.to_markdown(found)
    assert text.count("\n| ") == 2 + len(found.rows) + len(found.baselines)


def test_lpips_is_named_with_its_backbone():
    made = run()
    made.rows = [{**row, "lpips_squeeze@64": 0.25} if "image" in row else row for row in made.rows]
    found = results_table.build_table(made.rows, experiment())
    column = found.columns.index("LPIPS squeeze@64")
    assert found.columns[column - 1] == "SSIM"
    assert [row[column] for row in found.rows] == ["0.25", "-", "0.25"]
    assert any(line.startswith("LPIPS: perceptual distance") for line in found.legend)


def test_flags_are_explained():
    found = results_table.build_table(
        run().rows, experiment(CONFIG.replace("knows_labels: false", "knows_labels: true"))
    )
    assert "labels-given" in found.rows[0][-1]
    assert any(line.startswith("Flag labels-given: ") for line in found.legend)


@pytest.mark.parametrize(
    ("psnr", "words"),
    [
        ([22.0] * 6, "the update gives picture content away (+"),
        ([22.0] * 5, "too few pictures to tell content from chance (+"),
        ([2.0] * 6, "no more than a guess without the update (-"),
        ([22.0, 2.0, 20.0, 3.0, 18.0, 2.0], "not told apart from a guess without the update ("),
        ([50.0, 2.0, 2.0, 2.0, 2.0, 2.0], "1 of 6 pictures came back recognizable"),
        ([22.0], "too few pictures to tell content from chance (+"),
    ],
)
def test_it_says_what_leaked(psnr, words):
    assert words in legend(FakeRun().attack("fedavg", "ig", psnr))


def test_it_says_whose_pictures_were_named_though_no_closer_than_a_guess():
    made = FakeRun().attack("fedavg", "ig", [2.0] * 6, identified=True, identified_among=50)
    assert "but 6 of 6 pictures were named among others of their class (by chance 2 %)" in legend(made)
    made.rows[0]["identified"] = True
    for row in made.rows[1:]:
        row["identified"] = False
    assert "were named" not in legend(made)
    made.rows = [made.rows[0], {**made.rows[0], "update": "0:1", "picture": "0:1"}]
    assert "but 2 of 2 pictures were named" in legend(made)
    for number in range(79):  # one of eighty attacks names two images by chance
        made.attack("fedavg", f"ig@tv_weight={number}", [2.0] * 2, identified=False, identified_among=50)
    assert "were named" not in legend(made)


def test_it_says_what_else_leaked():
    made = FakeRun().attack("hyperfl", "peel+ig", [4.0] * 3, extractor_error=2e-7, private_errors={"embedding": 0.9})
    words = legend(made)
    assert "private embedding was recovered for 0 of 3 updates (relative error below 0.1, at best 9e-01)" in words
    assert "private extractor was recovered for 3 of 3 updates (relative error below 0.1, at best 2e-07)" in words


def test_an_update_that_gave_nothing_back_counts(tmp_path):
    """One of three updates gave its embedding away, the others no figure: the table, the report and an audit agree."""
    made = FakeRun().attack("hyperfl", "peel+ig", [4.0] * 3, label_correct=None)
    made.rows[0]["private_errors"] = {"embedding": 1e-7}
    made.rows[2]["private_errors"] = {"embedding": None}
    assert "embedding was recovered for 1 of 3 updates (relative error below 0.1, at best 1e-07)" in legend(made)
    content = build_report(made.write(tmp_path / "out"))
    (found,) = blocks(content, FindingBlock)
    assert (
        f"recovered the embedding for 1 of 3 updates (relative error {format_error(1e-7)} at best)." in found.lines[-1]
    )
    assert found.leaked == ["private values"]
    assert grid(content, "What else was private").rows[0][3:7] == [
        "embedding",
        "1 of 3 updates",
        format_error(1e-7),
        NO_VALUE,
    ]
    assert verdict(made.rows).endswith("recovered for 1 of 3 update(s) (relative error below 0.1, at best 1e-07)")


def test_several_rounds_are_told_apart():
    made = FakeRun()
    for number in (0, 10):
        made.attack("fedavg", "ig", [22.0 - number] * 6, round=number)
    found = results_table.build_table(made.rows, experiment())
    assert [row[1] for row in found.rows] == ["ig (round 0)", "ig (round 10)"]
    assert "fedavg under ig (round 10): " in "\n".join(found.legend)


@pytest.mark.parametrize(
    ("rounds", "words"), [((10,), "of the last round"), ((4,), "of round 4"), ((0, 10), "of the round in brackets")]
)
def test_it_says_of_which_round_accuracies_are(rounds, words):
    made = FakeRun()
    for number in rounds:
        made.attack("fedavg", "ig", [22.0] * 6, round=number)
    assert f"that the aggregated model {words} gets right" in legend(made)


def bests(tmp_path, **columns):
    made = FakeRun().attack("fedavg", "ig", [22.0], accuracy_best=0.7, **columns)
    captions = [found.caption for found in blocks(build_report(made.write(tmp_path / "out")), TableBlock)]
    return "Accuracy in the best round (which)" in captions


def test_best_rounds_stand_where_something_was_trained(tmp_path):
    assert bests(tmp_path / "a", accuracy_best_round=3)
    assert not bests(tmp_path / "b", accuracy_best_round=0)


def test_a_table_without_rows_is_refused():
    with pytest.raises(ValueError, match="expected rows"):
        results_table.build_table([], experiment())
