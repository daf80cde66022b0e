"""Conversations have the targets of transformers. Their prompts equal inference's, or a warning says so."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.cache_dir import default_cache_dir
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import ChatTemplate, load_chat_template
from moefold.data.conversations.conversation_cache import TokenizedConversations, open_conversations
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError

U, A = {"role": "user", "content": "Hello there?"}, {"role": "assistant", "content": "yes, the quick fox"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + '\nA: ' }}"
    "{% else %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% endif %}{% endfor %}"
)
HEADER = (
    "{{ '<s>' }}{% for m in messages %}{{ '[' + m.role + ']\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
THINKS = CHATML.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")
# As Qwen3: the reasoning of a turn is dropped when a user's turn follows.
FORGETS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_file(make_tokenizer_file: Callable[..., Path]) -> Path:
    import tokenizers

    file = make_tokenizer_file("<|im_start|>", "<|im_end|>", "<s>")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    # Pieces that span the end of a prompt.
    tokenizer.add_tokens(["\n\nyes", " yes", " the"])
    tokenizer.save(str(file))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    return file


def open_rows(folder: Path, rows: list[Any] | str, template: str, file: Path | None, **more: Any):
    """The conversations of rows, and the tokenizer."""
    path = folder / "rows.jsonl"
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.jinja").write_text(template)
    tokenizer = ByteTokenizer() if file is None else JsonTokenizer(file)
    data = DataConfig(kind="sft", path=str(path), tokenizer="bytes" if file is None else str(file), **more)
    data = replace(data, chat_template=str(folder / "chat.jinja")) if template else data
    found = open_conversations(data, tokenizer, shows_progress=False)
    return found, tokenizer


def targets(opened: tuple[TokenizedConversations, Any], number: int = 0) -> str:
    found, tokenizer = opened
    ids, mask = found.read(number, 10**6)
    return tokenizer.decode(ids[mask])


@pytest.mark.parametrize("rows", [[U, A], [U, A, U, {"role": "assistant", "content": " ☃ the end"}]])
@pytest.mark.parametrize("template", [SPACE, SPACE.replace("A: ", "A:\n\n"), SPACE.replace("\nA: ", "<|im_start|>")])
def test_marked_turns_equal_transformers(tmp_path: Path, tokenizer_file: Path, template: str, rows: list[Any]):
    transformers = pytest.importorskip("transformers")
    opened = open_rows(tmp_path, [{"messages": rows}], template, tokenizer_file)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_file.parent)
    made = theirs.apply_chat_template(rows, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = opened[0].read(0, 10**6)
    assert ids.tolist() == made["input_ids"]
    assert mask[1:].astype(int).tolist() == made["assistant_masks"][1:]
    assert mask.any()


@pytest.mark.parametrize("template", [CHATML, SPACE, HEADER, THINKS])
def test_unmarked_turns_follow_the_common_prefix_with_the_prompt(
    tmp_path: Path, tokenizer_file: Path, template: str, caplog: pytest.LogCaptureFixture
):
    """The first token of an answer is trained also where it begins in the prompt; a warning names the first row."""
    template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    fine = {"messages": [U, {"role": "assistant", "content": "1"}]}
    with caplog.at_level(logging.WARNING):
        opened = open_rows(tmp_path, [fine, {"messages": [U, A]}, {"messages": [U, A]}], template, tokenizer_file)
    ids, mask = opened[0].read(1, 10**6)
    text = load_chat_template(DataConfig(chat_template=str(tmp_path / "chat.jinja"))).render_prompt(
        [U], "", add_generation_prompt=True
    )
    prompt = opened[1].encode(text)
    common = next(i for i, (a, b) in enumerate(zip(ids, [*prompt, -1], strict=False)) if a != b)
    trained = opened[1].decode(ids[mask])
    assert trained.strip() == "yes, the quick fox<|im_end|>"
    assert np.flatnonzero(mask)[0] == common
    warned = [record.message for record in caplog.records if "other tokens than the conversation" in record.message]
    is_equal = common == len(prompt)
    assert is_equal == (not warned) == (template == CHATML)
    first = 1 if template == THINKS else 2
    assert is_equal or f"in {4 - first} rows, " in warned[0] and f"rows.jsonl:{first})" in warned[0]
    # The cache keeps the notices.
    assert is_equal or list(default_cache_dir().glob("*.notes.json"))


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"train": False}, {"trainable": False}, {"loss": False}, {"weight": 0.0}]
)
@pytest.mark.parametrize("template", [CHATML, SPACE])
def test_messages_of_weight_0_are_no_targets(tmp_path: Path, flag: dict[str, Any], template: str):
    bad = {"role": "assistant", "content": "bad", **flag}
    opened = open_rows(tmp_path, [{"messages": [U, bad, U, {**A, "weight": 1}]}], template, None)
    assert targets(opened) == "yes, the quick fox<|im_end|>"
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    rows = [{"conversations": [*turns, {"from": "gpt", "value": "d", **flag}]}]
    assert targets(open_rows(tmp_path, rows, template, None)) == "b<|im_end|>"


def test_reasoning_that_a_template_drops_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    thought = {"role": "assistant", "content": "<think>hm</think>one"}
    with caplog.at_level(logging.WARNING):
        opened = open_rows(tmp_path, [{"messages": [U, thought, U, thought]}], FORGETS, None)
    assert targets(opened) == "one<|im_end|><think>hm</think>one<|im_end|>"
    assert "it leaves out a part of the answer" in caplog.text
    assert "rows.jsonl:1, turn 2)" in caplog.text


def test_rows_of_trl_train_the_completion_only(tmp_path: Path):
    row = {"prompt": [U, {"role": "assistant", "content": "old"}, U], "completion": [A]}
    assert targets(open_rows(tmp_path, [row], CHATML, None)) == "yes, the quick fox<|im_end|>"
    with pytest.raises(ConfigError, match=r'rows.jsonl:1: one of "prompt" and "completion" is a list of messages'):
        open_rows(tmp_path, [{**row, "completion": "text"}], CHATML, None)


def test_templates_for_tools_and_parts_of_contents(tmp_path: Path):
    """Of two templates, the one for tools is taken with tools. Texts of a content are joined or passed on."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = ChatTemplate("{{ messages[0].content }}", location="t", special_tokens={}, tool_source="{{ tools[0] }}")
    assert chat.render([{"role": "user", "content": parts}], None, "f:1").text == "a\nb"
    assert chat.render([{"role": "user", "content": "a"}], ["clock"], "f:1").text == "clock"
    listed = "{% for p in messages[0].content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
    chat = ChatTemplate(listed, location="t", special_tokens={})
    assert chat.render([{"role": "user", "content": parts}], None, "f:1").text == "<a><b>"
    row = {"messages": [{"role": "user", "content": parts[:1]}, {**A, "content": [{"type": "text", "text": "z"}]}]}
    assert targets(open_rows(tmp_path, [row], CHATML, None)) == "z<|im_end|>"


SWITCHES = (
    "{% for m in messages %}<{% if m.content is string or m.role == 'assistant' %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p['text'] }};{% endfor %}{% endif %}>{% endfor %}"
)
LISTS = {
    "a\nb|c\nd": "{% for m in messages %}{{ m.content }}{{ '|' if not loop.last }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.type }}{{ tool['type'] }}{% endfor %}",
    "<a;b;><c\nd>": SWITCHES,
    # Only the first text would be written.
    "nonenone": "{% for m in messages %}{% if m.content is string %}none{% else %}{{ m.content[0].text }}{% endif %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_texts_is_one_for_templates_that_write_its_texts(text: str):
    """Whatever words the template has: a template that prints the list, or a part of it, gets the joined text."""
    contents = [[{"type": "text", "text": one} for one in pair] for pair in ("ab", "cd")]
    messages = [{"role": role, "content": one} for role, one in zip(("user", "assistant"), contents, strict=True)]
    chat = ChatTemplate(LISTS[text], location="t", special_tokens={})
    assert chat.render_prompt(messages, "f:1", add_generation_prompt=True) == text


def test_tools_and_reasoning_that_a_template_does_not_write_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    named = CHATML.replace("{% for", "{% if tools and messages | length > 2 %}{{ tools }}{% endif %}{% for", 1)
    thought = {**A, "reasoning_content": "it is\n\n  late"}
    rows = [{"messages": [U, A]}, {"messages": [U, A], "tools": tools}, {"messages": [U, thought, U, A]}]
    rows += [{"messages": [U, A, U, A], "tools": tools}]
    for template, tool_rows in ((CHATML, 2), (named, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            open_rows(tmp_path, rows, template, None)
        for count, what, row in ((tool_rows, "tools", 2), (1, "reasoning of answers (reasoning_content)", 3)):
            assert f"in {count} rows, it does not write the {what} (first: {tmp_path}/rows.jsonl:{row})" in caplog.text
            assert f"the chat template of {tmp_path}/chat.jinja: in {count} rows" in caplog.text
    writes = CHATML.replace("m.content", "(m.reasoning_content or '') + m.content")
    writes = "{{ tools | tojson if tools }}" + writes
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_rows(tmp_path, rows, writes, None)
    assert "does not write" not in caplog.text


def test_calls_that_a_template_does_not_write_are_refused(tmp_path: Path):
    old = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for field, message in (("function_call", old), ("tool_calls", calls)):
        with pytest.raises(
            ConfigError, match=f"rows.jsonl:1: message 2 has {field}, which the chat template of .* does"
        ):
            open_rows(tmp_path, [{"messages": [U, message]}], CHATML, None)
    name = "m.content + (m.tool_calls[0].function.name if m.tool_calls else '')"
    writes = CHATML.replace("m.content", name)
    assert targets(open_rows(tmp_path, [{"messages": [U, calls]}], writes, None)) == "f<|im_end|>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}", "<a><>"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<a><>"),
        ("{% for m in messages %}{{ 'calls' if m['content'] is none else m['content'] }}{% endfor %}", "acalls"),
    ],
)
@pytest.mark.parametrize("absent", [{}, {"content": None}])
def test_a_message_that_only_calls_tools_has_an_empty_content(template: str, text: str, absent: dict[str, Any]):
    chat = ChatTemplate(template, location="t", special_tokens={})
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], **absent}
    messages = [{"role": "user", "content": "a"}, calls]
    assert chat.render_prompt(messages, "f:1", add_generation_prompt=True) == text


@pytest.mark.parametrize(
    "text",
    [
        '[{"instruction": "a", "output": "b"},\n {"instruction": "c", "output": "d"}]',
        '\ufeff[\n{"instruction": "a", "output": "b"}, {"conversations": [{"from": "gpt", "value": "d"}]}\n]\n',
        '\ufeff{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "response": "d"}',
    ],
)
def test_arrays_and_byte_order_marks(tmp_path: Path, text: str):
    opened = open_rows(tmp_path, text, CHATML, None)
    assert [targets(opened, number) for number in range(len(opened[0]))] == ["b<|im_end|>", "d<|im_end|>"]


def test_the_message_on_an_element_of_an_array_has_its_number(tmp_path: Path):
    rows = '[{"prompt": "a", "response": "b"}, {"prompt": "a"}]'
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 \(element 2\): no"):
        open_rows(tmp_path, rows, CHATML, None)
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2 \(element 1\) holds a text, but every element .* jq -c .*-rows"
    ):
        open_rows(tmp_path, '[\n"a"]', CHATML, None)


BAD = {
    '{"messages": [{"role": "human", "content": "a"}]}': "message 1 has the role 'human', .* did you mean 'user'",
    '{"messages": [{"role": "critic", "content": "a"}]}': "message 1 has the role 'critic', .*; the roles are system",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}': 'message 1 has "weight": 0.5; it must be 0',
    '{"messages": [{"role": "user", "content": "a", "train": true}]}': "has \"train\": true and the role 'user'",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "has a part of type 'image_url'",
    '{"messages": [{"role": "user", "content": "a", "content": "b"}]}': "has the key 'content' twice in one object",
    '{"chosen": "a", "rejected": "b"}': 'it is a pair, which data.kind="preference" reads',
    '{"prompt": "a\\u0000", "response": "b"}': "the conversation holds a NUL character, which ends documents with",
    "null": "holds null, but every line must be an object",
    "[1]": "holds a list, but every line must be an object such as {...}; fix it$",
    '["a", "b"]': "holds a list, .* jq -c",
    '{"prompt": null, "response": "b"}': "column 'prompt' holds null",
}


@pytest.mark.parametrize("line", BAD)
def test_unusable_files_are_named(tmp_path: Path, line: str):
    with pytest.raises(ConfigError, match=r"rows.jsonl:2\b.*" + BAD[line]):
        open_rows(tmp_path, f'{{"prompt": "a", "response": "b"}}\n{line}\n', CHATML, None)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = "\n".join(['{"prompt": "a", "response": "b"}', *BAD, '{"prompt": "a", "response": "d"}'])
    with caplog.at_level(logging.WARNING):
        opened = open_rows(tmp_path, lines, CHATML, None, skip_bad_rows=True)
    assert [targets(opened, number) for number in range(len(opened[0]))] == ["b<|im_end|>", "d<|im_end|>"]
    assert f"data.skip_bad_rows: {len(BAD)} rows skipped; the first: {tmp_path}/rows.jsonl:" in caplog.text
    # Without the option, the same files are refused, whatever the cache holds.
    with pytest.raises(ConfigError, match=r"rows.jsonl:4: message 1 has"):
        open_rows(tmp_path, lines, CHATML, None)
