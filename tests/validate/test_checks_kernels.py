"""Kernels and products of few bits that cannot be are refused before any rank starts."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.ops.kernel_support import check_kernel_device, triton_unsupported_reason
from moefold.validate.config import check_config


def _recipe(dtype: str = "bfloat16", precision: str = "dtype") -> Config:
    return Config(run=RunConfig(kernels="triton", dtype=dtype), train=TrainConfig(precision=precision))


def test_float64_is_beyond_triton():
    with pytest.raises(ConfigError, match=r"run.kernels='triton' sums in float32.*'auto' or 'plain'"):
        check_config(_recipe("float64"))


def test_few_bits_have_products_of_their_own():
    with pytest.raises(ConfigError, match=r"train.precision='mxfp8' has GEMMs of its own"):
        check_config(_recipe(precision="mxfp8"))


def _compiled(**run: object) -> Config:
    return Config(run=RunConfig(compile="blocks", **run))


def test_compiled_parts_replace_those_in_c():
    with pytest.raises(ConfigError, match=r"run.compile='blocks' would replace .* in C, .*; set run.kernels to 'auto'"):
        check_config(_compiled(kernels="c"))


def test_compiled_sums_may_depend_on_timings():
    with pytest.raises(ConfigError, match=r"run.compile='blocks' is incompatible with run.deterministic=true"):
        check_config(_compiled(deterministic=True))


def test_a_cpu_has_no_compiler(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"run.kernels='triton' cannot run: .*; set run.kernels to 'auto' or 'plain'"):
        check_kernel_device(_recipe().run, "cpu")
    automatic = _recipe()
    check_kernel_device(replace(automatic, run=replace(automatic.run, kernels="auto")).run, "cpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in triton_unsupported_reason(_recipe().run, "cuda")
