"""The fused step's Triton kernels against the plain reference: every kernel is launched."""

from __future__ import annotations

import pytest
from helpers.kernels import run_kernels

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")

SCRIPT = """
import os, sys
import numpy as np, torch
import reference_kernels as reference
from torch import nn
from bcnet.accel.fused_step import FusedEngine
from bcnet.accel.fused_step.teacher import FusedAnswers
from bcnet.accel.kernels import fused
from bcnet.accel.kernels.launch import Kernel
from bcnet.space.network import trace
from bcnet.supernet.supernet import Supernet
torch.set_num_threads(1)
dtype, device = getattr(torch, sys.argv[1]), os.environ.get("BCNET_DEVICE", "cpu")
launched = set()
launch = Kernel.__call__
Kernel.__call__ = lambda self, *given: (launched.add(self), launch(self, *given))[1]
fused.tuning = fused.Tuning(programs=4, tables=(1, 2))

class Block(nn.Module):
    '''Depthwise convolutions of every kind, a residual addition and all activations.'''
    def __init__(self, channels, kernel, stride):
        super().__init__()
        def norm(width, act):
            return nn.Sequential(nn.BatchNorm2d(width), act)
        wide = channels + 3
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 1, 1, bias=False), norm(channels, nn.ReLU()))
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), norm(wide, nn.ReLU6()))
        self.depthwise = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.after = norm(wide, nn.SiLU())
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        dense = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.dense = nn.Sequential(dense, norm(channels, nn.Hardswish()))
        self.last = nn.Linear(channels, 10)
    def forward(self, x):
        x = self.stem(x)
        y = self.project(self.after(self.depthwise(self.expand(x)))) + self.dense(x)
        return self.last(y.mean((2, 3)))

def gradients(net, kernels, x, y, paths, smoothing, teachers=None):
    net.zero_grad(set_to_none=True)
    engine = FusedEngine(net, kernels=kernels, dtype=dtype, multiple=8 if teachers else 1)
    losses = engine.step(x, y, paths, [1 / len(paths)] * len(paths), smoothing, teachers)
    return losses, {n: p.grad.clone() for n, p in net.named_parameters()}

tolerance = 2e-4 if dtype == torch.float32 else 0.06
channels, kernel, stride, size, images = map(int, sys.argv[2].split())
torch.manual_seed(channels)
space = trace(Block(channels, kernel, stride), torch.randn(2, 3, size, size), groups=min(4, channels))
net = Supernet(space).to(device)
for p in net.parameters():
    if p.dim() == 1:
        nn.init.uniform_(p, 0.5, 1.5)
x, y = torch.randn(images, 3, size, size), torch.arange(images)
x, y = x.to(device), y.to(device)
narrow, wide = net.space.sample(np.random.default_rng(0), 1)[0], net.space.max
both, taught = [(wide, "left"), (wide, "right")], [(wide, "left"), (narrow, "right")]
for paths, teachers in ((both, None), (taught, [None, 0])):
    found, got = gradients(net, fused, x, y, paths, 0.1, teachers)
    wanted, expected = gradients(net, reference, x, y, paths, 0.1, teachers)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    largest = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        error = float((got[name] - gradient).norm())
        assert error <= tolerance * (float(gradient.norm()) + 0.1 * largest), (channels, kernel, name, error)
for p in [b for name, b in net.named_buffers() if "running" in name]:
    nn.init.uniform_(p, 0.5, 1.5)
whole = space.build(space.max, weights_of=net).to(device).eval()
answers = FusedAnswers(whole, x, fused, dtype)
for given in (x, x[:1], x):  # a tape for every size of batch
    torch.testing.assert_close(answers(given), whole(given).detach(), rtol=tolerance, atol=tolerance)
missing = {name for name, kernel in vars(fused).items() if isinstance(kernel, Kernel) and kernel not in launched}
assert missing == set(sys.argv[3].split()), missing
"""
ROWS, ANY = {"_depthwise_rows", "_depthwise_rows_back"}, {"_depthwise_back", "_depthwise_weight"}
CASES = {
    "one channel, one image": ((1, 3, 1, 5, 1), {"_depthwise", "_depthwise_half_back", *ANY}),
    "halved": ((5, 3, 2, 6, 2), {*ROWS, *ANY}),
    "odd kernel": ((7, 5, 1, 3, 2), {*ROWS, "_depthwise_half_back"}),
}
"""By name: channels, kernel, stride, size and images, and the kernels that only other cases launch."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_fused_step_is_that_of_the_reference(case: str, dtype: str) -> None:
    """Odd sizes, sides next to each other and apart, a teacher; in both dtypes."""
    form, others = CASES[case]
    run_kernels(SCRIPT, dtype, " ".join(map(str, form)), " ".join(others))


def test_every_kernel_is_launched_in_some_case() -> None:
    assert not set.intersection(*(others for _, others in CASES.values()))
