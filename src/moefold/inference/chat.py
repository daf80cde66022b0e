"""Messages to a model that knows conversations: its chat template around them, and where its turn ends. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from moefold.data.chat import ChatTemplate, load_chat_template
from moefold.data.jsonl import reject_surrogates
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.inference.source import ModelSource

_ANSWER = "answer"


def open_chat_template(source: ModelSource, tokenizer_override: str, template_override: str) -> ChatTemplate:
    """Load the template of a model: that of its fine-tuning, of its tokenizer's folder, or ChatML for bytes.

    Args:
        source: the model.
        tokenizer_override: "bytes" or a path that wins over the model's tokenizer; "" takes that.
        template_override: the file of a template that wins over the model's; "" takes that.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    tokenizer = tokenizer_override or source.data.tokenizer
    template = template_override or source.data.chat_template
    return load_chat_template(replace(source.data, tokenizer=tokenizer, chat_template=template))


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each message as a user's turn, with the assistant's turn begun after it.

    No special token is added: what the template writes is what the model has seen.

    Raises:
        ConfigError: the template refuses a message, or the model knows numbers only.
    """
    if isinstance(tokenizer, NumberTokenizer):
        raise ConfigError("--chat: the model was trained on bare ids, so it knows no text; name its --tokenizer")
    found = []
    for message in messages:
        reject_surrogates(message, "the prompt")
        text = template.prompt([{"role": "user", "content": message}], "the prompt", add_generation_prompt=True)
        found.append(tuple(tokenizer.encode(text).tolist()))
    return tuple(found)


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """Return what ends the assistant's turn: a token of its own, or else a text that several tokens spell.

    Returns:
        (ids that end the turn, text that ends it); both empty where the template writes nothing there.

    Raises:
        ConfigError: the template refuses a conversation of a question and an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    rendered = template.render(messages, None, "a question and an answer")
    response = rendered.text[rendered.responses[-1].start : rendered.responses[-1].stop] if rendered.responses else ""
    mark = response.rpartition(_ANSWER)[2].strip()
    ids = tokenizer.encode(mark).tolist() if mark else []
    return (frozenset(ids), "") if len(ids) == 1 else (frozenset(), mark)


class StopStringFilter:
    """Passes text on up to a mark, and holds back what may become the mark.

    Args:
        stop_string: the text that ends it; "" passes everything on.
    """

    def __init__(self, stop_string: str) -> None:
        self._stop_string = stop_string
        self._pending_text = ""
        self._is_stopped = False

    def push(self, text: str) -> str:
        """Return what of the text so far can be shown now."""
        if self._is_stopped or not self._stop_string:
            return "" if self._is_stopped else text
        whole = self._pending_text + text
        before, found, _ = whole.partition(self._stop_string)
        self._is_stopped = bool(found)
        length = 0 if found else self._partial_match_length(before)
        self._pending_text = before[len(before) - length :]
        return before[: len(before) - length]

    def finish(self) -> str:
        """Return what was held back and has not become the mark."""
        held = "" if self._is_stopped else self._pending_text
        self._pending_text = ""
        return held

    def _partial_match_length(self, text: str) -> int:
        """Characters at the end of a text with which the mark begins."""
        longest = min(len(text), len(self._stop_string) - 1)
        return next((length for length in range(longest, 0, -1) if text.endswith(self._stop_string[:length])), 0)
