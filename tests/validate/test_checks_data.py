import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

HF = ("data.kind=huggingface", "data.path=owner/name")
SFT = ("data.kind=sft", "data.path=chats.jsonl")


def check(tmp_path, *overrides: str):
    recipe = tmp_path / "recipe.toml"
    recipe.touch()
    cfg = load_config(recipe, list(overrides))
    check_config(cfg)
    return cfg


@pytest.mark.parametrize(
    "overrides",
    [
        (*HF, "data.streaming=true"),
        (*HF, "data.streaming=true", "data.validation_split=test", "train.eval_every=5"),
        (*HF, "data.validation_fraction=0.0", "data.validation_split=test", "train.eval_every=5"),
        ("data.kind=text", 'data.path=["a", "b"]', "data.weights=[1, 2.5]"),
        ("data.kind=tokens", "data.path=a", "data.weights=[1]", "data.document_index=true"),
        (*SFT, "data.overlong=refuse", "data.chat_template=t.jinja"),
    ],
)
def test_legal(tmp_path, overrides):
    check(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.kind=text", 'data.path=["a", "b"]', "data.weights=[1]"), r"data.weights=\[1.0\] must have .* 2 paths"),
        (("data.kind=text", "data.path=a", "data.weights=[1, 2]"), r"must have .* each of the 1 paths"),
        (("data.kind=text", 'data.path=["a", "b"]', "data.weights=[1, 0]"), "must be greater than 0"),
        (("data.kind=text", 'data.path=["a", "b"]', "data.weights=[1, -2]"), "must be greater than 0"),
        ((*HF, "data.column="), "data.column='' must name"),
        ((*HF, "data.split="), "data.split='' must name"),
        ((*HF, "data.validation_split=train"), "must not be the split that is trained on"),
        ((*HF, "data.streaming=true", "train.eval_every=5"), "a stream has no held-out part"),
        ((*HF, "data.streaming=true", "data.validation_fraction=0.2"), "data.validation_fraction=0.2 has no effect"),
        ((*HF, "data.validation_split=test", "data.validation_fraction=0.2"), "data.validation_fraction=0.2 has no"),
        (("data.streaming=true",), "data.streaming=true has no effect"),
        (("data.kind=text", "data.path=a", "data.column=b"), "data.column='b' has no effect"),
        (("data.weights=[1]",), "data.weights"),
        ((*HF, "data.overlong=refuse"), "data.overlong='refuse' has no effect"),
        ((*HF, "data.chat_template=a"), "data.chat_template='a' has no effect"),
        ((*HF, "data.document_index=true"), "data.document_index=true has no effect"),
        ((*SFT, "data.document_end=3"), "data.document_end=3 has no effect"),
        (
            ("data.kind=tokens", "data.path=a", "data.document_index=true", "data.document_end=3"),
            "document_end=3 has no",
        ),
        ((*SFT, "data.split=test"), "data.split='test' has no effect"),
    ],
)
def test_faults(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(tmp_path, *overrides)
