"""The counts of tools/house.py notice each kind of place, and a rise is refused with its places."""

import json

import pytest

from tools import house

EMPTY = {"config/schema.py": "class Config: ...\n", "train/trainer.py": "import moefold.config.schema\n"}


@pytest.fixture
def counted(tmp_path):
    """Counts a checkout of the given files of the package, by path."""

    def count(files, **others):
        for name, text in (EMPTY | files).items():
            path = tmp_path / "src/moefold" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, text in others.items():
            path = tmp_path / name.replace("__", "/")
            path = path.with_suffix(".md" if name.startswith("docs") else ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {name: len(places) for name, places in house.count_all(tmp_path).items()}

    return count


THAT = "that"
THOSE = "those"
"""Words of a count, apart from the next one: this file is counted too."""
CONFIG = "from moefold.config.schema import Config\n"
NOTICED = {
    "registries": ["ATTENTIONS = {'gqa': 1}", "SCHEDULES: dict[str, int] = {n: 1 for n in x}"],
    "kind_tables": ["x = {'gqa': 1, 'kda': 2}", "def f():\n    return {'adamw': 1, 'muon': 2}"],
    "layer_letters": [
        "kind == 'ML'",
        "'L' not in pattern",
        "kind in ('M', 'MS')",
        "kind.endswith('S')",
        "kinds.count('D')",
        "match kind:\n    case 'D' | 'M':\n        ...",
    ],
    "kind_comparisons": [
        "model.attention == 'mla'",
        "'post' == self._softmax",
        "train.optimizer in {'muon', 'spsa'}",
        "match cfg.parallel.context:\n    case 'ring':\n        ...",
    ],
    "bare_kind_comparisons": ["kind == 'mla'", "match name:\n    case 'muon':\n        ..."],
    "comparisons": ["device.type == 'cuda'", "'moe' in cfg.train.recompute"],
    "config_parameters": [
        CONFIG + "def f(cfg: Config): ...",
        CONFIG + "def f(a, *, cfg: 'Config | None' = None): ...",
        "from moefold.config.schema import Config as Settings\ndef f(cfg: Settings): ...",
        CONFIG + "Recipe = Config\ndef f(*all: Recipe): ...",
    ],
    "holder_parameters": [
        CONFIG + "class Run:\n    cfg: Config\ndef f(run: Run): ...",
        CONFIG + "class Run(Protocol):\n    @property\n    def cfg(self) -> Config: ...\ndef f(run: 'Run'): ...",
        CONFIG + "class Run:\n    def __init__(self, cfg: Config): ...\ndef f(run: Run): ...",
    ],
    "schema_importers": [
        "import moefold.config.schema",
        "def f():\n    from moefold.config.schema import DataConfig",
        "from moefold.config import schema",
        "from moefold.api import Config",
    ],
    "range_rules": ["RULES = (RangeRule('must be 1', f, 'run', 'steps'),)"],
    "unused_key_rules": ["x = UnusedKeyRule()"],
    "mla": ["x: Literal['gqa', 'mla']"],
}


@pytest.mark.parametrize(
    ("count", "snippet"), [(count, snippet) for count, snippets in NOTICED.items() for snippet in snippets]
)
def test_a_count_notices_one_more_place(counted, count, snippet):
    before = counted({"cost/snippet.py": ""})[count]
    assert counted({"cost/snippet.py": snippet})[count] == before + 1


@pytest.mark.parametrize(
    ("name", "count", "snippet"),
    [
        ("config/base/pipeline_actions.py", "layer_letters", "self.kind == 'F'"),
        ("cost/snippet.py", "layer_letters", "kind == 'X' or kind == 'DENSE'"),
        ("cost/snippet.py", "kind_comparisons", "device.type == 'cuda'"),
        ("cost/snippet.py", "comparisons", "kind == 'mla' or layer.kind == 'L'"),
        ("cost/snippet.py", "config_parameters", "def f(model: ModelConfig, cfg): ..."),
        ("cost/snippet.py", "schema_importers", "from moefold.config.model import ModelConfig"),
        ("config/model.py", "mla", "x: Literal['gqa', 'mla']"),
        ("convert/glm_families.py", "mla", "x = 'mla'"),
        ("cost/snippet.py", "mla", "'''mla: latent attention.'''"),
        ("cost/snippet.py", "registries", "DISPATCHERS = ('alltoall', 'leastloaded')"),
        ("cost/snippet.py", "kind_tables", "x = {'gqa': 1, 'cuda': 2}"),
    ],
)
def test_words_with_another_meaning_are_not_counted(counted, name, count, snippet):
    before = counted({name: ""})[count]
    assert counted({name: snippet})[count] == before


def test_a_property_that_hides_a_comparison_is_counted_where_it_is_read(counted):
    hidden = "class M:\n    @property\n    def is_latent(self) -> bool:\n        return self.attention == 'mla'\n"
    reader = "def f(model):\n    return 1 if model.is_latent else 2\n"
    assert counted({"config/model.py": hidden, "cost/a.py": reader})["predicate_reads"] == 1
    assert counted({"cost/b.py": reader})["predicate_reads"] == 2
    assert counted({"config/model.py": hidden.replace("self.attention == 'mla'", "self.x")})["predicate_reads"] == 0


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("isinstance(x, MinePart)", 1),
        ("issubclass(x, int | groups.MinePart)", 1),
        ("type(x) is not MinePart", 1),
        ("type(x) in (int, MinePart)", 1),
        ("match x:\n    case MinePart(size=1):\n        ...", 1),
        ("isinstance(x, Part)", 0),
        ("type(x) is int", 0),
        ("MinePart(size=1)", 0),
    ],
)
def test_a_test_of_the_class_of_a_part_is_counted_outside_of_it(counted, test, number):
    own = {
        "config/groups/mine.py": f"class MinePart: ...\n{test}\n",
        "config/base/part.py": f"class Part: ...\n{test}\n",
    }
    own |= {"parts/mine/big/part.py": "class BigPart: ...\n", "parts/mine/big/module.py": "isinstance(x, BigPart)\n"}
    assert counted(own)["part_type_tests"] == 0
    assert counted({"cost/a.py": test})["part_type_tests"] == number


def test_a_flag_of_one_kind_is_counted_if_other_code_reads_it(counted):
    base = "class MinePart:\n    group: ClassVar[str] = 'mine'\n    is_big: ClassVar[bool] = False\n"
    big, reader = "class BigPart(MinePart):\n    is_big: ClassVar[bool] = True\n", "x = part.is_big\n"
    own = {"config/groups/mine.py": base + "def f(part):\n    return part.is_big\n", "parts/mine/big/part.py": big}
    assert counted(own | {"parts/mine/big/module.py": reader})["flags_of_one_kind"] == 0
    assert counted({"cost/a.py": reader})["flags_of_one_kind"] == 1
    assert counted({"parts/mine/small.py": "class SmallPart(MinePart):\n    size = 3\n"})["flags_of_one_kind"] == 1
    assert counted({"parts/other/big.py": big})["flags_of_one_kind"] == 1
    assert counted({"parts/mine.py": "class SmallPart(MinePart):\n    size = 3\n"})["flags_of_one_kind"] == 1
    assert counted({"parts/mine/huge.py": big.replace("ClassVar[bool]", "bool")})["flags_of_one_kind"] == 1
    assert counted({"parts/mine/huge.py": big.replace(": ClassVar[bool]", "")})["flags_of_one_kind"] == 0


def test_the_oracle_may_not_branch_over_kinds(counted):
    snippet = "match model.norm:\n    case 'rmsnorm':\n        ...\nx = kind == 'cispo'\n"
    assert counted({"verify/oracle_norm.py": snippet})["oracle_branches"] == 2
    others = "x = '.lora.' in name or parts[0] == 'layers'\nmatch sites.topology:\n    case 'pairs':\n        ...\n"
    assert counted({"verify/oracle_norm.py": others})["oracle_branches"] == 0
    assert counted({"verify/oracle_norm.py": "", "verify/shrink.py": snippet})["oracle_branches"] == 0


def test_names_of_classes_and_words_are_counted_across_files(counted):
    found = counted(
        {"comm/a.py": "class Group: ...\n", "rl/b.py": f"'''The size is {THAT} of a rank.'''\nclass Group: ...\n"},
        tests__rl__test_b=f"def test_a(): ...\n# {THOSE} of others\nclass T:\n    async def test_b(self): ...\n",
        docs__page=f"What is {THAT}\nof a page?\n",
        docs__design__note=f"{THOSE} of a record count too.\n",
        benchmarks__race=f"# {THAT} of a race\n",
    )
    assert (found["class_names_twice"], found["that_of"], found["tests"]) == (1, 5, 2)


def test_the_trainer_brings_only_the_modules_that_its_imports_run(counted):
    files = {
        "train/trainer.py": "from moefold.rl import table\nif TYPE_CHECKING:\n    import moefold.rl.lazy\n",
        "rl/__init__.py": "from moefold.rl.eager import f\n",
        "rl/table.py": "def f():\n    import moefold.rl.lazy\n",
        "rl/eager.py": "x = 1\n",
        "rl/lazy.py": "y = 2\n",
    }
    found = counted(files)
    assert (found["trainer_modules"], found["trainer_lines"]) == (4, 3 + 1 + 2 + 1)
    assert counted(files | {"rl/eager.py": "import moefold.rl.lazy\n"})["trainer_modules"] == 5


def test_a_rise_is_refused_with_the_places_that_are_new(counted, tmp_path):
    lines = []
    arguments = ["--root", str(tmp_path), "--baseline", str(tmp_path / "house.json")]
    counted({"cost/a.py": "x.attention == 'mla'\n", "cost/b.py": ""})
    assert house.main([*arguments, "--write"], lines.append) == 0
    counted({"cost/a.py": "", "cost/b.py": "x.attention == 'mla'\n"})
    assert house.main(arguments, lines.append) == 0, "a comparison that moves is not a rise"
    counted({"cost/c.py": "y = 1\nx.attention == 'gqa'\n"})
    assert house.main(arguments, lines.append) == 1
    assert "  cost/c.py:2: x.attention == 'gqa'" in lines
    assert house.main([*arguments, "--write"], lines.append) == 1, "a rise is not written"
    assert house.main([*arguments, "--write", "--accept", "kind_comparisons"], lines.append) == 1
    assert any(line.startswith("comparisons has risen") for line in lines)
    assert house.main([*arguments, "--write", "--accept", "comparisons"], lines.append) == 0
    assert json.loads((tmp_path / "house.json").read_text())["comparisons"] == {"cost/b.py": 1, "cost/c.py": 1}


def test_lines_and_tests_may_rise(counted, tmp_path):
    arguments = ["--root", str(tmp_path), "--baseline", str(tmp_path / "house.json")]
    counted({})
    assert house.main([*arguments, "--write"], str) == 0
    counted({"cost/a.py": "x = 1\n"}, tests__test_a="def test_a(): ...\n")
    assert house.main(arguments, str) == 0


def test_the_baseline_has_every_count():
    assert list(json.loads(house.BASELINE.read_text())) == [count.name for count in house.COUNTS]
