"""What the kernels compute, in plain torch: any device, any dtype, no speed.

Activations are rows: (S, M, C) for S sides (paths of equal widths run together), M = n·h·w pixels and C
channels. A side may lie apart from the other, so conv outputs and gradients come as one (M, C) per side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.supernet.fused.pack import Segment
from bcnet.supernet.fused.values import Gradient, Window

Parts = Sequence[Tensor]


def pack(segments: Sequence[Segment], out: Tensor) -> None:
    """Copy slices of parameters into ``out``, output channels first and input channels last."""
    for s in segments:
        out[s.offset : s.offset + s.count] = s.view(s.tensor).reshape(-1).to(out.dtype)


def unpack(segments: Sequence[Segment], sources: Sequence[Tensor]) -> None:
    """Add ``sources`` (partial sums, O, K, I) to slices of the gradients."""
    for s, source in zip(segments, sources, strict=True):
        s.view(s.tensor).add_(source.reshape(-1, *s.shape).float().sum(0))


def norm_forward(
    y: Parts, gamma: Tensor, beta: Tensor, eps: float, act: int, residual: Tensor | None, sums: Tensor
) -> Tensor:
    """``act(batch_norm(y) + residual)`` (S, M, C); keeps in ``sums`` (S, 2, C) what the way back needs."""
    z = []
    for s, rows in enumerate(y):
        x = rows.float()
        mean, var = x.mean(0), x.var(0, unbiased=False)
        sums[s, 0], sums[s, 1] = mean, torch.rsqrt(var + eps)
        u = (x - mean) * sums[s, 1] * gamma[s] + beta[s]
        z.append(_activate(u if residual is None else u + residual[s].float(), act).to(rows.dtype))
    return torch.stack(z)


def norm_backward(
    grads: Sequence[Gradient],
    y: Parts,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    act: int,
    residual: Tensor | None,
    sums: Tensor,
    out: Parts,
    found: Tensor,
    keep: bool,
) -> Tensor | None:
    """Write the gradient of y to ``out``, those of beta and gamma to ``found`` (S, 2, C).

    Returns the gradient before the norm's output was activated (S, M, C), which is the residual's, if ``keep``.
    """
    kept = []
    for s, rows in enumerate(y):
        x = rows.float()
        hat = (x - sums[s, 0]) * sums[s, 1]
        u = hat * gamma[s] + beta[s]
        g = torch.stack([grad.rows(s) for grad in grads]).sum(0)
        g = g * _slope(u if residual is None else u + residual[s].float(), act)
        if keep:
            kept.append(g.to(rows.dtype))
            g = kept[-1].float()
        found[s, 0], found[s, 1] = g.sum(0), (g * hat).sum(0)
        dy = gamma[s] * sums[s, 1] * (g - found[s, 0] / len(x) - hat * found[s, 1] / len(x))
        out[s].copy_(dy)
    return torch.stack(kept) if keep else None


def depthwise_forward(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """x (S, M, C) and weight (S, C, K) to (S, M', C)."""
    return torch.stack([window.rows(window.convolve(x[s], weight[s])) for s in range(len(x))])


def depthwise_backward(dy: Tensor, x: Tensor, weight: Tensor, window: Window, found: Tensor) -> Tensor:
    """The gradient of x (S, M, C); that of the weight goes to ``found`` (S, C, K)."""
    dx = []
    for s in range(len(x)):
        with torch.enable_grad():
            leaves = x[s].detach().requires_grad_(), weight[s].detach().requires_grad_()
            y = window.rows(window.convolve(*leaves))
        gx, gw = torch.autograd.grad(y, leaves, dy[s])
        dx.append(gx)
        found[s] = gw
    return torch.stack(dx)


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
