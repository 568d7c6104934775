"""Scores of inherited networks by the fused step, with the reference kernels: as of networks that are built."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_kernels as reference
import torch
from torch import Tensor, nn

from bcnet.accel.fused_step import FusedCutScorer, cut_scorer, open_cut_scorer
from bcnet.accel.fused_step.program import Unsupported
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.space.network import trace
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation

pytestmark = pytest.mark.usefixtures("one_thread")


class Biased(nn.Module):
    """Operators without kernels: a biased convolution, a gate that is not zero at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 11, 3, 1, 1), nn.BatchNorm2d(11), nn.ReLU())
        self.gate, self.mix = nn.Conv2d(11, 9, 1), nn.Conv2d(9, 6, 3, bias=False)
        self.norm, self.last = nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.mix(torch.sigmoid(self.gate(self.stem(x)))))).mean((2, 3)))


NETWORKS = {
    "mobilenet": lambda: channel_bench_mobilenet((8, 23, 16, 24, 12, 20, 15)),
    "resnet": lambda: channel_bench_resnet((8, 12, 16, 23, 12, 20, 15)),
    "biased": Biased,
}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    return [
        (torch.randn(24, 3, 16, 16, generator=rng), torch.randint(0, 10, (24,), generator=rng)) for _ in range(count)
    ]


def scorers(network: nn.Module, steps: int, reconstruct: bool) -> tuple[CutScorer, FusedCutScorer]:
    space = trace(network, torch.randn(2, 3, 16, 16), groups=100)
    healing = Healing(steps=steps, optimisation=Optimisation(epochs=1, lr=0.01, weight_decay=1e-3), calibration=2)
    given: Any = (space, network, "l2", batches(3), batches(2))
    settings: Any = {"teacher": network, "healing": healing, "reconstruct": reconstruct}
    return (
        CutScorer(*given, **settings),
        FusedCutScorer(*given, **settings, kernels=reference, dtype=torch.float32),
    )


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("network", NETWORKS)
def test_scores_are_those_of_networks_that_are_built(network: str, steps: int) -> None:
    """Odd widths, with least squares and fine-tuning; asked for in turn, so that one leaves nothing for the next."""
    torch.manual_seed(0)
    plain, fused = scorers(NETWORKS[network](), steps, reconstruct=steps > 0)
    widths = plain.space.sample(np.random.default_rng(2), 3)
    expected, found = plain.parts(widths), fused.parts(widths)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    assert len({round(float(value), 4) for value in expected[:, 0]}) == 3


def test_concatenations_are_scored_as_they_are() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
            self.c, self.last = nn.Conv2d(16, 8, 1), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.c(torch.cat([self.a(x), self.b(x)], 1)).relu().mean((2, 3)))

    with pytest.raises(Unsupported, match="channels of a concatenation do not lie in one piece"):
        scorers(Joined(), 0, False)


@pytest.mark.parametrize(
    ("engine", "words"),
    [("auto", "plain, not fused: it is on cpu, not on cuda"), ("plain", "plain, as asked for")],
)
def test_the_choice_says_why_it_is_plain(engine: str, words: str) -> None:
    network = Biased()
    space = trace(network, torch.randn(2, 3, 16, 16))
    scorer, found = open_cut_scorer(space, network, "l2", batches(1), batches(1), engine=engine)
    assert (type(scorer), found) == (CutScorer, words)


@pytest.mark.parametrize("works", [True, False])
def test_batches_that_can_be_read_once_are_enough(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run gives them; also where the fused step is tried and fails, and its twin takes over."""
    monkeypatch.setattr(cut_scorer, "why_not_here", lambda network, bf16: "")
    monkeypatch.setattr(cut_scorer, "why_no_kernels", lambda device: "")

    class OnCpu(FusedCutScorer):
        def __init__(self, *given: Any, **settings: Any):
            super().__init__(*given, **settings, kernels=reference, dtype=torch.float32)
            if not works:
                raise RuntimeError("no kernel for this GPU")

    monkeypatch.setattr(cut_scorer, "FusedCutScorer", OnCpu)
    network = Biased()
    space = trace(network, torch.randn(2, 3, 16, 16))
    scorer, words = open_cut_scorer(space, network, "l2", iter(batches(2)), iter(batches(1)))
    assert words == ("fused" if works else "plain, not fused: no kernel for this GPU")
    assert type(scorer) is (OnCpu if works else CutScorer)
    assert np.isfinite(scorer.score(space.max))
