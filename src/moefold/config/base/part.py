"""Parts: the choices of a recipe as frozen objects.

A part is a dataclass: one of several small ones in `parts/GROUP.py`, or in its own file, `parts/GROUP/KIND.py` or
`parts/GROUP/KIND/part.py` with its module and its formula in the same folder. A recipe names the part by its kind
(`config/base/part_registry.py`). The fields of the part are its settings. The other modules use only the methods of
the base class of its group, in `config/groups/`.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_type_hints

from moefold.config.base.part_registry import (
    built_in_kinds,
    describe_class,
    find_part,
    is_built_in,
    kind_of,
    kinds,
    kinds_with,
)
from moefold.config.base.plugins import origin_of, rebuild
from moefold.errors import RunError
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.base.small_sizes import SmallSizes


Built = TypeVar("Built")


class KindOf(NamedTuple):
    """Mark of a recipe key that chooses a part of a group, by its kind or a table with `kind`."""

    group: str
    fact: str = ""
    """Class attribute of the kinds that the key may name, true, or false after "not ". Empty: all kinds."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Built-in kinds that the key may name. Empty: all."""
        return kinds_with(self.group, *self.required) if self.fact else ()

    def takes(self, kind: str) -> bool:
        """Return whether the key may name a kind. The class of a built-in kind is imported to read the fact."""
        if kind not in built_in_kinds(self.group):
            return kind in kinds(self.group)
        name, value = self.required
        return not self.fact or getattr(find_part(self.group, kind), name) == value

    def classes(self) -> Iterator[Any]:
        """Yield the classes of the built-in kinds that the key may name, each imported on demand."""
        return (find_part(self.group, kind) for kind in built_in_kinds(self.group) if self.takes(kind))

    @property
    def required(self) -> tuple[str, bool]:
        """Class attribute of `fact`, and its value in the kinds that the key may name."""
        name = self.fact.removeprefix("not ")
        return name, name == self.fact


class UnusedKeys(NamedTuple):
    """Recipe keys outside a part that have no effect with it."""

    names: str
    """Keys as "section.key", separated by spaces."""
    reason: str
    """Reason, which follows "has no effect:" in the message."""
    remedy: str
    """Text of the way out."""


NONE = "none"
"""Value of a key whose optional table is absent."""
SOURCE = "from"
"""Key of a recorded table with the distribution or file of the part. No field can have this name."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Choice of a recipe. Fields are settings, `name: Annotated[type, bound, ...]`, with their help as docstring."""

    group: ClassVar[str]
    """Module or folder of `parts/`, and the end of the name of the entry points of other packages, `moefold.GROUP`."""
    key: ClassVar[str]
    """Recipe key that chooses the part of this group, as "section.key"."""
    interface: ClassVar[int]
    """Interface version that a part from outside was written for: 1 (`config/base/plugins.py`)."""
    changes_maths: ClassVar[bool] = True
    """False if no result depends on the part: the oracle of `moefold verify` does not read it."""

    is_of_layers: ClassVar[bool] = False
    """True if each layer has its own part, chosen by `model.layers` (`config/layers.py`)."""
    is_for_training: ClassVar[bool] = False
    """True if inference does not read the part: its rules apply only to training."""

    of_layers: ClassVar[frozenset[str]] = frozenset()
    """Fields that are set by the place of a layer, not by a recipe."""
    framed: ClassVar[frozenset[str]] = frozenset()
    """Fields that the oracle reads outside of the formula."""
    own_kind: ClassVar[str] = ""
    """Kind of a class of `parts/GROUP.py`. Empty: the file, or the entry point, names the kind."""

    def __init_subclass__(cls, *, kind: str = "") -> None:
        """Guard the methods of a class from outside, so that errors name it (`part_failures`).

        Args:
            kind: `own_kind`.
        """
        if kind:
            cls.own_kind = kind
        if not cls.__module__.startswith("moefold."):
            from moefold.config.base.part_failures import guard_methods

            guard_methods(cls)

    @property
    def kind(self) -> str:
        """Name of the part in a recipe."""
        return kind_of(type(self))

    def __str__(self) -> str:
        """Return the kind, for messages."""
        return self.kind

    def check(self, *args: Any, **kwargs: Any) -> Iterator[Problem]:
        """Yield the incompatible settings of a recipe. Bounds of a single setting are in its annotation.

        Args:
            args: the sections named by the parameters of the overriding method, such as `model` and `train`. `recipe`
                is the whole recipe (`config/rule.py`).
        """
        yield from ()

    def unused_keys(self, *args: Any) -> Iterator[UnusedKeys]:
        """Yield the keys without effect with this part, except keys of parts of other kinds, as `check` does."""
        yield from ()

    def shrink(self, small: "SmallSizes") -> Self:
        """Return the part with small sizes and the same code paths, for `moefold verify --shrink`."""
        nested = {field.name: getattr(self, field.name) for field in fields(self)}
        shrunk = {name: part.shrink(small) for name, part in nested.items() if isinstance(part, Part)}
        return replace(self, **shrunk) if shrunk else self

    def formula(self) -> Any:
        """Return the part in float64 for the oracle: a function, or a named tuple of functions and facts.

        None: `moefold verify` refuses recipes with it, by name.
        """
        return None

    def as_table(self) -> dict[str, Any]:
        """Return the part as a table of a recipe with all its keys, and `from`: its distribution or file."""
        owner: Any = type(self)
        values = {name: as_plain(getattr(self, name)) for name in settings_of(owner)}
        source = {} if is_built_in(type(self)) else {"from": origin_of(type(self))[1].as_dict()}
        return {"kind": self.kind, **values, **source}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a part of a file by the file's path: a rank in another interpreter has not imported it."""
        if is_built_in(type(self)) or not origin_of(type(self))[1].file:
            return super().__reduce_ex__(protocol)
        return rebuild, (*origin_of(type(self)), {field.name: getattr(self, field.name) for field in fields(self)})


def describe_part(part: Part) -> str:
    """Return the key and kind of a part, and if it is from outside also its distribution or file."""
    return describe_class(type(part))


def checked_build(part: Part, value: Any, kind: Callable[..., Built]) -> Built:
    """Return the result of a part's `build`. Raises RunError if it is of another class."""
    owner: Any = kind
    if not isinstance(value, owner):
        raise RunError(f"{describe_part(part)} builds a {type(value).__name__}, not a {owner.__name__}")
    built_value: Built = value
    return built_value


def missing_method(part: Part, method: str) -> RunError:
    """Return the error for a part without a method that its group requires of some parts."""
    return RunError(f"{describe_part(part)} lacks the method {method}")


def keys_of(section: Any) -> dict[str, Any]:
    """Return the keys of a section of a recipe by name. A part from outside is a table (`Part.as_table`)."""
    return {field.name: as_plain(getattr(section, field.name)) for field in fields(section)}


def as_plain(value: Any) -> Any:
    """Return a value in the form of a recipe: a part as its table, other values unchanged."""
    match value:
        case Part():
            return value.as_table()
        case Table():
            return keys_of(value)
        case _:
            return value


def parts_in(owner: Any) -> Iterator[Part]:
    """Yield the parts in a section, a table or a part, recursively."""
    for value in (getattr(owner, entry.name) for entry in fields(owner)):
        if isinstance(value, Part):
            yield value
        if isinstance(value, Part | Table):
            yield from parts_in(value)


def values_by_key(section: Any) -> dict[str, Any]:
    """Return the values of a section of a recipe by key, with the kind of a part only."""
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    return {name: value.kind if isinstance(value, Part) else value for name, value in values.items()}


def kind_or_part(value: str | Part) -> str | Part:
    """Return the kind of a built-in part, without its settings. A kind or a part from outside is returned unchanged."""
    return value.kind if isinstance(value, Part) and is_built_in(type(value)) else value


def without_source(value: Any, *names: str) -> Any:
    """Return the value of a key as plain data without the source of its part, for comparisons.

    Args:
        names: facts to leave out. Empty: none.
    """
    if not isinstance(value, dict):
        return value
    source: Any = value["from"] if isinstance(value.get("from"), dict) else {}
    source_facts = {name: fact for name, fact in source.items() if names and name not in names}
    plain = {key: without_source(entry, *names) for key, entry in value.items() if key != "from" or not source}
    return plain | ({"from": source_facts} if source_facts else {})


@cache
def settings_of(part: Any) -> tuple[str, ...]:
    """Return the fields of a class of parts that a recipe sets, in order: all except `of_layers`."""
    layer_fields = part.of_layers if issubclass(part, Part) else ()
    return tuple(entry.name for entry in fields(part) if entry.init and entry.name not in layer_fields)


@cache
def tables_of(owner: Any) -> dict[str, "KindOf | type[Table]"]:
    """Return the fields with tables in a section, a table or a class of parts, with the kind of table.

    The kind of table is the annotation of a part, or the class of a table without `kind`.
    """
    hints = get_type_hints(owner, include_extras=True)
    tables: dict[str, KindOf | type[Table]] = {}
    for name in [entry.name for entry in fields(owner)]:
        annotations = getattr(hints[name], "__metadata__", ())
        annotation = next((annotation for annotation in annotations if isinstance(annotation, KindOf)), None)
        plain = hints[name].__origin__ if annotations else hints[name]
        arms = [arm for arm in (get_args(plain) or (plain,)) if isinstance(arm, type)]
        if annotation is not None:
            tables[name] = annotation
        elif table := next((arm for arm in arms if issubclass(arm, Table)), None):
            tables[name] = table
    return tables


@cache
def default_of_field(owner: Any, name: str) -> Any:
    """Return the default of a field of a section, a table or a class of parts, or None if it must be given."""
    entry = next(entry for entry in fields(owner) if entry.name == name)
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return None if entry.default is MISSING else entry.default


@cache
def required_settings(owner: Any) -> frozenset[str]:
    """Return the fields of a table or a class of parts without a default."""
    required = (entry for entry in fields(owner) if entry.default is MISSING and entry.default_factory is MISSING)
    return frozenset(entry.name for entry in required)


def part_field(group: str, kind: str) -> Any:
    """Return the default of a field: the part of a kind with its defaults."""
    return field(default_factory=lambda: make_part(group, kind))


@cache
def metadata_of(owner: Any) -> dict[str, tuple[Any, ...]]:
    """Return the metadata in the annotation of each field of a class of parts, or of a section, in order."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(owner)}


class Section:
    """Section or table that replaces the kind of a part by the part with its defaults."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace kinds by parts. `check_config` refuses a kind that remains, because no part has it."""
        owner: Any = type(self)
        for name, annotation in _part_annotations(owner):
            value = getattr(self, name)
            if isinstance(value, str) and annotation.takes(value):
                object.__setattr__(self, name, make_part(annotation.group, value))


@dataclass(frozen=True, kw_only=True)
class Table(Section):
    """Settings in a table without `kind`, such as `model.rope`. An optional table may be `None`."""


@cache
def make_part(group: str, kind: str, **settings: Any) -> Any:
    """Return the part of a kind with the given settings, and defaults for the others.

    Args:
        settings: values of its fields, unchecked.

    Raises:
        ConfigError: the group has no such kind, or its package is broken.
    """
    return find_part(group, kind)(**settings)


@cache
def _part_annotations(section: Any) -> tuple[tuple[str, KindOf], ...]:
    """Return the keys of a section that choose a part with its own settings, each with its annotation."""
    entries = ((name, entry) for name, annotations in metadata_of(section).items() for entry in annotations)
    return tuple((name, entry) for name, entry in entries if isinstance(entry, KindOf))
