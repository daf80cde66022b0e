"""Pipeline layouts, `Et*3|(tt|)*2,m|L`: the parts of the model on each stage, and their ranks.

The notation is the same as in Megatron-Core's `--pipeline-model-parallel-layout`:

    E  embedding        t  transformer layer        m  MTP (multi-token prediction) layer     L  output head and loss
    |  next stage       x*n  x, n times, where x is one letter or (a group)                   , and blanks are ignored

Stages follow each other in model order, virtual stages included. A stage without letters passes its input on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moefold.message_text import Setting

LETTERS = "EtmL"
LETTER_MEANINGS = {"E": "the embedding", "t": "a layer", "m": "a layer of multi-token prediction", "L": "the loss"}
MAX_SYMBOLS = 100_000
"""Upper bound of letters and bars in an expanded layout, far above any model."""
MAX_DEPTH = 20
"""Upper bound of nested groups."""


class LayoutSyntaxError(ValueError):
    """Syntax error of a layout. The message names the character, counted from 1."""


@dataclass(frozen=True)
class LayoutSymbol:
    """One letter or bar of an expanded layout."""

    kind: str
    """E, t, m, L or |."""
    position: int
    """Index of the symbol's character in the string, counted from 1."""


@dataclass(frozen=True)
class StageParts:
    """Parts of the model on one stage, in model order."""

    has_embedding: bool
    layers: range
    num_mtp_layers: int
    """Number of MTP (multi-token prediction) layers."""
    has_loss: bool

    @property
    def is_empty(self) -> bool:
        """True if the stage has no weights."""
        return not (self.has_embedding or self.layers or self.num_mtp_layers or self.has_loss)


def expand_layout(text: str) -> list[LayoutSymbol]:
    """Expand repetitions and groups of a layout into its symbols.

    Raises:
        LayoutSyntaxError: the string does not follow the notation.
    """
    symbols = _LayoutParser(text).parse_sequence()
    if not symbols:
        raise LayoutSyntaxError("it is empty; the shortest layout is 'EtL'")
    return symbols


def validate_layout(text: str, *, num_layers: int, num_mtp_layers: int, num_stages: int) -> Iterator[str]:
    """Yield the errors of a layout for a model and a number of stages, one phrase each, with the position."""
    try:
        symbols = expand_layout(text)
    except LayoutSyntaxError as error:
        yield str(error)
        return
    yield from _validate_ends(symbols)
    yield from _validate_count(symbols, "t", num_layers, f"model.layers={num_layers}")
    yield from _validate_count(symbols, "m", num_mtp_layers, f"model.mtp_layers={num_mtp_layers}")
    yield from _validate_mtp_order(symbols)
    bars = [part.position for part in symbols if part.kind == "|"]
    if len(bars) + 1 != num_stages:
        where = f"the first | too many is at character {bars[num_stages - 1]}" if len(bars) >= num_stages else ""
        yield (
            f"it has {len(bars) + 1} stage{'s' if bars else ''}, and "
            f"{Setting('parallel.pp')}*parallel.virtual_stages={num_stages}{'; ' + where if where else ''}"
        )


def parse_layout(text: str) -> tuple[StageParts, ...]:
    """Return the stages of a valid layout."""
    stages: list[StageParts] = []
    next_layer = 0
    for kinds in "".join(part.kind for part in expand_layout(text)).split("|"):
        layers = range(next_layer, next_layer + kinds.count("t"))
        next_layer = layers.stop
        stages.append(StageParts("E" in kinds, layers, kinds.count("m"), "L" in kinds))
    return tuple(stages)


def format_layout(stages: tuple[StageParts, ...]) -> str:
    """Return the shortest spelling of some stages: runs of a letter with a count."""
    return "|".join(
        "E" * stage.has_embedding
        + _repeat_letter("t", len(stage.layers))
        + _repeat_letter("m", stage.num_mtp_layers)
        + "L" * stage.has_loss
        for stage in stages
    )


def even_stages(num_layers: int, num_mtp_layers: int, num_stages: int) -> tuple[StageParts, ...]:
    """Split consecutive layers as evenly as possible. The first stages take the remainder."""
    base, extra = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + base + (stage < extra))
    last = num_stages - 1
    return tuple(
        StageParts(i == 0, range(bounds[i], bounds[i + 1]), num_mtp_layers if i == last else 0, i == last)
        for i in range(num_stages)
    )


class _LayoutParser:
    """Recursive-descent parser of a layout."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._cursor = 0
        self._depth = 0

    def parse_sequence(self, opened_at: int | None = None) -> list[LayoutSymbol]:
        """Parse units up to the end of the string, or of the group opened at character `opened_at`."""
        symbols: list[LayoutSymbol] = []
        unit: list[LayoutSymbol] | None = None
        while self._cursor < len(self._text):
            char = self._text[self._cursor]
            position = self._cursor + 1
            self._cursor += 1
            if char in ", ":
                unit = None
            elif char == "*":
                if unit is None:
                    raise LayoutSyntaxError(f"nothing to repeat before '*' at character {position}")
                count = self._parse_count(position)
                if len(symbols) + len(unit) * (count - 1) > MAX_SYMBOLS:
                    raise LayoutSyntaxError(f"more than {MAX_SYMBOLS} letters and bars up to character {self._cursor}")
                symbols += unit * (count - 1)
                unit = None
            elif char == ")":
                if opened_at is None:
                    raise LayoutSyntaxError(f"')' at character {position} closes nothing")
                return symbols
            else:
                unit = self._parse_unit(char, position)
                symbols += unit
            if len(symbols) > MAX_SYMBOLS:
                raise LayoutSyntaxError(f"more than {MAX_SYMBOLS} letters and bars up to character {self._cursor}")
        if opened_at is not None:
            raise LayoutSyntaxError(f"'(' at character {opened_at} is not closed")
        return symbols

    def _parse_unit(self, char: str, position: int) -> list[LayoutSymbol]:
        if char == "(":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise LayoutSyntaxError(f"more than {MAX_DEPTH} groups within each other at character {position}")
            group = self.parse_sequence(position)
            self._depth -= 1
            if not group:
                raise LayoutSyntaxError(f"an empty group at character {position}")
            return group
        if char in LETTERS or char == "|":
            return [LayoutSymbol(char, position)]
        raise LayoutSyntaxError(
            f"unexpected {char!r} at character {position}; use E, t, m, L, | and (...)*n, as in 'Et*3|(tt|)*2tL'"
        )

    def _parse_count(self, star: int) -> int:
        first = self._cursor
        while self._cursor < len(self._text) and self._text[self._cursor] in "0123456789":
            self._cursor += 1
        digits = self._text[first : self._cursor]
        if not digits.strip("0"):
            raise LayoutSyntaxError(f"'*' at character {star} needs a count of at least 1 after it")
        if len(digits) > len(str(MAX_SYMBOLS)) or int(digits) > MAX_SYMBOLS:
            raise LayoutSyntaxError(f"the count {digits} at character {first + 1} is larger than {MAX_SYMBOLS}")
        return int(digits)


def _validate_ends(parts: list[LayoutSymbol]) -> Iterator[str]:
    """Check that E occurs once, as the first symbol, and L once, as the last."""
    for kind, index, word in (("E", 0, "first"), ("L", -1, "last")):
        matching = [part for part in parts if part.kind == kind]
        if not matching:
            yield f"{kind}, {LETTER_MEANINGS[kind]}, is missing; write it at the {'start' if kind == 'E' else 'end'}"
        elif len(matching) > 1:
            yield f"a second {kind} at character {matching[1].position}; the model has {LETTER_MEANINGS[kind]} once"
        elif parts[index].kind != kind:
            yield f"{kind} at character {matching[0].position} must be the {word} letter"


def _validate_count(parts: list[LayoutSymbol], kind: str, expected: int, name: str) -> Iterator[str]:
    places = [part.position for part in parts if part.kind == kind]
    if len(places) > expected:
        yield f"it has {kind} {len(places)} times, and {name}; the first too many is at character {places[expected]}"
    elif len(places) < expected:
        place = f"after character {places[-1]}" if places else "before the L"
        yield f"it has {kind} {len(places)} times, and {name}; add {expected - len(places)}, {place} for example"


def _validate_mtp_order(parts: list[LayoutSymbol]) -> Iterator[str]:
    """Check that MTP layers come after all others, on the stage of the loss, whose output head they share."""
    mtp = [i for i, part in enumerate(parts) if part.kind == "m"]
    if not mtp:
        return
    last_layer = max((i for i, part in enumerate(parts) if part.kind == "t"), default=-1)
    last_bar = max((i for i, part in enumerate(parts) if part.kind == "|"), default=-1)
    if mtp[0] < last_layer:
        yield (
            f"m at character {parts[mtp[0]].position} must come after every t, and one is at character "
            f"{parts[last_layer].position}"
        )
    elif mtp[0] < last_bar:
        yield (
            f"m at character {parts[mtp[0]].position} must be on the stage of L, whose output head it shares; "
            f"move it after the | at character {parts[last_bar].position}"
        )


def _repeat_letter(letter: str, count: int) -> str:
    return letter * count if count < 4 else f"{letter}*{count}"


@dataclass(frozen=True)
class Stage:
    """One pipeline stage (model chunk). A rank has several with virtual stages."""

    index: int
    """Position in model order, from 0."""
    pp_rank: int
    parts: StageParts

    @property
    def is_first(self) -> bool:
        """True if the stage has the embedding."""
        return self.parts.has_embedding

    @property
    def is_last(self) -> bool:
        """True if the stage computes the loss (and MTP, if the model has it)."""
        return self.parts.has_loss


@dataclass(frozen=True)
class StagePlan:
    """All stages of a recipe, in model order."""

    stages: tuple[Stage, ...]

    @property
    def layout(self) -> str:
        """Stages in the notation of `parallel.pipeline_layout`."""
        return format_layout(tuple(stage.parts for stage in self.stages))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage.pp_rank for stage in self.stages)

    @property
    def embedding_ranks(self) -> tuple[int, int]:
        """Pipeline ranks of the first and the last stage, which may hold a copy of the embedding."""
        return self.ranks[0], self.ranks[-1]

    def stages_of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of one pipeline rank."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def rank_of_layers(self, num_layers: int) -> dict[int, int]:
        """Return the pipeline rank of every layer by number. MTP layers follow the `num_layers`."""
        owners = {i: stage.pp_rank for stage in self.stages for i in stage.parts.layers}
        mtp_ranks = [stage.pp_rank for stage in self.stages for _ in range(stage.parts.num_mtp_layers)]
        return owners | {num_layers + i: rank for i, rank in enumerate(mtp_ranks)}
