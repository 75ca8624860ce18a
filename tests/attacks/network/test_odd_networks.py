"""Networks that exact attacks can't follow: a reason that names what is in the way, not an error from inside torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.brief import brief_picture_searches
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, attacks, build
from attacks.gradient_matching.engine.regularizers import total_variation
from attacks.network.autograd_support import autograd_obstacle
from attacks.network.reading_cache import readings_cached
from attacks.update.first_linear_layer import first_linear
from benchmarks.reliability.odd_models import STYLES, written
from fl.capture import from_batch, from_update
from fl.seeds import stream
from fl.view import ServerView


class Recurrent(nn.Module):
    """Reads an image row by row; its LSTM returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x[:, 0])[0][:, -1])


class Mixing(nn.Module):
    """Reads what an image holds across the images of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = Turned(), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x[:, 0]).flatten(1))


class Turned(nn.Module):
    """A layer of rows, which stand where the images should."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).relu().transpose(0, 1)


class Named(nn.Module):
    """Hands its layer the input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=x.flatten(1))


class Fixed(nn.Module):
    """Takes batches of one size only."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.head = count, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.view(self.count, 64))


def seen(model: nn.Module) -> ServerView:
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image"))
    return from_batch(model, image, torch.tensor([1]))[0]


def reason(attack: str, view: ServerView) -> str:
    result = build(attack)(view)
    assert isinstance(result, NotApplicable)
    return result.reason


@pytest.mark.parametrize("attack", ["rconv", "rgap"])
def test_a_module_that_mixes_images_with_what_they_hold_is_named(attack: str) -> None:
    assert "transpose in rows (Turned) mixes the dimension of the images with others" in reason(attack, seen(Mixing()))


@pytest.mark.parametrize("attack", ["rconv", "rgap", "backsolve"])
def test_a_recurrent_layer_is_refused_by_its_kind_where_cascade_may_solve_it(attack: str) -> None:
    said = reason(attack, seen(Recurrent()))
    assert "'rows' (LSTM) is recurrent" in said
    assert "cascade solves the steps of one example together" in said


def test_a_recurrent_layer_of_a_batch_is_refused_by_its_kind() -> None:
    images = torch.rand(2, 1, 8, 8, generator=stream(0, "image"))
    view, _ = from_batch(Recurrent(), images, torch.tensor([1, 2]))
    said = reason("cascade", view)
    assert "'rows' (LSTM) is recurrent" in said
    assert "a search can be tried: ig" in said


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
def test_a_module_that_is_called_by_keyword_is_followed(attack: str) -> None:
    result = build(attack)(seen(Named()))
    assert isinstance(result, Reconstruction)
    assert result.verified


@pytest.mark.parametrize("attack", ["analytic", "spear"])
def test_a_network_for_batches_of_one_image_is_attacked(attack: str) -> None:
    view = seen(Fixed(1))
    assert not isinstance(first_linear(view), NotApplicable)
    result = build(attack)(view)
    assert isinstance(result, Reconstruction)
    assert result.verified


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
def test_a_network_that_takes_no_single_image_is_refused(attack: str) -> None:
    model = Fixed(2)
    update = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    view = from_update(model, update, input_shape=(1, 8, 8), num_classes=3, batch_size=2, kind="gradient")
    said = reason(attack, view)
    if attack != "rgap":  # it takes one image alone
        assert "does not run on one image by itself" in said


@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=pytest.mark.slow if style == "gated" else ()) for style in STYLES]
)  # a gated network has a thousand operations; a recurrent one is met beside it
def test_no_style_of_writing_ends_an_attack_with_an_error(style: str) -> None:
    view = seen(written(style, 1, 3, nn.ReLU()).eval())
    with brief_picture_searches(), readings_cached():
        for name in ("analytic", "rconv", "cascade", "spear", "headless", "rgap", {"name": "ig", "iterations": 1}):
            result = build(name)(view)
            assert isinstance(result, Reconstruction) or result.reason


def test_a_layer_without_a_second_derivative_is_named() -> None:
    view = seen(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(72, 3)))
    for name in ("ig", "dlg", "idlg", "gradinversion", "rog"):
        result = attacks.get(name).example()(view)
        assert isinstance(result, NotApplicable)
        assert result.limit
        assert "torch can't: derivative for aten::hardsigmoid_backward is not implemented" in result.reason


def test_faults_of_an_attack_are_not_laid_on_a_layer_without_a_second_derivative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = seen(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(72, 3)))

    def fail(pixels: Tensor, std: Tensor) -> Tensor:
        return total_variation(pixels.repeat(1, 2, 1, 1), std.new_ones(3))

    monkeypatch.setattr("attacks.gradient_matching.engine.problem.total_variation", fail)
    with pytest.raises(RuntimeError, match="must match the size"):
        build({"name": "ig", "tv_weight": 0.1})(view)


def test_a_lack_of_memory_is_not_laid_on_a_layer_without_a_second_derivative() -> None:
    view = seen(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(72, 3)))
    assert autograd_obstacle(view, RuntimeError("derivative")) is not None
    assert autograd_obstacle(view, torch.OutOfMemoryError("out of memory")) is None


@pytest.mark.parametrize("style", ["gated", "own_gradient"])
def test_networks_that_can_not_be_stacked_are_searched_one_by_one(style: str) -> None:
    view = seen(written(style, 1, 3, nn.Tanh()))
    together = build({"name": "ig", "iterations": 2, "restarts": 2})(view)
    alone = build({"name": "ig", "iterations": 2, "restarts": 2, "max_parallel_trials": 1})(view)
    assert isinstance(together, Reconstruction)
    assert isinstance(alone, Reconstruction)
    assert together.objective == alone.objective


def test_a_recurrent_network_is_searched_without_a_record() -> None:
    result = build({"name": "ig", "iterations": 150, "tv_weight": 0})(seen(Recurrent()))
    assert isinstance(result, Reconstruction)
    assert result.objective < 0.5


@pytest.mark.parametrize("shape", [(1, 1, 9), (1, 9, 1), (2, 1, 1)])
def test_images_of_one_row_have_a_total_variation(shape: tuple[int, int, int]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(shape).prod()), 4), nn.Tanh(), nn.Linear(4, 3))
    view = from_batch(model, torch.rand(1, *shape, generator=stream(0, "image")), torch.tensor([1]))[0]
    result = build({"name": "ig", "iterations": 5})(view)
    assert isinstance(result, Reconstruction)
    assert torch.tensor(result.objective).isfinite()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_computes_are_no_obstacle_to_a_search(norm: Callable[[nn.Module], nn.Module]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream(0, "hooked").get_state())
        model = nn.Sequential(norm(nn.Conv2d(1, 2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)).eval()
        model(torch.rand(1, 1, 8, 8))
    view = seen(model)
    for name in ("rconv", "cascade", "analytic", "headless", {"name": "ig", "iterations": 60}):
        result = build(name)(view)
        assert isinstance(result, Reconstruction) or result.reason
    assert isinstance(result, Reconstruction)
    assert not result.given_up


class Wrapped(nn.Module):
    """Returns its logits in something else, as `how` makes it."""

    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> object:
        return self.how(self.head(x.flatten(1)))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda z: (z, z), r"got tuple of 0 \(1, 3\), 1 \(1, 3\); say which by output="),
        (lambda z: {"a": z, "b": z}, r"got dict of 'a' \(1, 3\), 'b' \(1, 3\); say which by output="),
        (lambda z: z[:, :, None], r"got \(1, 3, 1\); for a class of every pixel or step give loss='segmentation'"),
    ],
)
def test_outputs_that_are_no_logits_are_refused_by_name(how: Callable[[Tensor], object], said: str) -> None:
    model, image = Wrapped(how), torch.zeros(1, 1, 8, 8)
    update = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        from_batch(model, image, torch.tensor([1]))
    with pytest.raises(ValueError, match=said):
        from_update(model, update, input_shape=(1, 8, 8), num_classes=3)


class Pair(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head((x * mask).flatten(1))


def test_what_can_not_be_called_on_images_alone_is_refused() -> None:
    update = {name: torch.rand_like(value) for name, value in Pair().named_parameters()}
    for refused in (
        lambda: from_batch(Pair(), torch.zeros(1, 1, 8, 8), torch.tensor([1])),
        lambda: from_update(Pair(), update, input_shape=(1, 8, 8), num_classes=3),
    ):
        with pytest.raises(ValueError, match="missing 1 required positional argument: 'mask'"):
            refused()


def test_a_number_of_classes_that_is_not_the_models_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    update = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match="expected num_classes 3, as the model has, got 7"):
        from_update(model, update, input_shape=(1, 8, 8), num_classes=7, head="1.")


def test_rows_of_a_table_need_a_range_where_they_leave_that_of_pixels() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 3))
    with pytest.raises(ValueError, match="range"):
        from_batch(model, torch.full((1, 30), -2.0), torch.tensor([1]))
    view, truth = from_batch(model, torch.rand(1, 1, 1, 30, generator=stream(0, "row")), torch.tensor([1]))
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert torch.allclose(result.inputs, truth.inputs, atol=1e-4)


class Prepared(nn.Module):
    """Changes the pixels before its layers take them."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int = 64) -> None:
        super().__init__()
        self.change = change
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.change(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (15 * x).round() / 15,
        lambda x: (x > 0.5).float(),
        lambda x: (255 * x).to(torch.uint8).float(),
        lambda x: torch.eye(256)[(255 * x).round().long()].flatten(1)[:, ::256],
    ],
    ids=["rounded", "threshold", "bytes", "indices"],
)
@pytest.mark.parametrize("attack", ["cascade", "ig"])
def test_pixels_that_no_gradient_reaches_are_no_error_of_torch(attack: str, change: Callable[[Tensor], Tensor]) -> None:
    settings = {"name": attack, "iterations": 1} if attack == "ig" else attack
    result = build(settings)(seen(Prepared(change)))
    if isinstance(result, NotApplicable):
        assert result.limit
        assert "no gradient gets there: rounding, thresholds or whole numbers" in result.reason
    else:
        assert not result.verified


def test_what_is_no_floating_point_number_is_named() -> None:
    assert "gt in the forward returns numbers of another kind (torch.bool)" in reason(
        "rconv", seen(Prepared(lambda x: (x > 0.5).float()))
    )


def test_complex_numbers_between_are_followed() -> None:
    result = build("cascade")(seen(Prepared(lambda x: torch.fft.fft2(x).abs())))
    assert isinstance(result, Reconstruction)
    assert not result.verified  # amplitudes alone


class Unflattened(nn.Module):
    """A convolution over what a linear layer returns, as decoders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.head = nn.Linear(64, 128), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        planes = self.first(x.flatten(1)).relu().unflatten(1, (8, 4, 4))
        return self.head(self.conv(planes).relu().flatten(1))


@pytest.mark.parametrize("attack", ["rconv", "cascade"])
def test_a_convolution_behind_a_linear_layer_is_undone(attack: str) -> None:
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image"))
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream(3, "unflattened").get_state())
        view = from_batch(Unflattened(), image, torch.tensor([1]))[0]
    result = build(attack)(view)
    assert isinstance(result, Reconstruction)
    assert torch.allclose(result.inputs, image, atol=1e-3)


def _by_channel(x: Tensor) -> Tensor:
    x = x.clone()
    for channel in range(3):
        x[:, channel] -= 0.1 * channel
    return x


def _assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 2 * x[:, 0] - 1
    return x


def _bordered(x: Tensor) -> Tensor:
    wider = torch.zeros(len(x), 3, 8, 8)
    wider[:, :, 1:-1, 1:-1] = x
    return wider


def _shifted(x: Tensor) -> Tensor:
    moved = torch.zeros_like(x)
    moved[:, 1:], moved[:, 0] = x[:, :-1], x[:, -1]
    return moved


class Filtered(nn.Module):
    """A convolution between two changes of what flows."""

    def __init__(self, size: int, mode: str, *changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, padding_mode=mode)
        self.head, self.changes = nn.Linear(16 * size**2, 3), changes

    def forward(self, x: Tensor) -> Tensor:
        before, after = self.changes
        return self.head(after(self.conv(before(x)).relu()).flatten(1))


def same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("attack", ["rconv", "cascade"])
@pytest.mark.parametrize(
    "settings",
    [
        (6, "circular", same, same),
        (6, "zeros", _by_channel, same),
        (6, "zeros", _assigned, same),
        (8, "zeros", _bordered, same),
        (6, "zeros", same, _shifted),
    ],
    ids=["circular padding", "channel by channel", "assigned", "border", "shifted channels"],
)
def test_parts_of_tensors_written_in_place_are_followed(
    attack: str, settings: tuple[int, str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
) -> None:
    image = torch.randint(256, (1, 3, 6, 6), generator=stream(0, "image")) / 255
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream(0, "filtered").get_state())
        view = from_batch(Filtered(*settings), image, torch.tensor([1]))[0]
    result = build(attack)(view)
    assert isinstance(result, Reconstruction), result.reason
    assert result.verified
    assert torch.allclose(result.inputs, image, atol=1e-3)


def small_images(count: int = 1) -> Tensor:
    return torch.rand(count, 3, 2, 2, generator=stream(0, "squeezed"))


class Squeezed(nn.Module):
    """A network that takes every dimension of one off its features, or its outputs: of one example the batch's, too."""

    def __init__(self, classes: int, *, inside: bool) -> None:
        super().__init__()
        self.body, self.head, self.inside = nn.Linear(12, 8), nn.Linear(8, classes), inside

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x.flatten(1)))
        outputs: Tensor = self.head(x.squeeze() if self.inside else x)
        return outputs.squeeze()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("loss", ["bce", "cross-entropy"])
def test_squeezed_outputs_of_one_example_are_those_of_a_batch_of_one(count, inside, loss):
    labels = torch.tensor([1, 0])[:count]
    model = Squeezed(1 if loss == "bce" else 3, inside=inside)
    view, truth = from_batch(model, small_images(count), labels.float() if loss == "bce" else labels, loss=loss)
    assert view.task.output_shape == ((1,) if loss == "bce" else (3,))
    result = build("analytic")(view, seed=0)  # which asks for what single examples give
    if count == 1:
        torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [lambda x: x.flatten(), lambda x: x[:, 0], lambda x: x.squeeze(1)])
def test_exact_attacks_follow_a_network_that_returns_single_numbers(shape):
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return shape(self.head(torch.tanh(self.body(x.flatten(1)))))

    view, truth = from_batch(Single(), small_images(), torch.tensor([1.0]), loss="bce")
    result = build("cascade")(view, seed=0)
    torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)
