"""Test that a tokenizer folder gives the ids, texts and templates of transformers' AutoTokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moefold.data.hf_tokenizer.class_table import ClassTable
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer, read_tokenizer_folder
from moefold.errors import ConfigError
from tests.slow import slow
from tools.tokenizer_classes import make_table

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["Hello there, how are you today? The answer is 42.\n\nnaïve café 北京 it's don't  \n x"] * 4
TEXT = "Hello  there , naïve 42 北京\n\n don't<turn>x <pad> y</s>z<image>w<eos> <new> . It 's 42 ! I do n't ' x"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<eos>", "<turn>"]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level(*, bos: str = "", prefix: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def metaspace(*, bos: str = "<s>") -> tokenizers.Tokenizer:
    """A tokenizer of the Llama 2 kind: bytes for unknown characters, a space before the text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL + fallback, show_progress=False)
    tokenizer.train_from_iterator([text.replace("北京", "") for text in CORPUS], trainer)
    # The trainer takes the bytes for special tokens.
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [one for one in tree["added_tokens"] if one["content"] in SPECIAL]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tree))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def words() -> tokenizers.Tokenizer:
    """A tokenizer whose text has a space between any two tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator([*CORPUS, TEXT], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return tokenizer


def added(content: str, **flags: bool) -> dict[str, Any]:
    base = {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {**base, "special": True, **flags}


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<eos>", "pad_token": "<pad>"}
KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": byte_level,
    "bytes-bos": lambda: byte_level(bos="<s>"),
    "bytes-prefix": lambda: byte_level(prefix=True),
    "space": metaspace,
    "space-plain": lambda: metaspace(bos=""),
    "words": words,
}
DECODER = {str(400 + i): added(token) for i, token in enumerate(["<new>", "<image>"])}

EVEN_FOR_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "no-file": {},
    "no-eos": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"},
    "null-tokens": {**PLAIN, "bos_token": None, "pad_token": None},
    "token-objects": {**PLAIN, "eos_token": {"__type": "AddedToken", **added("<turn>", rstrip=True)}},
    "eos-is-turn": {**PLAIN, "eos_token": "<turn>"},
    "unknown-pad": {**PLAIN, "pad_token": "[PAD]"},
    "old-extra": {**PLAIN, "additional_special_tokens": ["<image>", "<turn>"]},
    "new-extra": {**PLAIN, "extra_special_tokens": ["<image>"]},
    "named-extra": {**PLAIN, "extra_special_tokens": {"image_token": "<image>"}},
    "any-name-extra": {**PLAIN, "extra_special_tokens": {"image": "<image>"}},
    "specific": {**PLAIN, "model_specific_special_tokens": {"image": "<image>", "begin_token": "<turn>"}},
    "own-token": {**PLAIN, "image_token": "<image>"},
    "decoder": {**PLAIN, "added_tokens_decoder": DECODER},
    "decoder-strips": {**PLAIN, "added_tokens_decoder": {"400": added("<new>", lstrip=True, special=False)}},
    "adds-bos": {**PLAIN, "add_bos_token": True, "add_eos_token": True},
    "split-special": {**PLAIN, "split_special_tokens": True},
    "max-length": {**PLAIN, "model_max_length": 8, "clean_up_tokenization_spaces": True, "padding_side": "left"},
    "cleans-up": {**PLAIN, "clean_up_tokenization_spaces": True, EVEN_FOR_BPE: True},
    "llama": {**PLAIN, "tokenizer_class": "LlamaTokenizerFast"},
    "llama-legacy": {**PLAIN, "tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True},
    "llama-no-space": {**PLAIN, "tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    "llama-bare": {"tokenizer_class": "LlamaTokenizer"},
    "gemma": {**PLAIN, "tokenizer_class": "GemmaTokenizerFast", "mask_token": "<turn>"},
    "qwen": {**PLAIN, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
    "qwen-bare": {"tokenizer_class": "Qwen2TokenizerFast"},
    "gpt2-prefix": {**PLAIN, "tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    "neox": {**PLAIN, "tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True},
    "cohere": {**PLAIN, "tokenizer_class": "CohereTokenizerFast"},
    "unknown-class": {**PLAIN, "tokenizer_class": "OfANewModelTokenizer"},
    "own-code": {**PLAIN, "auto_map": {"AutoTokenizer": ["code.Theirs", None]}},
}
FILES: dict[str, dict[str, Any]] = {
    "map": {"special_tokens_map.json": {"eos_token": "<turn>", "pad_token": added("<pad>")}},
    "map-extra": {"special_tokens_map.json": {"additional_special_tokens": ["<image>"], "bos_token": "<s>"}},
    "added": {"added_tokens.json": {"<new>": 400, "<eos>": 4}},
    "added-unnamed": {"added_tokens.json": {"<turn>": 5}, "tokenizer_config.json": {}},
    "qwen-moe": {"config.json": {"model_type": "qwen3_moe", "eos_token_id": 2}},
    "olmoe": {"config.json": {"model_type": "olmoe"}},
    "mixtral": {"config.json": {"model_type": "mixtral", "tokenizer_class": "LlamaTokenizer"}},
    "generation": {"generation_config.json": {"eos_token_id": [5, 2]}},
}
TEMPLATES: dict[str, dict[str, Any]] = {
    "settings": {"tokenizer_config.json": {**PLAIN, "chat_template": TEMPLATE}},
    "list": {
        "tokenizer_config.json": {
            **PLAIN,
            "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}],
        }
    },
    "file": {"tokenizer_config.json": {**PLAIN, "chat_template": "no"}, "chat_template.jinja": TEMPLATE},
    "folder": {
        "tokenizer_config.json": PLAIN,
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": "tools {{ pad_token }}",
    },
}
SPACED = ("plain", "no-file", "decoder-strips", "adds-bos", "cleans-up")
SPACED += ("llama", "llama-legacy", "llama-no-space", "llama-bare", "gemma", "cohere")
"""Settings that a tokenizer of the Llama 2 kind takes in its own way, or that are of its classes."""
CASES = [
    # The class of Gemma needs the token <unk> among the pieces.
    *(("bytes-bos", {"tokenizer_config.json": SETTINGS[name]}) for name in SETTINGS if name != "gemma"),
    *(("space", {"tokenizer_config.json": SETTINGS[name]}) for name in SPACED),
    *((kind, {"tokenizer_config.json": SETTINGS["plain"]}) for kind in KINDS),
    *(("words", {"tokenizer_config.json": SETTINGS[name]}) for name in ("max-length", "cleans-up")),
    *(("space-plain", {"tokenizer_config.json": SETTINGS[name]}) for name in ("llama", "llama-legacy", "adds-bos")),
    *(("space", {"tokenizer_config.json": PLAIN, **FILES[name]}) for name in FILES),
    *(("bytes", FILES[name]) for name in FILES),
    *(("bytes", files) for files in TEMPLATES.values()),
]
OTHER_CASES = [
    *(("space", {"tokenizer_config.json": SETTINGS[name]}) for name in SETTINGS if name not in SPACED),
    *(("bytes", {"tokenizer_config.json": PLAIN, **FILES[name]}) for name in FILES),
    *(("bytes-prefix", FILES[name]) for name in FILES),
]
"""The same settings and files of another tokenizer, slow."""
NAMES = [f"{number}-{kind}-{'-'.join(files)}" for number, (kind, files) in enumerate([*CASES, *OTHER_CASES])]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: make().to_str() for name, make in KINDS.items()}


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def assert_is_declared_as_by_transformers(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), JsonTokenizer(folder)
    found = ours.folder
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode_start(TEXT).tolist() == ids
    assert ours.encode(TEXT).tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)
    assert found.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.bos_id == theirs.bos_token_id
    if theirs.eos_token_id is not None:
        assert ours.separator_id == theirs.eos_token_id
    templates = theirs.chat_template
    assert found.templates == (
        templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    )


@pytest.mark.parametrize(("kind", "files"), [*CASES, *slow(OTHER_CASES)], ids=NAMES)
def test_a_folder_declares_the_same_as_transformers(tmp_path: Path, sources: dict[str, str], kind: str, files: Any):
    assert_is_declared_as_by_transformers(write_folder(tmp_path, {"tokenizer.json": sources[kind], **files}))


@pytest.mark.parametrize("settings", ["qwen", "gpt2-prefix", "neox"])
@pytest.mark.parametrize(
    "more", [{}, {"add_bos_token": True, "add_eos_token": True}, {"added_tokens_decoder": DECODER}]
)
def test_vocabulary_and_merges_without_a_tokenizer_json(
    tmp_path: Path, sources: dict[str, str], settings: str, more: dict[str, Any]
):
    model = json.loads(sources["bytes"])["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    slow = {"vocab.json": model["vocab"], "merges.txt": f"#version: 0.2\n{merges}\n"}
    folder = write_folder(tmp_path, {**slow, "tokenizer_config.json": SETTINGS[settings] | more})
    assert_is_declared_as_by_transformers(folder)


def test_a_folder_that_transformers_saved_again_is_the_same(tmp_path: Path, sources: dict[str, str]):
    for number, settings in enumerate(["plain", "llama", "qwen", "decoder", "old-extra"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        kind = "space" if settings == "llama" else "bytes-bos"
        write_folder(folder, {"tokenizer.json": sources[kind], "tokenizer_config.json": SETTINGS[settings]})
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "again")
        assert_is_declared_as_by_transformers(folder / "again")


def test_vocabulary_and_merges_of_no_class_are_refused(tmp_path: Path):
    write_folder(tmp_path, {"vocab.json": {"a": 0}, "merges.txt": "#version: 0.2\n"})
    with pytest.raises(ConfigError, match=r"no tokenizer.json, and no file names its class; save one with transf"):
        JsonTokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.txt", "tekken.json", "qwen.tiktoken"])
def test_a_vocabulary_that_needs_conversion_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"\n\x0b")
    with pytest.raises(ConfigError, match=rf"has {name}, but no tokenizer.json, .*; save one with transformers, which"):
        JsonTokenizer(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name}' is not a tokenizer.json: .* has {name}, but no tokenizer.json, "):
        JsonTokenizer(tmp_path / name)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match=rf"{name}' is not a tokenizer.json: name its folder$"):
        JsonTokenizer(tmp_path / name)


def test_files_by_versions_of_transformers_are_refused(tmp_path: Path, sources: dict[str, str]):
    settings = {**PLAIN, "fast_tokenizer_files": ["tokenizer.json"]}
    files = {"tokenizer.json": sources["bytes"], "tokenizer.4.0.0.json": sources["bytes-bos"]}
    write_folder(tmp_path, {**files, "tokenizer_config.json": settings})
    assert_is_declared_as_by_transformers(tmp_path)
    settings["fast_tokenizer_files"] = ["tokenizer.json", "tokenizer.4.0.0.json"]
    write_folder(tmp_path, {"tokenizer_config.json": settings})
    with pytest.raises(ConfigError, match="fast_tokenizer_files names tokenizer.4.0.0.json, which transformers reads"):
        JsonTokenizer(tmp_path)


def test_the_hash_of_a_tokenizer_tells_whether_its_text_is_cleaned_up(tmp_path: Path, sources: dict[str, str]):
    hashes = []
    for number, cleans in enumerate([None, False, True]):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = PLAIN if cleans is None else {**PLAIN, "clean_up_tokenization_spaces": cleans}
        write_folder(folder, {"tokenizer.json": sources["words"], "tokenizer_config.json": settings})
        hashes.append(read_tokenizer_folder(folder).process.content_hash())
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_end_of_a_text_is_declared_or_guessed_with_a_note(tmp_path: Path, sources: dict[str, str]):
    """An ordinary token of the vocabulary that looks like an end is none where another one is declared."""
    write_folder(tmp_path, {"tokenizer.json": sources["bytes"]})
    guessed = JsonTokenizer(tmp_path)
    assert guessed.decode([guessed.separator_id]) == "</s>"
    assert "no file declares an eos_token: </s> (id" in guessed.notes[0]
    write_folder(tmp_path, {"generation_config.json": {"eos_token_id": [5, 2]}})
    assert (JsonTokenizer(tmp_path).separator_id, JsonTokenizer(tmp_path).notes) == (5, ())
    write_folder(tmp_path, {"tokenizer_config.json": {"eos_token": "<eos>"}})
    declared = JsonTokenizer(tmp_path)
    assert (declared.decode([declared.separator_id]), declared.notes) == ("<eos>", ())


def test_settings_that_cannot_be_followed_are_noted(tmp_path: Path, sources: dict[str, str]):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<eos>"}
    write_folder(tmp_path, {"tokenizer.json": words.to_str(), "tokenizer_config.json": settings})
    (note,) = JsonTokenizer(tmp_path).notes
    assert "is not a byte-pair encoder, which transformers' class Qwen2Tokenizer would take it for" in note
    settings["tokenizer_class"] = "BertTokenizerFast"
    write_folder(tmp_path, {"tokenizer.json": sources["bytes"], "tokenizer_config.json": settings})
    (note,) = JsonTokenizer(tmp_path).notes
    assert "transformers has a class BertTokenizer for it, whose code may replace parts of it" in note
    tokens = {str(token.pop("id")): token for token in json.loads(sources["bytes"])["added_tokens"]}
    for listed, notes in ((tokens, ()), (dict([*tokens.items()][1:]), ("added_tokens_decoder lacks '<unk>' of",))):
        settings |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": listed}
        write_folder(tmp_path, {"tokenizer.json": sources["bytes"], "tokenizer_config.json": settings})
        found = JsonTokenizer(tmp_path).notes
        assert all(part in note for part, note in zip(notes, found, strict=True))


def test_the_table_of_classes_equals_the_installed_transformers():
    made, shipped = make_table(), ClassTable.load()
    for name, entry in made["classes"].items():
        assert entry == shipped.classes[name], "python -m tools.tokenizer_classes > .../tokenizer_classes.json"
    missing = {name for name in made["model_types"] if made["model_types"][name] != shipped.model_types.get(name)}
    assert not missing, "python -m tools.tokenizer_classes > src/moefold/data/hf_tokenizer/tokenizer_classes.json"
