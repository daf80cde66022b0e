"""Parts from outside that do not hold together: each is refused by its key and file, where a run starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.errors import ConfigError, RunError
from moefold.launch.rank_pool import WorkerError
from moefold.model.transformer import build_model
from moefold.optim.build import build_optimizer
from moefold.validate.config import check_config
from moefold.verify.distributed_run import run_distributed
from tests.plugin.recipes import FOUR, PACKAGE, PARTS, SIZES, recipe

ATTENTION = "model.attention"
FOUR_HEADS = "model.attention.num_heads=4"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str, str], str]:
    """Return a function that writes a changed file of the package, and returns the override that names it."""

    def write(key: str, before: str, after: str) -> str:
        file, _, name = PARTS[key][1].partition(":")
        code = (PACKAGE / file).read_text()
        assert code.count(before) >= 1
        (tmp_path / file).write_text(code.replace(before, after, 1))
        return f"{key}={tmp_path / file}:{name}"

    return write


def refusal(run: Callable[[Config], object], *overrides: str) -> str:
    with pytest.raises((ConfigError, RunError)) as refused:
        run(recipe(*overrides))
    return str(refused.value)


def built(cfg: Config) -> None:
    with torch.device("meta"):
        build_model(cfg)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"wk", "wv", "wg"):', '"wk", "wv"):', "other parameters than GatedAttention has: wg is only in the module"),
        ('"wk", "wv", "wg"):', '"wk", "wv", "wg", "wx"):', "wx is only in params()"),
        (
            '"wo", (hidden, width)',
            '"wo", (width, hidden)',
            "wo has the shape (128, 64) in params()",
        ),
        ('"wq", "wk", "wv", "wg"):', '"wk", "wq", "wv", "wg"):', "params() has the order wk, wq, wv, wg, wo, and the"),
        ("return GatedAttention(", "return 1 / 0 + GatedAttention(", "fails in build(): ZeroDivisionError: division"),
        ("width = self.num_heads", "width = self.nothing", "fails in params(): AttributeError: 'Gated' object has no"),
        ("heads, head = self", "heads, head = self.nothing, self", "fails in core(): AttributeError: 'Gated' object"),
        ("def open_caches(", "def caches(", "has a module with caches(), which is now open_caches()"),
    ],
    ids=range(8),
)
def test_an_attention_that_differs_from_its_module_is_refused_by_its_file(changed, before, after, reason):
    word = changed(ATTENTION, before, after)

    def run(cfg: Config) -> None:
        assert cfg.model.decoder_layers[0].core.heads == 4
        built(cfg)

    message = refusal(run, word, FOUR_HEADS)
    file = word.partition("=")[2].rpartition(":")[0]
    assert message.startswith(f"model.attention='gated_attention.py:Gated' ({file}) ")
    assert reason in message


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("parallel.tp=8",),
            "parallel.tp=8 must divide model.attention.num_heads=4; ",
        ),
        (
            ("parallel.tp=2", "shard"),
            "parallel.tp=2 must divide dim 0 of attention.wq, which has the shape (129, 64)",
        ),
        (
            ("parallel.tp=2", "dim"),
            "parallel.tp=2 must divide dim 2 of attention.wo, which has the shape (64, 128)",
        ),
    ],
    ids=range(3),
)
def test_shards_that_tp_does_not_divide_are_refused(changed, overrides, reason):
    changes = {
        "shard": ("width = self.num_heads * self.head_dim\n        for", "width = 129\n        for"),
        "dim": ('"attention", tp_dim=1', '"attention", tp_dim=2'),
        "": ("class Gated(", "class Gated("),
    }
    word = changed(ATTENTION, *changes["".join(overrides[1:])])
    assert reason in refusal(check_config, word, FOUR_HEADS, "parallel.world_size=8", overrides[0])


def states_built(cfg: Config) -> None:
    model = build_model(cfg)
    build_optimizer(dict(model.named_parameters()), cfg.run, cfg.model, cfg.train, cfg.lora, None)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            '{"momentum": self',
            '{"other": self',
            "has the states ['other'] of embedding.weight, and states()",
        ),
        (
            "return MomentumSgdOptimizer(",
            "return 1 / 0 or MomentumSgdOptimizer(",
            "fails in build(): ZeroDivisionError",
        ),
    ],
    ids=range(2),
)
def test_an_optimizer_with_other_states_than_it_lists_is_refused(changed, before, after, reason):
    message = refusal(states_built, changed("train.optimizer", before, after))
    assert message.startswith("train.optimizer='momentum_sgd.py:MomentumSgd' (")
    assert reason in message


def refused_run(cfg: Config) -> str:
    try:
        run_distributed(cfg, 1)
    except (ConfigError, RunError) as error:
        return str(error)
    return ""


@pytest.mark.parity
def test_a_fault_of_its_module_is_named_by_line_by_the_ranks(pool, changed):
    word = changed(ATTENTION, "        attended = self.core", "        1 / 0\n        attended = self.core")
    file = word.partition("=")[2].rpartition(":")[0]
    line = Path(file).read_text().splitlines().index("        1 / 0") + 1
    with pytest.raises(WorkerError) as failed:
        pool.run(2, refused_run, recipe(word, "parallel.world_size=2", "parallel.tp=2"))
    assert str(failed.value.__cause__) == (
        f"{ATTENTION}='gated_attention.py:Gated' ({file}) fails in GatedAttention.forward(): ZeroDivisionError: "
        f"division by zero; repair {file}:{line}, or choose another kind of {ATTENTION}"
    )


@pytest.mark.parametrize(("module", "is_named"), [("moefold.comm.collectives", False), ("moefold.ops.rope", True)])
def test_a_rank_that_another_one_has_left_does_not_blame_the_part(changed, module, is_named):
    space = {"__name__": module}
    exec("def call():\n    raise RuntimeError('Connection closed by peer')", space)
    part = recipe(changed("train.lr_schedule", "return peak * max", "return peak() * max")).train.lr_schedule
    with pytest.raises(RunError if is_named else RuntimeError, match="fails in rate" if is_named else "^Connection"):
        part.rate(space["call"], 1, 2, 3)


@pytest.mark.parity
def test_a_command_prints_the_refusal_of_its_ranks_as_one_line(changed, capsys):
    word = changed(ATTENTION, '"wk", "wv", "wg"):', '"wk", "wv"):')
    (recipe_file := Path(word.partition("=")[2].rpartition("/")[0]) / "recipe.toml").touch()
    assert main(["memory", str(recipe_file), *SIZES, word]) == 2
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("moefold: error: model.attention='gated_attention.py:Gated' (")
    assert line.endswith("wg is only in the module")


@pytest.mark.parity
def test_a_dispatcher_that_cannot_be_built_is_refused_on_each_rank(pool, changed):
    word = changed("parallel.dispatcher", "return GatheringDispatcher(", "return 1 / 0 or GatheringDispatcher(")
    for message in pool.run(4, refused_run, recipe(word, *FOUR)):
        assert message.startswith("parallel.dispatcher='gathering.py:Gathering' (")
        assert "fails in build(): ZeroDivisionError" in message


def test_a_schedule_that_fails_or_deadlocks_is_refused(changed):
    for before, after, reason in (
        ("return builder.row", "return builder.rows_of_none", " fails in row(): AttributeError"),
        ('"F" * ahead +', '"B" + "F" * ahead +', ": "),
    ):
        message = refusal(check_config, changed("parallel.schedule", before, after), *FOUR)
        assert "parallel.schedule='eager.py:Eager' (" in message
        assert reason in message
