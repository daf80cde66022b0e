"""Prompts of reinforcement learning from files: tools, system texts, and parts that no template gets."""

import json
from pathlib import Path

import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.prompts import Prompt, read_prompts
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }};{% endfor %}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = TEMPLATE[TEMPLATE.index("{% for message") :]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "look_up")]
CHAT = {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}


def read(folder: Path, row: dict, template: str = TEMPLATE) -> Prompt:
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "chat.jinja").write_text(template, encoding="utf-8")
    data = DataConfig(
        kind="prompts", path=str(folder / "prompts.jsonl"), chat_template=str(folder / "chat.jinja"), tokenizer="bytes"
    )
    (prompt,) = read_prompts(data, ByteTokenizer())
    return prompt


def test_the_template_gets_the_tools_of_a_prompt(tmp_path: Path):
    """TRL renders a column "tools" the same way; it stays a column of the reward function."""
    assert read(tmp_path, CHAT).text == "<user>hi<assistant>"
    for tools in (TOOLS, json.dumps(TOOLS)):
        prompt = read(tmp_path, CHAT | {"tools": tools})
        assert prompt.text == "[add;look_up;]<user>hi<assistant>"
        assert bytes(prompt.ids).decode() == prompt.text
        assert prompt.columns == {"answer": "x", "tools": tools}
    assert read(tmp_path, CHAT | {"tools": []}).text == "<user>hi<assistant>"


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path):
    assert read(tmp_path, CHAT, WITHOUT_TOOLS).text == "<user>hi<assistant>"
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1 has tools, which the chat template of .* does not write"):
        read(tmp_path, CHAT | {"tools": TOOLS}, WITHOUT_TOOLS)
    with pytest.raises(ConfigError, match='"tools" must be a list'):
        read(tmp_path, CHAT | {"tools": {"name": "add"}})


def test_a_system_text_precedes_the_messages_as_in_fine_tuning(tmp_path: Path):
    prompt = read(tmp_path, CHAT | {"system": "Be brief."})
    assert prompt.text == "<system>Be brief.<user>hi<assistant>"
    assert prompt.source[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("prompt", ["<image> what?", [{"role": "user", "content": "<image> what?"}]])
@pytest.mark.parametrize("field", ["images", "audio"])
def test_prompts_about_media_are_refused(tmp_path: Path, prompt: object, field: str):
    with pytest.raises(ConfigError, match=f"has '{field}', which is not read"):
        read(tmp_path, {"prompt": prompt, field: ["a.png"]})
    assert read(tmp_path, {"prompt": prompt, field: []}).columns == {field: []}


def test_tools_of_a_text_are_a_column_of_the_reward_function(tmp_path: Path):
    prompt = read(tmp_path, {"prompt": "hi", "tools": TOOLS, "functions": ["f"]})
    assert (prompt.text, prompt.columns["tools"]) == ("hi", TOOLS)
