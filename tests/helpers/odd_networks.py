"""Networks with parts that are seldom seen; each takes a batch of 3x8x8 images unless it says otherwise."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_networks import Tiny, conv
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Constants(Tiny):
    """A tensor made in the forward, and one kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(12, 10)
        self.scale = torch.rand(10, 1, 1, dtype=torch.float64)
        self.outer = conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x * torch.tensor([2.0], dtype=x.dtype)) * self.scale)


class WeightNorm(Tiny):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old = nn.utils.weight_norm(nn.Conv2d(12, 10, 3, padding=1))
            self.depthwise = nn.utils.weight_norm(nn.Conv2d(10, 10, 3, padding=1, groups=10))
        self.new = parametrizations.weight_norm(nn.Conv2d(10, 12, 3, padding=1))

    def body(self, x: Tensor) -> Tensor:
        return self.new(self.depthwise(self.old(x)))


class SpectralNorm(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.utils.spectral_norm(nn.Conv2d(12, 10, 3, padding=1))
        self.new = parametrizations.spectral_norm(nn.Conv2d(10, 12, 3, padding=1))

    def body(self, x: Tensor) -> Tensor:
        return self.new(self.old(x))


class Squeezed(Tiny):
    """A squeeze of all axes of one element, and of one that has more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stem(x), 1).squeeze(1).squeeze())


class DeadEnds(Tiny):
    """A head whose output goes nowhere, and layers, a norm and a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(12, 12)
        self.nowhere = nn.Conv2d(12, 7, 1)
        self.unused, self.norm = nn.Conv2d(12, 9, 3), nn.BatchNorm2d(12)
        self.register_buffer("table", torch.zeros(20))

    def body(self, x: Tensor) -> Tensor:
        self.nowhere(x)
        return self.inner(x)


class Slices(Tiny):
    """Modules addressed through slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(12, 12, 3, groups=12), conv(12, 10), conv(10, 10, 3, groups=10), conv(10, 12))

    def body(self, x: Tensor) -> Tensor:
        return self.layers[2:](self.layers[:2](x))


class FixedGroups(nn.Module):
    """A grouped convolution of the image itself: its outputs vary, its inputs do not."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.head = nn.Conv2d(12, 16, 3, groups=2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(torch.cat([x, x, x, x], 1)).mean((2, 3)))


class Picked(Tiny):
    """Channels in an order of a buffer and of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(12, generator=torch.Generator().manual_seed(0)))
        self.inner, self.outer = conv(12, 10), conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.index_select(1, self.order))[:, [1, 0, *range(2, 10)]])


class LocalResponse(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LocalResponseNorm(5, alpha=0.5), conv(12, 10)
        self.outer = conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(self.norm(x))))


class DynamicConv(Tiny):
    """Every image has a kernel of its own, mixed from four."""

    def __init__(self) -> None:
        super().__init__(12, 10)
        self.kernels, self.mixture = nn.Parameter(torch.randn(4, 10, 12, 3, 3)), nn.Linear(12, 4)

    def body(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        kernels = self.mixture(x.mean((2, 3))).softmax(1) @ self.kernels.view(4, -1)
        mixed = F.conv2d(x.reshape(1, n * c, h, w), kernels.view(n * 10, 12, 3, 3), groups=n, padding=1)
        return mixed.view(n, 10, h, w)


class Memory(Tiny):
    """A state that starts from zeros made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = conv(24, 12)

    def body(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 12, x.shape[2], x.shape[3], dtype=x.dtype)
        for _ in range(2):
            state = self.cell(torch.cat([x, state], 1))
        return state


class Einsum(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(10, 12)), conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("bc...,dc->bd...", x, self.mix))


class Recurrent(Tiny):
    def __init__(self) -> None:
        super().__init__(12, 9)
        self.inner = conv(12, 10)
        self.gru = nn.GRU(10, 6, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(12, 9, 2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        steps, _ = self.gru(self.inner(x).flatten(2).transpose(1, 2))
        return self.lstm(steps)[0].transpose(1, 2)[..., None]


class RecurrentCells(Tiny):
    """Cells called step by step, from a state of zeros and from the one before."""

    def __init__(self) -> None:
        super().__init__(12, 6)
        self.long, self.short = nn.LSTMCell(12, 10), nn.GRUCell(10, 6, bias=False)

    def body(self, x: Tensor) -> Tensor:
        steps = x.mean(3).unbind(2)
        state = long = None
        for step in steps[:3]:
            long = self.long(step, long)
            state = self.short(long[0], state)
        return state[..., None, None]


class BiasedAttention(Tiny):
    """Attention between pixels with a bias of its own for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Conv2d(12, 36, 1), nn.Parameter(torch.randn(4, 64, 64))
        self.out = nn.Conv2d(12, 12, 1)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, 4, 3, 64).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return self.out(mixed.transpose(2, 3).reshape(x.shape))


class NumbersInBuffers(Tiny):
    """Whole numbers kept as buffers, of which the forward makes sizes, and one that it counts its calls with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("padding", torch.tensor(1), persistent=False)
        self.register_buffer("calls", torch.tensor(0))
        self.inner = nn.Conv2d(12, 12, 3)

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        around = max(self.padding, self.padding * 2 - 1)
        return self.inner(F.pad(x, [int(around)] * 4)) if x.shape[-1] > around else x


class ShuffleLayer(Tiny):
    def __init__(self) -> None:
        super().__init__(18)
        self.shuffle, self.grouped = nn.ChannelShuffle(3), conv(18, 18, 3, groups=3)

    def body(self, x: Tensor) -> Tensor:
        return self.grouped(self.shuffle(x))


class Frozen(Tiny):
    """A forward that makes plain numbers of the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x.reshape(len(x), x.shape[1], -1).mean(2))


class NoGradient(Tiny):
    """A block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.inner(x).mean((2, 3), keepdim=True)
        return x * scale.sigmoid()


class NamedCode(Tiny):
    """A layer called as something that a graph module has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.code = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.code(x.view(-1, 12, 8, 8))


class NamedState(Tiny):
    """Layers called as something that a supernet has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.space = conv(12, 10), conv(10, 12)

    def body(self, x: Tensor) -> Tensor:
        return self.space(self.state(x))


class TwoInputs(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.other = conv(1, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.stem(x) + self.other(mask)).mean((2, 3)))


class Dictionary(Tiny):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).mean((2, 3))
        return {"logits": self.head(x), "loss": x.sum() * 0}


@dataclass
class Answer:
    """Outputs of a kind of their own, which torch does not look into."""

    logits: Tensor
    note: str = "none"


class Answering(Tiny):
    def forward(self, x: Tensor) -> Answer:
        return Answer(self.head(self.stem(x).mean((2, 3))))


class Features(Tiny):
    """All maps are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(12, 10)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        return [x, self.inner(x)]


ODD = {
    c.__name__: c
    for c in (
        Constants, WeightNorm, SpectralNorm, Squeezed, DeadEnds, Slices, FixedGroups, Picked, LocalResponse,
        DynamicConv, Memory, Einsum, Recurrent, RecurrentCells, BiasedAttention, NumbersInBuffers, ShuffleLayer, Frozen,
        NoGradient, NamedCode, NamedState, TwoInputs, Dictionary, Answering,
    )
}  # fmt: skip
