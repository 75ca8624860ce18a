"""What is recorded of a network computes what the network computes, of one image or of several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.seeds import stream


def cifar_resnet18() -> nn.Module:
    model = models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()  # type: ignore[assignment]
    return model


def small_vit() -> nn.Module:
    model = models.vit_b_16(image_size=32, num_classes=10)
    model.encoder.layers = model.encoder.layers[:2]
    return model


def vgg16_with_small_head() -> nn.Module:
    model = models.vgg16_bn()
    model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 64), nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, 10)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": cifar_resnet18,
    "densenet121": lambda: models.densenet121(num_classes=10),
    "vgg16_bn": vgg16_with_small_head,
    "mobilenet_v3_small": lambda: models.mobilenet_v3_small(num_classes=10),
    "convnext_tiny": lambda: models.convnext_tiny(num_classes=10),
    "vit_b_16": small_vit,
}


def network(name: str) -> nn.Module:
    """A network of noise: torchvision's own initialization takes longer than the test."""
    with torch.device("meta"):
        model = NETWORKS[name]()
    model.to_empty(device="cpu").double().eval()
    draw = stream(0, name)
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            spread = value[0].numel() ** -0.5 if value.ndim > 1 else 0.1
            value.copy_(torch.randn(value.shape, generator=draw, dtype=value.dtype) * spread + float(value.ndim == 1))
            value.abs_() if key.endswith("running_var") else None
    return model


def images(count: int, key: object = 0) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=stream(1, key), dtype=torch.float64)


def trace(model: nn.Module, count: int) -> Graph:
    graph = trace_operations(model, images(count))
    assert isinstance(graph, Graph), graph
    return graph


@pytest.mark.parametrize("name", NETWORKS)
def test_the_record_of_a_batch_computes_what_the_network_does(name: str) -> None:
    model = network(name)
    for count in (1, 3):
        graph, others = trace(model, count), images(count, "others")
        assert graph.returned is not None
        found = graph.replay(graph.used_operations(), graph.returned, {Ref(IMAGE): others})
        with torch.no_grad():
            expected = model(others)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        assert float((graph.value(graph.returned) - expected).abs().max()) > 1e-8  # other images, other outputs


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "vit_b_16"])
def test_every_cut_of_the_flow_is_enough_to_go_on_from(name: str) -> None:
    """Whatever the memory layout of the tensor that is put in."""
    graph = trace(network(name), 2)
    assert graph.returned is not None
    segments = graph.segments()
    for i in range(0, len(segments), 5):
        cut = segments[i].start
        value = graph.value(cut).clone(memory_format=torch.contiguous_format)
        nodes = [number for segment in segments[i:] for number in segment.nodes]
        assert torch.equal(graph.replay(nodes, graph.returned, {cut: value}), graph.value(graph.returned))


def test_attention_is_recorded_in_plain_steps_and_draws_nothing() -> None:
    graph = trace(network("vit_b_16"), 2)
    done = {graph.nodes[number].operation for number in graph.used_operations()}
    assert "bmm" in done
    assert not [name for name in done if "attention" in name]


def test_operations_are_the_same_function_where_name_numbers_and_shape_are() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one, again = torch.relu(x), torch.relu(x + 1)
            gentle, steep = nn.functional.leaky_relu(x, 0.1), nn.functional.leaky_relu(x, 0.2)
            small = torch.relu(x[..., :2])
            return (one + again + gentle + steep).flatten(1).sum(1, keepdim=True) + small.flatten(1).sum(
                1, keepdim=True
            )

    graph = trace_operations(Net().double(), images(1))
    functions: dict[str, list[object]] = {}
    for node in graph.nodes:
        functions.setdefault(node.operation, []).append(node.function_of_one)
    one, again, small = functions["relu"]
    assert one == again != small
    gentle, steep = functions["leaky_relu"]
    assert gentle != steep
    assert set(functions["add"][1:]) == {None}  # of two tensors
