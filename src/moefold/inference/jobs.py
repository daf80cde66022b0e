"""Checked jobs of evaluation and generation, made before any rank starts, on the CPU without torch.

Messages name the options of `moefold eval` and `moefold generate`.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moefold.checkpoint.integrity import check_file_sizes
from moefold.config.schema import Config
from moefold.cost.kv_cache import cache_sizes
from moefold.data.conversations.chat import end_of_turn_marker
from moefold.data.conversations.reward_prompt import override_want
from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError
from moefold.host.output_file import check_writable, refuse_existing
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.pages import cache_pages, check_requests, pages_needed
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.notices import report_notices
from moefold.inference.sampling import SamplingParams
from moefold.inference.settings import (
    OPTION_NAMES,
    InferenceRequest,
    ModelOptions,
    SamplingOptions,
    batch_bytes,
    eval_oom_hint,
    generate_oom_hint,
    launched_config,
)
from moefold.inference.source import ModelSource, find_source
from moefold.inference.text import (
    TEXT_NAMES,
    check_made_by,
    encode_messages,
    encode_prompts,
    encode_text,
    open_chat_template,
    open_tokenizer,
    read_text,
    stop_token_ids,
)
from moefold.inference.token_dataset import TokenDataset, check_dataset
from moefold.launch.accelerator import DEVICE_NAMES
from moefold.launch.memory_check import check_inference, choose_device_type
from moefold.message_text import Problem, Setting, spelled_as
from moefold.ops.kernel_support import check_kernel_device
from moefold.validate.rl import check_fetching_ranks

MAX_GENERATED_AT_ONCE = 64
"""Prompts that a data-parallel rank continues at once."""
MAX_DEFAULT_SEQ_LEN = 2048
"""Many models support 128 k tokens and more, which few machines and texts can fill."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Settings of an evaluation, except the model and its data."""

    seq_len: int | None = None
    """Tokens of a sequence. None means train.seq_len of the run, or the model's context length up to 2048."""
    keep_tail: bool = False
    """If True, evaluate the tokens after the last whole sequence as a shorter sequence."""
    batch_size: int = 8
    """Sequences of each data-parallel rank at a time."""
    force: bool = False
    """If True, replace an existing file of logits."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Settings of a generation, except the model, its prompts and the sampling."""

    chat: bool = False
    """True if prompts are messages for the chat template, as `chat_template`, `want` and `system` require."""
    system: str = ""
    """System message before each prompt."""
    ignore_eos: bool = False
    """If True, continue after an end-of-text token."""
    cache_gib: float = 0.0
    """GiB of the KV cache of a rank. 0: enough for all prompts, up to 64 on a data-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """Arguments of an evaluation: a model, and either token ids or text."""

    model: str
    tokens: Path | np.ndarray | None = None
    """Row of ids, or the .npy file with the ids."""
    text: Path | None = None
    logits: Path | None = None
    """Output file of the logits."""
    overrides: Sequence[str] = ()
    options: EvalOptions = EvalOptions()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Model, prompts and settings of `moefold generate`, before the model is read."""

    model: str
    read_prompts: Callable[[], tuple[str, ...]]
    """Returns the prompts. It is called after the checks of the mapping and the tokenizer."""
    max_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    overrides: tuple[str, ...] = ()
    options: GenerateOptions = GenerateOptions()


@dataclass(frozen=True)
class EvalJob:
    """Settings of an evaluation that have passed all checks."""

    source: ModelSource
    cfg: Config
    device_type: str
    """Type of the devices of all ranks: "cpu" or "cuda"."""
    ids: np.ndarray | Path
    """Row of ids, or the .npy file with the ids."""
    seq_len: int
    keeps_tail: bool
    logits: Path | None

    def dataset(self) -> TokenDataset:
        """Return the sequences to evaluate."""
        return TokenDataset.open(self.ids, self.seq_len, self.keeps_tail)


@dataclass(frozen=True)
class GenerateJob:
    """Checked batch of prompts."""

    source: ModelSource
    cfg: Config
    device_type: str
    """Type of the devices of all ranks: "cpu" or "cuda"."""
    tokenizer: str
    """"bytes" or a path. "": the source's tokenizer."""
    prompts: tuple[str, ...]
    requests: tuple[Request, ...]
    """A request for each prompt."""
    settings: EngineSettings
    sampling: SamplingParams
    is_chat: bool = False
    """True if the prompts are messages, whose ids include the chat template around them."""
    stop_string: str = ""
    """Text that ends a continuation if no single token does."""


Notify = Callable[[str], None]
"""Receives a notice for the user."""


def prepare_evaluation(request: EvalRequest, rank_env: RankEnv | None, notify: Notify) -> EvalJob:
    """Check an evaluation before any rank starts. A default sequence length is notified.

    Raises:
        ConfigError: the model, the data, an option or the mapping cannot work, or the memory is too small.
    """
    options = request.options
    if options.seq_len is not None and options.seq_len < 2:
        rule = "must be at least 2: the first token of a sequence is not predicted"
        raise ConfigError(Problem("--seq-len", options.seq_len, rule))
    if options.batch_size < 1:
        raise ConfigError(Problem("--batch-size", options.batch_size, "must be at least 1"))
    source = find_source(request.model, options.ignore_key)
    report_notices(source.notices, rank_env)
    seq_len = _default_seq_len(source, notify) if options.seq_len is None else options.seq_len
    inference = InferenceRequest.of(options, request.overrides, seq_len=seq_len, batch_size=options.batch_size)
    cfg = launched_config(source, inference, "evaluate", rank_env)
    _check_logits(request)
    tokens, name = _token_ids(request, source)
    dataset = TokenDataset.open(tokens, seq_len, options.keep_tail)
    check_dataset(dataset, source.model.vocab_size, name)
    _check_disk_space(request.logits, dataset, source.model.vocab_size)
    if cfg.moe.eval_capacity_factor <= 0:
        # Without a capacity, padding sequences cost time but do not change the result: shrink the batch.
        batch_size = min(options.batch_size, -(-dataset.num_sequences // cfg.parallel.dp))
        cfg = launched_config(source, replace(inference, batch_size=batch_size), "evaluate", rank_env)
    batch = f"a batch of {cfg.train.micro_batch_size} sequences of {cfg.train.seq_len} tokens"
    extra = {batch: batch_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train)}
    device_type = choose_inference_device(cfg, source, rank_env, lambda _: extra, eval_oom_hint())
    return EvalJob(
        source=source,
        cfg=cfg,
        device_type=device_type,
        ids=tokens,
        seq_len=seq_len,
        keeps_tail=options.keep_tail,
        logits=request.logits,
    )


def prepare_generation(request: GenerationRequest, rank_env: RankEnv | None) -> GenerateJob:
    """Check a generation before any rank starts.

    Raises:
        ConfigError: the model, a prompt, an option or the mapping cannot work, or the memory is too small.
    """
    options = request.options
    if request.max_tokens < 1:
        raise ConfigError(Problem("--max-tokens", request.max_tokens, "must be at least 1"))
    request.sampling.check()
    source = find_source(request.model, options.ignore_key)
    report_notices(source.notices, rank_env)
    # Report a wrong mapping before reading the prompt.
    inference = InferenceRequest.of(options, request.overrides)
    cfg = launched_config(source, inference, "generate", rank_env)
    tokenizer = open_tokenizer(source, options.tokenizer, reports=rank_env is None or rank_env.rank == 0)
    _refuse_unused_chat_options(options)
    source = replace(source, want=override_want(source.want, options.want))
    prompts = request.read_prompts()
    end_mark = ""
    ends = frozenset[int]()
    if options.chat:
        ids, ends, end_mark = _encode_chat(options, source, tokenizer, prompts)
    else:
        ids = encode_prompts(source, tokenizer, prompts)
    longest = max(map(len, ids)) + request.max_tokens
    cfg = launched_config(source, replace(inference, seq_len=longest), "generate", rank_env)
    eos_ids = frozenset() if options.ignore_eos else ends | stop_token_ids(source, tokenizer)
    requests = tuple(
        Request(prompt=prompt, prompt_number=i, max_tokens=request.max_tokens, eos_ids=eos_ids)
        for i, prompt in enumerate(ids)
    )
    settings = EngineSettings(slots=min(MAX_GENERATED_AT_ONCE, len(requests)), cache_gib=options.cache_gib)
    cache = f"the cache of {len(ids)} prompt{'s' * (len(ids) > 1)} and {Setting('--max-tokens', request.max_tokens)}"

    def cache_bytes(device_type: str) -> dict[str, int]:
        with spelled_as(OPTION_NAMES | {"rollout.slots": "prompts"}):
            settings.check()
            dp = cfg.parallel.dp
            return {cache: cache_of_requests(cfg, device_type, [requests[i::dp] for i in range(dp)], settings)}

    device_type = choose_inference_device(cfg, source, rank_env, cache_bytes, generate_oom_hint())
    return GenerateJob(
        source=source,
        cfg=cfg,
        device_type=device_type,
        tokenizer=options.tokenizer,
        prompts=prompts,
        requests=requests,
        settings=settings,
        sampling=request.sampling,
        is_chat=options.chat,
        stop_string="" if options.ignore_eos else end_mark,
    )


def _refuse_unused_chat_options(options: GenerateOptions) -> None:
    for value, setting, name in (
        (options.chat_template, Setting("--chat-template"), "the template"),
        (options.want, Setting("--want", options.want), str(Setting("--want"))),
        (options.system, Setting("--system"), "the system message"),
    ):
        if value and not options.chat:
            way_out = f"add it, or leave {name} out"
            raise ConfigError(f"{setting:s} has no effect without {Setting('--chat')}; {way_out}")


def cache_of_requests(
    cfg: Config, device_type: str, requests: Sequence[Sequence[Request]], settings: EngineSettings
) -> int:
    """Return the cache bytes of the data-parallel rank with the largest need, given the requests of each rank."""
    sizes = cache_sizes(cfg, device_type)
    num_pages = max(pages_needed(batch, settings, sizes.page_positions) for batch in requests)
    max_pages = cache_pages(sizes, settings)
    if max_pages is not None:
        check_requests([request for batch in requests for request in batch], max_pages, sizes.page_positions)
        num_pages = min(num_pages, max_pages)
    return sizes.total_bytes(num_pages, min(settings.slots, max(map(len, requests))), settings.cache)


@spelled_as({**OPTION_NAMES, **DEVICE_NAMES})
def choose_inference_device(
    cfg: Config,
    source: ModelSource,
    rank_env: RankEnv | None,
    extra_bytes: Callable[[str], dict[str, int]],
    suggestion: str,
) -> str:
    """Return the device type, after a check of its memory and of the checkpoint's files.

    Args:
        extra_bytes: returns the bytes of a rank in addition to its weights, by their name in the message, on a type of
            device. It may raise.
        suggestion: the way out if the memory is too small.

    Raises:
        ConfigError: the device is missing, the memory is too small, or a file of the checkpoint is truncated.
    """
    device_type = choose_device_type(cfg.run.device, cfg.parallel.world_size, rank_env)
    check_inference(cfg, device_type, rank_env, extra_bytes=extra_bytes, suggestion=suggestion)
    check_kernel_device(cfg.run, device_type)
    ranks_per_machine = cfg.parallel.world_size if rank_env is None else rank_env.local_world_size
    check_fetching_ranks(cfg.parallel, cfg.rollout, device_type, ranks_per_machine)
    if source.kind == "checkpoint":
        check_file_sizes(source.path)
    return device_type


def _token_ids(request: EvalRequest, source: ModelSource) -> tuple[np.ndarray | Path, str]:
    """Return the ids or their file, and their name in messages."""
    override = request.options.tokenizer
    if isinstance(request.tokens, Path):
        check_made_by(request.tokens, source, override)
        return request.tokens, str(Setting("--tokens", str(request.tokens)))
    if request.tokens is not None:
        return request.tokens, str(Setting("--tokens"))
    assert request.text is not None, "an evaluation has tokens or text"
    name = str(Setting("--text", str(request.text)))
    text = read_text(request.text, "--text")
    return encode_text(source, open_tokenizer(source, override), text, name), name


def _default_seq_len(source: ModelSource, notify: Notify) -> int:
    """Return train.seq_len of the run, or else the model's context length up to a bound, after a notice."""
    if source.trained_len:
        seq_len = source.trained_len
        origin = "train.seq_len of the run"
    else:
        seq_len = min(source.context, MAX_DEFAULT_SEQ_LEN)
        origin = f"the context length of the model, {source.context}, up to {MAX_DEFAULT_SEQ_LEN}"
    notify(f"{Setting('--seq-len', seq_len)}: {origin}")
    return seq_len


@spelled_as(TEXT_NAMES)
def _encode_chat(
    options: GenerateOptions, source: ModelSource, tokenizer: Tokenizer, messages: tuple[str, ...]
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int], str]:
    """Return the messages as token ids in the chat template, the ids that end a turn, and the text that ends it."""
    template = open_chat_template(source, options.tokenizer, options.chat_template)
    ids = encode_messages(template, tokenizer, messages, options.system)
    return ids, *end_of_turn_marker(template, tokenizer)


def _check_logits(request: EvalRequest) -> None:
    path = request.logits
    if path is None:
        return
    if request.options.keep_tail:
        rule = f"writes whole sequences only, and {Setting('--keep-tail')} adds a shorter one"
        raise ConfigError(Problem("--logits", None, rule, "leave one out"))
    if path.suffix != ".npy":
        raise ConfigError(Problem("--logits", str(path), "must end in .npy, the file format"))
    if not path.absolute().parent.is_dir():
        rule = f": the folder {str(path.absolute().parent)!r} does not exist"
        raise ConfigError(Problem("--logits", str(path), rule))
    if path.is_dir():
        rule = "is a folder"
        raise ConfigError(Problem("--logits", str(path), rule, f"name a file in it: {str(path / 'logits.npy')!r}"))
    source_file = request.tokens if request.tokens is not None else request.text
    if isinstance(source_file, Path) and path.resolve() == source_file.resolve():
        rule = "would replace the file that is evaluated"
        raise ConfigError(Problem("--logits", str(path), rule, "name another one"))
    refuse_existing("--logits", path, force=request.options.force)
    check_writable("--logits", path)


def _check_disk_space(path: Path | None, dataset: TokenDataset, vocab_size: int) -> None:
    """Refuse logits that do not fit on the disk: running out of space in a memory-mapped file kills the process."""
    if path is None:
        return
    needed_bytes = 4 * dataset.num_sequences * dataset.seq_len * vocab_size
    free_bytes = shutil.disk_usage(path.absolute().parent).free
    if needed_bytes > free_bytes:
        rule = f"takes {needed_bytes / 1e9:,.1f} GB, and {free_bytes / 1e9:,.1f} GB are free"
        raise ConfigError(Problem("--logits", str(path), rule, "name a file on another disk, or evaluate less"))
