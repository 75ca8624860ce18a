"""Per-sample gradients of convolutions from windows: Opacus' numbers, in either order of memory."""

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

from fl.privacy import conv_per_sample
from fl.seeds import stream

SHAPES = {
    "along the image": nn.Conv2d(1, 3, 5, padding=1),
    "along the channels": nn.Conv2d(8, 3, 5, padding=2),
    "strides": nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(0, 2)),
    "dilation": nn.Conv2d(6, 3, (2, 3), stride=2, dilation=(3, 2), padding=(3, 1), bias=False),
}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", SHAPES)
def test_windows_give_opacus_numbers(name, order):
    layer, draw = SHAPES[name].double(), stream(0, "windows")
    entered = torch.randn(4, layer.in_channels, 13, 17, dtype=torch.float64, generator=draw).to(memory_format=order)
    out = layer(entered)
    back = torch.randn(out.shape, dtype=torch.float64, generator=draw).to(memory_format=order)
    rule = GradSampleModule.GRAD_SAMPLERS[nn.Conv2d]
    expected = rule(layer, [entered.contiguous()], back.contiguous())[layer.weight]
    found = conv_per_sample.per_sample_weight_gradients(layer, entered, back)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_both_orders_of_memory_are_tried_above():
    def along_channels(name):
        layer = SHAPES[name]
        entered = torch.zeros(2, layer.in_channels, 13, 17, dtype=layer.weight.dtype)
        return not conv_per_sample.per_sample_weight_gradients(layer, entered, layer(entered)).is_contiguous()

    assert {along_channels(name) for name in SHAPES} == {False, True}
    assert not along_channels("along the image")
    assert along_channels("along the channels")


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv1d(4, 4, 3), nn.Linear(4, 4)]
)
def test_other_layers_are_left_to_opacus(layer):
    assert not conv_per_sample.is_supported(layer)
    assert conv_per_sample.is_supported(nn.Conv2d(4, 4, 3))
