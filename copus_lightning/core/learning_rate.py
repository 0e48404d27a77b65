"""The learning rate against the batch, and schedules that count tokens.

The rate of a step is `user's rate * TokenSchedule(tokens) * factor(rule, batch, reference batch)`. Both
factors are pure functions of where the run is now: no factor is ever multiplied onto an earlier one, so
nothing can compound over batch changes, stops and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from copus_lightning.core.goodput import DEFAULT_COEFFICIENT

RULES = ("none", "linear", "sqrt", "surge")

Rule = str | Callable[[float], float]


def check_rule(rule: Rule) -> None:
    """Refuse an unknown rule.

    Raises:
        ValueError: Naming the rules there are.
    """
    if not callable(rule) and rule not in RULES:
        raise ValueError(f"learning_rate_rule={rule!r} is not known: choose among {', '.join(RULES)}")


def factor(
    rule: Rule,
    global_batch_size: int,
    reference_batch_size: int,
    noise_scale: float | None = None,
    coefficient: float = DEFAULT_COEFFICIENT,
) -> float:
    """Factor on the learning rate at the present batch, 1 at the reference batch.

    With `r = B / B_ref`:

    | rule     | factor                                                                              |
    |----------|-------------------------------------------------------------------------------------|
    | `none`   | 1                                                                                   |
    | `linear` | `r`, for SGD (Goyal et al. 2017)                                                    |
    | `sqrt`   | `sqrt(r)`, for Adam (Malladi et al. 2022; COPUS)                                    |
    | `surge`  | `s(B) / s(B_ref)`, `s(B) = 2 / (sqrt(c phi / B) + sqrt(B / (c phi)))` (Li et al. 2024): |
    |          | largest at `B = c * phi`, then falls                                                |
    | callable | `rule(r)`                                                                           |

    While the noise scale is not known, `surge` is `sqrt`: its limit for batches far below the critical one.

    Args:
        rule: A name, or a function of `r`.
        global_batch_size: B, the present batch, samples.
        reference_batch_size: B_ref, the batch at which the user tuned the rate, samples.
        noise_scale: phi, samples; only `surge` uses it.
        coefficient: c; only `surge` uses it.

    Raises:
        ValueError: If the rule is not known, or a callable gives no positive finite number.
    """
    check_rule(rule)
    assert global_batch_size > 0 and reference_batch_size > 0
    ratio = global_batch_size / reference_batch_size
    if callable(rule):
        value = float(rule(ratio))
        if not 0 < value < math.inf:
            raise ValueError(f"learning_rate_rule gave {value} for the batch ratio {ratio}: give one above 0")
        return value
    if rule == "none":
        return 1.0
    if rule == "linear":
        return ratio
    if rule == "sqrt" or noise_scale is None:
        return math.sqrt(ratio)
    critical = coefficient * noise_scale
    # s(B) / s(B_ref) = sqrt(B / B_ref) * (c phi + B_ref) / (c phi + B)
    return math.sqrt(ratio) * (critical + reference_batch_size) / (critical + global_batch_size)


SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class TokenSchedule:
    """Learning-rate schedule as a pure function of tokens: a factor in [0, 1] on the peak rate.

    A warm-up or a decay given in steps would change its length when the batch changes; one given in tokens
    does not. Warm-up rises in proportion to tokens. Then, with `x` from 0 to 1 over the rest of the tokens:

    | kind       | factor                                                                            |
    |------------|-----------------------------------------------------------------------------------|
    | `constant` | 1                                                                                 |
    | `linear`   | `1 - x (1 - final_factor)`                                                        |
    | `cosine`   | `final_factor + (1 - final_factor) (1 + cos(pi x)) / 2`                           |
    | `wsd`      | 1, then over the last `decay_tokens` linear to `final_factor`                     |

    From `total_tokens` on it stays at its last value.

    Args:
        kind: One of the above.
        total_tokens: Length of the whole schedule, warm-up included.
        warmup_tokens: Length of the warm-up; 0 for none.
        decay_tokens: Length of the decay of `wsd`; not allowed with another kind.
        final_factor: Factor at the end, in [0, 1]; not used by `constant`.

    Raises:
        ValueError: If the kind is not known, a length is negative, or the lengths do not fit into the whole.
    """

    kind: str
    total_tokens: int
    warmup_tokens: int = 0
    decay_tokens: int | None = None
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule kind={self.kind!r} is not known: choose among {', '.join(SCHEDULES)}")
        if not self.total_tokens > 0:
            raise ValueError(f"schedule total_tokens={self.total_tokens} must be positive")
        if self.warmup_tokens < 0:
            raise ValueError(f"schedule warmup_tokens={self.warmup_tokens} must not be negative")
        if (self.decay_tokens is not None) != (self.kind == "wsd"):
            raise ValueError(
                f"schedule decay_tokens={self.decay_tokens}: give it with kind 'wsd' and only there"
            )
        if self.decay_tokens is not None and self.decay_tokens <= 0:
            raise ValueError(f"schedule decay_tokens={self.decay_tokens} must be positive")
        if self.warmup_tokens + (self.decay_tokens or 0) > self.total_tokens:
            raise ValueError(
                f"schedule warmup_tokens={self.warmup_tokens} and decay_tokens={self.decay_tokens or 0} do"
                f" not fit into total_tokens={self.total_tokens}: shorten one"
            )
        if not 0 <= self.final_factor <= 1:
            raise ValueError(f"schedule final_factor={self.final_factor} must be between 0 and 1")

    def __call__(self, tokens: float) -> float:
        """The factor after `tokens` tokens."""
        assert tokens >= 0
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        if self.kind == "constant":
            return 1.0
        start = self.warmup_tokens if self.decay_tokens is None else self.total_tokens - self.decay_tokens
        length = self.total_tokens - start
        progress = min(max((tokens - start) / length, 0.0), 1.0) if length else 1.0
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.final_factor + (1 - self.final_factor) * remaining
