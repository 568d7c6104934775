"""Latency as a cost: measured per layer, interpolated, calibrated on whole networks, and checked on others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.latency import table as latency_module
from bcnet.latency.table import LatencyTable, Measured, measure_table
from bcnet.latency.timing import TURNS, Operation, TimingConfig, onnx_layer, open_timer
from bcnet.search import Constraints, SearchConfig, search
from bcnet.space.network import NetworkSpace, trace


class Net(nn.Module):
    """A stem, a depthwise and a grouped convolution, a residual addition, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 24, 1)
        self.back = nn.Conv2d(24, 16, 3, padding="same")
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.back(self.wide(self.deep(x)).relu())
        return self.head(x.mean(dim=(2, 3)))


@pytest.fixture(scope="module")
def space() -> NetworkSpace:
    torch.manual_seed(0)
    return trace(Net().eval(), torch.randn(1, 3, 8, 8), groups=8)


def macs(network: nn.Module, x: Tensor) -> float:
    """What the pretended machine takes: nanoseconds for multiply-accumulates, bilinear in the channels."""
    total = 0.0

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, Tensor)
        total += out.numel() * weight[0].numel()

    handles = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.inference_mode():
        network(x)
    for handle in handles:
        handle.remove()
    return total


class Pretended:
    """A timer without noise: a pass costs 5 microseconds, and whole networks run at twice the pace of layers."""

    overhead = 300.0

    def __init__(self) -> None:
        self.layers: list[Operation] = []

    def layer(self, operation: Operation, batch: int) -> Callable[[], float]:
        self.layers.append(operation)
        return lambda: self.overhead + macs(operation.module(), operation.example(batch))

    def network(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], float]:
        return lambda: 5000 + 0.5 * macs(network, *inputs)

    def time(self, once: Callable[[], float]) -> float:
        return once()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    timer = Pretended()

    @contextmanager
    def fake(config: TimingConfig, device: torch.device) -> Iterator[Pretended]:
        yield timer

    monkeypatch.setattr(latency_module, "open_timer", fake)
    return timer


@pytest.fixture(scope="module")
def plain(space: NetworkSpace) -> LatencyTable:
    """The table of the pretended machine."""

    @contextmanager
    def fake(config: TimingConfig, device: torch.device) -> Iterator[Pretended]:
        yield Pretended()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency_module, "open_timer", fake)
        return measure_table(space)


def test_table_predicts_networks_it_never_saw(space: NetworkSpace, pretended: Pretended) -> None:
    table = measure_table(space)
    assert table.layers == ("stem", "deep", "wide", "back", "head")
    widths = space.sample(np.random.default_rng(7), 50)
    truth = [5000 + 0.5 * macs(space.build(w), space.example[0]) for w in widths]
    # Depthwise layers and all others are linear in each of their widths, so interpolation is exact.
    assert table(widths) == pytest.approx(truth, rel=1e-3)
    assert table.error < 1e-3
    assert table.weights == pytest.approx([5000, 0.5, 0], abs=1)
    assert sum(m.fitted for m in table.networks) == latency_module.FITTED


def test_same_operation_is_timed_once_a_turn(space: NetworkSpace, pretended: Pretended) -> None:
    told: list[tuple[int, int]] = []
    measure_table(space, told=lambda done, total: told.append((done, total)))
    # stem and head have one free width (4 points), deep is tied (4), wide and back have two (16 each).
    assert len(pretended.layers) == TURNS * (4 + 4 + 16 + 16 + 4)
    assert len(set(pretended.layers)) == 4 + 4 + 16 + 16 + 4
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_table_survives_json(space: NetworkSpace, pretended: Pretended) -> None:
    table = measure_table(space, TimingConfig(batch=2))
    again = LatencyTable.from_json(table.to_json())
    widths = space.sample(np.random.default_rng(0), 20)
    assert (again(widths) == table(widths)).all()
    assert again.facts == table.facts
    assert again.facts["batch"] == 2
    assert again.networks == table.networks
    odd = json.loads(table.to_json())
    odd["networks"][0]["predicted"] = "9" * 50
    large = json.loads(table.to_json())
    large["networks"][0]["predicted"] = 10**400
    for text in (
        "",
        "[]",
        "{}",
        '{"format": "bcnet.latency.compare", "version": 99}',
        json.dumps(odd),
        json.dumps(large),
    ):
        with pytest.raises(BcnetError, match=r"^this is no latency table of this version of bcnet: measure it again$"):
            LatencyTable.from_json(text)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exponent=st.floats(0.4, 2.5), scale=st.floats(0.1, 10), share=st.floats(0.1, 0.75), factor=st.floats(0.5, 2.0))
def test_an_aimed_table_is_right_where_it_was_aimed(
    space: NetworkSpace, plain: LatencyTable, exponent: float, scale: float, share: float, factor: float
) -> None:
    """On a machine whose networks take some power of what their layers take, from the full one to the budget."""

    def truth(widths: np.ndarray) -> np.ndarray:
        return 1e4 * scale * (plain(widths) / 1e4) ** exponent

    def measured(rows: np.ndarray) -> list[Measured]:
        times = zip(rows, plain(rows), truth(rows), strict=True)
        return [Measured(tuple(row.tolist()), float(guess), float(time), False) for row, guess, time in times]

    drawn = space.sample(np.random.default_rng(0), 400)
    close = drawn[np.argsort(np.abs(plain(drawn) / plain(space.max) - share))[:6]]
    rows = np.concatenate([space.max[None], close])
    aimed = plain.aimed(measured(rows[:5]), measured(rows[5:]))
    assert aimed(rows) == pytest.approx(truth(rows), rel=0.02)
    assert aimed.error < 0.02
    assert aimed.aimed(measured(rows[:5]), measured(rows[5:]))(rows) == pytest.approx(aimed(rows), rel=1e-3, abs=1)
    assert [m.fitted for m in aimed.networks] == [True] * 5 + [False] * 2
    again = LatencyTable.from_json(aimed.to_json())
    assert (again(drawn) == aimed(drawn)).all()
    assert aimed.corrected(factor)(drawn) == pytest.approx(factor * aimed(drawn), rel=1e-3, abs=1)
    assert (np.diff(aimed(drawn)[np.argsort(plain(drawn), kind="stable")]) >= 0).all()


def test_a_table_is_not_bent_by_networks_that_are_alike(space: NetworkSpace, plain: LatencyTable) -> None:
    full = Measured(tuple(space.max.tolist()), 1.0, 2.0 * float(plain(space.max)[0]), False)
    assert plain.aimed([full, full], []).exponent == 1.0
    assert plain.aimed([full, full], [])(space.max) == pytest.approx(2 * plain(space.max), rel=1e-6)


@pytest.mark.parametrize("exponent", [0.0, -1.0, 4.0, float("nan"), "1", None, [1.0]])
def test_a_damaged_exponent_is_refused(plain: LatencyTable, exponent: object) -> None:
    odd = json.loads(plain.to_json()) | {"exponent": exponent}
    with pytest.raises(BcnetError, match=r"^this is no latency table of this version of bcnet: measure it again$"):
        LatencyTable.from_json(json.dumps(odd))


@pytest.mark.parametrize("name", ["weights", "table"])
def test_a_table_whose_costs_are_negative_is_refused(plain: LatencyTable, name: str) -> None:
    """A power of what is negative is no number, and as a whole number it would be within any budget."""
    odd = json.loads(plain.to_json())
    odd[name] = (-np.array(odd[name]) - 1).tolist()
    with pytest.raises(BcnetError, match=r"^this is no latency table of this version of bcnet: measure it again$"):
        LatencyTable.from_json(json.dumps(odd | {"exponent": 0.5}))


def test_a_table_from_before_there_were_exponents_is_read(plain: LatencyTable) -> None:
    old = json.loads(plain.to_json())
    del old["exponent"]
    assert LatencyTable.from_json(json.dumps(old)).exponent == 1.0


def test_search_under_a_latency_budget(space: NetworkSpace, pretended: Pretended) -> None:
    table = measure_table(space)
    costs = {**space.costs, "latency": table}
    result = search(
        space, lambda w: float(np.sqrt(w).sum()), ["latency=60%"], costs, SearchConfig(evaluations=60, population=20)
    )
    budget = Constraints(space, costs, ["latency=60%"]).budgets[0]
    assert result.best is not None
    assert result.best.costs["latency"] <= budget.limit
    assert table([result.best.widths]).tolist() == [result.best.costs["latency"]]


def test_real_clock_gives_plausible_figures(space: NetworkSpace) -> None:
    config = TimingConfig(threads=1, seconds=0.0005)
    before = torch.get_num_threads()
    table = measure_table(space, config)
    assert torch.get_num_threads() == before
    assert (table.table > 0).all()
    assert table(space.max)[0] > 0
    assert table.facts["device"] == "cpu"
    assert table.facts["threads"] == 1


LAYERS = [
    Operation(8, 16, 1, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), False, True),
    Operation(8, 16, 8, (9, 9), (3, 3), (1, 1), (2, 2), (2, 2), False, False),
    Operation(8, 4, 1, (9, 9), (3, 3), (1, 1), "same", (1, 1), False, True),
    Operation(8, 4, 1, (9, 9), (3, 3), (1, 1), "valid", (1, 1), False, True),
    Operation(6, 4, 2, (5, 5), (2, 2), (2, 2), (0, 0), (1, 1), True, True),
    Operation(6, 4, 1, (11,), (5,), (1,), (2,), (1,), False, True),
    Operation(6, 4, 1, (7,), (), (), (), (), False, True),
    Operation(6, 4, 1, (), (), (), (), (), False, False),
]


@pytest.mark.parametrize("operation", LAYERS, ids=lambda o: f"{len(o.kernel)}d-{o.padding}-{o.groups}")
def test_layers_for_onnxruntime_are_those_of_torch(operation: Operation) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    x = operation.example(2)
    torch.manual_seed(3)
    model = onnx_layer(operation, 2)
    torch.manual_seed(3)
    expected = operation.module()(x).detach().numpy()
    found = runtime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_onnxruntime_times_a_network(space: NetworkSpace) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with open_timer(TimingConfig(backend="onnxruntime", threads=1), torch.device("cpu")) as timer:
        assert timer.time(timer.layer(LAYERS[0], 1)) > 0
        assert timer.time(timer.network(space.build(space.min), space.example)) > timer.overhead > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "tvm"}, "backend is 'tvm', but it must be torch or onnxruntime"),
        ({"batch": 0}, "batch is 0, but it must be at least 1"),
        ({"threads": 0}, "threads is 0, but it must be at least 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BcnetError) as error:
        TimingConfig(**settings)  # type: ignore[arg-type]
    assert str(error.value) == message
