"""More of coverage_fresh.py: hourglasses, sequences, volumes, several inputs and outputs."""

from __future__ import annotations

import torch
from coverage_fresh import fresh
from coverage_own import block, head
from torch import Tensor, nn
from torch.nn import functional as F


class Hourglass(nn.Module):
    """Recursion down and up again."""

    def __init__(self, depth: int, channels: int):
        super().__init__()
        self.keep, self.low, self.back = (
            block(channels, channels),
            block(channels, channels + 8),
            block(channels + 8, channels),
        )
        self.inner = Hourglass(depth - 1, channels + 8) if depth > 1 else block(channels + 8, channels + 8)

    def forward(self, x: Tensor) -> Tensor:
        low = self.back(self.inner(self.low(F.max_pool2d(x, 2))))
        return self.keep(x) + F.interpolate(low, scale_factor=2)


@fresh()
class StackedHourglass(nn.Module):
    """Two hourglasses with intermediate predictions fed back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 16, 3, 2)
        self.glasses = nn.ModuleList([Hourglass(3, 16) for _ in range(2)])
        self.predict = nn.ModuleList([nn.Conv2d(16, 5, 1) for _ in range(2)])
        self.merge = nn.ModuleList([nn.Conv2d(5, 16, 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, found = self.stem(x), {}
        for i, glass in enumerate(self.glasses):
            y = glass(x)
            found[f"stack{i}"] = self.predict[i](y)
            if i < len(self.merge):
                x = x + y + self.merge[i](found[f"stack{i}"])
        return found


@fresh((1, 32, 48))
class ConvRecurrent(nn.Module):
    """CRNN: columns of a feature map read by a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(block(1, 16, 3, 2), block(16, 32, 3, 2), block(32, 32))
        self.rnn, self.out = nn.GRU(32 * 8, 24, num_layers=2, bidirectional=True), nn.Linear(48, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        columns = x.permute(3, 0, 1, 2).flatten(2)
        return F.log_softmax(self.out(self.rnn(columns)[0]), -1).transpose(0, 1)


@fresh((4, 3, 24, 24))
class FramesGru(nn.Module):
    """Frames folded into the batch for a 2-D network, then a GRU cell over time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cell, self.out = (
            nn.Sequential(block(3, 16, 3, 2), block(16, 24, 3, 2)),
            nn.GRUCell(24, 20),
            nn.Linear(20, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        features = self.body(x.flatten(0, 1)).mean((2, 3)).view(n, t, -1)
        state = features.new_zeros(n, 20)
        for i in range(t):
            state = self.cell(features[:, i], state)
        return self.out(state)


@fresh((1, 16, 24, 24))
class Depthwise3d(nn.Module):
    """Factorised and depthwise 3-D convolutions (X3D) with squeeze-and-excitation and swish."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = (
            nn.Conv3d(1, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
            nn.Conv3d(16, 16, (5, 1, 1), padding=(2, 0, 0), groups=16),
        )
        self.up, self.deep, self.down = (
            nn.Conv3d(16, 36, 1),
            nn.Conv3d(36, 36, 3, padding=1, groups=36),
            nn.Conv3d(36, 16, 1),
        )
        self.norms = nn.ModuleList([nn.BatchNorm3d(n) for n in (16, 36, 36, 16)])
        self.se, self.out = (
            nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(36, 8, 1), nn.ReLU(), nn.Conv3d(8, 36, 1), nn.Sigmoid()),
            nn.Linear(16, 7),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.time(self.space(x)))
        y = self.norms[2](self.deep(F.silu(self.norms[1](self.up(x)))))
        x = x + self.norms[3](self.down(y * self.se(y)))
        return self.out(x.mean((-1, -2, -3)))


@fresh((3, 32, 32), (1, 32, 32), (6,))
class ThreeInputs(nn.Module):
    """Colour, depth and a vector of features, each with an encoder, fused by FiLM and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.depth = (
            nn.Sequential(block(3, 24, 3, 2), block(24, 24)),
            nn.Sequential(block(1, 8, 3, 2), block(8, 24)),
        )
        self.film, self.join, self.head = nn.Linear(6, 48), block(48, 32, 1), head(32)

    def forward(self, image: Tensor, depth: Tensor, extra: Tensor) -> Tensor:
        a, b = self.colour(image), self.depth(depth)
        scale, shift = self.film(extra).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        a = a * (1 + scale) + shift + b
        return self.head(self.join(torch.cat((a, b), 1)))


@fresh()
class MultiTask(nn.Module):
    """A shared trunk with several heads in a dictionary, one read by another."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(block(3, 16, 3, 2), block(16, 32, 3, 2))
        self.tasks = nn.ModuleDict(
            {"classes": head(32, 7), "boxes": nn.Conv2d(32, 4, 1), "mask": nn.ConvTranspose2d(32 + 4, 8, 2, 2)}
        )
        self.refine = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk(x)
        boxes = self.tasks["boxes"](x).sigmoid()
        mask = self.refine(F.relu(self.tasks["mask"](torch.cat([x, boxes], 1))))
        return {"classes": self.tasks["classes"](x), "boxes": boxes.flatten(2), "mask": mask}


@fresh()
class CapsuleHead(nn.Module):
    """Primary capsules: channels as groups of vectors squashed, routed once by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.capsules = nn.Sequential(block(3, 24, 3, 2), block(24, 24, 3, 2)), nn.Conv2d(24, 32, 3, 2, 1)
        self.route = nn.Parameter(torch.randn(4 * 16, 10, 8, 6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.capsules(self.body(x))
        n = x.shape[0]
        u = x.view(n, 4, 8, -1).permute(0, 1, 3, 2).reshape(n, -1, 8)
        norm = u.norm(dim=-1, keepdim=True)
        u = u * norm / (1 + norm**2)
        votes = torch.einsum("nid,icdo->nico", u, self.route)
        agreement = votes.sum(1, keepdim=True).mul(votes).sum(-1, keepdim=True).softmax(2)
        return (agreement * votes).sum(1).norm(dim=-1)


@fresh((64, 32))
class TemporalConv(nn.Module):
    """Dilated causal 1-D convolutions with gated tails (WaveNet), skips summed; the input has time first."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(32, 24, 1)
        self.filters = nn.ModuleList([nn.Conv1d(24, 48, 2, dilation=2**i) for i in range(4)])
        self.residual, self.skips = (
            nn.ModuleList([nn.Conv1d(24, 24, 1) for _ in range(4)]),
            nn.ModuleList([nn.Conv1d(24, 40, 1) for _ in range(4)]),
        )
        self.out = nn.Conv1d(40, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.start(x.transpose(1, 2)), 0
        for i in range(4):
            a, b = torch.tensor_split(self.filters[i](F.pad(x, (2**i, 0))), 2, dim=1)
            y = a.tanh() * b.sigmoid()
            total = total + self.skips[i](y)
            x = x + self.residual[i](y)
        return self.out(F.relu(total))[..., -1]


@fresh()
class EarlyExits(nn.Module):
    """Losses weighted by buffers, a list of exits averaged, dropout of whole maps, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([block(i, o, 3, 2) for i, o in ((3, 16), (16, 24), (24, 40))])
        self.exits, self.drop = nn.ModuleList([head(o) for o in (16, 24, 40)]), nn.Dropout2d(0.1)
        self.register_buffer("weights", torch.tensor([0.2, 0.3, 0.5]))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            x = self.drop(stage(x))
            logits.append(leave(x))
        return (torch.stack(logits, -1) * self.weights).sum(-1) / self.temperature
