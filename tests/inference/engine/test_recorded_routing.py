"""Test that the engine records each token's experts under all pages, chunks, prefixes and mappings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings
from tests.inference.engine.sampled_requests import PROMPTS, REQUESTS, SAMPLED, name, own_requests
from tests.inference.example import KINDS, SLOW_KINDS, opened

WIDE = {"dtype": "float64"}
NUM_PAGES = 3
"""Two of the three samples of the long prompt, which share its first page, do not fit next to each other."""


class Recorder:
    """Override of a router that keeps the choices of the last pass."""

    in_evaluation = True
    only_records = True

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        self.ids_TK = ids_TK
        return ids_TK


def whole_text(path: Path, completions: list[tuple[int, ...]]) -> list[np.ndarray]:
    """The choices of one pass of each prompt with its completion but the last token, [layers, tokens, K]."""
    model = opened(path, "evaluate", WIDE, 96, 1).model
    recorders = []
    for number, layer in model.stage.moe_layers().items():
        # Layers of multi-token prediction do not run.
        if number < model.stage.config.num_layers:
            layer.router.override = Recorder()
            recorders.append(layer.router.override)
    found = []
    for request, tokens in zip(REQUESTS, completions, strict=True):
        ids = [*request.prompt, *tokens[:-1]]
        model.stage.set_positions(torch.arange(len(ids)))
        model.forward(torch.tensor([ids]))
        found.append(torch.stack([recorder.ids_TK for recorder in recorders]).numpy())
    return found


def in_few_pages(path: Path) -> tuple[list[Completion], int]:
    """The completions of a cache so small that samples are computed again, and how often that was."""
    model = opened(path, "generate", WIDE, 96, 1).model
    settings = EngineSettings(slots=4, pass_tokens=16)
    completions: dict[int, Completion] = {}
    with GenerationEngine(model, settings, SAMPLED, records_routing=True).open(NUM_PAGES) as generation:
        for number, request in enumerate(REQUESTS):
            generation.add(number, request)
        while generation.any_rank_has_work():
            for new in generation.step():
                if new.finish_reason is not None:
                    completions[new.request_id] = generation.pop(new.request_id, new.finish_reason)
        return [completions[number] for number in range(len(REQUESTS))], generation.num_preemptions


@pytest.mark.parametrize(
    "kind", ["mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS | SLOW_KINDS)]
)
def test_shared_and_preempted_prompts_have_the_choices_of_the_whole_text(pool, of_kind, kind):
    path = of_kind(kind)
    ((found, num_preemptions),) = pool.run(1, in_few_pages, path)
    (expected,) = pool.run(1, whole_text, path, [completion.tokens for completion in found])
    assert num_preemptions > 0
    for completion, choices in zip(found, expected, strict=True):
        assert completion.expert_ids is not None
        assert completion.expert_ids.dtype == np.uint8
        np.testing.assert_array_equal(completion.expert_ids, choices)
    # The prompts themselves differ in their choices, so that the rows of another sample would fail.
    assert len({choices[:, : len(PROMPTS[1])].tobytes() for choices in expected}) > 1


def on_mapping(path: Path, mapping: dict[str, Any]) -> tuple[tuple[int, ...], dict[int, Completion]]:
    """The MoE layers of this rank, and the completions of its requests."""
    loaded = opened(path, "generate", mapping | WIDE, 96, 1)
    mine = own_requests(loaded.model.groups)
    engine = GenerationEngine(loaded.model, EngineSettings(slots=2, pass_tokens=32), SAMPLED, records_routing=True)
    completions = engine.generate([REQUESTS[i] for i in mine])
    return tuple(loaded.model.stage.moe_layers()), dict(zip(mine, completions, strict=True))


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "tp": 2},
        pytest.param({"world_size": 4, "tp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "tp": 2, "ep": 4}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_every_mapping_records_the_same_choices(pool, mixtral, mapping):
    ranks = pool.run(mapping["world_size"], on_mapping, mixtral, mapping)
    completions = {i: one for _, found in ranks for i, one in found.items()}
    tokens = [completions[i].tokens for i in range(len(REQUESTS))]
    (expected,) = pool.run(1, whole_text, mixtral, tokens)
    for layers, found in ranks:
        for i, completion in found.items():
            assert completion.expert_ids is not None
            np.testing.assert_array_equal(completion.expert_ids, expected[i][list(layers)])
