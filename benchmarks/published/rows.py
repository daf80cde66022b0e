"""Rows of published measurements as cases to price: the mapping, the workload and the software of each.

An empty cell is a value that the source does not print. Some values follow from other columns of the row (a method
without pipelining has one stage). `predictions.py` chooses some others (micro-batch size, virtual stages). If any other
cell is empty, the mapping is incomplete and the row is skipped.
"""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.models import find_published_model
from moefold.config.base.part_registry import find_part
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.hardware import BLACKWELL, device_names, load_device
from moefold.planner.accuracy import MeasuredRow, SkipRowError
from moefold.planner.cost_model.workload import EXPERT_SPREAD, CudaGraphs, TrainingWorkload
from moefold.planner.mapping import ParallelMapping

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
_RECIPES = tomllib.loads((Path(__file__).parent / "recipes.toml").read_text(encoding="utf-8"))


class PublishedRow(MeasuredRow):
    """One row of a table of published measurements."""

    __slots__ = ()

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
        found = bridge.get(find_published_model(self["model"]), {}).get(
            _parse_device_name(self["gpu"]), bridge["other"]
        )
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


def parse_case(measured_row: MeasuredRow) -> PublishedCase:
    """Parse a row.

    Raises:
        SkipRowError: it is incomplete, or its model or device is not known.
    """
    row = PublishedRow(measured_row.cells)
    if "lora" in row.method_and_note:
        raise SkipRowError("LoRA trains other weights than the model's")
    model = find_published_model(row["model"])
    gpu = _parse_device_name(row["gpu"])
    if model is None:
        raise SkipRowError(f"model {row['model']!r} is not known")
    if gpu is None:
        raise SkipRowError(f"gpu {row['gpu']!r} is not known")
    row.check_metric()
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
