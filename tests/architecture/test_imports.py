"""Test that folders import lower floors only, that some import no torch, and that modules have no state."""

import ast
from pathlib import Path

import pytest

from tests.architecture import imports, rules
from tests.architecture.imports import imports_torch

TORCH_FREE_MODULES = (
    "comm.flight_recorder",
    "launch.hang_diagnosis",
    "launch.accelerator",
    "launch.exit",
    "metrics.expert_balance",
    "optim.lr_schedule",
    "train.start",
    "inference.source",
    "inference.settings",
    "inference.sampling",
    "inference.text",
    "convert.families.hf_config",
    "convert.preflight",
)
"""Single modules of other folders that commands import before they decide to import torch."""


def torch_free_modules() -> list[str]:
    """Return the modules that must be importable without torch: whole folders, top-level modules, and some more."""
    files = rules.python_files(*(rules.SOURCE / folder for folder in (*imports.TORCH_FREE, "cli")))
    files += [path for path in rules.SOURCE.glob("*.py") if path.stem not in ("lm_eval", "__main__")]
    files += [rules.SOURCE / f"{module.replace('.', '/')}.py" for module in TORCH_FREE_MODULES]
    return [".".join(path.relative_to(rules.SOURCE.parent).with_suffix("").parts) for path in files]


def test_config_layout_data_and_commands_import_without_torch():
    modules = torch_free_modules()
    assert "moefold.topology.layout" in modules
    assert "moefold.config.schema" in modules
    assert imports_torch(modules) == []


def test_a_transitive_import_of_torch_is_found(tmp_path):
    (tmp_path / "outer_snippet.py").write_text("import inner_snippet\n")
    (tmp_path / "inner_snippet.py").write_text("from torch import nn\n")
    (tmp_path / "lazy_snippet.py").write_text("def f():\n    import torch\n    return torch\n")
    found = imports_torch(["outer_snippet", "lazy_snippet"], str(tmp_path))
    assert found == ["outer_snippet: torch is refused here"]


MAX_MODULES_OF_TRAINER = 360
"""Modules of ours that `import moefold.train.trainer` loads: each costs 1.5 ms of CPU time in each rank."""
UNUSED_BY_MOST_RUNS = ("inference", "planner", "verify", "bench", "train.rl", "train.sites")
"""Folders and modules that a run imports when its recipe uses them. So are readers of Hugging Face folders."""


def test_the_trainer_loads_few_modules_and_no_compiler():
    loaded = imports.loaded(rules.SOURCE, "train.trainer")
    assert "parallel.parallelize" in loaded.modules
    assert len(loaded.modules) <= MAX_MODULES_OF_TRAINER
    folders = {folder for name in loaded.modules for folder in (name, name.split(".")[0])}
    assert folders.isdisjoint((*UNUSED_BY_MOST_RUNS, "convert.families", "convert.families.hf_config"))
    assert {name.split(".")[0] for name in loaded.libraries} == {"torch", "numpy"}
    compilers = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining")
    assert [name for name in loaded.libraries if name.startswith(compilers)] == []


def test_an_import_inside_a_function_saves_a_load():
    """Such an import hides what a module needs; it stands at the top where the module is loaded anyway."""
    assert list(map(str, imports.late_without_effect(rules.SOURCE))) == []


def test_a_late_import_without_effect_is_found(tmp_path):
    package = tmp_path / "snippet"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lower.py").write_text("")
    (package / "other.py").write_text("")
    (package / "middle.py").write_text("from snippet import lower\n")
    (package / "start.py").write_text(
        "from snippet import middle\ndef f():\n    from snippet import lower\n    from snippet import other\n"
    )
    assert list(map(str, imports.late_without_effect(package))) == ["start:3 imports lower from lower"]


def test_modules_that_an_import_loads_are_found(tmp_path):
    package = tmp_path / "snippet"
    (package / "lower").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "lower" / "__init__.py").write_text("import scipy.stats\n")
    (package / "lower" / "deep.py").write_text("class Kept:\n    import pandas\n")
    (package / "late.py").write_text("import matplotlib\n")
    (package / "start.py").write_text(
        "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from snippet import late\n"
        "try:\n    from snippet.lower.deep import Kept\nexcept ImportError:\n    Kept = None\n"
        "def f():\n    from snippet import late\n"
    )
    loaded = imports.loaded(package, "start")
    assert loaded.modules == {"__init__", "start", "lower", "lower.deep"}
    assert loaded.libraries == {"scipy.stats", "pandas"}


def test_communication_stands_in_its_places_only():
    files = rules.python_files(rules.SOURCE)
    assert [found for path in files for found in rules.stray_communication(path)] == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.distributed.tensor import DTensor, distribute_tensor",
        "import torch.distributed.tensor",
        "import torch\ntorch.distributed.barrier()",
        "def f():\n    import torch.distributed",
        "dist.all_reduce(x)",
    ],
)
def test_stray_communication_is_found(tmp_path, snippet):
    for folder, is_stray in (
        ("model", True),
        ("metrics", True),
        ("train", True),
        ("model/moe/dispatch", False),
        ("parallel", False),
    ):
        path = tmp_path / folder / "snippet.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snippet)
        assert bool(rules.stray_communication(path, tmp_path)) == is_stray, folder


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "from torch.distributed.tensor import DTensor, Partial",
        "distance.x = dist",
        "x.dist.y",
    ],
)
def test_code_without_communication_is_not_found(tmp_path, snippet):
    path = tmp_path / "snippet.py"
    path.write_text(snippet)
    assert rules.stray_communication(path, tmp_path) == []


def test_no_module_keeps_state():
    assert [found for path in rules.python_files(rules.SOURCE) for found in rules.module_state(path)] == []


@pytest.mark.parametrize(
    ("snippet", "found"),
    [
        ("x = 0\ndef f():\n    global x\n    x = 1", "snippet.py:3: global x"),
        ("CACHE = {}", "snippet.py:1: a module-level container that starts empty"),
        ("CACHE: list[int] = []", "snippet.py:1: a module-level container that starts empty"),
        ("CACHE = collections.defaultdict(list)", None),
        ("CACHE = set()", "snippet.py:1: a module-level container that starts empty"),
        ("TABLE = {'a': 1}", None),
        ("def f():\n    cache = {}", None),
    ],
)
def test_module_state_is_found(tmp_path, snippet, found):
    path = tmp_path / "snippet.py"
    path.write_text(snippet)
    assert rules.module_state(path, tmp_path) == ([found] if found else [])


def test_files_are_named_after_ideas(tmp_path):
    files = rules.python_files(rules.SOURCE, rules.TESTS)
    assert [found for path in files for found in rules.vague_name(path)] == []
    assert rules.vague_name(tmp_path / "utils.py") == ["utils.py: name the idea"]


def test_nothing_is_left_for_later(tmp_path):
    files = rules.python_files(rules.SOURCE, rules.TESTS)
    assert [found for path in files for found in rules.leftovers(path)] == []
    path = tmp_path / "snippet.py"
    path.write_text("x = 1  # TO" + "DO: later\ny = 'TODOS'\n")
    assert rules.leftovers(path, tmp_path) == ["snippet.py:1: x = 1  # TO" + "DO: later"]


def imports_triton(path: Path) -> list[str]:
    """The imports of Triton, or of its kernels, that a module does when it is imported itself."""
    found = []
    for node in rules.tree_of(path).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] == "triton" or name.startswith("moefold.ops.triton")]
    return [f"{path.relative_to(rules.ROOT)}: {name}" for name in found]


def test_triton_is_imported_where_it_is_used_only():
    # CPU-only wheels of torch do not bring Triton.
    kernels = rules.SOURCE / "ops/triton"
    others = [path for path in rules.python_files(rules.SOURCE) if not path.is_relative_to(kernels)]
    assert [line for path in others for line in imports_triton(path)] == []
    assert imports_triton(kernels / "router.py")
