"""LoRA of peft on a small GPT-2: training, and evaluation before, while and after its adapter is merged.

python peft_lora.py bfloat16|float16 [--train-only]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
lora = LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(config), lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
scaler = torch.amp.GradScaler("cpu")
region = torch.autocast("cpu", dtype=getattr(torch, sys.argv[1]))
ids = torch.randint(64, (2, 12))


def evaluate(when):
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, region:
            output = model(input_ids=ids, labels=ids)
        print(when, output.logits.dtype, output.logits.double().sum().item(), output.loss.item())
    model.train()


for _ in range(4):
    for _ in range(2):
        with region:
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(loss.item(), scaler.get_scale())
    evaluate("trained")
    if "--train-only" not in sys.argv:
        model.merge_adapter()
        evaluate("merged")
        model.unmerge_adapter()
        evaluate("unmerged")
if "--train-only" not in sys.argv:
    model = model.merge_and_unload()
    evaluate("merged for good")
