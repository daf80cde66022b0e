"""Whole micro-batches replayed from one CUDA graph: forward and backward pass of all layers, on one rank.

The shapes of a rank that holds all experts are fixed: it has K rows for each token, and its kernels read the counts of
the experts on the device. Gradients and router statistics are added in place, so one graph serves all micro-batches.
The optimizer, metrics and the learning rate stay outside.
"""

from typing import Any

from torch import Tensor, nn

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.private_torch import foreach_zero_
from moefold.model.transformer import Transformer
from moefold.parallel.accumulation import Accumulation
from moefold.parallel.batch import Batch
from moefold.parallel.cuda_graphs import NUM_WARMUP_RUNS, GraphRecorder, MakeRecorder, write_inputs


class GraphedAccumulation(Accumulation):
    """`Accumulation` on one rank that replays one graph for each micro-batch. Evaluation runs eagerly.

    Args:
        model: the whole model, without FSDP.
    """

    def __init__(
        self,
        model: Transformer,
        num_micro_batches: int,
        flight_recorder: FlightRecorder,
        make_recorder: MakeRecorder,
    ) -> None:
        super().__init__(model, num_micro_batches, zero=0)
        self._flight_recorder = flight_recorder
        self._make_recorder = make_recorder
        self._graph: MicroBatchGraph | None = None

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch, and return the loss terms of its tokens, [terms]."""
        total = self._zero_terms(batch)
        micro_batches = list(batch.micro_batches(self._count(batch)))
        if self._graph is None:
            tokens, columns = micro_batches[0]
            self._graph = MicroBatchGraph(self._model, tokens, columns, self._make_recorder())
        self._graph.zero_gradients()
        for i, (tokens, columns) in enumerate(micro_batches):
            self._flight_recorder.set_phase(f"graph of micro-batch {i}")
            total += self._graph.replay(tokens, columns)
        return total


class MicroBatchGraph:
    """Graph of the forward and the backward pass of a model.

    Its first runs leave no gradients and no router statistics, as if the step had not begun.

    Args:
        model: model whose parameters have no gradients yet.
        tokens: tokens of a micro-batch, int64 [B, S].
    """

    def __init__(self, model: Transformer, tokens: Tensor, columns: dict[str, Tensor], recorder: GraphRecorder) -> None:
        self._tokens = tokens.clone()
        self._columns = {name: column.clone() for name, column in columns.items()}
        assert all(parameter.grad is None for parameter in model.parameters())

        def run() -> Tensor:
            loss: Tensor = model(self._tokens, **self._columns)
            loss.sum().backward()
            return loss.detach()

        for _ in range(NUM_WARMUP_RUNS):
            recorder.run(run)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = [
            (parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None
        ]
        for layer in model.moe_layers().values():
            layer.stats.reset()
        self._loss, self._replay = recorder.record(run)

    def zero_gradients(self) -> None:
        """Give the parameters gradients of zero, at the addresses of the graph. The optimizer drops them each step."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        foreach_zero_([gradient for _, gradient in self._gradients])

    def replay(self, tokens: Tensor, columns: dict[str, Any]) -> Tensor:
        """Add the gradients of a micro-batch, and return its loss terms, the same tensor each time, [terms]."""
        assert columns.keys() == self._columns.keys(), (columns.keys(), self._columns.keys())
        assert tokens.shape == self._tokens.shape, "micro-batches of training have one shape"
        write_inputs((self._tokens, *self._columns.values()), (tokens, *(columns[name] for name in self._columns)))
        self._replay()
        return self._loss
