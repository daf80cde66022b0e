"""Every launch of ops/triton compiles for Hopper and Blackwell without a GPU, and uses the resources of the table."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.gpu_static.kernel_compile import KernelResources
from tests.gpu_static.kernel_table import (
    COMMAND,
    TABLE,
    from_json,
    launched_kernels,
    rule_faults,
    table_faults,
    table_flags,
)
from tests.gpu_static.uninterpreted import compile_uninterpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
PRODUCT = KernelResources(
    registers=200, spill_bytes=0, shared_bytes=98_304, mma=("wgmma m64n128k16 bf16",), copies=("16",), needs_mma=True
)


def compile_apart(*options):
    """Return the column of the table and the resources by launch, compiled in a process that does not interpret."""
    found = compile_uninterpreted("-m", "tests.gpu_static.kernel_table", *options)
    return found["column"], {name: from_json(row) for name, row in found["rows"].items()}


@pytest.fixture(scope="module")
def representative():
    return compile_apart("--representative")


def table():
    return json.loads(TABLE.read_text())


def known_spill_bytes(name, column):
    """Return the largest recorded spill of a launch on the architecture, under any version of Triton."""
    architecture = column.split()[-1]
    cells = table().get(name, {})
    return max((row["spill_bytes"] for key, row in cells.items() if key.endswith(architecture)), default=0)


def assert_rules(column, rows):
    faults = {name: rule_faults(now, known_spill_bytes(name, column)) for name, now in rows.items()}
    assert not any(faults.values()), {name: found for name, found in faults.items() if found}


def assert_table(column, rows, *, is_whole):
    before = {name: from_json(cells[column]) for name, cells in table().items() if column in cells}
    if not before:
        pytest.skip(f"the table has no column {column!r}")
    unknown = sorted(set(rows) - set(before))
    assert not unknown, f"launches that are not in the table; regenerate it: {COMMAND}"
    if is_whole:
        assert not set(before) - set(rows), f"launches that are no longer made; regenerate the table: {COMMAND}"
    faults = {name: table_faults(now, before[name]) for name, now in rows.items()}
    worse = {name: found for name, found in faults.items() if found}
    assert not worse, f"{worse}; if it must be so, regenerate the table: {COMMAND}"


def test_every_kernel_that_is_launched_is_compiled(representative):
    assert {name.partition("(")[0] for name in representative[1]} == launched_kernels()


def test_representative_launches_have_each_flag_of_the_table(representative):
    assert table_flags(representative[1]) == table_flags(table())


def test_representative_launches_keep_the_rules(representative):
    assert_rules(*representative)


def test_representative_launches_use_no_more_than_the_table(representative):
    assert_table(*representative, is_whole=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [90, 100])
def test_all_launches_keep_the_rules_and_the_table(capability):
    column, rows = compile_apart("--capability", str(capability))
    assert_rules(column, rows)
    assert_table(column, rows, is_whole=True)


@pytest.mark.parametrize(
    "changed",
    [{"mma": ()}, {"mma": ("mma.sync m16n8k16 bf16",)}, {"shared_bytes": 232_449}, {"spill_bytes": 8}],
)
def test_a_broken_rule_is_noticed(changed):
    assert not rule_faults(PRODUCT)
    assert len(rule_faults(replace(PRODUCT, **changed))) == 1


def test_known_spills_and_float32_products_are_no_fault():
    assert not rule_faults(replace(PRODUCT, spill_bytes=8), known_spill_bytes=8)
    assert not rule_faults(replace(PRODUCT, mma=(), needs_mma=False))


@pytest.mark.parametrize(
    "changed",
    [{"mma": ("wgmma m64n64k16 bf16",)}, {"copies": ()}, {"copies": ("16", "4")}, {"registers": 217}],
)
def test_a_loss_against_the_table_is_noticed(changed):
    assert not table_faults(PRODUCT, PRODUCT)
    assert len(table_faults(replace(PRODUCT, **changed), PRODUCT)) == 1


def test_fewer_registers_and_bulk_copies_are_no_loss():
    assert not table_faults(replace(PRODUCT, registers=150, copies=("16", "tma")), PRODUCT)
