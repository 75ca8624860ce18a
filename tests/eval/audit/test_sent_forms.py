"""Forms in which updates are sent: numbers and places, few bits, one byte, sums, lists of twice the arrays."""

import copy

import pytest
import torch
from torch import nn

import hyperleak
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

HOW = FedAvg(lr=0.1, steps=1, batch_size=None)


def perceptron() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 5))
    generator = stream(0, "forms")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3 if value.ndim < 2 else value[0].numel() ** -0.5, generator=generator)
    return model


def images(count=1):
    drawn = torch.rand(count, 1, 8, 8, generator=stream(count, "forms"))
    return (255 * drawn).round() / 255, torch.arange(count)


def step(model, inputs, labels, change=lambda model: None, lr=0.1):
    trained = copy.deepcopy(model)
    nn.functional.cross_entropy(trained(inputs), labels).backward()
    change(trained)
    torch.optim.SGD(trained.parameters(), lr=lr).step()
    return {name: value - trained.state_dict()[name] for name, value in model.state_dict().items()}


def audit(update, given=None, model=None, **settings):
    model = model or perceptron()
    shape = {} if given else {"input_shape": (1, 8, 8)}
    settings = {"attacks": "analytic", "method": HOW, **shape, **settings}
    return hyperleak.audit(model, *(given or ()), update=update, **settings)


def test_an_image_that_did_not_come_back_is_not_confirmed():
    model, (inputs, labels) = perceptron(), images(3)
    each = [step(model, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]
    mean = {name: sum(one[name] for one in each) / 3 for name in each[0]}
    (found,) = audit(mean, (inputs, labels), clients=3).findings
    assert {row["psnr"] > 50: row["verified"] for row in found.rows} == {True: True, False: None}
    assert found.verified is None


def test_numbers_and_places_by_themselves_are_told_how_to_be_written_out():
    whole = torch.cat([value.flatten() for value in step(perceptron(), *images()).values()])
    places = whole.abs().topk(100).indices
    for given in ({"indices": places, "values": whole[places]}, (places, whole[places]), [places, whole[places]]):
        with pytest.raises(ValueError, match="numbers and their places are no tensor yet"):
            audit(given)


def test_twice_the_arrays_of_the_model_are_two_states():
    arrays = list(step(perceptron(), *images()).values())
    with pytest.raises(ValueError, match=r"got twice as many: weights beside others .* SCAFFOLD's control variates"):
        audit([*arrays, *arrays])


def test_numbers_that_were_clipped_or_left_out_lie_on_no_grid():
    model, given = perceptron(), images()

    def clip(trained):
        torch.nn.utils.clip_grad_value_(trained.parameters(), 0.01)

    step_alone = step(model, *given)
    kept = {n: torch.where(v.abs() > v.abs().flatten().quantile(0.7), v, 0.0) for n, v in step_alone.items()}
    for update in (step(model, *given, clip), kept):
        assert "even grid" not in " ".join(audit(update).notes)


@pytest.mark.parametrize(
    ("kind", "size"), [(torch.float8_e4m3fn, 1.0), (torch.float8_e5m2, 1.0), (torch.float16, 1e-5)]
)
def test_numbers_are_said_to_be_of_the_type_that_they_were_sent_in(kind, size):
    update = {name: (size * value).to(kind) for name, value in step(perceptron(), *images()).items()}
    (found,) = audit(update, kind="gradient", method=None).findings
    assert found.verified is None
    assert f"the rounding of what was sent in {str(kind).removeprefix('torch.')}" in " ".join(found.notes)


def test_a_model_in_bfloat16_rules_nothing_out_that_rounding_may_leave():
    model, (inputs, labels) = perceptron().bfloat16(), images()
    update = step(model, inputs.bfloat16(), labels, lr=0.5)
    (found,) = audit(update, (inputs, labels), model=model, method=FedAvg(lr=0.5, steps=1, batch_size=None)).findings
    assert found.rows[0]["psnr"] > 40
    assert found.verified is None
    assert "bfloat16" in " ".join(found.notes)


def test_a_sum_over_clients_is_no_matter_of_the_loss_alone():
    model, (inputs, labels) = perceptron(), images(3)
    each = [step(model, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]
    (found,) = audit({name: sum(one[name] for one in each) for name in each[0]}, clients=3).findings
    assert "a sum over examples or clients, say, in place of their mean" in found.refused
