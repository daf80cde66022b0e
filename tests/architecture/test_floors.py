"""Test the floors: no circular import, no import of a higher floor, and no torch in the folders without torch."""

import re

from tests.architecture import imports, rules

SOURCE = rules.SOURCE


def test_no_circles():
    """A part imports its module and its formula inside of a call, and these read its settings (design/071)."""
    found = [one for one in imports.imports(SOURCE) if not _is_of_its_own_folder(one)]
    assert imports.circles(found) == []


def _is_of_its_own_folder(one):
    folder, _, name = one.importer.rpartition(".")
    return name == "part" and folder.startswith("parts.") and one.imported.startswith(f"{folder}.")


def test_no_module_imports_a_higher_floor():
    assert [str(one) for one in imports.upward(imports.imports(SOURCE))] == []


def test_nothing_imports_a_part():
    """`config/base/part_registry.py` finds a part by its kind. Files of a part import their own folder."""
    of_parts = [one for one in imports.imports(SOURCE) if one.imported.startswith("parts.")]
    assert [str(one) for one in of_parts if not one.importer.startswith("parts.")] == []


def test_every_room_has_a_floor():
    rooms = {imports.room(name) for name in imports.modules(SOURCE)}
    assert rooms == set(imports.heights())


def test_ten_floors_as_the_page_lists_them():
    page = (rules.ROOT / "docs/architecture.md").read_text().partition("## Floors")[2].partition("\n## ")[0]
    listed = {}
    for floor, room in re.findall(r"^\| (\w*) ?\| `([\w./]+?)(?:\.py|/)` \|", page, re.MULTILINE):
        listed.setdefault(floor or list(listed)[-1], []).append(room.replace("/", "."))
    assert {name: [room for room in rooms if room != "__main__"] for name, rooms in imports.FLOORS.items()} == listed
    assert len(imports.FLOORS) <= 10
    assert sorted(re.findall(r"^\* `(\w+)\.py`:", page, re.MULTILINE)) == sorted(set(imports.LOOSE) - {"__init__"})
    assert set(re.findall(r"^\| \w* ?\| `(\w+)/` \|.*\| yes \|$", page, re.MULTILINE)) == set(imports.TORCH_FREE)


def _package(folder, **files):
    package = folder / "moefold"
    for name, text in files.items():
        path = package / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return package


def test_an_import_of_a_higher_floor_is_found(tmp_path):
    package = _package(tmp_path, config__schema="from moefold.model.rope import Rope", model__rope="class Rope: ...")
    assert [str(one) for one in imports.upward(imports.imports(package))] == [
        "config.schema:1 imports Rope from model.rope"
    ]


def test_an_import_of_a_higher_layer_of_a_folder_is_found(tmp_path):
    files = {
        "config/base/field": "from moefold.config.sections.run import Run",
        "config/sections/run": "from moefold.config.schema import Config",
        "config/groups/loss": "from moefold.config.sections.run import Run",
        "config/schema": "from moefold.config.groups.loss import Loss",
    }
    assert [str(one) for one in imports.upward(imports.imports(_package(tmp_path, **files)))] == [
        "config.base.field:1 imports Run from config.sections.run",
        "config.sections.run:1 imports Config from config.schema",
    ]


def test_a_circle_is_found_inside_functions_too(tmp_path):
    package = _package(
        tmp_path,
        model__rope="from moefold.model.norm import norm",
        model__norm="def norm():\n    import moefold.model.rope",
        model__mlp="from moefold.model.norm import norm",
    )
    assert imports.circles(imports.imports(package)) == [["model.norm", "model.rope"]]
