"""Operators that few networks have: whether the channels before them may vary, and that what is built then runs.

Tracing checks a random network of the space itself (shapes, FLOPs, another batch size), so that a rule that says the
wrong thing fails here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcnet.space import trace

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Through(nn.Module):
    """A convolution, an operator, and a classifier that reads whatever the operator has along axis 1."""

    def __init__(self, operator: Callable[..., Tensor], *parts: nn.Module):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.parts, self.operator = nn.ModuleList(parts), operator
        with torch.no_grad():
            self.head = nn.Linear(self.features(X).shape[1], 4)

    def features(self, x: Tensor) -> Tensor:
        y = self.operator(self.stem(x), *self.parts)
        return y.flatten(2).mean(2) if y.dim() > 2 else y

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def unpooled(x: Tensor) -> Tensor:
    y, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, places, 2)


def complex_pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (4, 2)).contiguous()) * 2).flatten(3)


def embedded(x: Tensor, table: nn.Embedding) -> Tensor:
    return table((x.mean((2, 3)) > 0).long().argmax(1)).unsqueeze(2)


def projected(x: Tensor, cell: nn.LSTM) -> Tensor:
    return cell(x.flatten(2).transpose(1, 2))[0].transpose(1, 2)


VARIES: dict[str, tuple[Callable[..., Tensor], *tuple[nn.Module, ...]]] = {
    "stack": (lambda x: torch.stack([x, 2 * x], 2).mean(2),),
    "select of a place": (lambda x: x.select(2, 1),),
    "narrow of places": (lambda x: x.narrow(2, 1, 4),),
    "roll of places": (lambda x: torch.roll(x, 1, 3),),
    "windows": (lambda x: x.unfold(2, 2, 2).mean(-1),),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2),),
    "fold": (lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2),),
    "sort of places": (lambda x: x.sort(3).values,),
    "topk of places": (lambda x: x.topk(3, 3)[0],),
    "transform of places": (lambda x: torch.fft.rfft2(x).abs(),),
    "complex numbers": (complex_pairs,),
    "unpooling": (unpooled,),
    "prelu": (lambda x, act: act(x), nn.PReLU(8)),
    "loss": (lambda x: x + F.mse_loss(x, 2 * x),),
    "loss element for element": (lambda x: F.l1_loss(x, 2 * x, reduction="none"),),
    "unflatten": (lambda x: x.unflatten(1, (2, 4)).sum(1),),
    "broadcast": (lambda x: torch.broadcast_tensors(x, x.mean((2, 3), keepdim=True))[1] * x,),
    "repeat of places": (lambda x: x.mean((2, 3), keepdim=True).repeat(1, 1, 8, 8) + x,),
    "repeat of channels": (lambda x: x.mean(1, keepdim=True).repeat(1, 8, 1, 1) * x,),
    "largest of two": (lambda x: torch.max(x, x.flip(3)),),
    "index of places": (lambda x: x[:, :, torch.tensor([0, 2])],),
    "index_select of places": (lambda x: x.index_select(2, torch.tensor([0, 2])),),
    "implicit einsum": (lambda x: torch.einsum("acl,lr", x.flatten(2), torch.ones(64, 2)),),
    "linear without rows": (lambda x: F.linear(x.flatten(2), torch.ones(64)),),
    "group norm": (lambda x, norm: norm(x), nn.GroupNorm(2, 8)),
    "glu of places": (lambda x: F.glu(x, 3),),
    "shape of another, expanded": (lambda x, conv: x.mean(1, keepdim=True).expand_as(conv(x)), nn.Conv2d(8, 6, 1)),
    "shape of another, viewed": (lambda x, conv: x.flatten(2).view_as(conv(x)), nn.Conv2d(8, 8, 1)),
    "shapes of each other": (
        lambda x, conv: torch.broadcast_tensors(x.mean(1, keepdim=True), conv(x))[0],
        nn.Conv2d(8, 6, 1),
    ),
    "type of another": (lambda x, conv: x.type_as(conv(x)), nn.Conv2d(8, 6, 1)),
    "new tensor": (lambda x: x + x.new_zeros(x.shape[0], 1, 8, 8),),
    "sampled places": (
        lambda x, conv: F.grid_sample(x, conv(x).permute(0, 2, 3, 1), align_corners=False),
        nn.Conv2d(8, 2, 1),
    ),
}
"""What leaves the channels of the layer before it free."""

FIXES: dict[str, tuple[Callable[..., Tensor], *tuple[nn.Module, ...]]] = {
    "select of a channel": (lambda x: x.select(1, 3).unsqueeze(1) * x,),
    "roll of channels": (lambda x: torch.roll(x, 1, 1),),
    "sort of channels": (lambda x: x.sort(1).values,),
    "transform of channels": (lambda x: torch.fft.fft(x, dim=1).abs(),),
    "gather": (lambda x: x.gather(1, torch.zeros(x.shape[0], 4, 8, 8, dtype=torch.int64)),),
    "mask of channels": (lambda x: x[:, x.mean((0, 2, 3)) < 9.0],),
    "places to sample at": (
        lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1).reshape(-1, 8, 32, 2), align_corners=False),
    ),
    "window over channels": (lambda x, conv: conv(x.flatten(2).transpose(1, 2)).transpose(1, 2), nn.Conv1d(64, 64, 3)),
    "projections of a recurrent layer": (projected, nn.LSTM(8, 6, proj_size=4, batch_first=True)),
}
"""What keeps them all."""


@pytest.mark.parametrize("name", VARIES)
def test_channels_may_vary(name: str) -> None:
    space = trace(Through(*VARIES[name]), X)
    assert "stem" in {layer for variable in space.variables for layer in variable.layers}, space.fixed


@pytest.mark.parametrize("name", FIXES)
def test_channels_are_kept(name: str) -> None:
    operator, *parts = FIXES[name]
    network = nn.Sequential(nn.Conv2d(3, 3, 1), Through(operator, *parts))  # so that something may vary
    fixed = dict(trace(network, X).fixed)
    assert "1.stem" in fixed, fixed


def test_rows_of_an_embedding_stay_and_its_columns_may_vary() -> None:
    space = trace(Through(embedded, nn.Embedding(8, 6)), X)
    assert {v.name: v.max for v in space.variables}["parts.0"] == 6
