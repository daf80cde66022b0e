"""Whole transformer layers over rows of a paged KV cache on a CPU in C, without gradients.

One call computes all layers. A layer with a shared expert, or with a router that the kernel does not support, needs two
calls: attention up to the logits of the router, and the routed experts. The caller chooses the experts between them.

`decode.c` calls the functions of the other libraries of this folder. Its reference are the modules of the layer
(`model.transformer.Block`). It has the same bits where they call these functions one by one, and saves the time that
Python and torch take between the calls.
"""

import ctypes
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.ops.cpu.attention import MAX_HEAD_DIM
from moefold.ops.cpu.build import POINTER, SIZE, address_of, declare, load_library, pointer_fields, size_fields
from moefold.ops.cpu.gemm import DTYPE_CODES
from moefold.ops.decode import DecodeRows, LayerWeights, LinearWeights

FUNCTIONS = {
    "gemm": "gemm",
    "gemm_scratch_words": "gemm",
    "norm_forward": "norm",
    "rope_apply": "rope",
    "paged_attention": "paged_attention",
    "swiglu": "swiglu",
    "combine": "permute",
    "router_choose": "router",
}
"""Functions of the C struct `kernel_functions`, in its order, and their libraries. `swiglu` has one for each dtype."""
CACHE_LINE_BYTES = 64


class _FunctionsStruct(ctypes.Structure):
    """C struct `kernel_functions`: addresses."""

    _fields_ = pointer_fields(*FUNCTIONS)


class _LinearStruct(ctypes.Structure):
    """C struct `linear_weights`."""

    _fields_ = (*pointer_fields("weight"), *size_fields("line", "step", "kind"), *pointer_fields("bias"))


class _LayerStruct(ctypes.Structure):
    """C struct `layer_weights`."""

    _fields_ = (
        *((name, _LinearStruct) for name in ("query", "key", "value", "output", "router")),
        *pointer_fields("attention_norm", "query_norm", "key_norm", "ffn_norm", "sinks", "key_pages", "value_pages"),
        *size_fields("hidden", "heads", "groups", "head_dim", "window"),
        *pointer_fields("gate", "up", "down"),
        *size_fields("experts", "ffn", "top_k", "expert_kind", "is_post"),
        *((name, ctypes.c_float) for name in ("eps", "query_key_eps", "routing_scale")),
    )


class _HeadStruct(ctypes.Structure):
    """C struct `head_weights`."""

    _fields_ = (
        ("projection", _LinearStruct),
        *pointer_fields("norm"),
        *size_fields("hidden", "outputs"),
        ("eps", ctypes.c_float),
    )


class _RowsStruct(ctypes.Structure):
    """C struct `pass_rows`."""

    _fields_ = (
        *pointer_fields("kernels"),
        *size_fields("rows", "is_bfloat16", "threads"),
        *pointer_fields("cos", "sin"),
        *size_fields("angle_row", "half"),
        *pointer_fields("slots", "table"),
        *size_fields("table_width"),
        *pointer_fields("lengths", "workspace"),
    )


class CDecode:
    """Layers in float32 or bfloat16.

    Args:
        replaced: kernels whose parts of a layer it computes: with the same bits as kernels of this folder, and equal to
            other kernels up to rounding.
    """

    max_head_dim = MAX_HEAD_DIM
    """Largest supported head dim."""

    def __init__(self, replaced: Sequence[object]) -> None:
        self._replaced = replaced
        library = load_library("decode")
        self.attend = declare(library.decode_attention, *[POINTER] * 6)
        self.add_experts = declare(library.decode_experts, *[POINTER] * 7)
        self.compute = declare(library.decode_layers, POINTER, SIZE, *[POINTER] * 3)
        self.workspace_bytes = declare(library.decode_workspace_bytes, POINTER, POINTER, result=SIZE)
        self.compute_head = declare(library.decode_head, *[POINTER] * 5)
        self.head_workspace_bytes = declare(library.decode_head_workspace_bytes, POINTER, POINTER, result=SIZE)
        self._functions = {dtype: _functions_struct(dtype) for dtype in DTYPE_CODES}

    def replaces(self, kernel: object) -> bool:
        """Return whether this kernel may compute the part of a layer that `kernel` computes. None means torch."""
        return any(kernel is replaced for replaced in self._replaced)

    def functions_address(self, dtype: torch.dtype) -> int:
        """Return the address of the C struct of functions for rows of a dtype."""
        return ctypes.addressof(self._functions[dtype])

    def new_pass(self) -> "CDecodePass":
        """Return the shared part of a new decoder."""
        return CDecodePass(self)

    def head(self, norm: Tensor, weight: Tensor, eps: float) -> "CDecodeHead":
        """Return the head of a decoder."""
        return CDecodeHead(self, norm, weight, eps)


class CDecodePass:
    """The shared part of the layers of a decoder: memory, and the rows of the pass that runs.

    Like the workspace of `ops.cpu.gemm`, the workspace is not a tensor: memory accounting of layers does not count it.
    """

    def __init__(self, kernel: CDecode) -> None:
        self.kernel = kernel
        self.struct = _RowsStruct()
        self.struct_address = ctypes.addressof(self.struct)
        # A cycle would keep the pages until Python collects garbage, which training does every 50 steps.
        self._layers: WeakSet[CDecodeLayer] = WeakSet()
        self._rows: DecodeRows | None = None
        self._key: tuple[int, torch.dtype, int] | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._workspace = np.empty(0, np.uint8)

    def layer(self, weights: LayerWeights, key_pages: Tensor, value_pages: Tensor) -> "CDecodeLayer":
        """Return the decoding of a layer. The weights and the pages must keep their addresses."""
        layer = CDecodeLayer(self, weights, key_pages, value_pages)
        self._layers.add(layer)
        self._key = None
        return layer

    def compute(self, layers: Sequence["CDecodeLayer"], x_RH: Tensor, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        """Compute layers of this decoder in sequence. The kernel must choose their experts, without shared experts.

        Args:
            layers: at least one layer. All have the same number of experts for each row.
            x_RH: rows of the residual stream, [R, H], R at least 1, unchanged.

        Returns:
            The residual stream [R, H], and the experts of each row in each layer, int64 [layers, R, K].
        """
        first = layers[0]
        num_rows = self.set_checked_rows(first, x_RH, rows)
        for layer in layers:
            assert layer.chooses
            assert (layer.hidden, layer.top_k, layer.dtype) == (first.hidden, first.top_k, first.dtype)
        addresses = (POINTER * len(layers))(*[layer.address for layer in layers])
        y_RH = x_RH.clone(memory_format=torch.contiguous_format)
        ids_LRK = torch.empty(len(layers), num_rows, first.top_k, dtype=torch.int64)
        self.kernel.compute(addresses, len(layers), self.struct_address, y_RH.data_ptr(), ids_LRK.data_ptr())
        return y_RH, ids_LRK

    def set_checked_rows(self, layer: "CDecodeLayer", x_RH: Tensor, rows: DecodeRows) -> int:
        """Describe the rows to C, and return their number. The C code has no bounds checks."""
        self._set_rows(rows, layer.dtype)
        num_rows: int = self.struct.rows
        assert x_RH.shape == (num_rows, layer.hidden), (x_RH.shape, num_rows, layer.hidden)
        assert x_RH.dtype == layer.dtype, (x_RH.dtype, layer.dtype)
        return num_rows

    def _set_rows(self, rows: DecodeRows, dtype: torch.dtype) -> None:
        """Describe the rows of a pass to C. It does nothing if they are the rows of the last call."""
        if rows is self._rows and self._key is not None:
            return
        num_rows = len(rows.slots_R)
        # The C code has no bounds checks.
        assert rows.page_table.dtype == rows.lengths.dtype == torch.int32, (rows.page_table.dtype, rows.lengths.dtype)
        assert rows.slots_R.dtype == torch.int64, rows.slots_R.dtype
        assert len(rows.page_table) == len(rows.lengths) == num_rows, (rows.page_table.shape, rows.lengths.shape)
        assert len(rows.cos) == len(rows.sin) == num_rows, (rows.cos.shape, num_rows)
        assert rows.cos.dtype == rows.sin.dtype == dtype, (rows.cos.dtype, dtype)
        assert rows.cos.stride() == rows.sin.stride(), (rows.cos.stride(), rows.sin.stride())
        assert rows.cos.stride(-1) == 1, rows.cos.stride()
        lengths = rows.lengths.numpy()
        assert lengths.min() > 0, lengths
        assert lengths.max() <= rows.page_table.shape[1] * PAGE_POSITIONS, (lengths, rows.page_table.shape)
        kept = slots, table, counts = rows.slots_R.contiguous(), rows.page_table.contiguous(), rows.lengths.contiguous()
        self._rows = rows
        self._tensors = kept
        struct = self.struct
        struct.kernels = self.kernel.functions_address(dtype)
        struct.rows = num_rows
        struct.is_bfloat16 = dtype == torch.bfloat16
        struct.threads = torch.get_num_threads()
        struct.cos = rows.cos.data_ptr()
        struct.sin = rows.sin.data_ptr()
        struct.angle_row = rows.cos.stride(0)
        struct.half = rows.cos.shape[-1] // 2
        struct.slots = slots.data_ptr()
        struct.table = table.data_ptr()
        struct.table_width = table.shape[1]
        struct.lengths = counts.data_ptr()
        self._reserve_workspace((num_rows, dtype, struct.threads))

    def _reserve_workspace(self, key: tuple[int, torch.dtype, int]) -> None:
        if key == self._key:
            return
        self._key = key
        need = max(self.kernel.workspace_bytes(layer.address, self.struct_address) for layer in self._layers)
        self._workspace = _reserve(self.struct, self._workspace, need)


class CDecodeLayer:
    """One layer, whose weights and pages it holds.

    Args:
        shared: memory shared by all layers of the decoder.
        key_pages: [P, G, D, PAGE_POSITIONS].
        value_pages: [P, G, PAGE_POSITIONS, D].
    """

    def __init__(self, shared: CDecodePass, weights: LayerWeights, key_pages: Tensor, value_pages: Tensor) -> None:
        self._shared = shared
        self._attend = shared.kernel.attend
        self._add_experts = shared.kernel.add_experts
        self.chooses = weights.routing is not None
        """True if the kernel chooses the experts."""
        self.dtype = key_pages.dtype
        self.hidden = len(weights.attention_norm)
        self.num_experts = 0 if weights.router is None else len(weights.router.weight)
        self.top_k = weights.top_k
        """Experts of each row, or 0 without experts."""
        # The struct has addresses only.
        self._kept: list[Tensor] = []
        self._struct = self._layer_struct(weights, key_pages, value_pages)
        self.address = ctypes.addressof(self._struct)

    def attend(self, x_RH: Tensor, rows: DecodeRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cache the keys and values of the rows, and compute attention with its residual connection.

        Args:
            x_RH: rows of the residual stream, [R, H], R at least 1.

        Returns:
            The residual stream [R, H], the same rows after the norm of the feed-forward layer, [R, H], and the logits
            of the router, float32 [R, E], None in a dense layer.
        """
        shared = self._shared
        shared.set_checked_rows(self, x_RH, rows)
        x_RH = x_RH.contiguous()
        y_RH = torch.empty_like(x_RH)
        normed_RH = torch.empty_like(x_RH)
        logits_RE = None
        if self.num_experts:
            logits_RE = torch.empty(len(x_RH), self.num_experts, dtype=torch.float32)
        self._attend(
            self.address,
            shared.struct_address,
            x_RH.data_ptr(),
            y_RH.data_ptr(),
            normed_RH.data_ptr(),
            address_of(logits_RE),
        )
        return y_RH, normed_RH, logits_RE

    def add_experts(
        self, y_RH: Tensor, normed_RH: Tensor, ids_RK: Tensor, probs_RK: Tensor, shared_RH: Tensor | None
    ) -> None:
        """Add the output of the chosen experts to the residual stream, in place, after `attend` of the same rows.

        Args:
            y_RH: residual stream, contiguous.
            normed_RH: input of the experts, as `attend` returned it.
            ids_RK: experts of each row, int64 [R, K]. The experts of a row differ.
            probs_RK: weight of each, float32 [R, K].
            shared_RH: output of shared experts, which is added to the output of the routed experts. None means not
        added.
        """
        shared = self._shared
        shape = shared.struct.rows, self.top_k
        assert ids_RK.shape == probs_RK.shape == shape, (ids_RK.shape, probs_RK.shape, shape)
        assert (ids_RK.dtype, probs_RK.dtype) == (torch.int64, torch.float32), (ids_RK.dtype, probs_RK.dtype)
        ids_RK = ids_RK.contiguous()
        probs_RK = probs_RK.contiguous()
        shared_RH = None if shared_RH is None else shared_RH.contiguous()
        self._add_experts(
            self.address,
            shared.struct_address,
            normed_RH.data_ptr(),
            ids_RK.data_ptr(),
            probs_RK.data_ptr(),
            address_of(shared_RH),
            y_RH.data_ptr(),
        )

    def _layer_struct(self, weights: LayerWeights, key_pages: Tensor, value_pages: Tensor) -> _LayerStruct:
        attention = weights.attention
        num_pages, groups, head_dim, _ = key_pages.shape
        heads = len(attention.query.weight) // head_dim
        # The C code has no bounds checks.
        assert head_dim == attention.head_dim, (head_dim, attention.head_dim)
        assert key_pages.shape == (num_pages, groups, head_dim, PAGE_POSITIONS), key_pages.shape
        assert value_pages.shape == (num_pages, groups, PAGE_POSITIONS, head_dim), value_pages.shape
        assert key_pages.is_contiguous(), key_pages.stride()
        assert value_pages.is_contiguous(), value_pages.stride()
        assert heads % groups == 0, (heads, groups)
        hidden = self.hidden
        key_value = groups * head_dim
        struct = _LayerStruct(
            query=self._linear_struct(attention.query, heads * head_dim, hidden),
            key=self._linear_struct(attention.key, key_value, hidden),
            value=self._linear_struct(attention.value, key_value, hidden),
            output=self._linear_struct(attention.output, hidden, heads * head_dim),
            attention_norm=self._address(weights.attention_norm, (hidden,)),
            ffn_norm=self._address(weights.ffn_norm, (hidden,)),
            query_norm=self._address(attention.query_norm, (head_dim,)),
            key_norm=self._address(attention.key_norm, (head_dim,)),
            sinks=self._address(None if attention.sinks is None else attention.sinks.float(), (heads,), torch.float32),
            key_pages=self._address(key_pages, key_pages.shape),
            value_pages=self._address(value_pages, value_pages.shape),
            hidden=hidden,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            window=attention.window,
            experts=self.num_experts,
            top_k=weights.top_k,
            eps=weights.eps,
            query_key_eps=attention.query_key_eps,
        )
        if weights.routing is not None:
            struct.is_post = weights.routing.is_post
            struct.routing_scale = weights.routing.scale
        if weights.router is not None and weights.experts is not None:
            gate, up, down = weights.experts
            ffn = gate.shape[2]
            struct.router = self._linear_struct(weights.router, self.num_experts, hidden, torch.float32)
            struct.gate = self._address(gate, (self.num_experts, hidden, ffn), gate.dtype)
            struct.up = self._address(up, (self.num_experts, hidden, ffn), gate.dtype)
            struct.down = self._address(down, (self.num_experts, ffn, hidden), gate.dtype)
            struct.ffn = ffn
            struct.expert_kind = DTYPE_CODES[gate.dtype]
        return struct

    def _linear_struct(
        self, linear: LinearWeights, outputs: int, inputs: int, dtype: torch.dtype | None = None
    ) -> _LinearStruct:
        """Return the struct of a linear layer whose result and bias have a dtype. None means the dtype of the rows."""
        weight = linear.weight.detach()
        assert weight.shape == (outputs, inputs), (weight.shape, outputs, inputs)
        self._kept.append(weight)
        bias = self._address(linear.bias, (outputs,), dtype)
        return _LinearStruct(weight.data_ptr(), *weight.stride(), DTYPE_CODES[weight.dtype], bias)

    def _address(self, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int | None:
        """Return the address of a contiguous tensor, which is kept alive."""
        if x is None:
            return None
        assert x.shape == shape, (x.shape, shape)
        assert x.dtype == (dtype or self.dtype), (x.dtype, dtype, self.dtype)
        x = x.detach().contiguous()
        self._kept.append(x)
        return x.data_ptr()


class CDecodeHead:
    """The final norm and the projection to the vocabulary, for the rows of a pass whose next token is drawn.

    Args:
        norm: weight of the final norm, [H], in the dtype of the rows.
        weight: rows of this rank's vocabulary, [V/tp, H], in that dtype. It must keep its address, like `norm`.
    """

    def __init__(self, kernel: CDecode, norm: Tensor, weight: Tensor, eps: float) -> None:
        assert norm.dtype == weight.dtype, (norm.dtype, weight.dtype)
        assert norm.shape == weight.shape[1:], (norm.shape, weight.shape)
        self._kernel = kernel
        self._kept = norm.detach().contiguous(), weight.detach()
        norm, weight = self._kept
        projection = _LinearStruct(weight.data_ptr(), *weight.stride(), DTYPE_CODES[weight.dtype], None)
        outputs, hidden = weight.shape
        self._struct = _HeadStruct(projection, norm.data_ptr(), hidden, outputs, eps)
        self._rows = _RowsStruct(kernels=kernel.functions_address(norm.dtype), is_bfloat16=norm.dtype == torch.bfloat16)
        self._addresses = ctypes.addressof(self._struct), ctypes.addressof(self._rows)
        self._workspace = np.empty(0, np.uint8)

    def __call__(self, x_RH: Tensor, picked_N: Tensor) -> Tensor:
        """Compute the logits [N, V/tp], float32, of some rows of the residual stream.

        Args:
            picked_N: places in x of the rows, int64 [N].
        """
        norm, weight = self._kept
        # The C code has no bounds checks.
        assert x_RH.shape[1:] == norm.shape, (x_RH.shape, norm.shape)
        assert (x_RH.dtype, picked_N.dtype) == (norm.dtype, torch.int64), (x_RH.dtype, picked_N.dtype)
        logits_NV = torch.empty(len(picked_N), len(weight), dtype=torch.float32)
        if not len(picked_N):
            return logits_NV
        places = picked_N.numpy()
        assert 0 <= places.min() <= places.max() < len(x_RH), (places, x_RH.shape)
        x_RH = x_RH.contiguous()
        picked_N = picked_N.contiguous()
        threads = torch.get_num_threads()
        if (self._rows.rows, self._rows.threads) != (len(picked_N), threads):
            self._rows.rows = len(picked_N)
            self._rows.threads = threads
            need = self._kernel.head_workspace_bytes(*self._addresses)
            self._workspace = _reserve(self._rows, self._workspace, need)
        self._kernel.compute_head(*self._addresses, x_RH.data_ptr(), picked_N.data_ptr(), logits_NV.data_ptr())
        return logits_NV


def _reserve(rows: _RowsStruct, workspace: NDArray[np.uint8], need: int) -> NDArray[np.uint8]:
    """Return a workspace of at least `need` bytes, the given one if it is so large, and set its aligned address."""
    if need + CACHE_LINE_BYTES > len(workspace):
        workspace = np.empty(need + CACHE_LINE_BYTES, np.uint8)
    address = workspace.ctypes.data
    rows.workspace = address + -address % CACHE_LINE_BYTES
    return workspace


def _functions_struct(dtype: torch.dtype) -> _FunctionsStruct:
    """Return the addresses of the functions for rows of a dtype."""
    struct = _FunctionsStruct()
    for name, library in FUNCTIONS.items():
        symbol = f"swiglu_{'bfloat16' if dtype == torch.bfloat16 else 'float32'}" if name == "swiglu" else name
        function = getattr(load_library(library), symbol)
        setattr(struct, name, ctypes.cast(function, POINTER).value)
    return struct
