"""Parts of our training step: the time of each part and its roofline time on this machine."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefold.bench.our_step import LayerStep, ModelStep, StepFunction, build_layers
from moefold.bench.shape import BenchPart
from moefold.bench.step_bench import StepReport
from moefold.bench.timing import CLOCKS, Clock, PeakRates, synchronized
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import training_weights
from moefold.cost.flops import TRAIN_TO_FORWARD, train_flops_per_token
from moefold.model.moe.dispatch.base import ExpertInput, RoutingMap
from moefold.model.moe.layer import split_zero_experts
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from moefold.model.transformer import TORCH_DTYPES, Transformer, build_model
from moefold.ops.gemm import TORCH_GEMM
from moefold.optim.build import OptimizerRun
from moefold.parallel.gradients import clip_gradients, local_norm_sq

MS_PER_S = 1e3
BARE_GEMM_LOOP = "bare loop of the experts' GEMMs"
EXPERTS = "expert GEMMs"
FUSED_EXPERTS = "expert GEMMs, gather, combine"
"""The experts' part where their operations fuse the permutation, as the Triton kernels do."""
ADAMW_BYTES_PER_WEIGHT = 28
"""Bytes moved per float32 weight: weight, gradient and two moments are read, all but the gradient are written."""


@dataclass(frozen=True)
class StepPart:
    """One part of a step.

    Attributes:
        name: name in the table.
        run: runs the part once, forward and backward.
        times_per_step: executions per step.
        flops: FLOPs of one execution, as counted by `cost.flops`.
        bytes: least bytes read and written by one execution: weights, inputs, outputs and their gradients.
    """

    name: str
    run: Callable[[], object]
    times_per_step: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class PartTime:
    """Time of a part in one step, measured and by roofline, in seconds."""

    name: str
    seconds: float
    floor_s: float

    @property
    def gap(self) -> float:
        """Measured time over roofline time. NaN without a roofline time."""
        return self.seconds / self.floor_s if self.floor_s else float("nan")


def part_time(part: StepPart, median_s: float, peak_rates: PeakRates) -> PartTime:
    """Return the measured and roofline times of a part over a whole step."""
    floor_s = max(part.flops / peak_rates.flops_per_s, part.bytes / peak_rates.bytes_per_s)
    return PartTime(part.name, part.times_per_step * median_s, part.times_per_step * floor_s)


class StepBreakdown:
    """Builds the parts of a shape's step, with their own weights and given hidden states.

    A whole model has float32 weights, which its parts cast; layers have weights in the dtype of the run.

    Args:
        cfg: the recipe.
        part: the benchmarked part: whole model, layer stack or MoE layer.
        device: device of the parts.
        x: input states of the router, [S, B, H], so that it chooses as in the measured step.
        router: weight of the router, [E, H].
    """

    def __init__(self, cfg: Config, part: BenchPart, device: torch.device, x: Tensor, router: Tensor) -> None:
        self._cfg = cfg
        self._part = part
        self._device = device
        self._dtype = TORCH_DTYPES[cfg.run.dtype]
        self._element_bytes = torch.empty((), dtype=self._dtype).element_size()
        self._model = build_layers(cfg, [0], device, is_whole=part == "model")
        self.moe = next(iter(self._model.moe_layers().values()))
        with torch.no_grad():
            self.moe.router.weight.copy_(router)
        self._x = x.to(self._dtype)
        self._x_TH = self._x.flatten(0, 1)
        with torch.no_grad():
            self._positions = TokenPositions(MicroBatchGroup(), len(x), torch.arange(x.shape[1], device=device))
            routing = self.moe.router(self._x_TH, self._positions)
        self.routing_map = RoutingMap(routing.ids_TK, routing.probs_TK.detach().requires_grad_())
        if self.moe.has_zero_experts:
            self.routing_map, _ = split_zero_experts(self.routing_map, cfg.model.experts.num_experts)
        experts = self.moe.experts
        # As in `Dispatcher.run`, for one rank.
        self._applies_probs = experts.applies_probs or (experts.ops.fuses_permutation and experts.ops.probs_commute)
        self._is_fused = experts.ops.fuses_permutation and self._applies_probs and not experts.probs_on_input
        with torch.no_grad():
            _, metadata = self.moe.dispatcher.dispatch_preprocess(self._x_TH, self.routing_map)
        self._rows_per_expert = [int(count) for count in metadata.tokens_per_expert]

    def parts(self) -> list[StepPart]:
        """Return all parts, in the order of a step."""
        layer_parts = [*self._attention_parts(), *self._moe_parts()]
        return [*layer_parts, *self._model_parts()] if self._part == "model" else layer_parts

    def bare_gemm_loop(self) -> Callable[[], object]:
        """Return a function that runs only the expert GEMMs of one layer, forward and backward, in sequence."""
        model = self._cfg.model
        dtype = TORCH_GEMM.upcast(self._x).dtype
        hidden = model.hidden_size
        inner = model.experts.intermediate_size
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        for count in filter(None, self._rows_per_expert):
            rows = TORCH_GEMM.padded_rows(count, self._x)
            shapes = [(rows, hidden, inner), (rows, inner, hidden), (hidden, rows, inner), (inner, rows, hidden)]
            # gate, up, down; gradients of the three inputs; gradients of the three weights.
            for (m, k, n), repeats in zip(shapes, (3, 3, 2, 1), strict=True):
                out, a, b = (torch.randn(size, device=self._device).to(dtype) for size in ((m, n), (m, k), (n, k)))
                calls += repeats * [(out, a, b)]
        allocates_output = TORCH_GEMM.is_faster_than_torch_mm(calls[0][1])
        multiply = (lambda out, a, b: TORCH_GEMM.matmul(a, b)) if allocates_output else TORCH_GEMM.matmul_out

        def run() -> None:
            for out, a, b in calls:
                multiply(out, a, b)

        return run

    @property
    def expert_flops(self) -> float:
        """FLOPs of the experts of one layer, forward and backward."""
        model = self._cfg.model
        return (
            TRAIN_TO_FORWARD
            * 2.0
            * sum(self._rows_per_expert)
            * 3
            * model.hidden_size
            * model.experts.intermediate_size
        )

    def _attention_parts(self) -> Iterator[StepPart]:
        model = self._cfg.model
        layers = self._cfg.model.num_layers
        if self._part == "layer":
            return
        block: Any = next(iter(self._model.layers.values()))
        count = train_flops_per_token(model, self._cfg.train.seq_len, causal=True)
        flops = TRAIN_TO_FORWARD * (count.attention_projections + count.attention_core) / layers
        rotation = self._model.rope
        core = model.decoder_layers[0].core
        heads = (core.heads + core.kv_heads) * core.key_value_width
        # Input, output and both gradients; heads in forward and backward, and their gradients.
        moved_bytes = self._tokens * (4 * model.hidden_size + 3 * heads) * self._element_bytes + self._weight_bytes(
            block.attention
        )
        yield StepPart(
            "attention",
            _forward_backward(lambda x: block.attention(x, rotation), self._x, block.attention),
            layers,
            flops * self._tokens,
            moved_bytes,
        )
        norm = block.attention_norm
        num_norms = 2 * layers + (self._part == "model")
        yield StepPart(
            "norms", _forward_backward(norm, self._x, norm), num_norms, 0, 5 * self._x.numel() * self._element_bytes
        )

    def _moe_parts(self) -> Iterator[StepPart]:
        moe = self.moe
        model = self._cfg.model
        layers = self._cfg.model.num_layers
        tokens_bytes = self._x.numel() * self._element_bytes
        rows_bytes = sum(self._rows_per_expert) * model.hidden_size * self._element_bytes
        router_flops = TRAIN_TO_FORWARD * 2 * self._tokens * model.hidden_size * model.experts.num_experts
        router = _forward_backward(self._route, self._x_TH, moe.router)
        yield StepPart("router", router, layers, router_flops, 3 * tokens_bytes + self._weight_bytes(moe.router))
        yield from self._permutation_and_expert_parts(tokens_bytes, rows_bytes)
        if moe.shared is not None:
            count = train_flops_per_token(model, self._cfg.train.seq_len)
            yield StepPart(
                "shared experts",
                _forward_backward(moe.run_shared_expert, self._x, moe.shared),
                layers,
                TRAIN_TO_FORWARD * self._tokens * count.shared_experts / layers,
                4 * tokens_bytes + self._weight_bytes(moe.shared),
            )

    def _permutation_and_expert_parts(self, tokens_bytes: int, rows_bytes: int) -> Iterator[StepPart]:
        """Yield the permutation, the experts and the combine by the calls of `Dispatcher.run`."""
        moe = self.moe
        model = self._cfg.model
        layers = model.num_layers
        probs_bytes = 4 * self.routing_map.ids_TK.numel()
        inner_bytes = 3 * sum(self._rows_per_expert) * model.experts.intermediate_size * self._element_bytes
        experts_bytes = 2 * inner_bytes + self._weight_bytes(moe.experts)
        rows, metadata = moe.dispatcher.dispatch_preprocess(self._x_TH, self.routing_map)
        probs_R = None
        if self._applies_probs:
            probs_R, metadata = moe.dispatcher.dispatch_probs(metadata)
            probs_R = probs_R.detach().requires_grad_()
        counts = metadata.tokens_per_expert
        if self._is_fused:
            permute_map = moe.dispatcher.permute_map(metadata)
            yield StepPart("plan of the permutation", self._run_plan, layers, 0, 2 * probs_bytes)
            yield StepPart(
                FUSED_EXPERTS,
                _forward_backward(
                    lambda x: moe.experts(ExpertInput(x, counts, probs_R, permute_map)),
                    self._x_TH,
                    moe.experts,
                    probs_R,
                ),
                layers,
                self.expert_flops,
                4 * tokens_bytes + experts_bytes,
            )
            return
        permutation = _forward_backward(self._dispatch, self._x_TH, None)
        yield StepPart("permutation", permutation, layers, 0, 2 * (tokens_bytes + rows_bytes))
        x_RH = moe.dispatcher.dispatch_postprocess(rows, metadata).detach()
        yield StepPart(
            EXPERTS,
            _forward_backward(lambda x: moe.experts(ExpertInput(x, counts, probs_R)), x_RH, moe.experts, probs_R),
            layers,
            self.expert_flops,
            4 * rows_bytes + experts_bytes,
        )
        probs_TK = self.routing_map.probs_TK
        combine = _forward_backward(lambda y_RH: moe.dispatcher.combine(y_RH, metadata), x_RH, None, probs_TK)
        yield StepPart("combine", combine, layers, 0, 2 * tokens_bytes + 3 * rows_bytes)

    def _dispatch(self, x_TH: Tensor) -> Tensor:
        """Permute the tokens, and plan it first; with the probabilities if the experts apply them."""
        rows, metadata = self.moe.dispatcher.dispatch_preprocess(x_TH, self.routing_map)
        rows_RH = self.moe.dispatcher.dispatch_postprocess(rows, metadata)
        if self._applies_probs:
            self._run_probs(metadata)
        return rows_RH

    def _run_plan(self) -> None:
        """Plan the permutation that the experts fuse, and permute the probabilities, forward and backward."""
        _, metadata = self.moe.dispatcher.dispatch_preprocess(self._x_TH, self.routing_map)
        self.moe.dispatcher.permute_map(metadata)
        self._run_probs(metadata)

    def _run_probs(self, metadata: Any) -> None:
        probs_R, _ = self.moe.dispatcher.dispatch_probs(metadata)
        torch.autograd.backward(probs_R, torch.ones_like(probs_R))
        self.routing_map.probs_TK.grad = None

    def _model_parts(self) -> Iterator[StepPart]:
        model = self._cfg.model
        cfg = self._cfg
        labels = torch.randint(model.vocab_size, (len(self._x), self._x.shape[1]), device=self._device)
        tokens = labels.t().contiguous()
        head = self._model.head
        embedding = self._model.embedding
        tied = embedding.weight if model.tie_embeddings else None
        logits_bytes = self._tokens * model.vocab_size * 4
        yield StepPart(
            "loss",
            _forward_backward(lambda x: head.losses(x, tied, labels).loss.mean(), self._x, head),
            1,
            TRAIN_TO_FORWARD * 2 * self._tokens * model.hidden_size * model.vocab_size,
            3 * logits_bytes + self._weight_bytes(head),
        )
        yield StepPart(
            "embedding",
            lambda: _backward(embedding(tokens), embedding),
            1,
            0,
            2 * self._x.numel() * (self._element_bytes + 4) + embedding.weight.numel() * 4,
        )
        parameters = dict(self._full_model().named_parameters())
        run = OptimizerRun(training_weights(cfg.model, cfg.lora), None, cfg.train.lr, cfg.run.seed)
        optimizer = chosen_in(TrainConfig(), OptimizerPart).build(parameters, run)
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-3)

        def update() -> None:
            norm = local_norm_sq(parameters).sqrt()
            clip_gradients(parameters, norm, cfg.train.clip_grad)
            optimizer.step()

        count = sum(parameter.numel() for parameter in parameters.values())
        yield StepPart("optimizer", update, 1, 0, ADAMW_BYTES_PER_WEIGHT * count)

    def _full_model(self) -> Transformer:
        model = build_model(self._cfg)
        return model.to(self._device)

    def _route(self, x_TH: Tensor) -> Tensor:
        """Run the router with its auxiliary losses and return a scalar for the backward pass."""
        moe = self.moe
        positions = self._positions
        routing = moe.router(x_TH, positions)
        y = moe.losses.attach(routing.probs_TK, routing, None, positions, moe.last_counts_E)
        return y.sum()

    @property
    def _tokens(self) -> int:
        return len(self._x_TH)

    def _weight_bytes(self, module: nn.Module) -> int:
        """Return the bytes of reading weights in forward and backward, and of writing their gradients."""
        return sum(3 * p.numel() * p.element_size() for p in module.parameters())


def _forward_backward(
    forward: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module | None, probs: Tensor | None = None
) -> Callable[[], object]:
    """Return a function that runs forward and backward. Gradients of x, the module and `probs` are not accumulated."""
    leaf = x.detach().requires_grad_()
    # Allocated once: the output gradient is the work of the following part.
    grad = torch.ones_like(forward(leaf))

    def run() -> None:
        _backward(forward(leaf), module, grad)
        leaf.grad = None
        if probs is not None:
            probs.grad = None

    return run


def _backward(y: Tensor, module: nn.Module | None, grad: Tensor | None = None) -> None:
    torch.autograd.backward(y, torch.ones_like(y) if grad is None else grad)
    for parameter in () if module is None else module.parameters():
        parameter.grad = None


def bare_loop_ratio(parts: Sequence[PartTime], bare_s: float, layers: int) -> float:
    """Return the speed of the expert part relative to the bare loop of its GEMMs."""
    experts_s = next(part.seconds for part in parts if part.name in (EXPERTS, FUSED_EXPERTS))
    return layers * bare_s / experts_s


MIN_STEP_S = 1e-5
"""Time that the clock may show for a shorter step."""
MIN_TIMED_S = 5e-3
"""Shortest time that is measured without repeats: a wait for a GPU costs the host tens of microseconds."""


@dataclass(frozen=True)
class RepeatedStep:
    """Step that runs several times in a row and waits for the device once."""

    run: Callable[[], None]
    repeats: int


def repeat_short_step(
    step: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter
) -> RepeatedStep:
    """Repeat a step inside one wait for the device until it takes about `MIN_TIMED_S`. Runs it twice to find out."""
    single = synchronized(step, device)
    # Compiles.
    single()
    started_s = clock()
    single()
    seconds = clock() - started_s
    repeats = max(1, math.ceil(MIN_TIMED_S / max(seconds, MIN_STEP_S)))

    def run() -> None:
        for _ in range(repeats):
            step()

    return RepeatedStep(synchronized(run, device), repeats)


def _step_breakdown(ours: ModelStep | LayerStep, run: StepFunction) -> StepBreakdown:
    """Build the breakdown with the input states of the first router in our step."""
    inputs: list[Tensor] = []
    router = ours.first_moe_layer.router
    handle = router.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    run()
    handle.remove()
    x = inputs[0].view(ours.cfg.train.seq_len, ours.cfg.train.global_batch_size, -1)
    return StepBreakdown(ours.cfg, ours.part, ours.device, x, router.weight.detach())


class PartsTimer:
    """Parts of our step and the bare loop of the experts' GEMMs, to be timed in the rounds of `measure_step`.

    Args:
        ours: our step.
        run: return value of `ours.build()`.
        clock: name of the clock of the rounds.
    """

    def __init__(self, ours: ModelStep | LayerStep, run: StepFunction, clock: str) -> None:
        breakdown = _step_breakdown(ours, run)
        self._layers = ours.cfg.model.num_layers
        self._parts = breakdown.parts()
        self._repeated = [repeat_short_step(part.run, ours.device, CLOCKS[clock]) for part in self._parts]
        self._bare_loop = synchronized(breakdown.bare_gemm_loop(), ours.device)

    @property
    def kernels(self) -> dict[str, Callable[[], None]]:
        """Functions to time, by name."""
        parts = zip(self._parts, self._repeated, strict=True)
        return {BARE_GEMM_LOOP: self._bare_loop, **{_part_key(part): repeated.run for part, repeated in parts}}

    def part_times(self, report: StepReport) -> list[PartTime]:
        """Return the time of each part from the report of the rounds."""
        rates = PeakRates(report.gemm_tflops * 1e12, report.copy_gbps * 1e9)
        return [
            part_time(part, report.kernels_s[_part_key(part)] / repeated.repeats, rates)
            for part, repeated in zip(self._parts, self._repeated, strict=True)
        ]

    def experts_of_bare_loop(self, report: StepReport) -> float:
        """Return the speed of our experts relative to the bare loop of their GEMMs."""
        return bare_loop_ratio(self.part_times(report), report.kernels_s[BARE_GEMM_LOOP], self._layers)


def _part_key(part: StepPart) -> str:
    return f"part: {part.name}"


def part_lines(parts: Sequence[PartTime], step_s: float, experts_of_bare_loop: float) -> list[str]:
    """Return the table of the parts of a step that takes `step_s` seconds."""
    lines = [f"{'part of our step, by itself':30}  {'ms':>8}  {'of step':>7}  {'floor ms':>8}  {'gap':>6}"]
    for part in parts:
        gap = f"{part.gap:5.1f}x" if part.floor_s else "     -"
        lines.append(
            f"  {part.name:28}  {part.seconds * MS_PER_S:8.2f}  {part.seconds / step_s:7.1%}  "
            f"{part.floor_s * MS_PER_S:8.2f}  {gap:>6}"
        )
    rest_s = step_s - sum(part.seconds for part in parts)
    lines.append(f"  {'the rest of the step':28}  {rest_s * MS_PER_S:8.2f}  {rest_s / step_s:7.1%}")
    lines.append("  dispatch, collectives: none on one rank; see benchmarks/dispatch_phases.py and rank_times.py")
    lines.append(f"experts at {experts_of_bare_loop:.0%} of the rate of a bare loop of their GEMMs")
    return lines
