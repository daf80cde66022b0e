"""Job files of cluster schedulers, filled from a recipe and checked against it."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath

from moefold.config.base.limits import MAX_RANKS
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.errors import ConfigError
from moefold.message_text import Problem
from moefold.remote_path import is_remote
from moefold.terminal import escape_char

_PLAIN = re.compile(r"[A-Za-z0-9][\w.:+/@-]*", re.ASCII)


class _Escaped(str):
    """Text that a filter has escaped."""

    __slots__ = ()


def fill_template(scheduler: str, job: object) -> str:
    """Return the job file of a scheduler, filled from a job."""
    # Lazy import: an error of the request is reported without it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        finalize=check_escaped,
    )
    environment.filters |= {name: _as_escaped(escape) for name, escape in ESCAPES.items()}
    environment.filters["pod"] = escape_pod
    text = (files("moefold.launch") / "job_templates" / f"{scheduler}.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(job=job)


def escape_comment(value: object) -> str:
    """Return text for a comment: one line, without characters that end a line, reorder it or are not text."""
    return "".join(char if char.isprintable() else escape_char(char) for char in str(value))


def escape_plain(value: object) -> str:
    """Return a name that needs no quotes anywhere. Other names are an error of the caller."""
    text = str(value)
    assert _PLAIN.fullmatch(text), text
    return text


def escape_shell(words: list[str]) -> str:
    """Return the words of a command for bash, in ASCII if a word has characters that are not printable.

    `{{` is split by empty quotes, as SkyPilot fills its own templates.
    """
    return " ".join(_shell_word(word) for word in words)


def escape_yaml(value: str | list[str]) -> str:
    """Return a string, or a list of strings, as quoted YAML.

    Raises:
        ConfigError: a string has bytes that are not UTF-8.
    """
    if isinstance(value, list):
        return "[" + ", ".join(map(escape_yaml, value)) + "]"
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{value!r} is not text in UTF-8, and YAML holds nothing else; rename the file")
    return (
        '"' + "".join(char if char.isprintable() and char not in '"\\' else escape_char(char) for char in value) + '"'
    )


def escape_pod(words: list[str]) -> list[str]:
    """Return words for the arguments of a pod: Kubernetes expands `$(NAME)` there, and reads `$$` as `$`."""
    return [word.replace("$", "$$") for word in words]


ESCAPES: dict[str, Callable[..., object]] = {
    "comment": escape_comment,
    "plain": escape_plain,
    "shell": escape_shell,
    "yaml": escape_yaml,
    "python": repr,
}
"""Filters of the templates."""


def _as_escaped(escape: Callable[..., object]) -> Callable[..., _Escaped]:
    return lambda value: _Escaped(escape(value))


def check_escaped(value: object) -> object:
    """Return a value that a template inserts. A text must have gone through a filter that escapes it."""
    assert isinstance(value, int | _Escaped), f"a template inserts {value!r} without a filter"
    return value


def _shell_word(word: str) -> str:
    if word.isprintable():
        return re.sub(r"\{(?=\{)", "{''", shlex.quote(word))
    codes = (
        char if char.isprintable() and char not in "'\\{" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
        for char in word
    )
    return "$'" + "".join(codes) + "'"


SCHEDULERS = {
    "slurm": "sbatch script: srun starts one task for each GPU",
    "trainjob": "TrainJob of Kubeflow Trainer v2, on Kubernetes",
    "pytorchjob": "PyTorchJob of Kubeflow's training operator v1, on Kubernetes",
    "skypilot": "SkyPilot task",
    "ray": "Python program for Ray Train: TorchTrainer starts one worker for each GPU",
}
OPTIONS = {
    "image": ("trainjob", "pytorchjob", "skypilot"),
    "claim": ("trainjob", "pytorchjob", "skypilot"),
    "gpu": ("skypilot",),
    "time": ("slurm", "pytorchjob"),
    "grace": ("slurm", "pytorchjob"),
    "cpus_per_task": tuple(SCHEDULERS),
    "mem": ("slurm", "trainjob", "pytorchjob", "skypilot"),
    "exclusive": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "qos": ("slurm",),
}
"""Schedulers that read each option."""
REQUIRED = ("image", "claim", "gpu")
"""Options that are required by the schedulers that read them."""

SITE_KEYS = ("partition", "account", "qos")
"""Options with the names and values of sbatch."""

DEFAULT_SLURM_TIME = "24:00:00"
"""Time limit of a SLURM job: the default of a partition may be minutes, and an ended job is submitted again."""
MAX_CPUS_PER_TASK = 4096
DEFAULT_GRACE_S = 300
MIN_GRACE_S = 30
"""Least time from SIGTERM to the end: the limit of torchrun for finishing and saving a step."""
SRUN_WAIT_S = 120
"""Time that `srun --wait` gives the other ranks after the first rank has ended, to report its failure and to end."""
MAX_NAME_CHARS = 40
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_IMAGE = re.compile(r"[a-z0-9][\w.\-/:@]*", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9\-]{0,61}[a-z0-9])?")
_GPU = re.compile(r"[A-Za-z0-9][\w\-]*", re.ASCII)
_MEM = re.compile(r"([1-9]\d{0,6})([MGT])")
_SITE_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Settings of a job file that a recipe does not have."""

    scheduler: str
    nodes: int
    gpus_per_node: int
    restarts: int = 3
    """Number of times that the ranks are started again after a failure."""
    image: str = ""
    claim: str = ""
    """Name of the shared volume: a PersistentVolumeClaim, or a volume of SkyPilot."""
    gpu: str = ""
    """Name of the GPU, as SkyPilot knows it."""
    time: str = ""
    """Time limit, [DAYS-]HOURS:MINUTES:SECONDS."""
    grace: int | None = None
    """Seconds from SIGTERM to the end."""
    cpus_per_task: int | None = None
    """CPU cores of a rank. None means all cores of the node, shared by its ranks."""
    mem: str = ""
    """Memory of a node, such as 512G (GiB)."""
    exclusive: bool | None = None
    """True if the job shares its nodes with no other job. None means the default, True."""
    partition: str = ""
    account: str = ""
    qos: str = ""


@dataclass(frozen=True, kw_only=True)
class _Job(JobRequest):
    """Values that the templates insert: the request with its defaults, and values derived from it and the recipe."""

    recipe: str
    name: str
    time_s: int
    grace_s: int
    wait_s: int = SRUN_WAIT_S
    mount: str
    overrides: list[str]
    words: list[str]
    roles: list[tuple[str, int]]
    """Roles of the pods of a PyTorchJob, with their numbers."""
    mem_gib: int
    site_keys: list[tuple[str, str]]

    @property
    def cpus_per_node(self) -> int:
        """CPU cores of the ranks of a node."""
        return (self.cpus_per_task or 0) * self.gpus_per_node


def write_job_file(cfg: Config, recipe: str, overrides: Sequence[str], request: JobRequest) -> str:
    """Return the text of a job file that trains a recipe.

    Raises:
        ConfigError: the request contradicts the recipe or itself.
    """
    _check_options(request)
    _check_node(request)
    _check_size(cfg.run, cfg.parallel, cfg.rollout, request)
    _check_start(cfg.lora, cfg.checkpoint, cfg.sites)
    _check_storage(cfg.run, cfg.checkpoint, request)
    if request.scheduler == "slurm" and not request.time:
        request = replace(request, time=DEFAULT_SLURM_TIME)
    time_s = _parse_time(request.time)
    _check_times(cfg.faults, request, time_s)
    mem_gib = _parse_mem_gib(request.mem)
    request = replace(request, exclusive=request.exclusive is not False)
    if request.scheduler == "slurm" and request.exclusive and not request.mem:
        # SLURM reads 0 as all memory of the node. Its default is a share for each core.
        request = replace(request, mem="0")
    job = _Job(
        **vars(request),
        recipe=recipe,
        name=job_name(recipe),
        time_s=time_s,
        grace_s=DEFAULT_GRACE_S if request.grace is None else request.grace,
        mount=str(PurePosixPath(cfg.run.dir).parent),
        overrides=list(overrides),
        words=["moefold", "train", recipe, *overrides],
        roles=[("Master", 1), ("Worker", request.nodes - 1)][: 1 if request.nodes == 1 else 2],
        mem_gib=mem_gib,
        site_keys=[(key, getattr(request, key)) for key in SITE_KEYS if getattr(request, key)],
    )
    return fill_template(request.scheduler, job)


def job_name(recipe: str) -> str:
    """Return the name of the job: the name of the recipe, in the characters that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")[:MAX_NAME_CHARS].strip("-")
    return name if name[:1].isalpha() else f"moefold-{name}".strip("-")


def _check_options(request: JobRequest) -> None:
    """Check that the scheduler reads each option that is set, and that its required options are set and valid."""
    scheduler = request.scheduler
    for option, readers in OPTIONS.items():
        value = getattr(request, option)
        is_set = value not in ("", None)
        if is_set and scheduler not in readers:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} has no effect on {scheduler}, only on {', '.join(readers)}; leave it out")
        if not is_set and option in REQUIRED and scheduler in readers:
            raise ConfigError(f"{scheduler} needs --{option}; {_MEANING[option]}")
    names = (("image", _IMAGE), ("claim", _CLAIM), ("gpu", _GPU), *((key, _SITE_NAME) for key in SITE_KEYS))
    for option, pattern in names:
        value = getattr(request, option)
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"--{option}={value!r} is not a legal name; {_MEANING[option]}")
    if not 0 <= request.restarts <= 1000:
        raise ConfigError(f"--restarts={request.restarts} must be 0 to 1000; 0 never starts the ranks again")


_MEANING = {
    "image": "name a container image that contains moefold, such as registry/team/moefold:1",
    "claim": "name the shared volume that holds run.dir: lower-case letters, digits and hyphens",
    "gpu": "name the GPU as `sky show-gpus` does, such as H100",
    "partition": "name a partition as `sinfo` does",
    "account": "name an account as `sacctmgr` does",
    "qos": "name a quality of service as `sacctmgr` does",
}


def _check_node(request: JobRequest) -> None:
    """Check the cores and the memory of the nodes."""
    cpus = request.cpus_per_task
    if cpus is not None and not 0 < cpus <= MAX_CPUS_PER_TASK:
        raise ConfigError(f"--cpus-per-task={cpus} must be 1 to {MAX_CPUS_PER_TASK}")
    if request.exclusive is False and not cpus:
        raise ConfigError(
            "--no-exclusive leaves each rank one CPU core at most sites; add --cpus-per-task=N, the cores of a rank"
        )
    if request.scheduler == "skypilot" and request.mem.endswith("M"):
        raise ConfigError(f"--mem={request.mem} must be in G or T on skypilot, which counts GiB, such as 512G")


def _parse_mem_gib(text: str) -> int:
    """Return the memory of a node in GiB, rounded down, or 0 if it is not set."""
    if not text:
        return 0
    match = _MEM.fullmatch(text)
    if not match:
        raise ConfigError(f"--mem={text!r} must be the memory of a node as a number with M, G or T, such as 512G")
    return int(match[1]) * {"M": 1, "G": 1 << 10, "T": 1 << 20}[match[2]] >> 10


def _check_size(run: RunConfig, p: ParallelConfig, rollout: RolloutConfig, request: JobRequest) -> None:
    nodes = request.nodes
    gpus = request.gpus_per_node
    for option, count in (("--nodes", nodes), ("--gpus-per-node", gpus)):
        if not 0 < count <= MAX_RANKS:
            raise ConfigError(f"{option}={count} must be 1 to {MAX_RANKS}")
    if nodes * gpus != rollout.num_job_ranks(p.world_size):
        sampling = f" plus rollout.ranks={rollout.ranks}" if rollout.ranks else ""
        raise ConfigError(
            f"--nodes={nodes} times --gpus-per-node={gpus} is {nodes * gpus} and must equal "
            f"parallel.world_size={p.world_size}{sampling}; change one of them "
            f"(parallel.world_size={max(1, nodes * gpus - rollout.ranks)} as an argument)"
        )
    if nodes > 1 and gpus % p.tp:
        raise ConfigError(
            f"--gpus-per-node={gpus} must be divisible by parallel.tp={p.tp}, so that tensor parallelism stays inside "
            "a node; choose another tp or number of nodes"
        )
    if request.scheduler == "ray" and rollout.ranks:
        raise ConfigError(
            f"rollout.ranks={rollout.ranks} only sample, and each worker of Ray Train trains; set rollout.ranks=0, "
            "or choose another scheduler"
        )
    if run.device == "cpu":
        raise ConfigError(Problem("run.device", "cpu", "does not use the GPUs of the job", "add run.device=auto"))


def _check_start(lora: LoraConfig, checkpoint: CheckpointConfig, sites: SitesConfig) -> None:
    """Check the conditions that the ranks of a job check when they start."""
    if sites.starts_all:
        raise ConfigError(
            f"sites.count={sites.count} without a number starts all sites on one machine, and a job file starts "
            "one site; set sites.number and sites.meet, and write a job file for each site"
        )
    if lora.rank and not checkpoint.init_from:
        raise ConfigError(
            f"lora.rank={lora.rank} trains adapters of given weights, and checkpoint.init_from names none; add "
            "checkpoint.init_from=FOLDER as an argument"
        )


def _check_storage(run: RunConfig, checkpoint: CheckpointConfig, request: JobRequest) -> None:
    """Check that all nodes and the next start find the written run, and that it can resume."""
    for key, folder in (("run.dir", run.dir), ("checkpoint.dir", checkpoint.dir)):
        if not folder and key == "checkpoint.dir":
            continue
        if is_remote(folder):
            continue
        path = PurePosixPath(folder)
        if not path.is_absolute() or path.parts[1:2] in (("tmp",), ("dev",)) or path.parts[1:3] == ("var", "tmp"):
            rule = "must be an absolute path on storage that all nodes share, not in /tmp"
            raise ConfigError(Problem(key, folder, rule, f"add {key}=/SHARED/{path.name or 'run'} as an argument"))
    mount = PurePosixPath(run.dir).parent
    if request.claim and str(mount) == "/":
        rule = "must be a folder inside the mounted volume"
        raise ConfigError(Problem("run.dir", run.dir, rule, "add run.dir=/shared/run as an argument"))
    is_local = bool(checkpoint.dir) and not is_remote(checkpoint.dir)
    if request.claim and is_local and not PurePosixPath(checkpoint.dir).is_relative_to(mount):
        rule = f"must be inside {mount}, where the volume --claim={request.claim} is mounted"
        raise ConfigError(Problem("checkpoint.dir", checkpoint.dir, rule, "leave it out for RUN_DIR/checkpoints"))
    if request.restarts and not checkpoint.every:
        rule = f"leaves nothing to resume from for --restarts={request.restarts}"
        raise ConfigError(Problem("checkpoint.every", 0, rule, "set checkpoint.every, or --restarts 0"))
    if request.restarts and checkpoint.resume != "auto":
        rule = f"would lose the steps since then at each of --restarts={request.restarts}"
        way_out = "set checkpoint.resume=auto, or --restarts 0"
        raise ConfigError(Problem("checkpoint.resume", checkpoint.resume, rule, way_out))


def _parse_time(text: str) -> int:
    """Return a time limit in seconds, or 0 without one."""
    if not text:
        return 0
    match = _TIME.fullmatch(text)
    seconds = 0
    if match:
        days, hours, minutes, seconds_part = (int(field or 0) for field in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + seconds_part
    if not seconds:
        raise ConfigError(f"--time={text!r} must be [DAYS-]HOURS:MINUTES:SECONDS above zero, such as 24:00:00")
    return seconds


def _check_times(faults: FaultsConfig, request: JobRequest, time_s: int) -> None:
    if request.grace is not None and request.grace < MIN_GRACE_S:
        raise ConfigError(
            f"--grace={request.grace} must be at least {MIN_GRACE_S} s: after SIGTERM a step is finished and saved"
        )
    grace_s = DEFAULT_GRACE_S if request.grace is None else request.grace
    if time_s and time_s <= grace_s:
        raise ConfigError(f"--time={request.time} must be longer than --grace={grace_s} s, which ends it")
    if time_s and faults.timeout_s >= time_s:
        raise ConfigError(
            f"faults.timeout_s={faults.timeout_s:g} must be less than --time={request.time}, or a hang is never "
            "reported; lower it, or raise --time"
        )
