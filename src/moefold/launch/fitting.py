"""Ask the machine whether the ranks that it is to run fit into its memory, before they start. Torch-free on the CPU."""

from collections.abc import Callable

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.accelerator import early_device
from moefold.launch.place import Place
from moefold.metrics.host_memory import Room, host_room, process_room
from moefold.metrics.memory_need import Host, Parts, check_training_fits, lack_text, shortage, weight_needs
from moefold.parallel.layout import fold


def fitting_device(wish: str, world_size: int, place: Place | None, check: Callable[[str], None]) -> str:
    """Return the device type of the ranks, after a check of what they will need there.

    Where there is no GPU for certain, the check comes before torch is imported.

    Args:
        wish: run.device.
        world_size: ranks of the job.
        place: of this process, if a launcher started it.
        check: called with the device type; raises if it is not to start.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this machine, or the check raised it.
    """
    device_type = early_device(wish, world_size, place)
    if not device_type:
        from moefold.launch.ranks import choose_device

        device_type = choose_device(wish, world_size, place)
    check(device_type)
    return device_type


def check_training(cfg: Config, device_type: str, place: Place | None) -> None:
    """Refuse a training step for which this machine, or a GPU of it, has too little memory.

    Args:
        cfg: a recipe that `check_config` passed.
        device_type: "cpu" or "cuda".
        place: of this process, if a launcher started it; the first of a machine asks for all of it.

    Raises:
        ConfigError: the ranks do not fit, and run.check_memory is true.
    """
    if cfg.run.check_memory and (place is None or place.local_rank == 0):
        check_training_fits(cfg, host_of(cfg, device_type, place))


def check_inference(cfg: Config, device_type: str, place: Place | None, *, extra: dict[str, int], way_out: str) -> None:
    """Refuse a model that is to compute without learning, for which this machine has too little memory.

    Args:
        cfg: one that `check_config` passed.
        device_type: "cpu" or "cuda".
        place: as of `check_training`.
        extra: bytes of what each rank has in memory beside the weights, by name.
        way_out: what to ask for instead.

    Raises:
        ConfigError: weights and extra do not fit.
    """
    if place is not None and place.local_rank:
        return
    needs = tuple(Parts(part) + Parts(extra) for part in weight_needs(cfg))
    if (short := shortage(needs, host_of(cfg, device_type, place))) is not None:
        raise ConfigError(f"the model does not fit into memory: {lack_text(short)}; {way_out}")


def host_of(cfg: Config, device_type: str, place: Place | None) -> Host:
    """Return the machine of this process with the ranks of the job that run on it."""
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    first, count = (0, p.world_size) if place is None else (place.rank - place.local_rank, place.local_size)
    ranks = range(first, min(first + count, p.world_size))
    pp_ranks = tuple(layout.attention.coordinate(rank, "pp") for rank in ranks)
    if device_type == "cuda":
        return Host(device_type, pp_ranks, _smallest_gpu(len(pp_ranks)))
    return Host(device_type, pp_ranks, host_room(), process_room())


def _smallest_gpu(count: int) -> Room:
    """The least memory of the first so many GPUs, used or not."""
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(min(count, torch.cuda.device_count()))]
    return Room(min(sizes), "on the GPU of a rank")
