"""Ready policies: `castwise.autocast("cuda", policy=castwise.policies.fp16_stable.bind(model))`.

Start from one with `dataclasses.replace(policies.fp16_stable, modules={...})`.

* `bf16`, `fp16`: the casts of `torch.autocast` with that dtype.
* `fp16_stable`: `fp16`, with normalisation, softmax, losses and the last layer in fp32. Their sums of squares,
  exponentials and logits are the values that overflow fp16 (above 65,504) or underflow in it (Micikevicius et al. 2018,
  "Mixed precision training"). Autocast already runs most of these ops in fp32 on CUDA, but few of them on CPUs.
* `bf16_stable`: the same for `bf16`, with mixture-of-experts routers in fp32 too (Fedus et al. 2021, "Switch
  Transformers"). bf16 has the range, but its 8 bits of precision cannot tell similar router scores apart.

The last layer is the linear layer that was registered last; `Policy.explain` shows which. Ops inside torch functions,
such as the softmax of `torch.nn.MultiheadAttention`, keep autocast's dtypes.
"""

from castwise.policy._policy import Policy

__all__ = ["bf16", "bf16_stable", "fp16", "fp16_stable"]

_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
_EXPONENTIALS = ("log_softmax", "logsumexp", "softmax", "softmin")
_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
_MODULES = {
    **dict.fromkeys(
        ("maybe:type:_NormBase", "maybe:type:GroupNorm", "maybe:type:*LayerNorm", "maybe:type:*RMSNorm"), "float32"
    ),
    "maybe:last:Linear": "float32",
}
_OPS = dict.fromkeys((*_NORMS, *_EXPONENTIALS, *_LOSSES), "float32")

bf16 = Policy(compute="bfloat16")
"""The casts of `torch.autocast` with bf16."""
fp16 = Policy(compute="float16")
"""The casts of `torch.autocast` with fp16."""
fp16_stable = Policy(compute="float16", modules=_MODULES, ops=_OPS)
"""`fp16`, with normalisation, softmax, losses and the last linear layer in fp32."""
bf16_stable = Policy(
    compute="bfloat16", modules={**_MODULES, "maybe:*router": "float32", "maybe:type:*Router*": "float32"}, ops=_OPS
)
"""`bf16`, with the ops and modules of `fp16_stable` in fp32, and mixture-of-experts routers too."""
