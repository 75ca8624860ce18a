"""ROG: codes smaller than images, what they can show at best, and the networks trained for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import worlds
from torch.nn import functional as F

import attacks
import fl.data
from attacks.base import NotApplicable, Reconstruction
from attacks.gradient_matching.engine import image_networks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS
from attacks.gradient_matching.engine.search_space import UpsampledSpace
from eval.metrics.baselines import best_decodable
from eval.metrics.image import psnr
from fl.client import Client
from fl.method import Download
from fl.methods.fedavg import FedAvg
from fl.models import build as build_model
from fl.seeds import stream
from fl.simulation.client_round import ClientState, observe, prepare
from fl.types import Batch, Task, Truth
from fl.view import ServerView


def one_step(task: Task, images: Batch) -> tuple[ServerView, Truth]:
    method = FedAvg(lr=0.1, steps=1, batch_size=None)
    download = Download(dict(task.parameters), dict(task.buffers))
    return observe(prepare(Client(task, method), ClientState(), download, images))[:2]


def smooth(count: int, size: int, channels: int = 1) -> torch.Tensor:
    """Images that codes of a quarter of the side can show exactly."""
    codes = torch.rand(count, channels, size // 4, size // 4, generator=stream(0, "codes"), dtype=torch.float64)
    return UpsampledSpace(4, (size, size)).decode(0.3 + 0.4 * codes)


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("size", [(8, 8), (28, 12), (10, 9)])
def test_upsampling_is_bicubic_interpolation(factor: int, size: tuple[int, int]) -> None:
    space = UpsampledSpace(factor, size)
    small = space.shape(build_model("linear", num_classes=3, input_shape=(3, *size)))
    codes = torch.rand(2, *small, generator=stream(0, "codes"), dtype=torch.float64)
    expected = F.interpolate(codes, size=size, mode="bicubic", align_corners=False)
    torch.testing.assert_close(space.decode(codes), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [
        pytest.param(128, 4, (20.7, 27.2), marks=pytest.mark.slow),
        (32, 4, (16.2, 23.1, 18.6, 25.0)),
        (32, 2, (20.9, 27.4, 23.9, 28.5)),
    ],
)
def test_least_squares_are_the_known_ones_on_photographs(size: int, factor: int, expected: tuple[float, ...]) -> None:
    photos = fl.data.load("photos", mode="color", size=size).train.inputs[: len(expected)]
    least = UpsampledSpace(factor, (size, size)).project(photos, steps=0).clamp(0, 1).to(photos)
    assert psnr(least, photos).tolist() == pytest.approx(expected, abs=0.06)
    assert bool((psnr(best_decodable(photos, factor), photos) >= psnr(least, photos)).all())


def test_the_bound_leaves_alone_what_a_code_can_show() -> None:
    exact = smooth(2, 16)
    torch.testing.assert_close(best_decodable(exact, 4), exact, rtol=0, atol=1e-12)
    images = torch.rand(1, 1, 16, 16, generator=stream(0, "noise"), dtype=torch.float64)
    torch.testing.assert_close(best_decodable(images, 1), images, rtol=0, atol=1e-12)


def drawn() -> torch.Tensor:
    """Black and white strokes (3, 1, 16, 16), of which the closest code is far beyond black and white."""
    at = torch.arange(16, dtype=torch.float64)
    slopes = torch.tensor([[0.3, 1.1], [1.0, -0.4], [-0.7, 0.8]], dtype=torch.float64)
    waves = torch.sin(slopes[:, :1, None] * at[:, None] + slopes[:, 1:, None] * at)
    return (waves > 0.3).double()[:, None]


def test_no_search_for_a_code_comes_closer_than_the_bound() -> None:
    """Only images are clamped, codes are not."""
    strokes = drawn()
    space = UpsampledSpace(2, (16, 16))
    found = psnr(best_decodable(strokes, 2), strokes)
    assert bool((found > psnr(space.project(strokes, steps=0).clamp(0, 1), strokes) + 2).all())
    for start in range(3):
        draw = stream(start, "codes")
        codes = torch.rand(3, 1, 8, 8, generator=draw, dtype=torch.float64).requires_grad_()
        search = torch.optim.Adam([codes], lr=0.03)
        for _ in range(600):
            search.zero_grad()
            (space.decode(codes).clamp(0, 1) - strokes).square().sum().backward()
            search.step()
        assert bool((psnr(space.decode(codes.detach()).clamp(0, 1), strokes) < found).all())


def test_gradients_reach_the_codes() -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 8, 8)).to(dtype=torch.float64)
    view, _ = one_step(task, worlds.images(1, "rog"))
    attack = attacks.build({"name": "rog", "preset": "published"})
    assert isinstance(attack, GradientMatching)
    problem = attack.build_problem(view)
    codes = attack.initial_variables(problem, 0, 0)[INPUTS][None]
    assert codes.shape == (1, 1, 1, 2, 2)
    assert 0 <= codes.min() <= codes.max() < 1
    stack = ProblemBatch([problem])
    _, grads = stack.evaluate({INPUTS: codes})
    for at in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[at] = 1e-5
        ends = [stack.evaluate({INPUTS: codes + s * step.view_as(codes)})[0].item() for s in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(grads[INPUTS].flatten()[at].item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["l2", "cosine"])
def test_an_image_that_codes_can_show_is_found(objective: str) -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 16, 16)).to(dtype=torch.float64)
    view, truth = one_step(task, Batch(smooth(1, 16), torch.tensor([2])))
    settings = {"name": "rog", "preset": "published", "iterations": 150, "objective": objective}
    found = attacks.build(settings)(view, seed=0)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.labels is not None
    assert psnr(found.inputs, truth.inputs).item() > 30
    assert found.labels.tolist() == [2]  # the authors' code is given it
    assert found.knowledge == ()


def test_clamped_codes_find_more_of_black_and_white() -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 16, 16)).to(dtype=torch.float64)
    views, truths = zip(*(one_step(task, Batch(image[None], torch.tensor([2]))) for image in drawn()), strict=True)
    scores = {}
    for clamped in (False, True):
        attack = attacks.build({"name": "rog", "iterations": 120, "tv_weight": 0.0, "clamp_upsampled": clamped})
        found = attack.run(views, [0, 1, 2])
        images = torch.cat([each.inputs for each in found if isinstance(each, Reconstruction)])  # type: ignore[misc]
        scores[clamped] = psnr(images, torch.cat([truth.inputs for truth in truths]))
        limits = best_decodable(drawn(), 2)
        assert bool((scores[clamped] <= psnr(limits, drawn()) + 1e-6).all())
    assert scores[True].mean() > scores[False].mean() + 2


@pytest.mark.parametrize("setting", [{"clamp_pixels": True}, {"decoder": "file.pt"}])
def test_clamping_is_for_codes_that_can_overshoot(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected clamp_upsampled=False"):
        attacks.build({"name": "rog", "clamp_upsampled": True, **setting})


def test_several_views_share_a_stack() -> None:
    views = [one_step(worlds.task(), worlds.images(1, "stack", i))[0] for i in range(3)]
    attack = attacks.build({"name": "rog", "iterations": 8, "restarts": 2})
    for together, alone in zip(attack.run(views, [1, 2, 3]), map(attack, views), strict=True):
        assert isinstance(together, Reconstruction)
        assert isinstance(alone, Reconstruction)
        assert together.inputs is not None
        assert together.inputs.shape == (1, 1, 8, 8)
    first = attack(views[0], seed=1)
    assert isinstance(first, Reconstruction)
    assert first.inputs is not None
    again = attack.run(views, [1, 2, 3])[0]
    assert isinstance(again, Reconstruction)
    assert (first.inputs - again.inputs).abs().max() < 1e-7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A decoder and an enhancer of smooth images, trained for moments."""
    folder, images = tmp_path_factory.mktemp("trained"), smooth(256, 8).float()
    paths = {}
    for kind, steps in (("decoder", 80), ("enhancer", 5)):
        network = image_networks.train(kind, images, factor=2, steps=steps)
        image_networks.save(network, folder / f"{kind}.npz", "smooth images")
        paths[kind] = str(folder / f"{kind}.npz")
    return paths


def test_a_trained_decoder_can_be_searched_and_an_enhancer_follows(trained: dict[str, str]) -> None:
    task = build_model("lenet-zhu", num_classes=3, input_shape=(1, 8, 8))
    view, truth = one_step(task, Batch(smooth(1, 8).float(), torch.tensor([1])))
    settings = {"name": "rog", "iterations": 150, "objective": "cosine", "tv_weight": 0, "decoder": trained["decoder"]}
    found = attacks.build(settings)(view, seed=0)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert psnr(found.inputs, truth.inputs) > psnr(truth.inputs.mean().expand_as(truth.inputs), truth.inputs) + 2
    assert found.knowledge == ("public images (decoder)",)
    sharper = attacks.build({**settings, "enhancer": trained["enhancer"]})(view, seed=0)
    assert isinstance(sharper, Reconstruction)
    assert sharper.inputs is not None
    assert sharper.knowledge == ("public images (decoder)", "public images (enhancer)")
    assert sharper.objective == found.objective
    network = image_networks.load(trained["enhancer"], "enhancer")
    assert torch.equal(sharper.inputs, network(found.inputs).clamp(0, 1))


@pytest.mark.slow
def test_an_enhancer_sharpens_what_it_was_trained_on() -> None:
    phase = 6.3 * torch.rand(128, 1, 1, 1, generator=stream(0, "stripes"))
    images = 0.5 + 0.4 * torch.sign(torch.sin(phase + torch.arange(8) * 0.5)).expand(-1, 1, 8, 8)
    network = image_networks.train("enhancer", images[:96], factor=2, steps=120)
    blurred = best_decodable(images[96:], 2)
    assert psnr(network(blurred).clamp(0, 1), images[96:]).mean() > psnr(blurred, images[96:]).mean() + 1


def test_training_and_files_repeat_bit_for_bit(trained: dict[str, str], tmp_path: Path) -> None:
    network = image_networks.train("decoder", smooth(256, 8).float(), factor=2, steps=80)
    kept = image_networks.load(trained["decoder"], "decoder")
    assert image_networks.load(trained["decoder"], "decoder") is kept
    for name, value in network.state_dict().items():
        assert torch.equal(value, kept.state_dict()[name])
    assert not any(p.requires_grad for p in kept.parameters())


def test_a_missing_or_wrong_file_says_how_to_make_one(trained: dict[str, str], tmp_path: Path) -> None:
    view, _ = one_step(worlds.task(), worlds.images(1, "file"))
    with pytest.raises(
        ValueError,
        match=r"python -m attacks.gradient_matching.engine.image_networks decoder --dataset .* --out nowhere.npz",
    ):
        attacks.build({"name": "rog", "decoder": "nowhere.npz"})(view)
    with pytest.raises(
        ValueError,
        match=r"got a trained decoder; make one with: python -m [a-z_.]+ enhancer",
    ):
        attacks.build({"name": "rog", "enhancer": trained["decoder"]})(view)
    np.savez(tmp_path / "else.npz", weights=np.zeros(3))
    np.savez(tmp_path / "list.npz", head=np.array("[1]"))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("no arrays")
    (tmp_path / "empty.npz").touch()
    for name in ("else.npz", "list.npz", "array.npy", "text.npz", "empty.npz"):
        with pytest.raises(ValueError, match="make one with"):
            image_networks.load(str(tmp_path / name), "decoder")


def test_networks_for_other_images_are_refused(trained: dict[str, str]) -> None:
    for shape, word in (((3, 16, 16), "1 channels"), ((1, 15, 16), "multiples of 2")):
        view, _ = one_step(
            build_model("linear", num_classes=3, input_shape=shape),
            Batch(torch.rand(1, *shape, generator=stream(0, "x")), torch.tensor([0])),
        )
        refused = attacks.build({"name": "rog", "decoder": trained["decoder"]})(view)
        assert isinstance(refused, NotApplicable)
        assert word in refused.reason


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="factor"):
        attacks.build({"name": "rog", "factor": 3})
    with pytest.raises(ValueError, match="clamp_pixels"):
        attacks.build({"name": "rog", "decoder": "d.npz", "clamp_pixels": True})
    with pytest.raises(ValueError, match="expected factor 1, 2 or 4, got 3"):
        image_networks.Decoder(1, 3)
    images = torch.rand(4, 1, 10, 9, generator=stream(0, "x"))
    for kind, steps, word in (
        ("decoder", 1, "multiples of 4, not 10 x 9"),
        ("enhancer", 0, "steps=0"),
        ("x", 1, "'x'"),
    ):
        with pytest.raises(ValueError, match=word):
            image_networks.train(kind, images, factor=4, steps=steps)


def test_the_command_trains_on_a_data_set_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "decoder.npz"
    image_networks.main(["decoder", "--dataset", "faces", "--out", str(out), "--steps", "2", "--factor", "2"])
    assert str(out) in capsys.readouterr().out
    assert image_networks.load(str(out), "decoder").factor == 2


def test_the_authors_lenet_has_no_bias_in_its_linear_layers() -> None:
    task = build_model("lenet-rog", num_classes=10, input_shape=(3, 16, 16))
    shapes = {name: tuple(p.shape) for name, p in task.parameters.items()}
    assert shapes == {
        "body.conv1.weight": (32, 3, 5, 5),
        "body.conv1.bias": (32,),
        "body.conv2.weight": (64, 32, 5, 5),
        "body.conv2.bias": (64,),
        "body.fc1.weight": (512, 64 * 4 * 4),
        "head.weight": (10, 512),
    }
    view, _ = one_step(task, Batch(torch.rand(1, 3, 16, 16, generator=stream(0, "x")), torch.tensor([7])))
    found = attacks.build({"name": "rog", "iterations": 2})(view)
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert found.labels.tolist() == [7]
