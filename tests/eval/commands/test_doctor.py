"""`hyperleak doctor`: what is there, what is not, and what helps."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from eval import cli
from eval.commands import doctor_checks, terminal
from fl.data.sources import npz_files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("HYPERLEAK_LPIPS", raising=False)
    return tmp_path


def doctor(*words: object):
    return CliRunner().invoke(cli.app, ["doctor", *map(str, words)])


def test_every_absence_has_a_remedy(folder):
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    found = {check["what"]: check for check in json.loads(result.stdout)}
    assert found["torch"]["state"] == "ok"
    assert found["data folder"]["found"] == str(folder)
    assert found["data set faces"]["state"] == "ok"
    assert found["data set cifar10"]["state"] == "absent"
    assert found["data set cifar10"]["remedy"] == "run `hyperleak doctor --download cifar10`"
    for name, host in (("cinic10", "datashare.ed.ac.uk"), ("tiny-imagenet", "cs231n.stanford.edu")):
        remedy = found[f"data set {name}"]["remedy"]
        assert host in remedy
        assert f"`hyperleak doctor --download {name} --source FOLDER`" in remedy
    assert "--download" not in found["data set handwritten62"]["remedy"]
    assert found["LPIPS weights"]["state"] == "absent"
    assert all(check["remedy"] for check in found.values() if check["state"] != "ok")


def test_a_data_set_in_the_folder_is_found(folder):
    for part in ("train", "test"):
        images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.arange(4)
        npz_files.save_images(folder / f"mnist_{part}.npz", images, labels, [str(i) for i in range(10)])
    output = doctor().output
    assert "ok      data set mnist: in the data folder\n" in output
    assert (
        "absent  data set svhn: not in the data folder\n        -> run `hyperleak doctor --download svhn`\n" in output
    )


def test_what_is_broken_is_a_failure(folder, monkeypatch):
    monkeypatch.setattr(doctor_checks, "installed_version", lambda name: None if name == "opacus" else "1.0")
    result = doctor()
    assert result.exit_code == terminal.FAILURE
    assert "fault   opacus: not installed\n        -> pip install opacus" in result.output


def test_a_weights_file_that_is_none_is_said(folder, monkeypatch):
    (folder / "weights.pth").write_bytes(b"none")
    monkeypatch.setenv("HYPERLEAK_LPIPS", str(folder / "weights.pth"))
    output = doctor().output
    assert "absent  LPIPS weights: the SHA-256 of" in output


def test_download_from_a_folder(folder, monkeypatch):
    asked = {}

    def fetch(name, *, source):
        asked[name] = source
        return [folder / "a.npz"]

    monkeypatch.setattr("fl.data.sources.download.download", fetch)
    result = doctor("--download", "mnist", "--source", folder)
    assert result.exit_code == 0, result.output
    assert asked == {"mnist": folder}
    assert f"Written: {folder / 'a.npz'}" in result.stderr


def test_download_errors(folder):
    wrong = doctor("--download", "mnits")
    assert wrong.exit_code == terminal.USAGE
    assert "did you mean 'mnist'" in wrong.output
    absent = doctor("--download", "cinic10", "--source", folder)
    assert absent.exit_code == terminal.FAILURE
    assert "is not in" in absent.output
    alone = doctor("--download", "cinic10")
    assert alone.exit_code == terminal.FAILURE
    assert "`hyperleak doctor --download cinic10 --source FOLDER`" in alone.output
    assert doctor("--source", folder).exit_code == terminal.USAGE
