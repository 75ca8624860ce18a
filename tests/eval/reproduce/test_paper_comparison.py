"""A paper's figures beside a run's: difference, interval, and whether the paper's lies within."""

import pytest
from support.fakerun import CONFIG, FakeRun

from eval.report.formatting import NO_VALUE
from eval.report.load import load
from eval.report.results_table import to_markdown
from eval.reproduce.paper_comparison import as_table, compare_with_paper

HEAD = 'source: "Toy, Table 1"'


def compared(run, tmp_path, *published):
    run.config = CONFIG + "\npublished:\n" + "".join(f"  - {{{words}, {HEAD}}}\n" for words in published)
    return compare_with_paper(load(run.write(tmp_path / "out")))


def attacked():
    return FakeRun().attack("fedavg", "ig", [20.0, 22.0, 24.0], accuracy=0.6).train("fedavg", [0.1, 0.5, 0.6])


def test_pictures_have_an_interval_over_images(tmp_path):
    psnr, ssim, lpips = compared(attacked(), tmp_path, "method: fedavg, attack: ig, psnr: 22.5, ssim: 0.2, lpips: 0.1")
    assert psnr.here == pytest.approx(22, abs=0.1)
    assert psnr.difference == pytest.approx(-0.5, abs=0.1)
    assert psnr.low < 22.5 < psnr.high
    assert (psnr.over, psnr.is_within) == ("images", True)
    assert ssim.is_within is False
    assert (lpips.here, lpips.is_within, lpips.figure) == (None, None, "LPIPS")


def test_lpips_names_its_backbone(tmp_path):
    run = attacked()
    run.rows = [{**row, "lpips_squeeze@64": 0.1 + 0.01 * i} for i, row in enumerate(run.rows)]
    (lpips,) = compared(run, tmp_path, "method: fedavg, attack: ig, lpips: 0.11")
    assert (lpips.figure, lpips.is_within) == ("LPIPS squeeze@64", True)


def test_accuracy_has_an_interval_over_clients(tmp_path):
    (found,) = compared(attacked(), tmp_path, "method: fedavg, accuracy: 0.65")
    assert (found.here, found.over, found.is_within) == (pytest.approx(0.6), "clients", True)
    assert found.is_share


def test_accuracy_without_that_of_every_client_has_one_over_seeds_or_none(tmp_path):
    run = FakeRun()
    for seed in (0, 1, 2):
        run.attack("fedavg", "ig", [20.0], seed=seed, accuracy_local_last=0.6 + 0.01 * seed)
    (found,) = compared(run, tmp_path, "method: fedavg, accuracy_local: 0.61")
    assert (found.here, found.over, found.is_within) == (pytest.approx(0.61), "seeds", True)
    alone = FakeRun().attack("fedavg", "ig", [20.0], accuracy_local_last=0.6)
    (single,) = compared(alone, tmp_path / "b", "method: fedavg, accuracy_local: 0.61")
    assert (single.here, single.low, single.is_within, single.over) == (0.6, None, None, "")


def test_one_model_that_all_clients_have_is_one_figure(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0], accuracy_global_last=0.5).train("fedavg", [0.1, 0.5])
    run.rounds[-1] |= {"accuracy_global": 0.5, "accuracies_further": {"global": [0.5, 0.5, 0.5]}}
    (found,) = compared(run, tmp_path, "method: fedavg, accuracy_global: 0.6")
    assert (found.here, found.low, found.over) == (0.5, None, "")
    run.rounds[-1]["accuracies_further"] = {"global": [0.4, 0.5, 0.6]}
    (found,) = compared(run, tmp_path / "b", "method: fedavg, accuracy_global: 0.6")
    assert (found.over, found.is_within) == ("clients", True)


def test_the_best_round_is_that_of_every_seed(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0], accuracy_best=0.5, accuracy_best_round=5)
    run.train("fedavg", [0.1, 0.5, 0.4])
    (found,) = compared(run, tmp_path, "method: fedavg, accuracy: 0.5, best: true")
    assert (found.here, found.over) == (0.5, "clients")
    assert found.low < 0.5 < found.high
    assert found.figure == "accuracy, best round"


def test_what_the_run_lacks_is_said(tmp_path):
    (found,) = compared(attacked(), tmp_path, "method: fedavg, attack: ig, psnr: 22.5")
    (absent,) = compared(attacked(), tmp_path / "b", "method: hyperfl, attack: ig, psnr: 9")
    table = as_table([found, absent], "Toy", "small")
    assert table.rows[1][4] == "not run"
    assert table.rows[1][-1] == NO_VALUE
    assert "less than the paper's" in table.title
    assert table.rows[0][-1] == "yes"
    assert to_markdown(table).count("\n| ") == 4  # with head and rule


def test_communication_has_no_interval(tmp_path):
    (found,) = compared(attacked(), tmp_path, "method: fedavg, cpr: 4000")
    assert (found.here, found.difference, found.is_within) == (3000, -1000, None)
    (row,) = as_table([found], "Toy", "paper").rows
    assert row[3:6] == ("4,000", "3,000", "\N{MINUS SIGN}1,000")


def test_shares_are_told_in_percent(tmp_path):
    (row,) = as_table(compared(attacked(), tmp_path, "method: fedavg, accuracy: 0.65"), "Toy", "paper").rows
    assert row[2:6] == ("accuracy after the last round (%)", "65.00", "60.00", "\N{MINUS SIGN}5.00")
