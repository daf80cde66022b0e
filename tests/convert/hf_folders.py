"""Hugging Face folders that are imported, exported and compared."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moefold.comm.groups import current_world
from moefold.convert.hf_shards import MANIFEST_FILE
from tests.convert.hf_models import transformers


def add_tokenizer(folder: Path) -> Path:
    """Add the files of a folder that are not the model's."""
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    return folder


def assert_same_folder(first: Path, second: Path, *, but: tuple[str, ...] = ("modeling_custom.py",)) -> None:
    """Both folders hold the same files, to the byte. The second has a manifest."""
    names = {path.name for path in first.iterdir()} - set(but)
    assert {path.name for path in second.iterdir()} == names | {MANIFEST_FILE}
    for name in sorted(names):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


def split_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two files with an index, the head in the first and the embedding in the second."""
    names = {True: "model-00001-of-00002.safetensors", False: "model-00002-of-00002.safetensors"}
    weight_map = {name: names["embed" not in name] for name in tensors}
    for file in names.values():
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    index = {"metadata": total, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").unlink()


REPORTED_ANYWAY = tuple(
    f"Unrecognized keys in `rope_parameters` for 'rope_type'={keys}"
    for keys in (
        "'dynamic': {'alpha'}",
        "'longrope': {'long_mscale', 'short_mscale'}",
        "'longrope': {'short_mscale', 'long_mscale'}",
    )
)
"""transformers reports this of the folders of Hunyuan and Phi-3.5-MoE that it writes itself."""


def loaded_in_silence(folder: Path, monkeypatch, caplog, **how: object) -> Any:
    """Return the model of transformers, which must report no missing key, no unexpected key, and nothing else."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.clear()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(info.values()), info
    messages = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert [message for message in messages if message not in REPORTED_ANYWAY] == []
    return loaded


def import_and_export(folder: Path, ckpt: Path, again: Path) -> None:
    from moefold.convert.export_folder import ExportOptions, export_folder
    from moefold.convert.import_folder import ImportOptions, import_folder

    crew = current_world()
    import_folder(folder, ckpt, crew, ImportOptions(check=True), on_bytes=lambda _: None)
    export_folder(ckpt, again, crew, ExportOptions(check=True), on_bytes=lambda _: None)
