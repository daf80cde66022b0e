"""Test that SwiGLU in C equals the plain operation. Without it a run says so and goes on, or is refused."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.ops.cpu import build
from moefold.ops.cpu.build import COMPILERS, CompilerError
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.kernel_support import check_kernel_device
from moefold.ops.swiglu import SwiGLUActivation
from moefold.parallel.kernels.select import select_kernels
from moefold.validate.config import check_config
from tests.e2e.forked import run_program
from tests.models import edit_model
from tests.ops.c_kernels import assert_same_losses, needs_compiler, same_bits_on_threads
from tests.slow import slow
from tests.verify.recipes import tiny

CPU = torch.device("cpu")


@pytest.fixture
def gate():
    from moefold.ops.cpu.swiglu import CSwiGLU

    return CSwiGLU()


def _values(*shape: int, dtype: torch.dtype = torch.float32, count: int = 3) -> list[torch.Tensor]:
    """(grad, g, u): of every size, beyond where exp overflows too."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(count)]
    found[1] *= torch.logspace(-3, 2.3, found[1].numel(), dtype=torch.float64).view(shape)
    return [t.to(dtype) for t in found]


@needs_compiler
@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (300, 257)])
def test_it_equals_the_definition(gate, shape, dtype, eps):
    grad, g, u = _values(*shape, dtype=dtype)
    right = SwiGLUActivation().backward(*(t.double() for t in (grad, g, u)))
    # Memory full of NaN, which must not be read.
    rooms = tuple(torch.full_like(g, float("nan")) for _ in range(2))
    found = [gate.forward(g, u, rooms[0].clone()), *gate.backward(grad.clone(), g, u, rooms)]
    for a, e in zip(found, (right[0], *right), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=eps, atol=10 * eps)


@needs_compiler
def test_projections_may_be_narrower_than_the_gradient(gate):
    grad, g, u = _values(40, 37)
    g, u = g.bfloat16(), u.bfloat16()
    for actual in (gate, SwiGLUActivation()):
        found = actual.backward(grad.clone(), g, u)
        for a, e in zip(found, SwiGLUActivation().backward(grad.double(), g.double(), u.double()), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), e, rtol=2e-6, atol=2e-5)


@needs_compiler
def test_swiglu_passes_on_nan(gate):
    g = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf")])
    u = torch.tensor([1.0, float("nan"), 2.0, 2.0])
    for dtype in (torch.float32, torch.bfloat16):
        found, plain = (x.forward(g.to(dtype), u.to(dtype)) for x in (gate, SwiGLUActivation()))
        assert found[:2].isnan().all()
        assert found[2] == plain[2] == float("inf")


@needs_compiler
def test_threads_change_no_bit(gate):
    grad, g, u = _values(300, 1000)
    same_bits_on_threads(lambda: [gate.forward(g, u), *gate.backward(grad.clone(), g, u)], (1, 3))


@needs_compiler
def test_unsupported_cases_run_in_torch(gate):
    grad, g, u = _values(4, 6, dtype=torch.float64)
    for a, e in zip(gate.backward(grad.clone(), g, u), SwiGLUActivation().backward(grad.clone(), g, u), strict=True):
        assert torch.equal(a, e)
    grad, g, u = (t.t() for t in _values(4, 6))
    torch.testing.assert_close(gate.forward(g, u), SwiGLUActivation().forward(g, u))
    torch.testing.assert_close(gate.backward(grad.clone(), g, u), SwiGLUActivation().backward(grad.clone(), g, u))
    leaf = g.detach().clone().requires_grad_()
    gate.forward(leaf, u).sum().backward()
    assert leaf.grad is not None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_the_same_with_it(gate, dtype):
    from moefold.ops.cpu.gemm import CGemm

    counts = [3, 0, 70, 2]
    x = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(of_experts, gemm):
        experts = Experts(4, 16, 32, activation=of_experts)
        experts.ops = SequentialExpertOps(gemm)
        generator = torch.Generator().manual_seed(2)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
        leaf = x.clone().requires_grad_()
        y = experts(ExpertInput(leaf, counts))
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(dtype))
        return [y, leaf.grad, *(parameter.grad for parameter in experts.parameters())]

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    right = run(SwiGLUActivation(), TORCH_GEMM)
    for gemm in (TORCH_GEMM, CGemm()):
        for a, e in zip(run(gate, gemm), right, strict=True):
            assert a.dtype == e.dtype
            assert (a.double() - e.double()).norm() <= tolerance * e.double().norm()


def _recipe(**run) -> Config:
    return replace(tiny(), run=RunConfig(**{"dtype": "float32", **run}))


@needs_compiler
def test_the_choice_is_automatic_and_switchable():
    for kernels, expected in (("auto", "CSwiGLU"), ("c", "CSwiGLU"), ("plain", "NoneType")):
        chosen = select_kernels(_recipe(kernels=kernels), CPU)
        assert type(chosen.expert_activation).__name__ == expected
    assert select_kernels(_recipe(dtype="float64"), CPU).expert_activation is None
    clamped = replace(_recipe(), model=edit_model(_recipe().model, {"ffn.moe.activation": "clamped_swiglu"}))
    chosen = select_kernels(clamped, CPU)
    assert chosen.expert_activation is None
    assert "plain expert activation" in chosen.message


MAPPINGS = [
    pytest.param({"world_size": 1}, {}, id="one-rank", marks=pytest.mark.slow),
    pytest.param({"world_size": 2, "pp": 2}, {"recompute": ("moe",)}, id="pp-recompute"),
    *slow([({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, {"recompute": ("layer",)})]),
]


@needs_compiler
@pytest.mark.parity
@pytest.mark.parametrize(("mapping", "train"), MAPPINGS)
def test_on_and_off_give_the_same_losses(pool, mapping, train):
    assert_same_losses(pool, {"train": train, **mapping})


def test_without_a_compiler_a_run_says_so_and_goes_on(no_compiler):
    chosen = select_kernels(_recipe(), CPU)
    assert chosen.expert_activation is None
    assert chosen.message == "run.kernels='auto': plain, as there is no C compiler (gcc, cc, clang)"
    with pytest.raises(ConfigError, match=r"run.kernels='c' cannot run: there is no C compiler .*; install gcc"):
        select_kernels(_recipe(kernels="c"), CPU)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache_folders", lambda named: (tmp_path / "cache",))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "c_library.py"))
    (tmp_path / "broken.c").write_text("int f(void) { return undeclared; }\n")
    with pytest.raises(CompilerError, match="fails: .*undeclared|fails: .*broken"):
        build.load_library("broken")
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache_folders", lambda named: (tmp_path / "cache",))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "c_library.py"))
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    assert build.load_library("one").one() == 1
    (entry,) = (tmp_path / "cache").iterdir()
    made = entry.stat().st_mtime_ns
    build.load_library.cache_clear()
    assert build.load_library("one").one() == 1
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()] == [made]


@needs_compiler
def test_ranks_that_ask_at_once_compile_once(tmp_path):
    """A compiler that says when it begins and ends, and is slow."""
    real = next(filter(None, map(shutil.which, COMPILERS)))
    log, compiler = tmp_path / "log", tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\nif [ "$1" != --version ]; then echo began >> {log}; sleep 1; fi\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    program = (
        "from moefold.ops.cpu.build import build_libraries, load_library\n"
        "load_library.cache_clear(); build_libraries('swiglu', 'rope')"
    )
    with ThreadPoolExecutor(3) as threads:
        ranks = threads.map(lambda _: run_program(program, timeout_s=120, environment=environment), range(3))
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert log.read_text().split() == ["began", "began"]


@needs_compiler
def test_where_no_folder_can_be_written_a_library_is_compiled_for_this_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "cache_folders", lambda named: (tmp_path / "file" / "cache",))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "c_library.py"))
    (tmp_path / "two.c").write_text("int two(void) { return 2; }\n")
    assert build.load_library("two").two() == 2


@needs_compiler
def test_a_compilation_that_takes_long_prints_a_message(monkeypatch, tmp_path, capfd):
    """On a loaded machine it takes a minute, while a job seems to hang."""
    monkeypatch.setattr(build, "cache_folders", lambda named: (tmp_path / "cache",))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "c_library.py"))
    monkeypatch.setattr(build, "SILENCE_S", 0.0)
    (tmp_path / "four.c").write_text("int four(void) { return 4; }\n")
    compile_source = build._compile
    shown: list[str] = []

    def wait_until_shown(command: list[str], source: object) -> bytes:
        deadline = time.monotonic() + 60
        while "compiling C kernels for this processor, once: four" not in "".join(shown):
            assert time.monotonic() < deadline, shown
            time.sleep(0.01)
            shown.append(capfd.readouterr().err)
        return compile_source(command, source)

    monkeypatch.setattr(build, "_compile", wait_until_shown)
    build.build_libraries("four")
    assert build.load_library("four").four() == 4
    # Nothing is said where nothing is compiled.
    build.load_library.cache_clear()
    capfd.readouterr()
    build.build_libraries("four")
    assert capfd.readouterr().err == ""


PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) {{ FILE *file = fopen("{trace}", "w"); if (file) fclose(file); }}
int three(void) {{ return 666; }}
"""


@needs_compiler
@pytest.mark.parametrize("whose", ["another user's", "group's", "all's", "another user's file", "group's file", "link"])
def test_a_library_that_a_neighbour_planted_is_not_loaded(monkeypatch, tmp_path, whose):
    """The first folder, or the file in it, does not belong to only this user. Another folder is taken."""
    planted, own, trace = tmp_path / "planted", tmp_path / "own", tmp_path / "trace"
    monkeypatch.setattr(build, "cache_folders", lambda named: (planted, own))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "c_library.py"))
    (tmp_path / "three.c").write_text("int three(void) { return 3; }\n")
    command, _, file_name = build._build_spec("three")
    (tmp_path / "evil.c").write_text(PLANTED.format(trace=trace))
    planted.mkdir(mode=0o700)
    library = planted / file_name
    library.write_bytes(build._compile(command, tmp_path / "evil.c"))
    library.chmod(0o600)
    if whose.startswith("another user"):
        if os.getuid():
            pytest.skip("only root can give files away")
        os.chown(library if whose.endswith("file") else planted, 65534, 65534)
    elif whose == "link":
        library.rename(tmp_path / "evil.so")
        library.symlink_to(tmp_path / "evil.so")
    else:
        bit = 0o020 if whose.startswith("group") else 0o002
        target = library if whose.endswith("file") else planted
        target.chmod(target.stat().st_mode | bit)
    build.build_libraries("three")
    build.load_library.cache_clear()
    assert build.load_library("three").three() == 3
    assert not trace.exists()
    is_folder = whose in ("another user's", "group's", "all's")
    assert (own / file_name).exists() == is_folder
    if not is_folder:
        status = library.lstat()
        assert (status.st_uid, status.st_mode & 0o777) == (os.getuid(), 0o600)
    build.load_library.cache_clear()


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"run.kernels='c' computes in float32.*'auto' or 'plain'"):
        check_config(Config(run=RunConfig(kernels="c", dtype="float64")))
    with pytest.raises(ConfigError, match=r"train.precision='mxfp8' has activations between its GEMMs"):
        check_config(Config(run=RunConfig(kernels="c"), train=TrainConfig(precision="mxfp8"), model=ModelConfig()))
    with pytest.raises(ConfigError, match=r"run.kernels='c' cannot run: it is for CPUs.*run.device to 'cpu'"):
        check_kernel_device(_recipe(kernels="c").run, "cuda")
