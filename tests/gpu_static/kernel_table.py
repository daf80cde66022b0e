"""Compile every launch of the traced training steps ahead of time and print what the kernels use, as JSON.

    env -u TRITON_INTERPRET python -m tests.gpu_static.kernel_table [--write] [--capability 90] [--representative]
    env -u TRITON_INTERPRET python -m tests.gpu_static.kernel_table --cache DIR [--capability 90]

With --write, save the resources for sm_90a and sm_100a under this version of Triton in the table. With --cache, pack
the compiled kernels into an archive in DIR for `make gpu ARGS="--kernels ARCHIVE"`, unpack it elsewhere, and prove that
every launch finds its kernel there. Launches are only recorded where Triton does not interpret kernels, so this runs
in a process of its own.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_layers import layer_config, trace_layer
from benchmarks.cuda_trace import B200, CUDA, H200, Launch, Trace, trace_cuda
from benchmarks.kernel_cache import cached_kernels, pack_kernels, triton_wheel, unpack_kernels
from moefold.ops import triton as triton_ops
from moefold.ops.exact_topk import exact_topk
from moefold.ops.triton.linear_attention import TritonLinearAttention
from tests.gpu_static.kernel_compile import (
    MAX_SHARED_BYTES,
    KernelResources,
    compile_launches,
    compiled_launches,
    kernel_name,
)

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "kernels.json"
COMMAND = "make kernel-table"
DEVICES = {90: H200, 100: B200}
"""GPU of each compute capability, times 10."""
REGISTER_SLACK = 16
"""Registers of a thread above the table that are allowed. Compilers allocate them in units of 8."""
EP8 = {"world_size": 8, "ep": 8, "dispatcher": "alltoall"}
FP8 = {"precision": "fp8-blockwise"}
PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}
PRESETS = ("qwen3-30b-a3b", "mixtral-8x22b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x22b-g8t8")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"train": FP8},
    {"parallel": EP8},
    {"parallel": EP8, "train": FP8},
)
COVERING_CASES: tuple[dict[str, Any], ...] = (
    {"preset": "deepseek-v3", "tokens": 4096},
    {"preset": "gpt-oss-20b", "tokens": 4096},
    {"preset": "qwen3-30b-a3b", "tokens": 4096, "moe": PADDED, "parallel": EP8, "train": FP8},
    {"preset": "qwen3-30b-a3b", "tokens": 4096, "moe": {"dispatch_precision": "fp8-blockwise"}, "parallel": EP8},
)
"""Cases that together launch each kernel with each of its flags."""
CASES = (
    *COVERING_CASES,
    *(
        case
        for variant in VARIANTS
        for preset in PRESETS
        if (case := {"preset": preset, "tokens": 4096} | variant) not in COVERING_CASES
    ),
    # Row counts that 16 does not divide.
    *({"preset": "qwen3-30b-a3b", "tokens": 4097} | variant for variant in VARIANTS[:2]),
    {"preset": "qwen3-30b-a3b", "tokens": 4096, "moe": {"capacity_factor": 1.0}},
    {"preset": "qwen3-30b-a3b", "tokens": 4096, "parallel": EP8 | {"dispatcher": "dedup_alltoall"}},
    {"preset": "qwen3-30b-a3b", "tokens": 4096, "run": {"dtype": "float32", "kernels": "triton"}},
)
"""Models of one layer, with embedding, head and loss."""


def recorded_launches(capability: int, *, is_representative: bool = False) -> list[Launch]:
    """Return the launches of all cases, every candidate of the autotuner included; or few that show each flag."""
    launches = []
    for case in COVERING_CASES if is_representative else CASES:
        trace = trace_layer(layer_config(**case), "model", DEVICES[capability], runs_all_candidates=True)
        launches += trace.launches
    launches += topk_launches(capability) + linear_attention_launches(capability)
    return representative(launches) if is_representative else launches


def topk_launches(capability: int) -> list[Launch]:
    """Return launches of sparse attention's top-k: of a step of decoding, and of rows that end where they attend to."""
    trace = Trace()
    with trace_cuda(trace, DEVICES[capability]):
        for dtype in (torch.float32, torch.bfloat16):
            scores = torch.empty(64, 131_072, dtype=dtype, device=CUDA)
            guess = torch.empty(64, 2048, dtype=torch.int32, device=CUDA)
            stops = torch.empty(64, dtype=torch.int32, device=CUDA)
            exact_topk(scores, 2048, guess=guess)
            exact_topk(scores, 2048, starts=stops, stops=stops)
    return trace.launches


def linear_attention_launches(capability: int) -> list[Launch]:
    """Return launches of linear attention: Gated DeltaNet in training, with a summary; and GLA in inference."""
    trace = Trace()
    with trace_cuda(trace, DEVICES[capability]):
        for decay_size, is_training in ((1, True), (128, False)):
            shapes = ((16, 128), (16, 128), (32, 128), (32, decay_size), *([(32,)] if is_training else []))
            inputs = [torch.empty(256, 1, *shape, device=CUDA, requires_grad=is_training) for shape in shapes]
            chunks = TritonLinearAttention().prepare(inputs, None, 64)
            found = chunks.attend(None)
            if is_training:
                found += chunks.summary()
                torch.autograd.backward(found, [torch.ones_like(x) for x in found])
    return trace.launches


def representative(launches: Sequence[Launch]) -> list[Launch]:
    """Return launches that show each kernel with each of its flags, those with most flags first."""
    kernels: dict[str, list[Launch]] = {}
    for launch in launches:
        kernels.setdefault(kernel_name(launch), []).append(launch)
    return [launch for same in kernels.values() for launch in _covering(same)]


def _covering(launches: Sequence[Launch]) -> list[Launch]:
    """Return few launches of a kernel that have all flags which its launches have."""
    chosen = [max(launches, key=lambda launch: len(_flags(launch)))]
    left = set().union(*map(_flags, launches)) - _flags(chosen[0])
    while left:
        chosen.append(max(launches, key=lambda launch: len(_flags(launch) & left)))
        left -= _flags(chosen[-1])
    return chosen


def _flags(launch: Launch) -> set[str]:
    """Return the names of the constants that are true."""
    return {name for name, value in launch.options.items() if value is True}


def table_flags(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return pairs of kernel and flag of rows of the table (`launch_name`), in which flags are in capitals."""
    return {
        (words[0].partition("(")[0], word)
        for words in map(str.split, names)
        for word in words[1:]
        if word.isupper() and "=" not in word
    }


def launched_kernels() -> set[str]:
    """Return the names of the kernels of ops/triton that the host launches: those that no other kernel calls."""
    kernels = set()
    called = set()
    for path in Path(triton_ops.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                kernels.add(f"{path.stem}.{function.name}")
                called |= {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    return {name for name in kernels if name.partition(".")[2] not in called}


def rule_faults(now: KernelResources, known_spill_bytes: int = 0) -> list[str]:
    """Return which rules a compiled kernel breaks. They hold for every version of Triton."""
    faults = []
    if now.needs_mma and not now.uses_tensor_cores:
        faults.append(f"matrix products without wgmma or tcgen05: {now.mma or 'no tensor-core instruction'}")
    if now.shared_bytes > MAX_SHARED_BYTES:
        faults.append(f"{now.shared_bytes} bytes of shared memory, and a block may have {MAX_SHARED_BYTES}")
    if now.spill_bytes > known_spill_bytes:
        faults.append(f"spills {now.spill_bytes} bytes of registers, {known_spill_bytes} are known")
    return faults


def table_faults(now: KernelResources, before: KernelResources) -> list[str]:
    """Return the resources that are worse than in the table of the same version of Triton."""
    faults = []
    if lost := set(before.mma) - set(now.mma):
        faults.append(f"lost tensor-core instructions {sorted(lost)}, has {list(now.mma)}")
    if lost := set(before.copies) - set(now.copies):
        faults.append(f"lost asynchronous copies of {sorted(lost)} bytes, has {list(now.copies)}")
    if narrower := [width for width in set(now.copies) - set(before.copies) if width != "tma"]:
        faults.append(f"asynchronous copies of {sorted(narrower)} bytes, the table has {list(before.copies)}")
    if now.registers > before.registers + REGISTER_SLACK:
        faults.append(f"{now.registers} registers, the table has {before.registers}")
    return faults


def from_json(row: dict[str, Any]) -> KernelResources:
    """Return the resources that `compiled` made a row of."""
    return KernelResources(**row | {"mma": tuple(row["mma"]), "copies": tuple(row["copies"])})


def compiled(capability: int, *, is_representative: bool = False) -> dict[str, dict[str, Any]]:
    """Compile the launches for a compute capability and return a row for each."""
    launches = recorded_launches(capability, is_representative=is_representative)
    return {name: asdict(resources) for name, resources in compile_launches(launches, capability).items()}


def column(capability: int) -> str:
    """Return the column of the table for a compute capability and this version of Triton."""
    import triton

    return f"triton {'.'.join(triton.__version__.split('.')[:2])} sm_{capability}a"


def write_table() -> None:
    """Replace the columns of this version of Triton. Rows that are no longer launched are dropped."""
    new = {column(capability): compiled(capability) for capability in DEVICES}
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    names = sorted({name for rows in new.values() for name in rows})
    lines = []
    for name in names:
        kept = {key: row for key, row in old.get(name, {}).items() if key not in new}
        cells = kept | {key: rows[name] for key, rows in new.items() if name in rows}
        text = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(cells[key])}" for key in sorted(cells))
        lines.append(f" {json.dumps(name)}: {{\n  {text}\n }}")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def fill_cache(capability: int, is_representative: bool) -> None:
    """Compile the launches into Triton's cache, or find them there."""
    for _ in compiled_launches(recorded_launches(capability, is_representative=is_representative), capability):
        pass


def _fill_apart(cache: Path, capability: int, *, is_representative: bool) -> set[str]:
    """Fill a cache folder in a process of its own, as Triton keeps kernels. Return its kernels."""
    call = f"from tests.gpu_static.kernel_table import fill_cache; fill_cache({capability}, {is_representative})"
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", call], cwd=ROOT, env=environment, check=True)
    return cached_kernels(cache)


def pack_cache(folder: Path, capability: int, *, is_representative: bool = False) -> Path:
    """Write the archive of the compiled launches into a folder and return its path.

    Raises:
        SystemExit: kernels of the archive are not found again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"kernels-triton{triton_wheel().replace(' ', '-')}-sm_{capability}.tar.xz"
    with tempfile.TemporaryDirectory() as cache:
        _fill_apart(Path(cache), capability, is_representative=is_representative)
        packed = pack_kernels(Path(cache), archive, capability)
    lost = compiled_again(archive, capability, is_representative=is_representative)
    if lost:
        archive.unlink()
        raise SystemExit(f"{lost} of {packed} packed kernels are not found again, so the archive was removed")
    print(f"{archive}: {packed} kernels, {archive.stat().st_size:,} bytes, all found again in another folder")
    return archive


def compiled_again(archive: Path, capability: int, *, is_representative: bool = False) -> int:
    """Return how many kernels are compiled although the archive was unpacked into the cache folder."""
    with tempfile.TemporaryDirectory() as cache:
        unpack_kernels(archive, Path(cache))
        before = cached_kernels(Path(cache))
        return len(_fill_apart(Path(cache), capability, is_representative=is_representative) - before)


def main() -> int:
    """Print or save the resources of compiled kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"save both capabilities in {TABLE.name}")
    parser.add_argument("--capability", type=int, default=90, choices=DEVICES)
    parser.add_argument("--representative", action="store_true", help="each kernel with each of its flags")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="pack the compiled kernels into an archive in DIR")
    args = parser.parse_args()
    if args.cache is not None:
        pack_cache(args.cache, args.capability, is_representative=args.representative)
    elif args.write:
        write_table()
    else:
        rows = compiled(args.capability, is_representative=args.representative)
        print(json.dumps({"column": column(args.capability), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
