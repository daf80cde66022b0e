"""Strings of a pipeline layout are parsed into stages, or refused with the position."""

import pytest

from moefold.errors import ConfigError
from moefold.topology.pipeline_layout import (
    LayoutSyntaxError,
    even_stages,
    expand_layout,
    format_layout,
    parse_layout,
    validate_layout,
)
from moefold.validate.config import check_config
from tests.models import config_of


def _kinds(text: str) -> str:
    return "".join(part.kind for part in expand_layout(text))


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("EtL", "EtL"),
        ("Et*3|(tt|)*2,m|L", "Ettt|tt|tt|m|L"),
        ("E (t|)*2 tL", "Et|t|tL"),
        ("E((t|)*2t|)*2tL", "Et|t|t|t|t|t|tL"),
        ("Ett|*3tL", "Ett|||tL"),
        ("E(tt)|L", "Ett|L"),
    ],
)
def test_strings_are_spelled_out(text, spelled):
    assert _kinds(text) == spelled


def test_a_part_knows_the_character_that_it_comes_from():
    assert [part.position for part in expand_layout("E(t|)*2L")] == [1, 3, 4, 3, 4, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|xL", "unexpected 'x' at character 5"),
        ("E(tt|L", "'(' at character 2 is not closed"),
        ("Ett)|L", "')' at character 4 closes nothing"),
        ("*3tL", "nothing to repeat before '*' at character 1"),
        ("Et,*3L", "nothing to repeat before '*' at character 4"),
        ("Et*L", "'*' at character 3 needs a count of at least 1"),
        ("Et*0L", "'*' at character 3 needs a count of at least 1"),
        ("Et*2*3L", "nothing to repeat before '*' at character 5"),
        ("E()tL", "an empty group at character 2"),
        ("", "it is empty"),
        (" , ", "it is empty"),
        ("Et*999999999999L", "at character 4 is larger than"),
        ("E(t*9999)*9999L", "more than 100000 letters and bars up to character 14"),
    ],
)
def test_wrong_strings_are_refused_with_the_position(text, message):
    with pytest.raises(LayoutSyntaxError) as error:
        expand_layout(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tEt|tL", "E at character 2 must be the first letter"),
        ("Et|Et|tL", "a second E at character 4"),
        ("tt|tL", "E, the embedding, is missing"),
        ("Ett|t", "L, the loss, is missing"),
        ("EtL|tt", "L at character 3 must be the last letter"),
        ("Ettt|tL", "it has t 4 times, and model.layers=3; the first too many is at character 6"),
        ("Et|tL", "it has t 2 times, and model.layers=3; add 1, after character 4"),
        (
            "Ett|t|L",
            "parallel.pp*parallel.virtual_stages=2; the first | too many is at character 6",
        ),
        ("EtttL", "it has 1 stage, and parallel.pp*parallel.virtual_stages=2"),
    ],
)
def test_a_layout_that_does_not_fit_says_where(text, message):
    faults = list(validate_layout(text, num_layers=3, num_mtp_layers=0, num_stages=2))
    assert any(message in fault for fault in faults), faults


def test_further_tokens_are_predicted_behind_the_last_layer_where_the_head_is():
    def faults(text):
        return list(validate_layout(text, num_layers=2, num_mtp_layers=1, num_stages=2))

    assert faults("Ett|mL") == []
    assert faults("Etm|tL") == ["m at character 3 must come after every t, and one is at character 5"]
    assert faults("Ettm|L")[0].startswith("m at character 4 must be on the stage of L")


def test_stages_are_read_and_written():
    stages = parse_layout("E|(tt|)*2|tmL")
    assert [list(stage.layers) for stage in stages] == [[], [0, 1], [2, 3], [], [4]]
    assert [stage.is_empty for stage in stages] == [False, False, False, True, False]
    assert stages[0].has_embedding
    assert stages[-1].has_loss
    assert stages[-1].num_mtp_layers == 1
    assert format_layout(stages) == "E|tt|tt||tmL"
    assert parse_layout(format_layout(stages)) == stages


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 2), (7, 4), (3, 3), (5, 1)])
def test_the_even_cut_is_a_layout_without_faults(num_layers, num_stages):
    text = format_layout(even_stages(num_layers, 1, num_stages))
    assert list(validate_layout(text, num_layers=num_layers, num_mtp_layers=1, num_stages=num_stages)) == []
    sizes = [len(stage.layers) for stage in even_stages(num_layers, 1, num_stages)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def _check(layout: str, **parallel: object) -> None:
    recipe = {
        "model": {"layers": 4},
        "parallel": {"pipeline_layout": layout, **parallel},
        "train": {"global_batch_size": 8},
    }
    check_config(config_of(recipe))


def test_check_config_reads_the_layout():
    _check("Et|tttL", world_size=2, pp=2)
    with pytest.raises(ConfigError, match=r"parallel.pipeline_layout='Et\|tttxL': unexpected 'x' at character 7"):
        _check("Et|tttxL", world_size=2, pp=2)


def test_a_layout_may_have_more_stages_than_layers():
    _check("E|tt|t|tL", world_size=2, pp=2, virtual_stages=2, schedule="interleaved")
    _check("E||tttt|L", world_size=2, pp=2, virtual_stages=2, schedule="zbv")


def test_a_rank_without_weights_is_refused():
    with pytest.raises(ConfigError, match="leaves pipeline rank 1 without weights .stages 1, counted from 0"):
        _check("Ett||ttL", world_size=3, pp=3)
