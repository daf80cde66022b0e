"""Settings that users combine: schedule x zero x type x precision x optimizer x mapping, against one stage or rank.

Two comparisons make the chain from any row of the table to one rank.

A schedule, a zero level, offloading, recomputation and overlap change the time of a sum, not its value: under the
same degrees tp, cp, ep and etp each micro-batch has the same gradient to the last bit, whatever the type, and gradients
of micro-batches add up in the type of the master weights. So every row must equal the *plain run* of its class, one
pipeline stage under zero 0, to the rounding of float32 sums. Had any of them added up micro-batches or ranks in
bfloat16, gradients would differ by 1e-3 and more.

The plain run of each class must agree with one rank. In bfloat16, or with products of few bits, a mapping rounds other
values than one rank does. How far apart two right answers may be is measured, not chosen: the one-rank run has, in each
tensor, a distance from exact maths, which is the float64 oracle. Two runs whose roundings are independent and as large
are sqrt(2) of it apart; `APART` times it is allowed. (Two one-rank runs that take the micro-batches in other orders
are no measure: micro-batches add up in float32, and such runs agree to 1e-7.) Experts are dealt out in turn there, as
a token that rounding sends to another expert is more than rounding.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from torch import Tensor

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.validate.config import check_config
from moefold.verify.compare import run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.models import edit_model
from tests.verify.cases import axes_of
from tests.verify.covering import Row, all_rows, covering_rows, few_else_slow, levels_of
from tests.verify.mapping_cases import CASES
from tests.verify.recipes import tiny, without_mapping, write_split_rows
from tests.verify.shared_ranks import Call, SharedRanks, selected_params

pytestmark = pytest.mark.parity

STAGES = {"1 stage": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipev": 2, "csv": 2}
"""Virtual stages of each schedule."""
AXES = {"dp": {}, "ep": {"ep": 2}, "cp": {"cp": 2, "ep": 2}, "tp": {"tp": 2, "etp": 2}}
"""Options that the two ranks of a stage share."""
PRECISIONS = ("dtype", "fp8-blockwise", "mxfp8", "nvfp4")
DTYPES = ("bfloat16", "float32", "float64")
MODEL = {"layers": 4, "layers.ffn": "dense, moe", "ffn.moe.num_experts": 4}
APART = 3.0
"""Distance of two right answers, in units of the distance of one of them from exact maths; 1.7 was seen."""
FACTORS = {
    "schedule": tuple(STAGES),
    "zero": ("0", "1", "2", "3"),
    "axes": tuple(AXES),
    "precision": PRECISIONS,
    "dtype": DTYPES,
    "optimizer": ("adamw", "muon"),
    "extra": ("none", "offload", "recompute", "overlap"),
}


def _is_legal(row: Row) -> bool:
    """Overlap has a pair of passes, parameters that stay, and exchanges to hide."""
    return row["extra"] != "overlap" or (
        row["schedule"] in ("1 stage", "1f1b", "interleaved", "dualpipev")
        and row["zero"] != "3"
        and row["axes"] != "dp"
    )


def _is_of_a_thin_class(row: Row) -> bool:
    """One type for each axis and precision, so that few plain runs serve many rows; half of them in bfloat16."""
    place = FACTORS["axes"].index(row["axes"]) + PRECISIONS.index(row["precision"])
    return row["dtype"] == (*DTYPES, "bfloat16")[place % 4]


SHOWN_BY_CASES = ("schedule", "zero", "axes")
"""Factors whose levels have fast rows in `mapping_cases.py`."""
ROWS = all_rows(FACTORS, _is_legal)
THIN = covering_rows([row for row in ROWS if _is_of_a_thin_class(row)])
FAST = [
    *covering_rows(THIN, lambda row: [level for level in levels_of(row, 1) if level[0][0] not in SHOWN_BY_CASES]),
    next(row for row in THIN if (row["schedule"], row["extra"]) == ("dualpipev", "overlap")),
]
"""Every level that has no fast row in `mapping_cases.py`, and the schedule made for overlap."""


@dataclass(frozen=True)
class Found:
    """The results of a run on ranks, its tensors put together."""

    loss: float
    eval_loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]


Kind = tuple[str, str, str, str]


def _kind(row: Row) -> Kind:
    """The settings that decide about the numbers of a run."""
    return row["axes"], row["precision"], row["dtype"], row["optimizer"]


def _plain(kind: Kind, choice: str = "topk") -> Config:
    """The plain run of a class."""
    axes, precision, dtype, optimizer = kind
    dp = 2 // (2 if axes in ("cp", "tp") else 1)
    # Chunks: where gradients of weights are postponed, the logits of all tokens at once would be rounded to bfloat16.
    train = {"global_batch_size": 4 * dp, "precision": precision, "optimizer": optimizer, "loss_chunk": 5}
    cfg = tiny(model=MODEL, moe={"choice": choice}, train=train, world_size=2, zero=0, **AXES[axes])
    return replace(cfg, run=replace(cfg.run, dtype=dtype))


def _recipe(row: Row, folder: Path) -> Config:
    """The recipe of a row."""
    cfg = _plain(_kind(row))
    changes: dict[str, object] = {"zero": int(row["zero"]), "overlap_experts": row["extra"] == "overlap"}
    if row["schedule"] != "1 stage":
        chunks = STAGES[row["schedule"]]
        changes |= {"world_size": 4, "pp": 2, "schedule": row["schedule"], "virtual_stages": chunks}
    if row["schedule"] == "csv":
        path = write_split_rows(folder / "rows.csv", (1, 0, 1, 0), 4)
        changes["schedule"] = make_part("schedule", "csv", path=str(path))
    train: dict[str, object] = {}
    if row["extra"] == "offload":
        train = {"offload": ("layer",), "offload_to": "ssd", "offload_dir": str(folder), "offload_min_kib": 0}
    if row["extra"] == "recompute":
        train = {"recompute": ("layer",)}
    cfg = replace(cfg, parallel=replace(cfg.parallel, **changes), train=replace(cfg.train, **train))
    check_config(cfg)
    return cfg


def _run_one_step_each(recipes: list[Config]) -> list[DistributedRecord]:
    """One recipe after another, one step each."""
    return [run_distributed(cfg, 1) for cfg in recipes]


def _together(ranks: tuple[DistributedRecord, ...]) -> Found:
    """Put together the results of the ranks of a run."""
    gradients = {name: tensor for rank in ranks for name, tensor in rank.gradients.items()}
    updates = {name: t.double() - rank.initial[name].double() for rank in ranks for name, t in rank.weights.items()}
    (step,) = ranks[0].steps
    return Found(step.loss, ranks[0].eval_loss, step.grad_norm, gradients, updates)


def _run(pool, recipes: list[Config]) -> list[Found]:
    """Return the results of each recipe. All have equally many ranks."""
    ranks = pool.run(recipes[0].parallel.world_size, _run_one_step_each, recipes, timeout_s=60.0 + 20.0 * len(recipes))
    return [_together(records) for records in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def selected_rows(request) -> dict[str, Row]:
    """The rows of the table that this run has selected, by the names of their tests."""
    return selected_params(request, "test_covering_combinations_equal_the_plain_run", "row")


@pytest.fixture(scope="module")
def plain_run(pool, selected_rows):
    """The plain run of a class and an optimizer, made once. The selected rows share the ranks of their plain runs."""
    kinds = {_kind(row) for row in selected_rows.values()}
    shared = SharedRanks(pool, {str(kind): Call(2, _run_one_step_each, ([_plain(kind)],)) for kind in sorted(kinds)})

    @cache
    def run(kind: Kind) -> Found:
        if kind not in kinds:
            return _run(pool, [_plain(kind)])[0]
        return _together(tuple(record for (record,) in shared.results(str(kind))))

    return run


@pytest.fixture(scope="module")
def ranks_of_rows(pool, selected_rows, tmp_path_factory) -> SharedRanks:
    """The ranks of the selected rows."""
    recipes = {name: _recipe(row, tmp_path_factory.mktemp("row")) for name, row in selected_rows.items()}
    calls = {name: Call(cfg.parallel.world_size, _run_one_step_each, ([cfg],)) for name, cfg in recipes.items()}
    return SharedRanks(pool, calls)


def _distances(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference of each tensor over the norm of the tensor in `theirs`."""
    assert set(mine) == set(theirs)
    return {name: _distance(mine[name], tensor) for name, tensor in theirs.items()}


def _distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30))


def _assert_equal(mine: Found, theirs: Found, dtype: str) -> None:
    """Equal to the rounding of sums in the type of the master weights.

    An update divides by the size of each gradient (AdamW) or makes all singular values equal (Muon), both of which
    raise the rounding of the smallest ones; the bound on it is that much wider.
    """
    sums, updates = (1e-12, 1e-6) if dtype == "float64" else (2e-6, 1e-3)
    for which, allowed in (("gradients", sums), ("updates", updates)):
        found = _distances(getattr(mine, which), getattr(theirs, which))
        worst = max(found, key=lambda name: found[name])
        assert found[worst] <= allowed, (which, worst, found[worst])
    assert mine.loss == pytest.approx(theirs.loss, rel=sums)
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=sums)
    assert mine.eval_loss == pytest.approx(theirs.eval_loss, rel=1e-9 if dtype == "float64" else 1e-3)


def test_the_thin_table_has_every_pair():
    wanted = {pair for row in ROWS for pair in levels_of(row)}
    assert {pair for row in THIN for pair in levels_of(row)} == wanted
    assert len(THIN) < 50


def test_the_fast_rows_and_cases_have_every_level():
    levels = {level for row in FAST for level in row.items()}
    for case in CASES:
        if not case.is_slow:
            levels.add(("schedule", case.settings.get("schedule", "1 stage")))
            levels.add(("zero", str(case.settings.get("zero", 1))))
            levels |= {("axes", axis) for axis in axes_of(case.settings)}
    assert {level for row in ROWS for level in row.items()} - levels == set()
    assert len(FAST) < 7


@pytest.mark.parametrize("row", few_else_slow(THIN, FAST), ids=lambda row: "-".join(row.values()))
def test_covering_combinations_equal_the_plain_run(request, ranks_of_rows, plain_run, row):
    mine = _together(tuple(record for (record,) in ranks_of_rows.results(request.node.name)))
    _assert_equal(mine, plain_run(_kind(row)), row["dtype"])


FAST_CLASSES = [("tp", "dtype", "bfloat16")]


def _classes() -> list[object]:
    """Every axis with every precision and type. Fast is one axis in bfloat16: the others have tests of their own."""
    return [
        pytest.param(*levels, marks=() if levels in FAST_CLASSES else pytest.mark.slow)
        for levels in product(AXES, PRECISIONS, DTYPES)
    ]


@cache
def _exact(cfg: Config) -> dict[str, Tensor]:
    return run_oracle(cfg, 1).gradients


@pytest.mark.parametrize(("axes", "precision", "dtype"), _classes())
def test_a_plain_run_agrees_with_one_rank(pool, axes, precision, dtype):
    cfg = _plain((axes, precision, dtype, "adamw"), "round_robin")
    wide = replace(cfg, run=replace(cfg.run, dtype="float64"), train=replace(cfg.train, precision="dtype"))
    exact = _exact(without_mapping(wide))
    alone, mine = _run(pool, [without_mapping(cfg)])[0].gradients, _run(pool, [cfg])[0].gradients
    found, rounding = _distances(mine, alone), _distances(alone, exact)
    least = 1e-12 if dtype == "float64" else 1e-6
    excess = {name: distance / max(APART * rounding[name], least) for name, distance in found.items()}
    worst = max(excess, key=lambda name: excess[name])
    assert excess[worst] <= 1, (worst, found[worst], rounding[worst])


def _run_adding_up_in_bfloat16(cfg: Config) -> list[DistributedRecord]:
    """As if gradients of micro-batches were added up in the type that they are computed in."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    FSDPParam.to_accumulated_grad_if_needed = lambda self: None
    return _run_one_step_each([cfg])


def test_sums_in_bfloat16_are_noticed(fresh_pool, plain_run, tmp_path):
    row = {"schedule": "gpipe", "zero": "1", "axes": "dp", "optimizer": "adamw", "extra": "none"}
    row |= {"precision": "dtype", "dtype": "bfloat16"}
    records = fresh_pool.run(4, _run_adding_up_in_bfloat16, _recipe(row, tmp_path))
    mine = _together(tuple(record for (record,) in records))
    assert max(_distances(mine.gradients, plain_run(_kind(row)).gradients).values()) > 1e-4
    with pytest.raises(AssertionError, match="gradients"):
        _assert_equal(mine, plain_run(_kind(row)), "bfloat16")


def _run_without_an_end_of_first_parts(cfg: Config) -> list[DistributedRecord]:
    """Make FSDP, without its hooks, learn of a split backward pass only from its second part."""
    from moefold.parallel.wgrad_store import WeightGradStore

    whole = WeightGradStore.__init__

    def broken(self, stage, *, reduces_each_micro_batch, has_hooks=True):
        whole(self, stage, reduces_each_micro_batch=reduces_each_micro_batch)

    WeightGradStore.__init__ = broken
    return _run_one_step_each([cfg])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_first_parts_before_a_second_one_add_up_in_float32(fresh_pool, zero):
    """In pairs of micro-batches, where FSDP has no hooks. With three pipeline ranks two first parts are pending."""
    plain = _plain(("ep", "dtype", "bfloat16", "adamw"))
    train = replace(plain.train, global_batch_size=12)
    plain = replace(plain, model=edit_model(plain.model, {"layers": 6}), train=train)
    changes = {"world_size": 6, "pp": 3, "schedule": "dualpipev", "virtual_stages": 2, "overlap_experts": True}
    cfg = replace(plain, parallel=replace(plain.parallel, zero=zero, **changes))
    check_config(cfg)
    (theirs,) = _run(fresh_pool, [plain])
    _assert_equal(_run(fresh_pool, [cfg])[0], theirs, "bfloat16")
    records = fresh_pool.run(6, _run_without_an_end_of_first_parts, cfg)
    with pytest.raises(AssertionError, match="gradients"):
        _assert_equal(_together(tuple(record for (record,) in records)), theirs, "bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("zero", FACTORS["zero"])
@pytest.mark.parametrize("schedule", FACTORS["schedule"])
def test_every_combination_equals_the_plain_run(pool, plain_run, tmp_path, schedule, zero):
    rows = [row for row in ROWS if (row["schedule"], row["zero"]) == (schedule, zero)]
    for row, mine in zip(rows, _run(pool, [_recipe(row, tmp_path) for row in rows]), strict=True):
        try:
            _assert_equal(mine, plain_run(_kind(row)), row["dtype"])
        except AssertionError as error:
            error.add_note(str(row))
            raise
