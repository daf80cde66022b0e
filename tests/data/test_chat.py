"""Chat templates are rendered as transformers does, marked by turn, and bounded."""

import json
import re
from pathlib import Path

import pytest
import tokenizers

from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import (
    BYTES_TEMPLATE,
    ChatRequest,
    ChatTemplate,
    TemplateLimits,
    load_chat_template,
)
from moefold.data.limited_process import LimitedProcess
from moefold.errors import ConfigError

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two.\nThree."},
    {"role": "user", "content": "Four?"},
    {"role": "assistant", "content": " Five."},
]
RESPONSES = ["Two.\nThree.<|im_end|>", " Five.<|im_end|>"]
MARKED = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}
A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}
U:{{ m.content }}
{% endif %}{% endfor %}"""
FORGETS = """\
{% for m in messages %}[{{ m.role }}]{% if loop.last %}<thought>{% endif %}{{ m.content }};{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def template(source: str = BYTES_TEMPLATE, **special: str) -> ChatTemplate:
    return ChatTemplate(source, location="here", special_tokens=special)


def spans(chat: ChatTemplate, messages: list) -> list[str]:
    rendered = chat.render(messages, None, "f:1")
    return [rendered.text[span.start : span.stop] for span in rendered.responses]


def test_chat_ml_of_bytes():
    rendered = template().render(CHAT[:3], None, "f:1")
    assert rendered.text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\nTwo.\nThree.<|im_end|>\n"
    )
    assert spans(template(), CHAT) == RESPONSES


def test_turns_that_the_template_marks_are_believed():
    chat = template(MARKED, bos_token="<s>", eos_token="</s>")
    rendered = chat.render(CHAT[1:], None, "f:1")
    assert rendered.text == "<s>U:One?\nA:Two.\nThree.</s>U:Four?\nA: Five.</s>"
    assert spans(chat, CHAT[1:]) == ["Two.\nThree.</s>", " Five.</s>"]


def test_a_turn_that_the_template_writes_otherwise_later_is_found():
    assert spans(template(FORGETS), CHAT[:1]) == []
    assert spans(template(FORGETS), CHAT) == ["Two.\nThree.;", " Five.;"]


def test_a_turn_that_cannot_be_found_is_refused():
    shouted = FORGETS.replace("{{ m.content }}", "{{ m.content[::-1] if loop.last else m.content | length }}")
    with pytest.raises(ConfigError, match=r"f:1: .* renders turn 3 differently .*\{% generation %\}"):
        template(shouted).render(CHAT, None, "f:1")


def test_it_renders_as_transformers_does():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tests_variables = "{{ documents is defined }}{{ tools is defined }}{{ foo is defined }}" + BYTES_TEMPLATE
    for source in (BYTES_TEMPLATE, MARKED, tests_variables):
        chat = template(source, bos_token="<s>", eos_token="</s>")
        texts, indices = utils.render_jinja_template(
            [CHAT],
            chat_template=source,
            return_assistant_tokens_mask="generation" in source,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert chat.render(CHAT, None, "f:1").text == texts[0]
        if source == MARKED:
            marked = [range(*span) for span in indices[0]]
            assert chat.render(CHAT, None, "f:1").responses == tuple(marked)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__()[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__self__.year }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str):
    with pytest.raises(ConfigError, match="refuses the conversation"):
        template("{{ messages[0].content }}" + attack).render(CHAT, None, "f:1")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it recurses without end"),
        ("{{ 'x' * 2**62 }}", "it exceeds its memory limit"),
        ("{{ messages[0].content.center(2**31) }}", "it exceeds its memory limit"),
        ("{% set n = namespace(t='xx') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
         "it (exceeds its memory limit|takes more than)"),
        ("{% for i in range(9) %}{{ messages[0].content * 200 }}{% endfor %}", "it writes more than 10,000 characters"),
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
         "it takes more than 0.2 s of CPU time"),
    ],
)  # fmt: skip
def test_a_template_without_measure_is_one_message(source: str, reason: str):
    limits = TemplateLimits(cpu_s=0.2, memory_bytes=1 << 28, most_characters=10_000)
    chat = ChatTemplate(
        "{% if tools %}" + source + "{% endif %}fine", location="here", special_tokens={}, limits=limits
    )
    # Those before and after it are rendered: the process is started again where it was ended.
    answers = iter(chat.render_all([ChatRequest(CHAT, tools, f"f:{i}") for i, tools in enumerate([None, ["t"], None])]))
    assert next(answers).text == "fine"
    assert re.match(f"f:1: .*{reason}", str(next(answers)))
    assert chat.render(CHAT, None, "f:3").text == "fine"


def test_conversations_after_a_refused_one_cost_nothing(monkeypatch):
    """Each of them would cost the full CPU limit, before the first refusal is reported."""
    slow = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    chat = ChatTemplate(slow, location="here", special_tokens={}, limits=TemplateLimits(cpu_s=0.2))
    asked: list[int] = []
    send = LimitedProcess._send
    monkeypatch.setattr(LimitedProcess, "_send", lambda self, data: (asked.append(len(data)), send(self, data))[1])
    first = next(iter(chat.render_all([ChatRequest(CHAT, None, f"f:{i}") for i in range(50)])))
    assert re.match(r"f:0: .*takes more than 0.2 s", str(first))
    assert len(asked) == 1


def test_a_template_that_is_worked_out_before_it_is_used_is_bounded_too():
    with pytest.raises(ConfigError, match=r"is not a Jinja template \(it takes more than 0.2 s of CPU time\)"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", location="here", special_tokens={}, limits=TemplateLimits(cpu_s=0.2))


DATES = {
    "{{ 'Current date: ' + strftime_now('%Y-%m-%d') }}": "Current date: 2024-07-26",
    "{% if strftime_now is defined %}{% set d = strftime_now('%d %b %Y') %}{% else %}{% set d = '?' %}{% endif %}"
    "Today Date: {{ d }}": "Today Date: 26 Jul 2024",
}


@pytest.mark.parametrize("source", DATES)
def test_the_date_of_a_template_is_the_same_every_day(source: str):
    """As gpt-oss and Llama write it; a conversation is rendered tomorrow as it is today."""
    assert template(source).render(CHAT, None, "f:1").text == DATES[source]


def test_a_date_that_is_none_is_one_message():
    with pytest.raises(ConfigError, match=r"f:1: .*refuses the conversation"):
        template("{{ strftime_now(3) }}").render(CHAT, None, "f:1")


def test_a_refusal_of_the_template_is_named_with_the_line():
    with pytest.raises(ConfigError, match=r"f:1: .*only users"):
        template("{{ raise_exception('only users') }}").render(CHAT, None, "f:1")
    with pytest.raises(ConfigError, match="not a Jinja template"):
        template("{% for m in %}")


def tokenizer_folder(folder: Path, **settings: object) -> DataConfig:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"E": 0}, unk_token="E"))
    words.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return DataConfig(kind="sft", tokenizer=str(folder))


def test_where_templates_come_from(tmp_path: Path):
    data = tokenizer_folder(tmp_path, chat_template="config {{ eos_token }}", eos_token={"content": "E"})
    assert load_chat_template(data).render(CHAT, None, "").text == "config E"
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "several"}]
    assert (
        load_chat_template(tokenizer_folder(tmp_path, chat_template=several)).render(CHAT, None, "").text == "several"
    )
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert load_chat_template(data).render(CHAT, None, "").text == "file "
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    chosen = DataConfig(kind="sft", tokenizer=str(tmp_path), chat_template=str(mine))
    assert load_chat_template(chosen).render(CHAT, None, "").text == "mine"


def test_a_tokenizer_without_a_template(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no chat template: .*data.chat_template"):
        load_chat_template(tokenizer_folder(tmp_path))
    with pytest.raises(ConfigError, match=r"has no chat template"):
        load_chat_template(tokenizer_folder(tmp_path, chat_template=[{"name": "rag", "template": "r"}]))


def test_a_prompt_opens_the_turn_of_the_assistant_or_leaves_the_last_one_open():
    asked, begun = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b "}]
    marked = "{% for m in messages %}{% generation %}<{{ m.content | trim }}>{% endgeneration %}{% endfor %}"
    assert (
        template()
        .render_prompt(asked, "p", add_generation_prompt=True)
        .endswith("a<|im_end|>\n<|im_start|>assistant\n")
    )
    assert template().render_prompt(asked + begun, "p", add_generation_prompt=False).endswith("assistant\nb ")
    assert template(marked).render_prompt(asked + begun, "p", add_generation_prompt=False) == "<a><b"
    with pytest.raises(ConfigError, match="does not write the last turn verbatim"):
        template("{{ messages | length }}").render_prompt(begun, "p", add_generation_prompt=False)
