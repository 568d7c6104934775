"""All widths at once give the scores that one by one gives, within the memory they are allowed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcnet.accel.enumeration.allocations import Allocations
from bcnet.accel.enumeration.score_all import AllScores, Options, score_all, within_memory
from bcnet.errors import BcnetError
from bcnet.models.channel_bench import channel_bench_mobilenet, channel_bench_resnet
from bcnet.models.digits_cnn import digits_cnn
from bcnet.space.network import trace
from bcnet.space.operators.table import OPERATORS, Operator, register
from bcnet.supernet.supernet import Supernet

Batches = list[tuple[Tensor, Tensor]]


class Concat(nn.Module):
    """Two branches joined, one of them twice, a gate, a layer scale, and a map flattened into the classifier."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(inputs, 4, 3, padding=1), nn.Conv2d(inputs, 6, 1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.join = nn.Conv2d(14, 6, 1)
        self.same = nn.Conv2d(6, 6, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(6, 4, 1), nn.Conv2d(4, 6, 1)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.drop, self.act = nn.Dropout(0.5), nn.SiLU(inplace=True)
        self.classifier = nn.Linear(6 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), self.norm(self.b(x))
        y = self.act(self.join(torch.cat([a, b, F.max_pool2d(a, 3, 1, 1)], 1)))
        y = y + self.same(y) * self.scale
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = F.avg_pool2d(y * gate, y.shape[-1] // 4)
        return self.classifier(self.drop(torch.flatten(y, 1)))


class Normed(nn.Module):
    """Layer norm over channels mixes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.classifier = nn.Conv2d(3, 4, 1), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.conv(x).mean((2, 3))))


NETWORKS = {
    "mobilenet": (lambda: channel_bench_mobilenet((8, 12, 12, 12, 8, 16, 16)), 2),
    "resnet": (lambda: channel_bench_resnet((6, 8, 8, 8, 10, 8, 8)), 2),
    "digits": (lambda: digits_cnn((8, 6, 12, 8, 16)), 3),
    "concat": (Concat, 3),
}


def supernet(name: str, principle: str) -> Supernet:
    torch.manual_seed(0)
    build, groups = NETWORKS[name]
    space = trace(build(), torch.randn(2, *shape(name)), groups=groups)
    net = Supernet(space, principle)
    for parameter in net.parameters():  # nothing may cancel or vanish by a lucky initialisation
        nn.init.normal_(parameter, std=0.5)
    return net


def shape(name: str) -> tuple[int, int, int]:
    return {"digits": (1, 8, 8), "concat": (3, 8, 8)}.get(name, (3, 16, 16))


def batches(name: str, *sizes: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    classes = 5 if name == "concat" else 10
    return [
        (torch.randn(n, *shape(name), generator=generator), torch.randint(0, classes, (n,), generator=generator))
        for n in sizes
    ]


@torch.no_grad()
def one_by_one(net: Supernet, data: Batches, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accuracy and loss (sides, n), and the loss of the mean of the logits (n,)."""
    net.eval()
    accuracy, loss = np.zeros((2, len(net.sides), len(widths)))
    average = np.zeros(len(widths))
    images = sum(len(y) for _, y in data)
    for k, row in enumerate(widths):
        for x, y in data:
            logits = [net(x, row, side) for side in net.sides]
            for i, scores in enumerate(logits):
                accuracy[i, k] += (scores.argmax(1) == y).sum().item() / images
                loss[i, k] += F.cross_entropy(scores, y, reduction="sum").item() / images
            average[k] += F.cross_entropy(torch.stack(logits).mean(0), y, reduction="sum").item() / images
    return accuracy, loss, average


@pytest.mark.parametrize("principle", ["ua", "bc", "bcv2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_one_by_one(name: str, principle: str) -> None:
    net = supernet(name, principle)
    data = batches(name, 12, 7)
    found = score_all(net, data, options=Options(average=True))
    assert found.sides == net.sides
    assert found.widths.tolist() == [list(w) for w in itertools.product(*(v.candidates for v in net.space.variables))]
    chosen = np.random.default_rng(0).permutation(len(found.widths))[:24]
    accuracy, loss, average = one_by_one(net, data, found.widths[chosen])
    np.testing.assert_allclose(found.loss[:, chosen], loss, rtol=2e-4)
    np.testing.assert_allclose(found.accuracy[:, chosen], accuracy, atol=1.01 / 19)
    assert np.mean(np.abs(found.accuracy[:, chosen] - accuracy) > 1e-9) < 0.02  # logits may tie to float tolerance
    if principle == "ua":
        assert found.average_loss is None
    else:
        np.testing.assert_allclose(found.average_loss[chosen], average, rtol=2e-4)  # type: ignore[index]


@torch.library.custom_op("bcnet_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """An operator of a user's own that treats every channel apart."""
    return x / 2


halved.register_fake(torch.empty_like)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3)
        self.classifier = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.second(halved(self.norm(self.first(x))))).mean((2, 3)))


def test_an_operator_of_ones_own_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "bcnet_tests::halved", Operator(lambda call: call.value("x")))
    example, data = torch.randn(2, 3, 16, 16), batches("mobilenet", 9)
    with pytest.raises(BcnetError, match=r"^widths cannot share the work of the operator bcnet_tests::halved"):
        score_all(Supernet(trace(Own(), example, groups=2), "bcv2"), data)
    register("bcnet_tests::halved", couple=lambda call: call.value("x"), shares="channels")
    net = Supernet(trace(Own(), example, groups=2), "bcv2")
    found = score_all(net, data)
    np.testing.assert_allclose(found.loss, one_by_one(net, data, found.widths)[1], rtol=2e-4)


def test_four_candidates_of_some_variables() -> None:
    net = supernet("mobilenet", "bcv2")
    data = batches("mobilenet", 9)
    candidates = [(8,), (3, 9, 12), (12,), (6,), (2, 4, 7, 8), (4, 16), (1, 16)]
    found = score_all(net, data, candidates)
    accuracy, loss, _ = one_by_one(net, data, found.widths)
    np.testing.assert_allclose(found.loss, loss, rtol=2e-4)
    assert found.accuracy == pytest.approx(accuracy)


def test_sides_one_after_the_other_or_together() -> None:
    net, data = supernet("digits", "bc"), batches("digits", 10)
    apart, together = score_all(net, data), score_all(net, data, options=Options(average=True))
    assert apart.average_accuracy is None
    np.testing.assert_allclose(apart.loss, together.loss, rtol=1e-6)


def test_bf16_is_close() -> None:
    net, data = supernet("digits", "bcv2"), batches("digits", 32)
    exact, rough = score_all(net, data), score_all(net, data, options=Options(bf16=True))
    assert np.corrcoef(exact.loss.ravel(), rough.loss.ravel())[0, 1] > 0.99
    assert not np.array_equal(exact.loss, rough.loss)


def test_progress_counts_every_path_of_every_batch() -> None:
    net, data = supernet("digits", "bcv2"), batches("digits", 4, 4)
    seen: list[tuple[int, int]] = []
    score_all(net, data, progress=lambda done, total: seen.append((done, total)))
    total = 2 * 2 * net.space.size
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def _peak(net: Supernet, data: Batches, options: Options) -> int:
    with Allocations() as allocations:
        score_all(net, data, options=options)
    return allocations.peak


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", ["resnet", "concat"])
def test_memory_cap_is_respected(name: str, average: bool) -> None:
    """The smallest cap that is not refused is not exceeded, and it is no wild overestimate."""
    net, data = supernet(name, "bcv2"), batches(name, 64)
    allowed = _smallest_cap(net, data, average)
    peak = _peak(net, data, Options(memory=allowed, average=average))
    assert peak <= allowed
    assert allowed < 3 * peak


def _smallest_cap(net: Supernet, data: Batches, average: bool) -> int:
    with pytest.raises(BcnetError) as refused:
        score_all(net, data, options=Options(memory=1 << 12, average=average))
    return (int(str(refused.value).split("up to ")[1].split(" MiB")[0].replace(",", "")) + 1) << 20


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    net, data = supernet("digits", "bcv2"), batches("digits", 512)
    message = (
        r"^scoring all widths in batches of 512 images holds up to \d+ MiB, but the cap is 1 MiB: "
        r"raise the cap or score in smaller batches$"
    )
    with pytest.raises(BcnetError, match=message):
        score_all(net, data, options=Options(memory=1 << 20))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", ["digits", "concat"])
def test_batches_are_halved_until_they_fit(name: str, average: bool) -> None:
    """No more than needed, and no image is lost; what then scores is what scores batches of that size."""
    net, data = supernet(name, "bcv2"), batches(name, 50)
    options = Options(memory=_smallest_cap(net, data, average) // 3, average=average)
    parts = within_memory(net, data, options)
    assert len(parts[0][0]) in {-(-len(data[0][0]) // 2**k) for k in range(1, 7)}
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), torch.cat([batch[i] for batch in data]))
    twice = [(x.repeat(2, 1, 1, 1), y.repeat(2)) for x, y in parts]
    with pytest.raises(BcnetError, match="raise the cap or score in smaller batches"):
        score_all(net, twice, options=options)
    assert score_all(net, parts, options=options).loss.shape == (2, net.space.size)
    assert [len(x) for x, _ in within_memory(net, parts, options)] == [len(x) for x, _ in parts]
    assert within_memory(net, [], options) == []


def test_no_part_is_left_with_few_images() -> None:
    """Of which batch norm would see next to nothing: of ten in parts of three, one would be alone."""
    net, data = supernet("digits", "bcv2"), batches("digits", 10)
    sizes = {
        tuple(len(y) for _, y in within_memory(net, data, Options(memory=int(2 ** (power / 8)))))
        for power in range(112, 184)
    }
    assert {(10,), (5, 5), (3, 3, 2, 2), (2,) * 5} <= sizes
    assert all(max(parts) - min(parts) <= 1 for parts in sizes)


def test_operators_that_mix_channels_are_refused() -> None:
    net = Supernet(trace(Normed(), torch.randn(2, 3, 4, 4), groups=2), "bcv2")
    with pytest.raises(BcnetError) as error:
        score_all(net, [(torch.randn(4, 3, 4, 4), torch.zeros(4, dtype=torch.int64))])
    assert str(error.value) == (
        "widths cannot share the work of the operator aten::layer_norm (in norm): score them one by one"
    )


def test_bad_input() -> None:
    net, data = supernet("digits", "bcv2"), batches("digits", 4)
    with pytest.raises(BcnetError, match=r"^there is nothing to score on: the validation set is empty$"):
        score_all(net, [])
    with pytest.raises(BcnetError, match=r"^this space has 5 width variables, but candidates of 1 were given$"):
        score_all(net, data, [(4,)])
    with pytest.raises(BcnetError, match=r"^variable 'stem.conv' was given no candidate$"):
        score_all(net, data, [(), *[(4,)] * 4])
    with pytest.raises(BcnetError, match=r"must lie in 1\.\.8$"):
        score_all(net, data, [(4, 9), *[(4,)] * 4])


def test_too_many_widths_are_refused() -> None:
    net = Supernet(trace(channel_bench_mobilenet((8, 12, 12, 12, 8, 16, 16)), torch.randn(2, 3, 16, 16), groups=12))
    size = net.space.size
    with pytest.raises(BcnetError) as error:
        score_all(net, batches("mobilenet", 4))
    assert str(error.value) == (
        f"there are {size:,} widths, but all are scored at once up to 1,000,000 only: give fewer candidates"
    )


def test_scores_are_arrays_of_sides_and_widths() -> None:
    net, data = supernet("digits", "bcv2"), batches("digits", 4)
    found: AllScores = score_all(net, data)
    assert found.accuracy.shape == found.loss.shape == (2, net.space.size)
    assert ((found.accuracy >= 0) & (found.accuracy <= 1)).all()
