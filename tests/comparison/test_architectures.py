"""`compare` on real architectures, made from configurations: it runs, restores, and names modules that make sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
import transformers
from torch import Tensor, nn

import castwise
from castwise import policies

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
}
TOKENS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def of_tokens(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.float().flatten(0, 1), target.flatten())


def of_classes(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.float(), target)


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config), {"input_ids": TOKENS}, TOKENS, of_tokens


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), {"input_ids": TOKENS}, TOKENS, of_tokens


def vit() -> Any:
    config = transformers.ViTConfig(**{**SMALL, "vocab_size": None}, image_size=16, patch_size=4, num_labels=5)
    images = torch.randn(3, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {"pixel_values": images}, torch.arange(3), of_classes


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_ff=48, d_kv=16, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    return transformers.T5ForConditionalGeneration(config), inputs, TOKENS, of_tokens


def whisper() -> Any:
    sides = {
        f"{side}_{kind}": value
        for side in ("encoder", "decoder")
        for kind, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 48))
    }
    config = transformers.WhisperConfig(
        d_model=32, vocab_size=64, num_mel_bins=8, max_source_positions=20, max_target_positions=20, **sides, **IDS
    )
    inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": TOKENS}
    return transformers.WhisperForConditionalGeneration(config), inputs, TOKENS, of_tokens


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), {"input_ids": TOKENS}, TOKENS, of_tokens


class UNet(nn.Module):
    """Two levels down and up, with skips, batch norm, and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = self._level(3, 8), self._level(8, 16), self._level(16, 16)
        self.up2, self.up1, self.head = self._level(32, 8), self._level(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2.0)
        x = F.interpolate(self.up2(torch.cat([x, second], 1)), scale_factor=2.0)
        x = self.up1(torch.cat([x, first], 1))
        x = x + first
        return self.head(x)  # type: ignore[no-any-return]

    @staticmethod
    def _level(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def unet() -> Any:
    return UNet(), torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16)), lambda y, t: F.cross_entropy(y.float(), t)


HEADS = ("lm_head", "cls.predictions", "classifier", "proj_out", "head", "middle")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [llama, bert, vit, t5, whisper, mixtral, unet])
def test_architectures_are_compared_and_restored(make: Callable[[], Any], training: bool) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss = make()
    model.train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    drift = castwise.compare(model, [(inputs, target)], {"bf16": policies.bf16}, loss=loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any("forward" in vars(module) for module in model.modules())

    found = drift["bf16"]
    assert not any(module.problem for module in found.modules)
    assert found.modules[0].name.startswith(HEADS)
    assert found.summary.gradient_cosine is not None
    assert found.summary.gradient_cosine > 0.99
    assert found.summary.relative_loss_error < 1e-2
    used = {module.name for module in found.modules}
    layers = {name for name, each in model.named_modules() if isinstance(each, (nn.Linear, nn.Conv2d))}
    assert len(layers - used) <= len(layers) // 10
    for module in found.modules:
        if module.type in {"Linear", "Conv2d"}:
            assert module.introduced is not None
            assert 1e-4 < module.introduced.relative_rms < 3e-2, module.name
