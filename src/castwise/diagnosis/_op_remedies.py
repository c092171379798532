"""`advice_on_op`: what to change about an op whose result or gradient is not finite in any precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from castwise.diagnosis._ranges import Range

_HUGE = 1e15
UNKNOWN = "check the ranges of its inputs"


class _Rule(NamedTuple):
    ops: frozenset[str]
    """Names without "aten."; compared after removing a final underscore."""
    applies: Callable[[Sequence[Range]], bool]
    """Given the ranges of the op's inputs."""
    advice: str


def _always(_: Sequence[Range]) -> bool:
    return True


def _has_zero_divisor(inputs: Sequence[Range]) -> bool:
    return len(inputs) < 2 or any(_contains(given, 0.0) for given in inputs[1:])  # or an integer or a number


def _reaches_zero(inputs: Sequence[Range]) -> bool:
    return any(given.lowest is not None and given.lowest <= 0.0 for given in inputs)


def _has_negative(inputs: Sequence[Range]) -> bool:
    return any(given.lowest is not None and given.lowest < 0.0 for given in inputs)


def _reaches_minus_one(inputs: Sequence[Range]) -> bool:
    return any(given.lowest is not None and given.lowest <= -1.0 for given in inputs)


def _exceeds_one(inputs: Sequence[Range]) -> bool:
    return any(given.largest is not None and given.largest >= 1.0 for given in inputs)


def _has_infinity(inputs: Sequence[Range]) -> bool:
    return any(given.inf for given in inputs)


def _is_huge(inputs: Sequence[Range]) -> bool:
    return any(given.largest is not None and given.largest > _HUGE for given in inputs)


def _is_not_huge(inputs: Sequence[Range]) -> bool:
    return not _is_huge(inputs)


def _is_empty(inputs: Sequence[Range]) -> bool:
    return not inputs or any(0 in given.shape for given in inputs)


def _contains(given: Range, value: float) -> bool:
    return given.lowest is not None and given.highest is not None and given.lowest <= value <= given.highest


_OF_RESULTS = (
    _Rule(
        frozenset({"softmax", "safe_softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"}),
        _has_infinity,
        "check for rows that are -inf throughout, as when attention masks a whole row, and leave out such rows",
    ),
    _Rule(
        frozenset({"log_softmax"}),
        _always,
        "a masked logit of -inf has the log-probability -inf, which label smoothing and products with 0 read: mask "
        "with a finite number, such as -1e4",
    ),
    _Rule(
        frozenset({"div", "true_divide"}),
        _has_zero_divisor,
        "check for divisors that are 0, and add an epsilon",
    ),
    _Rule(frozenset({"reciprocal"}), _always, "check for inputs that are 0, and add an epsilon"),
    _Rule(
        frozenset({"log", "log2", "log10", "rsqrt", "xlogy"}),
        _reaches_zero,
        "check for inputs that are 0 or negative, and add an epsilon or clamp them",
    ),
    _Rule(
        frozenset({"log1p"}),
        _reaches_minus_one,
        "check for inputs that are -1 or less, such as the negative of a probability that is 1, and clamp them",
    ),
    _Rule(
        frozenset({"sqrt"}),
        _has_negative,
        "check for inputs that are negative, as rounding may make a difference, and clamp them at 0",
    ),
    _Rule(
        frozenset({"acos", "asin", "atanh", "acosh"}),
        _exceeds_one,
        "check for inputs outside the function's domain, as rounding may make a cosine, and clamp them",
    ),
    _Rule(
        frozenset({"std", "var", "std_mean", "var_mean"}),
        _is_not_huge,
        "the std of a single value divides by 0: pass correction=0, or leave out groups of one, such as a last batch "
        "of one sample",
    ),
    _Rule(frozenset({"exp", "exp2", "expm1", "sinh", "cosh"}), _always, "clamp the exponent, or work with logarithms"),
    _Rule(frozenset({"mean"}), _is_empty, "it is the mean of no elements: leave out empty selections"),
    _Rule(
        frozenset(
            {
                *("linear", "mm", "addmm", "bmm", "baddbmm", "convolution", "mul", "add", "matmul", "pow", "sum"),
                *("square", "mse_loss", "dot", "var", "std", "norm", "linalg_vector_norm"),
            }
        ),
        _is_huge,
        "no format holds the result of such large inputs: find where they come from",
    ),
)

_OF_NEGATIVE_BASE = (
    "a power that is not a whole number of a negative number is NaN: keep its base positive, or clamp it"
)
_WHERE = "torch.where passes gradients of 0 to the branch that it does not take, and 0 * inf is NaN"
_OF_GRADIENTS = {
    "sqrt": "the gradient of sqrt at 0 is inf: add an epsilon inside, (x + 1e-8).sqrt()",
    "pow": "the gradient of a power below 1 is inf at 0: add an epsilon inside, (x + 1e-8) ** p",
    "linalg_vector_norm": "the gradient of this norm at 0 is inf: add an epsilon, (x.square().sum(-1) + 1e-8).sqrt()",
    "norm": "the gradient of this norm at 0 is inf: add an epsilon, (x.square().sum(-1) + 1e-8).sqrt()",
    "std": "the gradient of std at 0 is inf: take (x.var(...) + 1e-8).sqrt()",
    "acos": "the gradient of acos at 1 and -1 is inf: clamp its input to within 1 - 1e-6",
    "asin": "the gradient of asin at 1 and -1 is inf: clamp its input to within 1 - 1e-6",
    "log": f"the gradient of log at 0 is inf: add an epsilon or clamp before it. Note that {_WHERE}",
    "div": f"the gradient of a division by 0 is inf: add an epsilon to the divisor. Note that {_WHERE}",
    "reciprocal": f"the gradient of 1 / x at 0 is inf: add an epsilon. Note that {_WHERE}",
    "rsqrt": "the gradient of rsqrt at 0 is inf: add an epsilon inside",
    "exp": f"the result of exp is inf, and so is its gradient: clamp the exponent. Note that {_WHERE}",
}


def advice_on_op(op: str, gradient_of: str, inputs: Sequence[Range], outputs: Sequence[Range] = ()) -> str:
    """Return what to check or change, `UNKNOWN` if nothing is known of the op.

    Args:
        op: Name such as "aten.div".
        gradient_of: Name of the op of the forward whose gradient `op` computes; "" in a forward.
        inputs: Ranges of its floating-point inputs.
        outputs: Ranges of its results, as far as they are known.
    """
    name, forward = _bare(op), _bare(gradient_of)
    if forward in _OF_GRADIENTS:
        return _OF_GRADIENTS[forward]
    if name == "pow" and _has_negative(inputs) and any(given.nan for given in outputs):
        return _OF_NEGATIVE_BASE
    advice = (rule.advice for rule in _OF_RESULTS if name in rule.ops and rule.applies(inputs))
    return next(advice, UNKNOWN)


def _bare(op: str) -> str:
    return op.rpartition(".")[2].rstrip("_")
