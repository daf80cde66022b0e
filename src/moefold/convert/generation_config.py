"""The generation_config.json of an exported folder: token ids, temperature, and the end of a turn."""

import json
from pathlib import Path

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.run_tokenizer import CHAT_KINDS
from moefold.config.sections.data import DataConfig
from moefold.convert.run_config import read_settings
from moefold.convert.tokenizer_export import read_side_file, write_side_file
from moefold.data.conversations.chat import end_of_turn_marker, load_chat_template
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.input_paths import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE
from moefold.errors import ConfigError

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_generation_config(folder: Path, temperature: float | None) -> None:
    """Write generation_config.json: the token ids of config.json, and the temperature of a run that sampled rollouts.

    An existing file, from imported weights, is kept: it already has these ids.

    Args:
        temperature: temperature of the run's rollouts, or None without reinforcement learning.
    """
    if (folder / GENERATION_FILE).is_file():
        return
    config = read_settings(folder / CONFIG_FILE)
    keys = {key: config[key] for key in TOKEN_KEYS if config.get(key) is not None}
    if temperature is not None:
        keys |= {"do_sample": True, "temperature": temperature}
    text = json.dumps(keys, indent=2, sort_keys=True) + "\n"
    (folder / GENERATION_FILE).write_text(text, encoding="utf-8")


def write_turn_end(folder: Path, meta: CheckpointMeta) -> tuple[str, ...]:
    """Add the id with which the chat template ends a turn to the ends of generation_config.json, and return notes.

    transformers and vLLM stop at these ids. A base model that was trained on conversations ends its answers with the
    end of a turn, not of a text.
    """
    if meta.order.get("kind") not in CHAT_KINDS or not (folder / TOKENIZER_FILE).is_file():
        return ()
    tokenizer = JsonTokenizer(folder)
    try:
        template = load_chat_template(DataConfig(kind="sft", tokenizer=str(folder)), tokenizer)
        ids, marker = end_of_turn_marker(template, tokenizer)
    except ConfigError as error:
        return (f"{GENERATION_FILE} has no end of a turn: {error}",)
    if not ids:
        how = f"with {marker!r}, which is several tokens" if marker else "with no mark"
        return (f"{GENERATION_FILE} has no end of a turn: the chat template ends one {how}; pass it as a stop string",)
    keys = read_side_file(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
    ends = keys.get("eos_token_id", [])
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    if new := [number for number in sorted(ids) if number not in ends]:
        ends = [*new, *ends]
        write_side_file(folder / GENERATION_FILE, {**keys, "eos_token_id": ends if len(ends) > 1 else ends[0]})
    return ()
