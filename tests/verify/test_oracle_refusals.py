"""Test that the oracle refuses by name what it has no formula for: kinds, parameters, keys, losses, buffers."""

import ast
import inspect
from dataclasses import field, fields, make_dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import moefold.verify.oracle
from moefold.cli.main import main
from moefold.cli.verify import verify
from moefold.config.base.field import VerifyAs
from moefold.config.base.part import Part, make_part, settings_of
from moefold.config.base.part_registry import built_in_kinds, find_part, groups
from moefold.config.chosen import chosen, with_key
from moefold.config.edit import edit_model
from moefold.config.groups.block import ActivationPart
from moefold.config.groups.loss import OracleOutput
from moefold.config.groups.router import ScoreFormula
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.keys.annotations import verification_by_key
from moefold.config.layers import LAYER_KEYS
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.dataset import ProgramData
from moefold.data.sample import Sample
from moefold.errors import ConfigError, NoFormulaError
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.objectives.policy_loss import PolicyGradientLoss
from moefold.objectives.preference_loss import PreferenceLoss
from moefold.objectives.recipe_loss import recipe_loss
from moefold.optim.lr_schedule import learning_rate
from moefold.verify import oracle_objectives
from moefold.verify.compare import compare_records, oracle_batch, run_oracle
from moefold.verify.distributed_run import open_samples
from moefold.verify.no_formula import formula_of
from moefold.verify.oracle import Oracle
from moefold.verify.oracle_objectives import objective_of, policy_objective, preference_objective
from moefold.verify.oracle_optimizer import oracle_rate
from moefold.verify.read_record import ReadRecord
from tests.objectives.losses import policy, preference
from tests.train import oracle_sites
from tests.train.oracle_sites import OracleSites
from tests.verify.perfect_record import perfect
from tests.verify.recipes import LATENT, tiny

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")
FORMULAS = (*Path(moefold.verify.oracle.__file__).parent.glob("oracle*.py"), Path(oracle_sites.__file__))
SOURCES = [ast.parse(path.read_text()) for path in FORMULAS]
FORMULA_KEYS = {name for name, mark in verification_by_key().items() if mark is None}
SITES_FORMULA_KEYS = {name for name, mark in verification_by_key().items() if mark is VerifyAs.ROUNDS}


def _kinds(section: Any, prefix: str) -> dict[str, tuple[Any, ...]]:
    """Return the names that a key may have, by key."""
    hints = get_type_hints(section)
    return {f"{prefix}{key}": get_args(hint) for key, hint in hints.items() if get_origin(hint) is Literal}


KINDS = {
    name: kinds
    for section in fields(Config)
    for name, kinds in _kinds(type(getattr(Config(), section.name)), f"{section.name}.").items()
    if name in FORMULA_KEYS
}
"""Names that the oracle must have a formula or a refusal for, by key."""


def test_each_key_of_a_formula_is_read_somewhere():
    """The sources of the oracle, or a property of the recipe, must name it; runs of the tables show that it counts.

    Fields of a part are read by its formula: `tests/parts/test_parts.py`.
    """
    config = [ast.parse(path.read_text()) for path in Path(inspect.getfile(Config)).parent.glob("*.py")]
    named = {node.attr for tree in [*SOURCES, *config] for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {name.split(".")[1] for name in FORMULA_KEYS | SITES_FORMULA_KEYS}
    unread = {"precision", "residual", "moments", "weigh"}
    choices = (*LAYER_KEYS, *(group.key for group in groups()))
    of_parts = {name.split(".")[1] for name in choices}
    assert keys - named - unread - of_parts == set()


@pytest.mark.parametrize("key", KINDS)
def test_each_registered_name_has_a_case(key):
    """A name without a case ends in the refusal, which is not a formula: mypy reports it, and this test too."""
    attribute = key.split(".")[1]
    named = set()
    for node in (node for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.Match)):
        if ast.unparse(node.subject).split(".")[-1] == attribute:
            named |= {v.value.value for v in ast.walk(node) if isinstance(v, ast.MatchValue)}
            assert isinstance(node.cases[-1].pattern, ast.MatchAs), f"line {node.lineno}: no refusal of another name"
            assert node.cases[-1].pattern.pattern is None
            assert ast.unparse(node.cases[-1].body[-1]).startswith(("unknown_kind(", "no_formula("))
    assert named == set(KINDS[key])


def _is_kind(part: ast.expr, aliases: set[str]) -> bool:
    """Return whether an expression is the name of a kind: a key of a section, or a variable with its value."""
    if isinstance(part, ast.Name):
        return part.id in aliases
    names = {key.split(".")[1] for key in (*KINDS, *(group.key for group in groups()))}
    owner, _, attribute = ast.unparse(part).rpartition(".")
    return attribute in names and owner.split(".")[-1] in ("model", "moe", "train", "sites", "loss")


def _comparisons(tree: ast.Module) -> list[str]:
    """Return the comparisons and look-ups with a default of a kind in each function."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        aliases: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _is_kind(node.value, set()):
                aliases |= {ast.unparse(target) for target in node.targets}
        for node in ast.walk(function):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                compared = node.args
            if any(_is_kind(part, aliases) for part in compared):
                found.append(f"{function.name}: {ast.unparse(node)}")
    return found


def test_no_branch_of_the_oracle_has_a_default_over_names():
    """A comparison with one name treats all others the same."""
    planted = ast.parse("""def f(cfg):\n kind = cfg.moe.choice\n return kind == "topk" or {}.get(model.residual, 1)""")
    assert len(_comparisons(planted)) == 2
    assert [found for tree in SOURCES for found in _comparisons(tree)] == []


def _oracle(cfg: Config, legal: Config | None = None, **more: torch.Tensor) -> Oracle:
    """Return the oracle of a recipe with the parameters of a legal one, and others."""
    model = build_model(legal or cfg)
    init_weights(model, cfg.model, cfg.run.seed)
    return Oracle(cfg, dict(model.named_parameters()) | more)


def _train(cfg: Config, legal: Config | None = None, **more: torch.Tensor) -> None:
    """Run a step and an evaluation of the oracle."""
    oracle = _oracle(cfg, legal, **more)
    data = open_samples(legal or cfg)
    oracle.step(oracle_batch(data.train, cfg.train, range(cfg.train.global_batch_size)))
    oracle.evaluate(oracle_batch(data.train, cfg.train, range(1)))
    oracle.check_keys()


def _small(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    sections["train"] = {"seq_len": 8, "global_batch_size": 1} | sections.get("train", {})
    return tiny(model={"layers": 1} | (model or {}), **sections)


def _with(cfg: Config, key: str, value: Any) -> Config:
    found: Config = with_key(cfg, key, value)
    return found


SPARSE = {"attention.indexer.top_k": 3, "attention.indexer.num_heads": 2, "attention.indexer.head_dim": 4}
ACTIVE: dict[str, dict[str, Any]] = {
    "train.indexer_stage": {"model": SPARSE},
}
"""Settings that make a kind count."""


@pytest.mark.parametrize("key", [key for key in KINDS if key.split(".")[0] in ("model", "moe", "train")])
def test_an_unknown_name_is_refused(key):
    """Planted behind the schema, as a new name whose formula the oracle lacks."""
    legal = _small(**ACTIVE.get(key, {}))
    value = "unheard-of" if isinstance(KINDS[key][0], str) else 7
    with pytest.raises(NoFormulaError, match=f"no formula for {key}={value!r}"):
        _train(_with(legal, key, value), legal)


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}])
def test_a_parameter_without_a_formula_is_refused(settings):
    cfg = _small(**settings)
    _train(cfg)
    with pytest.raises(NoFormulaError, match=r"the parameter layers\.0\.attention\.w_gate,"):
        _train(cfg, **{"layers.0.attention.w_gate": torch.ones(3, 2)})


def test_a_parameter_that_is_read_and_leads_nowhere_is_refused(monkeypatch):
    """Its gradient would be zero in silence."""
    monkeypatch.setattr("moefold.parts.ffn.moe.oracle.shared_expert", lambda part, weights, x: 0 * x)
    read = Oracle._check_parameters
    monkeypatch.setattr(
        Oracle, "_check_parameters", lambda self: self._weights.reads.update(self.weights) or read(self)
    )
    with pytest.raises(NoFormulaError, match=r"the gradient of layers\.0\.ffn\.shared\."):
        _train(_small(model={"ffn.moe.shared.intermediate_size": 8}))


def _extended(value: Any, name: str, default: Any, found: Any) -> Any:
    """Return a dataclass instance whose class has one more field, which has a value."""
    base = type(value)
    kind = make_dataclass(
        base.__name__, [(name, type(default), field(default=default))], bases=(base,), frozen=True, kw_only=True
    )
    return kind(**{part.name: getattr(value, part.name) for part in fields(value)}, **{name: found})


@pytest.mark.parametrize(("section", "name", "default", "value"), [
    ("model", "logit_cap", 0.0, 30.0),
    ("moe", "router_temperature", 1.0, 2.0),
    ("train", "momentum_kind", "plain", "nesterov"),
    ("parallel", "changes_the_sum", False, True),
])  # fmt: skip
def test_a_key_that_no_formula_reads_is_refused(section, name, default, value):
    """A key of no class counts as a key of the maths, in every section."""
    cfg = _small()
    _train(replace(cfg, **{section: _extended(getattr(cfg, section), name, default, default)}))
    with pytest.raises(NoFormulaError, match=f"no formula for {section}.{name}={value!r}"):
        _train(replace(cfg, **{section: _extended(getattr(cfg, section), name, default, value)}))


def _without_rope(model: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x


def test_a_listed_key_that_no_formula_reads_is_refused(monkeypatch):
    """The list does not vouch for the formula."""
    monkeypatch.setattr("moefold.verify.oracle.apply_rope", _without_rope)
    with pytest.raises(NoFormulaError, match=r"no formula for model\.rope\.theta=500\.0"):
        _train(_small(model={"rope.theta": 500.0}))


FRAMED = {
    "attention.indexer": {"top_k": 3, "rope_interleaved": True},
    "ffn.moe": {"top_k": 3, "zero_experts": 2, "active_experts": 2.0, "shortcut": True},
    "ffn.moe.router": {"scaling_factor": 2.0, "num_groups": 2, "top_groups": 2, "expert_bias": True, "bias": True},
}


def test_a_setting_that_the_oracle_reads_around_a_formula_counts_by_itself():
    """The table that has it, and its other settings, do not vouch for it."""
    settings = {f"{table}.{name}": value for table, values in FRAMED.items() for name, value in values.items()}
    cfg = replace(_small(), model=edit_model(_small().model, settings))
    reads = ReadRecord()
    model = reads.watch(cfg).model
    for name in (*FRAMED, "attention.num_heads", "ffn.moe.num_experts"):
        attrgetter(name)(model)
    unread = set(reads.unread(cfg))
    assert {f"model.{name}" for name in settings} <= unread
    for name in settings:
        assert attrgetter(name)(model) == settings[name]
    assert unread - set(reads.unread(cfg)) == {f"model.{name}" for name in settings}


@pytest.mark.parametrize("key", ["attention", "linear_attention"])
def test_an_attention_without_a_formula_is_refused(key):
    cfg = _small(model={"layers.attention": "linear" if key == "linear_attention" else "full"})
    unknown = _without_formula(cfg.model.decoder_layers[0].attention)
    with pytest.raises(NoFormulaError, match=r"no formula for model\.attention=.*Unknown"):
        _train(_with(cfg, f"model.{key}", unknown), cfg)


def test_an_activation_without_a_formula_is_refused_by_its_name():
    cfg = _small()
    unknown = _without_formula(chosen(cfg, ActivationPart))
    with pytest.raises(NoFormulaError, match="no formula for model.ffn.moe.activation="):
        _train(_with(cfg, "model.ffn.moe.activation", unknown), cfg)


def test_sizes_of_an_idle_part_are_not_a_reason_to_refuse():
    """A preset may describe a part that the recipe switches off."""
    _train(
        _small(model=LATENT | {"attention": "gqa", "ffn.moe.activation.limit": 3.0, "attention.temperature.tokens": 5})
    )


def test_a_schedule_that_the_steps_do_not_reach_is_read():
    _train(
        _small(train={"warmup_steps": 2, "lr_schedule": make_part("lr_schedule", "wsd", decay_steps=1, min_lr=1e-3)})
    )


def test_each_method_of_alignment_is_judged():
    """Methods with rewards are weights of samples; the others have a loss with a formula."""
    for method in built_in_kinds("alignment"):
        objective_of(recipe_loss(AlignConfig(method=method), tiny().train))


def test_a_loss_without_a_formula_is_refused():
    class Own(PreferenceLoss):
        pass

    with pytest.raises(NoFormulaError, match="the loss Own"):
        objective_of(Own(method=preference(method="dpo").method))


LAW = torch.full((1, 4), -2.0, dtype=torch.float64)
ROLLOUT = {
    "weights": torch.full((1, 4), 0.25, dtype=torch.float64),
    "sequence_ids": torch.zeros(1, 4, dtype=torch.int64),
    **dict.fromkeys(("advantages", "old_log_probs", "trainer_log_probs", "reference_log_probs"), LAW + 0.1),
}


def _without_formula(part: Part) -> Part:
    """Return a part of a kind whose class has no formula."""
    return type("Unknown", (type(part),), {"formula": lambda self: None})(**vars(part))


@pytest.mark.parametrize(
    ("group", "kind", "formula", "method"),
    [
        ("lr_schedule", "cosine", lambda part: part.rate, "rate"),
        ("lr_schedule", "cosine", lambda part: partial(part.rate, 1.0), "rate"),
        ("router_score", "sigmoid", lambda part: ScoreFormula(torch.sigmoid, part.weights, 2), "weights"),
    ],
)
def test_a_formula_that_is_a_method_of_its_part_is_refused(group, kind, formula, method):
    part = make_part(group, kind)
    cheat = type("Mine", (type(part),), {"formula": formula})(**vars(part))
    with pytest.raises(NoFormulaError, match=rf"formula\(\) of {part.key}=.* returns its method {method}, "):
        formula_of(cheat)


@pytest.mark.parametrize("field", ["objective", "correction", "kl_penalty"])
def test_a_policy_loss_without_a_formula_is_refused(field):
    loss = policy(objective="clip", kl=0.1, correction="mask")
    output = OracleOutput(logits=torch.zeros(1, 4, 8, dtype=torch.float64), targets=torch.arange(4)[None])
    policy_objective(loss)(output, ROLLOUT)
    with pytest.raises(NoFormulaError, match=f"no formula for {getattr(loss, field).key}="):
        policy_objective(replace(loss, **{field: _without_formula(getattr(loss, field))}))


def test_a_preference_loss_without_a_formula_is_refused():
    loss = preference(method="dpo")
    with pytest.raises(NoFormulaError, match="no formula for align.method="):
        preference_objective(replace(loss, method=_without_formula(loss.method)))


def test_the_oracle_reads_each_setting_of_a_loss():
    source = inspect.getsource(oracle_objectives)
    for loss in (PolicyGradientLoss, PreferenceLoss):
        assert [field.name for field in fields(loss) if f"loss.{field.name}" not in source] == []


class Tokens:
    """Samples with a part that the oracle does not know."""

    seq_len = 8

    def __init__(self, value: Any) -> None:
        self.value = value

    def annotated_sample(self, index: int) -> Sample:
        base = Sample(np.arange(9) % 7)
        kind = make_dataclass("Sample", [("images", object, field(default=None))], bases=(Sample,), frozen=True)
        return kind(**{part.name: getattr(base, part.name) for part in fields(base)}, images=self.value)


def test_a_part_of_a_sample_without_a_formula_is_refused():
    oracle_batch(Tokens(None), _small().train, range(1))
    with pytest.raises(NoFormulaError, match="images of a sample"):
        oracle_batch(Tokens(np.ones(3)), _small().train, range(1))


def test_a_buffer_without_a_formula_is_refused(monkeypatch):
    def build(cfg: Config) -> torch.nn.Module:
        model = build_model(cfg)
        model.register_buffer("running_mean", torch.zeros(1))
        return model

    run_oracle(_small(), 1)
    monkeypatch.setattr("moefold.verify.compare.build_model", build)
    with pytest.raises(NoFormulaError, match="the buffer running_mean"):
        run_oracle(_small(), 1)


class UnheardOf(SiteMethodPart):
    interface = 1
    kind = "unheard-of"


def test_a_key_of_rounds_without_a_formula_is_refused():
    cfg = _small(model={"ffn.moe.num_experts": 2})
    sites = replace(cfg.sites, count=2, every=1)
    OracleSites(replace(cfg, sites=sites)).run(1)
    for key, value in (("precision", "int8"), ("moments", "average")):
        with pytest.raises(NoFormulaError, match=f"no formula for sites.{key}='{value}'"):
            OracleSites(replace(cfg, sites=replace(sites, **{key: value}))).run(1)
    with pytest.raises(NoFormulaError, match="no formula for sites.method='unheard-of'"):
        OracleSites(replace(cfg, sites=replace(sites, method=UnheardOf())))


def test_a_loss_of_a_program_needs_an_objective():
    oracle = run_oracle(_small(), 1)
    with pytest.raises(NoFormulaError, match="the loss Reinforce of the program"):
        compare_records(oracle, [replace(perfect(oracle), program_loss="Reinforce")])


def test_verify_exits_3_before_a_rank_starts(monkeypatch, capsys):
    def ranks(*args: object) -> list[Any]:
        raise AssertionError("the ranks start")

    cfg = _small(model=SPARSE)
    with pytest.raises(NoFormulaError, match=r"no formula for train\.indexer_stage='unheard-of'"):
        verify(_with(cfg, "train.indexer_stage", "unheard-of"), 1, ranks)
    capsys.readouterr()

    monkeypatch.setattr("moefold.verify.oracle.apply_rope", _without_rope)
    monkeypatch.setattr("moefold.cli.verify._run_on_ranks", ranks)
    assert main(["verify", QUICKSTART, "--shrink", "--steps", "1", "model.rope.theta=500.0"]) == 3
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(
        "moefold: cannot judge: the oracle has no formula for model.rope.theta=500.0"
    )
    assert err.splitlines()[-1].endswith("(docs/extending.md)")


@pytest.mark.parametrize(("words", "note"), [
    (["rl.group_size=2", "data.kind=task"], "the rollouts and the loss of [rl]"),
    (["align.method=dpo", "data.kind=preference", "data.path=pairs.jsonl"], "[align], as --shrink replaces the data"),
])  # fmt: skip
def test_verify_names_what_it_does_not_compare(monkeypatch, capsys, words, note):
    def stop(*args: object) -> None:
        raise ConfigError("the header is printed")

    monkeypatch.setattr("moefold.verify.compare.run_oracle", stop)
    assert main(["verify", QUICKSTART, "--shrink", *words]) == 2
    assert f"note         NOT covered: {note}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", built_in_kinds("lr_schedule"))
def test_the_learning_rate_equals_training(kind):
    for warmup, decay, steps in product((0, 1, 3, 12), (0, 2, 9), (1, 2, 10, 11)):
        settings = {"min_lr": 0.1, "decay_steps": decay}
        known = {key: settings[key] for key in settings_of(find_part("lr_schedule", kind))}
        train = TrainConfig(lr_schedule=make_part("lr_schedule", kind, **known), lr=0.3, warmup_steps=warmup)
        for step in range(1, steps + 3):
            assert oracle_rate(train, steps, step) == pytest.approx(learning_rate(train, steps, step), rel=1e-14)


def test_data_of_a_program_is_judged_as_well():
    """Columns that the loss does not read are not a reason to refuse."""
    cfg = replace(_small(), data=replace(_small().data, kind="program"))

    class Columns(Tokens):
        def annotated_sample(self, index: int) -> Sample:
            return Sample(np.arange(9) % 7, token_columns={"advantages": np.ones(8)})

    assert run_oracle(cfg, 1, data=ProgramData(Columns(None), Columns(None))).steps[0].loss > 0
