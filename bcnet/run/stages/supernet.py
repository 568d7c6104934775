"""Training the supernet, from random weights or from those of the given network."""

from __future__ import annotations

import time
from dataclasses import asdict

from bcnet.accel import choose_engine
from bcnet.run.session import Run
from bcnet.run.stages.common import CHECKPOINTS, rows_of
from bcnet.supernet.cut import cut_supernet
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.utils.progress import training_steps


def train(run: Run) -> None:
    """Train the supernet."""
    r, start = run.recipe, time.monotonic()
    if r.start == "trained":
        net = cut_supernet(run.space, run.given_network(), run.channel_scores)
    else:
        net = run.fresh_supernet()
    config = SupernetTraining(
        sampling=r.paths.sampling,
        optimisation=r.supernet,
        seed=r.seed,
        backward=r.backward,
        checkpoint_minutes=r.checkpoint_minutes,
        channels_last=r.channels_last,
    )
    own = run.task_given is not None and r.paths.sampling.sandwich
    engine, words = choose_engine(net, r.engine, bf16=r.supernet.bf16, own_distillation=own)
    if run.device.type == "cuda":  # elsewhere there is no choice
        run.listener.note(f"the supernet's engine is {words}")
    folder = run.path(CHECKPOINTS, "train")
    trained = train_supernet(
        net, run.data.train, config, run.task_given, folder, training_steps(run.listener, "train"), engine
    )
    tensors = {f"net.{k}": t for k, t in net.state_dict().items()}
    tensors |= {f"log.{k}": t for k, t in trained.log.tensors().items()}
    result = {
        "method": r.method,
        "principle": r.paths.principle,
        "engine": words,
        "sampling": asdict(r.paths.sampling),
        "steps": r.supernet.epochs * len(run.data.train),
        "paths": len(trained.log),
        "history": rows_of(trained.history),
        "seconds": time.monotonic() - start,
    }
    run.write("train", result, tensors)
    run.remove(f"{CHECKPOINTS}/train")  # what is done needs no checkpoint
