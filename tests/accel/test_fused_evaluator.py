"""Configurations scored by the fused kernels get the scores that they get one by one."""

from __future__ import annotations

import numpy as np
import pytest
import reference_kernels as reference
import torch
import toy
from torch import nn

from bcnet.accel import SharedEvaluator, open_evaluator
from bcnet.accel.fused_step import FusedEvaluator
from bcnet.accel.fused_step.program import Unsupported
from bcnet.models.channel_bench import channel_bench_mobilenet
from bcnet.space.network import trace
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet


def supernet() -> Supernet:
    torch.manual_seed(0)
    net = Supernet(trace(channel_bench_mobilenet((8, 16, 12, 16, 12, 16, 16)), torch.randn(2, 3, 16, 16), groups=4))
    nn.init.normal_(net.get_parameter("classifier.weight"))
    return net


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, 16, 16, generator=rng), torch.randint(0, 10, (n,), generator=rng)) for n in (24, 16)]


def test_scores_are_those_one_by_one() -> None:
    """On batches of two sizes, of both sides; the supernet's mode is left as it was."""
    net = supernet().train()
    widths = net.space.sample(np.random.default_rng(3), 6)
    wanted = Evaluator(net, batches()).measure(widths)
    found = FusedEvaluator(net, batches(), kernels=reference, dtype=torch.float32).measure(widths)
    np.testing.assert_allclose(found.by_side["loss"], wanted.by_side["loss"], rtol=1e-4)
    np.testing.assert_allclose(found.by_side["score"], wanted.by_side["score"], atol=1e-9)
    assert wanted.loss.std() > 0.01
    assert net.training


def test_recalibrated_statistics_are_left_to_others() -> None:
    with pytest.raises(Unsupported, match="statistics are recalibrated for every path"):
        FusedEvaluator(supernet(), batches(), None, batches(), kernels=reference, dtype=torch.float32)


def test_without_a_gpu_prefixes_are_shared_and_the_choice_says_why() -> None:
    net = toy.supernet()
    found, words = open_evaluator(net, [toy.images(16)], by="loss", bf16=True)
    assert isinstance(found, SharedEvaluator)
    assert words == "plain, not fused: it is on cpu, not on cuda"
    wanted = Evaluator(net, [toy.images(16)], by="loss", bf16=True).score(net.space.max)
    assert found.score(net.space.max) == pytest.approx(wanted, rel=1e-4)
    assert open_evaluator(net, [toy.images(16)], engine="plain")[1] == "plain, not fused: as asked for"
