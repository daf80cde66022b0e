"""Our models under lm-eval: log-likelihoods are the sums of log-softmax, of our logits and of transformers' logits."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install -e '.[eval]' installs lm-eval")
pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from lm_eval.api.instance import Instance

from moefold.data.tokenizer import NumberTokenizer
from moefold.errors import ConfigError
from moefold.inference.lm_eval_model import MoefoldLM, was_raised_in_moefold
from moefold.inference.sampling import SamplingParams
from moefold.inference.scoring import GenerateRequest, ServedModel
from tests.convert.hf_models import make_model
from tests.inference.example import opened
from tests.inference.words import WORDS, save_with_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer of whole words."""
    return save_with_words(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def lm(folder):
    """The model in this process."""
    made = MoefoldLM(path=str(folder), batch_size=2, max_length=12, device="cpu")
    yield made
    made.close()


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def expected(row: list[int], num_scored: int) -> tuple[float, bool]:
    """(sum of log-probabilities, greedy) of the last tokens of a row, by transformers."""
    with torch.no_grad():
        logits = make_model("mixtral")(input_ids=torch.tensor([row])).logits[0, -num_scored - 1 : -1]
    targets = torch.tensor(row[-num_scored:])
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(log_probs.sum()), bool((logits.argmax(-1) == targets).all())


def best_after(row: list[int]) -> int:
    with torch.no_grad():
        return int(make_model("mixtral")(input_ids=torch.tensor([row])).logits[0, -1].argmax())


def test_log_likelihood_of_continuations(lm):
    pairs = [("the cat", " sat on"), ("a dog", " ran"), ("", "the mat ."), ("the cat sat on a mat", " .")]
    found = lm.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        row, scored = (ids(context) or [0]) + ids(continuation), len(ids(continuation))
        assert (value, is_greedy) == (pytest.approx(expected(row, scored)[0], rel=1e-5), expected(row, scored)[1])


def test_a_greedy_continuation_is_seen_as_one(lm):
    row = ids("the cat sat")
    best = best_after(row)
    scores = lm._model.score([[*row, best], [*row, best + 1 if best < 65 else 0]], [1, 1])
    assert [score.is_greedy for score in scores] == [True, False]


def test_log_likelihood_of_long_texts_takes_each_token_once(lm):
    text = " ".join(WORDS[2 + i % 9] for i in range(20))
    (found,) = lm.loglikelihood_rolling([instance("loglikelihood_rolling", text)], disable_tqdm=True)
    row = ids(text)
    # The first 12 tokens after the end-of-text token, then the other 8 after the 5 before them: 12 are read.
    total = expected([0, *row[:12]], 12)[0] + expected(row[-13:], 8)[0]
    assert found == pytest.approx(total, rel=1e-5)


def test_generation_ends_before_a_stop_and_at_the_length(lm, folder):
    context, how = "the cat", {"until": [], "max_gen_toks": 6}
    (whole,) = lm.generate_until([instance("generate_until", context, how)], disable_tqdm=True)
    theirs = make_model("mixtral").generate(
        torch.tensor([ids(context)]), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    new = theirs[0, 2:].tolist()
    cut = new.index(0) if 0 in new else 6
    assert whole == lm._text_tokenizer.decode(new[:cut])
    for stop in {word for word in WORDS[2:] if word in whole}:
        again = lm.generate_until(
            [instance("generate_until", context, how | {"until": [stop]}), instance("generate_until", context, how)],
            disable_tqdm=True,
        )
        assert again == [whole[: whole.index(stop)], whole]


def obey(folder: Path, mapping: dict[str, int]) -> Any:
    """Return the results of the first rank's orders. The others follow."""
    model = ServedModel(opened(folder, "generate", mapping, 16, 2))
    if model.loaded.model.groups.rank:
        return model.serve()
    scores = model.score([(5, 2, 9, 4), (7, 1), (3, 3, 3)], [2, 1, 2])
    order = GenerateRequest(((5, 2, 9), (7,)), 4, SamplingParams(temperature=0.0), frozenset(), (), 1)
    tokens = [continuation.tokens for continuation in model.generate(order)]
    model.shutdown()
    return scores, tokens


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping", [{"tp": 2, "ep": 2}, {"pp": 2}, {"ep": 2}, {"ep": 6}], ids=["tp2-ep2", "pp2", "ep2", "ep6"]
)
def test_other_ranks_follow_the_first(pool, folder, mapping):
    # Three of six data-parallel ranks have no sequence, and four have no prompt.
    world_size = max(mapping.values())
    scores, tokens = pool.run(world_size, obey, folder, mapping | {"world_size": world_size})[0]
    rows = [([5, 2, 9, 4], 2), ([7, 1], 1), ([3, 3, 3], 2)]
    assert [score.log_likelihood for score in scores] == pytest.approx([expected(*row)[0] for row in rows], rel=1e-5)
    assert tokens[0][0] == best_after([5, 2, 9])
    assert tokens[1][0] == best_after([7])


@pytest.mark.e2e
def test_a_task_of_lm_eval_runs_on_two_ranks(folder, tmp_path):
    from tests.e2e.command import moefold

    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    docs = [("the cat sat on a", ["mat", "dog"]), ("a dog", ["ran", "."]), ("the mat", ["sat", "the"])]
    # The answer is the likelier one for the model, so that the accuracy is 1.
    with open(tmp_path / "docs.jsonl", "w") as file:
        for question, choices in docs:
            values = [expected(ids(f"{question} {choice}"), 1)[0] for choice in choices]
            record = {"question": question, "choices": choices, "answer": values.index(max(values))}
            file.write(json.dumps(record) + "\n")
    (tmp_path / "tiny_choice.yaml").write_text(json.dumps(task))
    done = moefold(
        "lm_eval", "--model_args", f"path={folder},tp=2,ep=2,device=cpu", "--tasks", "tiny_choice",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text())
    assert math.isclose(found["results"]["tiny_choice"]["acc,none"], 1.0)
    assert found["config"]["batch_size"] == "8"


TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on "}]


def test_prompts_go_through_the_chat_template(lm, folder, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} .{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "chat.jinja").write_text(source)
    made = MoefoldLM(lm._model, path=str(folder), chat_template=str(tmp_path / "chat.jinja"), max_length=12)
    for turns, opens_turn in ((TURNS[:1], True), (TURNS, False)):
        theirs, _ = render_jinja_template(
            conversations=[turns],
            chat_template=source,
            add_generation_prompt=opens_turn,
            continue_final_message=not opens_turn,
        )
        assert made.apply_chat_template(turns, add_generation_prompt=opens_turn) == theirs[0]
    assert made.chat_template(True) == source
    assert made.tokenizer_name != lm.tokenizer_name


def test_chat_templates_that_are_not_there_are_refused(lm):
    with pytest.raises(ConfigError, match=r"--apply_chat_template: .* has no chat template: .*chat_template=FILE"):
        lm.apply_chat_template(TURNS[:1])
    with pytest.raises(ConfigError, match="apply_chat_template='tool_use': a model has one template"):
        lm.chat_template("tool_use")


@pytest.mark.e2e
def test_a_refusal_of_lm_eval_is_one_message_before_weights_are_read(folder, tmp_path):
    import shutil

    from tests.e2e.command import moefold

    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    given = f"path={tmp_path / 'model'},tp=2,ep=2,device=cpu"
    done = moefold("lm_eval", "--model_args", given, "--tasks", "x", "--log_samples")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("moefold: error: lm-eval: Specify --output_path")


def test_an_error_of_ours_is_not_said_to_be_of_lm_eval():
    def error_of(fail: Callable[[], object]) -> ValueError:
        with pytest.raises(ValueError) as caught:
            fail()
        return caught.value

    assert was_raised_in_moefold(error_of(lambda: NumberTokenizer(4).encode("x")))
    assert not was_raised_in_moefold(error_of(lambda: int("x")))


def test_importing_the_module_makes_the_model_known(folder):
    from lm_eval.api.registry import get_model

    import moefold.lm_eval

    assert get_model("moefold") is moefold.lm_eval.MoefoldLM
    made = get_model("moefold").create_from_arg_string(
        f"path={folder},batch_size=3", {"batch_size": 1, "device": "cuda:0", "max_batch_size": None}
    )
    assert made._settings.batch_size == 3
    made.close()


def test_ranks_that_lm_eval_cannot_start_are_refused(folder):
    with pytest.raises(ConfigError, match="requests 2 ranks, and lm-eval is one process; `moefold lm-eval"):
        MoefoldLM(path=str(folder), tp=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_gen_toks": 12}, "requests 12 new tokens, and the model takes 12 in all"),
        ({"num_beams": 4}, "generation argument num_beams= is unknown"),
        ({"temperature": -1.0, "do_sample": True}, "--temperature -1 must be at least 0"),
    ],
)
def test_generation_that_cannot_be_is_refused(lm, arguments, message):
    with pytest.raises(ConfigError, match=message):
        lm.generate_until([instance("generate_until", "the", arguments)])
