"""Validation of the planner: predicted against published throughput, row by row.

An empty cell is a value that the source does not print. Some values follow from other columns of the row (a method
without pipelining has one stage). The planner chooses some others (micro-batch size, virtual stages). If any other cell
is empty, the mapping is incomplete and the row is skipped.
"""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from zlib import crc32

from moefold.bounded_read import MAX_TABLE_BYTES, read_bytes
from moefold.config.base.part_registry import find_part
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.hardware import BLACKWELL, GRACE_BLACKWELL, device_names, load_device
from moefold.errors import ConfigError
from moefold.package_table import package_table
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import EXPERT_SPREAD, BytesPerParam, CudaGraphs, TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.model_spec import ModelSpec, find_model_name, load_model_spec, train_flops
from moefold.planner.search.space import NON_LAYER_STAGE_PARTS
from moefold.topology.layout import divisors

_RUN_COLUMNS = ("source", "model", "gpu", "n_gpus", "precision", "seq_len", "gbs")
_MAPPING_COLUMNS = ("mbs", "tp", "etp", "cp", "ep", "pp", "vpp")
COLUMNS = (*_RUN_COLUMNS, *_MAPPING_COLUMNS, "metric", "value", "method", "note")
METRICS = ("mfu_pct", "tflops_per_gpu", "tokens_per_s_per_gpu")
OUT_OF_MEMORY = "OOM"
EMPTY_CELLS = ("", "-", "n/a", "na", "none")

PAPER = "arXiv:2504.14960"
BASELINES = {"FSDP": 3, "FSDP+EP": 3, "TP+EP+DP": 1, "MCore": 1}
"""The paper's methods that couple the experts to tensor and data parallelism, and their ZeRO stage."""

OTHER_SOFTWARE = ("automodel", "torchtitan", "pith-train")
"""Sources that measured software on torch's own FSDP and pipelines, like moefold. The others measured Megatron-Core, on
which NeMo and Megatron-Bridge are built too."""

VENDOR_SOURCES = ("NVIDIA", "docs.nvidia.com", "ModelZoo best_practice", PAPER, "arXiv:2412.09952", "arXiv:2603.07685")
"""Sources of runs by the vendor of the GPUs, on hosts that it tuned unless a note says otherwise."""

_RELEASE = re.compile(r"\[(\d+(?:\.\d+)*)\.? NeMo|\(NeMo (\d+(?:\.\d+)*)\.?\)")
_NO_OVERLAP = re.compile(r"no (\w+ )?overlap|overlap[a-z]*\W+(is )?(off|disabled|none)\b")
_STEP = re.compile(r"\bstep ([\d.]+) s\b|([\d.]+) s a step\b")
_RECOMPUTE_PATTERNS = {
    r"norm": "norms",
    r"core.?att": "core_attention",
    r"mla.?up": "mla_up",
    r"\bmlp": "dense_mlp",
    r"\b(moe.?)?act(ivation)?\b": "expert_activation",
    r"shared": "shared_experts",
    r"\bmoe\b(?!.?act)": "moe",
    r"\bfull\b": "layer",
}
_OFFLOAD_PATTERNS = {r"optimizer offload": "optimizer", r"activation\w* offload": "expert_activation"}
"""Offloaded parts by pattern. Sources that specify offloaded activations offload the experts' activations."""
_RECIPES = package_table("planner/published_recipes.toml")


class SkipRowError(ValueError):
    """Reason why a row cannot be priced."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of a table, as text."""

    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column].strip()

    def positive_int(self, column: str) -> int | None:
        """Return the integer of a cell, or None if it is empty."""
        text = self[column]
        if text.lower() in EMPTY_CELLS:
            return None
        if not text.isdecimal():
            raise SkipRowError(f"{column}={text!r} is not an integer")
        if int(text) < 1:
            raise SkipRowError(f"{column}={text} is below 1")
        return int(text)

    @property
    def method_and_note(self) -> str:
        """Method and note, in lower case, and the features of the source's recipe that it does not print."""
        return f"{self['method']} {self['note']}; {self._recipe}".lower()

    @property
    def _recipe(self) -> str:
        if "torchtitan" in self["source"]:
            # A row that prints its activation checkpointing has its own settings.
            return "" if re.search(r"\bAC\b", self["note"]) else str(_RECIPES["torchtitan"])
        if "Megatron-Bridge" not in self["source"]:
            return ""
        bridge = _RECIPES["megatron-bridge"]
        if "verification_card" in self["source"]:
            return str(bridge["card"]) if self.release >= (26,) else ""
        found = bridge.get(find_model_name(self["model"]), {}).get(_parse_device_name(self["gpu"]), bridge["other"])
        # Recipes of bfloat16, and of fp8 with one scale for a tensor, have no full graphs.
        has_blocks = bool(re.search("MX|NVFP4", self["precision"].upper()))
        known = {since: words for since, words in found.items() if has_blocks or "full cuda" not in words}
        containers = sorted((since for since in known if _numbers(since) <= self.release), key=_numbers)
        return str(known[containers[-1]]) if containers else ""

    @property
    def release(self) -> tuple[int, ...]:
        """Version numbers of the container that a source names, or (0,) if it names none."""
        found = _RELEASE.search(self["source"])
        return (0,) if found is None else _numbers(found[1] or found[2])


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedCase:
    """A row that can be priced: one mapping, except for the values that the planner chooses."""

    row: PublishedRow
    model: str
    gpu: str
    mapping: ParallelMapping
    """The mapping, with mbs or vpp of 0 where the source does not print them."""
    workload: TrainingWorkload
    recompute: tuple[str, ...] | None
    """None if the source does not print it."""
    is_fully_specified: bool = False
    """True if states are known to be float32 and no whole layer is recomputed, as in the paper's comparison of
    methods."""
    published_flops_per_token: float = 0.0
    """FLOPs for a token by the source's own formula, if it differs from both conventions. 0: it does not."""


def read_rows(path: Path) -> list[PublishedRow]:
    """Read the rows of a table.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    try:
        text = read_bytes(path, MAX_TABLE_BYTES).decode("utf-8")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        lacking = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if lacking:
            raise ConfigError(f"{path}: lacks the columns {', '.join(lacking)}; see `moefold plan-accuracy --help`")
        return [PublishedRow({column: line[column] or "" for column in COLUMNS}) for line in reader]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from None


def parse_case(row: PublishedRow) -> PublishedCase:
    """Parse a row.

    Raises:
        SkipRowError: it is incomplete, or the planner does not know its model or device.
    """
    if "lora" in row.method_and_note:
        raise SkipRowError("LoRA trains other weights than the model's")
    model = find_model_name(row["model"])
    gpu = _parse_device_name(row["gpu"])
    if model is None:
        raise SkipRowError(f"model {row['model']!r} is not known")
    if gpu is None:
        raise SkipRowError(f"gpu {row['gpu']!r} is not known")
    if row["metric"] not in METRICS:
        raise SkipRowError(f"metric {row['metric']!r} is not known")
    mapping = _parse_mapping(row, gpu)
    workload = _parse_workload(row, gpu, mapping)
    recompute = _parse_recompute(row)
    return PublishedCase(
        row=row,
        model=model,
        gpu=gpu,
        mapping=replace(mapping, recompute=recompute or ()),
        workload=workload,
        recompute=recompute,
        is_fully_specified=row["source"].startswith(PAPER),
        published_flops_per_token=_published_flops_per_token(row, model, workload),
    )


def _published_flops_per_token(row: PublishedRow, model: str, workload: TrainingWorkload) -> float:
    """Return the FLOPs of a token by the source's formula, from its printed step or as known, or else 0."""
    printed = _STEP.search(row.method_and_note)
    if printed and row["metric"] == "tflops_per_gpu":
        seconds = float(printed[1] or printed[2])
        tokens = workload.seq_len * workload.global_batch_size / int(row["n_gpus"])
        return float(row["value"]) * 1e12 * seconds / tokens
    return 27.15e9 if model == "gpt-oss-120b" and (0,) < row.release < (26, 6) else 0.0


def _parse_device_name(text: str) -> str | None:
    """Return the only device that a cell names ("DGX H100"), or None."""
    named = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word in device_names()]
    return named[0] if len(named) == 1 else None


def _parse_mapping(row: PublishedRow, gpu: str) -> ParallelMapping:
    """Return the mapping of a row, with the degrees that follow from other columns."""
    method = row["method"]
    is_paper = row["source"].startswith(PAPER)
    is_baseline = is_paper and method in BASELINES
    known = {axis: row.positive_int(axis) for axis in ("tp", "etp", "cp", "ep", "pp", "n_gpus")}
    if known["pp"] is None and (is_baseline and method != "MCore"):
        known["pp"] = 1
    if known["ep"] is None and (_is_dense(row) or (is_baseline and method == "FSDP")):
        known["ep"] = 1
    lacking = [axis for axis in ("n_gpus", "tp", "cp", "ep", "pp") if known[axis] is None]
    if lacking:
        raise SkipRowError(f"incomplete mapping: {', '.join(lacking)} not printed")
    tp, cp, ep, pp, n = (int(known[axis] or 1) for axis in ("tp", "cp", "ep", "pp", "n_gpus"))
    etp = known["etp"] or (tp if is_baseline else 1)
    if n % (tp * cp * pp) or n % (etp * ep * pp):
        raise SkipRowError(f"the degrees do not divide {n} GPUs")
    has_fsdp = "fsdp" in row.method_and_note
    return ParallelMapping(
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        dp=n // (tp * cp * pp),
        edp=n // (etp * ep * pp),
        # Megatron-Bridge's tables print virtual stages where there are any, and Megatron-Core has none by default.
        vpp=1 if pp == 1 else row.positive_int("vpp") or int("Megatron-Bridge" in row["source"] or not _is_vendor(row)),
        mbs=row.positive_int("mbs") or (1 if is_paper else 0),
        zero=3 if has_fsdp else 1,
        dispatcher=_parse_dispatcher(row),
        overlap="overlap" in row.method_and_note and not re.search(_NO_OVERLAP, row.method_and_note),
        offload=tuple(what for words, what in _OFFLOAD_PATTERNS.items() if re.search(words, row.method_and_note)),
    )


def _parse_dispatcher(row: PublishedRow) -> DispatcherPart:
    """Return the dispatcher of a row. HybridEP is priced as DeepEP: both send a token once to a rank.

    NVIDIA's recipes of 2026 use one of the two. Some rows say that their source does not print which.
    """
    names = ("hybridep", "deepep", "dispatcher not printed")
    has_kernels = any(name in row.method_and_note for name in names)
    part: DispatcherPart = find_part(DispatcherPart.group, "deepep" if has_kernels else "alltoall")()
    return part


def _is_dense(row: PublishedRow) -> bool:
    return "llama3" in "".join(char for char in row["model"].lower() if char.isalnum()) and "8x" not in row["model"]


def _parse_workload(row: PublishedRow, gpu: str, mapping: ParallelMapping) -> TrainingWorkload:
    seq_len = row.positive_int("seq_len")
    batch = row.positive_int("gbs")
    if seq_len is None:
        raise SkipRowError("seq_len not printed")
    if batch is None:
        if not mapping.mbs or mapping.pp > 1:
            raise SkipRowError("gbs not printed")
        batch = mapping.mbs * mapping.dp
    if batch % mapping.dp:
        raise SkipRowError(f"a batch of {batch} does not divide over dp={mapping.dp}")
    is_paper = row["source"].startswith(PAPER)
    words = row.method_and_note
    drops = is_paper or "token-drop" in words or "tokendrop" in row["model"].lower()
    precision = _parse_precision(row, gpu)
    if precision not in load_device(gpu).peak_flops:
        raise SkipRowError(f"{gpu} has no matrix units for {precision}")
    is_megatron = not any(name in row["source"].lower() for name in OTHER_SOFTWARE)
    has_full_graphs = "full cuda graphs" in words
    graphs: CudaGraphs = "partial" if "cuda graph" in words else "none"
    return TrainingWorkload(
        seq_len=seq_len,
        global_batch_size=batch,
        precision=precision,
        capacity_factor=1.0 if drops else 0.0,
        expert_spread=EXPERT_SPREAD if "natural routing" in words else 0.0,
        cuda_graphs="full" if has_full_graphs else graphs,
        has_tuned_host=_has_tuned_host(row),
        fused_experts=has_full_graphs,
        drops_unpadded=drops and is_megatron and not _is_vendor(row),
        # The containers that introduced HybridEP also fused the activation.
        unfused_clamp=graphs == "none" and "hybridep" not in words and row.release < (26,),
        counts_causal_attention=not (0,) < row.release < (25, 6),
        is_coupled=is_paper and row["method"] in BASELINES and mapping.dp % mapping.ep == 0,
        overlaps_dp_comm=not is_paper,
        shards_over_dp_only=is_paper,
        overlaps_tp_comm="Megatron-Bridge" in row["method"] and _is_dense(row),
        reduce_bytes=2.0 if mapping.zero == 3 and is_megatron else 4.0,
        is_megatron=is_megatron,
        runs_mtp="w/o mtp" not in row["model"].lower(),
    )


def _has_tuned_host(row: PublishedRow) -> bool:
    """Return whether the vendor of the GPUs measured the row, and does not say that it tuned nothing."""
    return _is_vendor(row) and not re.search(r"not (well )?tuned", row["note"])


def _is_vendor(row: PublishedRow) -> bool:
    """Return whether the vendor of the GPUs measured the row. An issue in its repository is the run of a user."""
    return any(name in row["source"] for name in VENDOR_SOURCES) and " issue" not in row["source"]


def _parse_precision(row: PublishedRow, gpu: str) -> str:
    text = row["precision"].upper().rstrip("?").replace("FP16", "BF16")
    is_fine = "parenthesised" in row["note"]
    if text in ("BF16", "NVFP4", "MXFP8"):
        return text.lower()
    if text == "FP8-MX" or (is_fine and gpu in BLACKWELL and text.startswith("FP8")):
        return "mxfp8"
    if "BLOCK" in text or (is_fine and text.startswith("FP8")):
        return "fp8-blockwise"
    if text.startswith("FP8"):
        return "fp8"
    raise SkipRowError(f"precision {row['precision']!r} is not known")


def _parse_recompute(row: PublishedRow) -> tuple[str, ...] | None:
    words = row.method_and_note
    if "no recompute" in words or "no ac" in words:
        return ()
    if "full ac" in words:
        return ("layer",)
    listed = re.search(r"(full )?recompute ?([^;]*)", words)
    if listed is None:
        return None
    if listed[1]:
        return ("layer",)
    named = listed[2].replace("_", " ")
    return tuple(part for pattern, part in _RECOMPUTE_PATTERNS.items() if re.search(pattern, named))


MICRO_BATCHES = (1, 2, 4, 8)
MAX_VIRTUAL_STAGES = 24
SELECTIVE_RECOMPUTE_PARTS = ("norms", "expert_activation", "mla_up", "dense_mlp", "shared_experts")
"""Parts that a source without printed recomputation may recompute, cheapest first."""

STATE_BYTES_CANDIDATES = (BytesPerParam(4, 4, 4), BytesPerParam(4, 4, 2), BytesPerParam(0, 2, 2))
"""Dtypes of the states if a source does not print its optimizer's precision: the first that fits of float32, bfloat16
moments, all bfloat16."""

MAX_OVERESTIMATE = 1.5
"""Estimated memory over the memory of the device up to which a row's recomputation is believed: the run did fit. The
largest excess of such rows is 1.49, in 8 bits, whose smaller saved tensors are not counted. A row above it cannot have
run as it is read: Llama 4 Scout on 256 GB200 without recomputation is at 3.6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Measurement and prediction of one row: a number, or OOM."""

    row: PublishedRow
    measured: float | str
    predicted: float | str
    mapping: ParallelMapping
    workload: TrainingWorkload
    """The workload with the dtypes of the states that fit."""

    @property
    def precision(self) -> str:
        """Precision of the GEMMs."""
        return self.workload.precision

    @property
    def error_pct(self) -> float | None:
        """Error of the prediction in percent of the measurement, or None if one of them is OOM."""
        if isinstance(self.measured, str) or isinstance(self.predicted, str):
            return None
        return (self.predicted / self.measured - 1) * 100

    @property
    def unseen_error_pct(self) -> float | None:
        """Error under a fit without the configuration, or None if the row was not fitted."""
        return _unseen_errors().get(row_key(self.row))


ErrorStatistics = dict[str, float]
"""Number of rows, and mean, median and bias of their errors in percent. A positive bias means too fast predictions."""


def error_statistics(errors: Sequence[float]) -> ErrorStatistics:
    """Return the statistics of at least one error."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(sizes),
        "mean_abs_error_pct": sum(sizes) / len(sizes),
        "median_abs_error_pct": median(sizes),
        "bias_pct": sum(errors) / len(sizes),
    }


KINDS: dict[str, Callable[["Prediction"], bool]] = {
    "ZeRO-3": lambda p: p.mapping.zero == 3,
    "pipelines": lambda p: p.mapping.pp > 1,
    "context parallelism": lambda p: p.mapping.cp > 1,
    "no CUDA graphs": lambda p: p.workload.launched[0] > 0,
    "natural routing": lambda p: p.workload.expert_spread > 0,
}
"""Kinds of rows whose errors differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Predictions of all rows of a table."""

    predictions: tuple[Prediction, ...]
    skipped: dict[str, int]
    """Number of skipped rows by reason."""

    @property
    def abs_errors_pct(self) -> list[float]:
        """Absolute errors of the rows with a number on both sides."""
        return [abs(p.error_pct) for p in self.predictions if p.error_pct is not None]

    @property
    def mean_abs_error_pct(self) -> float | None:
        """Mean absolute error over the rows with a number on both sides."""
        return mean_abs_error_pct(self.predictions)

    @property
    def by_gpu_precision(self) -> dict[str, dict[str, float | int | None]]:
        """Number of rows and mean absolute error for each device and precision."""
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for prediction in self.predictions:
            groups[f"{prediction.row['gpu']} {prediction.precision}"].append(prediction)
        return {
            name: {"rows": len(group), "mean_abs_error_pct": mean_abs_error_pct(group)}
            for name, group in sorted(groups.items())
        }

    def errors_by_kind(self) -> dict[str, dict[str, ErrorStatistics | None]]:
        """Return the errors of all rows, of each GPU and of each of `KINDS`, "fitted" and "unseen".

        An unseen error is the error under a fit without the configuration. It is None if no row of a group was fitted,
        because then all its errors are unseen.
        """
        rows = [p for p in self.predictions if p.error_pct is not None]
        groups = {"all": rows}
        groups |= {gpu: [p for p in rows if p.row["gpu"] == gpu] for gpu in sorted({p.row["gpu"] for p in rows})}
        groups |= {name: [p for p in rows if is_kind(p)] for name, is_kind in KINDS.items()}
        found: dict[str, dict[str, ErrorStatistics | None]] = {}
        for name, group in groups.items():
            errors = [(p.error_pct, p.unseen_error_pct) for p in group if p.error_pct is not None]
            if errors:
                unseen = [seen if other is None else other for seen, other in errors]
                was_fitted = any(other is not None for _, other in errors)
                found[name] = {
                    "fitted": error_statistics([seen for seen, _ in errors]),
                    "unseen": error_statistics(unseen) if was_fitted else None,
                }
        return found

    @property
    def memory_mistakes(self) -> tuple[Prediction, ...]:
        """Rows that ran and are predicted not to fit, and the reverse."""
        return tuple(p for p in self.predictions if isinstance(p.measured, str) != isinstance(p.predicted, str))

    def as_dict(self) -> dict[str, object]:
        """Return the output of `moefold plan-accuracy --json`."""
        return {
            "rows": [
                {
                    **{column: p.row[column] for column in ("source", "model", "gpu", "metric")},
                    "measured": p.measured,
                    "predicted": p.predicted,
                    "error_pct": p.error_pct,
                }
                for p in self.predictions
            ],
            "mean_abs_error_pct": self.mean_abs_error_pct,
            "by_gpu_precision": self.by_gpu_precision,
            "by_kind": self.errors_by_kind(),
            "num_skipped": sum(self.skipped.values()),
            "skipped": self.skipped,
        }


def row_key(row: PublishedRow) -> str:
    """Return a short key of a row's cells, without its method and note, for the table of unseen errors."""
    cells = "|".join(row[column] for column in COLUMNS[:-2])
    return f"{crc32(cells.encode()):08x}"


def _unseen_errors() -> Mapping[str, float]:
    """Return the cross-validated errors in percent that `benchmarks/fit_planner.py --unseen` wrote, by `row_key`."""
    return package_table("planner/unseen_errors.json")


def mean_abs_error_pct(predictions: Sequence[Prediction]) -> float | None:
    """Return the mean of the absolute errors, or None if there are none."""
    errors = [abs(p.error_pct) for p in predictions if p.error_pct is not None]
    return sum(errors) / len(errors) if errors else None


def validate_predictions(path: Path) -> Accuracy:
    """Predict every row of a table that has a complete mapping.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    predictions = []
    skipped = Counter[str]()
    for row in read_rows(path):
        try:
            predictions.append(predict(parse_case(row)))
        except SkipRowError as reason:
            skipped[str(reason)] += 1
    return Accuracy(predictions=tuple(predictions), skipped=dict(skipped.most_common()))


def predict(case: PublishedCase) -> Prediction:
    """Predict one case, with the best choice of the values that its source does not print.

    Raises:
        SkipRowError: no open choice divides the batch, or the value is not a number.
    """
    model_spec = load_model_spec(case.model)
    measured = _parse_measured(case.row["value"])
    found = _fastest_fitting(model_spec, case)
    predicted: float | str = OUT_OF_MEMORY if found is None else _predicted_metric(model_spec, case, found[0])
    mapping, workload = found or (case.mapping, case.workload)
    return Prediction(row=case.row, measured=measured, predicted=predicted, mapping=mapping, workload=workload)


def _parse_measured(text: str) -> float | str:
    if text.upper() == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    try:
        number = float(text)
    except ValueError:
        raise SkipRowError(f"value {text!r} is not a number") from None
    if not 0 < number < inf:
        raise SkipRowError(f"value {text!r} is not a throughput: it must be a number above 0, or {OUT_OF_MEMORY}")
    return number


def _predicted_metric(model_spec: ModelSpec, case: PublishedCase, mapping: ParallelMapping) -> float:
    tokens = _cost_model(model_spec.name, case.gpu, case.workload).step_time(mapping).tokens_per_s_per_gpu
    w = case.workload
    flops = case.published_flops_per_token or train_flops(
        model_spec, w.seq_len, causal=w.counts_causal_attention, router=False, mtp=w.runs_mtp
    )
    if case.row["metric"] == "tokens_per_s_per_gpu":
        return tokens
    if case.row["metric"] == "tflops_per_gpu":
        return tokens * flops / 1e12
    return tokens * flops / load_device(case.gpu).peak("bf16") * 100


@lru_cache(maxsize=512)
def _cost_model(model: str, gpu: str, workload: TrainingWorkload) -> CostModel:
    return CostModel(load_model_spec(model), load_device(gpu), workload)


@lru_cache(maxsize=1024)
def _memory_model(model: str, gpu: str, workload: TrainingWorkload) -> MemoryModel:
    return MemoryModel(load_model_spec(model), workload, load_device(gpu))


def _fastest_fitting(model_spec: ModelSpec, case: PublishedCase) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """Return the fastest open choice that fits, or None if none does."""
    cost_model = _cost_model(model_spec.name, case.gpu, case.workload)
    tried = (_first_fitting(model_spec, case, choice) for choice in _open_mappings(model_spec, case))
    return min(filter(None, tried), key=lambda found: cost_model.step_time(found[0]).total_s, default=None)


def _open_mappings(model_spec: ModelSpec, case: PublishedCase) -> list[ParallelMapping]:
    m = case.mapping
    num_experts = model_spec.config.routed.num_experts if model_spec.config.routed else m.ep
    if num_experts % m.ep:
        raise SkipRowError(f"ep={m.ep} does not divide {num_experts} experts")
    local = case.workload.global_batch_size // m.dp
    sizes = [m.mbs] if m.mbs else [size for size in MICRO_BATCHES if local % size == 0]
    if m.mbs and local % m.mbs:
        raise SkipRowError(f"micro-batches of {m.mbs} do not divide {local} samples of a rank")
    if m.pp * max(1, m.vpp) > len(model_spec.layers) + len(NON_LAYER_STAGE_PARTS):
        raise SkipRowError(f"pp={m.pp} with vpp={m.vpp} is more stages than {len(model_spec.layers)} layers make")
    stages = [m.vpp]
    if not m.vpp:
        stages = [v for v in divisors(max(1, len(model_spec.layers) // m.pp)) if v <= MAX_VIRTUAL_STAGES]
    return [replace(m, mbs=size, vpp=vpp) for size, vpp in product(sizes, stages)]


def _first_fitting(
    model_spec: ModelSpec, case: PublishedCase, mapping: ParallelMapping
) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """Return the mapping with least sharding, least recomputation and the highest optimizer precision that fits.

    The recomputation of the row comes first, and may exceed the memory by `MAX_OVERESTIMATE`.
    """
    selective = [SELECTIVE_RECOMPUTE_PARTS[:i] for i in range(len(SELECTIVE_RECOMPUTE_PARTS) + 1)]
    options: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(parts, ()) for parts in selective]
    if not case.is_fully_specified:
        if case.workload.is_megatron and case.gpu in GRACE_BLACKWELL:
            # Recipes for Grace hosts offload activations before they recompute whole blocks.
            options.append((SELECTIVE_RECOMPUTE_PARTS, ("expert_activation",)))
        options += [(("norms", "moe"), ()), (("layer",), ())]
    if case.recompute is not None:
        options.insert(0, (case.recompute, ()))
    all_states = STATE_BYTES_CANDIDATES[:1] if case.is_fully_specified else STATE_BYTES_CANDIDATES
    zeros = (mapping.zero,) if case.is_fully_specified or mapping.pp > 1 else dict.fromkeys((mapping.zero, 3))
    for zero, (parts, offloaded), states in product(zeros, options, all_states):
        offload = tuple(dict.fromkeys((*mapping.offload, *offloaded)))
        tried = replace(mapping, recompute=parts, offload=offload, zero=zero)
        workload = replace(case.workload, state_bytes=states)
        estimate = _memory_model(model_spec.name, case.gpu, workload).estimate(tried)
        if estimate.total <= estimate.capacity * (MAX_OVERESTIMATE if parts == case.recompute else 1.0):
            return tried, workload
    return None
