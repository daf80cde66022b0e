"""Bytes of every part of a model on every stage of a pipeline, before it is known what stands where. Torch-free."""

from dataclasses import replace

from moefold.config.schema import Config
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.recompute_parts import AUTO
from moefold.cost.state_memory import StateMemory
from moefold.topology.schedule_tables import schedule_slots


def unit_bytes(cfg: Config, num_stages: int) -> list[list[int]]:
    """For each stage the bytes of the embedding, of each layer, and of the loss, on the first rank of the stage.

    States (weights, gradients, moments that are not offloaded), and what a micro-batch keeps times those in flight on
    the stage. With the kernels of a GPU, even experts, and no activation offloaded. `train.recompute = ["auto"]`, which
    chooses for a layout, counts as nothing made again.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
    """
    model, train = cfg.model, cfg.train
    spelled = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=""))
    states, formula = StateMemory(spelled), ActivationMemory(cfg, () if AUTO in train.recompute else None)
    offloads = train.offload_optimizer != "none"
    held = {name: states.unit_bytes(name, with_optimizer=not offloads) for name in ("embedding", "head", "D", "M")}
    layers = [(held[kind], formula.saved_by_kind[kind].total()) for kind in model.layer_kinds]
    loss = held["head"] + formula.transient_logits + (held["embedding"] if model.last_stage_needs_embedding else 0)
    kept = formula.head().total()
    if model.mtp_layers:
        loss += model.mtp_layers * states.unit_bytes("further", with_optimizer=not offloads)
        kept += model.mtp_layers * formula.mtp_layer().total()
    units = [(held["embedding"], formula.embedding().total()), *layers, (loss, kept)]
    return [[state + count * one for state, one in units] for count in max_in_flight(spelled, num_stages)]


def max_in_flight(cfg: Config, num_stages: int) -> list[int]:
    """Micro-batches of each stage whose forward pass has begun and whose backward pass is not over, at most."""
    now, most = [0] * num_stages, [1] * num_stages
    for row in schedule_slots(cfg):
        for action in (action for slot in row for action in slot):
            if action.kind == "F":
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind != "W":
                now[action.stage] -= 1
    return most
