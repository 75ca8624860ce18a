from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn
from torch.nn import functional as f

import attacks
from attacks import NotApplicable, Reconstruction
from attacks.search_control import SearchControl
from defenses.clip import Clip
from defenses.dp_sgd import DPSGD
from defenses.noise import Noise
from defenses.prune import Prune
from defenses.quantize import Quantize
from defenses.signsgd import SignSGD
from fl.client import Client
from fl.defense import Defense
from fl.federation import Federation, Participation
from fl.method import Step
from fl.methods.hfedf import HFedF
from fl.methods.hfedf_latent import LATENT, PREFIX, HFedFLatent
from fl.models import build
from fl.models.hfedf_autoencoder import Autoencoder
from fl.models.hypernetworks.server_hypernetwork import EMBEDDINGS, HYPERNETWORK
from fl.network import Network
from fl.predict import predict
from fl.seeds import derive_seed
from fl.simulation.client_round import RoundKey, prepare
from fl.simulation.protocol import Protocol
from fl.simulation.scores import accuracy_tuned
from fl.tensors import dense
from fl.types import Batch


def federation(rounds: int = 0, **settings: Any) -> Federation:
    return worlds.federation(replace(HFedFLatent.example(), **settings), rounds=rounds)


def parts(run: Federation) -> dict[str, Tensor]:
    return {k.removeprefix(PREFIX): dense(v) for k, v in run.server.shared.items()}


def encode(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Table 6 down to the latent vector."""
    for name in ("encoder.conv1", "encoder.conv2"):
        x = f.max_pool2d(torch.relu(f.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], padding=1)), 2)
    return f.linear(x.flatten(1), p["encoder.fc.weight"], p["encoder.fc.bias"])


def decode(p: dict[str, Tensor], z: Tensor, small: tuple[int, int, int]) -> Tensor:
    """Table 6 from there."""
    x = f.linear(z, p["decoder.fc.weight"], p["decoder.fc.bias"]).view(-1, *small)
    x = torch.relu(f.conv_transpose2d(x, p["decoder.conv1.weight"], p["decoder.conv1.bias"], stride=2))
    return f.conv_transpose2d(x, p["decoder.conv2.weight"], p["decoder.conv2.bias"], stride=2).sigmoid()


def test_the_autoencoder_is_table_6() -> None:
    run = federation()
    with torch.device("meta"):
        large = Autoencoder((3, 32, 32), 1)
    # by hand: 448, 4,640, 2,049 | 4,096, 2,064, 195
    assert sum(p.numel() for p in large.parameters()) == 448 + 4640 + 2049 + 4096 + 2064 + 195
    images = worlds.images(3).inputs
    latents, again = run.client.task.model.get_submodule("autoencoder")(images)
    torch.testing.assert_close(latents, encode(parts(run), images))
    torch.testing.assert_close(again, decode(parts(run), latents, (32, 2, 2)))
    with pytest.raises(ValueError, match="height and width 4 divides, got 30x32"):
        Autoencoder((3, 30, 32), 1)


def test_the_first_round_trains_the_autoencoder_alone() -> None:
    run = federation()
    before = parts(run)
    own = run.server.own
    ends, weights = [], []
    for done in run.run_round():
        params = {name: nn.Parameter(value.clone()) for name, value in before.items()}
        adam = torch.optim.Adam(params.values(), lr=1e-3)
        for (index,) in done.trace.order[0]:
            adam.zero_grad()
            images = done.trace.inputs[index]
            f.mse_loss(decode(params, encode(params, images), (32, 2, 2)), images).backward()
            adam.step()
        ends.append({name: p.detach() for name, p in params.items()})
        weights.append(len(done.trace.order[0]))
        still = {k: v for k, v in done.upload.update.items() if not k.startswith(PREFIX)}
        assert not any(dense(v).any() for v in still.values())
    assert weights == [2, 2, 2]
    assert_near(parts(run), {k: sum(e[k] for e in ends) / 3 for k in before}, 1e-10)
    assert_same(run.server.own[HYPERNETWORK], own[HYPERNETWORK])


@pytest.mark.parametrize("count", [None, 2])
def test_the_mean_latent_vector_becomes_the_embedding(count: int | None) -> None:
    run = federation(rounds=1, latent_images=count)
    known = parts(run)
    means = [encode(known, own.train.inputs[:count]).mean(0) for own in run.data]
    assert torch.equal(dense(run.download(1).shared[LATENT]), dense(run.server.own[HYPERNETWORK][EMBEDDINGS])[1])
    run.run_round([0, 1])
    held = dense(run.server.own[HYPERNETWORK][EMBEDDINGS])
    torch.testing.assert_close(held[:2], torch.stack(means[:2]), rtol=1e-12, atol=1e-12)
    assert torch.equal(held[2], dense(federation(rounds=1).server.own[HYPERNETWORK][EMBEDDINGS])[2])
    assert_same(dict(parts(run)), known)  # trained no further
    moved = run.train(2).upload.update
    assert any(dense(v).any() for k, v in moved.items() if k.startswith("body."))


def test_what_is_sent_of_the_images_is_differentiable_in_them() -> None:
    run = federation(rounds=1)
    view, truth = run.observe(0)
    inputs = truth.inputs.clone().requires_grad_()
    sent = dense(predict(view, replace(truth.candidate(), inputs=inputs))[LATENT])
    (g,) = torch.autograd.grad(sent.sum(), [inputs])
    own = truth.inputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-encode(parts(run), own).mean(0).sum(), [own])
    torch.testing.assert_close(g, expected, rtol=1e-9, atol=1e-12)


def test_fine_tuning_trains_the_network_alone() -> None:
    method = HFedFLatent.example()
    task = federation().client.task
    (phase,) = method.fine_tuning_phases(task, 3)
    assert (phase.epochs, phase.steps) == (3, None)
    assert set(phase.assign(task.parameters)) == set(method.generated_names(task))


@pytest.mark.parametrize("rounds", [0, 1])
def test_before_the_network_is_trained_fine_tuning_trains_it(rounds: int) -> None:
    method = replace(HFedFLatent.example(), autoencoder_rounds=1)
    data = worlds.federation(method, rounds=0).data
    run = Federation(Client(worlds.task(), method), data, protocol=Protocol(fine_tune_epochs=20))
    for _ in range(rounds):
        run.run_round()
    model = worlds.task().model
    sent = run.download(0).shared
    model.load_state_dict({name: dense(sent[name]) for name in model.state_dict()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=1e-3)
    start = prepare(
        run.client,
        run.clients[0],
        run.download(0),
        data[0].train,
        key=RoundKey(round=rounds, seed=derive_seed(0, "tuning")),
        phases=method.fine_tuning_phases(run.client.task, 20),
    )
    for (index,) in start.trace.order[0]:
        optimizer.zero_grad()
        f.cross_entropy(model(start.trace.inputs[index]), start.trace.labels[index]).backward()
        optimizer.step()
    test = data[0].test
    assert accuracy_tuned(run, 0) == float((model(test.inputs).argmax(1) == test.labels).double().mean())
    assert float((model(data[0].train.inputs).argmax(1) == data[0].train.labels).double().mean()) == 1.0


def test_everything_received_comes_back_and_is_counted() -> None:
    run = federation()
    size = sum(p.numel() for p in run.client.task.parameters.values())
    for moving in (lambda name: name.startswith(PREFIX), lambda name: not name.startswith(PREFIX)):
        record, rounds = run.record(), run.run_round()
        assert record.numbers_down == run.record([Participation.of(done) for done in rounds]).numbers_up == size
        for name, value in rounds[0].upload.update.items():
            assert bool(dense(value).any()) == moving(name), name


def test_the_loss_is_plain_once_the_autoencoder_is_trained() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(HFedFLatent):
        """Another loss (made up for this test)."""

        def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
            return super().loss(network, batch, step) * 2

    task = federation().client.task
    assert [HFedFLatent(autoencoder_rounds=2).uses_plain_cross_entropy(task, round) for round in range(3)] == [
        False,
        False,
        True,
    ]
    assert not Other().uses_plain_cross_entropy(task, 1)
    masked = Client(build("hfedf-cnn", num_classes=3, input_shape=(1, 8, 8), dropout=0.5), HFedFLatent()).task
    assert not HFedFLatent().uses_plain_cross_entropy(masked, 1)


def test_one_step_for_many_is_one_of_the_network_alone() -> None:
    method = replace(HFedFLatent.example(), epochs=1, batch_size=None, steps=None, momentum=0.0, weight_decay=0.0)
    view, truth = worlds.federation(method, rounds=1).observe(0)
    rewritten = attacks.build({"name": "surrogate", "along": 0.0}).rewrite(view)  # type: ignore[attr-defined]
    assert set(rewritten.shared) == set(rewritten.update) == set(worlds.task().parameters)
    assert_near(predict(rewritten, replace(truth.candidate(), order=None)), rewritten.update, 1e-12)
    early = worlds.federation(method, rounds=0).observe(0)[0]
    refused = attacks.build("surrogate").rewrite(early)  # type: ignore[attr-defined]
    assert isinstance(refused, NotApplicable)
    assert "loss of its own" in refused.reason


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="expected embedding as a number"):
        HFedFLatent(embedding=None)
    with pytest.raises(ValueError, match="autoencoder_rounds: expected a whole number >= 0, got -1"):
        HFedFLatent(autoencoder_rounds=-1)


# ---- the attack ------------------------------------------------------------------------------------------------------
def view_of_one(size: int, rounds: int = 1) -> tuple[Federation, Any, Any]:
    run = federation(rounds=rounds, embedding=size)
    client = Client(run.client.base, worlds.one_step(run.client.method))
    smooth = worlds.images(1, "victim")
    smooth = replace(smooth, inputs=f.interpolate(smooth.inputs[..., ::4, ::4], size=(8, 8), mode="bilinear"))
    return run, *run.observe(0, data=smooth, client=client)


def test_the_image_behind_a_latent_vector() -> None:
    errors = {}
    for size in (1, 128):
        run, view, truth = view_of_one(size)
        result = attacks.build({"name": "latent-payload", "iterations": 300, "tv_weight": 1e-3})(view)
        assert isinstance(result, Reconstruction)
        assert result.inputs is not None
        assert result.inputs.shape == (1, 1, 8, 8)
        known, found = parts(run), result.inputs
        apart = (encode(known, found) - encode(known, truth.inputs)).norm() / encode(known, truth.inputs).norm()
        assert float(apart) < 0.1  # it has the latent vector that was sent
        errors[size] = float((found - truth.inputs).square().mean())
        assert result.objective <= result.history[0]
    floor = float((truth.inputs - truth.inputs.mean()).square().mean())
    assert errors[128] < 0.3 * floor
    assert errors[128] < errors[1]


def test_the_search_for_the_image_ends_when_it_has_to() -> None:
    view = federation(rounds=1).observe(1)[0]
    attack = attacks.build({"name": "latent-payload", "iterations": 30})
    control = SearchControl(interval=0.0)
    control.on_progress = lambda progress: control.interrupt() if progress.iteration == 10 else None
    cut, whole = attack(view, control=control), attack(view, control=SearchControl())
    assert isinstance(cut, Reconstruction)
    assert isinstance(whole, Reconstruction)
    assert cut.cut_short == cut.note == "the search was cut short by an interrupt after 10 of 30 iterations"
    assert (whole.cut_short, whole.note) == ("", "")
    assert whole.objective < cut.objective < cut.history[0]
    decoded = attack(view, control=SearchControl(time_limit=0))
    assert "after 0 of 30" in decoded.cut_short


def test_several_images_share_one_latent_vector() -> None:
    run = federation(rounds=1)
    view, _ = run.observe(1)
    result = attacks.build({"name": "latent-payload", "iterations": 3})(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.inputs.shape == (4, 1, 8, 8)
    assert torch.equal(result.inputs[0], result.inputs[3])


@pytest.mark.parametrize(
    ("defense", "applies"),
    [
        (Clip(max_norm=1e3), True),
        (Clip(max_norm=1e3, scope="tensor"), True),
        (Clip(max_norm=0.01), False),
        (Clip(max_norm=0.01, scope="tensor"), False),
        (Prune(ratio=0.9), False),
        (SignSGD(), False),
        (DPSGD(), False),
        (Noise(std=1e-9), True),
        (Quantize(bits=16), True),
    ],
    ids=str,
)
def test_a_defense_that_hides_the_latent_vector_is_seen(defense: Defense, applies: bool) -> None:
    method = replace(HFedFLatent.example(), epochs=1)
    view, truth = worlds.federation(method, defense, rounds=1).observe(0)
    result = attacks.build({"name": "latent-payload", "iterations": 0})(view)
    if not applies:
        assert isinstance(result, NotApplicable)
        assert defense.name in result.reason
        return
    assert isinstance(result, Reconstruction)
    known = {k.removeprefix(PREFIX): dense(v) for k, v in view.shared.items() if k.startswith(PREFIX)}
    z = encode(known, truth.inputs).mean(0, keepdim=True)  # of the four images
    torch.testing.assert_close(result.inputs[:1], decode(known, z, (32, 2, 2)), rtol=1e-3, atol=1e-3)  # type: ignore[index]


def test_where_nothing_is_sent_there_is_nothing_to_invert() -> None:
    attack = attacks.build("latent-payload")
    plain = worlds.federation(worlds.one_step(HFedF.example())).observe(0)[0]
    assert attack(plain) == NotApplicable("the client sends no latent vector of its images")
    assert isinstance(attack(federation().observe(0)[0]), NotApplicable)  # the autoencoder's round
    view = federation(rounds=1).observe(0)[0]
    assert isinstance(attack(replace(view, scale_unknown=True)), NotApplicable)


def test_the_server_speaks_of_alignment_only_where_the_hypernetwork_moves() -> None:
    first = federation(autoencoder_rounds=1)
    run = Federation(first.client, first.data, protocol=Protocol(diagnostics=("server",)))
    said = []
    for _ in range(2):
        run.step(evaluate=True)
        said.append(run.server_metrics)
    assert said[0] == {}
    assert said[1]
