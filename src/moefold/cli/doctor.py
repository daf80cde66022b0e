"""`moefold doctor`: show the hardware and software of this machine that matter to a run or a bug report."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moefold import __version__
from moefold.cli.command_parser import CommandParser
from moefold.errors import EXIT_FAILED
from moefold.host.memory import available_host_memory, physical_bytes
from moefold.terminal import print_escaped, printable
from moefold.units import GIB


def network_links(system: Path = Path("/sys/class")) -> list[str]:
    """Return one description for each network interface that is up, and each port of an InfiniBand or RoCE adapter.

    `system` is the folder of the kernel's device classes, or empty if it lists none, as on macOS.
    """
    links = []
    for interface in sorted((system / "net").glob("*")):
        if _read(interface / "operstate") in ("up", "unknown"):
            speed = _read(interface / "speed")
            # Virtual interfaces have no speed, or -1.
            links.append(f"{interface.name} {int(speed) / 1000:g} Gb/s" if speed.isdecimal() else interface.name)
    for port in sorted((system / "infiniband").glob("*/ports/*")):
        state = _read(port / "state").partition(": ")[2].lower() or "state unknown"
        links.append(f"{port.parents[1].name}:{port.name} {_read(port / 'rate') or 'rate unknown'}, {state}")
    return links


def _read(file: Path) -> str:
    """Return the content of a file of the kernel, or "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


C_LIBRARIES = ("gemm", "swiglu", "norm", "rope", "attention", "exact_topk")
OPTIONAL_PACKAGES = (
    ("datasets", "datasets", 'data.kind="huggingface"'),
    ("huggingface_hub", "huggingface_hub", "names such as hf://ORG/NAME, and moefold push"),
    ("s3fs", "s3fs", "s3:// paths"),
    ("gcsfs", "gcsfs", "gs:// paths"),
    ("tensorboard", "tensorboard", "metrics.tensorboard"),
    ("wandb", "wandb", "metrics.wandb"),
    ("lm-eval", "lm_eval", "moefold lm-eval"),
    ("uvicorn", "uvicorn", "moefold serve and moefold board"),
    ("starlette", "starlette", "moefold serve and moefold board"),
    ("ray", "ray", "the program of moefold template ray"),
    ("triton", "triton", "kernels on CUDA"),
)
"""Package, module, and the feature that needs it."""

EPILOG = """Exit status 1 means that torch cannot be used; layout and plan work without it. A package that is missing is
listed with the command that installs it.
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    words: str
    is_fault: bool = False
    """True if training cannot start because of it."""


def run(argv: list[str]) -> int:
    """Print the report and return 1 if training cannot start on this machine, else 0."""
    arguments = _parser().parse_args(argv)
    findings = [*_software(), *_host(), *_torch(), *_links(), _cache(), *_optional()]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            print_escaped(f"{finding.topic:{width}}  {printable(finding.words)}")
    return EXIT_FAILED if any(finding.is_fault for finding in findings) else 0


def _software() -> Iterator[Finding]:
    yield Finding("moefold", f"{__version__}, from {Path(__file__).parents[1]}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")


def _host() -> Iterator[Finding]:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    threads = os.environ.get("OMP_NUM_THREADS")
    omp_threads = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Finding("cores", f"{usable} of {total} usable by this process{omp_threads}")
    yield Finding("memory", _memory())


def _links() -> Iterator[Finding]:
    if links := network_links():
        yield Finding("network", "; ".join(links))


def _memory() -> str:
    available = available_host_memory()
    return f"{physical_bytes() / GIB:.1f} GiB, {available.size / GIB:.1f} GiB {available.description}"


def _torch() -> Iterator[Finding]:
    try:
        import torch

        from moefold.launch.threads_and_malloc import available_backends
    except (ImportError, OSError) as error:
        yield Finding("torch", f"cannot be imported: {error}; {_install_command('torch')}", is_fault=True)
        return
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    backends = available_backends()
    if not backends:
        yield Finding("ranks", "torch was built without torch.distributed", is_fault=True)
    else:
        yield Finding("ranks", f"connected by {', '.join(backends)}")
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield Finding(f"cuda:{number}", f"{properties.name}, {properties.total_memory / GIB:.1f} GiB, {capability}")
    if torch.cuda.device_count() > 1:
        yield Finding("GPU links", _peer_access(torch.cuda.device_count()))
    if not torch.cuda.device_count():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield Finding("devices", f"CPU only: torch sees no GPU and is built {built}")
    yield Finding("C kernels", _c_kernels())
    yield Finding("flash attention", describe_flash_attention())


def _peer_access(count: int) -> str:
    """Return how many pairs of GPUs can read each other's memory, over NVLink or PCIe."""
    import torch

    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    linked = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return f"{len(linked)} of {len(pairs)} pairs have peer access; `nvidia-smi topo -m` shows NVLink and PCIe"


def describe_flash_attention() -> str:
    """Return the FlashAttention 3 that runs would use, or the reason why there is none."""
    import torch
    from torch.nn import attention

    from moefold.ops.flash_attention_3 import CAPABILITY, IMPLEMENTATION, PACKAGE

    if IMPLEMENTATION not in attention.list_flash_attention_impls():
        return f"torch's own; this torch has no {IMPLEMENTATION} to activate"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"torch's own; with the module {PACKAGE} (FlashAttention 3), {IMPLEMENTATION} on Hopper GPUs"
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
    if not is_hopper:
        return f"torch's own; {PACKAGE} is installed, and no Hopper GPU is visible"
    return f"{IMPLEMENTATION} of {PACKAGE}, if it passes the comparison at the start of a run"


def _c_kernels() -> str:
    from moefold.ops.cpu.build import CompilerError, build_libraries

    try:
        build_libraries(*C_LIBRARIES)
    except CompilerError as error:
        return f"not built, plain torch operations are used on CPUs: {error}"
    return "built (used on CPUs)"


def _cache() -> Finding:
    from moefold.cache_dir import default_cache_dir

    folder = default_cache_dir()
    # Missing folders are created in the nearest existing parent.
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("cache", f"{folder} cannot be written; set XDG_CACHE_HOME to a folder that can")
    return Finding("cache", f"{folder}, {shutil.disk_usage(nearest).free / 1e9:.1f} GB free")


def _optional() -> Iterator[Finding]:
    for package, module, purpose in OPTIONAL_PACKAGES:
        # A folder of the same name in the working directory has no origin.
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            yield Finding(package, f"not installed (for {purpose}); {_install_command(package)}")
            continue
        try:
            yield Finding(package, f"{importlib.metadata.version(package)} (for {purpose})")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, f"installed without metadata (for {purpose})")


def _install_command(package: str) -> str:
    """Return the pip command that installs a package in a version that moefold supports."""
    try:
        declared = importlib.metadata.requires("moefold") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    # The development extra requires newer versions than a run.
    needed = [line for line in declared if "extra == 'dev'" not in line.replace('"', "'")]
    requirements = [re.split(r"\s*;", line)[0].replace(" ", "") for line in needed]
    requirement = next((line for line in requirements if re.split(r"[\[<>=!~]", line)[0] == package), package)
    return f"pip install '{requirement}'"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold doctor", "Show versions, devices, memory, kernels and optional packages of this machine.", EPILOG
    )
    parser.flag("--json", "print a JSON array of topic, words and is_fault")
    return parser
