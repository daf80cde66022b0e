"""Prompts of reinforcement learning: JSON lines with columns for the reward, or generated problems."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import ChatRequest, ChatTemplate, Message, load_chat_template
from moefold.data.conversations.conversation_format import (
    MEDIA_FIELDS,
    parse_messages,
    parse_tools,
    refuse_unread,
    with_system,
)
from moefold.data.conversations.conversation_tokens import SkippedRows, is_each_tool_written
from moefold.data.conversations.reward_prompt import RewardPrompt
from moefold.data.index_shuffle import EpochOrder
from moefold.data.source_listing import conversation_files
from moefold.data.sources.file_formats import JsonlRecord, column_text, jsonl_records, refuse_surrogates
from moefold.data.synthetic_problems import Problems, check_task_tokenizer
from moefold.data.tokenizer import Tokenizer, refuse_nul
from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints
from moefold.message_text import Setting

PROMPT_COLUMN = "prompt"
RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids"})
"""Names of arguments of a reward function, which columns may not have."""
_VALIDATION = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with the columns of its row."""

    source: Any
    """Prompt for the reward function: a text, or the messages of a conversation."""
    text: str
    """The text that the model continues."""
    ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""
    """FILE:LINE or the number of a problem, for messages."""


CheckPrompt = Callable[[Prompt], None]


class TaskPrompts:
    """Problems of a task as prompts. The reward function receives their columns."""

    def __init__(self, problems: Problems, tokenizer: Tokenizer, reward_prompt: RewardPrompt | None = None) -> None:
        self._problems = problems
        self._reward_prompt = reward_prompt
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 2**40

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`."""
        problem = self._problems.problem(index)
        text = problem.prompt if self._reward_prompt is None else self._reward_prompt.fill(problem.prompt)
        location = f"problem {index}"
        return Prompt(problem.prompt, text, _encode(text, self._tokenizer, location), problem.columns, location)


class FilePrompts:
    """Prompts of JSON lines files, reshuffled in each epoch."""

    def __init__(self, prompts: Sequence[Prompt], order_key: int | None) -> None:
        self.prompts = prompts
        self._order = EpochOrder(len(prompts), order_key)

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index` of the run."""
        return self.prompts[self._order(index)]


PromptSource = TaskPrompts | FilePrompts
"""Endless sequence of prompts, in the order of the run."""


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of a run."""

    train: PromptSource
    validation: PromptSource | None
    """Held-out prompts, or None if data.validation_fraction is 0."""


def open_prompts(
    data: DataConfig, tokenizer: Tokenizer, *, seed: int, check: CheckPrompt | None = None, reports: bool = False
) -> PromptData:
    """Open the prompts of a recipe. `check` raises ConfigError for a prompt of a file that the reward cannot score.

    Raises:
        ConfigError: a file is missing, a line is not a prompt, or the tokenizer has no end-of-text token.
    """
    check_task_tokenizer(data, tokenizer)
    has_validation = data.validation_fraction > 0
    if data.kind == "task":
        training, held_out = (Problems(data, seed, is_validation=is_held_out) for is_held_out in (False, True))
        return PromptData(
            TaskPrompts(training, tokenizer), TaskPrompts(held_out, tokenizer) if has_validation else None
        )
    prompts = read_prompts(data, tokenizer, check=check, reports=reports)
    order_key = hash_ints(seed) if data.shuffle else None
    if not has_validation:
        return PromptData(FilePrompts(prompts, order_key), None)
    num_held_out = max(1, round(len(prompts) * data.validation_fraction))
    if num_held_out >= len(prompts):
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction} leaves none of {len(prompts)} prompts to train on; "
            "give more prompts, or set data.validation_fraction=0"
        )
    order = sorted(range(len(prompts)), key=lambda i: hash_ints(len(prompts), i))
    held_out_numbers = sorted(order[:num_held_out])
    training_numbers = sorted(order[num_held_out:])
    return PromptData(
        FilePrompts([prompts[i] for i in training_numbers], order_key),
        FilePrompts([prompts[i] for i in held_out_numbers], hash_ints(0, _VALIDATION)),
    )


def read_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    reward_prompt: RewardPrompt | None = None,
    *,
    check: CheckPrompt | None = None,
    reports: bool = False,
) -> list[Prompt]:
    """Read and tokenise all prompts of the files that data.path names. `reports` logs a note on skipped rows.

    Raises:
        ConfigError: as in `open_prompts`.
    """
    reader = _PromptReader(data, tokenizer, reward_prompt, check)
    prompts = list(reader.usable_prompts())
    note = reader.skipped.note()
    if not prompts:
        raise ConfigError(
            f"{Setting('data.path', data.path)} holds no prompt; name files of lines with a column {PROMPT_COLUMN!r}"
            + (f" ({note})" if note else "")
        )
    if reports and note:
        logger.warning("%s", note)
    return prompts


class _PromptReader:
    """Reader of the prompts of the files that data.path names."""

    def __init__(
        self, data: DataConfig, tokenizer: Tokenizer, reward_prompt: RewardPrompt | None, check: CheckPrompt | None
    ) -> None:
        self.skipped = SkippedRows(skips=data.skip_bad_rows)
        self._data = data
        self._tokenizer = tokenizer
        self._reward_prompt = reward_prompt
        self._check = check
        self._template: ChatTemplate | None = None

    def usable_prompts(self) -> Iterator[Prompt]:
        """Yield the prompts of the rows that are not skipped. The first prompt determines the form of all prompts."""
        first: Prompt | None = None
        for path in conversation_files(self._data):
            for record in jsonl_records(path, self.skipped.refuse):
                try:
                    prompt = self._read(record)
                    if first is not None:
                        _check_alike(prompt, first)
                    if self._check is not None:
                        self._check(prompt)
                except ConfigError as error:
                    self.skipped.refuse(error)
                else:
                    first = first or prompt
                    yield prompt

    def _read(self, record: JsonlRecord) -> Prompt:
        """Return the prompt of a row. Raises ConfigError if the row has no prompt, or it cannot be rendered."""
        source = prompt_of_row(record)
        if isinstance(source, str):
            text = source if self._reward_prompt is None else self._reward_prompt.fill(source)
            return _make_prompt(record, source, text, self._tokenizer)
        if self._template is None:
            self._template = load_chat_template(self._data, self._tokenizer)
            self._template.reward_prompt = self._reward_prompt
        tools = parse_tools(record)
        self._template.check_roles(ChatRequest(source, tools, record.location))
        text = self._template.render_prompt(source, record.location, add_generation_prompt=True, tools=tools)
        if not is_each_tool_written(tools or (), text, self._template.source_for(tools)):
            raise ConfigError(
                f"{record.location} has tools, which the chat template of {self._template.location} does not write; "
                f"set a template that does ({Setting('data.chat_template')}), or remove them"
            )
        return _make_prompt(record, source, text, self._tokenizer)


def _check_alike(prompt: Prompt, first: Prompt) -> None:
    if isinstance(prompt.source, str) != isinstance(first.source, str):
        raise ConfigError(
            f"{prompt.location} and {first.location}: one prompt is a text and one a list of messages; give all "
            "prompts one form"
        )
    if prompt.columns.keys() != first.columns.keys():
        raise ConfigError(
            f"{prompt.location} has the columns {sorted(prompt.columns)}, and {first.location} has "
            f"{sorted(first.columns)}; give every prompt the same columns"
        )


def prompt_of_row(record: JsonlRecord) -> str | list[Message]:
    """Return the text or the messages of a row's prompt.

    Raises:
        ConfigError: it has another type, or the row has parts that are not read.
    """
    source = record.fields.get(PROMPT_COLUMN)
    refuse_unread(record.fields, record.location, MEDIA_FIELDS)
    if isinstance(source, list):
        conversation = parse_messages(source, f"{record.location}: the prompt")
        return list(with_system(conversation, record.fields, record.location).messages)
    return column_text(record.fields, PROMPT_COLUMN, record.location)


def has_conversations(data: DataConfig, tokenizer: Tokenizer, check: CheckPrompt | None = None) -> bool:
    """Return whether the first prompt that `read_prompts` reads is a conversation. Then all prompts are."""
    first = next(_PromptReader(data, tokenizer, None, check).usable_prompts(), None)
    return first is not None and not isinstance(first.source, str)


def _make_prompt(record: JsonlRecord, source: Any, text: str, tokenizer: Tokenizer) -> Prompt:
    location = record.location
    refuse_surrogates(text, f"{location}: the prompt")
    refuse_nul(tokenizer, source, f"{location}: the prompt")
    ids = _encode(text, tokenizer, location)
    if not ids:
        raise ConfigError(f"{location}: the prompt is empty; a model continues at least one token")
    columns = {name: value for name, value in record.fields.items() if name != PROMPT_COLUMN}
    if clashes := sorted(columns.keys() & RESERVED_COLUMNS):
        raise ConfigError(
            f"{location}: the column {clashes[0]!r} has the name of an argument of reward functions; rename it"
        )
    return Prompt(source, text, ids, columns, location)


def _encode(text: str, tokenizer: Tokenizer, location: str) -> tuple[int, ...]:
    """Tokenise a prompt. Raise ConfigError if the model was trained on bare ids and the text is not numbers."""
    try:
        return tuple(tokenizer.encode(text).tolist())
    except ValueError as error:
        rule = f"{location}: the prompt cannot be tokenised: the model was trained on bare ids ({error})"
        raise ConfigError(f"{rule}; name its tokenizer with {Setting('data.tokenizer')}") from error
