"""Test a RoPE scaling from a file of the user: verified on two ranks, and refused where it does not fit."""

from dataclasses import replace

import pytest
import torch

from moefold.config.base.part import describe_part
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import family_unsupported_reason
from moefold.errors import ConfigError
from moefold.model.rope import rope_frequencies
from moefold.recipe import load_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from moefold.verify.shrink import shrink
from tests.models import edit_model
from tests.verify.oracle import TOLERANCE, assert_equals_oracle
from tests.verify.recipes import tiny

FILE = '''
from dataclasses import dataclass
from typing import ClassVar
from moefold.config.groups.rope_scaling import RopeFormula, RopeScalingPart, unscaled_frequencies

@dataclass(frozen=True, kw_only=True)
class Slower(RopeScalingPart):
    """Divide the frequencies, the more the longer the longest sequence is, and enlarge the rotated parts."""

    interface: ClassVar[int] = 1
    steps: int = 8
    enlarge: float = 1.5
    pairs: int = 0

    def frequencies(self, theta, rotary_dim, seq_len):
        return unscaled_frequencies(theta, self.pairs or rotary_dim) / (1 + seq_len / self.steps)

    def rotated_factor(self, seq_len):
        return self.enlarge

    def formula(self):
        def frequency(pair, theta, rotary_dim, seq_len):
            return self.steps / theta ** (2 * pair / rotary_dim) / (self.steps + seq_len)

        return RopeFormula(frequency, lambda seq_len: self.enlarge)
'''


@pytest.fixture
def scaling(tmp_path):
    """Return a function that builds the part of the file with some settings."""
    file = tmp_path / "parts.py"
    file.write_text(FILE)

    def build(*settings):
        words = [f"model.rope.scaling={file}:Slower", *(f"model.rope.scaling.{word}" for word in settings)]
        return load_config(None, words).model.rope.scaling

    return build


def _with(cfg, part):
    return replace(cfg, model=edit_model(cfg.model, {"rope.scaling": part}))


@pytest.mark.parity
def test_it_is_judged_on_two_ranks(pool, scaling):
    cfg = _with(tiny(world_size=2, cp=2), scaling("steps=4", "enlarge=1.2"))
    assert_equals_oracle(pool, cfg)
    ranks = pool.run(2, run_distributed, cfg, 1)
    for other in ("steps=5", "enlarge=1.3"):
        wrong = run_oracle(_with(tiny(), scaling("steps=4", "enlarge=1.2", other)), 1)
        assert max(found.error for found in compare_records(wrong, ranks)) > TOLERANCE, other


def test_it_stays_in_a_smaller_recipe(scaling):
    assert shrink(_with(tiny(), scaling())).model.rope.scaling == scaling()


def test_a_wrong_number_of_frequencies_is_refused_by_name(scaling):
    model = _with(tiny(), scaling("pairs=2")).model
    assert model.rope_settings.rotary_dim > 2
    with pytest.raises(ConfigError, match=r"'parts.py:Slower' \(.*parts.py\) has 1 frequencies for .* pairs of dims"):
        rope_frequencies(model.rope_settings)
    assert torch.equal(
        rope_frequencies(_with(tiny(), scaling()).model.rope_settings), rope_frequencies(tiny().model.rope_settings)
    )


def test_no_folder_of_transformers_can_have_it(scaling):
    reason = family_unsupported_reason(FAMILIES["mixtral"], _with(tiny(), scaling()).model)
    assert reason == f"Hugging Face families have no {describe_part(scaling())}"


def test_flat_keys_of_built_in_kinds_are_refused(tmp_path, scaling):
    scaling()
    with pytest.raises(ConfigError, match="model.rope.scaling.factor is not a key of"):
        load_config(None, [f"model.rope.scaling={tmp_path / 'parts.py'}:Slower", "model.rope.scaling.factor=2"])
