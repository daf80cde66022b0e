"""The batch is copied to CUDA once, without a wait; the copies have the types and shapes of the tensors on the CPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cuda_trace import CUDA, Trace, trace_cuda
from moefold.comm.groups import fake_rank
from moefold.data.dataset import DataRequest
from moefold.train.batch_sharding import BatchSharder
from tests.verify.recipes import tiny

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_each_tensor_of_a_batch_is_one_copy_without_a_wait(dtype):
    cfg = tiny(model={"mtp_layers": 1}, train={"global_batch_size": 8})
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype))
    data = DataRequest.of(cfg).open()
    positions = torch.arange(cfg.train.seq_len)
    with fake_rank(cfg.parallel, 0) as groups:
        on_host = BatchSharder(
            data.train,
            cfg.batch_shape,
            replace(groups, device=torch.device("cpu")),
            positions,
        )
        on_cuda = BatchSharder(data.train, cfg.batch_shape, replace(groups, device=CUDA), positions)
        expected = on_host.batch(0)
        with trace_cuda(Trace()) as trace:
            batch = on_cuda.batch(0)
            micro_batches = list(batch.micro_batches(cfg.num_micro_batches))
    assert len(micro_batches) == 8
    assert not trace.of("wait")
    # Tokens, labels, weights, sample ids, and labels and weights of the further token.
    assert len(trace.of("copy")) == len(batch.tensors()) == 6
    # The host converts to the type of the loss, so nothing on the device follows the copies.
    assert len(trace.of("op")) == len(trace.of("copy"))
    assert {event.moved_bytes for event in trace.of("copy")} == {x.nbytes for x in expected.tensors()}
    assert [(x.dtype, x.shape) for x in batch.tensors()] == [(x.dtype, x.shape) for x in expected.tensors()]
    assert expected.columns["weights"].dtype == (torch.float64 if dtype == "float64" else torch.float32)
