import pytest

from tests.validate.test_checks_parallel import accepts, ranks, refused

LAYERS = "model.num_layers=8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ranks(2, pp=2, schedule="zbv"),
            "parallel.schedule='zbv' needs parallel.virtual_stages of 2, and it is 1; choose virtual_stages=2, or "
            "schedule='zero-bubble'",
        ),
        (
            [*ranks(2, pp=2, schedule="dualpipev", virtual_stages=3), LAYERS],
            "parallel.schedule='dualpipev' has exactly 2 stages on each rank, and parallel.virtual_stages=3; choose "
            "virtual_stages=2",
        ),
        (
            [*ranks(2, pp=2, schedule="dualpipev", virtual_stages=2), "train.global_batch_size=3"],
            "parallel.schedule='dualpipev' needs at least 2*pp=4 micro-batches, and train.global_batch_size=3 gives "
            "each data-parallel rank 3; choose train.global_batch_size=4, or schedule='zbv'",
        ),
        (
            [*ranks(2, pp=2, schedule="zero-bubble"), "train.global_batch_size=5"],
            "parallel.schedule='zero-bubble' with pp=2 runs micro-batches in 2 equal rounds",
        ),
        (
            ranks(2, pp=2, schedule="csv"),
            "parallel.schedule='csv' needs parallel.schedule_csv, the path of its file",
        ),
        (
            ranks(1, schedule="csv", schedule_csv="rows.csv"),
            "parallel.schedule='csv' needs parallel.pp of 2 or more, and it is 1",
        ),
        (
            [*ranks(8, pp=8, pipeline_layout="auto"), "model.num_layers=4"],
            "parallel.pipeline_layout='auto' splits the embedding, model.num_layers=4 layers and the loss, and "
            "parallel.pp*parallel.virtual_stages=8 are more; choose model.num_layers=6",
        ),
        (
            [*ranks(1, pipeline_layout="Ett|ttL"), "model.num_layers=4"],
            "parallel.pipeline_layout='Ett|ttL': it has 2 stages, and parallel.pp*parallel.virtual_stages=1",
        ),
    ],
)
def test_what_no_schedule_can_run_is_refused_with_the_way_out(overrides, message):
    assert refused(*overrides).startswith(message)
    assert "\n" not in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ranks(2, pp=2, schedule="zero-bubble"),
        [*ranks(2, pp=2, schedule="zero-bubble", virtual_stages=4), LAYERS],
        [*ranks(2, pp=2, schedule="zbv", virtual_stages=2), LAYERS, "train.global_batch_size=1"],
        [*ranks(2, pp=2, schedule="csv", schedule_csv="rows.csv", virtual_stages=3), LAYERS],
        [*ranks(1, schedule="zero-bubble")],
        [*ranks(6, pp=6, pipeline_layout="auto"), "model.num_layers=4", "train.global_batch_size=12"],
    ],
)
def test_what_a_schedule_can_run_is_accepted(overrides):
    assert accepts(*overrides)
