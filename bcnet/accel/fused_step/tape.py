"""One group of paths of equal widths, forwards and backwards, without autograd.

The sides of a group run side by side: their activations have equal shapes, so a norm is one launch for both
and a 1x1 convolution one batched matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from bcnet.accel.fused_step import convolutions
from bcnet.accel.fused_step.convolutions import Extent, channels_last, convolution, extent_of, splits, tiles, window_of
from bcnet.accel.fused_step.eager import Slices, slope_of
from bcnet.accel.fused_step.program import Conv, Eager, Linear, Norm, Pool, Program
from bcnet.accel.kernels.pack import ALIGN
from bcnet.accel.kernels.values import Affine, Found, Goal, Rows, at_most_two, distance


class Tape:
    """Runs ``program`` on packed parameters of S sides.

    ``weights`` are flat tensors by parameter name, ``sizes`` their channels (O, I), and
    ``room`` the zeros that :meth:`room` asked for. After :meth:`backward`, ``found`` has every gradient by side.
    """

    def __init__(
        self,
        program: Program,
        kernels: ModuleType,
        weights: dict[str, Tensor],
        sizes: dict[str, tuple[int, int]],
        slices: Slices,
        room: Sequence[Tensor],
    ):
        sides = len(slices.selections)
        self.recalls = slices.statistics == "running"
        self.program, self.kernels, self.sides, self.slices = program, kernels, sides, slices
        self.weights, self.sizes = weights, sizes
        self.values: dict[int, Rows] = {}
        self.grads: dict[int, list[Rows]] = {}
        self.extents: dict[int, Extent] = {}
        self.found: dict[str, Found] = {}
        self.sums: dict[str, Tensor] = {}
        self.shaped: dict[Any, Tensor] = {}
        self.images: dict[int, list[Tensor]] = {}
        self.norms: dict[int, Affine] = {}
        self.plain: dict[int, list[Any]] = {}  # what eager operators gave, side by side
        self.graphs: dict[int, list[tuple[Tensor, list[Tensor]]]] = {}
        self.plain_grads: dict[int, list[list[Tensor]]] = {}
        self.recalled: set[int] = set()
        self._take(iter(room))

    @staticmethod
    def room(program: Program, sizes: dict[str, tuple[int, int]], sides: int) -> list[int]:
        """Elements of all that is added up atomically: two sums for each norm, back and forth, some weights, and the
        last bias."""
        counts: list[int] = []
        for layer in program.layers:
            if isinstance(layer, Norm):
                counts += [2 * sides * sizes[layer.weight][0]] * 2
            elif isinstance(layer, Linear):
                counts.append(sides * sizes[layer.weight][0])
            elif isinstance(layer, Conv) and layer.weight in program.summed:
                counts.append(sides * sizes[layer.weight][0] * sizes[layer.weight][1])
        return [-(-count // ALIGN) * ALIGN for count in counts]

    def _take(self, room: Iterator[Tensor]) -> None:
        """Divide the zeros up."""
        for layer in self.program.layers:
            if isinstance(layer, Norm):
                gamma, beta = self.weights[layer.weight], self.weights[layer.bias]
                norm = Affine(gamma, beta, next(room), next(room), layer.eps, layer.act)
                self.norms[layer.x] = self.norms[layer.out] = norm
            elif isinstance(layer, Linear) or (isinstance(layer, Conv) and layer.weight in self.program.summed):
                self.sums[layer.weight] = next(room)

    def forward(self, x: Tensor, keep: bool = True) -> Tensor:
        """Logits (S, n, classes), before their bias, of images x (n, C, h, w), channels last; with ``keep``,
        everything the backward pass needs is kept."""
        self.x = x
        for layer, ends in zip(self.program.layers, self.program.ends, strict=True):
            if isinstance(layer, Linear):
                return torch.bmm(self.values[layer.x].base, self._matrix(layer.weight).transpose(1, 2))
            self._run(layer)
            for held in () if keep else (self.values, self.images, self.plain, self.graphs):
                for value in ends:
                    held.pop(value, None)
        return self.values[self.program.result].dense()

    def _run(self, layer: Conv | Norm | Pool | Eager) -> None:
        if isinstance(layer, Conv):
            self._conv(layer)
        elif isinstance(layer, Norm):
            self._norm(layer)
        elif isinstance(layer, Pool):
            self._pool(layer)
        else:
            self._eager(layer)

    def answers(self, x: Tensor) -> Tensor:
        """The answers (S, n, classes), in float32, for images x (n, C, h, w); nothing is kept for a backward pass."""
        return self.scores(self.forward(x.to(self.slices.dtype, memory_format=torch.channels_last), keep=False))

    def scores(self, logits: Tensor) -> Tensor:
        """What :meth:`forward` gave, in float32 and with the last bias: (S, n, classes)."""
        bias = self._last_bias()
        sides, _, classes = logits.shape
        values = logits.float()
        return values if bias is None else values + bias[: sides * classes].view(sides, 1, classes)

    def _last_bias(self) -> Tensor | None:
        layer = self.program.layers[-1]
        return self.weights[layer.bias] if isinstance(layer, Linear) and layer.bias is not None else None

    def backward(self, logits: Tensor, y: Tensor, goal: Goal, losses: Tensor) -> None:
        """Gradients of all weights, from labels y (n,)."""
        last = self.program.layers[-1]
        room = self.sums[last.weight] if isinstance(last, Linear) else logits.new_zeros(logits.numel()).float()
        if goal.loss is None:
            slope = self.kernels.entropy(logits, self._last_bias(), y, goal, room, losses)
        else:
            slope = slope_of(goal.loss, logits, self._last_bias(), goal, room, losses)
        if not isinstance(last, Linear):
            self._give(self.program.result, Rows.whole(slope))
        for layer in reversed(self.program.layers):
            if isinstance(layer, Linear):
                self._linear_back(layer, slope)
            elif isinstance(layer, Eager):
                self._eager_back(layer)
            else:
                self._give_nothing(layer.out)
                self._layer_back(layer)

    def _layer_back(self, layer: Conv | Norm | Pool) -> None:
        if isinstance(layer, Pool):
            _, h, w = self.extents[layer.x]
            self._give(layer.x, self._arrived(layer.out)._replace(repeat=h * w))
        elif isinstance(layer, Norm):
            self._norm_back(layer)
        else:
            self._conv_back(layer)

    def _conv(self, layer: Conv) -> None:
        if layer.x == self.program.input:
            # The sides share the input, so they are one convolution with the channels of both.
            y = convolution(self.x, self._image_weight(layer), layer)
            self.values[layer.out], self.extents[layer.out] = Rows.beside(y, self.sides), extent_of(y)
            return
        x, extent = self.values[layer.x], self.extents[layer.x]
        before = self.norms[layer.x] if layer.x in self.program.folded else None
        after = None if self.recalls else self.norms.get(layer.out)
        weight = self.weights[layer.weight]
        if layer.product:
            outputs = self.sizes[layer.weight][0]
            self.values[layer.out] = self.kernels.conv1x1_forward(x, weight, outputs, before, after)
            self.extents[layer.out] = extent
        elif layer.depthwise:
            window = window_of(layer, extent)
            self.values[layer.out] = self.kernels.depthwise_forward(x, weight, window, before, after)
            self.extents[layer.out] = (extent[0], *window.out)
        else:
            if layer.x not in self.images:
                self.images[layer.x] = [x.image(s, extent) for s in range(self.sides)]
            weights = [self._image_weight(layer, s) for s in range(self.sides)]
            ys = [convolution(given, w, layer) for given, w in zip(self.images[layer.x], weights, strict=True)]
            self.values[layer.out], self.extents[layer.out] = Rows.apart(ys), extent_of(ys[0])

    def _norm(self, layer: Norm) -> None:
        y, norm = self.values[layer.x], self.norms[layer.x]
        if self.recalls and layer.running is not None:
            if layer.x not in self.recalled:  # the same for every batch of a shape
                self._recall(layer.running, norm, y)
                self.recalled.add(layer.x)
        elif self.recalls or layer.x not in self.program.counted:
            self.kernels.statistics(y, norm)
        self.extents[layer.out] = self.extents[layer.x]
        if layer.out in self.program.folded:
            self.values[layer.out] = y
        else:
            residual = None if layer.residual is None else self.values[layer.residual]
            self.values[layer.out] = self.kernels.normalise(y, norm, residual)

    def _recall(self, running: tuple[str, str], norm: Affine, y: Rows) -> None:
        """The sums that a batch of the running statistics would have."""
        for side, sums in enumerate(norm.sums[: 2 * y.sides * y.channels].view(y.sides, 2, y.channels)):
            mean, variance = (self.slices.of(name, side) for name in running)
            torch.mul(mean, y.rows, out=sums[0, : len(mean)])
            torch.addcmul(variance, mean, mean, out=sums[1, : len(mean)]).mul_(y.rows)

    def track(self) -> None:
        """Let the running statistics follow those of the batch, as batch norm does in training."""
        layers = [n for n in self.program.layers if isinstance(n, Norm) and n.running is not None]
        given = self.slices.momentum
        for momentum in {layer.momentum for layer in layers}:
            some = [layer for layer in layers if layer.momentum == momentum]
            counts = [float(math.prod(self.extents[layer.x])) for layer in some]
            shares = [1 / n for n in counts]
            for side in range(self.sides):
                sums = [self._sums(layer)[side] for layer in some]
                means = torch._foreach_mul([s[0] for s in sums], shares)
                variances = torch._foreach_mul([s[1] for s in sums], shares)
                torch._foreach_addcmul_(variances, means, means, -1.0)
                torch._foreach_mul_(variances, [n / max(n - 1, 1) for n in counts])
                for number, seen in enumerate((means, variances)):
                    kept = [self.slices.of(layer.running[number], side) for layer in some if layer.running]
                    own = [new[: len(old)] for new, old in zip(seen, kept, strict=True)]
                    torch._foreach_lerp_(kept, own, momentum if given is None else given)

    def _sums(self, layer: Norm) -> Tensor:
        """What the statistics of a norm are taken from: sums and sums of squares, (S, 2, C)."""
        channels = self.sizes[layer.weight][0]
        return self.norms[layer.x].sums[: 2 * self.sides * channels].view(self.sides, 2, channels)

    def _pool(self, layer: Pool) -> None:
        n, h, w = self.extents[layer.x]
        mean = self.values[layer.x].dense().view(self.sides, n, h * w, -1).mean(2)
        self.values[layer.out], self.extents[layer.out] = Rows.whole(mean), (n, 1, 1)

    def _linear_back(self, layer: Linear, slope: Tensor) -> None:
        x = self.values[layer.x].base
        product = torch.bmm(slope.transpose(1, 2), x)
        self.found[layer.weight] = Found(product, 0, product[0].numel())
        if layer.bias is not None:
            self.found[layer.bias] = Found(self.sums[layer.weight], 0, slope.shape[2])
        self._give(layer.x, Rows.whole(torch.bmm(slope, self._matrix(layer.weight))))

    def _norm_back(self, layer: Norm) -> None:
        y, norm = self.values.pop(layer.x), self.norms[layer.x]
        del self.values[layer.out]
        self.images.pop(layer.out, None)
        grads = at_most_two(self.grads.pop(layer.out))
        if layer.out in self.program.folded:
            plain = norm._replace(act=0)
        else:
            residual = None if layer.residual is None else self.values[layer.residual]
            keep = residual is not None and (layer.act > 0 or len(grads) > 1 or grads[0].repeat > 1)
            kept = self.kernels.norm_sums(grads, y, norm, residual, keep)
            plain = norm if kept is None else norm._replace(act=0)
            grads = grads if kept is None else [kept]
            if layer.residual is not None:
                self._give(layer.residual, grads[0])
        self.grads[layer.x] = [self.kernels.norm_gradient(grads, y, plain)]
        self.found[layer.bias] = Found(norm.found, 0, 2 * y.channels)
        self.found[layer.weight] = Found(norm.found, y.channels, 2 * y.channels)

    def _conv_back(self, layer: Conv) -> None:
        dy = self._arrived(layer.out)
        if layer.x == self.program.input:
            image = dy.together().image(0, self.extents[layer.out])
            _, dw, _ = convolutions.convolution_backward(image, self.x, self._image_weight(layer), layer, False)
            self.found[layer.weight] = Found(channels_last(dw), 0, dw.numel() // self.sides)
        elif layer.weight in self.program.summed:
            self._summed_back(layer, dy)
        elif layer.product:
            self._conv1x1_back(layer, dy)
        else:
            self._dense_back(layer, dy)

    def _summed_back(self, layer: Conv, dy: Rows) -> None:
        x, weight, found = self.values[layer.x], self.weights[layer.weight], self.sums[layer.weight]
        before = self.norms[layer.x] if layer.x in self.program.folded else None
        if layer.product:
            dx = self.kernels.conv1x1_backward(dy, x, weight, before, found)
        else:
            window = window_of(layer, self.extents[layer.x])
            dx = self.kernels.depthwise_backward(dy, x, weight, window, before, found)
        self.found[layer.weight] = Found(found, 0, math.prod(self.sizes[layer.weight]))
        self._give(layer.x, dx)

    def _conv1x1_back(self, layer: Conv, dy: Rows) -> None:
        outputs, inputs = self.sizes[layer.weight]
        matrix, d, rows = self._matrix(layer.weight), dy.dense(), self.values[layer.x].dense()
        parts = splits(dy.rows, self.sides * tiles(outputs, inputs))
        cut = self.sides * parts, dy.rows // parts
        product = torch.bmm(d.view(*cut, outputs).transpose(1, 2), rows.view(*cut, inputs))
        self.found[layer.weight] = Found(product, 0, parts * outputs * inputs, parts)
        pending = self.grads.get(layer.x)
        if pending and not pending[-1].parts and pending[-1].repeat == 1:
            pending[-1].base.baddbmm_(d, matrix)
        else:
            self._give(layer.x, Rows.whole(torch.bmm(d, matrix)))

    def _dense_back(self, layer: Conv, dy: Rows) -> None:
        dx, dw = [], []
        for s in range(self.sides):
            image, given = dy.image(s, self.extents[layer.out]), self.images[layer.x][s]
            one = convolutions.convolution_backward(image, given, self._image_weight(layer, s), layer, True)
            dx.append(channels_last(one[0]))
            dw.append(channels_last(one[1]))
        self.found[layer.weight] = Found(dw[0], 0, distance(dw), 1, tuple(dw[1:]))
        self._give(layer.x, Rows.apart(dx))

    def _eager(self, layer: Eager) -> None:
        """Under autograd, one side after the other; tensors join the tape as rows."""
        graphs: list[tuple[Any, list[Tensor]]] = []
        for s in range(self.sides):
            given = {node: self._given(node, number, s) for node, number in layer.inputs}
            leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
            with torch.set_grad_enabled(not self.recalls):
                y = self.slices.call(layer.node, given, s)
                if isinstance(y, Tensor) and y.is_floating_point():
                    y = y.to(self.x.dtype)
                    y = channels_last(y) if y.dim() == 4 else y.contiguous()
            graphs.append((y, leaves))
        self.graphs[layer.out] = graphs
        found = [y.detach() if isinstance(y, Tensor) else y for y, _ in graphs]
        self.plain[layer.out] = found
        if isinstance(found[0], Tensor) and found[0].dim() == 4:
            self.values[layer.out], self.extents[layer.out] = Rows.apart(found), extent_of(found[0])
        elif isinstance(found[0], Tensor) and found[0].dim() == 2:
            self.values[layer.out] = Rows.whole(torch.stack(found))
            self.extents[layer.out] = (len(found[0]), 1, 1)

    def _given(self, node: fx.Node, number: int, side: int) -> Any:
        """A value of the tape as an operator of the graph takes it, a leaf where it has a gradient."""
        if number == self.program.input:
            return self.x
        if number in self.plain:
            value = self.plain[number][side]
        elif len(node.meta["val"].shape) == 4:
            value = self.values[number].image(side, self.extents[number])
        else:
            value = self.values[number].of(side)
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if floats else value

    def _eager_back(self, layer: Eager) -> None:
        graphs, arrived = self.graphs.pop(layer.out), self.grads.pop(layer.out, [])
        others = self.plain_grads.pop(layer.out, [[] for _ in graphs])
        self.plain.pop(layer.out)
        self.values.pop(layer.out, None)
        numbers = [number for _, number in layer.inputs if number != self.program.input]
        given: dict[int, list[Tensor]] = {}
        for s, (y, leaves) in enumerate(graphs):
            parts = [self._shaped(g.repeated(s), y) for g in arrived] + others[s]
            if not parts or not isinstance(y, Tensor) or not y.requires_grad:
                continue
            gradient = torch.stack([part.to(y.dtype) for part in parts]).sum(0)
            floats = [n for n in numbers if n in self.values or isinstance((self.plain.get(n) or [0])[0], Tensor)]
            for number, leaf, found in zip(
                floats, leaves, self.slices.differentiate(y, gradient, leaves, s), strict=True
            ):
                given.setdefault(number, []).append(torch.zeros_like(leaf) if found is None else found)
        for number, gradients in given.items():
            if number in self.graphs:
                rows = self.plain_grads.setdefault(number, [[] for _ in gradients])
                for row, one in zip(rows, gradients, strict=True):
                    row.append(one)
            elif gradients[0].dim() == 4:
                self._give(number, Rows.apart([channels_last(one) for one in gradients]))
            else:
                self._give(number, Rows.whole(torch.stack(gradients)))

    @staticmethod
    def _shaped(rows: Tensor, y: Tensor) -> Tensor:
        """Rows (M, C) in the shape of an operator's result."""
        return rows if y.dim() == 2 else rows.view(len(y), y.shape[2], y.shape[3], -1).permute(0, 3, 1, 2)

    def _arrived(self, value: int) -> Rows:
        """The gradient of a value, added up where it has several readers."""
        grads = self.grads.pop(value)
        if len(grads) == 1 and grads[0].repeat == 1:
            return grads[0]
        sums = [torch.stack([g.repeated(s) for g in grads]).sum(0) for s in range(self.sides)]
        return Rows.whole(torch.stack(sums).to(grads[0].base.dtype))

    def _give_nothing(self, value: int) -> None:
        """A zero gradient for a value that the loss does not depend on."""
        if value not in self.grads:
            rows = self.values[value]
            self._give(value, Rows.whole(rows.base.new_zeros((self.sides, rows.rows, rows.channels))))

    def _give(self, value: int, grad: Rows) -> None:
        self.grads.setdefault(value, []).append(grad)

    def _matrix(self, name: str) -> Tensor:
        """A packed weight as (S, O, I)."""
        if name not in self.shaped:
            o, i = self.sizes[name]
            self.shaped[name] = self.weights[name].as_strided((self.sides, o, i), (o * i, i, 1))
        return self.shaped[name]

    def _image_weight(self, layer: Conv, side: int | None = None) -> Tensor:
        """A packed weight as (O, I, kh, kw), channels last: of one side, or of all as further output channels."""
        key = (layer.weight, side)
        if key not in self.shaped:
            (o, i), (h, w) = self.sizes[layer.weight], layer.kernel
            flat, size = self.weights[layer.weight], o * i * h * w
            outputs, start = (self.sides * o, 0) if side is None else (o, side * size)
            stride = (i * h * w, 1, i * w, i)
            self.shaped[key] = flat.as_strided((outputs, i, h, w), stride, flat.storage_offset() + start)
        return self.shaped[key]
