"""First contact with a GPU: each kernel and library call at a real size next to float64, then whole layers.

A stage of benchmarks/gpu_stages.py that comes before all measurements, because rates of wrong results are worthless. A
check that fails or raises does not stop the others, unless CUDA lost its context.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_stage import Stage, layer_config, recorded_waits
from moefold.bench.our_step import LayerStep
from moefold.bench.shape import step_flops
from moefold.ops.expert_ops import ExpertWeights, GatheredRows
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.grouped_experts import GroupedExpertOps

REFERENCE = GroupedExpertOps()
LAYERS = (("qwen3-30b-a3b", 4096), ("mixtral-8x22b", 4096))
BF16_LIMIT = 1e-2
"""Largest relative difference of a bfloat16 result from float64; a rounding of each value gives 3e-3."""
ROUNDED_TWICE_LIMIT = 2e-2
LAYER_LIMIT = 3e-2
FP8_LIMIT = 6e-2
"""The same with operands in e4m3, whose 3 bits of mantissa round to 6e-2 at most and to 3e-2 in the mean."""
WIRE_LIMIT = 4e-2
FLOAT32_LIMIT = 1e-4
EXACT_FLOAT32_LIMIT = 1e-5
LOG_SUM_LIMIT = 1e-1
"""Largest difference of a log-sum-exp of bfloat16 scores."""
FC1_RESULTS = ("g_RF", "u_RF", "hidden_RF")
LOST_CONTEXT = ("CUDA error", "AcceleratorError")


class LostContextError(Exception):
    """Error of a process whose CUDA context is lost. Every further call fails too."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor, in float64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@dataclass
class Contact:
    """The checks of a stage: their rows and faults.

    Attributes:
        stage: stage of the rows.
        only: part of the names of the checks to make; "" for all.
        name: name of the running check.
    """

    stage: Stage
    only: str = ""
    name: str = ""

    def check(self, name: str, run: Callable[[], None]) -> None:
        """Run a check. An exception is a fault.

        Raises:
            LostContextError: no other check can run.
        """
        if self.only not in name:
            return
        self.name = name
        try:
            run()
            self.stage.synchronize()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            self.stage.add(name, f"raises {text}", lines=_lines(error))
            self.stage.faults.append(f"{name} raises {text} at {', '.join(_lines(error))}")
            if any(sign in text for sign in LOST_CONTEXT):
                raise LostContextError(name) from error

    def close(self, quantity: str, actual: Tensor, expected: Tensor, limit: float = BF16_LIMIT) -> None:
        """Compare two tensors by the relative norm of their difference."""
        self.below(quantity, relative_error(actual, expected), limit)

    def below(self, quantity: str, error: float, limit: float) -> None:
        """Add an error, and a fault if it exceeds its limit."""
        title = f"{self.name}, {quantity}"
        self.stage.add(title, error, limit=limit)
        # `not <=`: NaN counts as wrong.
        if not error <= limit:
            self.stage.faults.append(f"{title}: error {error:.1e}, at most {limit:g}")

    def time(self, quantity: str, run: Callable[[], object]) -> None:
        """Add the milliseconds of a call; a CPU adds no row."""
        if self.stage.is_cuda:
            self.stage.add(f"{self.name}, {quantity}", self.stage.ms(run, 5), "ms")


def _lines(error: Exception) -> list[str]:
    """Return the last three lines of a traceback, as "layer.py:120"."""
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-3:]]


class ExpertCase:
    """Tensors of grouped products of a Qwen3-30B-A3B layer, with two empty experts, and final rows without an expert.

    Args:
        stage: device and sizes.

    Attributes:
        sizes: experts, hidden size, size inside an expert, rows, tokens.
        offsets_E: ends of the rows of each expert, int32.
        used: rows of all experts.
        source_R: token of each row, -1 for a row of zeros.
        rows: rows of the experts, not yet gathered.
        probs_R: weight of each row, float32.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.sizes = (8, 32, 48, 64, 16) if stage.is_tiny else (128, 2048, 768, 16384, 4096)
        experts, hidden, inner, rows, tokens = self.sizes
        odds_E = torch.rand(experts, device=stage.device) + 0.05
        counts_E = torch.multinomial(odds_E, rows, replacement=True).bincount(minlength=experts)
        counts_E[1] = 0
        counts_E[-1] = 0
        self.offsets_E = counts_E.cumsum(0).to(torch.int32)
        self.used = int(self.offsets_E[-1])
        gate_EHF, up_EHF = (self.random(experts, hidden, inner, scale=0.03) for _ in range(2))
        self.weights = ExpertWeights(gate_EHF, up_EHF, self.random(experts, inner, hidden, scale=0.03))
        self.x_TH = self.random(tokens, hidden)
        self.source_R = torch.randint(-1, tokens, (rows,), device=stage.device, dtype=torch.int32)
        self.rows = GatheredRows(self.x_TH, self.source_R)
        self.inner_RF = self.random(rows, inner)
        self.grad_RH = self.random(rows, hidden)
        self.probs_R = torch.rand(rows, device=stage.device)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return random numbers in bfloat16."""
        return (torch.randn(*shape, device=self.stage.device) * scale).to(torch.bfloat16)

    def nan(self, *shape: int) -> Tensor:
        """Return a tensor of only wrong values."""
        return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.stage.device)

    def product(self, x: GatheredRows | Tensor, w_EKN: Tensor) -> Tensor:
        """Return the grouped product in float64, of the rows of experts."""
        dense = x.materialized if isinstance(x, GatheredRows) else x
        return REFERENCE.grouped_gemm(GatheredRows(dense.double()), w_EKN.double(), self.offsets_E)[: self.used]

    def weight_gradient(self, x_RK: Tensor, grad_RN: Tensor) -> Tensor:
        """Return the gradient of the weights in float64."""
        return REFERENCE.weight_gradient(GatheredRows(x_RK.double()), GatheredRows(grad_RN.double()), self.offsets_E)


def check_grouped_gemms(contact: Contact, case: ExpertCase) -> None:
    """Check each tile size of the grouped GEMMs: gathered, transposed with a second pair, scattered; and gradients."""
    from moefold.ops.triton import grouped_gemm as kernels

    experts, hidden, inner, rows, _ = case.sizes
    gate, up, down = (case.weights.gate_EHF, case.weights.up_EHF, case.weights.down_EFH)
    run = kernels.grouped_gemm
    for tile in _tiles(case.stage, kernels.TILE_CONFIGS_16_BIT):
        options = {"tile_config": tile}

        def gathered(options: dict = options) -> None:
            out = run(case.x_TH, gate, case.offsets_E, source_R=case.source_R, out=case.nan(rows, inner), **options)
            contact.close("y", out[: case.used], case.product(case.rows, gate))
            contact.time("time", lambda: run(case.x_TH, gate, case.offsets_E, source_R=case.source_R, **options))

        def transposed(options: dict = options) -> None:
            first, other = (gate.transpose(1, 2), up.transpose(1, 2))
            second_RF = case.inner_RF.flip(0).contiguous()
            out = case.nan(rows, hidden)
            run(case.inner_RF, first, case.offsets_E, second=(second_RF, other), out=out, **options)
            expected = case.product(case.inner_RF, first) + case.product(second_RF, other)
            contact.close("y", out[: case.used], expected)

        def scattered(options: dict = options) -> None:
            target_R = torch.randperm(rows, device=case.stage.device).to(torch.int32)
            y = run(case.inner_RF, down, case.offsets_E, target_R=target_R, **options)
            contact.close("y", y[target_R.long()][: case.used], case.product(case.inner_RF, down))

        def gradient(options: dict = options) -> None:
            inputs = (case.inner_RF, case.grad_RH, case.offsets_E)
            gradient = kernels.grouped_gemm_weight_grad(*inputs, out=case.nan(experts, inner, hidden), **options)
            contact.close("weights", gradient, case.weight_gradient(case.inner_RF, case.grad_RH))
            contact.time("time", lambda: kernels.grouped_gemm_weight_grad(*inputs, **options))

        size = f"{tile.block_m}x{tile.block_n}"
        contact.check(f"grouped GEMM {size}, gathers", gathered)
        contact.check(f"grouped GEMM {size}, transposed, two pairs", transposed)
        contact.check(f"grouped GEMM {size}, scatters", scattered)
        contact.check(f"weight gradient {size}", gradient)


def _tiles(stage: Stage, tiles: Iterable) -> Iterable:
    """Return the tile sizes of a GPU; in the interpreter a small one."""
    from moefold.ops.triton.grouped_gemm import INTERPRETER_TILE_CONFIG

    return tiles if stage.is_cuda else (INTERPRETER_TILE_CONFIG,)


def check_fc1(contact: Contact, case: ExpertCase) -> None:
    """Check each tile size of the first products with their activation."""
    from moefold.ops.triton import fc1 as kernels

    for tile in _tiles(case.stage, kernels.TILE_CONFIGS_16_BIT):

        def run(tile: object = tile) -> None:
            out = kernels.Fc1Output(**{name: case.nan(*case.inner_RF.shape) for name in FC1_RESULTS})
            inputs = (case.x_TH, case.weights, case.offsets_E, out)

            def call() -> None:
                kernels.fc1(*inputs, source_R=case.source_R, probs_R=case.probs_R, tile_config=tile)

            call()
            weights = (case.weights.gate_EHF, case.weights.up_EHF)
            gate_RF, up_RF = (case.product(case.rows, w_EHF) for w_EHF in weights)
            expected = F.silu(gate_RF) * up_RF * case.probs_R.double()[: case.used, None]
            contact.close("gate", out.g_RF[: case.used], gate_RF)
            contact.close("up", out.u_RF[: case.used], up_RF)
            contact.close("hidden", out.hidden_RF[: case.used], expected, ROUNDED_TWICE_LIMIT)
            contact.time("time", call)

        contact.check(f"fc1 {tile.block_m}x{tile.block_n}", run)


def check_torch_grouped_mm(contact: Contact, case: ExpertCase) -> None:
    """Check torch's grouped GEMM with empty experts, where its result takes memory that held NaN."""
    from moefold.ops.torch_experts import GroupedMMExpertOps

    ops = GroupedMMExpertOps()
    gate, down = (case.weights.gate_EHF, case.weights.down_EFH)

    def run() -> None:
        inner = GatheredRows(case.inner_RF)
        grad = GatheredRows(case.grad_RH)
        y = ops.grouped_gemm(case.rows, gate, case.offsets_E)
        contact.close("y", y[: case.used], case.product(case.rows, gate))
        y = ops.grouped_gemm(inner, gate.transpose(1, 2), case.offsets_E)
        contact.close("transposed", y[: case.used], case.product(case.inner_RF, gate.transpose(1, 2)))
        del y
        junk = case.nan(*down.shape)
        del junk
        gradient = ops.weight_gradient(inner, grad, case.offsets_E)
        contact.close("weights", gradient, case.weight_gradient(case.inner_RF, case.grad_RH))
        contact.time("time", lambda: ops.grouped_gemm(inner, down, case.offsets_E))
        contact.time("time of weights", lambda: ops.weight_gradient(inner, grad, case.offsets_E))

    contact.check("torch grouped_mm", run)


def check_activation_and_combine(contact: Contact, case: ExpertCase) -> None:
    """Check the activation with its gradients, and the sum of the rows of each token."""
    from moefold.ops.triton import grouped_gemm as gemms
    from moefold.ops.triton import swiglu as kernels

    rows, inner = case.inner_RF.shape

    def activation() -> None:
        gate, up, grad = (case.random(rows, inner) for _ in range(3))
        outputs = (kernels.activation_forward(gate, up, case.probs_R, None),)
        outputs += tuple(kernels.activation_backward(grad, gate, up, case.probs_R, None)[1:4])
        leaves = [x.double().requires_grad_() for x in (gate, up, case.probs_R)]
        y = F.silu(leaves[0]) * leaves[1] * leaves[2][:, None]
        y.backward(grad.double())
        expected = (y.detach(), *(x.grad for x in leaves))
        for name, a, b in zip(("y", "gradient of gate", "of up", "of probs"), outputs, expected, strict=True):
            contact.close(name, a, b)
        contact.time("time", lambda: kernels.activation_backward(grad, gate, up, case.probs_R, None))

    def combine() -> None:
        top_k = case.stage.size(8, 2)
        order_TK = torch.randperm(rows, device=case.stage.device).view(-1, top_k)
        y_RH = case.random(*case.grad_RH.shape)
        probs_TK = torch.rand(order_TK.shape, device=case.stage.device)
        expected = (y_RH.double()[order_TK] * probs_TK.double()[..., None]).sum(1)
        contact.close("weighed", gemms.combine_rows(y_RH, order_TK, None, probs_TK), expected)
        expected = (y_RH.double() + case.grad_RH.double())[order_TK].sum(1)
        contact.close("of two", gemms.combine_rows(y_RH, order_TK, second_RH=case.grad_RH), expected)
        contact.time("time", lambda: gemms.combine_rows(y_RH, order_TK, None, probs_TK))

    contact.check("activation", activation)
    contact.check("combine", combine)


def check_router(contact: Contact, case: ExpertCase) -> None:
    """Check the router kernel and its gradient."""
    from moefold.ops.triton.router import RouterOptions, route_backward, route_forward

    def run() -> None:
        experts, _, _, _, tokens = case.sizes
        top_k = case.stage.size(8, 2)
        logits_TE = torch.randn(tokens, experts, device=case.stage.device)
        options = RouterOptions(top_k, True, True, False, 1.0)
        routed = route_forward(logits_TE, None, options)
        exact_TE = logits_TE.double().requires_grad_()
        top = exact_TE.topk(top_k, -1)
        probs_TK = top.values.softmax(-1)
        grad_TK = torch.randn(tokens, top_k, device=case.stage.device)
        probs_TK.backward(grad_TK.double())
        grad_TE = route_backward(logits_TE, routed.ids_TK, (grad_TK, None, None, None), options)
        contact.below("wrong experts", _share_of_others(routed.ids_TK, top.indices), 0.0)
        counts_E = routed.ids_TK.flatten().bincount(minlength=experts)
        contact.below("wrong counts", float((routed.tokens_per_expert_E - counts_E).abs().max()), 0.0)
        contact.close("probs", routed.probs_TK, probs_TK.detach(), FLOAT32_LIMIT)
        contact.close("scores", routed.scores_TE, logits_TE.double().softmax(-1), FLOAT32_LIMIT)
        contact.close("gradient", grad_TE, exact_TE.grad, FLOAT32_LIMIT)
        contact.time("time", lambda: route_forward(logits_TE, None, options))

    contact.check("router", run)


def _share_of_others(actual: Tensor, expected: Tensor) -> float:
    """Return the share of indices that differ, whatever their order in a row."""
    return float((actual.long().sort(-1).values != expected.long().sort(-1).values).double().mean())


def check_cross_entropy(contact: Contact, case: ExpertCase) -> None:
    """Check the log-sum-exp of logits and their gradient, with an ignored label."""
    from moefold.ops.triton.cross_entropy import TritonCrossEntropyOps

    def run() -> None:
        tokens, vocab = (case.stage.size(512, 6), case.stage.size(151_936, 100))
        logits_CV = case.random(tokens, vocab, scale=3.0)
        labels_C = torch.randint(vocab, (tokens,), device=case.stage.device)
        labels_C[0] = -1
        grads_2C = torch.rand(2, tokens, device=case.stage.device)
        ops = TritonCrossEntropyOps()
        statistics = ops.statistics(logits_CV, labels_C)
        lse_C = logits_CV.double().logsumexp(-1)
        expected_CV = logits_CV.double().softmax(-1) * grads_2C.double().sum(0)[:, None]
        expected_CV[torch.arange(1, tokens), labels_C[1:]] -= grads_2C[0, 1:].double()
        found_CV = logits_CV.clone()
        ops.gradient_out(found_CV, found_CV, labels_C, lse_C.float(), grads_2C)
        top_C, sum_C, *_ = statistics
        contact.below("log-sum-exp", float((top_C.double() + sum_C.double().log() - lse_C).abs().max()), FLOAT32_LIMIT)
        contact.close("gradient", found_CV, expected_CV)
        contact.time("time", lambda: ops.statistics(logits_CV, labels_C))

    contact.check("cross entropy", run)


def check_rope(contact: Contact, case: ExpertCase) -> None:
    """Check rotary embeddings of halves and of pairs."""
    from moefold.ops.rope import rotate_pairs
    from moefold.ops.triton.rope import apply_rope

    def run() -> None:
        seq_len, heads, size = (6, 3, 16) if case.stage.is_tiny else (1024, 32, 128)
        x_SBAD = case.random(seq_len, 2, heads, size)
        angles = (torch.rand(seq_len, 1, 1, size // 2, device=case.stage.device) * 6).repeat(1, 1, 1, 2)
        cos, sin = (y.to(torch.bfloat16) for y in (angles.cos(), angles.sin()))
        for name, is_interleaved in (("halves", False), ("pairs", True)):
            expected = rotate_pairs(x_SBAD.double(), cos.double(), sin.double(), is_interleaved=is_interleaved)
            contact.close(name, apply_rope(x_SBAD, cos, sin, is_interleaved=is_interleaved), expected)

    contact.check("rope", run)


def check_dense_gemms(contact: Contact, case: ExpertCase) -> None:
    """Check products with float32 results: the router's in parts, and sums into float32 gradients."""
    from moefold.ops.split_gemm import upcast_linear

    experts, hidden = case.sizes[:2]

    def split() -> None:
        x_TH = case.x_TH.clone().requires_grad_()
        w_EH = torch.randn(experts, hidden, device=case.stage.device, requires_grad=True)
        exact = [leaf.detach().double().requires_grad_() for leaf in (x_TH, w_EH)]
        y_TE = upcast_linear(x_TH, w_EH)
        grad_TE = torch.randn_like(y_TE)
        y_TE.backward(grad_TE)
        exact_TE = exact[0] @ exact[1].t()
        exact_TE.backward(grad_TE.double())
        contact.close("y", y_TE.detach(), exact_TE.detach(), EXACT_FLOAT32_LIMIT)
        contact.close("weights", w_EH.grad, exact[1].grad, EXACT_FLOAT32_LIMIT)
        contact.close("gradient of x", x_TH.grad, exact[0].grad)
        contact.time("time", lambda: upcast_linear(x_TH.detach(), w_EH.detach()))

    def wide() -> None:
        w_NH = case.random(512, hidden)
        grad_TN = case.random(len(case.x_TH), 512)
        total_NH = torch.ones(512, hidden, device=case.stage.device)
        TORCH_GEMM.add_weight_gradient(total_NH, grad_TN, case.x_TH)
        # A CPU rounds the product to bfloat16.
        limit = EXACT_FLOAT32_LIMIT if case.stage.is_cuda else BF16_LIMIT
        x_TH = case.x_TH.double()
        contact.close("y", TORCH_GEMM.matmul_fp32(case.x_TH, w_NH), x_TH @ w_NH.double().t(), limit)
        contact.close("sum", total_NH, grad_TN.double().t() @ x_TH + 1, limit)

    contact.check("router GEMM in parts", split)
    contact.check("GEMM into float32", wide)


def check_fp8(contact: Contact, case: ExpertCase) -> None:
    """Check grouped GEMMs with e4m3 operands, and rows packed for dispatch."""
    from moefold.ops.triton import wire_format
    from moefold.ops.triton.fp8_gemm import Fp8ExpertOps

    experts, hidden, inner, rows, _ = case.sizes

    def gemms() -> None:
        ops = Fp8ExpertOps(case.stage.size(128, 16))
        x_RH = case.random(rows, hidden)
        w_EHF = case.random(experts, hidden, inner)
        grad_RF = case.random(rows, inner)
        x, grad = (GatheredRows(x_RH), GatheredRows(grad_RF))
        y_RF = ops.grouped_gemm(x, w_EHF, case.offsets_E)
        contact.close("y", y_RF[: case.used], case.product(x_RH, w_EHF), FP8_LIMIT)
        gradient = ops.weight_gradient(x, grad, case.offsets_E)
        contact.close("weights", gradient, case.weight_gradient(x_RH, grad_RF), FP8_LIMIT)
        contact.time("time", lambda: ops.grouped_gemm(x, w_EHF, case.offsets_E))
        contact.time("time of weights", lambda: ops.weight_gradient(x, grad, case.offsets_E))

    def wire() -> None:
        packed = wire_format.pack_rows(case.x_TH)
        contact.close("rows", wire_format.unpack_rows(packed, hidden, torch.bfloat16), case.x_TH, WIRE_LIMIT)

    contact.check("fp8 grouped GEMM", gemms)
    contact.check("fp8 dispatch", wire)


def check_top_k(contact: Contact, case: ExpertCase) -> None:
    """Check the exact top-k of sparse attention, with and without a guess."""
    from moefold.ops.exact_topk import sorted_topk
    from moefold.ops.triton.exact_topk import triton_exact_topk

    def run() -> None:
        rows, keys, top_k = (2, 60, 8) if case.stage.is_tiny else (64, 8192, 512)
        scores = torch.randn(rows, keys, device=case.stage.device)
        guess = torch.randint(keys, (rows, top_k), device=case.stage.device, dtype=torch.int32)
        for name, hint in (("no guess", None), ("guess", guess)):
            selected = triton_exact_topk(scores, top_k, None, None, hint)[0]
            contact.below(f"wrong keys, {name}", _share_of_others(selected, sorted_topk(scores, top_k)), 0.0)

    contact.check("exact top-k", run)


def check_linear_attention(contact: Contact, case: ExpertCase) -> None:
    """Check the chunked scans of linear attention: with the delta rule, and with a decay of each channel."""
    from moefold.ops.linear_attention import prepare_chunks
    from moefold.ops.triton.linear_attention import TritonLinearAttention

    seq_len, heads, size = (40, 2, 16) if case.stage.is_tiny else (512, 8, 128)

    def run(has_delta: bool) -> None:
        def random(*shape: int) -> Tensor:
            return torch.rand(seq_len, 1, heads, *shape, device=case.stage.device)

        inputs = [F.normalize(random(size) - 0.5, dim=-1) for _ in range(3)]
        inputs.append(-0.2 * random(1 if has_delta else size))
        inputs += [random()] if has_delta else []
        output = TritonLinearAttention().prepare(inputs, None, 64).attend(None)[0]
        expected = prepare_chunks([x.double() for x in inputs], None, 64).attend(None)[0]
        contact.close("y", output, expected, FLOAT32_LIMIT)

    contact.check("linear attention, delta rule", lambda: run(True))
    contact.check("linear attention, gated", lambda: run(False))


def check_attention(contact: Contact, case: ExpertCase) -> None:
    """Check the attention kernels of libraries, forward and backward: whole, causal, in a window, in documents."""
    from moefold.ops.block_attention import CudaFlash, FlashMask, MathBlockAttention
    from moefold.ops.cudnn_attention import CudnnAttention
    from moefold.ops.documents import Segments

    device = case.stage.device
    seq_len = 512
    positions = torch.arange(seq_len, device=device)
    distance = positions[:, None] - positions
    starts = torch.tensor([0, 100, seq_len], dtype=torch.int32, device=device)
    same_document = (positions[:, None] >= 100) == (positions >= 100)
    masks = {
        "causal": ("causal", "causal"),
        "all": ("all", "all"),
        "window": (FlashMask(True, 50), ((distance >= 0) & (distance <= 50))[None]),
        "documents": (
            FlashMask(True, segments=Segments(starts, seq_len - 100)),
            ((distance >= 0) & same_document)[None],
        ),
    }

    def run(kernel: object, names: Iterable[str]) -> None:
        q, grad = (case.random(seq_len, 1, 8, 128) for _ in range(2))
        k, v = (case.random(seq_len, 1, 2, 128) for _ in range(2))
        exact = [x.double() for x in (q, k, v)]
        for name in names:
            mask, exact_mask = masks[name]
            out, lse = kernel.forward(q, k, v, mask)
            exact_out, exact_lse = MathBlockAttention().forward(*exact, exact_mask)
            contact.close(f"{name}, y", out, exact_out, ROUNDED_TWICE_LIMIT)
            contact.below(f"{name}, log-sum-exp", float((lse.double() - exact_lse).abs().max()), LOG_SUM_LIMIT)
            grads = kernel.backward(grad, q, k, v, out, lse, mask)
            expected = MathBlockAttention().backward(grad.double(), *exact, exact_out, exact_lse, exact_mask)
            for letter, a, b in zip("qkv", grads, expected, strict=True):
                contact.close(f"{name}, gradient of {letter}", a, b, ROUNDED_TWICE_LIMIT)

    contact.check("flash attention", lambda: run(CudaFlash(), masks))
    contact.check("cuDNN attention", lambda: run(CudnnAttention(), islice(masks, 2)))


def check_pages(contact: Contact, case: ExpertCase) -> None:
    """Check attention to the pages of a cache, of chunks of prompts and of single tokens, where torch can read them."""
    from moefold.ops.paged_flash import FlashPages, device_refusal, exact_segments, probe_case

    passes = {"single tokens": ((1, 4000),) * 8, "chunk and single tokens": ((512, 2000), (1, 3000), (1, 1))}

    def run(sizes: tuple[tuple[int, int], ...], window: int) -> None:
        if reason := device_refusal(case.stage.device):
            case.stage.add(contact.name, f"pages are gathered, as {reason}")
            return
        inputs = probe_case(sizes, case.stage.device, (32, 4, 128))
        out, lse = FlashPages().with_log_sum(*inputs, window)
        exact, exact_lse = (torch.cat(tensors) for tensors in zip(*exact_segments(*inputs, window), strict=True))
        contact.close("y", out, exact, ROUNDED_TWICE_LIMIT)
        contact.below("log-sum-exp", float((lse.double() - exact_lse).abs().max()), LOG_SUM_LIMIT)

    for name, sizes in passes.items():
        for window in (0, 1024):
            contact.check(f"pages, {name}, window {window}", lambda sizes=sizes, window=window: run(sizes, window))


@dataclass(frozen=True)
class LayerResult:
    """Results of a layer: output, gradient of the input, gradients of the weights, and the steps to time it."""

    tensors: dict[str, list[Tensor]]
    run: Callable[[], object]
    flops: float


def _layer_result(stage: Stage, layer: tuple[str, int], kernels: Literal["auto", "plain"]) -> LayerResult:
    cfg = layer_config(stage, *layer)
    cfg = replace(cfg, run=replace(cfg.run, kernels=kernels))
    steps = LayerStep(cfg, "layer", "natural", stage.device)
    run = steps.build()
    module = steps.first_moe_layer
    with _gradients(module):
        x = steps.x.detach().clone().requires_grad_()
        module.begin_step(1)
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(steps.grad.view_as(y))
        weights = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return LayerResult(
        {"y": [y.detach()], "gradient of x": [x.grad], "weights": weights},
        run,
        step_flops(cfg.model, cfg.train, "layer"),
    )


@contextmanager
def _gradients(module: torch.nn.Module) -> Iterator[None]:
    """Leave no gradients in a module."""
    module.zero_grad(set_to_none=True)
    yield
    module.zero_grad(set_to_none=True)


def check_layers(contact: Contact, stage: Stage) -> None:
    """Check whole layers, with kernels next to plain operations, and their waits."""

    def run(layer: tuple[str, int]) -> None:
        result = _layer_result(stage, layer, "auto")
        plain = _layer_result(stage, layer, "plain")
        for key, tensors in result.tensors.items():
            error = max(map(relative_error, tensors, plain.tensors[key]))
            contact.below(key, error, LAYER_LIMIT)
        if not stage.is_cuda:
            return
        ms = stage.ms(result.run, 7)
        stage.add(f"{contact.name}, time", ms, "ms")
        stage.add(f"{contact.name}, rate", result.flops / ms / 1e9, "TFLOP/s")
        contact.time("time of plain operations", plain.run)
        with recorded_waits() as waits:
            result.run()
        stage.add(f"{contact.name}, host waits", len(waits), lines=waits)

    for layer in LAYERS:
        contact.check(f"layer {layer[0]} {layer[1]}", lambda layer=layer: run(layer))
        stage.free()


KERNEL_CHECKS = (
    check_grouped_gemms, check_fc1, check_activation_and_combine, check_router, check_cross_entropy, check_rope,
    check_fp8, check_top_k, check_linear_attention,
)  # fmt: skip
"""Checks of Triton kernels."""


def contact(stage: Stage, only: str = "") -> None:
    """Compare every kernel and library call with float64 at real sizes, and layers with plain operations."""
    checks = Contact(stage, only)
    case = ExpertCase(stage)
    try:
        if find_spec("triton") is None:
            stage.add("triton", "absent")
            if stage.is_cuda:
                stage.faults.append("triton is not installed, so that no kernel was compared")
        else:
            for check in KERNEL_CHECKS:
                check(checks, case)
        check_dense_gemms(checks, case)
        if stage.is_cuda:
            check_torch_grouped_mm(checks, case)
            check_attention(checks, case)
            check_pages(checks, case)
        check_layers(checks, stage)
    except LostContextError as lost:
        stage.faults.append(f"the CUDA context was lost in {lost}, and no other check ran")
