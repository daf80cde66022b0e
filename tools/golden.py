"""Check that a change of the structure changes no fact: `python tools/golden.py` compares every recipe with the sheet.

The sheet, `golden.jsonl`, has one line for each preset and recipe, with a digest of each subject: parameters, shards,
FLOPs, bytes, prices, legal mappings, names. Numbers are exact, or rounded to 9 digits in float64, so that it holds on
every machine. `--full` adds facts that need torch or take longer: losses of two steps, seeds, names of Hugging Face
tensors, shards of every parameter. A digest only shows that something has changed. `--against COMMIT` computes the full
texts in both checkouts on this machine and prints the difference; it also compares the bits of losses, checkpoints and
exported folders. A change of structure keeps the sheet. A change of a fact writes it (`--write`), and its commit says
why.
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHEET = Path(__file__).with_suffix(".jsonl")
PLANNED_GPUS = 16
PLANNED_GPU = "h100"
PRESET_SEQ_LEN = 4096
PRESET_BATCH_SIZE = 64
NUM_PRICED = {"prices": 1, "more prices": 6}
"""Mappings whose predicted time and memory are part of the sheet, spread over the legal ones."""
BITS = "bits"
"""The subject that is compared only on one machine, and is not in the sheet."""
BITS_DTYPES = ("float32", "float64")
ONE_RANK = "parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1"
OBJECTIVE_RUNS = {
    "recipes/dpo.toml": f"{ONE_RANK} train.global_batch_size=4",
    "recipes/sft.toml": f"{ONE_RANK} train.seq_len=128 train.global_batch_size=4",
    "recipes/sort.toml": "run.kernels=plain checkpoint.init_from= rl.group_size=4 rl.mixed_only=false "
    "train.micro_batch_size=4 train.global_batch_size=8 rollout.slots=8 rollout.max_tokens=4 train.eval_samples=8 "
    "rl.kl=0.1",
}
"""Recipes of small models that are trained as they are, on one rank, with these settings; others are shrunk."""


@dataclass(frozen=True)
class Subject:
    """One kind of fact of a recipe."""

    name: str
    lines: Callable[["Recipe"], Iterable[str]]
    is_quick: bool = True
    """True if `make check` computes it: without torch, within a tenth of a second."""
    may_refuse: bool = False
    """True if a recipe may have no answer; the message is the fact then."""


class Recipe:
    """A preset or a recipe file, as every subject reads it."""

    def __init__(self, root: Path, name: str) -> None:
        """Load a recipe.

        Args:
            root: the checkout.
            name: a preset, or the path of a recipe below the root.
        """
        self.root = root
        self.name = name
        self.path = root / name if name.endswith(".toml") else None

    @cached_property
    def request(self) -> Any:
        """The question for the planner."""
        from moefold.planner.plan_request import PlanOptions, plan_request

        return plan_request(str(self.path or self.name), PLANNED_GPU, PlanOptions(num_gpus=PLANNED_GPUS))

    @cached_property
    def cfg(self) -> Any:
        """The settings under the recipe's mapping; settings of a preset, or without a mapping, on one rank."""
        from moefold.config.sections.parallel import ParallelConfig
        from moefold.planner.planner import read_model
        from moefold.recipe import load_config

        if self.path is None:
            base = read_model(self.name)[0]
            train = replace(base.train, seq_len=PRESET_SEQ_LEN, global_batch_size=PRESET_BATCH_SIZE)
            return replace(base, parallel=ParallelConfig(), train=train)
        cfg = load_config(self.path)
        return replace(cfg, parallel=ParallelConfig()) if cfg.parallel.mapping == "auto" else cfg

    @cached_property
    def small(self) -> Any:
        """The shrunk settings on one rank."""
        from moefold.config.sections.parallel import ParallelConfig
        from moefold.verify.shrink import shrink

        return shrink(replace(self.cfg, parallel=ParallelConfig()))


def parameter_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the name in a checkpoint, shape and sharding of every parameter."""
    from moefold.cost.flops import count_parameters
    from moefold.cost.layer_spec import model_weights

    yield from flat(asdict(count_parameters(recipe.cfg.model)))
    for name, weight in model_weights(recipe.cfg.model).items():
        yield f"{name} {' '.join(line for line in flat(asdict(weight)) if not line.startswith(('name ', 'drawn ')))}"


def shard_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the shards of the distinct parameters under some degrees, and their shares of data-parallel ranks."""
    from moefold.cost.layer_spec import model_weights

    known = set()
    for weight in model_weights(recipe.cfg.model).values():
        key = replace(weight, name=".".join(part for part in weight.name.split(".") if not part.isdigit()))
        if key in known:
            continue
        known.add(key)
        for tp, ep, etp in ((2, 1, 1), (1, 2, 1), (4, 2, 2)):
            shard = key.shard(tp, ep, etp)
            yield f"{key.name} tp={tp} ep={ep} etp={etp} {shard.shape} {[shard.dp_shards(2).numel(i) for i in (0, 1)]}"


def flop_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the FLOPs of a token by part of the model, and of a step."""
    from moefold.cost.flops import step_flops_per_token, train_flops_per_token

    for causal in (False, True):
        counted = train_flops_per_token(recipe.cfg.model, recipe.cfg.train.seq_len, causal=causal)
        yield from (f"causal={causal} {line}" for line in flat(asdict(counted)))
    yield f"step {rounded(step_flops_per_token(recipe.cfg.model, recipe.cfg.train, recipe.cfg.lora))}"


def cache_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the bytes of the KV cache and of recurrent states."""
    from moefold.cost.kv_cache import cache_sizes

    sizes = cache_sizes(recipe.cfg, "cpu")
    yield f"latents {sizes.kv_bytes(2048)} heads {sizes.kv_bytes(2048, 'heads')}"
    yield f"states {sizes.state_bytes}"


def memory_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the memory of each pipeline rank by part, on both devices, as the recipe says and recomputed."""
    from moefold.config.sections.train import AUTO_RECOMPUTE
    from moefold.cost.peak_memory import compute_rank_memory
    from moefold.cost.recompute_parts import recompute_parts
    from moefold.cost.saved_tensors import KERNEL_PROFILES

    own = () if AUTO_RECOMPUTE in recipe.cfg.train.recompute else recipe.cfg.train.recompute
    for device, kernels in sorted(KERNEL_PROFILES.items()):
        for parts in dict.fromkeys((tuple(own), (), *((part,) for part in recompute_parts()))):
            for rank in compute_rank_memory(recipe.cfg, recompute=parts, kernels=kernels):
                yield f"{device} recompute={parts} {' '.join(flat(asdict(rank)))}"


def legal_lines(recipe: Recipe) -> Iterator[str]:
    """Yield every legal fold of the planned GPUs, with its micro-batch sizes and pipelines."""
    from moefold.planner.search.constraints import MappingConstraints
    from moefold.planner.search.space import MappingSpace

    p = replace(recipe.cfg.parallel, world_size=PLANNED_GPUS, mapping="given")
    for fold, view in MappingSpace(MappingConstraints(replace(recipe.cfg, parallel=p))).folds:
        sizes = {size: len(pipelines) for size, pipelines in view.pipelines_by_mbs}
        degrees = " ".join(f"{axis}={degree}" for axis, degree in fold._asdict().items())
        yield f"{degrees} micro-batches and pipelines {sizes}"


def price_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the predicted time and memory of a few mappings."""
    yield from _prices(recipe, NUM_PRICED["prices"])


def more_price_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the predicted time and memory of more mappings."""
    yield from _prices(recipe, NUM_PRICED["more prices"])


def _prices(recipe: Recipe, count: int) -> Iterator[str]:
    from moefold.planner.planner import Planner
    from moefold.planner.search.constraints import Restriction

    space = Planner(recipe.request).space
    last = len(space.folds) - 1
    for at in sorted({last * i // count for i in range(1, count + 1)}):
        values = list(space.sample_mappings(*space.folds[at]))[-1]
        plan = Planner(replace(recipe.request, restriction=Restriction(values))).top_plans(1)[0]
        yield f"{' '.join(flat(plan.mapping.as_dict()))}: {' '.join(flat(plain(plan.time)))}"
        yield f"  memory {' '.join(flat(plain(plan.memory.parts | {'capacity': plan.memory.capacity})))}"


def shrink_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the settings of the shrunk recipe that differ from their defaults."""
    from moefold.verify.shrink import shrink

    yield from settings(shrink(recipe.cfg))


def family_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the config.json of each Hugging Face family that can express the model."""
    from moefold.convert.families.hf_config import families_for

    for family in families_for(recipe.cfg.model):
        yield from (f"{family.name} {line}" for line in flat(family.write(recipe.cfg.model)))


def box_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the parts of each tensor of a checkpoint on the first and the last rank."""
    from moefold.cost.shard_boxes import WeightSharding

    sharding = WeightSharding.from_config(recipe.cfg, for_training=True)
    yield from (f"{name} {shape}" for name, shape in sharding.shapes.items())
    for rank in sorted({0, recipe.cfg.parallel.world_size - 1}):
        yield from (f"rank {rank} {name} {box.start} {box.size}" for name, box in sharding.boxes(rank).items())


def seed_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the initialisation seed of each parameter."""
    from moefold.cost.layer_spec import model_weights
    from moefold.model.weight_init import seed_for

    yield from (f"{name} {seed_for(recipe.cfg.run.seed, name)}" for name in model_weights(recipe.cfg.model))


def tensor_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the tensors of each Hugging Face family, of the small model, with where each parameter goes."""
    from moefold.convert.families.hf_config import families_for
    from moefold.convert.weight_sources import family_mapping

    model = exportable(recipe, recipe.small.model)
    for family in families_for(model):
        for number, rules in enumerate(family.layouts):
            mapping = family_mapping(model, rules, family)
            for name, pieces in mapping.by_hf_name.items():
                lines = (" ".join(flat(plain(piece))) for piece in pieces)
                yield f"{family.name} {number} {name} {mapping.hf_shapes[name]}: {'; '.join(lines)}"


def exportable(recipe: Recipe, small: Any) -> Any:
    """Return a small model as the first Hugging Face family that can express the large one reads it back.

    Keys without effect then have the family's values, so that the checkpoint can be exported.
    """
    from moefold.convert.families.hf_config import families_for, parse_model_config

    if family := next(families_for(recipe.cfg.model), None):
        restored = parse_model_config(family.write(small), Path(family.name))
        return replace(restored, init_std=small.init_std)
    return small


def loss_lines(recipe: Recipe) -> Iterator[str]:
    """Yield losses and gradient norms of two steps in float64 on one rank."""
    yield from _losses(small_config(recipe, "float64", saves=False))


@lru_cache(maxsize=8)
def _losses(cfg: Any) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        steps, _ = train(cfg, Path(folder))
    return tuple(
        " ".join(f"{key} {rounded(record[key])}" for key in STEP_NUMBERS if record[key] is not None) for record in steps
    )


STEP_NUMBERS = ("step", "loss", "aux_loss", "z_loss", "mtp_loss", "indexer_loss", "grad_norm", "lr", "eval_loss")


def small_config(recipe: Recipe, dtype: str, *, saves: bool) -> Any:
    """Return the recipe for two steps on one rank of this machine: as it is if its model is small, else shrunk."""
    from moefold.config.chosen import chosen_in
    from moefold.config.groups.optimizer import OptimizerPart
    from moefold.config.sections.faults import FaultsConfig
    from moefold.config.sections.metrics import MetricsConfig
    from moefold.recipe import load_config

    overrides = OBJECTIVE_RUNS.get(recipe.name)
    if overrides is None:
        cfg = replace(recipe.small, model=exportable(recipe, recipe.small.model))
    else:
        cfg = load_config(recipe.path, overrides.split())
    run = replace(cfg.run, dir="run", device="cpu", dtype=dtype, steps=2, epochs=0.0, kernels="plain", compile="none")
    return replace(
        cfg,
        run=replace(run, cuda_graphs="none"),
        # Settings that need a GPU or the length of the real run, or that do not change a number.
        train=replace(
            cfg.train,
            optimizer=chosen_in(cfg.train, OptimizerPart).with_moment_dtype("float32"),
            precision="dtype",
            lr_schedule="constant",
            warmup_steps=0,
            recompute=(),
            memory_budget_gib=0.0,
            offload=(),
            offload_optimizer="none",
        ),
        checkpoint=replace(cfg.checkpoint, at_end=saves, init_from="", upcycle=None, peer_every=0, async_save=False),
        faults=FaultsConfig(),
        metrics=MetricsConfig(),
    )


def train(cfg: Any, folder: Path) -> tuple[list[dict[str, Any]], Path | None]:
    """Train two steps in a folder; return the records of the steps, and the checkpoint."""
    import moefold.metrics.plot as plot
    from moefold.api import train_in_process
    from moefold.config.sections.lora import LoraConfig

    plot.plot_loss = lambda run_dir: run_dir  # drawing takes longer than the steps
    steps: list[dict[str, Any]] = []
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        if cfg.lora.rank:
            # Adapters need weights to adapt: the weights after two steps without adapters.
            base = replace(cfg, run=replace(cfg.run, dir="base"), lora=LoraConfig())
            train_in_process(replace(base, checkpoint=replace(cfg.checkpoint, at_end=True)))
            cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, init_from="base"))
        outcome = train_in_process(cfg, on_step=steps.append)
    return steps, None if outcome.checkpoint is None else folder / outcome.checkpoint


def bit_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the bits of the losses of two steps, and the digests of the files of the checkpoint and its export."""
    for dtype in BITS_DTYPES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            steps, checkpoint = train(small_config(recipe, dtype, saves=True), folder)
            for record in steps:
                bits = {key: record[key] for key in STEP_NUMBERS if record[key] is not None}
                yield f"{dtype} {' '.join(f'{key} {float(value).hex()}' for key, value in bits.items())}"
            if checkpoint is not None:
                yield from (f"{dtype} checkpoint {line}" for line in file_digests(checkpoint))
                yield from (f"{dtype} exported {line}" for line in _exported(checkpoint, folder / "exported"))


def _exported(checkpoint: Path, out: Path) -> Iterator[str]:
    """Yield the digests of the exported folder, or why no family can express the model."""
    from moefold.cli.main import main as moefold_main

    messages = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(messages):
        status = moefold_main(["export", str(checkpoint), str(out)])
    if status:
        yield f"refused: {messages.getvalue().strip().replace(str(checkpoint.parents[2]), '.')}"
    else:
        yield from file_digests(out)


UNSTABLE_FILES = (".writer.json",)
"""Files of a checkpoint that name the process and the time."""
SIZED_FILES = (".metadata", "manifest.json")
"""Files with a random id of the save, or with the digest of such a file: only their size is compared."""


def file_digests(folder: Path) -> Iterator[str]:
    """Yield path, size and digest of every file of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in UNSTABLE_FILES:
            content = path.read_bytes()
            digest = "" if path.name in SIZED_FILES else hashlib.sha256(content).hexdigest()
            yield f"{path.relative_to(folder)} {len(content)} {digest}".rstrip()


SUBJECTS = (
    Subject("parameters", parameter_lines),
    Subject("shards", shard_lines),
    Subject("flops", flop_lines),
    Subject("cache", cache_lines),
    Subject("memory", memory_lines),
    Subject("legal mappings", legal_lines),
    Subject("prices", price_lines, may_refuse=True),
    Subject("shrunk", shrink_lines),
    Subject("hugging face config", family_lines),
    Subject("boxes", box_lines, is_quick=False),
    Subject("seeds", seed_lines, is_quick=False),
    Subject("hugging face tensors", tensor_lines, is_quick=False),
    Subject("more prices", more_price_lines, is_quick=False, may_refuse=True),
    Subject("losses", loss_lines, is_quick=False),
    Subject(BITS, bit_lines, is_quick=False),
)
BY_NAME = {subject.name: subject for subject in SUBJECTS}


def rounded(value: Any) -> str:
    """Return a number as the sheet has it: floats with 9 digits."""
    return format(value, ".9g") if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """Return dataclasses and mappings as dicts, and everything else as it is."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def flat(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each number of nested dicts."""
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list | tuple):
        yield f"{prefix} [{', '.join(text for inner in values for text in flat(inner))}]".strip()
    else:
        yield f"{prefix} {rounded(values.item() if hasattr(values, 'item') else values)}".strip()


def settings(cfg: Any) -> Iterator[str]:
    """Yield the settings of a config that differ from an empty recipe's."""
    from moefold.config.load import config_from_dict

    default = dict(line.partition(" ")[::2] for line in flat(asdict(config_from_dict({}))))
    for line in flat(asdict(cfg)):
        key, _, value = line.partition(" ")
        if default.get(key) != value:
            yield line


def names_of(root: Path) -> list[str]:
    """Return the presets and recipes of a checkout."""
    presets = sorted(path.name.removesuffix(".toml") for path in (root / "src/moefold/config/presets").glob("*.toml"))
    return presets + sorted(path.relative_to(root).as_posix() for path in (root / "recipes").rglob("*.toml"))


def digest(lines: Sequence[str]) -> str:
    """Return the entry of a subject in the sheet: its number of lines and a digest of them."""
    return f"{len(lines)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"


Texts = dict[str, list[str]]
Sheet = dict[str, dict[str, str]]


def texts_of(root: Path, name: str, subjects: Sequence[str]) -> Texts:
    """Return the full text of some subjects of a recipe."""
    recipe = Recipe(root, name)
    return {subject: list(_lines(recipe, BY_NAME[subject])) for subject in subjects}


def _lines(recipe: Recipe, subject: Subject) -> Iterator[str]:
    from moefold.errors import ConfigError

    try:
        yield from subject.lines(recipe)
    except ConfigError as error:
        if not subject.may_refuse:
            raise RuntimeError(f"golden: {recipe.name}: {subject.name}") from error
        yield f"refused: {str(error).replace(str(recipe.root), '.')}"


def read_sheet(path: Path) -> Sheet:
    """Return the digests of the sheet, by recipe and subject."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row.pop("recipe"): row for row in rows}


def write_sheet(path: Path, sheet: Sheet) -> None:
    """Write the digests, a line for each recipe."""
    path.write_text("".join(json.dumps({"recipe": name, **row}) + "\n" for name, row in sheet.items()))


def differences(sheet: Sheet, computed: Sheet, names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each subject whose digest differs from the sheet's, and for recipes that only one side has.

    Args:
        sheet: the stored digests.
        computed: the present digests, of all or some subjects.
        names: every preset and recipe of the checkout.
    """
    yield from (f"{name}: is not in the sheet" for name in names if name not in sheet)
    yield from (f"{name}: is in the sheet, and no preset or recipe" for name in sheet if name not in names)
    for name, row in computed.items():
        for subject, now in row.items():
            before = sheet.get(name, {}).get(subject)
            if name in sheet and before != now:
                yield f"{name}: {subject} was {before or 'not there'}, is {now}"


def diff_texts(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]], shown: int) -> Iterator[str]:
    """Yield the lines that differ, of each subject of a recipe."""
    for subject in dict.fromkeys((*before, *after)):
        lines = [
            line
            for line in difflib.unified_diff(before.get(subject, []), after.get(subject, []), lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        if lines:
            yield f"  {subject}: {len(lines)} lines differ"
            yield from (f"    {line[:300]}" for line in lines[:shown])


def compute(root: Path, names: Sequence[str], subjects: Sequence[str]) -> Iterator[tuple[str, Texts]]:
    """Yield each recipe with its full texts, computed on all cores."""
    tasks = partial(texts_of, root, subjects=subjects)
    workers = min(len(names), os.cpu_count() or 1)
    # Recipes of a model are neighbours, and some have the same small model.
    size = max(1, min(4, len(names) // workers))
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        yield from zip(names, pool.map(tasks, names, chunksize=size), strict=True)


def dump(root: Path, out: Path, names: Sequence[str], subjects: Sequence[str]) -> None:
    """Write the full texts of recipes as one JSON line each, after one with the package that computed them."""
    import moefold

    with out.open("w") as file:
        print(json.dumps({"package": str(Path(moefold.__file__).parent)}), file=file)
        for name, texts in compute(root, names, subjects):
            print(json.dumps({"recipe": name, "texts": texts}), file=file, flush=True)


def dumped(root: Path, out: Path, arguments: Sequence[str]) -> dict[str, Texts]:
    """Return the full texts that a checkout computes in a separate process.

    Its own tool computes them, or this tool if the checkout lacks it.
    """
    root = root.resolve()
    own = root / "tools" / Path(__file__).name
    tool = own if own.exists() else Path(__file__)
    command = [sys.executable, str(tool), "--root", str(root), "--dump", str(out), *arguments]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, cwd=root)
    first, *rows = map(json.loads, out.read_text().splitlines())
    if not Path(first["package"]).resolve().is_relative_to(root):
        raise SystemExit(f"golden: {first['package']} was imported, and not the package of {root}")
    return {row["recipe"]: row["texts"] for row in rows}


def compare_with(commit: str, names: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the differences between a commit and this checkout, both computed on this machine."""
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        old = Path(name).resolve() / "checkout"
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(old, filter="data")
        return compare_checkouts(old, ROOT, names, flags)


def compare_checkouts(old: Path, new: Path, names: Sequence[str], flags: Sequence[str], shown: int = 8) -> list[str]:
    """Return the differences between the full texts of two checkouts, each computed with its own package.

    Args:
        old: a checkout.
        new: another checkout.
        names: presets and recipes.
        flags: options of this program that choose the subjects.
        shown: lines to show of a subject.
    """
    shared = [name for name in names if name in names_of(old)]
    found = [f"{name}: is not in the old checkout" for name in names if name not in shared]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        before = dumped(old, Path(folder) / "old.jsonl", [*flags, *shared])
        after = dumped(new, Path(folder) / "new.jsonl", [*flags, *shared])
    for recipe in shared:
        lines = list(diff_texts(before[recipe], after[recipe], shown))
        found += [recipe, *lines] if lines else []
    return found


def chosen_subjects(args: argparse.Namespace) -> list[str]:
    """Return the names of the subjects that the options ask for."""
    if args.subject:
        return list(args.subject)
    return [name for name, subject in BY_NAME.items() if subject.is_quick or (args.bits if name == BITS else args.full)]


def main(argv: list[str] | None = None) -> int:
    """Compare the present facts with the sheet or a commit; return 1 if a fact differs, else 0."""
    # Ranks and workers share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.bits or BITS in args.subject) and not (args.against or args.dump):
        parser.error("bits differ from machine to machine and are not in the sheet: add --against COMMIT")
    root = args.root.resolve()
    every = names_of(root)
    if unknown := [name for name in args.recipes if name not in every]:
        raise SystemExit(f"golden: {unknown[0]!r} is not a preset or a recipe of {root}")
    names = args.recipes or every
    if args.against:
        flags = [flag for flag, is_set in (("--full", args.full), ("--bits", args.bits)) if is_set]
        flags += [word for subject in args.subject for word in ("--subject", subject)]
        found = compare_with(args.against, names, flags)
        print("\n".join(found) or f"no difference to {args.against} in {len(names)} recipes")
        return bool(found)
    subjects = chosen_subjects(args)
    if args.dump:
        dump(root, args.dump, names, subjects)
        return 0
    sheet = read_sheet(args.sheet)
    computed: Sheet = {}
    for name, texts in compute(root, names, subjects):
        computed[name] = {subject: digest(lines) for subject, lines in texts.items()}
        if args.write:
            # Recipe by recipe: earlier results stay if a later recipe fails.
            write_sheet(args.sheet, {name: sheet.get(name, {}) | computed.get(name, {}) for name in every})
    if args.write:
        print(f"wrote {len(subjects)} subjects of {len(names)} recipes")
        return 0
    found = list(differences(sheet, computed, every))
    print("\n".join(found) or f"{len(subjects)} subjects of {len(names)} recipes match the sheet")
    if found:
        print("what differs: python tools/golden.py --against COMMIT RECIPE; to accept it: --write, with --full")
    return bool(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="presets and recipes (default: all)")
    parser.add_argument("--full", action="store_true", help="also what needs torch: losses, seeds, names of tensors")
    parser.add_argument("--bits", action="store_true", help="with --against: bits of losses, checkpoints and exports")
    parser.add_argument(
        "--subject", action="append", default=[], choices=tuple(BY_NAME), help="only this one; repeatable"
    )
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare full texts with the texts of a commit, on this machine"
    )
    parser.add_argument("--write", action="store_true", help="write the sheet")
    parser.add_argument("--sheet", type=Path, default=SHEET, help="the sheet (default: tools/golden.jsonl)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the full texts, which --against compares")
    return parser


if __name__ == "__main__":
    sys.exit(main())
