"""One group of paths of equal widths, forwards and backwards, without autograd.

The sides of a group run side by side: their activations have equal shapes, so a norm is one launch for both
and a 1x1 convolution one batched matrix product.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bcnet.supernet.fused.program import Conv, Linear, Norm, Pool, Program
from bcnet.supernet.fused.values import Gradient, Value, Window

SPLITS = 264
"""Tiles of 128x128 that a weight gradient's matrix product is split into, at least: two per multiprocessor."""


class Tape:
    """Runs ``program`` on packed ``weights`` (S, O, K, I) and ``affines`` (S, C), by parameter name.

    After :meth:`backward`, ``found`` has the gradient of each parameter, one tensor per side: any number of
    partial sums of it, one after the other.
    """

    def __init__(self, program: Program, kernels: ModuleType, weights: dict[str, Tensor], affines: dict[str, Tensor]):
        self.program, self.kernels = program, kernels
        self.weights, self.affines = weights, affines
        self.sides = len(next(iter(weights.values())))
        self.values: dict[int, Value] = {}
        self.grads: dict[int, list[Gradient]] = {}
        self.spaces: dict[int, tuple[int, int, int]] = {}
        self.found: dict[str, tuple[Tensor, ...]] = {}
        self._room = self._zeros()

    def _zeros(self) -> dict[str, Tensor]:
        """Room for everything that is added up atomically, zeroed by one launch."""
        sizes: dict[str, tuple[int, ...]] = {}
        for layer in self.program.layers:
            if isinstance(layer, Norm):
                shape = (self.sides, 2, self.affines[layer.weight].shape[1])
                sizes[layer.weight], sizes[layer.bias] = shape, shape
            elif isinstance(layer, Conv) and layer.depthwise:
                weight = self.weights[layer.weight]
                sizes[layer.weight] = (self.sides, weight.shape[1], weight.shape[2])
        counts = [_count(shape) for shape in sizes.values()]
        device = next(iter(self.weights.values())).device
        flat = torch.zeros(sum(counts), dtype=torch.float32, device=device)
        return {n: part.view(shape) for (n, shape), part in zip(sizes.items(), flat.split(counts), strict=True)}

    def forward(self, x: Tensor) -> Tensor:
        """Logits (S, n, classes) float32 of images x (n, C, h, w), channels last."""
        self.x = x
        for layer in self.program.layers:
            if isinstance(layer, Conv):
                self.values[layer.out] = value = self._conv(layer)
                self.spaces[layer.out] = value.space
            elif isinstance(layer, Norm):
                self.values[layer.out] = self._norm(layer)
            elif isinstance(layer, Pool):
                self.values[layer.out] = self._pool(layer)
            else:
                return self._linear(layer)
        raise AssertionError("a program ends in a linear layer")

    def backward(self, dlogits: Tensor) -> None:
        """Gradients of all weights, from those of the logits (S, n, classes)."""
        for layer in reversed(self.program.layers):
            if isinstance(layer, Linear):
                self._linear_back(layer, dlogits)
            elif isinstance(layer, Pool):
                self._pool_back(layer)
            elif isinstance(layer, Norm):
                self._norm_back(layer)
            else:
                self._conv_back(layer)

    def _conv(self, layer: Conv) -> Value:
        weight = self.weights[layer.weight]
        if layer.x == self.program.source:
            # The sides share the input, so they are one convolution with the channels of both.
            y = _convolution(self.x, _image_weight(weight.flatten(0, 1), layer), layer)
            rows = Window.rows(y)
            return Value(rows.view(-1, self.sides, weight.shape[1]).unbind(1), None, _space(y))
        x = self.values[layer.x]
        if layer.pointwise:
            whole = torch.bmm(_whole(x), weight.view(self.sides, -1, weight.shape[3]).transpose(1, 2))
            return Value(whole.unbind(0), whole, x.space)
        if layer.depthwise:
            window = _window(layer, x)
            whole = self.kernels.depthwise_forward(_whole(x), weight.squeeze(3), window)
            return Value(whole.unbind(0), whole, (x.space[0], *window.out))
        images = [_as_image(part, x.space) for part in x.parts]
        ys = [_convolution(im, _image_weight(w, layer), layer) for im, w in zip(images, weight, strict=True)]
        return Value(tuple(Window.rows(y) for y in ys), None, _space(ys[0]))

    def _norm(self, layer: Norm) -> Value:
        y = self.values[layer.x]
        residual = None if layer.residual is None else _whole(self.values[layer.residual])
        gamma, beta = self.affines[layer.weight], self.affines[layer.bias]
        z = self.kernels.norm_forward(y.parts, gamma, beta, layer.eps, layer.act, residual, self._room[layer.weight])
        return Value(z.unbind(0), z, y.space)

    def _pool(self, layer: Pool) -> Value:
        x = self.values[layer.x]
        n, h, w = x.space
        whole = _whole(x).view(self.sides, n, h * w, -1).mean(2)
        return Value(whole.unbind(0), whole, (n, 1, 1))

    def _linear(self, layer: Linear) -> Tensor:
        weight = self.weights[layer.weight].squeeze(2)
        logits = torch.bmm(_whole(self.values[layer.x]), weight.transpose(1, 2)).float()
        return logits if layer.bias is None else logits.add_(self.affines[layer.bias].unsqueeze(1))

    def _linear_back(self, layer: Linear, dlogits: Tensor) -> None:
        x = _whole(self.values[layer.x])
        d = dlogits.to(x.dtype)
        self.found[layer.weight] = torch.bmm(d.transpose(1, 2), x).unbind(0)
        if layer.bias is not None:
            self.found[layer.bias] = dlogits.sum(1).unbind(0)
        whole = torch.bmm(d, self.weights[layer.weight].squeeze(2))
        self._give(layer.x, Gradient(whole.unbind(0), whole))

    def _pool_back(self, layer: Pool) -> None:
        _, h, w = self.values[layer.x].space
        (grad,) = self.grads.pop(layer.out)
        self._give(layer.x, Gradient(grad.parts, grad.whole, h * w))

    def _norm_back(self, layer: Norm) -> None:
        y = self.values.pop(layer.x)
        del self.values[layer.out]
        grads = _at_most_two(self.grads.pop(layer.out))
        residual = None if layer.residual is None else _whole(self.values[layer.residual])
        keep = layer.residual is not None and (layer.act > 0 or len(grads) > 1 or grads[0].repeat > 1)
        gamma, beta = self.affines[layer.weight], self.affines[layer.bias]
        found = self._room[layer.bias]
        dy = _like(y)
        kept = self.kernels.norm_backward(
            grads, y.parts, gamma, beta, layer.eps, layer.act, residual, self._room[layer.weight], dy.parts, found, keep
        )
        self.found[layer.bias], self.found[layer.weight] = (found[:, i].unbind(0) for i in (0, 1))
        self.grads[layer.x] = [dy]
        if layer.residual is not None:
            self._give(layer.residual, grads[0] if kept is None else Gradient(kept.unbind(0), kept))

    def _conv_back(self, layer: Conv) -> None:
        weight = self.weights[layer.weight]
        (dy,) = self.grads.pop(layer.out)
        if layer.x == self.program.source:
            assert dy.whole is not None
            image = _as_image(dy.whole, self.spaces[layer.out])
            _, dw, _ = _convolution_backward(image, self.x, _image_weight(weight.flatten(0, 1), layer), layer, False)
            self.found[layer.weight] = _rows_of_weight(dw).view(weight.shape).unbind(0)
            return
        x = self.values[layer.x]
        if layer.pointwise:
            self._pointwise_back(layer, dy, x)
        elif layer.depthwise:
            found = self._room[layer.weight]
            assert dy.whole is not None
            kernel = weight.squeeze(3)
            dx = self.kernels.depthwise_backward(dy.whole, _whole(x), kernel, _window(layer, x), found)
            self.found[layer.weight] = found.unbind(0)
            self._give(layer.x, Gradient(dx.unbind(0), dx))
        else:
            self._dense_back(layer, dy, x)

    def _pointwise_back(self, layer: Conv, dy: Gradient, x: Value) -> None:
        weight = self.weights[layer.weight]
        matrix = weight.view(self.sides, weight.shape[1], weight.shape[3])
        d, rows = dy.whole, _whole(x)
        assert d is not None
        parts = _splits(rows.shape[1], self.sides * _tiles(weight.shape[1], weight.shape[3]))
        cut = (self.sides * parts, rows.shape[1] // parts, -1)
        dw = torch.bmm(d.view(cut).transpose(1, 2), rows.view(cut))
        self.found[layer.weight] = dw.view(self.sides, -1).unbind(0)
        pending = self.grads.get(layer.x, [])
        if pending and pending[-1].whole is not None and pending[-1].repeat == 1:
            pending[-1].whole.baddbmm_(d, matrix)
        else:
            whole = torch.bmm(d, matrix)
            self._give(layer.x, Gradient(whole.unbind(0), whole))

    def _dense_back(self, layer: Conv, dy: Gradient, x: Value) -> None:
        weight = self.weights[layer.weight]
        dx, dw = [], []
        for s in range(self.sides):
            image = _as_image(dy.parts[s], self.spaces[layer.out])
            given = _as_image(x.parts[s], x.space)
            one = _convolution_backward(image, given, _image_weight(weight[s], layer), layer, True)
            dx.append(Window.rows(one[0]))
            dw.append(_rows_of_weight(one[1]))
        self.found[layer.weight] = tuple(dw)
        self._give(layer.x, Gradient(tuple(dx), None))

    def _give(self, value: int, grad: Gradient) -> None:
        self.grads.setdefault(value, []).append(grad)


def _like(y: Value) -> Gradient:
    """An empty gradient in the layout of ``y``: the sides one after the other, or with channels side by side."""
    part, sides = y.parts[0], len(y.parts)
    rows, channels = part.shape
    if part.stride(0) == channels:
        whole = part.new_empty((sides, rows, channels))
        return Gradient(whole.unbind(0), whole)
    whole = part.new_empty((rows, sides * channels))
    return Gradient(whole.view(rows, sides, channels).unbind(1), whole)


def _at_most_two(grads: list[Gradient]) -> list[Gradient]:
    """The kernels add two gradients; the one of a pooling comes first."""
    grads = sorted(grads, key=lambda g: -g.repeat)
    first, rest = grads[0], grads[1:]
    if len(rest) > 1:
        parts = tuple(torch.stack([g.parts[s] for g in rest]).sum(0) for s in range(len(first.parts)))
        rest = [Gradient(parts, None)]
    return [first, *rest]


def _whole(value: Value) -> Tensor:
    return torch.stack(value.parts) if value.whole is None else value.whole


def _as_image(rows: Tensor, space: tuple[int, int, int]) -> Tensor:
    """Rows (…, M, C) as (n, C, h, w), channels last."""
    return rows.view(*space, -1).permute(0, 3, 1, 2)


def _image_weight(weight: Tensor, layer: Conv) -> Tensor:
    """Packed (O, K, I) as (O, I, kh, kw), channels last."""
    return weight.view(weight.shape[0], *layer.kernel, -1).permute(0, 3, 1, 2)


def _rows_of_weight(weight: Tensor) -> Tensor:
    """(O, I, kh, kw) as packed (O, K, I)."""
    return weight.permute(0, 2, 3, 1).contiguous().flatten(1, 2)


def _space(y: Tensor) -> tuple[int, int, int]:
    return y.shape[0], y.shape[2], y.shape[3]


def _window(layer: Conv, x: Value) -> Window:
    return Window(*x.space, layer.kernel[0], layer.stride[0], layer.padding)


def _convolution(x: Tensor, weight: Tensor, layer: Conv) -> Tensor:
    return torch.ops.aten.convolution.default(
        x, weight, None, layer.stride, layer.padding, layer.dilation, False, (0, 0), 1
    )


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, layer: Conv, wants_x: bool) -> Any:
    mask = (wants_x, True, False)
    return torch.ops.aten.convolution_backward.default(
        dy, x, weight, None, layer.stride, layer.padding, layer.dilation, False, (0, 0), 1, mask
    )


def _tiles(outputs: int, inputs: int) -> int:
    return -(-outputs // 128) * -(-inputs // 128)


def _splits(rows: int, tiles: int) -> int:
    """Into how many pieces of at least 512 rows a sum over rows is cut: a power of two that divides them."""
    parts = 1
    while parts * tiles < SPLITS and rows % (2 * parts) == 0 and rows // (2 * parts) >= 512:
        parts *= 2
    return parts


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
