"""Small networks written for the coverage benchmark: on sound, volumes and video, of several inputs or outputs."""

from __future__ import annotations

import torch
from coverage_own import IMAGE, block, head, own
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm


@own((1, 256))
class OldWeightNorm(nn.Module):
    """A gated, dilated 1-D stack as in WaveNet, with hook-based weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = weight_norm(nn.Conv1d(1, 16, 3, padding=1))
        self.gates = nn.ModuleList([weight_norm(nn.Conv1d(16, 64, 3, padding=d, dilation=d)) for d in (1, 2, 4)])
        self.outs = nn.ModuleList([weight_norm(nn.Conv1d(32, 16, 1)) for _ in range(3)])
        self.head = nn.Conv1d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(x).chunk(2, 1)
            x = x + out(torch.tanh(a) * torch.sigmoid(b))
        return self.head(F.relu(x))


@own((1, 32, 64))
class GruHead(nn.Module):
    """Text recognition: convolutions, then a bidirectional GRU along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(block(1, 32, stride=2), block(32, 64, stride=2), nn.AdaptiveAvgPool2d((1, None)))
        self.gru = nn.GRU(64, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 37)

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.features(x).squeeze(2).permute(0, 2, 1)
        return self.head(self.gru(sequence)[0])


@own((40, 64))
class LstmHead(nn.Module):
    """Keyword spotting on a spectrogram: 1-D convolutions and the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(40, 64, 5, 2, 2), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 5, 2, 2))
        self.lstm = nn.LSTM(64, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.conv(x).transpose(1, 2))[0][:, -1])


@own(IMAGE, (6,))
class ConditionedByVector(nn.Module):
    """Two inputs: the vector scales and shifts the image's features (FiLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = block(3, 32), block(32, 48, stride=2), head(48)
        self.film = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 96))

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        gamma, beta = self.film(vector)[:, :, None, None].chunk(2, 1)
        return self.head(F.relu(self.b(self.a(image)) * (1 + gamma) + beta))


@own(IMAGE, IMAGE)
class Siamese(nn.Module):
    """Two images through one trunk; the output is how far apart they are, and their difference classified."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(block(3, 24, stride=2), block(24, 48, stride=2), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(48, 2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        u, v = self.trunk(a).flatten(1), self.trunk(b).flatten(1)
        return F.pairwise_distance(u, v), self.head((u - v).abs())


@own()
class DictOutput(nn.Module):
    """A class and a mask in a dictionary, with a tuple inside."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = block(3, 24, stride=2), block(24, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.mask, self.box, self.logits = nn.Conv2d(16, 2, 1), nn.Conv2d(32, 4, 1), head(32, 7)

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        deep = self.deep(self.down(x))
        return {"logits": self.logits(deep), "dense": (self.mask(F.relu(self.up(deep))), self.box(deep))}


@own((3, 4, 16, 16))
class ConvLstm(nn.Module):
    """A convolutional LSTM over frames, whose state starts as zeros made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.gates, self.head = block(3, 16), nn.Conv2d(32, 64, 3, padding=1), head(16, 5)

    def forward(self, video: Tensor) -> Tensor:
        n, _, frames, height, width = video.shape
        h = c = torch.zeros(n, 16, height, width, dtype=video.dtype)
        for t in range(frames):
            i, f, o, g = self.gates(torch.cat([self.encode(video[:, :, t]), h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


@own((1, 16, 16, 16))
class ResidualUNet3d(nn.Module):
    """A 3-D U-Net with instance norm, PReLU and trilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.layer(1, 8), self.layer(8, 16, 2)
        self.c, self.up = self.layer(16, 32, 2), nn.ConvTranspose3d(32, 16, 2, 2)
        self.d, self.skip, self.out = self.layer(32, 16), nn.Conv3d(32, 16, 1), nn.Conv3d(24, 3, 1)

    @staticmethod
    def layer(i: int, o: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv3d(i, o, 3, stride, 1), nn.InstanceNorm3d(o, affine=True), nn.PReLU(o))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        y = torch.cat([self.up(self.c(b)), b], 1)
        y = F.interpolate(self.d(y) + self.skip(y), scale_factor=2.0, mode="trilinear")
        return self.out(torch.cat([y, a], 1))


@own((1, 2048))
class RawAudio(nn.Module):
    """M5-like: a long first kernel on raw sound, GLU, depthwise separable 1-D convolutions, a squeeze of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 64, 80, 16), nn.BatchNorm1d(32)
        self.depth, self.point = nn.Conv1d(32, 32, 9, padding=4, groups=32), nn.Conv1d(32, 64, 1)
        self.head = nn.Linear(64, 35)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.glu(self.first(x), 1))
        x = F.relu(self.point(self.depth(x)))
        return F.log_softmax(self.head(F.avg_pool1d(x, x.shape[-1]).squeeze(-1)), 1)
