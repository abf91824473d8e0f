"""What `generate` is asked: tokens, the cache, and how tokens are chosen: greedily, or by sampling, with the processors
of logits that it then has. And what an engine that serves a model is asked (`serving`).

Source: transformers 5.24, generation/configuration_utils.py: with `do_sample=True` `top_k` is 50 where nobody sets it,
`temperature` and `top_p` are 1.0; generation/utils.py, `_get_logits_processor`: which values add a processor.
"""

from __future__ import annotations

import math

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import SERVING, STEP, option

GREEDY = "greedy"
EXAMPLE = "top-k=50,top-p=0.9,temperature=0.7"
CACHES = ("dynamic", "static")
MAX_TOKENS = 1 << 30
_KEYS = ("top-k", "top-p", "temperature")


# fmt: off
@record(frozen=True, kw_only=True)
class GenerationOptions:
    """What `--mode generate` takes, and `--mode serve`."""

    prompt: int | None = option(
        None, STEP, "whole", "N", "tokens of the prompt, with --mode generate", example="2048",
        table="generate",
    )
    new_tokens: int | None = option(
        None, STEP, "whole", "N", "tokens that are generated, with --mode generate", example="512",
        table="generate",
    )
    cache: str = option(
        "dynamic", STEP, "choice", "KIND", "cache of keys and values, with --mode generate",
        choices=CACHES, example="static", table="generate",
        details="`dynamic` grows by concatenation, `static` is allocated in advance, as `cache_implementation` of "
        "transformers",
    )
    sampling: str = option(
        GREEDY, STEP, "text", "HOW", "how tokens are chosen, with --mode generate", example=EXAMPLE, table="generate",
        details="`greedy`, `sample`, or settings: `top-k=50,top-p=0.9,temperature=0.7` "
        "([generation](generation.md#sampling))",
    )
    engine: str | None = option(
        None, SERVING, "text", "NAME", "the engine and its version", unset="vllm@0.19", example="vllm@0.19",
        details="Of vLLM; rules of another version than 0.19 were not read, so that its bands are wider",
    )
    utilization: float | None = option(
        None, SERVING, "factor", "SHARE", "share of the card that the engine may hold", unset="the engine's: 0.9",
        example="0.9", details="`gpu_memory_utilization`",
    )
    max_len: int | None = option(
        None, SERVING, "whole", "N", "tokens of the longest request", unset="the model's", example="8192",
        details="`max_model_len`",
    )
    max_seqs: int | None = option(
        None, SERVING, "whole", "N", "requests that may run at once", unset="the engine's for the card", example="256",
        details="`max_num_seqs`",
    )
    max_batched_tokens: int | None = option(
        None, SERVING, "whole", "N", "tokens of a step of the engine", unset="the engine's for the card",
        example="8192", details="`max_num_batched_tokens`",
    )
    kv_dtype: str = option(
        "auto", SERVING, "choice", "TYPE", "type of keys and values in the engine's cache", choices=("auto", "fp8"),
        example="fp8", details="`kv_cache_dtype`; `auto` is that of the model",
    )
    load_as: str = option(
        "auto", SERVING, "choice", "TYPE", "type that the engine packs weights to while it loads them",
        choices=("auto", "fp8"), example="fp8", details="`quantization` of a checkpoint that is not packed",
    )
    lengths: str | None = option(
        None, SERVING, "text", "LENGTHS", "tokens of requests: normal(M, S), lognormal(M, S), uniform(A, B), or a file",
        unset="as long as they may be", example="lognormal(6, 1)", details="How many fit at once is said of them",
    )
    enforce_eager: bool = option(
        False, SERVING, "switch", "", "no CUDA graphs and no compiler in the engine", details="`enforce_eager`",
    )
    # fmt: on


@record(frozen=True)
class Sampling:
    """The processors: scores are divided by a temperature, the `top_k` largest stay (0: all), those of the nucleus of
    `top_p` stay."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    def __str__(self) -> str:
        parts = [f"top_k={self.top_k}"]
        parts += [f"top_p={self.top_p:g}"] * (self.top_p < 1) + [f"temperature={self.temperature:g}"] * self.warm
        return ", ".join(parts)

    @property
    def warm(self) -> bool:
        return self.temperature != 1.0


@record(frozen=True)
class Generation:
    """What `generate` is asked: tokens of the prompt, tokens that are new, the kind of cache, one of `CACHES`, and how
    tokens are sampled (None: greedily).

    Raises:
        UsageError: there is no token.
    """

    prompt: int
    new_tokens: int
    cache: str = "dynamic"
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        for flag, count in (("prompt", self.prompt), ("new-tokens", self.new_tokens)):
            if not 1 <= count <= MAX_TOKENS:
                raise UsageError(
                    f"--{flag} {count} is not a number of tokens",
                    f"It is a whole number from 1 to {MAX_TOKENS:,}.",
                    "Try --prompt 2048 --new-tokens 512.",
                    code="SM124",
                )

    @property
    def steps(self) -> int:
        """Decode steps: the prefill gives the first new token."""
        return self.new_tokens - 1

    @property
    def longest(self) -> int:
        """Tokens in the cache when the last step is done: the last new token never gets into it."""
        return self.prompt + self.steps


def sampling_of(text: str) -> Sampling | None:
    """`greedy` (None), `sample` with the defaults of transformers, or settings as `top-k=50,top-p=0.9`.

    Raises:
        UsageError: another word, or a value that transformers does not take.
    """
    settings = [word.strip().lower().replace("_", "-") for word in text.split(",")]
    if settings == [GREEDY]:
        return None
    values: dict[str, float] = {}
    for word in settings:
        key, _, value = word.partition("=")
        if word == "sample" and len(settings) == 1:
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in _KEYS or key in values or not _taken(key, number):
            raise UsageError(
                f"--sampling {text}: '{word}' is not understood",
                "It is greedy, sample, or settings: top-k (from 0), top-p (above 0, at most 1), temperature (above 0).",
                f"Example: --sampling {EXAMPLE}",
                code="SM123",
            )
        values[key] = number
    return Sampling(values.get("temperature", 1.0), int(values.get("top-k", 50)), values.get("top-p", 1.0))


def _taken(key: str, number: float) -> bool:
    if key == "top-k":
        return 0 <= number < 2**31 and number == int(number)
    return 0 < number <= (1 if key == "top-p" else 1e6)
