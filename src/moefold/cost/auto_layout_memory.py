"""States and saved activations of each unit on each stage, which `parallel.pipeline_layout = "auto"` balances."""

from dataclasses import replace

from moefold.config.schema import Config
from moefold.config.sections.train import AUTO_RECOMPUTE
from moefold.cost.activation_memory import activation_memory
from moefold.cost.state_bytes import Unit
from moefold.cost.unit_state_memory import UnitStateMemory, state_mapping
from moefold.topology.schedules import schedule_slots


def unit_bytes(cfg: Config, num_stages: int) -> list[list[int]]:
    """Return, for each stage, the bytes of the embedding, of each layer, and of the loss, on its first rank.

    A unit counts its states (weights, gradients, moments that are not offloaded) and the activations that a micro-batch
    saves, times the micro-batches in flight on the stage. Assumes GPU kernels, balanced experts and no activation
    offload. `train.recompute = ["auto"]`, which is resolved for a given layout, counts as no recomputation.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    model = cfg.model
    train = cfg.train
    explicit = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=""))
    states = UnitStateMemory(explicit)
    mapping = state_mapping(explicit)
    formula = activation_memory(cfg, () if AUTO_RECOMPUTE in train.recompute else None)
    offloads = train.offload_optimizer != "none"
    units: tuple[Unit, ...] = ("embedding", "head", *dict.fromkeys(model.block_kinds))
    state_bytes = {name: states.unit_bytes(name, mapping, with_optimizer=not offloads) for name in units}
    layers = [(state_bytes[kind], formula.saved_by_kind[kind].total()) for kind in model.block_kinds]
    loss = (
        state_bytes["head"]
        + formula.transient_loss
        + (state_bytes["embedding"] if model.last_stage_needs_embedding else 0)
    )
    loss_saved = formula.head().total()
    if model.mtp_layers:
        loss += model.mtp_layers * states.unit_bytes("mtp", mapping, with_optimizer=not offloads)
        loss_saved += model.mtp_layers * formula.mtp_layer().total()
    sizes = [(state_bytes["embedding"], formula.embedding().total()), *layers, (loss, loss_saved)]
    return [[state + count * saved for state, saved in sizes] for count in max_in_flight(explicit, num_stages)]


def max_in_flight(cfg: Config, num_stages: int) -> list[int]:
    """Return the maximum number of micro-batches of each stage between their forward and backward pass."""
    current = [0] * num_stages
    peak = [1] * num_stages
    for row in schedule_slots(cfg.model, cfg.parallel, cfg.train):
        for action in (action for slot in row for action in slot):
            if action.kind == "F":
                current[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], current[action.stage])
            elif action.kind != "W":
                current[action.stage] -= 1
    return peak
