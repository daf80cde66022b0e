"""Checked job of a server, made before any rank starts, on the CPU without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moefold.config.schema import Config
from moefold.cost.kv_cache import cache_sizes
from moefold.data.conversations.reward_prompt import override_want
from moefold.errors import ConfigError
from moefold.host.listen import check_port
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.pages import cache_pages
from moefold.inference.engine.requests import EngineSettings
from moefold.inference.jobs import choose_inference_device
from moefold.inference.notices import report_notices
from moefold.inference.serve.reasoning import check_reasons
from moefold.inference.settings import OPTION_NAMES, InferenceRequest, SamplingOptions, launched_config
from moefold.inference.source import ModelSource, find_source
from moefold.inference.text import open_chat_template, open_tokenizer
from moefold.message_text import spelled_as

OOM_HINT = "give a smaller --cache-gib, or shard the model with parallel.tp and pp"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(SamplingOptions):
    """Settings of a server, except the model and its mapping."""

    host: str = "127.0.0.1"
    """Name or address to listen on."""
    port: int = 8000
    """Port. 0: any free port."""
    name: str = ""
    """Name of the model in the API. Empty means the name of its folder."""
    slots: int = 64
    """Samples that a data-parallel rank decodes at a time."""
    cache_gib: float = 1.0
    """GiB of the KV cache of a rank."""
    max_length: int = 0
    """Maximum tokens of a prompt and its completion. 0: the context length of the model, or the size of the cache."""
    max_concurrent: int = 256
    """Maximum running and waiting samples. Other requests are answered with status 429."""
    max_body_kib: int = 1024
    """Largest body of a request, in KiB."""
    reasoning: bool = False
    """True if answers of chats have the text between <think> and </think> as `reasoning_content`."""
    api_key: str = field(default="", repr=False)
    """Key that clients must send. Empty means no key."""
    access_log: str = ""
    """File with a line for each request, "-" for standard error. Empty means no log."""


@dataclass(frozen=True)
class ServeJob:
    """Settings of a server that have passed all checks."""

    source: ModelSource
    cfg: Config
    device_type: str
    """"cpu" or "cuda"."""
    options: ServeOptions
    name: str
    """Name of the model in the API."""
    settings: EngineSettings
    num_pages: int
    max_length: int
    """Maximum tokens of a prompt and its completion."""


def prepare_server(model: str, overrides: Sequence[str], options: ServeOptions, rank_env: RankEnv | None) -> ServeJob:
    """Check a server before any rank starts. The overrides are its mapping.

    Raises:
        ConfigError: the model, an option or the mapping cannot work, or the memory is too small.
    """
    _check_options(options)
    source = find_source(model, options.ignore_key)
    report_notices(source.notices, rank_env)
    source = replace(source, want=override_want(source.want, options.want))
    inference = InferenceRequest.of(options, overrides, seq_len=max(2, options.max_length or source.context))
    cfg = launched_config(source, inference, "generate", rank_env)
    open_tokenizer(source, options.tokenizer, reports=rank_env is None or rank_env.rank == 0)
    if options.reasoning:
        template = open_chat_template(source, options.tokenizer, options.chat_template)
        check_reasons(template.source_for(None), template.location)
    settings = EngineSettings(slots=options.slots, cache_gib=options.cache_gib)

    def cache_on(device_type: str) -> tuple[int, int, int]:
        """Return pages, tokens and bytes of the cache."""
        sizes = cache_sizes(cfg, device_type)
        with spelled_as(OPTION_NAMES):
            settings.check()
            num_pages = cache_pages(sizes, settings)
        assert num_pages is not None
        # The last token of a completion is never an input of the model.
        num_tokens = num_pages * sizes.page_positions + 1
        if options.max_length > num_tokens:
            raise ConfigError(
                f"--cache-gib {options.cache_gib:g} holds {num_tokens} tokens, and --max-length is "
                f"{options.max_length}; set a larger --cache-gib, or a smaller --max-length"
            )
        return num_pages, num_tokens, sizes.total_bytes(num_pages, options.slots)

    def cache_bytes(device_type: str) -> dict[str, int]:
        return {f"the cache of --cache-gib {options.cache_gib:g}": cache_on(device_type)[2]}

    device_type = choose_inference_device(cfg, source, rank_env, cache_bytes, OOM_HINT)
    num_pages, num_tokens, _ = cache_on(device_type)
    max_length = options.max_length or min(source.context, num_tokens)
    name = options.name or Path(model).resolve().name
    return ServeJob(source, cfg, device_type, options, name, settings, num_pages, max_length)


def _check_options(options: ServeOptions) -> None:
    for name, minimum in (("slots", 1), ("max_length", 0), ("max_concurrent", 1), ("max_body_kib", 1)):
        value = getattr(options, name)
        if value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {minimum}")
    if options.max_length == 1:
        raise ConfigError("--max-length 1 leaves no room for a completion; set at least 2 (0: the context length)")
    key = options.api_key
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("the key of clients (--api-key) must have letters, digits and signs of ASCII only, no spaces")
    check_port(options.port)
    if options.cache_gib <= 0:
        raise ConfigError(f"--cache-gib {options.cache_gib:g} must be above 0: the requests are not known in advance")
