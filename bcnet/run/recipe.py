"""A recipe: everything a run does, as one validated, versioned object that is a YAML file on disk.

``Recipe.read("digits")`` reads one that comes with bcnet, ``Recipe.read("my.yaml")`` one of your own. Mistakes are
reported in one sentence that names the key. For keys that a recipe leaves out, the defaults below hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bcnet.data.options import LoadOptions
from bcnet.errors import BcnetError, did_you_mean
from bcnet.latency.timing import TimingConfig
from bcnet.search.config import SearchConfig
from bcnet.search.criteria import ALLOTMENTS
from bcnet.space.importance import Criterion
from bcnet.supernet.paths import METHODS, Method, PathSampling
from bcnet.training.optim import Optimisation
from bcnet.training.race import RaceConfig
from bcnet.training.retraining import Distillation, RandomBaseline
from bcnet.utils.files import read_regular
from bcnet.utils.settings import BelowOne, Count, NotNegative, Positive, checked, sentence
from bcnet.utils.yaml_text import LARGEST, brief, parse_yaml

FORMAT_VERSION = 1
Compared = Literal[
    "full", "uniform", "uniform-8", "balanced", "random",
    "l1-global", "l2-global", "bn-scale-global", "taylor-global", "fpgm-global", "lamp-global", "random-global",
    "l1-isomorphic", "l2-isomorphic", "bn-scale-isomorphic", "taylor-isomorphic", "fpgm-isomorphic", "lamp-isomorphic",
    "random-isomorphic",
]  # fmt: skip
PYTHON = "python"
"""What the recipe of a run that was given Python objects has for model and data."""
HEAD = 64.0
"""``Optimisation.head`` unless a recipe sets it: at a rate of 0.1 it takes effect from 640 features on."""
FOLDER = Path(__file__).parent / "recipes"


@checked
class Prior:
    """The prior population."""

    best: Annotated[Count | None, "how many of the best widths are taken; null: all"] = 100
    after: Annotated[BelowOne, "the share of training that is left out first"] = 0.0


@checked
class HealingConfig:
    """What is done to a configuration before it is scored; ``score: cut`` has no steps."""

    steps: Annotated[Count, "steps of fine-tuning before a configuration is scored"] = 30
    lr: Annotated[Positive | None, "their learning rate; null: the best of four for uniform widths"] = None
    share: Annotated[
        NotNegative, "how many steps a search takes in all, as a share of the fine-tuning's; 0: no bound"
    ] = 1.0
    calibration: Annotated[Count, "training batches for batch-norm statistics"] = 8


class Recipe(BaseModel):
    """What a run does. ``bcnet recipe show`` says what every key means (:mod:`bcnet.run.recipe_comments`).

    ``start: trained`` begins with the network as it is given; where it knows nothing yet it is trained first. Slim
    networks inherit its most important channels, it teaches them, the search ranks them by ``score``, and the finalists
    race; ``allot`` names widths to take without a search. ``start: scratch`` is the paper's way: a supernet from random
    weights, and networks trained from scratch. Percentages of budgets are of the network as it was given, also where
    ``widen`` searches around a wider one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    version: Literal[1] = 1
    about: str = ""
    model: str
    start: Literal["trained", "scratch"] = "trained"
    weights: str | None = None
    pretrained: bool = False
    input: tuple[int, int, int] | None = None
    data: str
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    loading: LoadOptions = LoadOptions()
    groups: int = Field(default=20, ge=1)
    base: int = Field(default=1, ge=1)
    round_to: int | None = Field(default=None, ge=1)
    least: int = Field(default=4, ge=1)
    ignore: tuple[str, ...] = ()
    squeeze: bool = False
    widen: float = Field(default=1.0, ge=1, le=4)
    budgets: tuple[str, ...] = Field(default=("flops=50%",), min_length=1)
    targets: tuple[str, ...] = ()
    paper_budgets: tuple[str, ...] = ()
    latency: TimingConfig = TimingConfig()
    given: Optimisation = Optimisation(epochs=60, weight_decay=5e-4, head=HEAD)
    keep: Criterion = "l2"
    reconstruct: bool = True
    allot: Compared | None = None
    score: Literal["steps", "cut", "supernet"] = "steps"
    healing: HealingConfig = HealingConfig()
    method: str = "bcv2"
    sampling: PathSampling | None = None
    backward: Literal["path", "step"] = "path"
    engine: Literal["auto", "plain", "fused"] = "auto"
    bf16: bool | None = None
    supernet: Optimisation = Optimisation(epochs=60, weight_decay=5e-4, head=HEAD)
    prior: Prior | None = Prior()
    recalibrate: int = Field(default=0, ge=0)
    rank_by: Literal["score", "loss"] = "loss"
    fallback: bool = True
    search: SearchConfig = SearchConfig(strategy="neighbours", evaluations=72, population=12)
    race: RaceConfig | None = RaceConfig()
    retrain: Optimisation = Optimisation(epochs=20, lr=None, warmup=0.5, weight_decay=5e-4, head=HEAD)
    distillation: Distillation | None = Distillation(alpha=0.9, temperature=4.0)
    compare: tuple[Compared, ...] = ("full", "uniform", "uniform-8")
    repeats: int = Field(default=1, ge=1, le=20)
    random: RandomBaseline = RandomBaseline()
    checkpoint_minutes: float = Field(default=5.0, gt=0)
    channels_last: bool = True
    threads: int | None = Field(default=None, ge=1, le=256)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _complete_groups(cls, data: Any) -> Any:
        """What a group of settings leaves out takes this recipe's default, not that of its class."""
        content = dict(data)
        if isinstance(content.get("targets"), (list, tuple)) and content["targets"]:
            content.setdefault("budgets", [content["targets"][0]])
        defaults = {key: entry.default for key, entry in cls.model_fields.items()}
        if content.get("start") == "scratch":
            defaults |= _SCRATCH
            content = {**{key: value for key, value in _SCRATCH.items() if key not in content}, **content}
        for key in GROUPS:
            if defaults[key] is not None and isinstance(content.get(key), Mapping):
                content[key] = {**asdict(defaults[key]), **content[key]}
        return content

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"method is {brief(value)}, but it must be one of {', '.join(METHODS)}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.base > self.groups:
            raise ValueError(f"base is {self.base}, but it counts groups and must lie in 1..{self.groups}")
        if "random" in self.compare and self.random.epochs > self.retrain.epochs:
            raise ValueError(
                f"random.epochs is {self.random.epochs}, but it must be at most retrain.epochs, {self.retrain.epochs}"
            )
        if self.targets and self.budgets != self.targets[:1]:
            raise ValueError("targets and budgets both say how slim the network must be: keep one of them")
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("targets names a budget twice: keep one of them")
        for name in ("given", "supernet", *(["retrain"] if self.start == "scratch" else [])):
            if getattr(self, name).lr is None:
                raise ValueError(f"{name}.lr is null, but a rate is chosen for fine-tuning only: name one, such as 0.1")
        if self.start == "trained" and self.widen != 1:
            raise ValueError("widen needs start: scratch, as a trained network has no weights for more channels")
        if self.start == "scratch" and (self.weights or self.pretrained):
            key = "weights" if self.weights else "pretrained"
            raise ValueError(f"{key} needs start: trained, as start: scratch throws the weights of the network away")
        if self.allot == "full":
            raise ValueError("allot is 'full', but the full network is not slim: name another, such as uniform")
        if self.allot in ALLOTMENTS and self.allot != "uniform" and self.start == "scratch":
            raise ValueError(f"allot is {self.allot!r}, which judges trained channels: it needs start: trained")
        if self.search.strategy == "legr" and self.scorer == "supernet":
            raise ValueError("strategy legr ranks trained channels: it needs start: trained and score: steps or cut")
        if self.weights and self.pretrained:
            raise ValueError("weights and pretrained both say where the weights come from: keep one of them")
        if self.search.seed != 0:
            raise ValueError("search.seed must be left out: the one seed of a recipe is seed")
        return self

    def on(self, device: torch.device) -> Recipe:
        """The recipe as it runs on ``device``: all training in bf16, if ``bf16`` says so or, by default, if the device
        is a GPU that has it."""
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        if not (has_bf16 if self.bf16 is None else self.bf16):
            return self
        trainings = {name: getattr(self, name) for name in ("given", "supernet", "retrain")}
        return self.model_copy(update={name: replace(training, bf16=True) for name, training in trainings.items()})

    @property
    def python_file(self) -> str | None:
        """The Python file that is run to make the network; None if the network comes from a package."""
        path, colon, _ = self.model.rpartition(":")
        return path if colon and path.endswith(".py") else None

    @property
    def scorer(self) -> str:
        """What the search ranks by: ``steps``, ``cut`` or ``supernet``."""
        return "supernet" if self.start == "scratch" else self.score

    def most_scored(self, batches: int) -> int:
        """How many configurations a search scores at the most where an epoch has ``batches`` training batches: no more
        than can be healed in the steps that ``healing.share`` allows, but at least its first generation."""
        asked, share = self.search.evaluations, self.healing.share
        if self.scorer != "steps" or share == 0:
            return asked
        affordable = share * self.retrain.epochs * batches / self.healing.steps
        return min(asked, max(self.search.population, int(min(asked, affordable))))

    @property
    def paths(self) -> Method:
        """Principle and path sampling of the supernet's training. A supernet that starts from a trained network has its
        channels sorted by importance, and only UA's nested widths respect that order."""
        method = METHODS[self.method if self.start == "scratch" else "autoslim"]
        return method if self.sampling is None else Method(method.principle, self.sampling)

    def changed(self, **changes: Any) -> Recipe:
        """This recipe with other values of some keys, checked again."""
        return Recipe.parse({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        data = self.model_dump(mode="json")
        data["search"].pop("seed")
        return data

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def parse(cls, data: Any) -> Recipe:
        """The recipe that a mapping describes, or a :class:`BcnetError` that names the first key that is wrong."""
        if not isinstance(data, Mapping):
            raise BcnetError(f"a recipe must be a list of `key: value`, not {brief(data, 60)}")
        if data.get("version", FORMAT_VERSION) != FORMAT_VERSION:
            raise BcnetError(
                f"version is {brief(data['version'])}, but this bcnet reads recipes of version {FORMAT_VERSION}"
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise BcnetError(_sentence(error)) from None

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        return cls.parse(parse_yaml(text))

    @classmethod
    def read(cls, place: str | Path) -> Recipe:
        """The recipe called ``place``, or in the file ``place``."""
        path = FOLDER / f"{place}.yaml" if str(place) in names() else Path(place)
        if not path.is_file():
            guess = did_you_mean(place, names(), 3)
            raise BcnetError(
                f"there is no recipe {str(place)!r:.80}: {guess}{guess and ' '}`bcnet recipe list` shows all"
            )
        text = cls.read_text(path)
        try:
            return cls.from_yaml(text)
        except BcnetError as error:
            raise BcnetError(f"{path}: {error}") from None

    @staticmethod
    def read_text(path: Path) -> str:
        """The text of a recipe's file."""
        try:
            return read_regular(path, LARGEST).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BcnetError(f"cannot read {path}: {error.reason} at byte {error.start}, so it is not UTF-8") from None
        except OSError as error:
            raise BcnetError(f"cannot read {path}: {error.strerror or error}") from None


def names() -> list[str]:
    """The recipes that come with bcnet."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _sentence(error: ValidationError) -> str:
    """The first mistake of a recipe: its key, and what it must be."""
    *path, key = error.errors(include_url=False)[0]["loc"] or ("",)
    deeper = [f"{group}.{key}" for group, kind in GROUPS.items() if key in [f.name for f in fields(kind)]]
    if not path and key not in Recipe.model_fields and deeper:
        return f"unknown key {key}: did you mean {' or '.join(deeper)}?"
    owner = GROUPS.get(str(path[0])) if path else None
    known = [f.name for f in fields(owner)] if owner else list(Recipe.model_fields)
    return sentence(error, known)


_SCRATCH: dict[str, Any] = {
    "least": 1,
    "rank_by": "score",
    "search": SearchConfig(),
    "compare": ("full", "uniform", "uniform-8", "balanced"),
    "retrain": Optimisation(epochs=60, weight_decay=5e-4, head=HEAD),
    "distillation": None,
    "race": None,
}
"""The defaults that differ where networks are trained from scratch."""

GROUPS: dict[str, Any] = {
    key: kind
    for key, entry in Recipe.model_fields.items()
    for kind in (entry.annotation, *get_args(entry.annotation))
    if is_dataclass(kind)
}
"""The keys that are groups of settings, with their classes."""
