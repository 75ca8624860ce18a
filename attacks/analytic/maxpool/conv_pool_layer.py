"""A convolution with the pooling behind it, as the linear maps of its input that an inversion needs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ConvPoolLayer:
    """A convolution of an input X (I, H, W) whose outputs are pooled cell by cell.

    Output positions are counted along rows, l in [0, L). Pooling takes K cells of P positions each; without pooling
    every position is a cell of its own. M = I * kh * kw is the size of a patch. Several images lie one above the other
    in X, and so do their positions and cells; no patch and no cell reaches from one into the next.

    Attributes:
        weight: (O, I, kh, kw).
        bias: (O,).
        shape: (I, H, W), with H the height of all images together.
        padding: zeros on every side of an image, by axis.
        stride: by axis.
        window: of the pooling, by axis; (1, 1) is none.
        is_average: whether pooling averages instead of taking the maximum.
        images: how many.
        visible_cells: rows and columns of each image's cells that anything is known of: the layer above saw no
            others. All if None.
        pool_stride: between windows, by axis, which may overlap; None is the window's own size.
    """

    weight: Tensor
    bias: Tensor
    shape: tuple[int, int, int]
    padding: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    window: tuple[int, int] = (1, 1)
    is_average: bool = False
    images: int = 1
    visible_cells: tuple[int, int] | None = None
    pool_stride: tuple[int, int] | None = None

    @property
    def window_stride(self) -> tuple[int, int]:
        """Positions between one window and the next, by axis."""
        return self.pool_stride or self.window

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one image."""
        return self.shape[0], self.shape[1] // self.images, self.shape[2]

    @cached_property
    def full_output_size(self) -> tuple[int, int]:
        """Height and width of an image's outputs before pooling."""
        sides = zip(self.image_shape[1:], self.padding, self.kernel, self.stride, strict=True)
        height, width = ((n + 2 * p - k) // s + 1 for n, p, k, s in sides)
        return height, width

    @cached_property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the outputs that the visible cells cover; only these positions are counted."""
        if self.visible_cells is None:
            return self.full_output_size
        sides = zip(self.full_output_size, self.visible_cells, self.window, self.window_stride, strict=True)
        height, width = (min(n, (k - 1) * s + w) for n, k, w, s in sides)
        return height, width

    @property
    def positions(self) -> int:
        """How many outputs a filter has before pooling (L)."""
        return self.images * self.output_size[0] * self.output_size[1]

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width of the filters."""
        return self.weight.shape[2], self.weight.shape[3]

    @cached_property
    def filters(self) -> Tensor:
        """The weight as (O, M)."""
        return self.weight.flatten(1)

    @cached_property
    def pooled_size(self) -> tuple[int, int]:
        """Height and width of an image after pooling, as far as it is kept."""
        sides = zip(self.output_size, self.window, self.window_stride, strict=True)
        height, width = ((n - w) // s + 1 for n, w, s in sides)
        return height, width

    @cached_property
    def visible_input_size(self) -> tuple[int, int]:
        """Height and width of the part of an image that the cells see: pooling leaves out what fills no window."""
        seen = ((c - 1) * t + w for c, t, w in zip(self.pooled_size, self.window_stride, self.window, strict=True))
        sides = zip(self.image_shape[1:], seen, self.stride, self.kernel, self.padding, strict=True)
        height, width = (min(n, (o - 1) * s + k - p) for n, o, s, k, p in sides)
        return height, width

    @cached_property
    def cells(self) -> Tensor:
        """The positions of every cell (K, P)."""
        grid = torch.arange(self.positions, device=self.weight.device).view(self.images, *self.output_size)
        (rows, columns), (down, right) = self.window, self.window_stride
        return grid.unfold(1, rows, down).unfold(2, columns, right).reshape(-1, rows * columns)

    @cached_property
    def merged_convolution(self) -> ConvPoolLayer:
        """Convolution and average pooling as one convolution: filters averaged over the window's shifts."""
        (rows, columns), (down, right) = self.window, self.stride
        height, width = self.kernel[0] + down * (rows - 1), self.kernel[1] + right * (columns - 1)
        weight = self.weight.new_zeros(*self.weight.shape[:2], height, width)
        for a in range(rows):
            for b in range(columns):
                top, left = a * down, b * right
                weight[:, :, top : top + self.kernel[0], left : left + self.kernel[1]] += self.weight / (rows * columns)
        stride = (down * self.window_stride[0], right * self.window_stride[1])
        return self._with_filters(weight, self.bias, stride)

    @cached_property
    def positions_unknown(self) -> bool:
        """Whether it is unknown which position of a cell was passed on."""
        return self.cells.shape[1] > 1 and not self.is_average

    # ---- forward -----------------------------------------------------------------------------------------------------
    def patches(self, x: Tensor) -> Tensor:
        """Return the patch U_l that each position sees (L, M)."""
        seen = F.unfold(self.split_images(x), self.kernel, padding=self.padding, stride=self.stride)
        return self._drop_uncounted(seen).mT.flatten(0, 1)

    def patch_changes(self, entries: Tensor, step: Tensor) -> Tensor:
        """Return what a step (n,) of each of some numbers of X (n,), counted along X, adds to the patches (L, M, n)."""
        units = torch.zeros(len(entries), *self.shape).to(step)
        units.flatten(1)[torch.arange(len(entries)), entries] = step
        return torch.stack([self.patches(unit) for unit in units], -1)

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs by cell (O, K, P)."""
        return self._convolve(x, self.bias)[:, self.cells]

    def linear_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs without the bias at every position (O, L)."""
        return self._convolve(x, None)

    def pooled_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs after pooling (O, K)."""
        made = self.outputs(x)
        return made.mean(-1) if self.is_average else made.amax(-1)

    # ---- backward ----------------------------------------------------------------------------------------------------
    def scatter(self, values: Tensor) -> Tensor:
        """Return values by cell (O, K, P) at their positions (O, L), summed over cells; zero where there is none."""
        result = values.new_zeros(values.shape[0], self.positions)
        return result.index_add_(1, self.cells.flatten(), values.flatten(1))

    def weight_gradient(self, signal: Tensor, x: Tensor) -> Tensor:
        """Return the weight's gradient (O, M) where `signal` (O, L) flows back into the outputs."""
        return signal @ self.patches(x)

    def backpropagate(self, signal: Tensor) -> Tensor:
        """Return what flows back into X (I, H, W) from `signal` (O, L)."""
        sides = zip(self.image_shape[1:], self.full_output_size, self.padding, self.kernel, self.stride, strict=True)
        rest = [n - ((o - 1) * s - 2 * p + k) for n, o, p, k, s in sides]
        below, beside = (n - m for n, m in zip(self.full_output_size, self.output_size, strict=True))
        back = F.pad(signal.view(-1, self.images, *self.output_size).transpose(0, 1), (0, beside, 0, below))
        made = F.conv_transpose2d(back, self.weight, padding=self.padding, stride=self.stride, output_padding=rest)
        return made.transpose(0, 1).reshape(self.shape).contiguous()

    # ---- matrices ----------------------------------------------------------------------------------------------------
    def gradient_map(self, signal: Tensor) -> Tensor:
        """Return the map T (O * kh * kw, H * W) from one channel of X to its part of the weight's gradient.

        It is the same for all channels: gradient[o, i] = T[o] X[i].
        """
        (height, width), (rows, columns), (down, right) = self.output_size, self.kernel, self.stride
        planes = signal.view(-1, self.images, height, width)
        result = signal.new_zeros(len(planes), rows, columns, self.images, *self._padded_size)
        for a in range(rows):
            for b in range(columns):
                result[:, a, b, :, a : a + down * height : down, b : b + right * width : right] = planes
        return self._crop(result).reshape(len(planes) * rows * columns, -1)

    def channel_blocks(self, weights: Tensor) -> Tensor:
        """Return each channel's own block (I, H W, H W) of sum_ol weights[o, l] (w_o . U_l)^2 as a form in X."""
        filters = self.weight.flatten(2).transpose(0, 1)  # (I, O, kh * kw)
        squares = torch.einsum("iom,ion->imno", filters, filters)
        return self._sum_patch_forms(squares @ weights)

    def mean_block(self, weights: Tensor) -> Tensor:
        """Return the mean of `channel_blocks` over the channels (H W, H W)."""
        filters = self.weight.flatten(2)  # (O, I, kh * kw)
        squares = (filters.mT @ filters / filters.shape[1]).permute(1, 2, 0)
        return self._sum_patch_forms((squares @ weights)[None])[0]

    def quadratic_form(self, kernels: Tensor) -> Tensor:
        """Return the matrix (N, N), N = I * H * W, of sum_l U_l^T kernels_l U_l as a form in X.

        `kernels` is (L, M, M), or (M, M) for all positions.
        """
        channels, (height, width), positions = self.shape[0], self.kernel, self.positions
        kernels = kernels.expand(positions, -1, -1).flatten(1).mT.contiguous()
        apart = kernels.view(channels, height * width, channels, height * width, positions)
        summed = self._sum_patch_forms(apart.transpose(1, 2).flatten(0, 1))
        return join_blocks(summed.unflatten(0, (channels, channels)))

    @cached_property
    def cell_layer(self) -> ConvPoolLayer:
        """The layer of its cells: one position per cell, whose patch is all that the cell sees.

        Its filters (O * P, I, ., .) are the filters at the cell's positions.
        """
        (rows, columns), (down, right), (height, width) = self.window, self.stride, self.kernel
        size = (height + down * (rows - 1), width + right * (columns - 1))
        weight = self.weight.new_zeros(len(self.weight), rows * columns, self.shape[0], *size)
        for p in range(rows * columns):
            top, left = p // columns * down, p % columns * right
            weight[:, p, :, top : top + height, left : left + width] = self.weight
        bias = self.bias.repeat_interleave(rows * columns)
        stride = (down * self.window_stride[0], right * self.window_stride[1])
        return self._with_filters(weight.flatten(0, 1), bias, stride)

    def _sum_patch_forms(self, forms: Tensor) -> Tensor:
        """Return sum_l patch_l^T forms_l patch_l over one channel (count, H W, H W), of forms (count, m, m, L)."""
        (rows, columns), (down, right) = self.kernel, self.stride
        full = forms.new_zeros(len(forms), self.images, *self._padded_size, *self._padded_size)
        steps = full.stride()
        placed = forms.view(len(forms), rows, columns, rows, columns, self.images, *self.output_size)
        view = (len(forms), columns, self.images, *self.output_size)
        strides = (steps[0], steps[5], steps[1], down * (steps[2] + steps[4]), right * (steps[3] + steps[5]))
        for a, b, c in itertools.product(range(rows), range(columns), range(rows)):
            # with these three given no two positions write to the same place
            full.as_strided(view, strides, a * steps[2] + b * steps[3] + c * steps[4]).add_(placed[:, a, b, c])
        return self._block_diagonal(self._crop_forms(full))

    def within_cell_form(self, weights: Tensor) -> Tensor:
        """Return the matrix (H W, H W) of sum_kpr weights[k, p, r] U_l(k,p) . U_l(k,r), of one channel."""
        rows, columns = self._padded_size
        cells = self.cells[: len(self.cells) // self.images]
        reach = self._patch_indices[cells]  # (K, P, kh * kw), of one image
        left = reach[:, :, None].expand(-1, -1, reach.shape[1], -1)
        right = reach[:, None].expand(-1, reach.shape[1], -1, -1)
        place = (left * (rows * columns) + right).flatten()
        flat = weights.new_zeros(self.images, rows * columns * rows * columns)
        values = weights[..., None].expand(*weights.shape, reach.shape[-1])
        flat.index_add_(1, place, values.reshape(self.images, -1))
        return self._block_diagonal(self._crop_forms(flat.view(1, self.images, rows, columns, rows, columns)))[0]

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _with_filters(self, weight: Tensor, bias: Tensor, stride: tuple[int, int]) -> ConvPoolLayer:
        """Return a layer of the same input without pooling."""
        visible = self.visible_cells
        return ConvPoolLayer(weight, bias, self.shape, self.padding, stride, images=self.images, visible_cells=visible)

    def _convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return outputs at every position (O, L)."""
        made = F.conv2d(self.split_images(x), self.weight, bias, padding=self.padding, stride=self.stride)
        return self._drop_uncounted(made.flatten(2)).transpose(0, 1).flatten(1)

    @property
    def _padded_size(self) -> tuple[int, int]:
        (_, height, width), (top, left) = self.image_shape, self.padding
        return height + 2 * top, width + 2 * left

    @cached_property
    def _patch_indices(self) -> Tensor:
        """Where in its image's padded plane the patch of every position of an image lies (L / images, kh * kw)."""
        rows, columns = self._padded_size
        plane = torch.arange(rows * columns, dtype=torch.float64, device=self.weight.device).view(1, 1, rows, columns)
        return self._drop_uncounted(F.unfold(plane, self.kernel, stride=self.stride))[0].mT.round().long()

    def _drop_uncounted(self, values: Tensor) -> Tensor:
        """Return the values at the positions counted, of values (., ., outputs of an image)."""
        return values.unflatten(2, self.full_output_size)[..., : self.output_size[0], : self.output_size[1]].flatten(2)

    def _crop_forms(self, forms: Tensor) -> Tensor:
        """Return forms over padded planes (., ., rows, columns, rows, columns) as matrices over planes (., ., n, n)."""
        (top, left), (_, height, width) = self.padding, self.image_shape
        part = forms[..., top : top + height, left : left + width, top : top + height, left : left + width]
        return part.reshape(*forms.shape[:2], height * width, height * width)

    def _block_diagonal(self, blocks: Tensor) -> Tensor:
        """Return matrices of one image each (., images, n, n) as matrices of all (., H W, H W)."""
        return blocks[:, 0] if self.images == 1 else torch.stack([torch.block_diag(*own) for own in blocks])

    def split_images(self, x: Tensor) -> Tensor:
        """Return X (I, H, W) as its images (images, I, ., W)."""
        return x.view(self.shape[0], self.images, -1, self.shape[2]).transpose(0, 1)

    def _crop(self, planes: Tensor) -> Tensor:
        """Return the last two axes without the padding."""
        (top, left), (_, height, width) = self.padding, self.image_shape
        return planes[..., top : top + height, left : left + width]


def join_blocks(blocks: Tensor) -> Tensor:
    """Return blocks (I, I, N, N) as one matrix (I N, I N)."""
    count, _, size, _ = blocks.shape
    return blocks.transpose(1, 2).reshape(count * size, count * size)
