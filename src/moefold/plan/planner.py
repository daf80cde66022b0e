"""A question to the planner, and its answers: what `moefold plan` and `parallel = "auto"` ask. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moefold.config.load import config_from_dict, load_config
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.device import Device
from moefold.plan.legality import Legality
from moefold.plan.memory import Memory
from moefold.plan.model_name import read_shape
from moefold.plan.reason import why_illegal
from moefold.plan.restriction import FOLDED, METHODS, Restriction
from moefold.plan.search import Plan, Search
from moefold.plan.shape import ModelShape, shape_of
from moefold.plan.space import MappingSpace
from moefold.plan.stages import RecipeSplit
from moefold.plan.step_time import Pricer
from moefold.plan.workload import Workload

MOST_GPUS = 65536
"""So far a budget that fits is looked for."""


@dataclass(frozen=True)
class Question:
    """A model, a batch, and the GPUs to run it on."""

    base: Config
    """A recipe; its mapping counts for nothing but world_size and what no search touches: orders, context, layout."""
    shape: ModelShape
    device: Device
    workload: Workload
    restriction: Restriction = Restriction()
    reserve_gib: float = 0.0
    """Memory of each device that a mapping has to leave free."""

    @property
    def usable(self) -> Device:
        """The device with the memory that a mapping may use."""
        return replace(self.device, memory_gib=self.device.memory_gib - self.reserve_gib)

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.base.parallel.world_size

    @property
    def priced(self) -> Workload:
        """The workload with the order of ranks that the method has."""
        return replace(self.workload, coupled=not METHODS[self.restriction.method].folds_cp)

    def on(self, num_gpus: int) -> "Question":
        """The same question for another number of GPUs."""
        return replace(self, base=replace(self.base, parallel=replace(self.base.parallel, world_size=num_gpus)))


class Planner:
    """Answers one question.

    Args:
        question: the question.

    Raises:
        ConfigError: the recipe cannot run under any mapping.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.space = MappingSpace(Legality(question.base), question.restriction)
        self._asked = 0
        self._best: list[Plan] = []
        """As many of the best as were asked for."""

    @cached_property
    def search(self) -> Search:
        """The search of all legal mappings."""
        q = self.question
        workload = q.priced
        split = RecipeSplit(q.base, q.shape)
        memory = Memory(q.shape, workload, q.usable, q.base, split)
        return Search(self.space, Pricer(q.shape, q.device, workload, memory.kept, split), memory)

    def pricer_of(self, plan: Plan) -> Pricer:
        """What has priced a plan."""
        return self.search.pricer

    def on(self, num_gpus: int) -> "Planner":
        """What answers the same question for another number of GPUs."""
        return Planner(self.question.on(num_gpus))

    @property
    def num_folds(self) -> int:
        """Folds that are legal."""
        return len(self.space.folds)

    def num_faster(self, seconds: float) -> int:
        """Folds whose best mapping that fits takes less than so many seconds."""
        return self.search.num_faster(seconds)

    def first(self, count: int) -> list[Plan]:
        """The first so many of `plans`; those that do not fit stand there only where none does.

        Raises:
            ConfigError: no mapping is legal.
        """
        if not self.space.folds:
            raise ConfigError(self._nothing_legal())
        if count > self._asked:
            self._asked, self._best = count, self.search.first(count)
        return self._best[:count] or self.plans[:count]

    @cached_property
    def plans(self) -> list[Plan]:
        """The best mapping of every legal fold, best first, those that do not fit last.

        Raises:
            ConfigError: no mapping is legal.
        """
        if not self.space.folds:
            raise ConfigError(self._nothing_legal())
        return self.search.ranked()

    def rank_all(self) -> None:
        """Rank every fold now, so that the first of them are not searched for beside it.

        Raises:
            ConfigError: no mapping is legal.
        """
        self._asked, self._best = len(self.plans), [plan for plan in self.plans if plan.memory.fits]

    def best(self) -> Plan:
        """The fastest mapping that fits.

        Raises:
            ConfigError: no mapping is legal, or none fits; the message says what would have to change.
        """
        best = self.first(1)[0]
        if not best.memory.fits:
            raise ConfigError(self._nothing_fits(best))
        return best

    def config_of(self, plan: Plan) -> Config:
        """The recipe under a mapping, with stages balanced where they are not even."""
        from moefold.plan.recipe import config_under

        return config_under(self.space.legality, plan.mapping)

    def _nothing_legal(self) -> str:
        q = self.question
        fixed = " ".join(f"{axis}={word_of(value)}" for axis, value in q.restriction.fixed.items())
        within = f" with {fixed}" if fixed else ""
        within += f" of method {q.restriction.method!r}" if q.restriction.method != FOLDED else ""
        text = (
            f"no mapping of {q.num_gpus} GPUs{within} is legal for {q.shape.name} with train.seq_len="
            f"{q.workload.seq_len} and train.global_batch_size={q.workload.global_batch_size}: "
            f"{why_illegal(self.space.legality, q.restriction)}"
        )
        others = [n for n in _neighbours(q.num_gpus) if MappingSpace(Legality(q.on(n).base), q.restriction).folds]
        ways = [f"{n} GPUs" for n in others[:3]]
        ways += ["fewer fixed axes"] if fixed else []
        return f"{text}; or choose {', or '.join(ways or ['another batch or number of GPUs'])}"

    def _nothing_fits(self, closest: Plan) -> str:
        q, gib = self.question, 2**30
        least = min(self.plans, key=lambda plan: plan.memory.total)
        text = (
            f"no mapping of {q.shape.name} on {q.num_gpus} GPUs fits into {q.usable.memory_bytes / gib:.0f} GiB of "
            f"{q.device.name}{_less(q)}: the least is {least.memory.total / gib:.0f} GiB with {name_of(least)}"
        )
        ways = []
        enough = self._enough_gpus()
        if enough:
            ways.append(f"{enough} GPUs or more")
        ways += [f"{name} ({size:.0f} GiB)" for name, size in self._larger_devices(least)]
        return f"{text}; it would fit with {', or '.join(ways)}" if ways else f"{text}; choose a smaller model"

    def _enough_gpus(self) -> int | None:
        """The least power of two times these GPUs on which some mapping fits."""
        count = 2 * self.question.num_gpus
        while count <= MOST_GPUS:
            planner = Planner(self.question.on(count))
            if any(planner.search.can_fit(fold, view) for fold, view in planner.space.folds):
                return count
            count *= 2
        return None

    def _larger_devices(self, least: Plan) -> list[tuple[str, float]]:
        from moefold.plan.device import GIB, device_names, load_device

        q = self.question
        share = q.reserve_gib / q.device.memory_gib
        sizes = {name: load_device(name).memory_gib for name in device_names() if name != "cpu"}
        enough = {name: size for name, size in sizes.items() if size * (1 - share) * GIB >= least.memory.total}
        return sorted(enough.items(), key=lambda item: item[1])[:2]


def _less(question: Question) -> str:
    """What is kept free, in words."""
    q = question
    return f" ({q.device.memory_gib:g} less {q.reserve_gib:.1f} kept free)" if q.reserve_gib else ""


def word_of(value: Any) -> str:
    """A value of an axis as `--fix` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def name_of(plan: Plan) -> str:
    """A mapping in the words of `--explain`."""
    m = plan.mapping
    words = [f"tp={m.tp} cp={m.cp} pp={m.pp} ep={m.ep} etp={m.etp} mbs={m.mbs} zero={m.zero}"]
    if m.pp > 1:
        words.append(f"schedule={m.schedule} vpp={m.vpp}")
    words.append(f"dispatcher={m.dispatcher}")
    if m.recompute:
        words.append(f"recompute={'+'.join(m.recompute)}")
    if m.offload:
        words.append(f"offload={'+'.join(m.offload)}")
    if m.overlap:
        words.append("overlap=on")
    return " ".join(words)


def read_model(name: str) -> tuple[Config, ModelShape]:
    """What a user calls a model, as a recipe and as a shape.

    Args:
        name: a preset, a recipe (.toml), or a Hugging Face config.json or its folder.

    Raises:
        ConfigError: there is no such model, or the runtime cannot train it.
    """
    if name.endswith(".toml"):
        cfg = load_config(Path(name))
        return cfg, replace(shape_of(cfg.model), name=cfg.model.preset or Path(name).stem)
    shape = read_shape(name)
    if shape.config is None:
        raise ConfigError(
            f"model {name!r} has layers that moefold cannot train, so none of its mappings is legal; `moefold "
            "plan-accuracy` prices given mappings of it"
        )
    return replace(config_from_dict({}), model=shape.config), shape


def _neighbours(num_gpus: int) -> Iterator[int]:
    """Numbers of GPUs near one, nearest first, whole nodes preferred."""
    candidates = {2**k for k in range(17)} | {8 * k for k in range(1, 65)} | set(range(1, 9))
    yield from sorted((n for n in candidates if n != num_gpus), key=lambda n: (abs(n - num_gpus), n))[:24]
