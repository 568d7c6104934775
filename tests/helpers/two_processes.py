"""What each of several processes does in tests/training/test_distributed.py; launched as a script with a folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import toy
from safetensors.torch import save_file

from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.training import train_supernet
from bcnet.training import distributed
from bcnet.training.loop import Progress

STOP = toy.STEPS + 2


def fresh(place: distributed.Place) -> Supernet:
    """A supernet; only the first process's has weights, and these count."""
    net = toy.supernet(dropout=0.0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(float(place.rank == 0))
    return net


def train(place: distributed.Place, folder: Path, stop: int | None = None) -> tuple[Supernet, dict[str, torch.Tensor]]:
    """A run in two parts where ``stop`` is a step: what a process knows at its end."""

    def stopped(now: Progress) -> None:
        if now.step == stop:
            raise InterruptedError

    if stop is not None:
        with suppress(InterruptedError):
            train_supernet(fresh(place), toy.source(shard=place.shard), toy.config(), None, folder, stopped)
    net = fresh(place)
    seen: list[int] = []
    source = toy.source(shard=place.shard)
    trained = train_supernet(net, source, toy.config(), None, folder, lambda now: seen.append(now.images))
    log = trained.log
    scores = Evaluator(net, [toy.images(64)]).measure(toy.some_widths(net))
    return net, {
        "steps": torch.tensor(len(seen)),
        "images": torch.tensor(seen[0]),
        "losses": torch.from_numpy(log.losses.copy()),
        "widths": torch.from_numpy(log.widths.copy()),
        "history": torch.tensor(trained.history, dtype=torch.float64),
        "score": torch.from_numpy(scores.score.copy()),
        "loss": torch.from_numpy(scores.loss.copy()),
        **{f"weight.{name}": p.detach().contiguous() for name, p in net.named_parameters()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    here = distributed.start(cpu=True)
    _, found = train(here, folder / "checkpoints", STOP)
    waits = dist.distributed_c10d._get_default_group()._get_backend(here.device).options._timeout
    place = {"world": torch.tensor(here.world), "waits_days": torch.tensor(waits.days)}
    save_file({**found, **place}, folder / f"rank{here.rank}.safetensors")
    distributed.leave()
