"""`MasterWeights`: an optimizer around another one, which steps fp32 weights while the model has 16-bit ones.

`step` goes over the parameters bucket by bucket: decode fp32 weights, lend them with fp32 gradients to the inner
optimizer, step, encode them again. `codecs` has the number formats, `buckets` the stretches of memory, `lending` what
the inner optimizer sees meanwhile, `narrowing` which parameters become 16-bit.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    Stretch,
    Weight,
    Workspace,
    fill,
    flat,
    laid_out_as,
    local,
    write_count,
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
from castwise.master_weights.lending import Loan, LowState, as_dtensor, lent, loans_of

_METHODS = ("split", "fp32", "stochastic", "kahan")
_ROUNDINGS = ("nearest_even", "nearest_away")
_DTYPES = (torch.bfloat16, torch.float16)
_STATE = {
    *("defaults", "_inner", "_dtype", "_method", "_rounding", "_grad_dtype", "_compiles", "_bucket_length", "_chance"),
    *("_low_state", "_reach", "_weights", "_buckets"),
}
_NO_DIGEST = -1
_PREFIX = "master_weights."  # of entries in a checkpoint of the optimizer

_OWNERS = WeakTensorKeyDictionary()  # parameters that have a MasterWeights


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
        optimizer: The inner optimizer. It must not be stepped by itself any more.
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
        compile: Compile decoding, encoding and rounding by chance; the results have the same bits.
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
        self._workspace = Workspace()
        self._clipped: tuple[Snapshot, torch.Tensor] | None = None
        self._new: set[torch.Tensor] = set()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        chosen = self._check_params(optimizer, model, params)
        self._inner = optimizer
        self.__setstate__({"defaults": optimizer.defaults})
        # A hook that was registered on the inner optimizer runs once a step as well.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._adopt(model, params, chosen)

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
            if any(str(key).startswith(_PREFIX) for key in optimizer.state.get(param, ())):
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
            if self._grad_dtype is torch.float32 and hasattr(param, "to_local"):
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
            Weight(param, names.get(param, f"parameter {index}"), param.shape, stride=local(param).stride())
            for index, param in enumerate(params)
            if param in chosen
        ]
        buckets = fill(new, self._bucket_length, self._dtype, cuts=self._reach is Reach.ELEMENT)
        with torch.no_grad():
            for bucket in buckets:
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
                values = torch.zeros(bucket.length, dtype=torch.float32, device=bucket.device)
                for stretch in bucket.stretches:
                    param = stretch.weight.param
                    whole = fp32[param] if param in fp32 else flat(local(param))
                    stretch.in_bucket(values).copy_(whole[stretch.start : stretch.start + stretch.length])
                bucket.encode(values, bucket.stretches, self._workspace)
        for weight in new:
            weight.note_written()
            weight.bits = weight.digest()
            _OWNERS[weight.param] = ref(self)
            if self._grad_dtype is torch.float32:
                weight.param.grad_dtype = torch.float32
            of_param = self.state.get(weight.param, {})
            of_param.update({name: self._as_stored(name, value, weight.param) for name, value in of_param.items()})
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

    def _stored_as(self, name: object) -> torch.dtype:
        return torch.float32 if self._low_state is None else self._low_state.dtypes.get(str(name), torch.float32)

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

    def _clip_factor(self) -> torch.Tensor | None:
        """Return what `clip_grad_norm_` has found gradients are to be multiplied by, if they are still these."""
        if self._clipped is None:
            return None
        (snapshot, factor), self._clipped = self._clipped, None
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
            UserWarning: A weight was written from outside since the last step; it is taken as it is.
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
        self._check_weights()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None and self._clipped is not None:
            raise RuntimeError(
                "the gradients are scaled, and were clipped as if they were not: instead of the optimizer's, call "
                "scaler.clip_grad_norm_(optimizer, ...)"
            )
        is_fused = bool(getattr(self._inner, "_step_supports_amp_scaling", False))
        if found_inf is not None and (found_inf.is_cpu or not is_fused) and found_inf.item():
            return loss
        returned = None
        clips = self._clip_factor()
        # Each part of a parameter that is cut makes state of its own in the first step.
        self._new = {weight.param for weight in self._weights if weight.is_cut() and not self.state.get(weight.param)}
        try:
            with torch.no_grad(), self._scaling(scale, found_inf, is_fused=is_fused) as unscales:
                factor = clips if unscales is None else unscales
                for buckets, members in self._rounds():
                    returned = self._step_round(buckets, members, factor, writes_grads=scale is not None)
        except BaseException:
            for param in self._new:  # not all parts may have made theirs
                self.state.pop(param, None)
            raise
        finally:
            self._new = set()
        note_stepped(self._inner)
        self._chance.count(found_inf)
        return returned if closure is None else loss

    @contextmanager
    def _scaling(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor | None, *, is_fused: bool
    ) -> Iterator[torch.Tensor | None]:
        """Let a fused optimizer unscale and skip; yield what gradients are to be multiplied by for any other."""
        if not is_fused:
            factor = getattr(self, "grad_factor", None)
            yield factor if factor is not None or scale is None else reciprocal(scale)
            return
        with given(self._inner, grad_scale=scale, found_inf=found_inf):
            if found_inf is not None and not found_inf.is_cpu and isinstance(self._inner, torch.optim.SGD):
                with no_momentum_of_a_skipped_step(self._inner, found_inf):
                    yield None
            else:
                yield None

    def _rounds(self) -> Iterator[tuple[list[Bucket], dict[int, list[Stretch | torch.Tensor]]]]:
        """Yield the calls of the inner optimizer: buckets, and by index of the group which parameters take part."""
        of_param = {weight.param: weight for weight in self._weights}
        if self._reach is Reach.ALL:
            yield self._buckets, self._members()
            return
        group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for bucket in self._buckets:
            members: dict[int, list[Stretch | torch.Tensor]] = {}
            for stretch in bucket.stretches:
                members.setdefault(group_of[stretch.weight.param], []).append(stretch)
            yield [bucket], members
        kept: dict[int, list[Stretch | torch.Tensor]] = {}
        for param, index in group_of.items():
            if param not in of_param:
                kept.setdefault(index, []).append(param)
        if kept:
            yield [], kept

    def _members(self) -> dict[int, list[Stretch | torch.Tensor]]:
        """Return by index of the group all that is in it, for an optimizer that takes no parts."""
        of_param = {weight.param: weight.stretches[0] for weight in self._weights}
        return {
            index: [of_param.get(param, param) for param in group["params"]]
            for index, group in enumerate(self.param_groups)
        }

    def _step_round(
        self,
        buckets: list[Bucket],
        members: dict[int, list[Stretch | torch.Tensor]],
        factor: torch.Tensor | None,
        *,
        writes_grads: bool,
    ) -> Any:
        with self._lent(buckets, members) as loans:
            groups = self._inner.param_groups
            if self._reach is not Reach.ALL and not _grads(groups):
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
        self, buckets: list[Bucket], members: dict[int, list[Stretch | torch.Tensor]], *, all_: bool = False
    ) -> Iterator[list[Loan]]:
        """Let the inner optimizer have fp32 weights in the body; write what they round to when it ends well.

        Args:
            buckets: Whose weights are lent.
            members: By index of the group which parameters the inner optimizer has meanwhile.
            all_: Whether weights without gradients are lent as well.
        """
        all_ = all_ or self._reach is Reach.ALL  # such optimizers may count parameters by their places
        workspaces, decoded, loans = {}, {}, {}
        for bucket in buckets:
            if all_ or bucket.has_grads():
                workspaces[bucket] = workspace = self._workspace if len(buckets) == 1 else Workspace()
                decoded[bucket] = values = bucket.decode(workspace)
                loans.update({loan.stretch: loan for loan in loans_of(bucket, values, workspace, all_=all_)})
        stand_ins = {
            index: [loans.get(each) if isinstance(each, Stretch) else each for each in of_group]
            for index, of_group in members.items()
        }
        lent_members = {index: [each for each in of_group if each is not None] for index, of_group in stand_ins.items()}
        versions = {stretch.weight: write_count(stretch.weight.param) for stretch in loans}
        with lent(self._inner, lent_members, self._low_state, self._new):
            yield list(loans.values())
        if any(write_count(weight.param) != before for weight, before in versions.items()):
            raise RuntimeError(
                f"{type(self._inner).__name__} has written to parameters from a list of its own, not from its groups: "
                "MasterWeights cannot wrap it"
            )
        for bucket, values in decoded.items():
            bucket.encode(values, [each for each in bucket.stretches if each in loans], workspaces[bucket])
        for stretch in loans:
            stretch.weight.note_written()

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of an inner optimizer that has them (schedule-free ones), which change the weights."""
        inner = self.__dict__.get("_inner")
        if name not in ("train", "eval") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._switch, getattr(inner, name))

    def _switch(self, method: Callable[[], object]) -> None:
        self._check_weights()
        with torch.no_grad(), self._lent(self._buckets, self._members(), all_=True):
            method()

    def _check_weights(self) -> None:
        """Raise if weights are not what they were made; take over those that were written from outside."""
        in_groups = {param for group in self.param_groups for param in group["params"]}
        for weight in self._weights:
            param, here = weight.param, local(weight.param)
            was = self._dtype, weight.shape, weight.stride, weight.device()
            if (param.dtype, param.shape, here.stride(), here.device) != was:
                raise RuntimeError(
                    f"{weight.name!r} was {self._dtype} of shape {tuple(weight.shape)}, strides {weight.stride}, on "
                    f"{weight.device()}, and is {param.dtype} of shape {tuple(param.shape)}, strides {here.stride()}, "
                    f"on {here.device} now: make a new MasterWeights after changing a model"
                )
            if param not in in_groups:
                raise RuntimeError(f"{weight.name!r} is in no group any more: make a new MasterWeights without it")
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise TypeError(
                    f"{weight.name!r} has a gradient of layout {param.grad.layout}: keep its weight in fp32"
                )
        self._take_over_written()

    def _take_over_written(self) -> None:
        """Have weights that were written from outside as the new fp32 weights."""
        if self._method == "stochastic":  # nothing is kept that could belong to other weights
            return
        written = []
        for weight in self._weights:
            now = write_count(weight.param)
            if weight.bits is not None and (now != weight.version or weight.awaits_weights):
                is_known = weight.bits == weight.digest()
            else:
                is_known = now == weight.version or weight.awaits_weights
            if is_known and (now != weight.version or weight.awaits_weights):
                weight.version, weight.awaits_weights = now, weight.awaits_weights and now == weight.version
                for stretch in weight.stretches:
                    stretch.bucket.sum = None
            elif not is_known:
                written.append(weight)
        for bucket in self._buckets:
            weights = [stretch.weight for stretch in bucket.stretches]
            # Through `.data` or numpy, which no version counts.
            if not any(each in written for each in weights) and bucket.is_changed(self._workspace):
                written += [each for each in weights if each.bits is None or each.bits != each.digest()]
        if not written:
            return
        self._set_values({weight: local(weight.param).float() for weight in written})
        names = ", ".join(repr(weight.name) for weight in written[:3])
        warn(
            f"{len(set(written))} weights were written since the last step of MasterWeights, {names} among them: they "
            "are taken as they are, in 16 bits. To load fp32 weights, use load_fp32_state_dict. If ranks started from "
            "different weights, seed them alike",
            UserWarning,
            3,
        )

    def _set_values(self, values: Mapping[Weight, torch.Tensor]) -> None:
        """Set fp32 weights, laid out as the parameters are in memory."""
        with torch.no_grad():
            for bucket in self._buckets:
                given_here = [stretch for stretch in bucket.stretches if stretch.weight in values]
                if given_here:
                    decoded = bucket.decode(self._workspace)
                    for stretch in given_here:
                        stretch.in_bucket(decoded).copy_(stretch.of(values[stretch.weight]))
                    bucket.encode(decoded, given_here, self._workspace)
        for weight in values:
            weight.note_written()

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
            saved["state"][number] = {**saved["state"].get(number, {}), **self._entries(weight)}
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

    def _has_chance(self) -> bool:
        return self._method == "stochastic" or self._low_state is not None

    def _entries(self, weight: Weight) -> dict[str, torch.Tensor]:
        here = local(weight.param)
        entries = {}
        for name, dtype in weight.stretches[0].bucket.codec.entries().items():
            entry = torch.empty_like(here, dtype=dtype)
            for stretch in weight.stretches:
                stretch.of(entry).copy_(stretch.saved()[name])
            entries[_PREFIX + name] = as_dtensor(entry, weight.param)
        if entries:  # of a DTensor, this rank's part has none: it may be another one when it is loaded
            is_whole = not hasattr(weight.param, "to_local")
            entries[_PREFIX + "digest"] = torch.tensor(weight.digest() if is_whole else _NO_DIGEST)
        if self._has_chance():
            entries[_PREFIX + "seed"] = torch.tensor(self._chance.seed)
            entries[_PREFIX + "steps"] = torch.tensor(self._chance.steps())
        return entries

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
        ours, of_inner = self._separated(state_dict["state"])
        numbers = self._numbers(state_dict["param_groups"])
        low = {numbers[weight.param] for weight in self._weights}
        if stray := [number for number in ours if number not in low]:
            raise ValueError(
                f"the checkpoint has bits of a 16-bit weight for parameter {stray[0]!r}, which is fp32 here: use the "
                "narrow=... it was saved with"
            )
        for weight in self._weights:
            self._check_entries(weight, ours.get(numbers[weight.param], {}))
        self._load_inner({**state_dict, "state": of_inner})
        for weight in self._weights:
            entries = ours.get(numbers[weight.param])
            if not entries:
                continue
            for stretch in weight.stretches:
                of_stretch = {
                    name: stretch.of(laid_out_as(local(entries[_PREFIX + name]), local(weight.param)))
                    for name in stretch.bucket.codec.entries()
                }
                stretch.load(of_stretch)
            digest = int(entries.get(_PREFIX + "digest", _NO_DIGEST))
            is_known = digest != _NO_DIGEST and not hasattr(weight.param, "to_local")
            weight.bits, weight.awaits_weights = digest if is_known else None, True
            if self._has_chance() and _PREFIX + "seed" in entries:
                self._chance.set(int(entries[_PREFIX + "seed"]), int(entries[_PREFIX + "steps"]))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _separated(self, state: Mapping[Any, Any]) -> tuple[dict[Any, dict[str, Any]], dict[Any, Any]]:
        """Return our entries, by number of the parameter, and those of the inner optimizer."""
        ours, of_inner = {}, {}
        for number, entries in state.items():
            if not isinstance(entries, Mapping):
                of_inner[number] = entries
                continue
            mine = {name: value for name, value in entries.items() if str(name).startswith(_PREFIX)}
            rest = {name: value for name, value in entries.items() if name not in mine}
            if mine:
                ours[number] = mine
            if rest:
                of_inner[number] = rest
        return ours, of_inner

    def _check_entries(self, weight: Weight, entries: Mapping[str, torch.Tensor]) -> None:
        if not entries:
            return
        expected = {_PREFIX + name for name in weight.stretches[0].bucket.codec.entries()}
        given_names = entries.keys() - {_PREFIX + "seed", _PREFIX + "steps", _PREFIX + "digest"}
        if given_names != expected:
            raise ValueError(
                f"the checkpoint has {listed(sorted(given_names)) or 'no entries'} for {weight.name!r}, and "
                f"method={self._method!r} with {self._dtype} and rounding={self._rounding!r} needs "
                f"{listed(sorted(expected)) or 'none'}: use the settings it was saved with"
            )
        for name in expected:
            dtype = weight.stretches[0].bucket.codec.entries()[name.removeprefix(_PREFIX)]
            if entries[name].dtype is not dtype:
                raise ValueError(
                    f"{name!r} of {weight.name!r} is {entries[name].dtype} in the checkpoint, not {dtype}: another "
                    "optimizer has cast it"
                )
            if entries[name].shape != weight.shape:
                raise ValueError(
                    f"{name!r} of {weight.name!r} has shape {tuple(entries[name].shape)} in the checkpoint, and the "
                    f"parameter has {tuple(weight.shape)}"
                )

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        """Let the inner optimizer load its part, with fp32 tensors for parameters: it casts state to their dtype."""
        groups, low = self.param_groups, {weight.param for weight in self._weights}
        stand_ins = {
            param: torch.zeros((), device=local(param).device).expand(param.shape) if param in low else param
            for group in groups
            for param in group["params"]
        }
        params_before = [group["params"] for group in groups]
        state_before = self._inner.state
        try:
            for group in groups:
                group["params"] = [stand_ins[param] for param in group["params"]]
            self._inner.load_state_dict(state_dict)
            loaded_groups, loaded_state = self._inner.param_groups, self._inner.state
        except BaseException:
            self._inner.state = state_before
            raise
        finally:
            self._inner.param_groups = groups
            for group, params in zip(groups, params_before, strict=True):
                group["params"] = params
        state: defaultdict[Any, Any] = defaultdict(dict)
        param_of = {id(stand_in): param for param, stand_in in stand_ins.items()}
        for key, value in loaded_state.items():
            param = param_of.get(id(key), key)
            state[param] = (
                {name: self._as_stored(name, each, param) for name, each in value.items()} if param in low else value
            )
        self._inner.state = state
        for group, loaded in zip(groups, loaded_groups, strict=True):
            if group is not loaded:
                params = group["params"]
                group.clear()
                group.update({**loaded, "params": params})

    def _as_stored(self, name: object, value: Any, param: torch.Tensor) -> Any:
        """Return state of a 16-bit weight in the dtype it is stored in, laid out as the weight."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            return value
        if value.shape != param.shape:
            return value.float() if value.dtype.itemsize < 4 else value
        stored = value.to(self._stored_as(name))
        return stored if hasattr(param, "to_local") else laid_out_as(stored, local(param))

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
            if name in state_dict and state_dict[name].shape != weight.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(state_dict[name].shape)} in the checkpoint, and the parameter has "
                    f"{tuple(weight.shape)}"
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
                    decoded = bucket.decode(self._workspace)
                    for stretch in bucket.stretches:
                        if stretch.weight in values:
                            stretch.of(values[stretch.weight]).copy_(stretch.in_bucket(decoded))
        return {weight: as_dtensor(value, weight.param) for weight, value in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        self._take_over_written()
        # Hooks, what schedulers have put on the optimizer, and the model stay here, as with torch's optimizers.
        state = {name: value for name, value in self.__dict__.items() if name in _STATE}
        return {**state, "_model": None, "_narrow": None, "_workspace": Workspace(), "_clipped": None, "_new": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_weights" in state:
            self._optimizer_step_pre_hooks = self._inner._optimizer_step_pre_hooks
            self._optimizer_step_post_hooks = self._inner._optimizer_step_post_hooks
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
) -> LowState | None:
    if not isinstance(state_dtype, (Mapping, type(None))):
        raise TypeError(f"state_dtype must be a dict of names and dtypes, got {state_dtype!r}")
    if not state_dtype:
        return None
    settings = {
        name: wanted if isinstance(wanted, tuple) and len(wanted) == 2 else (wanted, "stochastic")
        for name, wanted in state_dtype.items()
    }
    for name, (dtype, rounding) in settings.items():
        _check_choice(f"the rounding of state_dtype[{name!r}]", rounding, ("stochastic", "nearest"))
        if dtype not in (*_DTYPES, torch.float32):
            raise ValueError(
                f"state_dtype[{name!r}] must be one of {', '.join(map(repr, (*_DTYPES, torch.float32)))}, got {dtype!r}"
            )
    known = state_names(optimizer)
    unknown = [] if known is None else [name for name in state_dtype if name not in known]
    if known is not None and unknown:
        raise ValueError(
            f"{type(optimizer).__name__} keeps no state {unknown[0]!r} of the shape of its weights; "
            f"it keeps {listed(sorted(known)) or 'none'}"
        )
    nearest = {name for name, (_, rounding) in settings.items() if rounding == "nearest"}
    return LowState({name: dtype for name, (dtype, _) in settings.items()}, nearest, chance.round)
