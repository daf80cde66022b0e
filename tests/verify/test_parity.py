"""Every mapping equals the one-process float64 oracle: loss terms, norm, every gradient, weights after three steps."""

from functools import lru_cache

import pytest
from tests.verify.recipes import legal_mappings, tiny

from moefold.config.schema import Config
from moefold.verify.compare import Difference, OracleRecord, differences, run_oracle
from moefold.verify.mapping import run_mapping

TOLERANCE = 1e-9
STEPS = 3


def assert_equals_oracle(pool, cfg: Config) -> None:
    """Run a recipe on its ranks and compare everything with the oracle; names the worst."""
    worst = compare(pool, cfg)[0]
    assert worst.error <= TOLERANCE, worst


def compare(pool, cfg: Config) -> list[Difference]:
    """All differences between a recipe on its ranks and the oracle, worst first."""
    ranks = pool.run(cfg.parallel.world_size, run_mapping, cfg, STEPS)
    return differences(_oracle(cfg), ranks)


def _oracle(cfg: Config) -> OracleRecord:
    """The oracle of a recipe; recipes that differ in mapping alone share it."""
    return _cached_oracle(cfg) if cfg.moe.drop_scope == "sub_sequence" else _cached_oracle(_unmapped(cfg))


def _unmapped(cfg: Config) -> Config:
    from tests.verify.recipes import without_mapping

    return without_mapping(cfg)


@lru_cache(maxsize=64)
def _cached_oracle(cfg: Config) -> OracleRecord:
    return run_oracle(cfg, STEPS)


def _name(mapping: dict[str, object]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items() if value != 1)


CONTEXTS = ("ring", "allgather", "ulysses")
DISPATCHERS = ("alltoall", "allgather")


def _with_rotating_kinds(mappings: list[dict[str, int]]) -> list[dict[str, object]]:
    """Spread the kinds of context, dispatcher and zero over a sweep, so that neighbours differ."""
    spread = []
    for i, mapping in enumerate(mappings):
        kinds: dict[str, object] = {"zero": i % 4, "dispatcher": DISPATCHERS[i % 2], "context": CONTEXTS[i % 3]}
        if mapping["tp"] * mapping["cp"] > 4 and kinds["context"] == "ulysses":
            kinds["context"] = "ring"
        spread.append({**mapping, **kinds})
    return spread


@pytest.mark.parity
@pytest.mark.parametrize("mapping", _with_rotating_kinds(legal_mappings(1) + legal_mappings(2)), ids=_name)
def test_every_legal_mapping_of_two_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(**mapping))


@pytest.mark.parity
@pytest.mark.parametrize("mapping", _with_rotating_kinds(legal_mappings(4)), ids=_name)
def test_every_legal_mapping_of_four_ranks(pool, mapping):
    assert_equals_oracle(pool, tiny(**mapping))
