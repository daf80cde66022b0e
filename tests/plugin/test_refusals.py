"""Parts from plugins that cannot work: each is refused by its key, with its distribution or file."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from moefold.config.base import part_registry, plugins
from moefold.config.base.plugins import MissingPartError
from moefold.config.keys.help import keys_text
from moefold.config.keys.paths import choices_of
from moefold.config.load import config_from_dict
from moefold.config.schema import config_to_dict
from moefold.errors import ConfigError, RunError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.plugin.recipes import PACKAGE

GOOD = '''
from dataclasses import dataclass
from typing import ClassVar
from moefold.config.groups.lr_schedule import LrSchedulePart

@dataclass(frozen=True, kw_only=True)
class Half(LrSchedulePart):
    """Half of the peak."""

    interface: ClassVar[int] = 1
    share: float = 0.5

    def rate(self, peak, first, step, steps):
        return peak * self.share
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with one learning-rate schedule for this test."""

    def caches_clear():
        of_find = (part_registry.kinds, part_registry.find_part)
        for function in (plugins.all_entry_points, plugins.entry_points_of, plugins.entry_of, *of_find):
            function.cache_clear()

    def install(code, kind="half", distribution="moefold-half", module="half_plugin"):
        folder = tmp_path / distribution
        metadata = folder / f"{distribution.replace('-', '_')}-0.3.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.3\n")
        (metadata / "entry_points.txt").write_text(f"[moefold.lr_schedule]\n{kind} = {module}:Half\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(plugins.sys.modules, module, raising=False)
        caches_clear()

    yield install
    monkeypatch.undo()
    caches_clear()


def refusal(*words, path=None):
    with pytest.raises(ConfigError) as refused:
        load_config(path, list(words))
    return str(refused.value)


def test_a_package_is_found_by_its_kind(install):
    install(GOOD)
    part = load_config(None, ["train.lr_schedule=half", "train.lr_schedule.share=0.25"]).train.lr_schedule
    assert (part.kind, part.share, part.rate(8.0, 1, 2, 3)) == ("half", 0.25, 2.0)
    table = {"kind": "half", "share": 0.25, "from": {"distribution": "moefold-half", "version": "0.3"}}
    assert part.as_table() == table
    assert load_config(None, ['train.lr_schedule={kind="half", share=0.25}']).train.lr_schedule == part
    assert load_config(None, ["train.lr_schedule.share=0.25", "train.lr_schedule=half"]).train.lr_schedule == part
    assert "half" not in choices_of("train", "lr_schedule")
    assert "half:" not in keys_text("train.lr_schedule")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no such luck')", "cannot be imported: RuntimeError: no such luck"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("import not_there", "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("Half = 3", "is not a subclass of moefold.config.groups.lr_schedule.LrSchedulePart"),
        ("class Half: pass", "is not a subclass of moefold.config.groups.lr_schedule.LrSchedulePart"),
        (GOOD.replace("    interface: ClassVar[int] = 1", ""), "states no version of the interface"),
        (GOOD.replace("[int] = 1", "[int] = 2"), "is for version 2 of the interface of parts, and this moefold has"),
        (GOOD.replace("def rate", "def ratio"), "lacks the method rate"),
        (GOOD.replace("@dataclass(frozen=True, kw_only=True)", ""), "is not a dataclass"),
        (GOOD.replace("frozen=True", "frozen=False"), "cannot be imported: TypeError: cannot inherit non-frozen"),
        (GOOD.replace("share:", "kind:").replace("self.share", "self.kind"), "has a field kind"),
    ],
    ids=range(11),
)
def test_a_broken_package_is_refused_only_where_it_is_named(install, code, reason):
    install(code)
    message = refusal("train.lr_schedule=half")
    assert message.startswith("train.lr_schedule='half' of moefold-half 0.3 (half_plugin:Half) ")
    assert reason in message
    assert load_config(None, ["train.lr_schedule=cosine"]).train.lr_schedule.kind == "cosine"
    if "cannot be imported" in reason:
        assert "half_plugin" not in plugins.sys.modules


@pytest.mark.parametrize("reexported", [False, True])
def test_a_broken_part_does_not_stop_another_one_of_its_package(install, tmp_path, reexported):
    install(GOOD)
    folder = tmp_path / "moefold-half"
    if reexported:
        (folder / "half_plugin").mkdir()
        (folder / "half_plugin" / "__init__.py").write_text("from half_plugin.good import Half")
        (folder / "half_plugin" / "good.py").write_text(GOOD)
    points = next(folder.glob("*.dist-info")) / "entry_points.txt"
    points.write_text(points.read_text().replace("]\n", "]\nbroken = half_plugin.broken:Half\n"))
    plugins.all_entry_points.cache_clear()
    plugins.entry_points_of.cache_clear()
    assert load_config(None, ["train.lr_schedule=half"]).train.lr_schedule.kind == "half"
    assert "'broken' of moefold-half 0.3 (half_plugin.broken:Half) cannot be imported" in refusal(
        "train.lr_schedule=broken"
    )


def test_two_packages_with_one_kind_are_refused_by_both_names(install):
    install(GOOD)
    install(GOOD, distribution="moefold-other", module="other_plugin")
    message = refusal("train.lr_schedule=half")
    assert "moefold-half 0.3 and moefold-other 0.3" in message or "moefold-other 0.3 and moefold-half 0.3" in message
    load_config(None, ["train.lr_schedule=cosine"])


def test_a_package_with_the_name_of_a_built_in_kind_is_refused(install):
    install(GOOD, kind="cosine")
    assert "moefold-half 0.3 brings the lr_schedule 'cosine', which is the name of a" in refusal(
        "train.lr_schedule=cosine"
    )
    load_config(None, ["train.lr_schedule=linear"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.lr_schedule.shar=1"], "train.lr_schedule.shar is not a key of 'half', whose keys are share; did you"),
        (["train.lr_schedule.share=yes"], "train.lr_schedule.share='yes' must be a valid number"),
        (["train.lr_schedule.share=nan"], "train.lr_schedule.share="),
        (["train.lr_schedule.share=true"], "train.lr_schedule.share=true must be a valid number"),
        (["train.lr_schedule.share=1e300"], "train.lr_schedule.share=1e+300 must be at most 1e+15"),
        (
            ["train.lr_schedule.min_lr=0.1"],
            "train.lr_schedule.min_lr is not a key of 'half', whose keys are share; it is a key of",
        ),
    ],
    ids=range(6),
)
def test_wrong_settings_are_refused_by_key_and_value(install, words, message):
    install(GOOD)
    assert message in refusal("train.lr_schedule=half", *words)


def test_unknown_kinds_are_answered_with_all_kinds(install):
    install(GOOD)
    assert refusal("train.lr_schedule=halv") == (
        "train.lr_schedule='halv' must be one of 'constant', 'cosine', 'linear', 'wsd', "
        "'half' (moefold-half 0.3), 'inverse_sqrt' (moefold-plugin-example 0.1); did you mean 'half'?"
    )
    assert "train.lr_schedule='halv' must be one of" in refusal('train.lr_schedule={kind="halv"}')
    assert "train.lr_schedule.share is not a key of 'cosine'" in refusal("train.lr_schedule={share=1}")


def test_a_package_that_is_gone_is_asked_for(install):
    install(GOOD)
    tree = config_to_dict(load_config(None, ["train.lr_schedule=half"]))
    assert config_to_dict(config_from_dict(tree)) == tree
    tree["train"]["lr_schedule"] |= {"kind": "quarter", "from": {"distribution": "moefold-quarter", "version": "1"}}
    with pytest.raises(MissingPartError, match="of moefold-quarter 1, which is not installed; pip install moefold-qu"):
        config_from_dict(tree)
    tree["train"]["lr_schedule"]["kind"] = "half"
    with pytest.raises(ConfigError, match="part of moefold-quarter 1, and the one that is installed is of moefold-hal"):
        config_from_dict(tree)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sub" / "parts.py"
    path.parent.mkdir()
    path.write_text(GOOD)
    return path


def test_a_file_is_read_relative_to_the_recipe(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = file.with_name("recipe.toml")
    recipe.write_text('[train]\nlr_schedule = {kind = "parts.py:Half", share = 0.25}\n')
    cfg = load_config(Path("sub/recipe.toml"))
    assert load_config(None, ["train.lr_schedule=sub/parts.py:Half", "train.lr_schedule.share=0.25"]) == cfg
    recorded = config_to_dict(cfg)["train"]["lr_schedule"]
    assert recorded["kind"] == "parts.py:Half"
    assert recorded["from"]["file"] == str(file)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(cfg)))) == cfg
    assert hash(cfg) == hash(copy.deepcopy(cfg))
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg


def test_the_table_of_another_file_replaces_a_part_of_a_file(file):
    before = f"train.lr_schedule={PACKAGE / 'inverse_sqrt.py'}:InverseSqrt"
    word = f"train.lr_schedule={{kind = '{file}:Half', share = 0.25}}"
    assert load_config(None, [before, word]) == load_config(None, [word])


def test_only_the_folder_of_the_recipe_is_searched(file, tmp_path, monkeypatch):
    recipe = tmp_path / "other" / "recipe.toml"
    recipe.parent.mkdir()
    recipe.write_text("[train]\n")
    monkeypatch.chdir(file.parent)
    assert load_config(None, ["train.lr_schedule=parts.py:Half"]).train.lr_schedule.kind == "parts.py:Half"
    missing = f"{str(recipe.parent / 'parts.py')!r} does not exist; name a Python file"
    for words in (["train.lr_schedule=parts.py:Half"], ['train.lr_schedule={kind="parts.py:Half", share=0.25}']):
        assert missing in refusal(*words, path=recipe)
    recipe.write_text('[train]\nlr_schedule = "parts.py:Half"\n')
    assert missing in refusal(path=recipe)
    words = ["train.lr_schedule=../sub/parts.py:Half", "train.lr_schedule.share=0.25"]
    recipe.write_text("[train]\n")
    assert load_config(recipe, words).train.lr_schedule.share == 0.25


def test_a_file_that_only_a_checkpoint_names_is_not_imported(file):
    file.write_text(f"open({str(file) + '.ran'!r}, 'w')")
    table = {"kind": "parts.py:Thing", "from": {"file": str(file), "sha256": "0" * 64}}
    for value in (table, "parts.py:Thing", f"{file}:Thing"):
        with pytest.raises(
            MissingPartError, match=r"was trained with .*parts.py:Thing.*; name it: --part .*parts.py:Th"
        ):
            config_from_dict({"train": {"lr_schedule": value}})
    assert not Path(f"{file}.ran").exists()


def test_a_file_that_has_changed_is_said(file, caplog):
    cfg = load_config(None, [f"train.lr_schedule={file}:Half"])
    tree = config_to_dict(cfg)
    tree["train"]["lr_schedule"]["from"]["sha256"] = "0" * 64
    config_from_dict(tree)
    assert "'parts.py:Half' is recorded with sha256 000000000000, and" in caplog.text
    file.write_text(GOOD + "\n# more\n")
    other = load_config(None, [f"train.lr_schedule={file}:Half"])
    assert type(other.train.lr_schedule) is not type(cfg.train.lr_schedule)
    caplog.clear()
    assert config_from_dict(config_to_dict(cfg)) == cfg
    assert config_from_dict(config_to_dict(other)) == other
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (GOOD, "Third", "has no class 'Third'"),
        ("1/0", "Half", "cannot be imported: ZeroDivisionError"),
        ("def f(:", "Half", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(0)", "Half", "cannot be imported: SystemExit"),
        ("Half = 3", "Half", "is not a subclass of"),
        (GOOD.replace("def rate", "def ratio"), "Half", "lacks the method rate"),
        (GOOD.replace("share: float = 0.5", "share: list[float]"), "Half", "share is missing, and has no default"),
        (GOOD.replace("share: float = 0.5", "share: object"), "Half", "share is missing"),
        (GOOD.replace("share: float", "share: 'Unknown'"), "Half", "has an annotation that cannot be read: name 'Unkn"),
        (
            GOOD + "    def __post_init__(self): 1 / 0",
            "Half",
            "refuses its settings: ZeroDivisionError: division by zero",
        ),
        (GOOD.replace("share: float", "share: type(print)"), "Half", "has a field whose type no recipe can write"),
    ],
    ids=range(11),
)
def test_a_broken_file_is_refused(file, code, name, message):
    file.write_text(code)
    assert message in refusal(f"train.lr_schedule={file}:{name}")


def test_a_setting_with_the_name_of_a_built_in_one_has_its_own_rules(install):
    install(GOOD.replace("share", "min_lr"))
    check_config(load_config(None, ["train.lr_schedule=half", "train.lr=1e-3"]))


def test_a_rule_that_fails_is_refused_by_its_distribution(install):
    install(GOOD + "    def check(self, recipe): yield recipe.nothing")
    with pytest.raises(
        RunError,
        match=r"train.lr_schedule='half' \(moefold-half 0.3\) fails in check\(\): Attribute.*half_plugin.py:15",
    ):
        check_config(load_config(None, ["train.lr_schedule=half"]))


def test_a_failure_with_several_lines_is_told_in_one(file, install):
    raised = 'raise ValueError("one\\ntwo")'
    install(f"{GOOD}    def check(self, recipe): {raised}")
    with pytest.raises(RunError, match=r"fails in check\(\): ValueError: one\\x0atwo; repair"):
        check_config(load_config(None, ["train.lr_schedule=half"]))
    file.write_text(f"{GOOD}    def __post_init__(self): {raised}")
    assert refusal(f"train.lr_schedule={file}:Half").endswith(r"refuses its settings: ValueError: one\x0atwo")
    file.write_text(raised)
    assert r"cannot be imported: ValueError: one\x0atwo; repair" in refusal(f"train.lr_schedule={file}:Half")
    install(raised, kind="other", distribution="moefold-other", module="other_plugin")
    assert r"cannot be imported: ValueError: one\x0atwo; repair" in refusal("train.lr_schedule=other")


def test_a_setting_that_is_not_a_key_of_a_cache_is_refused(file):
    file.write_text(GOOD.replace("share: float = 0.5", "share: list[float]"))
    assert "refuses its settings: TypeError: unhashable" in refusal(
        f'train.lr_schedule={{kind="{file}:Half", share=[0.5]}}'
    )


def test_a_missing_file_and_a_folder_are_refused(file):
    assert "does not exist; name a Python file" in refusal(f"train.lr_schedule={file.parent}/other.py:Half")
    assert "does not exist; name a Python file" in refusal("train.lr_schedule=\\u0000.py:Half")


OLD_NAMES = """
from dataclasses import dataclass
from typing import ClassVar

from moefold.parts.dispatcher.alltoall.part import AllToAllDispatcherPart


@dataclass(frozen=True, kw_only=True)
class Old(AllToAllDispatcherPart):
    interface: ClassVar[int] = 1

    def room(self, sizes):
        return 3
"""


def test_a_member_under_its_former_name_is_named_and_not_ignored(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(OLD_NAMES)
    message = refusal(f"parallel.dispatcher={path}:Old")
    assert message.endswith("has room, which is now receive_capacity")
    path.write_text(OLD_NAMES.replace("room", "receive_capacity"))
    assert load_config(None, [f"parallel.dispatcher={path}:Old"]).parallel.dispatcher.receive_capacity(None) == 3
