"""Parts: the choices of a recipe as frozen objects.

A part is a dataclass in a file of its own: `parts/GROUP/KIND.py`, or `parts/GROUP/KIND/part.py` with its module and its
formula in the same folder. The name of the file is the kind that a recipe writes (`config/find.py`). Its fields are its
settings, and its methods answer everything else that is asked of it. `config/groups/` has the base class of each group.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_type_hints

from moefold.config.find import (
    built_in_kinds,
    describe_class,
    find_part,
    is_built_in,
    kind_of,
    kinds,
    kinds_with,
)
from moefold.config.outside import origin_of, rebuild
from moefold.config.problem import Problem
from moefold.config.small_sizes import SmallSizes
from moefold.errors import RunError

Built = TypeVar("Built")


class KindOf(NamedTuple):
    """Mark of a recipe key whose value is the kind of a part of a group, or a table with `kind`."""

    group: str
    fact: str = ""
    """Class attribute of the kinds that the key may name, true, or false after "not "; empty: all kinds."""

    @property
    def words(self) -> tuple[str, ...]:
        """Built-in kinds that the key may name; empty: all."""
        return kinds_with(self.group, *self.asked) if self.fact else ()

    def takes(self, kind: str) -> bool:
        """Return whether the key may name a kind; the class of a built-in one is imported to ask it for the fact."""
        if kind not in built_in_kinds(self.group):
            return kind in kinds(self.group)
        name, value = self.asked
        return not self.fact or getattr(find_part(self.group, kind), name) == value

    def classes(self) -> Iterator[Any]:
        """Yield the classes of the built-in kinds that the key may name, each imported when it is asked for."""
        return (find_part(self.group, kind) for kind in built_in_kinds(self.group) if self.takes(kind))

    @property
    def asked(self) -> tuple[str, bool]:
        """The class attribute, and its value in the kinds that the key may name."""
        name = self.fact.removeprefix("not ")
        return name, name == self.fact


class UnusedKeys(NamedTuple):
    """Recipe keys outside a part that have no effect with it."""

    names: str
    """Each as "section.key", separated by spaces."""
    reason: str
    """As it follows "has no effect:" in the message."""
    remedy: str
    """What to write instead."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One choice of a recipe. A field is a setting: `name: Annotated[type, bound, ...]`, with its help as docstring."""

    group: ClassVar[str]
    """Folder of `parts/`, and the end of the name of the entry points of other packages, `moefold.GROUP`."""
    key: ClassVar[str]
    """Recipe key that chooses the part of this group, as "section.key"."""
    interface: ClassVar[int]
    """Version of the interface that a part from outside was written for: 1 (`config/outside.py`)."""
    changes_maths: ClassVar[bool] = True
    """False for a part that no result depends on: `moefold verify` compares it with the oracle, which does not read it.
    """

    is_of_layers: ClassVar[bool] = False
    """Whether each layer has its own, which `model.layers` chooses (`config/layers.py`)."""
    is_for_training: ClassVar[bool] = False
    """True for a part that inference does not read: its rules hold for training alone."""

    of_layers: ClassVar[frozenset[str]] = frozenset()
    """Fields that the place of a layer sets, and no recipe."""
    framed: ClassVar[frozenset[str]] = frozenset()
    """Fields that the oracle reads around the formula, and not the formula."""

    def __init_subclass__(cls) -> None:
        """Name the failures of a class from outside; see `part_faults`."""
        if not cls.__module__.startswith("moefold."):
            from moefold.config.part_faults import guard_methods

            guard_methods(cls)

    @property
    def kind(self) -> str:
        """Word by which a recipe names the part."""
        return kind_of(type(self))

    def __str__(self) -> str:
        """Return the kind, as a message names it."""
        return self.kind

    def check(self, *args: Any, **kwargs: Any) -> Iterator[Problem]:
        """Yield what this part does not go with in a recipe. Bounds of one setting stand on its field.

        Args:
            args: the sections that the parameters of a part's own method name, such as `model` and `train`; `recipe` is
                the whole recipe (`config/rule.py`).
            kwargs: none.
        """
        yield from ()

    def unused_keys(self, *args: Any) -> Iterator[UnusedKeys]:
        """Yield keys without effect with this part, without the keys of parts of other kinds; asked as `check` is."""
        yield from ()

    def shrink(self, to: SmallSizes) -> Self:
        """Return the part with the sizes of a small recipe, and the same code paths, for `moefold verify --shrink`."""
        nested = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {name: part.shrink(to) for name, part in nested.items() if isinstance(part, Part)}
        return replace(self, **small) if small else self

    def formula(self) -> Any:
        """Return the part in float64 for the oracle: a function, or a named tuple of functions and facts.

        None: `moefold verify` refuses recipes with it, by name.
        """
        return None

    def as_table(self) -> dict[str, Any]:
        """Return the part as a recipe writes it, with all its keys, and `from`: its distribution or file."""
        owner: Any = type(self)
        values = {name: as_plain(getattr(self, name)) for name in settings_of(owner)}
        source = {} if is_built_in(type(self)) else {"from": origin_of(type(self))[1].as_dict()}
        return {"kind": self.kind, **values, **source}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a part of a file by the file, which a rank started with another interpreter has not imported."""
        if is_built_in(type(self)) or not origin_of(type(self))[1].file:
            return super().__reduce_ex__(protocol)
        return rebuild, (*origin_of(type(self)), {field.name: getattr(self, field.name) for field in fields(self)})


def describe_part(part: Part) -> str:
    """Return the key and kind of a part, and of one from outside its distribution or file."""
    return describe_class(type(part))


def built(part: Part, value: Any, kind: Callable[..., Built]) -> Built:
    """Return what a part has built; raise RunError if it is of another class."""
    owner: Any = kind
    if not isinstance(value, owner):
        raise RunError(f"{describe_part(part)} builds a {type(value).__name__}, which is no {owner.__name__}")
    found: Built = value
    return found


def lacks(part: Part, method: str) -> RunError:
    """Return the error of a part that lacks a method, which its group asks of some of its parts alone."""
    return RunError(f"{describe_part(part)} lacks the method {method}")


def keys_of(section: Any) -> dict[str, Any]:
    """Return the keys of a section of a recipe by name; a part from outside is a table (`Part.as_table`)."""
    return {field.name: as_plain(getattr(section, field.name)) for field in fields(section)}


def as_plain(value: Any) -> Any:
    """Return a value as a recipe writes it: a part as its table, and other values as they are."""
    match value:
        case Part():
            return value.as_table()
        case Table():
            return keys_of(value)
        case _:
            return value


def parts_in(owner: Any) -> Iterator[Part]:
    """Yield the parts of a section, a table or a part, and the parts in these."""
    for value in (getattr(owner, entry.name) for entry in fields(owner)):
        if isinstance(value, Part):
            yield value
        if isinstance(value, Part | Table):
            yield from parts_in(value)


def words_of(section: Any) -> dict[str, Any]:
    """Return the keys of a section of a recipe by name; of a part the kind alone."""
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    return {name: value.kind if isinstance(value, Part) else value for name, value in values.items()}


def word_of(value: str | Part) -> str | Part:
    """Return the kind of a built-in part, without its settings; a part from outside, and a kind, stay."""
    return value.kind if isinstance(value, Part) and is_built_in(type(value)) else value


def without_source(value: Any, *names: str) -> Any:
    """Return the value of a key as plain data, without facts on where its part comes from, for comparisons.

    Args:
        names: facts to leave out; none: all.
    """
    if not isinstance(value, dict):
        return value
    source: Any = value["from"] if isinstance(value.get("from"), dict) else {}
    kept = {name: fact for name, fact in source.items() if names and name not in names}
    plain = {key: without_source(entry, *names) for key, entry in value.items() if key != "from" or not source}
    return plain | ({"from": kept} if kept else {})


@cache
def settings_of(part: Any) -> tuple[str, ...]:
    """Return the fields of a class of parts that a recipe sets, in order: all but `of_layers`."""
    of_layers = part.of_layers if issubclass(part, Part) else ()
    return tuple(entry.name for entry in fields(part) if entry.init and entry.name not in of_layers)


@cache
def tables_of(owner: Any) -> dict[str, "KindOf | type[Table]"]:
    """Return the fields of a section, a table or a class of parts that have a table, with what it is.

    It is the mark of a part, or the class of a table without `kind`.
    """
    hints = get_type_hints(owner, include_extras=True)
    found: dict[str, KindOf | type[Table]] = {}
    for name in [entry.name for entry in fields(owner)]:
        marks = getattr(hints[name], "__metadata__", ())
        mark = next((mark for mark in marks if isinstance(mark, KindOf)), None)
        plain = hints[name].__origin__ if marks else hints[name]
        arms = [arm for arm in (get_args(plain) or (plain,)) if isinstance(arm, type)]
        if mark is not None:
            found[name] = mark
        elif table := next((arm for arm in arms if issubclass(arm, Table)), None):
            found[name] = table
    return found


@cache
def default_of_field(owner: Any, name: str) -> Any:
    """Return the default of a field of a section, a table or a class of parts; None if it must be given."""
    found = next(entry for entry in fields(owner) if entry.name == name)
    if found.default_factory is not MISSING:
        return found.default_factory()
    return None if found.default is MISSING else found.default


@cache
def required_settings(owner: Any) -> frozenset[str]:
    """Return the fields of a table or a class of parts without a default."""
    found = (entry for entry in fields(owner) if entry.default is MISSING and entry.default_factory is MISSING)
    return frozenset(entry.name for entry in found)


def by_default(group: str, kind: str) -> Any:
    """Return the default of a field: the part of a kind with its defaults."""
    return field(default_factory=lambda: make_part(group, kind))


@cache
def marks_of(owner: Any) -> dict[str, tuple[Any, ...]]:
    """Return the metadata in the annotation of each field of a class of parts, or of a section, in order."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(owner)}


class Section:
    """Section or table in which a word for a part becomes the part of this kind, with its defaults."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace words by parts; `check_config` refuses a word that is left, as no part has this kind."""
        owner: Any = type(self)
        for name, mark in _part_marks(owner):
            value = getattr(self, name)
            if isinstance(value, str) and mark.takes(value):
                object.__setattr__(self, name, make_part(mark.group, value))


@dataclass(frozen=True, kw_only=True)
class Table(Section):
    """Settings in a table without `kind`, such as `model.rope`; one that may be absent is `None`, or "none"."""


@cache
def make_part(group: str, kind: str, **settings: Any) -> Any:
    """Return the part of a kind with some settings, and the defaults of the others.

    Args:
        settings: values of its fields, unchecked.

    Raises:
        ConfigError: the group has no such kind, or its package is broken.
    """
    return find_part(group, kind)(**settings)


@cache
def _part_marks(section: Any) -> tuple[tuple[str, KindOf], ...]:
    """Return the keys of a section that choose a part with settings of its own, each with its mark."""
    found = ((name, entry) for name, marks in marks_of(section).items() for entry in marks)
    return tuple((name, entry) for name, entry in found if isinstance(entry, KindOf))
