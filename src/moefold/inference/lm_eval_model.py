"""lm-eval model class (github.com/EleutherAI/lm-evaluation-harness), and the function of each rank."""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from moefold.data.conversations.chat import ChatTemplate
from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, read_rank_env
from moefold.inference.lm_eval_settings import LmSettings
from moefold.inference.load import load_model
from moefold.inference.sampling import SamplingParams
from moefold.inference.scoring import GenerateRequest, ServedModel
from moefold.inference.text import open_tokenizer, stop_token_ids
from moefold.launch.exit import hard_exit
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.ranks import choose_device, init_distributed, single_rank_env

ScoredPair = tuple[tuple[str, str] | None, list[int], list[int]]
"""((context, continuation) as text, ids of the context, ids of the continuation)."""


class MoefoldLM(TemplateLM):
    """lm-eval model of a checkpoint or Hugging Face folder: `--model moefold --model_args path=MODEL`.

    Alone, it loads the model in this process. `moefold lm-eval` passes a model that is sharded over ranks. The
    arguments are the fields of `LmSettings`.
    """

    def __init__(self, model: ServedModel | None = None, **arguments: Any) -> None:
        super().__init__()
        self._settings = LmSettings.from_arguments(arguments)
        self._stack = ExitStack()
        self._model = self._load_model() if model is None else model
        tokenizer = self._model.loaded.tokenizer
        assert tokenizer is not None
        self._text_tokenizer: Tokenizer = tokenizer
        self._source, _ = self._settings.resolve(self._model.loaded.model.groups.world.size)
        self._device = self._model.loaded.model.groups.device
        self._end_ids = stop_token_ids(self._source, tokenizer)
        self._max_length = self._settings.max_length or self._source.context
        self._template: ChatTemplate | None = None

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Create the model from --model_args, which take precedence over lm-eval's own options."""
        return cls(**{**(additional_config or {}), **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Create the model from a string such as "path=MODEL,tp=2"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """Token id that ends a text. It raises ConfigError if the tokenizer has no such token."""
        separator = self._text_tokenizer.separator_id
        if separator is not None:
            return separator
        if self._end_ids:
            return min(self._end_ids)
        raise ConfigError(
            "the tokenizer has no end-of-text token, which lm-eval's tasks need for texts without context"
        )

    @property
    def prefix_token_id(self) -> int:
        """Token id that precedes a text without context: the declared start token, else `eot_token_id`."""
        bos_id = self._text_tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """Identity of tokenizer, its first tokens and chat template, the key of lm-eval's request cache."""
        template = f" {self._template.identity}" if self._template else ""
        return f"{self._text_tokenizer.identity} bos={self._settings.add_bos_token}{template}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, which the results record, or "" if it is not applied."""
        if isinstance(chat_template, str):
            raise ConfigError(f"apply_chat_template={chat_template!r}: a model has one template; set it to True")
        return self._load_template().source if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the turns of a prompt as text, ending with the start of the assistant's turn or an open last turn."""
        return self._load_template().render_prompt(
            chat_history, "a prompt", add_generation_prompt=add_generation_prompt
        )

    def _load_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = self._settings.load_chat_template(self._source, self._text_tokenizer)
        return self._template

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, with the tokenizer's declared first and last tokens, like HFLM.

        Args:
            string: the text. If it begins with the text of `prefix_token_id`, no tokens are added.
            add_special_tokens: whether to add them, or None if the argument add_bos_token decides.
        """
        tokenizer = self._text_tokenizer
        bos_id = tokenizer.bos_id
        if add_special_tokens is None and bos_id is not None and string.startswith(tokenizer.decode([bos_id])):
            add_special_tokens = False
        if add_special_tokens is None:
            add_special_tokens = self._settings.add_bos_token != "false"
        ids: list[int] = (tokenizer.encode_start(string) if add_special_tokens else tokenizer.encode(string)).tolist()
        if add_special_tokens and self._settings.add_bos_token == "true" and bos_id is not None and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows with the maximum context for each token."""
        windows: list[ScoredPair] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._max_length, 1):
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        for scored, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", scored.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context up to one of its stop strings, which is removed."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        for members in groups.values():
            options = _parse_generation_arguments(requests[members[0]].args[1], self._settings.max_gen_toks)
            max_context = self._max_length - options.max_tokens
            if max_context < 1:
                raise ConfigError(
                    f"a task requests {options.max_tokens} new tokens, and the model takes {self._max_length} in all; "
                    "set --model_args max_length=, or --gen_kwargs max_gen_toks="
                )
            prompts = {
                i: self.tok_encode(requests[i].args[0])[-max_context:] or [self.prefix_token_id] for i in members
            }
            generate_request = GenerateRequest(
                tuple(tuple(prompts[i]) for i in members),
                options.max_tokens,
                options.sampling,
                self._end_ids,
                options.stops,
                self._settings.batch_size,
            )
            for i, completion in zip(members, self._model.generate(generate_request), strict=True):
                tokens = completion.tokens[:-1] if completion.finish_reason == "eos" else completion.tokens
                text = self._text_tokenizer.decode(tokens)
                ends = (start for stop in options.stops if (start := text.find(stop)) >= 0)
                texts[i] = text[: min(ends, default=len(text))]
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def close(self) -> None:
        """Destroy the process group, if this object created one."""
        self._stack.close()

    def _loglikelihood_tokens(self, requests: Sequence[ScoredPair], **_: Any) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        sequences: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            context, continuation = request[1:]
            if len(continuation) > self._max_length:
                raise ConfigError(
                    f"a task scores {len(continuation)} tokens at once, and the model takes {self._max_length}; set "
                    "--model_args max_length="
                )
            if continuation:
                # + 1: the last token is a label only.
                sequences[i] = (context + continuation)[-(self._max_length + 1) :]
        longest_first = sorted(sequences, key=lambda i: -len(sequences[i]))
        size = self._settings.batch_size
        for batch in (longest_first[i : i + size] for i in range(0, len(longest_first), size)):
            scores = self._model.score([sequences[i] for i in batch], [len(requests[i][2]) for i in batch])
            for i, value in zip(batch, scores, strict=True):
                answers[i] = (value.log_likelihood, value.is_greedy)
                if (text := requests[i][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answers[i])
        return answers

    def _load_model(self) -> ServedModel:
        rank_env = read_rank_env()
        if rank_env is not None and rank_env.world_size > 1:
            raise ConfigError("lm-eval does not shard a model over ranks; start them with `moefold lm-eval ...`")
        source, cfg = self._settings.resolve(None)
        if cfg.parallel.world_size > 1:
            raise ConfigError(
                f"--model_args requests {cfg.parallel.world_size} ranks, and lm-eval is one process; "
                "`moefold lm-eval ...` starts them"
            )
        device_type = choose_device(cfg.run.device, 1, None)
        device = self._stack.enter_context(init_distributed(single_rank_env(), device_type))
        return ServedModel(load_model(source, cfg, device, open_tokenizer(source, self._settings.tokenizer)))


class _GenerationArguments(NamedTuple):
    stops: tuple[str, ...]
    max_tokens: int
    sampling: SamplingParams


def _parse_generation_arguments(arguments: dict[str, Any], default_max_tokens: int) -> _GenerationArguments:
    """Parse a task's generation arguments. Refuse unknown arguments."""
    items = dict(arguments)
    until = items.pop("until", [])
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    lengths = [items.pop(name) for name in names if name in items]
    temperature = float(items.pop("temperature", 0.0))
    do_sample = items.pop("do_sample", None)
    top_p = float(items.pop("top_p", 1.0))
    top_k = int(items.pop("top_k", 0))
    min_p = float(items.pop("min_p", 0.0))
    seed = int(items.pop("seed", 0))
    if items:
        raise ConfigError(f"generation argument {next(iter(items))}= is unknown to moefold; leave it out of gen_kwargs")
    if do_sample is True and temperature == 0:
        temperature = 1.0
    is_greedy = do_sample is False or temperature == 0
    sampling = SamplingParams(seed=seed, temperature=0.0)
    if not is_greedy:
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    sampling.check()
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    return _GenerationArguments(stops, int(lengths[0]) if lengths else default_max_tokens, sampling)


def lm_eval_worker(settings: LmSettings, argv: list[str], rank_env: RankEnv, device_type: str) -> int:
    """Join the process group. Run lm-eval on rank 0 and serve the model on the other ranks. Return the exit status.

    The model is loaded when lm-eval requests it, so that lm-eval reports wrong options before weights are read.
    """
    with RankErrorHandler(rank_env, lambda: False), init_distributed(rank_env, device_type) as device:
        loaded: list[ServedModel] = []

        def load_here() -> ServedModel:
            source, cfg = settings.resolve(rank_env.world_size)
            loaded.append(ServedModel(load_model(source, cfg, device, open_tokenizer(source, settings.tokenizer))))
            return loaded[0]

        if rank_env.rank:
            load_here().serve()
            return 0
        status = run_harness(argv, load_here)
        if loaded:
            loaded[0].shutdown()
        elif rank_env.world_size > 1:
            # The other ranks block in load_model, which is collective.
            hard_exit(status)
    return status


def run_harness(argv: list[str], load_here: Callable[[], ServedModel] | None) -> int:
    """Run lm-eval's command line, with the model of `load_here` registered as "moefold"."""
    if load_here is not None:
        load = load_here

        class OpenLM(MoefoldLM):
            """lm-eval model of this command."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__(load(), **arguments)

        register_model("moefold")(OpenLM)
    # If lm-eval itself runs the model, the module of the command is not needed.
    from lm_eval.__main__ import cli_evaluate

    previous_argv = sys.argv
    sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError | BrokenPipeError) or was_raised_in_moefold(error):
            raise
        hint = "`moefold lm-eval ls tasks` lists its tasks, `moefold lm-eval run --help` its options"
        raise ConfigError(f"lm-eval: {str(error).rstrip('.')}; {hint}") from error
    finally:
        sys.argv = previous_argv
    return 0


def was_raised_in_moefold(error: BaseException) -> bool:
    """Return whether an error was raised in moefold code that lm-eval called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__")).startswith("moefold.") for frame in frames[1:])
