"""Measured stages of benchmarks/gpu_half_hour.py: `python -m benchmarks.gpu_stages STAGE --rows FILE`.

A row is one JSON object a line with a name, a value and a unit; FILE has every row as soon as it is measured. Names do
not depend on `--tiny`, which only makes the tensors small.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_constants import constants, shared
from benchmarks.gpu_contact import contact
from benchmarks.gpu_stage import TINY_LAYER, TINY_TOKENS, Stage, layer_config, profile, recorded_waits
from benchmarks.race.other_frameworks import PEERS, PeerUnavailableError
from benchmarks.race.reference_steps import ReferenceLayerSteps
from benchmarks.training_step import build_training_step, random_batch
from moefold.bench.our_step import LayerStep
from moefold.bench.shape import step_flops
from moefold.comm.private_torch import tree_leaves
from moefold.config.schema import Config
from moefold.cost.hardware import Device, load_device
from moefold.launch.threads_and_malloc import expand_segments
from moefold.ops.autotune import Autotuner, Candidates, TuningKey

LAYERS = (("qwen3-30b-a3b", 4096), ("qwen3-30b-a3b", 16384), ("mixtral-8x22b", 4096), ("mixtral-8x22b", 16384))
MAX_DIFFERENCE = 2e-2
"""Largest relative difference between two bfloat16 implementations of a product."""


def env(stage: Stage) -> None:
    """Record versions, the device, and the attention kernel that torch selects."""
    stage.add("python", sys.version.split()[0])
    stage.add("torch", torch.__version__)
    for name in ("triton", "pydantic", "transformers", "datasets", "torchtitan", "megatron-core", "deep_ep", "xdist"):
        stage.add(name, _version(name))
    if not stage.is_cuda:
        return
    properties = torch.cuda.get_device_properties(stage.device)
    stage.add("device", properties.name)
    stage.add("multiprocessors", properties.multi_processor_count)
    stage.add("free memory", torch.cuda.mem_get_info(stage.device)[0] / 2**30, "GiB")
    stage.add("cuDNN", str(torch.backends.cudnn.version()))
    stage.add("NCCL", str(torch.cuda.nccl.version()))


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "absent" if find_spec(name) is None else "present"


def rates(stage: Stage) -> None:
    """Measure the peak rates of the machine, and short operations that a layer repeats."""
    device = stage.device
    n = stage.size(8192, 256)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    stage.add("bfloat16 GEMM", 2 * n**3 / stage.ms(lambda: a @ b) / 1e9, "TFLOP/s")
    wide = a.float()
    stage.add("float32 GEMM", 2 * n**3 / stage.ms(lambda: wide @ wide, 3) / 1e9, "TFLOP/s")
    stage.add("copy", _copy_gbps(stage), "GB/s")
    tokens, hidden, experts = (stage.size(16384, 64), stage.size(2048, 32), stage.size(128, 8))
    x_TH = torch.randn(tokens, hidden, device=device)
    router_EH = torch.randn(experts, hidden, device=device)
    stage.add("float32 router GEMM, 16,384 x 2,048 x 128", stage.ms(lambda: x_TH @ router_EH.t()), "ms")
    for dtype in (torch.int64, torch.int16):
        ids = torch.randint(experts, (tokens * 8,), device=device).to(dtype)
        us = 1e3 * stage.ms(lambda ids=ids: ids.sort(stable=True))
        stage.add(f"stable sort of 131,072 {str(dtype).removeprefix('torch.')}", us, "us")
    rows_RH = torch.randn(tokens * 8, hidden, device=device, dtype=torch.bfloat16)
    order_R = torch.randperm(tokens * 8, device=device)
    mask_R = torch.zeros(tokens * 8, 1, dtype=torch.bool, device=device)
    stage.add("index_select of [131,072, 2,048]", stage.ms(lambda: rows_RH.index_select(0, order_R)), "ms")
    stage.add("masked_fill_ of [131,072, 2,048]", stage.ms(lambda: rows_RH.masked_fill_(mask_R, 0.0)), "ms")
    _permutation_rates(stage, rows_RH, experts)
    scalar = torch.zeros((), device=device)
    launches_ms = stage.host_ms(lambda: [scalar.add_(1) for _ in range(1000)])
    stage.add("host time of a launch", launches_ms, "us")
    if stage.is_cuda:
        _transfer_rates(stage, scalar)


def _copy_gbps(stage: Stage) -> float:
    source = torch.zeros(stage.size(2**32, 2**20), dtype=torch.uint8, device=stage.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / stage.ms(lambda: target.copy_(source)) / 1e6


def _permutation_rates(stage: Stage, rows_RH: Tensor, experts: int) -> None:
    from moefold.model.moe.permute import order_by_expert, plan_permutation, unpermute

    ids_TK = torch.randint(experts, (len(rows_RH) // 8, 8), device=stage.device)
    permutation = plan_permutation(ids_TK, experts)
    stage.add("plan_permutation of 131,072 rows", stage.ms(lambda: plan_permutation(ids_TK, experts)), "ms")
    combine_ms = stage.ms(lambda: unpermute(rows_RH, permutation, None))
    stage.add("combine of 131,072 rows by torch operations", combine_ms, "ms")
    counts_GE = torch.full((8, max(1, experts // 8)), len(rows_RH) // 8 // max(1, experts // 8), device=stage.device)
    total = int(counts_GE.sum())
    stage.add("order_by_expert of 131,072 rows", stage.ms(lambda: order_by_expert(counts_GE, total)), "ms")


def _transfer_rates(stage: Stage, scalar: Tensor) -> None:
    stage.add("number from the device to the host", 1e3 * stage.host_ms(lambda: scalar.item()), "us")
    pinned = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(2**28, dtype=torch.uint8, device=stage.device)
    to_device_ms = stage.ms(lambda: on_device.copy_(pinned, non_blocking=True))
    to_host_ms = stage.ms(lambda: pinned.copy_(on_device, non_blocking=True))
    stage.add("pinned memory to device", 2**28 / to_device_ms / 1e6, "GB/s")
    stage.add("device to pinned memory", 2**28 / to_host_ms / 1e6, "GB/s")


class ComparingAutotuner(Autotuner):
    """Autotuner that times every candidate of every new key and compares its result with the first candidate's.

    Args:
        stage: stage of the measurement.
        title: beginning of the names of the rows.
    """

    def __init__(self, stage: Stage, title: str) -> None:
        super().__init__(is_enabled=True)
        self._stage = stage
        self._title = title
        self._seen: set[object] = set()

    def choose(self, key: TuningKey, candidates: Candidates) -> str:
        """Record the candidates of a new key; return the first."""
        first = next(iter(candidates))
        if key in self._seen:
            return first
        self._seen.add(key)
        expected = candidates[first]()
        for name, run in candidates.items():
            difference = _relative_difference(run(), expected)
            title = f"{self._title}, {key.op} {len(self._seen)}, {name}"
            self._stage.add(title, self._stage.ms(run, 5), "ms", key=repr(key), difference=difference)
            # `not <=`: NaN counts as different.
            if not difference <= MAX_DIFFERENCE:
                self._stage.faults.append(f"{title} differs from {first} by {difference:.1e}")
        return first


def _relative_difference(actual: object, expected: object) -> float:
    """Return the norm of the difference over the norm of the expected tensors, over all tensors of two results."""
    pairs = [
        (a.float(), b.float()) for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True) if b is not None
    ]
    difference = math.sqrt(sum(float((a - b).norm()) ** 2 for a, b in pairs))
    return difference / max(math.sqrt(sum(float(b.norm()) ** 2 for _, b in pairs)), 1e-9)


def products(stage: Stage) -> None:
    """Time every implementation of every GEMM of a layer, and compare their results."""
    # A rehearsal has as many tokens in both layers of a model.
    for preset, tokens in LAYERS[::2] if stage.is_tiny else LAYERS:
        cfg = layer_config(stage, preset, tokens)
        if os.environ.get("TRITON_INTERPRET") == "1":
            cfg = replace(cfg, run=replace(cfg.run, kernels="triton"))
        steps = LayerStep(cfg, "layer", "balanced", stage.device)
        ops = steps.first_moe_layer.experts.ops
        if not hasattr(ops, "autotuner"):
            print(f"{type(ops).__name__} has one implementation; TRITON_INTERPRET=1 interprets the kernels")
            return
        tuner = ComparingAutotuner(stage, f"{preset} {tokens}")
        steps.first_moe_layer.experts.ops = replace(ops, autotuner=tuner)
        steps.build()()
        del steps
        stage.free()


def layer(stage: Stage) -> None:
    """Measure forward and backward of one MoE layer, in our implementation and in others."""
    for preset, tokens in LAYERS:
        for routing in ("balanced", "natural"):
            cfg = layer_config(stage, preset, tokens)
            steps = LayerStep(cfg, "layer", routing, stage.device)
            title = f"{preset} {tokens} {routing}"
            _measure_step(stage, f"{title}, moefold", steps.build(), step_flops(cfg.model, cfg.train, "layer"))
            if routing == "natural":
                _measure_others(stage, title, steps)
            del steps
            stage.free()


def _measure_others(stage: Stage, title: str, steps: LayerStep) -> None:
    references = ReferenceLayerSteps(steps)
    grouped = "grouped_mm" if stage.is_cuda else "loop"
    stage.add(f"{title}, plain torch", stage.ms(references.build_torch_baseline(grouped)), "ms")
    if find_spec("transformers") is not None:
        grouped = "grouped_mm" if stage.is_cuda else "eager"
        stage.add(f"{title}, transformers", stage.ms(references.build_transformers(grouped)), "ms")
    for peer in PEERS:
        try:
            run = references.build_peer(peer)
        except PeerUnavailableError as reason:
            print(f"   {peer.name}: {reason}")
            continue
        stage.add(f"{title}, {peer.name}", stage.ms(run), "ms")


def _measure_step(stage: Stage, title: str, run: Callable[[], object], flops: float) -> None:
    """Add the rows of a step."""
    for _ in range(3):
        run()  # compiles and chooses
    with recorded_waits() as waits:
        run()
    peak_gib = stage.peak_gib(run)
    ms = stage.ms(run)
    host_ms = stage.host_ms(run)
    launches, busy_ms, top = profile(stage, run)
    stage.add(f"{title}", ms, "ms", host_ms=host_ms, busy_ms=busy_ms, top=top)
    stage.add(f"{title}, rate", flops / ms / 1e9, "TFLOP/s")
    stage.add(f"{title}, launches", launches)
    stage.add(f"{title}, host waits", len(waits), lines=waits)
    stage.add(f"{title}, peak memory", peak_gib, "GiB")
    for name, count, kernel_ms in top:
        print(f"   {kernel_ms:9.3f} ms  x{count:<4} {name}")


ATTENTION_CASES = (
    (4096, 32, 4, 128, 128),
    (16384, 32, 4, 128, 128),
    (4096, 128, 128, 192, 192),
    (4096, 128, 128, 192, 128),
)
"""Sequence length, heads, query groups, head sizes of q and k, and of v."""


MAX_PAGES_DIFFERENCE = 1e-2
"""Largest relative difference of two results in bfloat16."""


PAGES_SIZES = ((64, 2), (4000, 300))
"""Rows and keys of decoding, large and small."""


def pages_title(num_rows: int, num_keys: int) -> str:
    """Return the beginning of the names of rows on attention to the pages of a cache."""
    return f"decoding, {num_rows} rows of {num_keys} keys, 32/4 heads of 128"


def attention(stage: Stage) -> None:
    """Time the attention core by each backend of torch, the block kernel of ring attention, and pages of a cache."""
    for seq_len, heads, groups, qk_size, v_size in ATTENTION_CASES:
        title = f"S {seq_len}, {heads}/{groups} heads of {qk_size}/{v_size}"
        if stage.is_tiny:
            seq_len, heads, groups = (64, 4, 4 if heads == groups else 2)
        q, k, v = (
            torch.randn(seq_len, 1, n, size, device=stage.device).to(torch.bfloat16).requires_grad_()
            for n, size in ((heads, qk_size), (groups, qk_size), (groups, v_size))
        )
        flops = seq_len**2 * heads * (qk_size + v_size)
        _sdpa_times(stage, title, (q, k, v), flops)
        if qk_size == v_size:
            _block_times(stage, title, (q, k, v), flops)
        del q, k, v
        stage.free()
    _page_times(stage)


@torch.no_grad()
def _page_times(stage: Stage) -> None:
    """Time attention of decoding to the pages of a cache, read by flash attention and gathered."""
    from moefold.model.layer_cache import PassRows
    from moefold.model.paged_cache import KeyLimits, attend_pages
    from moefold.ops.paged_flash import FlashPages, device_refusal, probe_case

    num_rows, num_keys = (stage.size(*sizes) for sizes in PAGES_SIZES)
    title = pages_title(num_rows, num_keys)
    q, pages, segments = probe_case(((1, num_keys),) * num_rows, stage.device, (32, 4, 128))
    positions = torch.full((num_rows,), num_keys - 1, device=stage.device)
    rows = PassRows(positions, positions, segments.tables_NP, [1] * num_rows, [num_keys - 1] * num_rows)

    def gather() -> Tensor:
        return attend_pages(q, *pages, rows, KeyLimits(), None, None)

    # Keys and values are read once.
    gigabytes = 2 * num_rows * num_keys * 4 * 128 * 2 / 1e9
    ms = stage.ms(gather)
    stage.add(f"{title}, pages gathered", ms, "ms", gb_per_s=gigabytes / ms * 1e3)
    reason = device_refusal(stage.device) if stage.is_cuda else "there is no GPU"
    if reason:
        stage.add(f"{title}, pages read", f"not used, as {reason}")
        return
    read = FlashPages()
    error = (read(q, pages, segments).float() - gather().float()).norm() / gather().float().norm()
    if not error <= MAX_PAGES_DIFFERENCE:
        stage.faults.append(f"{title}: pages that are read and that are gathered differ by {error:.1e}")
    ms = stage.ms(lambda: read(q, pages, segments))
    stage.add(f"{title}, pages read", ms, "ms", gb_per_s=gigabytes / ms * 1e3, error=float(error))


def _sdpa_times(stage: Stage, title: str, qkv: tuple[Tensor, Tensor, Tensor], flops: float) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward() -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    every = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    backends = {"default": every, "cuDNN": every[:1], "flash": every[1:2], "efficient": every[2:3]}
    for name, backend in backends.items():
        try:
            with sdpa_kernel(backend, set_priority=False):
                grad = torch.randn_like(forward())
                forward_ms = stage.ms(forward)
                both_ms = stage.ms(lambda grad=grad: torch.autograd.grad(forward(), qkv, grad))
        except RuntimeError as error:
            print(f"{title}, {name}: {str(error).splitlines()[0][:90]}")
            continue
        _attention_rows(stage, f"{title}, {name}", flops, forward_ms, both_ms - forward_ms)


@torch.no_grad()
def _block_times(stage: Stage, title: str, qkv: tuple[Tensor, Tensor, Tensor], flops: float) -> None:
    from moefold.ops.block_attention import attention_block, attention_block_backward

    out, lse = attention_block(*qkv, block_mask="causal")
    grad = torch.randn_like(out)
    forward_ms = stage.ms(lambda: attention_block(*qkv, block_mask="causal"))
    backward_ms = stage.ms(lambda: attention_block_backward(grad, *qkv, out, lse, block_mask="causal"))
    _attention_rows(stage, f"{title}, ring block", flops, forward_ms, backward_ms)


def _attention_rows(stage: Stage, title: str, flops: float, forward_ms: float, backward_ms: float) -> None:
    stage.add(f"{title}, forward", flops / forward_ms / 1e9, "TFLOP/s", ms=forward_ms)
    # The difference of two times may be negative for tiny tensors.
    stage.add(f"{title}, backward", 2.5 * flops / max(backward_ms, 1e-6) / 1e9, "TFLOP/s", ms=backward_ms)


StepCase = tuple[str, str, int, int, int, dict[str, object]]
"""Name, preset, layers, sequence length, samples, and keys of section train."""
STEPS: tuple[StepCase, ...] = (
    ("qwen3-30b-a3b, 2 layers", "qwen3-30b-a3b", 2, 4096, 4, {}),
    ("qwen3-30b-a3b, 2 layers, loss_chunk 4096", "qwen3-30b-a3b", 2, 4096, 4, {"loss_chunk": 4096}),
    ("qwen3-30b-a3b, 2 layers, loss_chunk -1", "qwen3-30b-a3b", 2, 4096, 4, {"loss_chunk": -1}),
    ("qwen3-30b-a3b, 2 layers, recompute", "qwen3-30b-a3b", 2, 4096, 4, {"recompute": ["norms", "expert_activation"]}),
    ("mixtral-8x22b, 1 layer, 4 samples", "mixtral-8x22b", 1, 4096, 4, {}),
    ("mixtral-8x22b, 1 layer, 1 sample", "mixtral-8x22b", 1, 4096, 1, {}),
)


def step_config(stage: Stage, case: StepCase) -> Config:
    """Return the recipe of a step in bfloat16."""
    from moefold.config.load import config_from_dict
    from moefold.config.presets import load_preset

    _, preset, layers, seq_len, samples, train = case
    model = dict(load_preset(preset)) | {"layers": layers, "mtp_layers": 0}
    if stage.is_tiny:
        model |= {**TINY_LAYER, "vocab_size": 256}
    sizes = {"seq_len": stage.size(seq_len, TINY_TOKENS), "micro_batch_size": samples, "global_batch_size": samples}
    run = {"dtype": "bfloat16", "device": stage.device.type}
    return config_from_dict({"run": run, "model": model, "train": sizes | train, "data": {"kind": "synthetic"}})


def planned_step_s(cfg: Config, device: Device) -> float:
    """Return the seconds of a step that `moefold plan` predicts for the device, with balanced experts."""
    from moefold.planner.cost_model.gemm import resolve_precision
    from moefold.planner.cost_model.step import CostModel
    from moefold.planner.cost_model.workload import workload_from_config
    from moefold.planner.mapping import mapping_from_config
    from moefold.planner.model_spec import model_spec_from_config

    cfg, precision = resolve_precision(cfg, None, device)
    cost_model = CostModel(
        model_spec_from_config(cfg.model), device, workload_from_config(cfg.run, cfg.moe, cfg.train, precision)
    )
    return cost_model.step_time(mapping_from_config(cfg.parallel, cfg.train)).total_s


def plan(stage: Stage) -> None:
    """Plan the steps of the stage `step` with the rates that the stage `probe` measured; runs only on the host."""
    path = stage.rows.parent / "device.toml"
    if not path.exists():
        stage.faults.append(f"{path} is missing; the stage probe writes it")
        return
    device = load_device(str(path))
    for case in STEPS:
        stage.add(f"{case[0]}, planned", planned_step_s(step_config(stage, case), device) * 1e3, "ms")


def step(stage: Stage) -> None:
    """Measure whole training steps of models with few layers."""
    from moefold.comm.groups import ParallelGroups
    from moefold.cost.flops import train_flops_per_token
    from moefold.launch.ranks import init_distributed, single_rank_env
    from moefold.topology.layout import fold

    with init_distributed(single_rank_env(), stage.device.type) as device:
        groups = ParallelGroups.create(fold(world_size=1), device)
        for case in STEPS:
            cfg = step_config(stage, case)
            title = case[0]
            training = build_training_step(cfg, groups)
            batch = random_batch(cfg, device)
            losses = [training.run(batch, number).loss for number in range(1, 6)]
            flops = train_flops_per_token(cfg.model, cfg.train.seq_len, causal=True).total * batch.tokens.numel()
            _measure_step(stage, title, lambda training=training, batch=batch: training.run(batch, 6), flops)
            stage.add(f"{title}, loss after 5 steps over the first", losses[-1] / losses[0])
            if not losses[-1] < losses[0]:
                stage.faults.append(f"{title}: the loss does not fall: {losses}")
            del training, batch
            stage.free()


GRAPHED_TOKENS = (512, 2048)
"""Tokens of a micro-batch that is so small that the host may be slower than the GPU."""
GRAPH_MODES = ("none", "attention", "attention_router", "full")
"""Values of run.cuda_graphs; without a GPU only the first is measured."""
GRAPH_MICRO_BATCHES = 4
MAX_LOSS_DIFFERENCE = 1e-2
"""Largest relative difference between the losses of eager and of replayed steps, in bfloat16."""


def graphs(stage: Stage) -> None:
    """Measure training steps of small micro-batches, eager and replayed from CUDA graphs, and compare their losses."""
    from moefold.comm.groups import ParallelGroups
    from moefold.cost.flops import train_flops_per_token
    from moefold.launch.ranks import init_distributed, single_rank_env
    from moefold.topology.layout import fold

    with init_distributed(single_rank_env(), stage.device.type) as device:
        groups = ParallelGroups.create(fold(world_size=1), device)
        for tokens in GRAPHED_TOKENS:
            expected: list[float] = []
            for mode in GRAPH_MODES if stage.is_cuda else GRAPH_MODES[:1]:
                title = f"qwen3-30b-a3b, 2 layers, {GRAPH_MICRO_BATCHES} x {tokens} tokens, cuda_graphs {mode}"
                train = {"global_batch_size": GRAPH_MICRO_BATCHES}
                cfg = step_config(stage, (title, "qwen3-30b-a3b", 2, tokens, 1, train))
                cfg = replace(cfg, run=replace(cfg.run, cuda_graphs=mode))
                torch.manual_seed(0)
                training = build_training_step(cfg, groups)
                batch = random_batch(cfg, device)
                losses = [training.run(batch, number).loss for number in range(1, 4)]
                expected = expected or losses
                if not all(abs(a - b) <= MAX_LOSS_DIFFERENCE * b for a, b in zip(losses, expected, strict=True)):
                    stage.faults.append(f"{title}: losses {losses}, and {expected} without graphs")
                flops = train_flops_per_token(cfg.model, cfg.train.seq_len, causal=True).total * batch.tokens.numel()
                _measure_step(stage, title, lambda training=training, batch=batch: training.run(batch, 4), flops)
                del training, batch
                stage.free()


def fp8(stage: Stage) -> None:
    """Measure a layer in FP8 and in bfloat16."""
    for preset, tokens in LAYERS[::2]:
        for precision in ("dtype", "fp8-blockwise"):
            cfg = layer_config(stage, preset, tokens, precision=precision)
            run = LayerStep(cfg, "layer", "balanced", stage.device).build()
            stage.add(f"{preset} {tokens}, {precision}", stage.ms(run, 5), "ms", top=profile(stage, run)[2])
            del run
            stage.free()


STAGES: dict[str, Callable[[Stage], None]] = {
    function.__name__: function
    for function in (env, contact, rates, layer, step, attention, constants, shared, graphs, fp8, products, plan)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="make the checks of the stage contact whose names contain this")
    args = parser.parse_args(argv)
    if args.only and args.stage != "contact":
        parser.error(f"--only chooses checks of the stage contact; the stage {args.stage} has none")
    if args.device == "cuda":
        expand_segments()
    torch.manual_seed(0)
    args.rows.write_text("")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    stage = Stage(device, args.tiny, args.rows)
    run = partial(contact, only=args.only) if args.only else STAGES[args.stage]
    run(stage)
    for fault in stage.faults:
        print(f"WRONG: {fault}")
    return 1 if stage.faults else 0


if __name__ == "__main__":
    sys.exit(main())
