"""Training steps as CUDA graphs: the same training, and a notice where a step cannot be recorded."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import toy
from torch import Tensor, nn

from bcnet.data import DeviceData, LoadOptions
from bcnet.data.source import from_loaders
from bcnet.errors import BcnetError
from bcnet.training.cuda_graph import WARM_UP, CudaGraphStep, Waits
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, Retraining, retrain

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
NOTICE = "steps are launched kernel by kernel, not as one CUDA graph: "


def steps(draw: Callable[[], object]) -> list[str]:
    """Some steps of a network of one weight, which calls ``draw``; the notices."""
    network = nn.Module()
    network.weight = weight = nn.Parameter(torch.zeros(3))

    def learn(x: Tensor, y: Tensor) -> Tensor:
        draw()
        network.weight.grad = None
        (network.weight * x.sum()).sum().backward()
        return y.float().mean()[None]

    graphed = CudaGraphStep(learn, network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(WARM_UP + 3):
            losses = graphed(torch.full((2,), float(step)), torch.tensor([step, step + 1]))
            assert losses.tolist() == [step + 0.5]
            assert weight.grad is not None
            assert weight.grad.tolist() == [2.0 * step] * 3
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.random(), lambda: torch.rand(1)])  # noqa: NPY002
def test_a_network_that_draws_on_the_host_is_not_recorded(draw: Callable[[], object]) -> None:
    assert steps(draw) == [f"{NOTICE}the network draws random numbers on the host"]


def test_waiting_for_the_gpu_is_heard_and_other_warnings_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]

    def set_mode(mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Waits(torch.device("cuda")) as waits:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert waits.found
    assert [str(w.message) for w in caught] == ["something else"]
    assert modes == ["default", "warn", "default"]


def test_a_step_without_memory_for_a_record_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", full)
    assert steps(lambda: None) == [f"{NOTICE}there is too little memory beside"]


def test_a_step_that_cannot_be_recorded_goes_on_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", fails)
    assert steps(lambda: None) == [f"{NOTICE}recording it failed (operation not permitted when stream is capturing)"]


def test_a_gpu_that_does_not_recover_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", fails)
    monkeypatch.setattr("bcnet.training.cuda_graph._clean_up", fails)
    with pytest.raises(BcnetError) as caught:
        steps(lambda: None)
    assert str(caught.value) == (
        "a step cannot be recorded as a CUDA graph: an illegal memory access was encountered; "
        "resume with the engine plain"
    )


class Replayed:
    """A CUDA graph on the CPU: what is computed under it, it computes again."""

    def replay(self) -> None:
        self.again()


def test_a_network_whose_gradients_were_touched_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accumulators live on in a graph that is kept; the record must not run through them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    kept = network(torch.ones(1, 2)).sum()
    kept.backward(retain_graph=True)
    touched = accumulators(kept)
    seen: list[list[object]] = []

    def learn(x: Tensor, y: Tensor) -> Tensor:
        network.zero_grad()
        loss = (network(x) - y).square().mean()
        seen.append(accumulators(loss))
        loss.backward()
        return loss.detach()[None]

    @contextmanager
    def graph(record: Replayed, **_: object) -> Iterator[None]:
        yield
        record.again = lambda: None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    graphed = CudaGraphStep(learn, network)
    before = list(network.parameters())
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(WARM_UP + 1):
            graphed(x, y)
    assert all(set(map(id, found)) == set(map(id, touched)) for found in seen[:WARM_UP])
    assert len(seen[WARM_UP]) == 4
    assert not set(map(id, seen[WARM_UP])) & set(map(id, touched))
    assert all(mine is held for mine, held in zip(network.parameters(), before, strict=True))
    assert all(p.grad is not None for p in before)


def accumulators(loss: Tensor) -> list[object]:
    """The nodes of autograd's graph that add to a parameter's gradient."""
    found: list[object] = []
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        waiting += [other for other, _ in node.next_functions if other is not None]
        if "AccumulateGrad" in node.name():
            found.append(node)
    return found


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(BcnetError) as caught:
        Retraining(engine="fast")  # type: ignore[arg-type]
    assert str(caught.value) == "engine is 'fast', but it must be auto or plain"


def trained(engine: str, distil: bool = False, ragged: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    x, y = toy.images()
    held = DeviceData(x, y, mean=(0.0,), std=(1.0,), classes=4, device="cuda")
    source = held.train(LoadOptions(batch_size=16))
    if ragged:
        batches = [(x[a:b].cuda(), y[a:b].cuda()) for a, b in ((0, 32), (32, 64), (64, 75), (75, 96))]
        source = from_loaders(batches, batches).train  # type: ignore[assignment]
    torch.manual_seed(0)
    network, teacher = toy.network().cuda(), toy.network().cuda()
    config = Retraining(
        Optimisation(epochs=4, lr=0.05, weight_decay=5e-4, ema=0.9),
        Distillation() if distil else None,
        engine=engine,  # type: ignore[arg-type]
    )
    history = retrain(network, source, config, teacher=teacher if distil else None)
    return network.state_dict(), [loss for _, loss, _ in history]


@cuda
@pytest.mark.parametrize("more", [{}, {"distil": True}, {"ragged": True}])
def test_a_recorded_step_trains_as_the_plain_one(more: dict[str, bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (weights, losses), (plain, expected) = trained("auto", **more), trained("plain", **more)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, tensor in plain.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@cuda
def test_a_forward_that_waits_for_the_gpu_runs_as_it_is() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toy.network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * (1.0 if float(x.sum()) > 0 else 0.5))

    x, y = toy.images()
    held = DeviceData(x, y, mean=(0.0,), std=(1.0,), classes=4, device="cuda")
    network = Waits().cuda()
    with pytest.warns(UserWarning, match=f"{NOTICE}the network waits for the GPU"):
        history = retrain(network, held.train(LoadOptions(batch_size=16)), Retraining(Optimisation(epochs=3, lr=0.05)))
    assert history[-1][1] < history[0][1]
