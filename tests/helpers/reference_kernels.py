"""What the functions of ``bcnet.accel.kernels.fused`` compute, in plain torch: any device, any dtype, no speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.accel.kernels.pack import Packed, Places
from bcnet.accel.kernels.values import Affine, Found, Goal, Rows, Window


def pack(groups: Sequence[Places], tensors: Sequence[Tensor], packed: Packed) -> None:
    for places, offsets in zip(groups, packed.offsets, strict=True):
        for i, tensor in enumerate(tensors):
            flat = packed.full if places.packing.full[i] else packed.half
            at, count = int(offsets[i]), int(places.count[i])
            for side in range(places.sides):
                part = flat[at + side * count : at + (side + 1) * count].zero_()
                _own(places, part, i).copy_(_slice(places, tensor, i, side))


def unpack(groups: Sequence[Places], found: Sequence[Sequence[Found]], grads: Sequence[Tensor]) -> None:
    for places, one in zip(groups, found, strict=True):
        for i, f in enumerate(one):
            for side in range(places.sides):
                given = _sums_of(f, side, int(places.count[i])).float().sum(0)
                _slice(places, grads[i], i, side).add_(_own(places, given, i))


def _own(places: Places, flat: Tensor, number: int) -> Tensor:
    """Of one parameter as it is packed (O·K·I), the part that is its own, as (O, K, I)."""
    outer, inner = (int(n) for n in places.own[:, number])
    shape = int(places.outer[number]), int(places.packing.kernel[number]), int(places.inner[number])
    return flat.view(shape)[:outer, :, :inner]


def _slice(places: Places, tensor: Tensor, number: int, side: int) -> Tensor:
    """The slice of one parameter (or of its gradient) as (O, K, I)."""
    of = places.packing
    stride = tuple(int(s) for s in of.stride[:, number])
    size = (int(places.own[0, number]), int(of.kernel[number]), int(places.own[1, number]))
    start = int(places.outers[side, number]) * stride[0] + int(places.inners[side, number]) * stride[2]
    return tensor.as_strided(size, stride, tensor.storage_offset() + start)


def _sums_of(found: Found, side: int, count: int) -> Tensor:
    """The partial sums (parts, count) of a side's gradient."""
    size, stride = (found.parts, count), (count, 1)
    if side and found.others:
        return found.others[side - 1].as_strided(size, stride)
    at = found.tensor.storage_offset() + found.first + side * found.step
    return found.tensor.as_strided(size, stride, at)


def statistics(y: Rows, norm: Affine) -> None:
    sums = _sums(norm.sums, y)
    for s in range(y.sides):
        rows = y.of(s).float()
        sums[s, 0], sums[s, 1] = rows.sum(0), (rows * rows).sum(0)


def normalise(y: Rows, norm: Affine, residual: Rows | None) -> Rows:
    sides = [_activate(_before(y, norm, residual, s)[1], norm.act) for s in range(y.sides)]
    return Rows.whole(torch.stack(sides).to(y.base.dtype))


def norm_sums(grads: Sequence[Rows], y: Rows, norm: Affine, residual: Rows | None, keep: bool) -> Rows | None:
    kept, found = [], _sums(norm.found, y)
    for s in range(y.sides):
        hat, u = _before(y, norm, residual, s)
        g = _arriving(grads, s) * _slope(u, norm.act)
        if keep:
            kept.append(g.to(y.base.dtype))
            g = kept[-1].float()
        found[s, 0], found[s, 1] = g.sum(0), (g * hat).sum(0)
    return Rows.whole(torch.stack(kept)) if keep else None


def norm_gradient(grads: Sequence[Rows], y: Rows, norm: Affine) -> Rows:
    out, found = y.empty(), _sums(norm.found, y)
    for s in range(y.sides):
        hat, u = _before(y, norm, None, s)
        g = _arriving(grads, s) * _slope(u, norm.act)
        mean = g - found[s, 0] / len(hat) - hat * found[s, 1] / len(hat)
        out.of(s).copy_(_per_channel(norm.gamma, y)[s] * _moments(y, norm, s)[1] * mean)
    return out


def depthwise_forward(x: Rows, weight: Tensor, window: Window, norm: Affine | None, next_norm: Affine | None) -> Rows:
    kernel = _taps(weight, x, window)
    given = [_given(x, norm, s).to(x.base.dtype) for s in range(x.sides)]
    y = Rows.whole(torch.stack([_convolve(window, rows, kernel[s].to(rows.dtype)) for s, rows in enumerate(given)]))
    if next_norm is not None:
        statistics(y, next_norm)
    return y


def depthwise_backward(dy: Rows, x: Rows, weight: Tensor, window: Window, norm: Affine | None, found: Tensor) -> Rows:
    dx, kernel, taps = [], _taps(weight, x, window), _taps(found, x, window)
    for s in range(x.sides):
        with torch.enable_grad():
            copies = _given(x, norm, s).to(x.base.dtype).float(), kernel[s].to(torch.float32, copy=True)
            leaves = copies[0].requires_grad_(), copies[1].requires_grad_()
            y = _convolve(window, *leaves)
        gx, taps[s] = torch.autograd.grad(y, leaves, dy.of(s).float())
        if norm is not None:
            hat, u = _before(x, norm, None, s)
            gx = gx * _slope(u, norm.act)
            sums = _sums(norm.found, x)
            sums[s, 0], sums[s, 1] = gx.sum(0), (gx * hat).sum(0)
        dx.append(gx.to(x.base.dtype))
    return Rows.whole(torch.stack(dx))


def conv1x1_forward(x: Rows, weight: Tensor, outputs: int, norm: Affine | None, next_norm: Affine | None) -> Rows:
    matrix, given = _matrix(weight, x, outputs), [_given(x, norm, s).to(x.base.dtype) for s in range(x.sides)]
    y = Rows.whole(torch.bmm(torch.stack(given), matrix.transpose(1, 2)))
    if next_norm is not None:
        statistics(y, next_norm)
    return y


def conv1x1_backward(dy: Rows, x: Rows, weight: Tensor, norm: Affine, found: Tensor) -> Rows:
    matrix, products, dx = _matrix(weight, x, dy.channels), _matrix(found, x, dy.channels), []
    for s in range(x.sides):
        hat, u = _before(x, norm, None, s)
        products[s] = dy.of(s).float().t() @ _activate(u, norm.act).to(x.base.dtype).float()
        dx.append(((dy.of(s).float() @ matrix[s].float()) * _slope(u, norm.act)).to(x.base.dtype))
        sums, g = _sums(norm.found, x), dx[-1].float()
        sums[s, 0], sums[s, 1] = g.sum(0), (g * hat).sum(0)
    return Rows.whole(torch.stack(dx))


def entropy(logits: Tensor, bias: Tensor | None, y: Tensor, goal: Goal, found: Tensor, losses: Tensor) -> Tensor:
    sides, n, classes = logits.shape
    values = logits.float() if bias is None else logits.float() + bias[: sides * classes].view(sides, 1, classes)
    log = torch.log_softmax(values, -1)
    target = F.one_hot(y, classes) * (1 - goal.smoothing) + goal.smoothing / classes
    losses[list(goal.slots)] = -(log * target).sum((1, 2)) / n
    shares = torch.tensor(goal.shares, device=y.device).view(-1, 1, 1)
    slope = (log.exp() - (target if goal.soft is None else goal.soft)) * shares / n
    found[: sides * classes] = slope.sum(1).flatten()
    return slope.to(logits.dtype)


def _per_channel(flat: Tensor, y: Rows) -> Tensor:
    return flat[: y.sides * y.channels].view(y.sides, y.channels)


def _sums(flat: Tensor, y: Rows) -> Tensor:
    return flat[: 2 * y.sides * y.channels].view(y.sides, 2, y.channels)


def _moments(y: Rows, norm: Affine, s: int) -> tuple[Tensor, Tensor]:
    """Mean and 1/deviation of channels."""
    mean, square = _sums(norm.sums, y)[s].double() / y.rows
    return mean.float(), torch.rsqrt((square - mean * mean).clamp_min(0) + norm.eps).float()


def _before(y: Rows, norm: Affine, residual: Rows | None, s: int) -> tuple[Tensor, Tensor]:
    """The normalised y and what is activated, both (M, C) in float32."""
    mean, scale = _moments(y, norm, s)
    hat = (y.of(s).float() - mean) * scale
    u = hat * _per_channel(norm.gamma, y)[s] + _per_channel(norm.beta, y)[s]
    return hat, u if residual is None else u + residual.of(s).float()


def _arriving(grads: Sequence[Rows], s: int) -> Tensor:
    return torch.stack([g.repeated(s) for g in grads]).sum(0)


def _given(x: Rows, norm: Affine | None, s: int) -> Tensor:
    return x.of(s).detach().clone() if norm is None else _activate(_before(x, norm, None, s)[1], norm.act)


def _convolve(window: Window, rows: Tensor, weight: Tensor) -> Tensor:
    """rows (M, C), weight (K, C) to (M', C)."""
    x = rows.view(window.n, window.h, window.w, -1).permute(0, 3, 1, 2)
    kernel = weight.t().reshape(-1, 1, window.kernel, window.kernel)
    y = F.conv2d(x, kernel, None, window.stride, window.padding, 1, len(kernel))
    return y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])


def _taps(weight: Tensor, x: Rows, window: Window) -> Tensor:
    count = window.kernel**2
    return weight[: x.sides * count * x.channels].view(x.sides, count, x.channels)


def _matrix(weight: Tensor, x: Rows, outputs: int) -> Tensor:
    return weight[: x.sides * outputs * x.channels].view(x.sides, outputs, x.channels)


def _activate(u: Tensor, act: int) -> Tensor:
    return (u, F.relu(u), F.relu6(u), F.hardswish(u), F.silu(u))[act] if act else u


def _slope(u: Tensor, act: int) -> Tensor:
    """The derivative of an activation."""
    if act == 1:
        return (u > 0).float()
    if act == 2:
        return ((u > 0) & (u < 6)).float()
    if act == 3:
        inside = (u / 3 + 0.5) * ((u > -3) & (u < 3))
        return inside + (u >= 3)
    if act == 4:
        s = torch.sigmoid(u)
        return s * (1 + u * (1 - s))
    return torch.ones_like(u)
