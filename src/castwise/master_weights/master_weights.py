"""`MasterWeights`: an optimizer around another one, which steps fp32 weights while the model has 16-bit ones.

`step` goes over the parameters bucket by bucket: decode fp32 weights, lend them with fp32 gradients to the inner
optimizer, step, encode them again. `codecs` has the number formats, `buckets` the stretches of memory, `lending` what
the inner optimizer sees meanwhile, `narrowing` which parameters become 16-bit, `checkpoint_entries` what is saved.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from castwise._suggestions import listed, nearest
from castwise._torch_private import is_fsdp_flattened, never_traced
from castwise._warnings import warn
from castwise.amp.closures import given, no_momentum_of_a_skipped_step
from castwise.amp.iteration import Snapshot
from castwise.amp.measure import check_bound, check_norm_type, reciprocal
from castwise.master_weights import narrowing
from castwise.master_weights.buckets import (
    Bucket,
    Desk,
    Layout,
    Loan,
    Stretch,
    Weight,
    Workspace,
    as_dtensor,
    fill,
    flat,
    is_dtensor,
    local,
    write_count,
)
from castwise.master_weights.checkpoint_entries import (
    PREFIX,
    check_entries,
    entries_of,
    load_entries,
    load_inner,
    separated,
)
from castwise.master_weights.codecs import Chance, codec_of
from castwise.master_weights.inner_optimizers import (
    Reach,
    check,
    note_stepped,
    reach_of,
    state_names,
    step_without_hooks,
)
from castwise.master_weights.lending import LowState, lent, loans_of

_METHODS = ("split", "fp32", "stochastic", "kahan")
_ROUNDINGS = ("nearest_even", "nearest_away")
_DTYPES = (torch.bfloat16, torch.float16)
_STATE = {
    *("defaults", "_inner", "_dtype", "_method", "_rounding", "_grad_dtype", "_compiles", "_bucket_length", "_chance"),
    *("_low_state", "_reach", "_weights", "_buckets"),
}
_OWNERS = WeakTensorKeyDictionary()  # parameters that have a MasterWeights


@dataclass(slots=True)
class _Round:
    """One call of the inner optimizer."""

    buckets: list[Bucket]
    """Whose weights are lent."""
    members: dict[int, list[Stretch | torch.Tensor]]
    """By index of the group which parameters take part: stretches of 16-bit ones, and others as they are."""


class MasterWeights(torch.optim.Optimizer):
    """Train 16-bit weights with any optimizer as if they were fp32: the bits that rounding takes away are kept.

    A bfloat16 weight and 16 more bits beside it are an fp32 weight. `step` puts them together, a few megabytes at a
    time, lets the optimizer step them with fp32 gradients and fp32 state, and takes them apart again. Weights take 4
    bytes instead of 4 + 2 for autocast's copies, gradients 2 instead of 4. By default the parameters that autocast
    casts become 16-bit; then training under autocast gives the losses and weights that fp32 weights give, bit for bit.

    It is the optimizer to use from then on: give it to schedulers, scalers and frameworks. `param_groups` and `state`
    are those of the inner optimizer. Make it after the model is on its device and before DDP or a scheduler; run the
    model under autocast, also to evaluate it. `model.to(dtype)` afterwards is an error at the next step.

    Args:
        optimizer: The inner optimizer. Its own `step` raises a RuntimeError from now on.
        model: Whose parameters it has; in fp32, or in `dtype` already.
        dtype: Of the narrowed weights: bfloat16 or float16.
        method: "split" keeps all bits; "fp32" an fp32 copy, which is what "split" is compared with; "kahan" a 16-bit
            compensation, 8 more bits; "stochastic" nothing, and rounds by chance.
        rounding: Of "split" with bfloat16: "nearest_even" makes weights what `.bfloat16()` makes of the fp32 ones;
            "nearest_away" rounds ties away from zero.
        state_dtype: In what state is stored, by its name in the optimizer, as {"exp_avg": torch.bfloat16}; fp32
            by default. It is computed in fp32 and rounded by chance, or, as {"exp_avg": (torch.bfloat16, "nearest")},
            to nearest, which loses small changes of slow averages.
        narrow: Which parameters become 16-bit. By default weights and biases of linear and convolution layers that no
            other module has; given a bound policy, those of them that it has compute in `dtype`; "all" are all.
        grad_dtype: In what gradients accumulate: "param", the dtype of the weights, or torch.float32 (torch >= 2.13,
            and not with DDP and FSDP, whose reducers know one dtype for both).
        bucket_bytes: Of fp32 weights stepped at once. Smaller buckets stay in cache, larger ones have less overhead.
        compile: Compile decoding, encoding and rounding by chance; the results have the same bits. On CPUs it is worth
            it for what is rounded by chance.
        generator: Seeds what is rounded by chance, by its `initial_seed()`; 0 by default. All ranks need the same.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, or cannot be wrapped (LBFGS, SparseAdam); or `narrow` or
            `grad_dtype` is none of those above.
        ValueError: An argument is out of its range; a parameter is in another `MasterWeights`, or cannot become
            16-bit where it is (below DDP or FSDP1; in an FSDP2 unit that would have two dtypes); a weight is too large
            for float16; or `state_dtype` names state that the optimizer does not keep. Nothing has been changed then.

    Example:
        >>> import castwise
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = MasterWeights(torch.optim.AdamW(model.parameters()), model)
        >>> with castwise.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> loss.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, optimizer.fp32_state_dict(model)["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    _step_supports_amp_scaling = True  # scalers leave gradients to `step`, which unscales them in fp32
    _steps_in_fp32 = True  # castwise's scaler measures them in fp32, and says what to multiply them by

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.bfloat16,
        method: str = "split",
        rounding: str = "nearest_even",
        state_dtype: Mapping[str, torch.dtype | tuple[torch.dtype, str]] | None = None,
        narrow: object = None,
        grad_dtype: str | torch.dtype = "param",
        bucket_bytes: int = 4 << 20,
        compile: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(optimizer, MasterWeights):
            raise TypeError("MasterWeights cannot wrap a MasterWeights: give it the optimizer that is inside")
        check(optimizer)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        _check_choice("dtype", dtype, _DTYPES)
        _check_choice("method", method, _METHODS)
        _check_choice("rounding", rounding, _ROUNDINGS)
        _check_choice("grad_dtype", grad_dtype, ("param", torch.float32))
        if grad_dtype is torch.float32 and not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(f"grad_dtype=torch.float32 needs torch >= 2.13, this is {torch.__version__}")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 4096:
            raise ValueError(f"bucket_bytes must be a whole number >= 4096, got {bucket_bytes!r}")
        if not isinstance(compile, bool):
            raise TypeError(f"compile must be True or False, got {compile!r}")
        if not isinstance(generator, (torch.Generator, type(None))):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self._dtype, self._method, self._rounding = dtype, method, rounding
        self._narrow, self._grad_dtype, self._compiles = narrow, grad_dtype, compile
        self._bucket_length = bucket_bytes // 4096 * 1024
        self._chance = Chance(0 if generator is None else generator.initial_seed(), compiled=compile)
        self._low_state = _low_state(optimizer, state_dtype, self._chance)
        self._model: ref[nn.Module] | None = ref(model)
        self._reach = reach_of(optimizer)
        self._weights: list[Weight] = []
        self._buckets: list[Bucket] = []
        self._workspace = Workspace(0)
        self._known_rounds: tuple[list[list[int]], list[_Round]] | None = None
        self._clipped: tuple[Snapshot, torch.Tensor] | None = None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        chosen = self._check_params(optimizer, model, params)
        self._inner = optimizer
        self.__setstate__({"defaults": optimizer.defaults})
        self._share_hooks()
        self._adopt(model, params, chosen)

    def _share_hooks(self) -> None:
        """Run hooks of the inner optimizer once a step, and let no other code step it."""
        if _refuse_alone not in self._inner._optimizer_step_pre_hooks.values():
            self._inner.register_step_pre_hook(_refuse_alone)
        self._optimizer_step_pre_hooks = self._inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self._inner._optimizer_step_post_hooks

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer, with the model's parameters."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of the inner optimizer, by parameter of the model."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._inner.state = state

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that steps the fp32 weights."""
        return self._inner

    def _check_params(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, params: list[torch.Tensor]
    ) -> set[torch.Tensor]:
        """Return the parameters that are to be 16-bit, or raise with nothing changed."""
        names = narrowing.names_of(model)
        chosen = narrowing.choose(model, self._narrow, self._dtype, params)
        low = [param for param in params if param in chosen or param.dtype is self._dtype]
        other = torch.float16 if self._dtype is torch.bfloat16 else torch.bfloat16
        for param in params:
            name = names.get(param, "a parameter that the model does not have")
            if param.dtype is other and self._narrow is None:
                raise ValueError(f"{name!r} is {other} already: say dtype={other}, or make the model fp32 first")
            if any(str(key).startswith(PREFIX) for key in optimizer.state.get(param, ())):
                raise ValueError(
                    f"the optimizer has state of a MasterWeights for {name!r}: load the checkpoint into it"
                )
        for param in low:
            name = names.get(param, "a parameter that the model does not have")
            if _owner_of(param) not in (None, self):
                raise ValueError(f"{name!r} is in another MasterWeights already: a parameter can be in one")
            if is_fsdp_flattened(param) and self._reach is not Reach.ELEMENT:
                raise ValueError(
                    f"{name!r} is flattened by FSDP1, which only optimizers that step each element by itself can take: "
                    "use FSDP2 (fully_shard)"
                )
            if self._grad_dtype is torch.float32 and is_dtensor(param):
                raise ValueError(
                    f"{name!r} is a DTensor, whose gradients torch keeps in its own dtype: leave grad_dtype out, and "
                    "reduce in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
            if self._grad_dtype is torch.float32 and param.grad is not None:
                raise ValueError(f"{name!r} has a gradient, whose dtype would change: call zero_grad() before")
            here = local(param)
            if not (here.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(here)):
                raise ValueError(f"{name!r} has strides {param.stride()}: only dense parameters can be 16-bit")
            if self._dtype is torch.float16 and param.dtype is not torch.float16:
                largest = float(local(param).abs().amax()) if local(param).numel() else 0.0
                if 65504.0 < largest < float("inf"):
                    raise ValueError(
                        f"{name!r} has a weight of magnitude {largest:.6g}, and float16 ends at 65504: use bfloat16"
                    )
        narrowing.check_is_possible(model, set(low), self._dtype)
        return set(low)

    def _adopt(self, model: nn.Module, params: Iterable[torch.Tensor], chosen: set[torch.Tensor]) -> None:
        """Make parameters 16-bit and keep what they lose."""
        names = narrowing.names_of(model)
        fp32 = {param: flat(local(param)).clone() for param in chosen if param.dtype is torch.float32}
        narrowing.narrow_(model, chosen, self._dtype)
        new = [
            Weight(param, names.get(param, f"parameter {index}"), Layout.of(param))
            for index, param in enumerate(params)
            if param in chosen
        ]
        for bucket in (added := fill(new, self._bucket_length, cuts=self._reach is Reach.ELEMENT)):
            bucket.codec = codec_of(
                self._method,
                self._rounding,
                self._dtype,
                bucket.length,
                bucket.device,
                compiled=self._compiles,
                chance=self._chance,
                stream=f"weights {len(self._buckets)}",
            )
            self._buckets.append(bucket)
        self._workspace = Workspace(max((bucket.length for bucket in self._buckets), default=0))
        self._known_rounds = None
        with torch.no_grad():
            for bucket in added:
                desk = self._workspace.desk(bucket)
                desk.values.zero_()
                for stretch in bucket.stretches:
                    param = stretch.weight.param
                    stretch.in_bucket(desk.values).copy_(stretch.of(fp32[param] if param in fp32 else local(param)))
                bucket.encode(desk, bucket.stretches)
        for weight in new:
            weight.bits = weight.digest()
            _OWNERS[weight.param] = ref(self)
            if self._grad_dtype is torch.float32:
                weight.param.grad_dtype = torch.float32
            of_param = self.state.get(weight.param, {})
            of_param.update(self._low_state.stored(of_param, weight.param))
        self._weights += new
        if not self._weights:
            warn(
                "MasterWeights has nothing to do: the optimizer has no weight of a linear or convolution layer of this "
                'model; narrow="all" takes others as well',
                UserWarning,
                3,
            )

    @staticmethod
    def narrow_(model: nn.Module, dtype: torch.dtype = torch.bfloat16, narrow: object = None) -> None:
        """Make the weights 16-bit that a `MasterWeights` would, before DDP or FSDP1 wraps the model.

        What fp32 weights lose by it is lost. Lightning wraps a model before it asks for optimizers: call this in
        `configure_model`.

        Args:
            model: Is changed in place.
            dtype: bfloat16 or float16.
            narrow: As in the constructor.

        Raises:
            TypeError: `narrow` is none of its values.
            ValueError: `dtype` is another, or the model is wrapped already.
        """
        _check_choice("dtype", dtype, _DTYPES)
        chosen = narrowing.choose(model, narrow, dtype, model.parameters())
        narrowing.check_is_possible(model, chosen, dtype)
        narrowing.narrow_(model, chosen, dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its parameters become 16-bit as those before.

        Args:
            param_group: "params", tensors or pairs of name and tensor; and options for them.

        Raises:
            RuntimeError: The model is gone.
            ValueError: As in the constructor, or as the inner optimizer does. Nothing has been changed then.
        """
        model = None if self._model is None else self._model()
        if model is None:
            raise RuntimeError("the model is gone, whose parameters these would be")
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'a group is a dict with "params", got {param_group!r}')
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else [*params]
        tensors = [param[1] if isinstance(param, tuple) else param for param in params]
        chosen = self._check_params(self._inner, model, [each for each in tensors if isinstance(each, torch.Tensor)])
        self._inner.add_param_group({**param_group, "params": params})
        self._adopt(model, tensors, chosen)

    # -- the step -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip all gradients together in the next `step`, in fp32; instead of `torch.nn.utils.clip_grad_norm_`.

        That one would round norms and clipped gradients to 16 bits. Here `.grad` stay as they are. With a scaler, call
        the scaler's.

        Args:
            max_norm: The largest norm they may have, >= 0.
            norm_type: p of the p-norm, > 0, or inf.
            error_if_nonfinite: Raise if the norm is not finite, which syncs.

        Returns:
            The p-norm before clipping: fp32, shape (), as `torch.nn.utils.clip_grad_norm_` has it of fp32 gradients.

        Raises:
            RuntimeError: The norm is not finite, and `error_if_nonfinite` is set; or the model is in FSDP1.
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range.
        """
        max_norm, norm_type = check_bound("max_norm", max_norm), check_norm_type(norm_type)
        if any(is_fsdp_flattened(weight.param) for weight in self._weights):
            raise RuntimeError("FSDP1 has a part of the gradients on each rank: call the model's clip_grad_norm_")
        grads = _grads(self.param_groups)
        if not grads:
            return torch.zeros(())
        with torch.no_grad():
            norms: list[Any] = list(torch._foreach_norm(grads, norm_type, dtype=torch.float32))
            norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
            stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
            norm: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
            if error_if_nonfinite and not norm.isfinite():
                raise RuntimeError(
                    f"the norm of order {norm_type} of the gradients is {norm.item()}: they are not clipped"
                )
            self._clipped = Snapshot(grads), (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        return norm

    def _factor(self, scale: torch.Tensor | None, *, is_fused: bool) -> torch.Tensor | None:
        """Return what gradients are to be multiplied by, to unscale or to clip them; None if by nothing."""
        clipped, self._clipped = self._clipped, None
        if scale is not None:  # a fused optimizer divides by it, which clips as well if the scaler was asked to
            factor: torch.Tensor | None = None if is_fused else getattr(self, "grad_factor", None)
            return factor if is_fused or factor is not None else reciprocal(scale)
        if clipped is None:
            return None
        snapshot, factor = clipped
        written, _ = snapshot.changed(grads := _grads(self.param_groups))
        if written:
            raise RuntimeError("a backward has added to gradients after clip_grad_norm_(): clip once, before step()")
        return factor if snapshot.matches(grads) else None

    @never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the fp32 weights, and write what they round to.

        With a `grad_scale` on the optimizer, as scalers set it, gradients are divided by it in fp32 first; with a
        `found_inf` that is not 0 nothing is changed. On an accelerator that syncs unless the inner optimizer is fused.

        Args:
            closure: Computes gradients and returns the loss; it is called once, before anything is stepped, as all of
                torch's optimizers do that can be wrapped.

        Returns:
            What the closure returned, or else the inner optimizer.

        Raises:
            TypeError: There is a closure and the inner optimizer may call it as it likes, or a sparse gradient of a
                16-bit parameter.
            RuntimeError: A parameter has another dtype, device or shape than before; or a backward has added to
                gradients that were clipped. Nothing has been changed then.

        Warns:
            UserWarning: A weight was written from outside since the last step; it is taken as it is. Writes that torch
                does not count, as through `.data`, are found on a CPU, and the warning comes after the step.
        """
        loss = None
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function, got {type(closure).__name__}")
        if closure is not None:
            if self._reach is Reach.ALL:
                raise TypeError(
                    f"MasterWeights takes no closure for {type(self._inner).__name__}, which may call it while weights "
                    "are lent: compute the gradients first, and step without it"
                )
            with torch.enable_grad():
                loss = closure()
        rounds = self._checked_rounds()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None and self._clipped is not None:
            raise RuntimeError(
                "the gradients are scaled, and were clipped as if they were not: instead of the optimizer's, call "
                "scaler.clip_grad_norm_(optimizer, ...)"
            )
        is_fused = bool(getattr(self._inner, "_step_supports_amp_scaling", False))
        if found_inf is not None and (found_inf.is_cpu or not is_fused) and found_inf.item():
            return loss
        factor, returned = self._factor(scale, is_fused=is_fused), None
        # Each part of a parameter that is cut makes state of its own in the first step.
        new = {weight.param for weight in self._weights if weight.is_cut() and not self.state.get(weight.param)}
        written: list[Weight] = []
        try:
            with torch.no_grad(), ExitStack() as stack:
                if is_fused:
                    stack.enter_context(given(self._inner, grad_scale=scale, found_inf=found_inf))
                    if found_inf is not None and not found_inf.is_cpu and isinstance(self._inner, torch.optim.SGD):
                        stack.enter_context(no_momentum_of_a_skipped_step(self._inner, found_inf))
                for round_ in rounds:
                    returned = self._step_round(round_, factor, new, written, writes_grads=scale is not None)
        except BaseException:
            for param in new:  # not all parts may have made theirs
                self.state.pop(param, None)
            raise
        note_stepped(self._inner)
        self._chance.count(found_inf)
        self._warn_of(written)
        return returned if closure is None else loss

    def _rounds(self) -> list[_Round]:
        """Return the calls of the inner optimizer that are a step; raise a RuntimeError if a weight is in no group."""
        ids = [[id(param) for param in group["params"]] for group in self.param_groups]
        if self._known_rounds is not None and self._known_rounds[0] == ids:
            return self._known_rounds[1]
        group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for weight in self._weights:
            if weight.param not in group_of:
                raise RuntimeError(f"{weight.name!r} is in no group any more: make a new MasterWeights without it")
        if self._reach is Reach.ALL:
            rounds = [self._whole()]
        else:
            rounds = []
            for bucket in self._buckets:
                rounds.append(_Round([bucket], {}))
                for stretch in bucket.stretches:
                    rounds[-1].members.setdefault(group_of[stretch.weight.param], []).append(stretch)
            low = {weight.param for weight in self._weights}
            kept: dict[int, list[Stretch | torch.Tensor]] = {}
            for param, index in group_of.items():
                if param not in low:
                    kept.setdefault(index, []).append(param)
            if kept:
                rounds.append(_Round([], kept))
        self._known_rounds = ids, rounds
        return rounds

    def _whole(self) -> _Round:
        """Return one call with all that there is, for an optimizer that takes no parts."""
        of_param = {weight.param: weight.stretches[0] for weight in self._weights}
        members: dict[int, list[Stretch | torch.Tensor]] = {
            index: [of_param.get(param, param) for param in group["params"]]
            for index, group in enumerate(self.param_groups)
        }
        return _Round(self._buckets, members)

    def _step_round(
        self,
        round_: _Round,
        factor: torch.Tensor | None,
        new: set[torch.Tensor],
        written: list[Weight],
        *,
        writes_grads: bool,
    ) -> Any:
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._lent(round_, new, written) as loans:
            groups = self._inner.param_groups
            if not loans and self._reach is not Reach.ALL and not _grads(groups):
                return None
            if factor is not None:
                _multiply(_grads(groups), factor)
            returned = step_without_hooks(self._inner)
            if writes_grads:
                pairs = [(loan.grad, loan.stand_in.grad) for loan in loans]
                copied = [(to, local(grad)) for to, grad in pairs if to is not None and grad is not None]
        copied = [(to, grad) for to, grad in copied if to.dtype is not grad.dtype]
        if copied:
            torch._foreach_copy_([to for to, _ in copied], [grad for _, grad in copied])
        return returned

    @contextmanager
    def _lent(
        self, round_: _Round, new: set[torch.Tensor], written: list[Weight], *, all_: bool = False
    ) -> Iterator[list[Loan]]:
        """Let the inner optimizer have fp32 weights in the body; write what they round to when it ends well.

        Args:
            round_: What is lent.
            new: Parameters without state before this step.
            written: Is added to: weights that were found to be written unnoticed.
            all_: Whether weights without gradients are lent as well.
        """
        all_ = all_ or self._reach is Reach.ALL  # such optimizers may count parameters by their places
        desks, found, loans = dict[Bucket, Desk](), dict[Bucket, list[Stretch]](), dict[Stretch, Loan]()
        for bucket in round_.buckets:
            if all_ or bucket.has_grads():
                # An unknown optimizer may keep what it is lent, or assign to its `.data`: it gets new tensors.
                desk = Desk(bucket, Workspace(bucket.length)) if all_ else self._workspace.desk(bucket)
                desks[bucket], found[bucket] = desk, bucket.decode(desk)
                loans.update((loan.stretch, loan) for loan in loans_of(desk, all_=all_))
        members: dict[int, list[Loan | torch.Tensor]] = {
            index: [
                loans[each] if isinstance(each, Stretch) else each
                for each in of_group
                if not isinstance(each, Stretch) or each in loans
            ]
            for index, of_group in round_.members.items()
        }
        with lent(self._inner, members, self._low_state, new, all_=all_):
            yield [*loans.values()]
        if all_ and any(write_count(each.weight.param) != each.weight.version for each in loans):
            raise RuntimeError(
                f"{type(self._inner).__name__} has written to parameters from a list of its own, not from its groups: "
                "MasterWeights cannot wrap it"
            )
        for bucket, desk in desks.items():
            changed = found[bucket]
            if all_:
                desk.take_values_back()
            bucket.encode(desk, [each for each in bucket.stretches if each in loans or each in changed])
            written += [stretch.weight for stretch in changed]

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of an inner optimizer that has them (schedule-free ones), which change the weights."""
        inner = self.__dict__.get("_inner")
        if name not in ("train", "eval") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._switch, getattr(inner, name))

    def _switch(self, method: Callable[[], object]) -> None:
        self._checked_rounds()
        written: list[Weight] = []
        with torch.no_grad(), self._lent(self._whole(), set(), written, all_=True):
            method()
        self._warn_of(written)

    def _checked_rounds(self) -> list[_Round]:
        """Return the calls that are a step; raise if weights are not what they were made.

        Weights that were written from outside, as far as torch counts writes, are taken over.
        """
        rounds = self._rounds()
        for weight in self._weights:
            if (now := Layout.of(weight.param)) != (was := weight.layout):
                raise RuntimeError(
                    f"{weight.name!r} was {was.dtype} of shape {tuple(was.shape)}, strides {was.stride}, on "
                    f"{was.device}, and is {now.dtype} of shape {tuple(now.shape)}, strides {now.stride}, "
                    f"on {now.device} now: make a new MasterWeights after changing a model"
                )
            grad = weight.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(f"{weight.name!r} has a gradient of layout {grad.layout}: keep its weight in fp32")
        self._warn_of(self._take_over_counted())
        return rounds

    def _take_over_counted(self) -> list[Weight]:
        """Have weights of which torch has counted writes as the new fp32 weights, and return them."""
        written: list[Weight] = []
        if self._method == "stochastic":  # nothing is kept that could belong to other weights
            return written
        for weight in self._weights:
            if (count := write_count(weight.param)) == weight.version:
                continue
            for stretch in weight.stretches:
                stretch.bucket.sum = None
            if weight.expects_these():
                weight.version, weight.awaits_weights = count, False
            else:
                written.append(weight)
        if written:
            self._set_values({weight: local(weight.param).float() for weight in written})
        return written

    def _take_over_written(self) -> None:
        """Have all weights that were written from outside as the new fp32 weights."""
        written = self._take_over_counted()
        with torch.no_grad():
            for bucket in (each for each in self._buckets if each.sum is not None):
                desk = self._workspace.desk(bucket)
                if changed := bucket.decode(desk):
                    bucket.encode(desk, changed)
                    written += [stretch.weight for stretch in changed]
        self._warn_of(written)

    def _warn_of(self, written: list[Weight]) -> None:
        if not written:
            return
        names = [repr(weight.name) for weight in dict.fromkeys(written)]
        warn(
            f"{len(names)} weights were written since the last step of MasterWeights, {', '.join(names[:3])} among "
            "them: they are taken as they are, in 16 bits. To load fp32 weights, use load_fp32_state_dict. If ranks "
            "started from different weights, seed them alike",
            UserWarning,
            3,
        )

    def _set_values(self, values: Mapping[Weight, torch.Tensor]) -> None:
        """Set fp32 weights, laid out as the parameters are in memory."""
        with torch.no_grad():
            for bucket in self._buckets:
                given_here = [stretch for stretch in bucket.stretches if stretch.weight in values]
                if given_here:
                    bucket.sum = None
                    desk = self._workspace.desk(bucket)
                    bucket.decode(desk)
                    for stretch in given_here:
                        stretch.in_bucket(desk.values).copy_(stretch.of(values[stretch.weight]))
                    bucket.encode(desk, given_here)

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's `state_dict()`, with what makes 16-bit weights fp32 ones in the state of each.

        Returns:
            "state" and "param_groups". Beside its fp32 (or `state_dtype`) state each 16-bit parameter has, in its own
            shape, "master_weights.residue" (int16; "half_residue" with float16) and "master_weights.ties" (bool),
            "master_weights.compensation" (of its dtype) or "master_weights.master" (fp32), by method; a
            "master_weights.digest" of the weight they belong to, -1 for a DTensor; and "master_weights.seed" and
            "master_weights.steps" if anything is rounded by chance. These are copies.
        """
        self._take_over_written()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = self._inner.state_dict()
        numbers = self._numbers()
        saved["state"] = dict(saved["state"])
        for weight in self._weights:
            number = numbers[weight.param]
            saved["state"][number] = {**saved["state"].get(number, {}), **entries_of(weight, self._saved_chance())}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, saved)
            saved = saved if result is None else result
        return saved

    def _numbers(self, saved_groups: list[dict[str, Any]] | None = None) -> dict[torch.Tensor, Any]:
        """Return what stands for each parameter in a `state_dict()`: its number, or what saved groups have for it."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_groups is None:
            numbers: Iterable[Any] = range(sum(sizes))
        elif (saved := [len(group["params"]) for group in saved_groups]) != sizes:
            raise ValueError(f"the checkpoint has groups of {saved} parameters, and this optimizer of {sizes}")
        else:
            numbers = [number for group in saved_groups for number in group["params"]]
        return dict(zip((param for group in self.param_groups for param in group["params"]), numbers, strict=True))

    def _saved_chance(self) -> Chance | None:
        """Return where random bits come from, if anything is rounded by chance."""
        return self._chance if self._method == "stochastic" or self._low_state.dtypes else None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict()`, of a `MasterWeights` or of the inner optimizer alone, in any dtype.

        The groups stay the same objects. The model may be loaded before or after. Without entries of `MasterWeights`,
        as after training in plain fp32 or bfloat16, the fp32 weights stay as they are.

        Args:
            state_dict: "state" and "param_groups".

        Raises:
            ValueError: Groups or shapes are others, or the entries are those of another method, rounding or dtype.
                Nothing has been changed then.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError('a state_dict of an optimizer has "state" and "param_groups"')
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else dict(result)
        ours, of_inner = separated(state_dict["state"])
        numbers = self._numbers(state_dict["param_groups"])
        low = {numbers[weight.param] for weight in self._weights}
        if stray := [number for number in ours if number not in low]:
            raise ValueError(
                f"the checkpoint has bits of a 16-bit weight for parameter {stray[0]!r}, which is fp32 here: use the "
                "narrow=... it was saved with"
            )
        settings = f"method={self._method!r} with {self._dtype} and rounding={self._rounding!r}"
        for weight in self._weights:
            if entries := ours.get(numbers[weight.param]):
                check_entries(weight, entries, settings)
        low_params = {weight.param for weight in self._weights}
        load_inner(self._inner, {**state_dict, "state": of_inner}, low_params, self._low_state)
        for weight in self._weights:
            if entries := ours.get(numbers[weight.param]):
                load_entries(weight, entries, self._saved_chance())
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return `model.state_dict()` with the fp32 weights: an ordinary checkpoint of an fp32 model.

        Args:
            model: The model, or a wrapper of it.

        Raises:
            RuntimeError: The model's checkpoint does not have the parameters as they are (FSDP1).
            ValueError: It is another model: it has none of the 16-bit weights.
        """
        self._take_over_written()
        saved, named = model.state_dict(), self._named(model)
        fp32 = self._fp32_of(set(named.values()))
        for name, weight in named.items():
            if name not in saved:
                raise RuntimeError(f"{name!r} is not in the model's state_dict(), which therefore cannot be in fp32")
            saved[name] = fp32[weight]
        return saved

    def load_fp32_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load an ordinary checkpoint into the model, and the bits that its 16-bit weights cannot hold beside them.

        Args:
            model: The model, or a wrapper of it.
            state_dict: Of a model of the same architecture, in any floating dtype.
            strict: As in `model.load_state_dict`, whose result is returned.

        Raises:
            ValueError: A 16-bit weight has another shape there. Nothing has been changed then.
            RuntimeError: As `model.load_state_dict` does.
        """
        named = self._named(model)
        for name, weight in named.items():
            if name in state_dict and state_dict[name].shape != weight.layout.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(state_dict[name].shape)} in the checkpoint, and the parameter has "
                    f"{tuple(weight.layout.shape)}"
                )
        result = model.load_state_dict(state_dict, strict=strict)
        owners = {_owner_of(param) for param in model.parameters()}  # other parameters may have another MasterWeights
        for owner in (each for each in owners if isinstance(each, MasterWeights)):
            owner._set_values(
                {
                    weight: torch.empty_like(local(weight.param), dtype=torch.float32).copy_(local(state_dict[name]))
                    for name, weight in owner._named(model).items()
                    if name in state_dict
                }
            )
        return result

    def _named(self, model: nn.Module) -> dict[str, Weight]:
        of_param = {weight.param: weight for weight in self._weights}
        named = model.named_parameters(remove_duplicate=False)
        found = {name: of_param[param] for name, param in named if param in of_param}
        if self._weights and not found:
            raise ValueError("the model has none of the weights of this MasterWeights: give it the one it was made for")
        return found

    def _fp32_of(self, weights: set[Weight]) -> dict[Weight, torch.Tensor]:
        """Return fp32 weights, in tensors of their own."""
        values = {weight: torch.empty_like(local(weight.param), dtype=torch.float32) for weight in weights}
        with torch.no_grad():
            for bucket in self._buckets:
                if any(stretch.weight in values for stretch in bucket.stretches):
                    desk = self._workspace.desk(bucket)
                    bucket.decode(desk)
                    for stretch in bucket.stretches:
                        if stretch.weight in values:
                            stretch.of(values[stretch.weight]).copy_(stretch.in_bucket(desk.values))
        return {weight: as_dtensor(value, weight.param) for weight, value in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        self._take_over_written()
        # Hooks, what schedulers have put on the optimizer, and the model stay here, as with torch's optimizers.
        state = {name: value for name, value in self.__dict__.items() if name in _STATE}
        made = {"_workspace": Workspace(self._workspace.length), "_known_rounds": None}
        return {**state, **made, "_model": None, "_narrow": None, "_clipped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_weights" in state:
            self._share_hooks()
        for weight in self.__dict__.get("_weights", []):
            weight.version = write_count(weight.param)
            _OWNERS[weight.param] = ref(self)

    # -- facts --------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return how many bytes the 16-bit parameters take now.

        Returns:
            "parameters" (how many there are, not bytes), and in bytes "weights", "kept" (what makes them fp32),
            "gradients" and "state"; on this rank.
        """
        low = [weight.param for weight in self._weights]
        tensors = [value for param in low for value in self.state.get(param, {}).values() if torch.is_tensor(value)]
        return {
            "parameters": sum(local(param).numel() for param in low),
            "weights": sum(local(param).nbytes for param in low),
            "kept": sum(bucket.codec.bytes() for bucket in self._buckets),
            "gradients": sum(local(param.grad).nbytes for param in low if param.grad is not None),
            "state": sum(local(tensor).nbytes for tensor in tensors),
        }

    def __repr__(self) -> str:
        rounding = f", rounding={self._rounding!r}" if self._method == "split" and self._dtype is torch.bfloat16 else ""
        return f"MasterWeights({self._inner!r}, dtype={self._dtype}, method={self._method!r}{rounding})"


def _refuse_alone(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise if an inner optimizer is stepped by itself: it would step the 16-bit weights, and not the fp32 ones.

    While a `MasterWeights` steps it, its groups hold fp32 tensors instead.
    """
    params = [] if isinstance(optimizer, MasterWeights) else [p for g in optimizer.param_groups for p in g["params"]]
    if any(_owner_of(param) is not None for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is inside a MasterWeights, which holds the fp32 weights: call step() of "
            "the MasterWeights, and give that one to schedulers, scalers and frameworks"
        )


def _owner_of(param: torch.Tensor) -> object:
    return _OWNERS[param]() if param in _OWNERS else None


def _grads(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [param.grad for group in groups for param in group["params"] if param.grad is not None]


def _multiply(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    by_device = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    for device, here in by_device.items():
        torch._foreach_mul_(here, factor.to(device))


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        hint = nearest(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def _low_state(
    optimizer: torch.optim.Optimizer,
    state_dtype: Mapping[str, torch.dtype | tuple[torch.dtype, str]] | None,
    chance: Chance,
) -> LowState:
    if not isinstance(state_dtype, (Mapping, type(None))):
        raise TypeError(f"state_dtype must be a dict of names and dtypes, got {state_dtype!r}")
    settings = {
        name: wanted if isinstance(wanted, tuple) and len(wanted) == 2 else (wanted, "stochastic")
        for name, wanted in (state_dtype or {}).items()
    }
    for name, (dtype, rounding) in settings.items():
        _check_choice(f"the rounding of state_dtype[{name!r}]", rounding, ("stochastic", "nearest"))
        if dtype not in (*_DTYPES, torch.float32):
            raise ValueError(
                f"state_dtype[{name!r}] must be one of {', '.join(map(repr, (*_DTYPES, torch.float32)))}, got {dtype!r}"
            )
    known = state_names(optimizer) if settings else None
    unknown = [] if known is None else [name for name in settings if name not in known]
    if known is not None and unknown:
        raise ValueError(
            f"{type(optimizer).__name__} keeps no state {unknown[0]!r} of the shape of its weights; "
            f"it keeps {listed(sorted(known)) or 'none'}"
        )
    nearest = {name for name, (_, rounding) in settings.items() if rounding == "nearest"}
    return LowState({name: dtype for name, (dtype, _) in settings.items()}, nearest, chance.round)
