"""How well a supernet ranks networks: train it, score every configuration of the space, compare with the table.

The supernet is trained on CIFAR-10 without a part of its training images; every configuration is scored on that
held-out part and, beside it, on the test images as the paper's authors did. The table is looked at once, at the end.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator

from bcnet.accel import choose_engine
from bcnet.accel.enumeration.score_all import AllScores, score_all, within_memory
from bcnet.accel.enumeration.walker import Options
from bcnet.bench.correlation import correlations
from bcnet.bench.predictors import PREDICTORS, predicted
from bcnet.bench.spaces import RELEASED, get_space
from bcnet.bench.table import ChannelBench
from bcnet.data.source import Batch, Data, Source
from bcnet.errors import BcnetError
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Floats, WidthVariable
from bcnet.supernet.meta import META, MetaSupernet, train_meta
from bcnet.supernet.paths import METHODS, Method
from bcnet.supernet.principle import get_principle
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.supernet import Supernet
from bcnet.supernet.tas import TAS, train_tas
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training.optim import Optimisation
from bcnet.utils.files import clear_errors, read_regular, write_file
from bcnet.utils.progress import Listener, training_steps
from bcnet.utils.provenance import provenance
from bcnet.utils.settings import Count, Natural, Positive, Share, checked

SHARES = (0.25, 0.5, 0.75)


@checked
class RankConfig:
    """One rank-correlation experiment.

    ``model``, as the command line names it, is a network of your own with ``groups`` candidates per variable, for
    which ``bcnet bench build`` made a table; ``space`` is then a name for it.
    ``images`` are scored of the held-out part and, with ``on_test``, of the test set each (0: all), in batches of
    ``score_batch`` (0: the data's own) whose statistics a path uses; with ``recalibrate``, the statistics of that many
    training batches instead (the paper's authors: 20), of ``networks`` drawn at random (0: of all, which is slow, as
    no work can be shared; so it is with MetaPruning, ``meta``, whose paths have weights of their own). ``average`` also
    scores the mean of logits.
    ``complement``, ``sides``, ``draws``, ``sandwich``, ``extremes`` and ``base`` override the method's own, for
    ablations; with ``base`` 2 the narrowest quarter of every variable is left out, and so are the table's networks that
    use it.
    """

    space: str = "mobilenet"
    method: str = "bcv2"
    epochs: Count = 26
    seed: Natural = 0
    lr: Positive = 0.1
    warmup: float = 0.0
    head: float = 0.0
    weight_decay: float = 0.0
    ema: float = 0.0
    bf16: bool = True
    complement: bool | None = None
    sides: Literal["both", "alternate", "left"] | None = None
    draws: Count | None = None
    sandwich: bool | None = None
    extremes: Share | None = None
    base: Count = 1
    average: bool = False
    images: Natural = 0
    on_test: bool = True
    score_batch: Natural = 0
    recalibrate: Natural = 0
    networks: Natural = 0
    engine: Literal["auto", "plain", "fused"] = "auto"
    model: str = ""
    groups: Count = 4

    @model_validator(mode="after")
    def _known(self) -> RankConfig:
        if self.space not in RELEASED and not self.model:
            raise BcnetError(
                f"unknown space {self.space!r:.60}: there are {', '.join(RELEASED)}, or give a model and its own table"
            )
        if self.networks and not self.one_by_one:
            raise BcnetError("networks are drawn for recalibrated statistics: all can be scored at once without them")
        known = (*METHODS, TAS, META, *PREDICTORS)
        if self.method not in known:
            raise BcnetError(f"unknown method {self.method!r}: there are {', '.join(known)}")
        return self

    @property
    def one_by_one(self) -> bool:
        """Whether every path has statistics or weights of its own, so that no work can be shared."""
        return self.recalibrate > 0 or self.method == META

    @property
    def name(self) -> str:
        """The name of this experiment's folder, which tells it from any other."""
        told = ("space", "method", "epochs", "seed")
        rest = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in told]
        usual = {f"{f.name}={f.default}" for f in fields(self)}
        changed = [re.sub(r"[^\w.]+", "_", text.replace("=", "")) for text in rest if text not in usual]
        return "-".join([self.space, self.method, f"{self.epochs}ep", f"seed{self.seed}", *changed])

    def resolved(self) -> Method:
        """The method with this experiment's switches."""
        method = METHODS["ua" if self.method in (TAS, META) else self.method]
        changes: dict[str, Any] = {}
        if self.complement is not None:
            changes["complement"] = self.complement
            if not self.complement and method.sampling.complement:
                changes["draws"] = 2 * method.sampling.draws
        given = {name: getattr(self, name) for name in ("sides", "draws", "sandwich", "extremes")}
        changes |= {name: value for name, value in given.items() if value is not None}
        return Method(method.principle, replace(method.sampling, **changes))


def bench_space(config: RankConfig) -> NetworkSpace:
    """The network of an experiment, traced, with its candidates: the benchmark's have four per variable."""
    from bcnet.models.load import load_model

    loaded = load_model(config.model or f"zoo:{RELEASED[config.space].network}")
    return loaded.space(groups=config.groups, base=config.base)


def rank(
    config: RankConfig,
    data: Data,
    table: ChannelBench,
    device: str = "cpu",
    folder: str | Path | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Train, score all widths, correlate; with ``folder`` a stopped run goes on and a finished one is read.

    ``listener`` hears of training steps and of the paths scored, once on the held-out and once on the test images.
    """
    listener = listener or Listener()
    place = None if folder is None else Path(folder) / config.name
    if place is not None and (place / "rank.json").exists():
        return _read_report(place / "rank.json")
    space = bench_space(config)
    wanted = _drawn(config, table.space.index(get_space(space).all_widths()))
    if config.method in PREDICTORS:
        return {
            **asdict(config),
            **correlations(predicted(config.method, table)[wanted], table.mean[wanted]),
            **provenance(),
        }
    started = time.perf_counter()
    net = _train(config, space, data, device, None if place is None else place / "checkpoints", listener)
    trained = time.perf_counter()
    on_gpu = device.startswith("cuda")
    fused = config.bf16 and on_gpu
    options = Options(_memory(device), bf16=config.bf16, fused=fused, average=config.average, overlap=on_gpu)
    results: dict[str, Any] = {}
    scores: dict[str, AllScores] = {}
    for part, source in (("held_out", data.val), ("test", data.test)):
        if source is not None and (config.on_test or part == "held_out"):
            told = partial(listener.step, f"{config.name}, {part.replace('_', ' ')} images", figures={})
            batches = _batches(source, config, device)
            if config.one_by_one:
                scores[part] = _one_by_one(net, batches, data, config, table.widths[wanted], told)
            else:
                batches = _fitting(net, batches, options, listener)
                scores[part] = score_all(net, batches, options=options, progress=told)
            results[part] = _compare(scores[part], table, wanted) | {"batch": len(batches[0][0])}
    report = {
        **asdict(config),
        **results["held_out"]["accuracy"],
        **results,
        "paths_per_step": _paths(config, space),
        "train_seconds": trained - started,
        "score_seconds": time.perf_counter() - trained,
        **provenance(device),
    }
    if place is not None:
        _store(place, report, scores, table.mean[wanted])
    return report


def _train(
    config: RankConfig,
    space: NetworkSpace,
    data: Data,
    device: str,
    folder: Path | None,
    listener: Listener,
) -> Supernet:
    progress = training_steps(listener, config.name)
    torch.manual_seed(config.seed)
    method = config.resolved()
    net = (MetaSupernet(space) if config.method == META else Supernet(space, method.principle)).to(device)
    optimisation = Optimisation(
        epochs=config.epochs,
        lr=config.lr,
        warmup=config.warmup,
        head=config.head,
        weight_decay=config.weight_decay,
        ema=config.ema,
        bf16=config.bf16,
    )
    training = SupernetTraining(method.sampling, optimisation, seed=config.seed)
    if config.method == TAS:
        train_tas(net, data, training, folder, progress)
    elif isinstance(net, MetaSupernet):
        train_meta(net, data.train, training, folder=folder, progress=progress)
    else:
        engine, _ = choose_engine(net, config.engine, bf16=config.bf16)
        train_supernet(net, data.train, training, folder=folder, progress=progress, engine=engine)
    return net


def _batches(source: Source, config: RankConfig, device: str) -> list[Batch]:
    """The images to score, in batches of the size that was asked for."""
    rows = list(source.batches(0, device=device))
    x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
    count, size = config.images or len(x), config.score_batch or len(rows[0][0])
    return list(zip(x[:count].split(size), y[:count].split(size), strict=True))


def _fitting(net: Supernet, batches: list[Batch], options: Options, listener: Listener) -> list[Batch]:
    """``batches`` as they fit into memory."""
    parts = within_memory(net, batches, options)
    if len(parts) > len(batches):
        wanted, size = len(batches[0][0]), len(parts[0][0])
        listener.note(
            f"batches of {wanted} images do not fit into the {options.memory / 2**20:,.0f} MiB that scoring may hold: "
            f"they are scored in parts of {size}, whose batch norm sees fewer images"
        )
    return parts


def _drawn(config: RankConfig, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of the table to score: all, or as many drawn at random as were asked for, in order."""
    if not config.networks or config.networks >= len(rows):
        return rows
    return rows[np.sort(np.random.default_rng([config.seed, 40]).permutation(len(rows))[: config.networks])]


def _one_by_one(
    net: Supernet,
    batches: list[Batch],
    data: Data,
    config: RankConfig,
    widths: NDArray[np.int64],
    told: Callable[[int, int], None],
) -> AllScores:
    """Scores of ``widths`` (n, L), batch norm with the statistics of training batches where that is asked for."""
    device = next(net.parameters()).device
    calibration = list(islice(data.train.batches(0, device=device), config.recalibrate))
    found = Evaluator(net, batches, recalibrate=calibration, bf16=config.bf16).measure(widths, told)
    return AllScores((), net.sides, found.by_side["score"].T, found.by_side["loss"].T)


def _compare(scores: AllScores, table: ChannelBench, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Correlations of each way to read a score off the paths with the table's ``rows``, and the regret of the best."""
    truth = table.mean[rows]
    readings = {
        "accuracy": scores.accuracy.mean(0),
        "loss": -scores.loss.mean(0),
        **{f"accuracy_{side}": row for side, row in zip(scores.sides, scores.accuracy, strict=True)},
        **{f"loss_{side}": -row for side, row in zip(scores.sides, scores.loss, strict=True)},
    }
    if scores.average_accuracy is not None and scores.average_loss is not None:
        readings |= {"accuracy_of_mean_logits": scores.average_accuracy, "loss_of_mean_logits": -scores.average_loss}
    found: dict[str, Any] = {name: correlations(score, truth) for name, score in readings.items()}
    found["regret"] = _regrets(readings["accuracy"], truth, table.costs["flops"][rows])
    widths = table.widths[rows]
    found["effects"] = _effects(100 * readings["accuracy"], truth, table.space.variables, widths)
    found["additive"] = correlations(additive_scores(found["effects"], widths), truth)
    found["log_width"] = by_log_width(readings["accuracy"], table, rows)
    found["log_width_by_loss"] = by_log_width(readings["loss"], table, rows)
    found["mean"] = {"accuracy": float(scores.accuracy.mean()), "loss": float(scores.loss.mean())}
    return found


def _effects(
    score: Floats,
    truth: Floats,
    variables: Sequence[WidthVariable],
    widths: NDArray[np.int64],
) -> list[dict[str, Any]]:
    """What each candidate of each variable is worth on average, in points, to the supernet and in the table.

    Where the two differ, the supernet ranks wrongly.
    """
    found = []
    for variable, column in zip(variables, widths.T, strict=True):
        candidates = np.unique(column)
        means = {
            name: [float(values[column == c].mean() - values.mean()) for c in candidates]
            for name, values in (("score", score), ("table", truth))
        }
        found.append({"variable": variable.name, "candidates": candidates.tolist(), **means})
    return found


def by_log_width(score: Floats, table: ChannelBench, rows: NDArray[np.int64]) -> dict[str, Any]:
    """How a log-width model of the scores ranks the table's ``rows``: correlations, and the regret of its best."""
    widths, truth = table.widths[rows], table.mean[rows]
    guess = LogWidthModel.fit(widths, score, table.space.layer_counts).predict(widths)
    return {**correlations(guess, truth), "regret": _regrets(guess, truth, table.costs["flops"][rows])}


def additive_scores(found: list[dict[str, Any]], widths: NDArray[np.int64]) -> Floats:
    """Scores without interactions, and so nearly without noise: the sum of what each variable's candidate is worth."""
    columns = zip(found, widths.T, strict=True)
    total: Floats = sum(np.array(e["score"])[np.searchsorted(e["candidates"], c)] for e, c in columns)
    return total


def _regrets(score: Floats, truth: Floats, flops: NDArray[Any]) -> dict[str, Any]:
    """Accuracy points lost by taking the best, and the best of the ten best, by score under FLOPs budgets."""
    found = {}
    for share in SHARES:
        inside = np.flatnonzero(flops <= share * flops.max())
        if not len(inside):
            continue
        order = inside[np.argsort(-score[inside], kind="stable")]
        best = truth[inside].max()
        found[f"{share:.0%}"] = {"top1": float(best - truth[order[0]]), "top10": float(best - truth[order[:10]].max())}
    return found


def _memory(device: str) -> int:
    """Bytes that scoring may hold: most of a GPU's free memory, 4 GB on a CPU."""
    return int(0.6 * torch.cuda.mem_get_info()[0]) if device.startswith("cuda") else 4 << 30


def _paths(config: RankConfig, space: NetworkSpace) -> int:
    method = config.resolved()
    return len(method.sampling.paths(0, 0, space, get_principle(method.principle)))


def _read_report(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"method", "seed", "pearson", "spearman", "kendall"} <= set(found):
        raise BcnetError(f"{path} is damaged: remove it to score again")
    return found


def _store(place: Path, report: dict[str, Any], scores: dict[str, AllScores], truth: Floats) -> None:
    """``scores.npz`` has PART_accuracy and PART_loss (sides, widths) and the table's ``truth`` (widths,)."""
    arrays = {f"{part}_{name}": getattr(s, name) for part, s in scores.items() for name in ("accuracy", "loss")}
    held = io.BytesIO()
    np.savez_compressed(held, truth=truth.astype(np.float32), **{k: v.astype(np.float32) for k, v in arrays.items()})
    plot = scatter_svg(scores["held_out"].accuracy.mean(0), truth, report)
    with clear_errors(f"the scores in {place}"):
        write_file(place / "scores.npz", held.getvalue())
        write_file(place / "scatter.svg", plot.encode())
        write_file(place / "rank.json", (json.dumps(report, indent=2) + "\n").encode())


def scatter_svg(score: Floats, truth: Floats, report: dict[str, Any]) -> str:
    """Every network as a dot: supernet accuracy across, true accuracy up (at most 2,000 dots)."""
    chosen = np.linspace(0, len(score) - 1, min(2000, len(score))).astype(int)
    x, y = score[chosen], truth[chosen]
    across = 40 + 400 * (x - x.min()) / max(float(np.ptp(x)), 1e-9)
    up = 440 - 400 * (y - y.min()) / max(float(np.ptp(y)), 1e-9)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="1.5"/>' for a, b in zip(across, up, strict=True))
    title = f"{report['space']}, {report['method']}: Kendall {report['kendall']:.3f}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 480" font-family="sans-serif" font-size="13">'
        '<rect width="480" height="480" fill="white"/>'
        f'<text x="240" y="22" text-anchor="middle">{title}</text>'
        f'<text x="240" y="472" text-anchor="middle">accuracy of the path, {x.min():.3f} to {x.max():.3f}</text>'
        f'<text x="16" y="240" text-anchor="middle" transform="rotate(-90 16 240)">accuracy trained alone, '
        f"{y.min():.2f} to {y.max():.2f}</text>"
        f'<g fill="#2563eb" fill-opacity="0.35">{dots}</g></svg>\n'
    )
