"""The convolution that all candidates share, in Triton's interpreter: against torch, and in whole networks."""

from __future__ import annotations

import pytest
from helpers.kernels import run_kernels

pytest.importorskip("triton", reason="triton is not installed")

PRELUDE = """
import os
import numpy as np, torch
from torch import nn
from bcnet.space.network import trace
from bcnet.accel.kernels import enum_conv as gpu_conv
from bcnet.accel.enumeration.score_all import Options, score_all
from bcnet.accel.kernels.enum_norm import matrix
from bcnet.supernet.supernet import Supernet
from bcnet.accel.enumeration.walker import Walker
torch.manual_seed(0)
torch.set_num_threads(1)
real = os.environ.get("BCNET_DEVICE") == "cuda"
if real:
    torch.set_default_device("cuda")
else:
    gpu_conv.IMAGES, gpu_conv.WIDTH = 16, 32
def norm(y, weight, bias):
    return torch.batch_norm(y, weight, bias, None, None, True, 0.0, 1e-5, False)
def supernet(module):
    net = Supernet(trace(module, torch.randn(2, 1, 2, 2), groups=2), "bcv2")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    return net
def close(found, expected, rtol=1e-5):
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
"""


def check(code: str) -> None:
    run_kernels(PRELUDE + code)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("starts", [(0, 128), (128, 0)])
def test_sums_statistics_and_results(starts: tuple[int, ...], stride: int) -> None:
    """Two groups of 128 channels, from the left and from the right; the second block of images is not full. On a GPU
    in bfloat16, with tiles of the size that it uses."""
    check(f"""
dtype, more = (torch.bfloat16, 1e-2) if real else (torch.float32, 0)
x = torch.randn(gpu_conv.IMAGES + 2, 264, 3, 2).to(dtype).contiguous(memory_format=torch.channels_last)[:, 8:]
weight, gamma, beta = torch.randn(40, 256, 3, 3).to(dtype), torch.randn(40), torch.randn(40)
groups = gpu_conv.Groups.of([((start, 128),) for start in {starts}])
assert gpu_conv.fits(x, weight, groups)
cuts = [weight[:, start : start + 128] for start in {starts}]
sums, found, size = gpu_conv.convolve(x, gpu_conv.packed(cuts), groups, (3, {stride}, 1))
affine = gpu_conv.norm(found, len(x), (gamma, beta, 1e-5))
other = torch.randn(sums.shape[1], 48).to(dtype)[:, 3:43]
given = x.float()
parts = [torch.conv2d(given[:, s : s + 128], cut.float(), None, {stride}, 1) for s, cut in zip({starts}, cuts)]
expected = [parts[0], parts[0] + parts[1]]
assert size == parts[0].shape[2:]
for k in range(2):
    close(sums[k], matrix(expected[k]), 1e-5 + more)
pooled = gpu_conv.apply_pool(sums, affine, other, True, len(x))
results = gpu_conv.apply(sums, affine, other, relu=True)
for k in range(2):
    result = (matrix(norm(expected[k], gamma, beta)) + other).relu()
    close(results[k], result, 1e-4 + more)
    close(pooled[k], result.unflatten(0, (len(x), -1)).mean(1), 1e-4 + more)
""")


def test_what_it_cannot_take() -> None:
    check("""
x = torch.randn(8, 128, 3, 3).contiguous(memory_format=torch.channels_last)
weight = torch.randn(40, 128, 3, 3)
Groups = gpu_conv.Groups
halves = Groups.of([((0, 64),), ((64, 64),)])
assert halves == Groups(first=0, step=64, size=64, count=2) and gpu_conv.fits(x, weight, halves)
assert Groups.of([((0, 32),), ((32, 96),)]) is None  # groups of two sizes
assert Groups.of([((0, 32), (64, 32)), ((32, 32), (96, 32))]) is None  # channels of a group that are apart
assert Groups.of([((0, 32),), ((32, 32),), ((96, 32),)]) is None
assert not gpu_conv.fits(x, weight, Groups.of([((0, 32),), ((32, 32),)]))
assert not gpu_conv.fits(x.contiguous(), weight, halves)
assert not gpu_conv.fits(x[:4], weight, halves)
assert not gpu_conv.fits(x, weight[:39], halves)
assert not gpu_conv.fits(x, weight[:, :, :1, :1], halves)
""")


@pytest.mark.parametrize("pooled", [True, False])
def test_whole_network(pooled: bool) -> None:
    """Two candidates of the convolution's input on both sides; the dry run takes the same way."""
    check(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 128, 1), nn.Conv2d(128, 16, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (128, 16))
        self.classifier = nn.Linear(16 if {pooled} else 64, 10)
    def forward(self, x):
        x = self.norms[0](self.stem(x)).relu()
        x = self.norms[1](self.first(x)).relu()
        return self.classifier((nn.functional.adaptive_avg_pool2d(x, 1) if {pooled} else x).flatten(1))
net = supernet(Net())
meta = []
def convolve(x, *rest, real=gpu_conv.convolve):
    meta.append(x.is_meta)
    return real(x, *rest)
gpu_conv.convolve = convolve
data = [(torch.randn(12, 1, 2, 2), torch.randint(0, 10, (12,)))]
exact = score_all(net, data).loss
fused = score_all(net, data, options=Options(bf16=True, fused=True)).loss
assert sorted(meta) == [False, False, True], meta
assert np.abs(fused - exact).max() < 0.1 * exact.std(), (fused - exact, exact.std())
""")


@pytest.mark.parametrize("dropout", [False, True])
def test_residual_network(dropout: bool) -> None:
    """The last variable's candidates are pooled at once, and so are their logits."""
    check(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        forms = ((1, 16, 1), (16, 128, 1), (128, 16, 3, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(*form, bias=False) for form in forms)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (16, 128, 16))
        self.drop, self.classifier = nn.Dropout() if {dropout} else nn.Identity(), nn.Linear(16, 10)
    def forward(self, x):
        x = self.norms[0](self.convs[0](x)).relu()
        y = self.norms[1](self.convs[1](x)).relu()
        x = (self.norms[2](self.convs[2](y)) + x).relu()
        return self.classifier(self.drop(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)))
net = supernet(Net())
data = [(torch.randn(n, 1, 2, 2), torch.randint(0, 10, (n,))) for n in (12, 9)]
exact = score_all(net, data).loss
real, ends = Walker.finish, []
def finish(self):
    logits = real(self)
    ends.append(tuple(logits.shape))
    assert self.tree.output not in self.values
    return logits
Walker.finish = finish
fused = score_all(net, data, options=Options(bf16=True, fused=True)).loss
assert ends == 4 * [(2, 12, 10)] + 4 * [(2, 9, 10)], ends
assert np.abs(fused - exact).max() < 0.02 * exact.std(), (fused - exact, exact.std())
""")
