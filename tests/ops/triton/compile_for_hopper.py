"""Compile the products for compute capability 9.0, which needs no GPU, and print which instructions they became."""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moefold.ops.triton import fc1, fp8_gemm, grouped_gemm, permute, quantize, rope, router, swiglu

HOPPER = GPUTarget("cuda", 90, 32)
WIDE, HALF, BYTE, INT, LONG = "*fp32", "*bf16", "*fp8e4nv", "*i32", "*i64"
ALIGNED = [["tt.divisibility", 16]]


def instructions(kernel, types, constants, **options):
    """Names of the instructions of the matrix units, and of the copies that run beside them."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): ALIGNED
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or (signature[name] == "i32" and name in ("width", "depth", "padded_rows", "stride_xr"))
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places, attrs=aligned)
    text = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return sorted(set(re.findall(r"wgmma\.mma_async\.\S+|cp\.async\.cg", text)))


def products():
    """The products, forwards and for weights, in bfloat16 and e4m3."""
    of_rows = {"offsets": INT, "source": INT, "target": INT, "grad_source": INT}
    half = of_rows | dict.fromkeys(("x", "w", "y", "x_second", "w_second", "grad", "out"), HALF)
    scales = dict.fromkeys(("x_scales", "w_scales", "grad_scales"), WIDE)
    narrow = of_rows | scales | {"y": HALF, "out": HALF} | dict.fromkeys(("x", "w", "grad"), BYTE)
    cut = {"PRECISION": "ieee", "UPCASTS": False}
    for tiling in grouped_gemm.TILE_CONFIGS_16_BIT:
        size = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
        how = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        rows = {
            "GATHERS": True,
            "HAS_SECOND": False,
            "GROUP_SIZE": 8,
            "stride_xk": 1,
            "stride_wn": 1,
        }
        yield "rows", grouped_gemm._grouped_gemm_kernel, half, rows | cut | size, how
        weights = {"GATHERS": True, "GATHERS_GRAD": False}
        yield "weights", grouped_gemm._weight_grad_kernel, half, weights | cut | size, how
    both = half | dict.fromkeys(("w_gate", "w_up", "b_gate", "b_up", "g_out", "u_out", "hidden_out"), HALF)
    both |= {"probs": WIDE, "alpha": "fp32", "limit": "fp32"}
    flags = dict.fromkeys(("GATHERS", "HAS_BIAS", "HAS_PROBS", "IS_CLAMPED", "WRITES_FC1", "WRITES_HIDDEN"), True)
    flags |= {"GROUP_SIZE": 8, "stride_xk": 1, "stride_wn": 1}
    for tiling in fc1.TILE_CONFIGS_16_BIT:
        size = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
        how = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        yield "gate and up", fc1._fc1_kernel, both, flags | cut | size, how
    size = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK": 128, "GROUP_SIZE": 8}
    how = {"num_warps": 8, "num_stages": 4}
    yield "rows e4m3", fp8_gemm._scaled_gemm_kernel, narrow, size, how
    yield "weights e4m3", fp8_gemm._scaled_weight_grad_kernel, narrow, size, how


def others():
    """Kernels without matrix products."""
    half = dict.fromkeys(("g", "u", "hidden", "grad", "grad_g", "grad_u", "rows", "out", "x", "y", "w"), HALF)
    half |= dict.fromkeys(("cos", "sin", "grad_rows"), HALF)
    wide = dict.fromkeys(("probs", "grad_probs", "scales"), WIDE)
    wide |= dict.fromkeys(("alpha", "limit", "max_value", "min_amax"), "fp32")
    types = half | wide | {"values": BYTE, "source": INT, "offsets": INT, "row_ids": LONG, "kept": "*u8"}
    gate = {"IS_CLAMPED": True, "HAS_PROBS": True, "BLOCK": 1024}
    yield swiglu._forward_kernel, types, gate
    yield swiglu._backward_kernel, types, gate
    combine = {"HAS_KEPT_MASK": True, "HAS_PROBS": True, "BLOCK_T": 8, "BLOCK_N": 256}
    yield grouped_gemm._combine_kernel, types, combine
    of_rows = {"token_ids": LONG, "topk_indices": LONG, "non_padding": "*u8"}
    yield permute._combine_backward_kernel, types | of_rows, {"HAS_PADDING": True, "BLOCK_R": 4, "BLOCK_N": 512}
    yield quantize._quantize_rows_kernel, types, {"GATHERS": True, "ROWS": 16, "BLOCK": 128}
    yield quantize._quantize_columns_kernel, types, {"GATHERS": True, "BLOCK": 128, "NUM_EXPERTS": 8}
    yield quantize._quantize_weights_kernel, types, {"BLOCK": 128}
    turn = {"IS_INTERLEAVED": True, "IS_BACKWARD": False, "HEADS": 32, "BLOCK_P": 64, "BLOCK_R": 64}
    yield rope._rope_kernel, types, turn
    names = ("logits", "bias", "probs", "scores", "sums", "grad_z", "grad_logits")
    routing = dict.fromkeys((*names, "grad_probs", "grad_scores", "grad_sums"), WIDE)
    routing |= {"ids": LONG, "tokens_per_expert": LONG, "factor": "fp32", "eps": "fp32"}
    rule = {"TOP_K": 8, "IS_SOFTMAX": False, "IS_POST_SOFTMAX": False, "NORMALIZES": True, "BLOCK_E": 256, "ROWS": 4}
    groups = {"HAS_BIAS": True, "NUM_GROUPS": 8, "TOP_GROUPS": 4, "BLOCK_G": 8, "BLOCK_K": 8}
    yield router._forward_kernel, routing, rule | groups
    grads = dict.fromkeys(("HAS_GRAD_PROBS", "HAS_GRAD_SCORES", "HAS_GRAD_SUMS", "HAS_GRAD_Z"), True)
    yield router._backward_kernel, routing, rule | grads


def main() -> int:
    """One line for each product; an error if a kernel does not compile."""
    for name, kernel, types, constants, options in products():
        print(name, *instructions(kernel, types, constants, **options))
    for kernel, types, constants in others():
        instructions(kernel, types, constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
