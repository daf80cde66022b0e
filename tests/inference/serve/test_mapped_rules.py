"""Echoed prompts and rules of logits of a server's loop, under mappings of two ranks: the answers of one rank."""

from pathlib import Path
from typing import Any

import pytest

from moefold.data.tokenizer import ByteTokenizer
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, LogitRules, NewToken, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.serve.engine_loop import EngineLoop
from moefold.inference.serve.grammar import JsonGrammars
from tests.inference.example import opened, recipe, write_checkpoint

pytest.importorskip("llguidance", reason="llguidance comes with the extra `serve`")
pytestmark = pytest.mark.parity

PROMPT = tuple(b"a prompt")
EOS = frozenset({0})
BANNED = 101
RULES = (
    LogitRules(bias=((BANNED, -100.0), (98, 2.0)), frequency_penalty=1.5, presence_penalty=0.5),
    LogitRules(repetition_penalty=1.3, min_tokens=6),
    LogitRules(grammar='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
)


def answers(folder: Path, mapping: dict[str, Any]) -> list[list[NewToken]]:
    """The new tokens of each request, as the first rank delivers them. Every rank calls it."""
    loaded = opened(folder, "generate", mapping, 40, 1)
    engine = GenerationEngine(loaded.model, EngineSettings(slots=4), SamplingParams())
    tokens: dict[int, list[NewToken]] = {}
    with engine.open(32, JsonGrammars(ByteTokenizer(), loaded.model.stage.config.vocab_size).start) as generation:
        loop = EngineLoop(generation, loaded.model.groups)

        def deliver(new: NewToken) -> None:
            tokens.setdefault(new.request_id, []).append(new)
            if sum(found[-1].finish_reason is not None for found in tokens.values()) == len(requests):
                loop.stop()

        requests = [
            Request(
                prompt=PROMPT, sample_number=i, max_tokens=8, eos_ids=EOS, rules=rules, prompt_alternatives=2,
                num_alternatives=2,
            )
            for i, rules in enumerate((None, *RULES))
        ]  # fmt: skip
        if loaded.model.groups.rank == 0:
            loop.submit(requests, deliver)
        loop.run()
    return [tokens[number] for number in sorted(tokens)]


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory) -> Path:
    """The run folder of a small Mixtral over bytes."""
    from dataclasses import replace

    run_dir = tmp_path_factory.mktemp("rules") / "run"
    cfg = recipe("mixtral", run_dir, dtype="float64")
    # tp does not divide the vocabulary.
    pool.run(1, write_checkpoint, replace(cfg, model=replace(cfg.model, vocab_size=259)))
    return run_dir


@pytest.fixture(scope="module")
def alone(pool, folder) -> list[list[NewToken]]:
    """The answers of one rank, which keep the rules."""
    found = pool.run(1, answers, folder, {})[0]
    biased, long, json_text = ([new.token for new in sample] for sample in found[1:])
    assert BANNED not in biased
    assert len(long) >= 6
    assert bytes(json_text).lstrip().startswith(b"{")
    assert all(len(sample[0].prompt_scores) == len(PROMPT) - 1 for sample in found)
    return found


@pytest.mark.parametrize("mapping", [{"tp": 2}, {"pp": 2}, {"ep": 2}], ids=["tp", "pp", "dp"])
def test_two_ranks_answer_as_one(pool, folder, alone, mapping):
    found = pool.run(2, answers, folder, mapping | {"world_size": 2})[0]
    for ours, theirs in zip(found, alone, strict=True):
        assert [(new.token, new.finish_reason) for new in ours] == [(new.token, new.finish_reason) for new in theirs]
        for new, expected in zip(ours, theirs, strict=True):
            assert _numbers(new) == pytest.approx(_numbers(expected), rel=1e-6, abs=1e-6)


def _numbers(new: NewToken) -> list[float]:
    """All log-probabilities that come with a token."""
    alternatives = [value for score in new.prompt_scores for _, value in score.alternatives]
    return [
        new.log_prob,
        *(score.log_prob for score in new.prompt_scores),
        *alternatives,
        *(value for _, value in new.alternatives),
    ]
