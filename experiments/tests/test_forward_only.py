"""Refusals of an optimizer without a backward pass."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

MESSAGES = {
    "parallel.overlap_experts=true": "parallel.overlap_experts=true overlaps forward with backward passes, and train",
    "parallel.pp=2 parallel.world_size=2 parallel.schedule=zero-bubble": (
        "parallel.schedule='zero-bubble' splits the backward pass, and train.optimizer='spsa' has none; choose "
        "schedule='1f1b' or 'interleaved'"
    ),
    "run.cuda_graphs=full run.device=cuda": "run.cuda_graphs='full' records forward and backward passes, and train.op",
    "model.attention.indexer.top_k=8": "model.attention.indexer.top_k=8 trains indexers by the gradient of a loss of",
    "moe.trace_every=1": "moe.trace_every=1 stores one choice of experts for each token of a step, and train.optimize",
    "rl.group_size=4 data.kind=task": "rl.group_size=4 updates by the gradient of sampled rewards, and train.optimize",
    "sites.count=2": "sites.method='mean' exchanges the weights of sites, and train.optimizer='spsa' has no exchange",
}


@pytest.mark.parametrize("settings", MESSAGES)
def test_refused(settings):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, ["train.optimizer=spsa", "run.steps=50", *settings.split()]))
    assert MESSAGES[settings] in str(error.value)


def test_schedules_of_one_stage_and_frozen_weights_are_accepted():
    words = ["train.optimizer=spsa", "parallel.schedule=zero-bubble", "lora.rank=4", "model.mtp_layers=1"]
    check_config(load_config(None, words))
