"""Forms in which updates are sent: numbers and places, few bits, one byte, sums, lists of twice the arrays."""

import copy

import pytest
import torch
from torch import nn

import hyperleak
from eval.audit.captured_files import as_state
from eval.audit.tensor_names import with_model_names
from fl.capture import from_update
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
    assert not any(row.get("approximate") for row in found.rows)  # darker pictures leave no more
    assert "what was sent in bfloat16" in " ".join(found.notes)


def test_more_images_than_memory_holds_are_an_error_that_says_so():
    update = step(perceptron(), *images())
    with pytest.raises(ValueError, match="expected as many images"):
        from_update(perceptron(), update, input_shape=(1, 8, 8), batch_size=10**12)


def test_a_sum_over_clients_is_no_matter_of_the_loss_alone():
    model, (inputs, labels) = perceptron(), images(3)
    each = [step(model, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]
    (found,) = audit({name: sum(one[name] for one in each) for name in each[0]}, clients=3).findings
    assert "a sum over examples or clients, say, in place of their mean" in found.refused


def test_a_step_size_that_python_is_not_told_is_open_as_on_the_command_line():
    model, given = perceptron(), images()
    update = {name: 0.3 * value for name, value in step(model, *given).items()}
    found = audit(update, given, method={"name": "fedavg", "steps": 1})
    assert not found.mismatch
    assert audit(update, given, method={"name": "fedavg", "steps": 1, "lr": 0.1}).mismatch
    assert audit(update, given, method=FedAvg(steps=1, lr=0.1, batch_size=None)).mismatch
    trained = copy.deepcopy(model)
    nn.functional.cross_entropy(trained(given[0]), given[1]).backward()
    torch.optim.Adam(trained.parameters(), lr=0.003).step()
    adam = {name: value - trained.state_dict()[name] for name, value in model.state_dict().items()}
    found = audit(adam, given, method={"name": "fedavg", "optimizer": "adam", "steps": 1}, attacks="adaptive-step")
    assert not found.mismatch
    assert "lr: 0.003 was read off the update, whose largest step it is" in found.notes
    found = audit(adam, given, method={"name": "fedavg"})
    assert any(note.startswith("not stated by method, so the method's defaults count") for note in found.notes)


def normed() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 5)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("left_out", ["num_batches_tracked", "1."])
@pytest.mark.parametrize("vector", [False, True])
def test_lists_without_counts_or_batch_norm_are_taken(left_out, vector):
    model, (inputs, labels) = normed(), images(2)
    update = step(model, inputs, labels)
    sent = {name: value for name, value in update.items() if left_out not in name}
    arrays = torch.cat([value.flatten() for value in sent.values()]) if vector else list(sent.values())
    found = with_model_names(as_state(arrays, "update"), model)
    told = {**found.update, **found.buffers}
    assert told.keys() == sent.keys()
    assert all(torch.equal(told[name], value) for name, value in sent.items())
    assert "without" in " ".join(found.notes)


def test_tensors_by_other_names_in_the_models_order_are_told_how_to_come():
    update = step(perceptron(), *images())
    named = {name.replace("1.", "fc1.").replace("3.", "fc2."): value for name, value in update.items()}
    with pytest.raises(ValueError, match=r"give them without names, as list\(update.values\(\)\)"):
        audit(named)
    rows = {name: value.flatten() for name, value in update.items()}
    with pytest.raises(ValueError, match=r"as many numbers in another shape: reshape it to \(24, 64\)"):
        audit(rows)


def test_several_updates_and_pythons_numbers_are_named():
    update = step(perceptron(), *images())
    with pytest.raises(
        ValueError, match=r"of several updates \(client_0, client_1\) give one, or their mean with clients=2"
    ):
        audit({"client_0": update, "client_1": update})
    with pytest.raises(ValueError, match="of several updates give one, or their mean with clients"):
        audit([update, update, update])
    with pytest.raises(ValueError, match=r"make tensors, torch.tensor\(value\)"):
        audit({name: value.tolist() for name, value in update.items()})
    with pytest.raises(ValueError, match="parameters_to_ndarrays"):
        audit([value.numpy().tobytes() for value in update.values()])


def test_decay_that_few_bits_hide_is_not_taken_for_none():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(512, 16), nn.LeakyReLU()]
    model, (inputs, labels) = nn.Sequential(*layers, nn.Linear(16, 5)), images(3)
    generator = stream(1, "forms")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3 if value.ndim < 2 else value[0].numel() ** -0.5, generator=generator)
    trained = copy.deepcopy(model)
    rule = torch.optim.SGD(trained.parameters(), lr=0.05, weight_decay=0.01)
    for _ in range(5):
        rule.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        rule.step()
    whole = {name: value - trained.state_dict()[name] for name, value in model.state_dict().items()}
    scales = {name: value.abs().max() / 127 for name, value in whole.items()}
    sent = {name: (value / scales[name]).round() * scales[name] for name, value in whole.items()}
    method = {"name": "fedavg", "lr": 0.05, "steps": 5, "weight_decay": 0.01}
    found = audit(sent, (inputs, labels), model, batch_size=3, method=method)
    assert not any("no weight decay shows" in note for note in found.notes)
    assert not found.mismatch


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("places", [slice(0, 2), slice(2, 4)], ids=["first", "last"])
def test_a_miss_is_not_ruled_out_where_some_tensors_were_sent_in_two_bytes(kind, places):
    inputs, labels = images()
    update = step(perceptron(), inputs, labels)
    halved = list(update)[places]
    sent = {name: value.to(kind) if name in halved else value for name, value in update.items()}
    (found,) = audit(sent, (inputs, labels)).findings
    assert found.rows[0]["psnr"] > 50
    assert found.verified is None
    borne_out = "borne out, but not confirmed" in found.notes[0]
    assert borne_out or f"{str(kind).removeprefix('torch.')} in some of its tensors" in found.notes[0]


def test_buffers_in_four_bytes_beside_weights_in_two_are_no_second_form():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5)).eval()
    inputs, labels = images()
    update = step(model, inputs, labels)
    names = dict(model.named_parameters())
    sent = {name: value.half() if name in names else value for name, value in update.items()}
    how = FedAvg(lr=0.1, steps=1, batch_size=None, train_mode=False)
    (found,) = audit(sent, (inputs, labels), model, method=how).findings
    assert not any("in some of its tensors" in note for note in found.notes)
