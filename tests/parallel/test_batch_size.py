"""A batch of another size than the recipe's is refused by name before any pass, with and without a pipeline."""

from dataclasses import replace

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.batch import Batch
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.validate.config import check_config
from tests.verify.recipes import tiny


def _first_samples(batch: Batch, count: int) -> Batch:
    columns = {name: column[:count] for name, column in batch.columns.items()}
    return replace(batch, tokens=batch.tokens[:count], columns=columns)


def _refusals(cfg: Config) -> list[str]:
    """Return a rank's messages on too few samples, in training and evaluation; the whole batch runs afterwards."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    refused = [_first_samples(batch, 3), _first_samples(batch, 0)]
    if cfg.parallel.pp > 1:
        refused.append(replace(_first_samples(batch, 2), num_micro_batches=2))
    found = []
    for wrong in refused:
        for run in (model.forward_backward, model.runner.evaluate):
            with pytest.raises(ValueError, match="micro-batches") as error:
                run(wrong)
            found.append(str(error.value))
    assert model.runner.evaluate(batch).isfinite().all()
    return found


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping", [{}, {"world_size": 2, "pp": 2, "schedule": "gpipe"}, {"world_size": 2, "pp": 2, "schedule": "1f1b"}]
)
def test_a_smaller_batch_is_refused(pool, mapping):
    cfg = tiny(train={"global_batch_size": 4, "micro_batch_size": 1}, **mapping)
    expected = [f"a batch of {count} samples cannot be split into 4 equal micro-batches" for count in (3, 3, 0, 0)]
    if mapping:
        expected += ["a batch of 2 micro-batches: the pipeline schedule runs 4"] * 2
    assert pool.run(cfg.parallel.world_size, _refusals, cfg) == [expected] * cfg.parallel.world_size
