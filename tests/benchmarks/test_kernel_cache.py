"""Archives of compiled kernels: their files, their place after unpacking, and archives of another version."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import gpu_half_hour
from benchmarks.gpu_results import Results
from benchmarks.kernel_cache import Compiler, cached_kernels, misfit, pack_kernels, triton_wheel, unpack_kernels
from tests.architecture.rules import ROOT
from tests.gpu_static import kernel_table

COMPILING = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def _cache(folder: Path) -> Path:
    """Write a folder as Triton does: a kernel with the stages of its compilation, and a failed kernel."""
    kernel = folder / "KEY"
    kernel.mkdir(parents=True)
    names = ["k.ttir", "k.ptx", "k.cubin", "k.json"]
    for name in names:
        (kernel / name).write_text(name)
    paths = {name: str(kernel / name) for name in names}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    (folder / "FAILED").mkdir()
    (folder / "FAILED" / "k.ttir").write_text("")
    return folder


def test_a_kernel_is_unpacked_with_the_paths_of_its_new_folder(tmp_path):
    archive = tmp_path / "kernels.tar.xz"
    assert pack_kernels(_cache(tmp_path / "here"), archive, 90) == 1
    there = tmp_path / "there"
    manifest = unpack_kernels(archive, there)
    compiler = json.loads(json.dumps(asdict(Compiler.installed(90))))
    assert manifest == {"triton": triton_wheel(), "compiler": compiler, "capability": 90, "kernels": 1}
    assert misfit(manifest, 90) == ""
    assert cached_kernels(there) == {"KEY"}
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["__grp__k.json", "k.cubin", "k.json"]
    group = json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"]
    assert {name: Path(path).read_text() for name, path in group.items()} == {"k.cubin": "k.cubin", "k.json": "k.json"}


def test_kernels_of_another_triton_or_card_are_said_to_be_of_no_use():
    compiler = asdict(Compiler.installed(90))
    fitting = {"triton": triton_wheel(), "compiler": compiler, "capability": 90}
    assert misfit(fitting, 90) == misfit(fitting, None) == ""
    assert misfit(fitting | {"triton": "2.0.0 cp39"}, 90).startswith("compiled by Triton 2.0.0 cp39, and ")
    assert misfit(fitting, 100) == "for sm_90, and the GPU is sm_100"
    del fitting["compiler"]
    assert misfit(fitting, 90) == "the archive does not say which build of Triton compiled it"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"code": "0"}, f"compiled by another build of Triton {triton_wheel()}"),
        ({"ptxas": "12.0"}, "assembled by ptxas 12.0, and "),
        ({"environment": [["TRITON_NEW", "1"]]}, "compiled with TRITON_NEW=1, and it is unset here"),
    ],
)
def test_kernels_of_another_build_of_the_same_version_are_of_no_use(changed, reason):
    manifest = {"triton": triton_wheel(), "compiler": asdict(Compiler.installed(90)) | changed, "capability": 90}
    assert reason in misfit(manifest, 90)


def test_the_compiler_is_in_the_key_of_a_kernel(monkeypatch):
    """By Triton's own key: all that changes it changes the compiler of the manifest too."""
    cache = pytest.importorskip("triton.runtime.cache")
    compiler = Compiler.installed(90)
    key = cache.get_cache_key(mock.Mock(), mock.Mock(), mock.Mock(), dict(compiler.environment))
    assert key.startswith(cache.triton_key())
    assert compiler.code == hashlib.sha256(cache.triton_key().encode()).hexdigest()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert Compiler.installed(90).environment != compiler.environment


def _unpack(archive, folder):
    machine = {"device": "cpu", "torch": "", "triton": "", "sizes": "tiny"}
    results = Results(folder / "results.json", machine)
    gpu_half_hour.unpack_cache(archive, "cpu", results)
    return results.kernels


def test_carried_kernels_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(gpu_half_hour.CACHE_VARIABLE, str(tmp_path / "there"))
    archive = tmp_path / "kernels.tar.xz"
    pack_kernels(_cache(tmp_path / "here"), archive, 90)
    assert _unpack(archive, tmp_path) == {"carried": 1, "misfit": "", "compiled": 0}
    assert cached_kernels(gpu_half_hour.cache_folder()) == {"KEY"}
    monkeypatch.setattr("benchmarks.kernel_cache.triton_wheel", lambda: "9.9 cp399")
    assert "and 9.9 cp399 is installed" in _unpack(archive, tmp_path)["misfit"]
    assert ", of no use: compiled by Triton" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_an_archive_without_kernels_costs_only_compilation(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setenv(gpu_half_hour.CACHE_VARIABLE, str(tmp_path / "there"))
    archive = tmp_path / "kernels.tar.xz"
    if content is not None:
        archive.write_bytes(content)
    assert _unpack(archive, tmp_path) == {}
    assert "has no kernels, so all are compiled here" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_packed_kernels_are_found_again(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_static.kernel_table", "--cache", str(tmp_path), "--representative"],
        cwd=ROOT, capture_output=True, text=True, env=COMPILING,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.iterdir()
    assert f"{archive}: " in done.stdout
    # Negative control: an archive that lacks a kernel.
    unpack_kernels(archive, tmp_path / "cache")
    lost = sorted(cached_kernels(tmp_path / "cache"))[0]
    shutil.rmtree(tmp_path / "cache" / lost)
    pack_kernels(tmp_path / "cache", archive, 90)
    with mock.patch.dict(os.environ, COMPILING, clear=True):
        assert kernel_table.compiled_again(archive, 90, is_representative=True) == 1
