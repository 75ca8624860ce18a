import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attacks
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.secagg import SecAgg
from eval.audit.input_shape import check_images_fit
from eval.audit.leakage_words import leakage
from fl.capture import CapturedUpdateSettings, ClientSettings, from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.types import Candidate
from fl.view import ThreatModel

SHAPE, CLASSES = (1, 6, 6), 3


def own_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, CLASSES))
    generator = stream(0, "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture
def model():
    return own_model()


@pytest.fixture
def batch():
    return torch.rand(2, *SHAPE, generator=stream(0, "images")), torch.tensor([2, 0])


@pytest.fixture
def gradient(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_from_batch_is_one_step_of_the_users_own_gradient(model, batch, gradient):
    view, truth = from_batch(model, *batch)
    assert view.update.keys() == gradient.keys()
    for name, value in gradient.items():
        torch.testing.assert_close(view.update[name], value, rtol=1e-4, atol=1e-6)
    assert view.task.head == "3."
    assert (view.task.num_classes, view.batch_size, view.labels) == (CLASSES, 2, None)
    assert torch.equal(truth.inputs, batch[0])


def test_model_and_batch_are_copied(model, batch):
    before = copy.deepcopy(model.state_dict())
    view, truth = from_batch(model, *batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        batch[0].fill_(float("nan"))
    assert all(value.isfinite().all() for value in view.shared.values())
    assert truth.inputs.isfinite().all()


def test_running_statistics_stay(batch):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, CLASSES))
    before = copy.deepcopy(model.state_dict())
    from_batch(model, *batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_from_batch_takes_any_method(model, batch):
    method = HyperFL(parametrization=Hypernetwork(embedding=3, hidden=6, init="scaled"), steps=1, head_epochs=0)
    view, truth = from_batch(model, *batch, method=method, threat=ThreatModel(knows_labels=True))
    assert set(view.private) == {"embedding", "3.weight", "3.bias"}
    assert torch.equal(view.labels, batch[1])
    assert set(truth.extractor) == {"0.weight", "0.bias"}


def test_attack_and_leakage(model, batch):
    view, truth = from_batch(model, *batch, threat=ThreatModel(knows_labels=True))
    attack = attacks.build({"name": "ig", "iterations": 300, "tv_weight": 0.0})
    text = leakage(attack(view), truth)
    assert text.count("PSNR") == 2
    assert "\nimage content leaked: 2 of 2 image(s) came back at 20 dB or more" in text
    assert "2 of 2 image(s) at least 1 dB above the best guess" in text
    assert leakage(attacks.NotApplicable("why not"), truth) == "not applicable: why not"
    assert "no images" in leakage(attacks.Reconstruction(None), truth)


class OwnLoss(nn.Module):
    """Computes its loss itself, of labels that it is given or of none."""

    def __init__(self, *, labels: bool) -> None:
        super().__init__()
        self.labels, self.layer = labels, nn.Linear(64, 3)

    def forward(self, x, *labels):
        if self.labels and not labels:
            raise TypeError("forward() missing 1 required positional argument: 'y'")
        return self.layer(x.flatten(1)).logsumexp(1).mean()


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_computes_its_loss_is_answered_with_what_to_give(labels, count):
    net, pictures = OwnLoss(labels=labels), torch.rand(count, 1, 8, 8, generator=stream(0, "own loss"))
    said = "give a model that returns outputs .logits. of inputs alone, and state the loss"
    with pytest.raises(ValueError, match=said):
        from_batch(net, pictures, torch.zeros(count, dtype=torch.int64))
    with pytest.raises(ValueError, match=said):
        from_update(net, {}, input_shape=(1, 8, 8), batch_size=count)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": torch.rand(1, 6, 6, generator=stream(0, "x"))}, r"expected labels int64 \(1,\)"),
        ({"inputs": torch.rand(2, 6, 7, generator=stream(0, "x"))}, "expected inputs that fit the model"),
        ({"inputs": torch.tensor(0.5)}, r"expected inputs \(B, ...\) of at least one example"),
        ({"inputs": torch.full((2, *SHAPE), 1.5)}, r"expected pixels in \[0, 1\], got \[1.5, 1.5\]"),
        ({"inputs": torch.full((2, *SHAPE), float("nan"))}, r"expected pixels in \[0, 1\]"),
        ({"inputs": torch.ones(2, *SHAPE, dtype=torch.uint8)}, "floating-point"),
        ({"inputs": torch.zeros(2, 3, 6, 6)}, "expected inputs that fit the model"),
        ({"labels": torch.tensor([0, 3])}, r"expected labels in \[0, 3\), got 0 to 3"),
        ({"labels": torch.tensor([[0, 1]])}, "expected labels int64"),
        ({"labels": torch.tensor([0.0, 1.0])}, "expected labels int64"),
        ({"num_classes": 4}, "expected num_classes 3"),
        ({"head": "classifier."}, "expected head as a prefix"),
        ({"model": nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten())}, "expected a model with an nn.Linear"),
        ({"model": nn.Conv2d(1, 3, 6)}, r"expected a model that returns logits \(B, K\)"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3))}, "without dropout"),
    ],
)
def test_from_batch_says_what_does_not_fit(model, batch, change, said):
    arguments = {"model": model, "inputs": batch[0], "labels": batch[1], **change}
    with pytest.raises(ValueError, match=said):
        from_batch(arguments.pop("model"), arguments.pop("inputs"), arguments.pop("labels"), **arguments)


def test_a_head_that_is_not_last_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Unflatten(1, (3, 2)), nn.AvgPool1d(2), nn.Flatten())
    with pytest.raises(ValueError, match="'1', to have 3 outputs, got 6"):
        from_update(model, {}, input_shape=SHAPE, num_classes=3)


def test_a_classifier_that_is_a_bare_parameter_is_found_beside_linear_layers():
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes = nn.Linear(36, 6), nn.Parameter(torch.eye(3, 6))

        def forward(self, x):
            return nn.functional.normalize(self.body(x.flatten(1))) @ nn.functional.normalize(self.classes).T

    view, _ = from_batch(Cosine(), torch.rand(1, *SHAPE, generator=stream(0, "cosine")), torch.tensor([1]))
    assert view.task.head == "classes"


def test_a_network_that_takes_its_input_by_name_alone_is_answered_with_how_to_give_it():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, *, image):
            return self.head(image.flatten(1))

    pictures = torch.rand(1, *SHAPE, generator=stream(0, "named"))
    with pytest.raises(ValueError, match="give inputs by the names of forward's arguments"):
        from_batch(Named(), pictures, torch.tensor([1]))
    assert from_batch(Named(), {"image": pictures}, torch.tensor([1]))[0].batch_size == 1


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pictures_are_brought_to_the_type_of_the_model(given, dtype):
    pictures = torch.rand(1, *SHAPE, generator=stream(0, "types")).to(given)
    view, truth = from_batch(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).to(dtype), pictures, torch.tensor([1]))
    assert view.dtype == truth.inputs.dtype == dtype


@pytest.mark.parametrize("lr", [1.0, 0.1])
def test_captured_update_and_gradient_agree_with_the_prediction(model, batch, gradient, lr):
    method = FedAvg(steps=1, batch_size=None, lr=lr)
    sent = {"gradient": gradient, "update": {name: lr * value for name, value in gradient.items()}}
    for kind, values in sent.items():
        view = from_update(
            model,
            values,
            input_shape=SHAPE,
            num_classes=CLASSES,
            method=method,
            batch_size=2,
            labels=batch[1],
            kind=kind,
        )
        predicted = predict(view, Candidate(*batch))
        for name in gradient:
            torch.testing.assert_close(predicted[name], view.update[name], rtol=1e-3, atol=1e-6)
        assert view.threat.knows_labels
    assert not isinstance(attacks.build({"name": "ig", "iterations": 2})(view), attacks.NotApplicable)


def test_a_captured_hypernetwork_needs_what_was_sent(model, batch):
    method = HyperFL(parametrization=Hypernetwork(embedding=3, hidden=6, init="scaled"), steps=1, head_epochs=0)
    seen, truth = from_batch(model, *batch, method=method)
    update = {n: v if isinstance(v, torch.Tensor) else v.dense() for n, v in seen.update.items()}
    settings = {"input_shape": SHAPE, "num_classes": CLASSES, "method": method, "batch_size": 2}
    with pytest.raises(ValueError, match="expected what the server sent as `shared`"):
        from_update(model, update, **settings)
    view = from_update(model, update, shared=seen.shared, **settings)
    assert view.private == seen.private
    predicted = predict(view, truth.candidate())
    for name, value in update.items():
        got = predicted[name] if isinstance(predicted[name], torch.Tensor) else predicted[name].dense()
        torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"3.weight": None, "4.weight": torch.zeros(3, 144)},
            r"missing '3.weight'; unexpected '4.weight' \(did you mean '3.w",
        ),
        ({"0.bias": None}, "missing '0.bias'"),
        ({"extra": torch.zeros(1)}, "unexpected 'extra'"),
        ({"0.bias": torch.zeros(5)}, r"expected '0.bias' of shape \(4,\), got \(5,\)"),
        ({"0.bias": [0, 0, 0, 0]}, r"expected '0.bias' as a tensor \(4,\), got list"),
        ({"0.bias": torch.tensor([0.0, float("nan"), 0.0, float("inf")])}, r"in '0.bias' \(2 of them\)"),
    ],
)
def test_from_update_says_which_tensor(model, gradient, change, said):
    values = {name: value for name, value in {**gradient, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=said):
        from_update(model, values, input_shape=SHAPE, num_classes=CLASSES)


def test_errors_show_a_few_names_and_count_the_rest(gradient):
    strange = {f"layer{number}.weight": torch.zeros(1) for number in range(40)}
    with pytest.raises(ValueError, match=r"unexpected .layer0.weight.*, .layer4\.weight. .* and 35 more$") as caught:
        from_update(own_model(), {**gradient, **strange}, input_shape=SHAPE, num_classes=CLASSES)
    assert "layer5" not in str(caught.value)
    deep = nn.Sequential(nn.Flatten(), *(nn.Linear(36, 36) for _ in range(4)), nn.Linear(36, CLASSES))
    with pytest.raises(ValueError, match=r"missing '1.weight', .* '3.weight' and 5 more$"):
        from_update(deep, {}, input_shape=SHAPE, num_classes=CLASSES)
    with pytest.raises(ValueError, match=r"names: 1.weight, .*, 3.weight and 5 more$"):
        from_update(deep, {}, input_shape=SHAPE, num_classes=CLASSES, head="top.")


def test_buffers_are_no_parameters(batch):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, CLASSES))
    update = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'0\.running_mean' .a buffer, not a parameter: leave it out"):
        from_update(model, update, input_shape=SHAPE, num_classes=CLASSES)
    update = {name: value for name, value in update.items() if not name.startswith(("0.running", "0.num"))}
    buffers = {**dict(model.named_buffers()), "0.running_mean": torch.tensor([0.25])}
    view = from_update(model, update, input_shape=SHAPE, num_classes=CLASSES, buffers=buffers)
    assert view.buffers["0.running_mean"].item() == 0.25
    assert view.buffers_after is None


def test_buffers_that_came_back_are_seen_where_the_threat_model_says_so(batch):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, CLASSES))
    update = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    after = {**dict(model.named_buffers()), "0.running_mean": torch.tensor([0.25])}
    known = {"input_shape": SHAPE, "num_classes": CLASSES, "batch_size": 2}
    view = from_update(model, update, buffers_after=after, **known)
    assert view.buffers["0.running_mean"].item() == 0
    assert view.buffers_after["0.running_mean"].item() == 0.25
    blind = from_update(model, update, buffers_after=after, threat=ThreatModel(sees_buffers=False), **known)
    assert blind.buffers_after is None
    with pytest.raises(ValueError, match="buffers_after: expected a tensor for each of 3 names; missing"):
        from_update(model, update, buffers_after={}, **known)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "delta"}, "expected kind"),
        ({"batch_size": 0}, "expected batch_size, an int >= 1"),
        ({"labels": torch.tensor([0])}, r"expected labels int64 \(2,\)"),
        ({"labels": torch.tensor([0, 7])}, r"expected labels in \[0, 3\)"),
        ({"threat": ThreatModel(knows_labels=True)}, "expected labels under a threat model"),
        ({"kind": "gradient", "method": FedAvg(epochs=2)}, "expected a method of one plain SGD step"),
        ({"kind": "gradient", "method": FedAvg(steps=1, weight_decay=0.1)}, "decay or clipping"),
    ],
)
def test_from_update_says_which_setting(model, gradient, settings, said):
    with pytest.raises(ValueError, match=said):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, **{"batch_size": 2, **settings})


def normed():
    return nn.Sequential(nn.Conv2d(1, 2, 6), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, CLASSES))


class FunctionalDropout(nn.Module):
    def __init__(self, always=False):
        super().__init__()
        self.linear, self.always = nn.Linear(36, CLASSES), always

    def forward(self, inputs):
        return self.linear(nn.functional.dropout(inputs.flatten(1), 0.5, training=self.training or self.always))


def test_batch_norm_on_one_image_says_what_to_do(batch):
    one = batch[0][:1], batch[1][:1]
    evaluated = FedAvg(steps=1, batch_size=None, train_mode=False)
    with pytest.raises(
        ValueError, match=r"in train mode on a batch of 1 .* call model\.eval\(\), or pass method=FedAvg"
    ):
        from_batch(normed(), *one)
    with pytest.raises(ValueError, match="; set train_mode=False in the method"):
        from_batch(normed(), *one, method=FedAvg(steps=1))
    with pytest.raises(ValueError, match="on a batch of 1 image"):  # the last of three in batches of two
        from_batch(normed(), batch[0][[0, 1, 0]], batch[1][[0, 1, 0]], method=FedAvg(batch_size=2))
    for model, method in ((normed().eval(), None), (normed(), evaluated)):
        view, _ = from_batch(model, *one, method=method)
        assert all(value.isfinite().all() for value in view.update.values())
    gradient = {name: torch.zeros_like(value) for name, value in normed().named_parameters()}
    with pytest.raises(ValueError, match=r"call model\.eval"):
        from_update(normed(), gradient, input_shape=SHAPE, num_classes=CLASSES)


def test_functional_dropout_is_refused(batch):
    usual, always = FunctionalDropout(), FunctionalDropout(always=True).eval()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"without random numbers in train mode.* call model\.eval"):
        from_batch(usual, *batch)
    with pytest.raises(ValueError, match=r"in evaluation mode.*training=self\.training"):
        from_batch(always, *batch)
    assert torch.equal(torch.get_rng_state(), state)
    from_batch(usual.eval(), *batch)


class Flipping(nn.Module):
    """Flips pictures where the generator that `draws` asks says so."""

    def __init__(self, draws: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(36, CLASSES)
        self.draws, self.numpy, self.torch = draws, np.random.default_rng(0), torch.Generator()
        self.python = random.Random(0)

    def forward(self, inputs):
        return self.linear((inputs.flip(-1) if self.draws(self) < 0.5 else inputs).flatten(1))


@pytest.mark.parametrize(
    "draws",
    [
        lambda _: random.random(),
        lambda _: np.random.rand(),  # noqa: NPY002  what users have
        lambda model: model.numpy.random(),
        lambda model: model.python.random(),
        lambda model: torch.rand(1, generator=model.torch).item(),
    ],
    ids=["python", "numpy", "numpy's own", "python's own", "torch's own"],
)
def test_random_numbers_are_noticed_wherever_they_come_from(batch, draws) -> None:
    """A picture turned by such a draw was confirmed as the one that was trained on."""

    def shared():
        return random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002  that nothing draws from it

    flipping, states = Flipping(draws), shared()
    with pytest.raises(ValueError, match=r"without random numbers in train mode.* call model\.eval"):
        from_batch(flipping, *batch)
    with pytest.raises(ValueError, match=r"without random numbers in evaluation mode.*if self\.training"):
        from_update(
            flipping.eval(),
            {name: torch.ones_like(value) for name, value in flipping.named_parameters()},
            input_shape=SHAPE,
            num_classes=CLASSES,
        )
    assert shared() == states


def test_mean_and_std_reach_the_task(model, batch, gradient):
    view, _ = from_batch(model, *batch, mean=[0.4], std=[0.2])
    captured = from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, mean=[0.4], std=[0.2])
    for task in (view.task, captured.task):
        assert (task.mean, task.std) == ((0.4,), (0.2,))
    with pytest.raises(ValueError, match="one mean and std for each of 1 channels"):
        from_batch(model, *batch, mean=[0.4, 0.4, 0.4])
    with pytest.raises(ValueError, match="expected std > 0"):
        from_batch(model, *batch, std=[0.0])


def test_frozen_parameters_are_not_trained(model, batch, gradient):
    model[0].requires_grad_(False)
    trained = {name: value for name, value in gradient.items() if name.startswith("3.")}
    view, truth = from_batch(model, *batch, threat=ThreatModel(knows_labels=True))
    captured = from_update(
        model, trained, input_shape=SHAPE, num_classes=CLASSES, batch_size=2, labels=batch[1], kind="gradient"
    )
    for seen in (view, captured):
        assert seen.update.keys() == trained.keys()
        assert torch.equal(seen.task.model[0].weight, model[0].weight)
        assert not seen.buffers
        predicted = predict(seen, truth.candidate())
        for name, value in trained.items():
            torch.testing.assert_close(seen.update[name], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(predicted[name], seen.update[name], rtol=1e-4, atol=1e-6)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"0.weight", "0.bias"}
    assert not isinstance(attacks.build({"name": "ig", "iterations": 2})(view), attacks.NotApplicable)
    from_update(model, trained, input_shape=SHAPE, num_classes=CLASSES, buffers=dict(model.named_buffers()))
    with pytest.raises(ValueError, match=r"unexpected '0\.weight' \(frozen by requires_grad=False"):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES)
    with pytest.raises(ValueError, match="parameters to train, got none"):
        from_batch(model.requires_grad_(False), *batch)


@pytest.mark.parametrize("knows", ["knows_private_init", "knows_order", "knows_randomness", "history_rounds"])
def test_a_captured_update_refuses_knowledge_it_lacks(model, gradient, knows):
    threat = ThreatModel(**{knows: 1 if knows == "history_rounds" else True})
    with pytest.raises(ValueError, match=f"expected a threat model without {knows}"):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, threat=threat)


class Views(nn.Module):
    """A convolution that flattens by `view`, as many tutorials do: it takes contiguous tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc(x.view(x.size(0), -1))


@pytest.mark.parametrize("count", [1, 2])
def test_models_that_flatten_by_view_are_taken(count: int) -> None:
    view, truth = from_batch(Views(), torch.rand(count, 3, 8, 8), torch.arange(count))
    assert truth.inputs.is_contiguous()
    assert set(view.update) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}


@pytest.mark.parametrize("chained", [False, True])
def test_one_client_has_no_group(model, batch, gradient, chained):
    defense = Chain(parts=(Clip(), SecAgg())) if chained else SecAgg()
    said = "secagg: a single client's batch or update has no group; leave the defense out"
    with pytest.raises(ValueError, match=said):
        from_batch(model, *batch, defense=defense)
    with pytest.raises(ValueError, match=said):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, batch_size=2, defense=defense)


def test_a_captured_updates_shape_and_types_are_checked(model, gradient):
    for shape in ((6, 6), (1, 6, 7)):
        with pytest.raises(ValueError, match=r"expected an input_shape \(C, H, W\) that the model takes"):
            from_update(model, gradient, input_shape=shape, num_classes=CLASSES)
    for shape in ((), (1, 1, 6, 6, 1), (1, 6, 0), (1, 6.0, 6), (True, 6, 6)):
        with pytest.raises(ValueError, match=r"expected input_shape \(C, H, W\), three positive ints"):
            from_update(model, gradient, input_shape=shape, num_classes=CLASSES)
    for shape in (None, 16):
        with pytest.raises(ValueError, match=r"expected input_shape \(C, H, W\), three positive ints"):
            from_update(model, gradient, input_shape=shape, num_classes=CLASSES)
    for classes in (3.0, True, {}, "3", 1):
        with pytest.raises(ValueError, match="expected num_classes, an int >= 2"):
            from_update(model, gradient, input_shape=SHAPE, num_classes=classes)
    for size in (1.5, 0, True, {}):
        with pytest.raises(ValueError, match="expected batch_size, an int >= 1"):
            from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, batch_size=size)
    kinds = [("in a floating-point type", torch.Tensor.long), ("in a floating-point type", lambda value: value + 0j)]
    for said, changed in (*kinds, ("as a dense tensor", torch.Tensor.to_sparse)):
        odd = {name: changed(value) for name, value in gradient.items()}
        with pytest.raises(ValueError, match=said):
            from_update(model, odd, input_shape=SHAPE, num_classes=CLASSES)


def test_integers_of_numpy_are_integers(model, gradient):
    shape = tuple(np.array(SHAPE))
    one = from_update(model, gradient, input_shape=shape, num_classes=np.int64(CLASSES), batch_size=np.int64(1))
    other = from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES)
    for given in (np.array([0.5]), torch.tensor([0.5]), [0.5]):
        assert from_update(
            model, gradient, input_shape=SHAPE, num_classes=CLASSES, mean=given, std=(1.0,)
        ).task.mean == (0.5,)
    assert one.task.input_shape == other.task.input_shape
    assert (one.task.num_classes, one.batch_size, one.schedule) == (CLASSES, 1, other.schedule)


def test_what_is_no_tensor_is_named(model, gradient):
    image, label = torch.rand(1, *SHAPE), torch.tensor([1])
    for inputs, labels, what in ((image.numpy(), label, "inputs"), (image, [1], "labels")):
        with pytest.raises(ValueError, match=f"expected {what} as a tensor"):
            from_batch(model, inputs, labels)
    with pytest.raises(ValueError, match=r"expected labels int64.*as a tensor"):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, labels=[1])
    for update in (None, list(gradient.values())):
        with pytest.raises(ValueError, match="update: expected tensors by name"):
            from_update(model, update, input_shape=SHAPE, num_classes=CLASSES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mean": (float("nan"),)}, "expected mean as finite numbers"),
        ({"mean": 0.5}, "expected mean as finite numbers"),
        ({"mean": ("a",)}, "expected mean as finite numbers"),
        ({"mean": (value for value in (0.5,))}, "expected mean as finite numbers"),
        ({"std": (float("inf"),)}, "expected std > 0 as finite numbers"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, "expected one mean and std for each of 1 channels"),
    ],
)
def test_a_normalization_that_is_none_is_refused(model, gradient, settings, said):
    with pytest.raises(ValueError, match=said):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, **settings)


def test_options_are_one_object_or_single_settings(model, batch, gradient):
    method = FedAvg(lr=0.1, steps=2, batch_size=1)
    one, _ = from_batch(model, *batch, method=method, mean=(0.5,), std=(0.2,), seed=3)
    same, _ = from_batch(model, *batch, options=ClientSettings(method=method, mean=(0.5,), std=(0.2,)), seed=3)
    assert one.method == same.method == method
    assert (one.task.mean, one.task.std) == (same.task.mean, same.task.std) == ((0.5,), (0.2,))
    assert all(torch.equal(value, same.update[name]) for name, value in one.update.items())
    images = {"input_shape": SHAPE, "num_classes": CLASSES}
    one = from_update(model, gradient, **images, batch_size=2, labels=batch[1], kind="gradient")
    options = CapturedUpdateSettings(batch_size=2, labels=batch[1], kind="gradient")
    same = from_update(model, gradient, **images, options=options)
    assert one.labels.tolist() == same.labels.tolist() == [2, 0]
    assert (one.batch_size, one.rounded) == (same.batch_size, same.rounded) == (2, False)


def test_settings_that_there_are_not_are_refused_by_name(model, batch, gradient):
    with pytest.raises(TypeError, match=r"unexpected setting 'metod'; did you mean 'method'\?"):
        from_batch(model, *batch, metod=FedAvg())
    with pytest.raises(TypeError, match=r"unexpected setting 'kind'; expected one of method, defense, threat"):
        from_batch(model, *batch, kind="gradient")
    with pytest.raises(ValueError, match="expected options or single settings, got both: seeds"):
        from_update(model, gradient, input_shape=SHAPE, num_classes=CLASSES, options=CapturedUpdateSettings(), seeds=1)


def test_a_model_that_runs_forward_alone_is_refused_by_what_its_backward_pass_raises() -> None:
    class WritesOverWhatItNeeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.first(images.flatten(1)).sigmoid()
            hidden[:, :3].relu_()
            return self.last(hidden)

    images, labels = torch.rand(1, 3, 2, 2), torch.tensor([1])
    with pytest.raises(ValueError, match="its backward pass raises: one of the variables needed for gradient"):
        from_batch(WritesOverWhatItNeeds(), images, labels)


def test_one_picture_without_a_dimension_of_the_batch_is_refused_with_how_to_add_it(model) -> None:
    with pytest.raises(ValueError, match=r"expected labels int64 \(3,\), got .*: inputs\[None\]"):
        from_batch(model, torch.rand(3, 6, 6), torch.tensor([1]))


def pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    """A contrastive loss: of each example of the first half against those of the second."""
    first, second = outputs.chunk(2)
    return nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))


def spread(outputs: Tensor, labels: Tensor) -> Tensor:
    centered = outputs - outputs.mean(0)
    return (centered / centered.norm()).square().sum()


def test_a_loss_that_compares_examples_is_refused_of_one(model, batch):
    images, labels = batch
    with pytest.raises(
        ValueError, match=r"raised ValueError: not enough values.* on 1 example.*takes several .batch_s"
    ):
        from_batch(model, images[:1], labels[:1], loss=pairs)
    with pytest.raises(ValueError, match=r"numbers that are not finite in '0\.weight'.*takes several .batch_size"):
        from_batch(model, images[:1], labels[:1], loss=spread)
    assert from_batch(model, images, labels, loss=pairs)[0].batch_size == len(images)


def parted(change: Callable[[nn.Sequential], object]) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).eval()
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model[3].to("meta"), r"got '3\.weight'.* on the device meta: build it elsewhere"),
        (lambda model: setattr(model[2], "running_mean", torch.zeros(8, device="meta")), r"'2\.running_mean' on the"),
        (
            lambda model: model[3].double(),
            r"'1\.weight' in torch\.float32 and '3\.weight' in torch\.float64: call",
        ),
        (lambda model: model[1].half(), r"'1\.weight' in torch\.float16 and '2\.weight' in torch\.float32: call model"),
    ],
)
def test_a_model_in_parts_is_refused_by_their_names(batch, change, said):
    with pytest.raises(ValueError, match=said):
        from_batch(parted(change), *batch)
    with pytest.raises(ValueError, match=said):
        check_images_fit(parted(change), SHAPE)


def test_a_model_that_converts_between_its_parts_is_asked_about_its_inputs(batch):
    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(36, 8).double(), nn.Linear(8, CLASSES)

        def forward(self, inputs):
            return self.head(self.first(inputs.flatten(1).double()).float())

    from_batch(Converting(), *batch)
    with pytest.raises(ValueError, match="shapes cannot be multiplied"):
        from_batch(Converting(), batch[0][..., :3], batch[1])


def test_complex_inputs_and_outputs_whose_examples_come_second_are_told_how_to_be_given():
    labels = torch.tensor([1])
    with pytest.raises(ValueError, match=r"got torch.complex64 .*torch.cat\(\[inputs.real, inputs.imag\], 1\)"):
        from_batch(nn.Flatten(), torch.zeros(1, 1, 2, 2, dtype=torch.complex64), labels)

    class Steps(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(2)).transpose(0, 1)

    with pytest.raises(ValueError, match=r"got \(3, 1, 2\); where examples come second"):
        from_batch(Steps(4, 2), torch.zeros(1, 3, 2, 2), labels)


def weighted(outputs, targets):
    return (torch.tensor([1.0, 2.0, 3.0]).to(outputs) * (outputs - targets) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "labels", "said"),
    [
        ("mse", [1, 2], r"targets of mse \(1, 3\), as the model's outputs, as a tensor, got list"),
        ("mse", torch.rand(2, 3, generator=stream(0, "x")), r"mse \(1, 3\).*\(2, 3\) \(batch_size=1 says how many"),
        (weighted, torch.tensor([1, 2]), r"targets \(1, ...\), one for each example, as the loss function takes them"),
        ("cross-entropy", torch.tensor([1, 2]), r"labels int64 \(1,\), got torch.int64 \(2,\) \(batch_size=1"),
    ],
)
def test_known_targets_of_another_number_or_type_are_named_as_the_loss_takes_them(loss, labels, said):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    update = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        from_update(model, update, input_shape=(1, 2, 2), labels=labels, loss=loss)


@pytest.mark.parametrize(
    ("loss", "labels", "said"),
    [
        (torch.nn.functional.mse_loss, torch.ones(1, 2), r"expected a target of shape \(3,\) .*, got \(2,\)"),
        (weighted, torch.ones(1, 2), r"outputs \(1, 3\) and targets torch.float32 \(1, 2\); give targets as the func"),
        ("mse", torch.ones(2, 3), r"expected targets \(1, ...\), one for each example, got torch.float32 \(2, 3\)"),
    ],
)
def test_targets_that_a_loss_does_not_take_are_named_in_place_of_the_loss(loss, labels, said):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=said):
        from_batch(model, torch.rand(1, 1, 2, 2, generator=stream(0, "x")), labels, loss=loss)
