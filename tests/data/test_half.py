"""Validation images in two halves: what a search scores on, and what judges what it found."""

from __future__ import annotations

import pytest
import tinyrun
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bcnet
from bcnet.data.half import Half, halves
from bcnet.data.source import LoaderSource
from bcnet.run.pipeline import run_stages
from bcnet.run.session import Run


def _seen(half: Half) -> list[int]:
    batches = list(half.batches(0))
    assert all(len(x) == len(y) > 0 for x, y in batches)
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    return [int(label) for _, y in batches for label in y]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(0, 1000))
def test_halves_share_nothing_and_leave_nothing_out(sizes: list[int], seed: int) -> None:
    everything = torch.arange(sum(sizes))
    source = LoaderSource([(y[:, None].float(), y) for y in everything.split(sizes)])
    one, other = (_seen(half) for half in halves(source, seed))
    if sum(sizes) == 1:
        assert one == other == [0]
        return
    assert sorted(one + other) == everything.tolist()
    assert abs(len(one) - len(other)) <= 1
    assert [_seen(half) for half in halves(source, seed)] == [one, other]  # on every pass
    for first in range(0, len(everything) - 1, 2):  # sorted by class, both halves have of every class
        assert (first in one) != (first + 1 in one)


def test_another_seed_divides_otherwise() -> None:
    y = torch.arange(64)
    source = LoaderSource([(y[:, None].float(), y)])
    assert _seen(halves(source, 0)[0]) != _seen(halves(source, 1)[0])


@given(st.integers(0, 4))
def test_batches_from_a_start_on(start: int) -> None:
    y = torch.arange(40)
    half = halves(LoaderSource([(part[:, None].float(), part) for part in y.split(10)]), 3)[1]
    whole = [batch[1].tolist() for batch in half.batches(0)]
    assert [batch[1].tolist() for batch in half.batches(0, start)] == whole[start:]


class _Watching(nn.Module):
    """A small classifier of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, None]).mean(2))


@pytest.mark.usefixtures("one_thread")
def test_the_race_sees_no_image_that_the_search_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every validation image carries a mark; which marks scoring and racing ask for is written down."""
    torch.manual_seed(0)
    x = torch.randn(200, 12)
    y = (x[:, :6].sum(1) > 0).long()
    train, val = [(x[:100], y[:100])], [(x[100:160], y[100:160]), (x[160:], y[160:])]
    stage, seen = [""], dict[str, set[int]]()
    rows = {tuple(row.tolist()): number for number, row in enumerate(x)}

    def score(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, :2].argmax(1) == target[:, 0]).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.setdefault(stage[0], set()).update(target[:, 1].tolist())
        return nn.functional.cross_entropy(output, target[:, 0])

    def marked(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(a, torch.stack([b, torch.tensor([rows[tuple(r.tolist())] for r in a])], 1)) for a, b in batches]

    def told(run: Run, until: str, again: bool = False) -> None:
        for name in ("given", "search", "race", "retrain", "compare"):
            stage[0] = name
            run_stages(run, name, again)

    monkeypatch.setattr("bcnet.run.slim.run_stages", told)
    recipe = {key: tinyrun.TRAINED[key] for key in ("healing", "search", "race", "retrain", "given", "threads")}
    recipe |= {"fallback": False, "least": 2, "distillation": None, "compare": ["full", "uniform"]}
    task = bcnet.Task(loss=loss, score=score)
    bcnet.slim(_Watching(), x[:2], marked(train), marked(val), task=task, recipe=recipe, device="cpu", progress=False)
    validation = set(range(100, 200))
    searched, raced = seen["search"] & validation, seen["race"] & validation
    assert searched
    assert raced
    assert not searched & raced
    assert searched | raced == validation
    assert seen["retrain"] & validation == raced  # what ships is chosen by the race's half
