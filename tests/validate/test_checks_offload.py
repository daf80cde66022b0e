"""Offloaded parts and their folder are accepted alone and refused where they cannot be."""

import pytest

from moefold.cost.recompute_parts import COMMON_PARTS
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.train.machine_checks import check_machine
from moefold.validate.config import check_config
from moefold.validate.memory_savings import check_offload_device


@pytest.mark.parametrize("part", COMMON_PARTS)
@pytest.mark.parametrize("again", [False, True])
def test_every_part_may_stand_by_itself_and_be_recomputed(part, again):
    words = ["model.layers=2 x (dense, moe)", "model.ffn.moe.shared.intermediate_size=8", f'train.offload=["{part}"]']
    check_config(load_config(None, words + [f'train.recompute=["{part}"]'] * again))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    words = ['train.offload=["layer"]', "train.offload_to=ssd", f"train.offload_dir={folder}", "data.kind=synthetic"]
    cfg = load_config(None, [*words, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"train.offload_dir='.*below' lies below '.*file', which is a file; choose"):
        check_machine(cfg)


@pytest.mark.parametrize(
    "words", [['train.offload=["layer"]', "train.offload_to=ssd"], ["train.offload_optimizer=ssd"]]
)
def test_a_folder_is_made_in_one_that_is_there(tmp_path, words):
    def check(folder):
        cfg = load_config(None, [*words, f"train.offload_dir={folder}", "data.kind=synthetic", f"run.dir={tmp_path}"])
        check_machine(cfg)

    check(tmp_path / "offload")
    with pytest.raises(
        ConfigError, match=r"train.offload_dir='.*scrach/moefold' lies in '.*scrach', which does not ex"
    ):
        check(tmp_path / "scrach" / "moefold")
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_the_host_is_no_other_on_a_cpu():
    cfg = load_config(None, ['train.offload=["layer"]'])
    check_config(cfg)
    check_offload_device(cfg.train, "cuda")
    with pytest.raises(ConfigError, match="train.offload_to='host' needs CUDA GPUs, .*; choose 'ssd' with train.offlo"):
        check_offload_device(cfg.train, "cpu")
