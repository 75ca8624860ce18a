"""Small networks written as people write them, in ways that exact attacks may not follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl.seeds import stream

Build = Callable[[int, int, nn.Module], nn.Module]
"""A network from the channels of its 8 x 8 images, the number of classes, and an activation."""
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Hardswish,
    nn.Tanh,
    nn.ELU,
    nn.Softplus,
    nn.Mish,
)


class Written(nn.Module):
    """Layers by name, and a function of them and the images."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes of the images."""
        return self._forward(self, x)


class Square(torch.autograd.Function):
    """x |x|, with a gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the square with its sign."""
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its derivative."""
        return 2 * ctx.saved_tensors[0].abs() * grad


def conv(channels: int, width: int, **settings: Any) -> nn.Conv2d:
    """Three by three, of the same size."""
    return nn.Conv2d(channels, width, 3, padding=settings.pop("padding", 1), **settings)


def residual(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a sum around a convolution."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.act(m.a(x))
        return m.head((x + m.act(m.b(x))).mean((2, 3)))

    return Written(forward, a=conv(c, 6), b=conv(6, 6), act=act, head=nn.Linear(6, k))


def attention(c: int, k: int, act: nn.Module) -> nn.Module:
    """Patches that look at each other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2).mT
        return m.head(m.act(m.look(x, x, x)[0]).mean(1))

    look = nn.MultiheadAttention(8, 2, batch_first=True)
    return Written(forward, patch=nn.Conv2d(c, 8, 4, stride=4), look=look, act=act, head=nn.Linear(8, k))


def transformer(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a vision transformer of one layer, with a learned position."""

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.position = nn.Conv2d(c, 8, 4, stride=4), nn.Parameter(torch.randn(1, 4, 8) * 0.02)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=act, batch_first=True)
            self.head = nn.Linear(8, k)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.encoder(self.patch(x).flatten(2).mT + self.position).mean(1))
            return logits

    return ViT()


def norms(c: int, k: int, act: nn.Module) -> nn.Module:
    """Group norm and layer norm."""
    body = (conv(c, 6), nn.GroupNorm(2, 6), act, conv(6, 6), nn.LayerNorm([6, 8, 8]), act)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, k))


def instance(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return every image normalized by itself."""
    return nn.Sequential(conv(c, 6), nn.InstanceNorm2d(6, affine=True), act, nn.Flatten(), nn.Linear(384, k))


def functional(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return what has no parameters, by functions, and odd ones among them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(act(m.a(x)), 2)
        x = torch.sin(m.b(x)) * torch.exp(-x.square())
        return m.head(torch.cat([x, x.flip(-1)], 1).flatten(1))

    return Written(forward, a=conv(c, 6), b=conv(6, 6), head=nn.Linear(192, k))


def two_heads(c: int, k: int, act: nn.Module) -> nn.Module:
    """Logits of two heads, which are added."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = act(m.a(x)).flatten(1)
        return m.first(x) + m.head(x.square())

    return Written(forward, a=conv(c, 4), first=nn.Linear(256, k), head=nn.Linear(256, k))


def batch_norm(c: int, k: int, act: nn.Module) -> nn.Module:
    """Batch norm in training mode."""
    body = (conv(c, 6), nn.BatchNorm2d(6), act, conv(6, 6), nn.BatchNorm2d(6), act)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(384, k))


def batch_norm_vectors(c: int, k: int, act: nn.Module) -> nn.Module:
    """Batch norm of vectors in training mode, which takes no single image."""
    return nn.Sequential(conv(c, 6), act, nn.Flatten(), nn.BatchNorm1d(384), nn.Linear(384, k))


def recurrent(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return an LSTM over rows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(act(m.rows(x.transpose(1, 2).flatten(2))[0][:, -1]))

    return Written(forward, rows=nn.LSTM(8 * c, 6, batch_first=True), head=nn.Linear(6, k))


def gated(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a GRU over columns of features."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.rows(act(m.a(x)).flatten(2).mT)[1][0])

    return Written(forward, a=conv(c, 4), rows=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, k))


def depthwise(c: int, k: int, act: nn.Module) -> nn.Module:
    """Depthwise and pointwise convolutions."""
    body = (conv(c, 6), act, conv(6, 6, groups=6), act, nn.Conv2d(6, 8, 1), act)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(512, k))


def dilated(c: int, k: int, act: nn.Module) -> nn.Module:
    """Holes between the taps."""
    return nn.Sequential(conv(c, 6), act, conv(6, 6, dilation=2, padding=2), act, nn.Flatten(), nn.Linear(384, k))


def transposed(c: int, k: int, act: nn.Module) -> nn.Module:
    """Down and up again."""
    up = nn.ConvTranspose2d(6, 4, 2, stride=2)
    return nn.Sequential(conv(c, 6, stride=2), act, up, act, nn.Flatten(), nn.Linear(256, k))


def paths(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return several ways through, put side by side (inception)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        ways = [m.one(x), m.three(x), F.avg_pool2d(m.three(x), 3, 1, 1)]
        return m.head(act(torch.cat(ways, 1)).flatten(1))

    return Written(forward, one=nn.Conv2d(c, 2, 1), three=conv(c, 2), head=nn.Linear(384, k))


def dense_blocks(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a network whose every layer sees all before it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([x, act(m.a(x))], 1)
        x = torch.cat([x, act(m.b(x))], 1)
        return m.head(x.flatten(1))

    return Written(forward, a=conv(c, 2), b=conv(c + 2, 2), head=nn.Linear(64 * (c + 4), k))


def own_gradient(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a function with a gradient of its own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(Square.apply(m.a(x)).flatten(1))

    return Written(forward, a=conv(c, 4), head=nn.Linear(256, k))


def spectral(c: int, k: int, act: nn.Module) -> nn.Module:
    """Spectral norm as a parametrization."""
    spectral_norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(spectral_norm(conv(c, 6)), act, nn.Flatten(), nn.Linear(384, k)).eval()


def weight_norm(c: int, k: int, act: nn.Module) -> nn.Module:
    """Weight norm as a parametrization."""
    first = nn.utils.parametrizations.weight_norm(conv(c, 6))
    return nn.Sequential(first, act, nn.Flatten(), nn.Linear(384, k))


def old_spectral(c: int, k: int, act: nn.Module) -> nn.Module:
    """Spectral norm by the old hook."""
    return nn.Sequential(nn.utils.spectral_norm(conv(c, 6)), act, nn.Flatten(), nn.Linear(384, k)).eval()


def old_weight_norm(c: int, k: int, act: nn.Module) -> nn.Module:
    """Weight norm by the old hook."""
    return nn.Sequential(nn.utils.weight_norm(conv(c, 6)), act, nn.Flatten(), nn.Linear(384, k))


def squeezed(c: int, k: int, act: nn.Module) -> nn.Module:
    """Channels weighed by what all positions say (squeeze and excitation)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = act(m.a(x))
        return m.head((x * m.weigh(x.mean((2, 3))).sigmoid()[..., None, None]).flatten(1))

    return Written(forward, a=conv(c, 4), weigh=nn.Linear(4, 4), head=nn.Linear(256, k))


def mixer(c: int, k: int, act: nn.Module) -> nn.Module:
    """Linear layers over positions and channels (MLP-mixer)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2)
        x = x + act(m.positions(x))
        return m.head((x.mT + act(m.channels(x.mT))).mean(1))

    layers = {"positions": nn.Linear(4, 4), "channels": nn.Linear(8, 8), "head": nn.Linear(8, k)}
    return Written(forward, patch=nn.Conv2d(c, 8, 4, stride=4), **layers)


def unfolded(c: int, k: int, act: nn.Module) -> nn.Module:
    """Patches by hand, through a linear layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(act(m.patch(F.unfold(x, 2, stride=2).mT)).mean(1))

    return Written(forward, patch=nn.Linear(4 * c, 8), head=nn.Linear(8, k))


def overlapping(c: int, k: int, act: nn.Module) -> nn.Module:
    """Pooling whose windows overlap."""
    return nn.Sequential(conv(c, 6), act, nn.MaxPool2d(3, 2, 1), conv(6, 6), act, nn.Flatten(), nn.Linear(96, k))


def padded(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a border that mirrors the image."""
    return nn.Sequential(conv(c, 6, padding_mode="reflect"), act, nn.Flatten(), nn.Linear(384, k))


def shared(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return one convolution twice."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = act(m.again(act(m.a(x))))
        return m.head(act(m.again(x)).flatten(1))

    return Written(forward, a=conv(c, 4), again=conv(4, 4), head=nn.Linear(256, k))


def bilinear(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a product of two views of the image."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(act(m.a(x) * m.b(x)).flatten(1))

    return Written(forward, a=conv(c, 4), b=conv(c, 4), head=nn.Linear(256, k))


def spatial(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return a network that turns the image by what it sees in it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        eye = torch.eye(2, 3, dtype=x.dtype, device=x.device)
        grid = F.affine_grid(eye + 0.1 * m.turn(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return m.head(act(F.grid_sample(x, grid, align_corners=False)).mean((2, 3)))

    return Written(forward, turn=nn.Linear(64 * c, 6, bias=False), head=nn.Linear(c, k))


def scaled_logits(c: int, k: int, act: nn.Module) -> nn.Module:
    """Logits over a temperature, as cosines."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.normalize(act(m.a(x)).flatten(1), dim=1)
        return x @ F.normalize(m.head.weight, dim=1).mT / 0.1

    return Written(forward, a=conv(c, 4), head=nn.Linear(256, k, bias=False))


def experts(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return two networks, weighed by a third."""

    def forward(m: Any, x: Tensor) -> Tensor:
        gate = m.gate(x.mean((2, 3))).softmax(1)
        seen = torch.stack([act(m.a(x)).mean((2, 3)), act(m.b(x)).mean((2, 3))], 1)
        return m.head((seen * gate[..., None]).sum(1))

    return Written(forward, a=conv(c, 6), b=conv(c, 6), gate=nn.Linear(c, 2), head=nn.Linear(6, k))


def shuffled(c: int, k: int, act: nn.Module) -> nn.Module:
    """Pixels moved into channels."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(act(m.a(F.pixel_unshuffle(x, 2))).mean((2, 3)))

    return Written(forward, a=conv(4 * c, 8), head=nn.Linear(8, k))


def prelu(c: int, k: int, act: nn.Module) -> nn.Module:
    """Activations with a learned slope."""
    return nn.Sequential(conv(c, 6), nn.PReLU(6), conv(6, 6), nn.PReLU(6), nn.Flatten(), nn.Linear(384, k, bias=False))


def separable(c: int, k: int, act: nn.Module) -> nn.Module:
    """Return rows first, then columns, with a sum around both."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = act(m.a(x))
        return m.head((x + m.columns(act(m.rows(x)))).mean((2, 3)))

    rows, columns = nn.Conv2d(6, 6, (1, 3), padding=(0, 1)), nn.Conv2d(6, 6, (3, 1), padding=(1, 0))
    return Written(forward, a=conv(c, 6), rows=rows, columns=columns, head=nn.Linear(6, k))


STYLES: dict[str, Build] = {
    build.__name__: build
    for build in (
        residual,
        attention,
        transformer,
        norms,
        instance,
        functional,
        two_heads,
        batch_norm,
        batch_norm_vectors,
        recurrent,
        gated,
        depthwise,
        dilated,
        transposed,
        paths,
        dense_blocks,
        own_gradient,
        spectral,
        weight_norm,
        old_spectral,
        old_weight_norm,
        squeezed,
        mixer,
        unfolded,
        overlapping,
        padded,
        shared,
        bilinear,
        spatial,
        scaled_logits,
        experts,
        shuffled,
        prelu,
        separable,
    )
}
"""Every style by its name."""


def written(style: str, channels: int, classes: int, activation: nn.Module, seed: int = 0) -> nn.Module:
    """Return a network of a style, whose initial weights follow from `seed`."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the hooks that torch no longer wants
        torch.set_rng_state(stream(seed, "odd model").get_state())
        return STYLES[style](channels, classes, activation)
