"""Latent experts: the bytes that ranks exchange fall by the ratio of the widths, in both passes."""

from dataclasses import replace

import pytest
from torch import Tensor

from moefold.comm import async_collectives
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.verify.distributed_run import create_groups
from tests.models import edit_model
from tests.verify.recipes import tiny


def exchanged_bytes(cfg: Config) -> int:
    """Bytes of the tokens that this rank passes to all-to-all in one step, forward and backward."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    data = DataRequest.of(cfg).open()
    sizes = []
    begin = async_collectives.begin_all_to_all

    def recorded(x: Tensor, *args: object) -> object:
        # Probabilities and counts are one number a row.
        sizes.extend([x.nbytes] if x.dim() == 2 and x.shape[1] > 1 else [])
        return begin(x, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_collectives, "begin_all_to_all", recorded)
        model.forward_backward(BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0))
    return sum(sizes)


@pytest.mark.parity
def test_exchanged_bytes_fall_by_the_ratio(pool):
    cfg = tiny({"layers": 1}, world_size=2, ep=2)
    latent = replace(cfg, model=edit_model(cfg.model, {"ffn.moe.latent_size": 4}))
    wide = pool.run(2, exchanged_bytes, cfg)
    narrow = pool.run(2, exchanged_bytes, latent)
    assert all(size > 0 for size in wide)
    assert [size * 16 for size in narrow] == [size * 4 for size in wide]
