"""Optimizers: the update of the weights, and the state for each weight."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

from moefold.config.base.param_spec import ModelPart, ParamSpec
from moefold.config.base.part import Part, UnusedKeys, missing_method

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class MethodRates:
    """Peak learning rates of a method, for all weights and for only adapters."""

    method: str
    all_weights: float
    adapters: float
    source: str


class StateSpec(NamedTuple):
    """State of one weight between two steps: `optimizer.state[parameter][name]`.

    It has the shape and the sharding of the weight, and is saved, offloaded and reset like a moment.
    """

    name: str
    dtype: str = ""
    """float32 or bfloat16. Empty: the type of the master weights."""
    is_count: bool = False
    """True if the state is the count of steps, a single number on each rank with the name `step`."""
    is_kept: bool = False
    """True if the state is not a moment: no reset, no move off the device. The optimizer has it in `kept_states`."""


class MatrixWork(NamedTuple):
    """Work of the rank that has gathered a full matrix for its update."""

    rounds: int
    gemms: tuple[tuple[int, int, int], ...]
    """Sizes (m, n, k) of the GEMMs of a round, in the type of the master weights."""
    num_other_kernels: int
    """Other kernel launches, for all rounds together."""
    traffic: float
    """Bytes moved for each number of the matrix, including packing and unpacking for communication."""


class ForwardOnlyStep(NamedTuple):
    """One step of the oracle with an optimizer without gradients."""

    number: int
    """Number of the step, from 1."""
    rate: float
    """Learning rate."""
    specs: Mapping[str, ParamSpec]
    """Spec of each trained weight, by name."""
    weights: "Mapping[str, Tensor]"
    """Trained weights, in float64."""
    loss: Callable[[], float]
    """Runs a forward pass of the batch with the current weights."""
    seed_of: Callable[[str], int]
    """Returns the seed for a name of the run's random numbers."""


@dataclass(frozen=True)
class ProjectedGradient:
    """Gradient of a step along its perturbation, equal on all ranks."""

    value: float
    """Its value before rounding."""
    rounded: float
    """The value that the update takes, or 0 where the value is not finite."""


class ForwardPasses(Protocol):
    """Forward passes of a step without gradients, with a `parallel.batch.Batch`."""

    def run(self, batch: Any, step: int, begin_step: Callable[[int, Any], None]) -> "Tensor":
        """Return this rank's loss terms. Calls `begin_step` with step and batch before each pass. It is collective."""

    def local_losses(self) -> "Tensor":
        """Return this rank's parts of the losses, float64 [passes], to be summed over all ranks."""

    def project(self, losses: "Tensor", step: int) -> ProjectedGradient:
        """Return the gradient, given the loss of each pass, summed over all ranks."""

    def update(self, projected_gradient: float) -> None:
        """Update the weights by a rounded gradient. It does not communicate."""

    def restore(self) -> None:
        """Set the weights back to their values before the step. It does not communicate."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPart(Part):
    """Optimizer. Without gradients (`needs_gradients`) a step consists of its `passes`."""

    group: ClassVar[str] = "optimizer"
    key: ClassVar[str] = "train.optimizer"
    is_for_training: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = True
    """True if a step has a backward pass."""
    state_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that determine the states and their types, equal for runs that exchange states."""
    rates: ClassVar[MethodRates | None] = None
    """Learning rates of a recipe without `train.lr`, or None if they follow from the method of training."""

    @property
    def copies_weights(self) -> bool:
        """Return whether an update copies the trained weights."""
        return False

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return the states of a weight, which `build` allocates."""
        raise NotImplementedError

    def traffic(self, weight: ParamSpec) -> float:
        """Return the bytes that an update moves for each number of a weight on its rank."""
        raise NotImplementedError

    def gathers(self, weight: ParamSpec) -> bool:
        """Return whether the full matrix is gathered on one rank for its update."""
        return False

    def matrix_work(self, rows: int, columns: int) -> MatrixWork:
        """Return the work of the update of one gathered full matrix. Each expert is a separate matrix."""
        raise missing_method(self, "matrix_work")

    def build(self, parameters: "Mapping[str, Parameter]", run: Any) -> "Optimizer":
        """Return the optimizer with all states. This may be collective over the stage.

        Its `step` returns False if it has updated nothing.

        Args:
            parameters: parameters of this rank, by name: DTensors where ranks shard them.
            run: an `optim.build.OptimizerRun`.
        """
        raise NotImplementedError

    def passes(self, model: Any, optimizer: "Optimizer") -> ForwardPasses:
        """Return the object that runs the forward passes of a step, without gradients.

        Args:
            model: the `parallel.parallel_model.ParallelModel`.
            optimizer: what `build` returned.
        """
        raise missing_method(self, "passes")

    def formula(self) -> Callable[..., Any] | None:
        """Return a second implementation of the update, for the oracle, or None if it has no formula.

        With gradients it is called for each weight, with (ParamSpec, weight, gradient, state, step). It returns the
        change that one step subtracts from the weight at learning rate 1, with weight decay, or a function of the
        learning rate if the change is not proportional to it. `state` is a dict that the formula fills. It is empty in
        step 1 and after a reset of the moments. Without gradients it is called once a step, with a `ForwardOnlyStep`.
        It then updates the weights in place, and returns the norm of the gradient that it found.
        """
        return None

    @property
    def smallest_divisor(self) -> float:
        """Smallest divisor of a gradient in an update, which magnifies its rounding (`moefold verify`)."""
        return 1e-8

    def with_moment_dtype(self, dtype: Literal["float32", "bfloat16"]) -> Self:
        """Return the optimizer with moments of another type, or itself if the type is fixed."""
        return self

    @property
    def has_states(self) -> bool:
        """Return whether any weight has a state."""
        return any(self.states(ParamSpec("", (1, 1, 1), part)) for part in get_args(ModelPart))

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield the keys of moments, and of the backward pass, if there are none."""
        name = f"{self.key}={self.kind!r}"
        way_out = "choose train.optimizer='adamw'"
        if not self.has_states:
            yield UnusedKeys("train.reset_moments_every train.offload_optimizer", f"{name} has no moments", way_out)
        if not self.needs_gradients:
            yield UnusedKeys("train.clip_grad", f"{name} has no gradients to clip", way_out)
            yield UnusedKeys(
                "train.recompute train.memory_budget_gib train.offload",
                f"{name} has no backward pass, for which activations would be saved",
                way_out,
            )
