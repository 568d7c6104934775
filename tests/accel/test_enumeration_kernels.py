"""The GPU kernels of scoring all widths: each against torch, and a whole network."""

from __future__ import annotations

import pytest
from helpers.kernels import run_kernels

pytest.importorskip("triton", reason="triton is not installed")

PRELUDE = """
import os
import numpy as np, torch
torch.set_default_device(os.environ.get("BCNET_DEVICE", "cpu"))
from bcnet.accel.kernels import enum_depthwise as gpu_depthwise
from bcnet.accel.kernels import enum_fold as gpu_fold
from bcnet.accel.kernels import enum_norm as kernels
torch.manual_seed(0)
torch.set_num_threads(1)
def norm(y, weight, bias):
    return torch.batch_norm(y, weight, bias, None, None, True, 0.0, 1e-5, False)
def close(found, expected, rtol=2e-2):
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=rtol * float(expected.abs().max()))
"""


def check(code: str) -> None:
    run_kernels(PRELUDE + code)


def test_statistics_and_results_of_running_sums() -> None:
    check("""
parts = [torch.randn(130, 20) + k for k in range(3)]
other, weight, bias = torch.randn(130, 24)[:, 3:23], torch.randn(20), torch.randn(20)
affine = kernels.statistics(parts, (weight, bias, 1e-5))
found = kernels.normalise(parts, affine, other, relu=True)
pooled = kernels.normalise_pool(parts, affine, other, True, images=10)
for k in range(3):
    expected = (norm(sum(parts[: k + 1]), weight, bias) + other).relu()
    close(found[k], expected, 1e-5)
    close(pooled[k], expected.view(10, 13, 20).mean(1), 1e-5)
""")


@pytest.mark.parametrize(("width", "stride"), [(5, 1), (5, 2), (10, 1)])
def test_depthwise(width: int, stride: int) -> None:
    """Where the stride is 1, rows of 5 pixels are held in registers, those of 10 are not."""
    check(f"""
x = torch.randn(7, 24, 6, {width}).contiguous(memory_format=torch.channels_last)[:, 4:]
weight, gamma, beta = torch.randn(20, 1, 3, 3), torch.randn(20), torch.randn(20)
rows, affine = gpu_depthwise.depthwise(x, weight.flatten(1).t().contiguous(), {stride}, 1, (gamma, beta, 1e-5))
expected = torch.conv2d(x, weight, None, {stride}, 1, 1, 20)
close(rows, kernels.matrix(expected), 1e-5)
(found,) = kernels.normalise([rows], affine, None, relu=False, inplace=True)
close(found, kernels.matrix(norm(expected, gamma, beta)), 1e-5)
""")


def test_folded_batch_norm_and_pooling() -> None:
    """Two inputs side by side; their rows are longer than the columns that are used."""
    check("""
x, dense = torch.randn(2, 3 * 64, 24)[:, :, 4:] + 1, torch.randn(40, 20)
gamma, beta = torch.randn(40), torch.randn(40)
sums, gram = gpu_fold.moments(x)
close(sums, x.sum(1), 1e-5)
close(gram, x.transpose(1, 2) @ x, 1e-5)
weight, shift = gpu_fold.fold(dense, sums, gram, 3 * 64, (gamma, beta, 1e-5), torch.float32)
found = gpu_fold.dense_pool(x, weight, shift, True, 64)
for k in range(2):
    expected = norm(x[k] @ dense.t(), gamma, beta)
    close(x[k] @ weight[k].t() + shift[k], expected, 1e-4)
    close(found[k], expected.relu().view(3, 64, 40).mean(1), 1e-4)
""")


NETWORKS = {
    "pooled apart": "digits_cnn((4, 4, 6, 4, 8)), torch.randn(2, 1, 6, 6)",
    "pooled with its product": "digits_cnn((4, 4, 6, 4, 8)), torch.randn(2, 1, 4, 4)",
    "all candidates at once": "channel_bench_mobilenet((4, 4, 4, 4, 4, 8, 8)), torch.randn(2, 3, 8, 8)",
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_whole_network(network: str) -> None:
    """Maps of 3x3 pixels are pooled apart, those of 2x2 with the product; the last network adds before its head.

    Tiny networks of random weights round coarsely: the kernels are held to what bfloat16 loses without them.
    """
    check(f"""
from bcnet.space.network import trace
from bcnet.accel.enumeration.score_all import Options, score_all
from bcnet.supernet.supernet import Supernet
from bcnet.models.channel_bench import channel_bench_mobilenet
from bcnet.models.digits_cnn import digits_cnn
with torch.device("cpu"):
    model, x = {network}
    net = Supernet(trace(model, x, groups=2), "bcv2")
net = net.to(torch.get_default_device())
for parameter in net.parameters():
    torch.nn.init.normal_(parameter, std=0.5)
data = [(torch.randn(16, *x.shape[1:]), torch.randint(0, 10, (16,)))]
candidates = [v.candidates[-1:] for v in net.space.variables[:-3]] + [v.candidates for v in net.space.variables[-3:]]
exact = score_all(net, data, candidates).loss
fused, plain = (score_all(net, data, candidates, Options(bf16=True, fused=f)).loss for f in (True, False))
error, rounding = np.abs(fused - exact).max(), np.abs(plain - exact).max()
assert error < max(0.1 * exact.std(), 4 * rounding), (fused - exact, exact.std(), rounding)
""")
