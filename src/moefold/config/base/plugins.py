"""Parts from outside: entry points of installed packages, and classes in Python files that the user names.

A file is imported only by `import_file`, for a name in a recipe, on a command line or in a program. Names in a
checkpoint are looked up only among the imported files (`imported_class`), so that no checkpoint runs code.
"""

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import getattr_static, isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from moefold.config.base.path_rules import non_unicode_reason
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.terminal import printable

ENTRY_POINTS = "moefold."
"""Start of the name of an entry-point group. The rest is the group of the part."""
INTERFACE = 1
"""Version of the interface of parts. A part from outside states it: `interface: ClassVar[int] = 1`."""
MAX_FILE_BYTES = 2**20
_RESERVED = frozenset({"kind", "group", "key"})
_RENAMED = {
    "choose": "select",
    "decoding_is_post": "softmax_in_decoding",
    "falls_back_to": "resolves_to",
    "prefers": "resolves_to",
    "room": "receive_capacity",
    "written_as": "resolves_to",
}
"""Present names of optional members of parts, by the names that moefold 0.2.0 read."""
_FILE_MODULE = "moefold_part_"
"""Start of the name of a module that was imported from a file."""


class Origin(NamedTuple):
    """Source of a part: a distribution with its version, or a file with its sha256."""

    distribution: str = ""
    version: str = ""
    file: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        """Return the origin as text for messages."""
        return self.file or f"{self.distribution} {self.version}".strip() or "a program"

    def as_dict(self) -> dict[str, str]:
        """Return the fields that are set."""
        return {name: value for name, value in self._asdict().items() if value}


class MissingPartError(ConfigError):
    """Missing part of a recipe or checkpoint: the user has not named its file, or its package is not installed."""


def raise_missing(problems: Iterable[object]) -> None:
    """Raise the errors of missing parts as one `MissingPartError` that names them all."""
    if missing := [str(problem) for problem in problems if isinstance(problem, MissingPartError)]:
        raise MissingPartError("; ".join(missing))


def split_file_kind(kind: str) -> tuple[Path, str] | None:
    """Split FILE.py:CLASS, and return None if a kind has another form."""
    path, colon, name = kind.rpartition(":")
    return (Path(path), name) if colon and path.endswith(".py") and name.isidentifier() else None


def import_file(kind: str, folder: Path = Path()) -> tuple[str, Origin]:
    """Import the file of a kind that the user named. Each content is imported once.

    Args:
        kind: FILE.py:CLASS.
        folder: folder of a relative path.

    Returns:
        The kind with the file's name without its folder, and the origin.

    Raises:
        ConfigError: the file is missing or too large, raises at import, or lacks the class.
    """
    split = split_file_kind(kind)
    assert split is not None, "FILE.py:CLASS"
    path, name = split
    if reason := non_unicode_reason(kind) or ("has a NUL character" if "\0" in kind else ""):
        raise ConfigError(f"part {kind!r} {reason}")
    file = folder / path
    if not file.is_file():
        raise ConfigError(f"part {kind!r}: {str(file.absolute())!r} does not exist; name a Python file")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"part {kind!r} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"part {kind!r}: the file has more than {MAX_FILE_BYTES:,} bytes")
    origin = Origin(file=str(file.resolve()), sha256=hashlib.sha256(content).hexdigest())
    if _module_name(origin) not in sys.modules:
        _import_content(kind, origin, content)
    if not hasattr(sys.modules[_module_name(origin)], name):
        raise ConfigError(f"part {kind!r}: {origin.file} has no class {name!r}")
    return f"{file.name}:{name}", origin


def import_files(kinds: str | Iterable[str]) -> None:
    """Import the files of the parts of a trained model.

    Args:
        kinds: FILE.py:CLASS of each.

    Raises:
        ConfigError: a name has another form, or `import_file` refuses it.
    """
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        if split_file_kind(kind) is None:
            raise ConfigError(f"{Setting('--part', kind):s} must be FILE.py:CLASS, such as parts.py:Gated")
        import_file(kind)


def imported_class(kind: str, origin: Origin) -> tuple[Any, Origin]:
    """Return a class of an imported file, and its origin.

    Order of preference: a file with the same path and content, with the same content, with the same name.

    Args:
        kind: FILE.py:CLASS, with the file's name without its folder.
        origin: the recorded origin.

    Raises:
        MissingPartError: no such file is imported.
    """
    file, _, name = kind.rpartition(":")
    modules = [module for key, module in sys.modules.items() if key.startswith(_FILE_MODULE)]
    candidates = [(_origin_of_module(module), module) for module in modules if hasattr(module, name)]
    ranked = sorted(
        (candidate for candidate in candidates if Path(candidate[0].file).name == Path(file).name),
        key=lambda candidate: (candidate[0] == origin, candidate[0].sha256 == origin.sha256),
    )
    if not ranked:
        part = f"{origin.file}:{name}" if Path(origin.file).is_file() else kind
        former = f", which was {origin.file}" if origin.file else ""
        raise MissingPartError(f"was trained with {kind}{former}; name it: {Setting('--part', shlex.quote(part)):s}")
    return getattr(ranked[-1][1], name), ranked[-1][0]


def rebuild(kind: str, origin: Origin, values: Mapping[str, Any]) -> Any:
    """Rebuild a part of a file in a rank that was started with another interpreter.

    Args:
        kind: FILE.py:CLASS, with the file's name without its folder.

    Raises:
        ConfigError: the file has changed since.
    """
    name = kind.rpartition(":")[2]
    if _module_name(origin) not in sys.modules:
        _, current = import_file(f"{origin.file}:{name}")
        if current != origin:
            raise ConfigError(f"part {origin.file}:{name} has changed while the run was starting; start it again")
    return getattr(sys.modules[_module_name(origin)], name)(**values)


def entry_point_of(group: str, kind: str) -> EntryPoint:
    """Return the entry point of a kind. Raises ConfigError if two distributions have it."""
    points = entry_points_of(group)[kind]
    if len(points) > 1:
        names = " and ".join(str(origin_of_entry(point)) for point in points)
        raise ConfigError(f"{names} both bring the {group} {kind!r}; uninstall one of them")
    return points[0]


def load_entry_point(point: EntryPoint, key: str) -> Any:
    """Import the class that an entry point names.

    Args:
        key: recipe key that chooses the part.

    Raises:
        ConfigError: it raises at import.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}={point.name!r} of {origin_of_entry(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {printable(error)}; repair or update that package"
        ) from error


def origin_of_entry(point: EntryPoint) -> Origin:
    """Return the distribution of an entry point."""
    return Origin() if point.dist is None else Origin(point.dist.name, point.dist.version)


def origin_of(part: Any) -> tuple[str, Origin]:
    """Return the kind and the origin of the class of a part from outside."""
    if part.__module__.startswith(_FILE_MODULE):
        origin = _origin_of_module(sys.modules[part.__module__])
        return f"{Path(origin.file).name}:{part.__qualname__}", origin
    return entry_of(part)


@cache
def entry_points_of(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by kind. A kind of several distributions has several entry points."""
    by_kind: dict[str, tuple[EntryPoint, ...]] = {}
    for point in all_entry_points():
        if point.group == f"{ENTRY_POINTS}{group}":
            by_kind[point.name] = (*by_kind.get(point.name, ()), point)
    return dict(sorted(by_kind.items()))


def class_problems(part: Any, base: type[Any]) -> Iterator[str]:
    """Yield the reasons why an object from outside is not a part of a group.

    Args:
        part: the object that the entry point or the file names.
    """
    if not (isinstance(part, type) and issubclass(part, base)):
        yield f"is not a subclass of {base.__module__}.{base.__qualname__}"
        return
    if getattr(part, "interface", None) != INTERFACE:
        stated = getattr(part, "interface", None)
        yield (
            f"states no version of the interface: write interface: ClassVar[int] = {INTERFACE}"
            if stated is None
            else f"is for version {stated!r} of the interface of parts, and this moefold has version {INTERFACE}"
        )
        return
    params = vars(part).get("__dataclass_params__")
    if params is None:
        yield "is not a dataclass: write @dataclass(frozen=True, kw_only=True)"
        return
    if not params.frozen or not params.eq:
        yield "is not frozen and compared by its fields: write @dataclass(frozen=True, kw_only=True)"
    names = ("__call__", *(name for name in dir(part) if not name.startswith("__")))
    missing = sorted(name for name in names if _is_left_open(getattr_static(part, name, None)))
    if missing:
        yield f"lacks the method{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    for name in dir(base):
        if isfunction(getattr_static(base, name)) and not callable(getattr(part, name)):
            yield f"has {name}={getattr(part, name)!r}, which must be a method"
    for name, present in _RENAMED.items():
        if hasattr(part, name) and hasattr(base, present):
            yield f"has {name}, which is now {present}"
    reserved = sorted(_RESERVED & {field.name for field in fields(part)})
    if reserved:
        yield f"has a field {reserved[0]}, a word that recipes and parts use themselves"


def _is_left_open(method: Any) -> bool:
    """Return whether a method of this package only raises NotImplementedError."""
    if isinstance(method, property):
        method = method.fget
    return (
        isfunction(method)
        and method.__module__.startswith("moefold.")
        and NotImplementedError.__name__ in method.__code__.co_names
    )


@cache
def entry_of(part: Any) -> tuple[str, Origin]:
    """Return kind and distribution of the entry point of a class, or MODULE:CLASS for a class of a program."""
    points = [point for kind_points in entry_points_of(part.group).values() for point in kind_points]
    root = part.__module__.partition(".")[0]
    name = f"{part.__module__}:{part.__qualname__}"
    # Other entry points of the package may be broken. A recipe that names them is refused.
    for point in sorted(points, key=lambda point: point.value != name):
        with suppress(ConfigError):
            if point.module.partition(".")[0] == root and load_entry_point(point, part.group) is part:
                return point.name, origin_of_entry(point)
    return name, Origin()


@cache
def all_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of all groups of parts, of all installed distributions."""
    points = entry_points()
    groups = sorted(group for group in points.groups if group.startswith(ENTRY_POINTS))
    return tuple(point for group in groups for point in points.select(group=group))


def _import_content(kind: str, origin: Origin, content: bytes) -> None:
    name = _module_name(origin)
    spec = importlib.util.spec_from_file_location(name, origin.file)
    assert spec is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its annotations in the module of its class.
    sys.modules[name] = module
    vars(module)["__sha256__"] = origin.sha256
    try:
        exec(compile(content, origin.file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"part {kind!r} cannot be imported: {type(error).__name__}: {printable(error)}; repair it"
        ) from error


def _module_name(origin: Origin) -> str:
    """Return the name of the module of a file, the same in all ranks."""
    return _FILE_MODULE + hashlib.sha256(f"{origin.file}\0{origin.sha256}".encode()).hexdigest()[:16]


def _origin_of_module(module: ModuleType) -> Origin:
    return Origin(file=str(module.__file__), sha256=vars(module)["__sha256__"])
