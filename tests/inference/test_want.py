"""Prompts ask for align.method.want after a run of the method "condition", unless --want asks for something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.sample_order import data_order_change, sample_order
from moefold.config.schema import Config
from moefold.data.conversations.reward_prompt import RewardPrompt, stored_reward_prompt
from moefold.data.tokenizer import load_tokenizer
from moefold.errors import ConfigError
from moefold.inference.jobs import GenerateOptions, GenerationRequest, prepare_generation
from moefold.inference.rollout_job import RolloutRequest, open_rollout_prompts, prepare_rollouts
from moefold.inference.sampling import SamplingParams
from moefold.inference.serve.job import ServeOptions, prepare_server
from moefold.inference.source import find_source
from moefold.inference.text import open_chat_template
from moefold.recipe import load_config
from tests.inference.example import write_checkpoint

RECIPE = """
[run]
steps = 1
device = "cpu"
dir = "FOLDER/run"
[model]
layers = 1
hidden_size = 16
attention = { num_heads = 2, num_kv_heads = 2 }
vocab_size = 256
ffn = { moe = { num_experts = 4, top_k = 2, intermediate_size = 8 } }
[train]
seq_len = 64
global_batch_size = 2
micro_batch_size = 1
eval_every = 0
warmup_steps = 0
[data]
kind = "sft"
path = "FOLDER/scored.jsonl"
chat_template = "FOLDER/plain.jinja"
[align]
method = { kind = "condition", template = "{prompt} [{reward:.1f}]", want = 0.9 }
"""
PLAIN = "{% for m in messages %}{{ m.content }}{{ '\\x00' if m.role == 'assistant' else '' }}{% endfor %}"


@pytest.fixture
def folder(pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the recipe, and the recipe; written once."""
    path = tmp_path_factory.getbasetemp() / "condition"
    if not path.exists():
        path.mkdir()
        (path / "plain.jinja").write_text(PLAIN)
        (path / "recipe.toml").write_text(RECIPE.replace("FOLDER", str(path)))
        cfg = load_config(path / "recipe.toml", [])
        pool.run(1, write_checkpoint, cfg)
    return path


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def generated_prompt(want: str, chat: bool = True) -> str:
    """The text of the prompt that `moefold generate` continues."""
    request = GenerationRequest(
        model="run",
        read_prompts=lambda: ("hello",),
        sampling=SamplingParams(),
        options=GenerateOptions(chat=chat, want=want),
    )
    job = prepare_generation(request, None)
    return load_tokenizer(find_source("run").data, vocab_size=256).decode(job.requests[0].prompt)


@pytest.mark.parametrize(
    ("want", "text"), [("", "hello [0.9]"), ("0.25", "hello [0.2]"), ("none", "hello")], ids=["stored", "given", "none"]
)
def test_the_prompt_of_generation_asks_for_the_reward(want, text):
    assert generated_prompt(want) == text


def test_texts_without_a_chat_template_stay_as_they_are():
    assert generated_prompt("", chat=False) == "hello"
    with pytest.raises(ConfigError, match="--want 1 has no effect without --chat"):
        generated_prompt("1", chat=False)


def test_the_last_message_of_a_chat_asks_for_it():
    job = prepare_server("run", [], ServeOptions(want="0.5"), None)
    template = open_chat_template(job.source, "", "")
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert template.render_prompt(messages, "", add_generation_prompt=True) == "ab\0c [0.5]"
    open_turn = [*messages, {"role": "assistant", "content": "d"}]
    assert template.render_prompt(open_turn, "", add_generation_prompt=False) == "ab\0c [0.5]d"


@pytest.mark.parametrize("prompt", ["What?", [{"role": "user", "content": "What?"}]], ids=["text", "messages"])
def test_rollouts_ask_for_it_and_keep_their_prompts(tmp_path, prompt):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}) + "\n")
    options: dict[str, Any] = {"reward": ("exact",), "prompts": (str(tmp_path / "prompts.jsonl"),)}
    (found,) = rollout_prompts(tmp_path, **options)
    assert found.text == "What? [0.9]"
    assert found.source == prompt
    (plain,) = rollout_prompts(tmp_path, want="none", **options)
    assert plain.text == "What?"


def test_problems_of_a_task_ask_for_it(tmp_path):
    (found,) = rollout_prompts(tmp_path, task="sort", count=1, want="1")
    assert found.text == f"{found.source} [1.0]"


def rollout_prompts(tmp_path: Path, **options: Any) -> list[Any]:
    request = RolloutRequest(
        model="run",
        out=tmp_path / "out.jsonl",
        samples=1,
        max_tokens=4,
        sampling=SamplingParams(),
        cache_gib=0.0,
        **options,
    )
    job = prepare_rollouts(request, None)
    prompts = open_rollout_prompts(job.task_cfg.data, job.task_cfg.reward, job.source, request)
    return [prompts.prompt(i) for i in range(job.num_prompts)]


def test_another_value_is_not_other_data():
    meta = read_meta(next(Path("run/checkpoints").glob("step-*")))
    assert meta.order["align.method"]["want"] == 0.9
    assert data_order_change(meta, sample_order(load_config(Path("recipe.toml"), ["align.method.want=0.1"]))) == ""
    assert "align.method" in data_order_change(
        meta, sample_order(load_config(Path("recipe.toml"), ["align.method.template={prompt}{reward}"]))
    )


def test_other_runs_and_older_checkpoints_have_none():
    assert stored_reward_prompt(sample_order(Config()), "other") is None
    old = {"kind": "condition", "template": "{prompt}{reward}"}
    assert stored_reward_prompt({"align.method": old}, "old") is None
    stored = stored_reward_prompt(find_meta(), "run")
    assert stored == RewardPrompt("{prompt} [{reward:.1f}]", 0.9)


def find_meta() -> dict[str, Any]:
    return read_meta(next(Path("run/checkpoints").glob("step-*"))).order


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"template": "{prompt.__class__} {reward}"}, "run: align.method.template="),
        ({"want": "much"}, "are damaged"),
        ({"template": 3}, "are damaged"),
    ],
)
def test_damaged_metadata_is_one_line(changed, message):
    with pytest.raises(ConfigError, match=message):
        stored_reward_prompt({"align.method": find_meta()["align.method"] | changed}, "run")


def test_a_model_of_another_method_refuses_the_option(mixtral):
    with pytest.raises(ConfigError, match="--want 1 has no effect: MODEL was not trained with"):
        prepare_server(str(mixtral), [], ServeOptions(want="1"), None)
    with pytest.raises(ConfigError, match="--want high must be a finite number"):
        prepare_server("run", [], ServeOptions(want="high"), None)
