import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

CASES = [
    (
        ["data.document_end=256"],
        "data.document_end=256 must be below model.vocab_size=256; choose an id of the vocabulary, "
        "or -1 for samples of one document",
    ),
    (["train.min_lr=1e-3"], "train.min_lr=0.001 must be at most train.lr=0.0003; choose 0.0 to 0.0003"),
    (["train.warmup_steps=101"], "train.warmup_steps=101 must be at most run.steps=100; choose 0 to 100"),
    (
        ["train.lr_schedule=wsd", "train.warmup_steps=50", "train.decay_steps=51"],
        "train.decay_steps=51 and train.warmup_steps=50 must fit into run.steps=100; choose decay_steps of at most 50",
    ),
    (
        ["train.eval_every=5", "data.validation_fraction=0"],
        "train.eval_every=5 needs held-out text, and data.validation_fraction=0.0 holds out none; "
        "choose validation_fraction=0.05, or eval_every=0",
    ),
    (
        ["model.mtp_layers=16", "train.seq_len=16"],
        "model.mtp_layers=16 must be below train.seq_len=16: no position has a target so far ahead; choose 0 to 15",
    ),
    (
        ["train.optimizer=muon", "train.muon_groups=[]"],
        "train.muon_groups=[] leaves Muon nothing; name some of 'attention', 'dense_mlp', 'experts', 'shared_experts', "
        "'router', 'mtp', or choose optimizer='adamw'",
    ),
    (
        ["train.optimizer=muon", 'train.muon_groups=["embedding", "router", "router"]'],
        "2 settings cannot work:\n  train.muon_groups has 'embedding', which is no group of matrices; choose from "
        "'attention', 'dense_mlp', "
        "'experts', 'shared_experts', 'router', 'mtp'\n  train.muon_groups names 'router' 2 times; name it once",
    ),
    (
        ["train.optimizer=muon", 'train.muon_groups=["mtp"]'],
        "train.muon_groups has 'mtp', and the model has no such matrices: model.mtp_layers=0; leave 'mtp' out, or "
        "leave muon_groups out for all groups",
    ),
    (
        ["train.optimizer=muon", 'train.muon_groups=["attention", "shared_experts", "dense_mlp"]']
        + ["model.layer_pattern=M"],
        "2 settings cannot work:\n  train.muon_groups has 'dense_mlp', and the model has no such matrices: no layer of "
        "model.layer_pattern is D; leave 'dense_mlp' out, or leave muon_groups out for all groups\n  "
        "train.muon_groups has 'shared_experts', and the model has no such matrices: "
        "model.shared_expert_ffn_hidden_size=0; leave 'shared_experts' out, or leave muon_groups out for all "
        "groups",
    ),
    (
        ["train.optimizer=muon", 'train.muon_groups=["router"]', "model.layer_pattern=D"],
        "train.muon_groups has 'router', and the model has no such matrices: no layer of model.layer_pattern is M; "
        "leave 'router' out, or leave muon_groups out for all groups",
    ),
    (
        ["train.moment_dtype=bfloat16", "train.beta2=0.99"],
        "train.beta2=0.99 must be at most 0.98 with train.moment_dtype='bfloat16': what a step adds would be lost in "
        "rounding; choose beta2=0.98 or less, or moment_dtype='float32'",
    ),
    (
        ["train.loss_chunk=256", "train.micro_batch_size=1", "train.seq_len=512", "parallel.cp=2"]
        + ["parallel.world_size=2"],
        "train.loss_chunk=256 must be below the 256 tokens of a rank, seq_len*micro_batch_size/cp=512*1/2: that is one "
        "chunk; choose 1 to 255, or 0 for all at once",
    ),
    (["checkpoint.resume="], "checkpoint.resume='' must be 'auto', 'never' or the path of a checkpoint"),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=["+".join(words) for words, _ in CASES])
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.min_lr=3e-4"],
        ["train.warmup_steps=100"],
        ["train.lr_schedule=wsd", "train.warmup_steps=50", "train.decay_steps=50"],
        ["data.validation_fraction=0"],
        ["train.eval_every=1000"],
        ["train.optimizer=muon", 'train.muon_groups=["experts", "router"]'],
        ["train.optimizer=muon", 'train.muon_groups=["mtp"]', "model.mtp_layers=1"],
        ["train.optimizer=muon", 'train.muon_groups=["shared_experts"]', "model.shared_expert_ffn_hidden_size=8"],
        ["train.optimizer=muon", "model.layer_pattern=D"],
        ["data.document_end=255"],
    ],
    ids="+".join,
)
def test_settings_that_agree_are_accepted(overrides):
    check_config(load_config(None, overrides))
