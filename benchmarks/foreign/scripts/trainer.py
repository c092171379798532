"""transformers' Trainer, as its users call it: accumulation, clipping, a scheduler, evaluation, prediction.

python trainer.py [OPTIONS of TrainingArguments ...]
"""

import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

fixed = ["--output_dir", "out", "--report_to", "none", "--use_cpu", "--bf16", "--disable_tqdm", "1"]
fixed += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "4"]
fixed += ["--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "2", "--max_grad_norm", "0.5"]
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*fixed, *sys.argv[1:]])
set_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
rows = torch.randint(64, (16, 12))
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
trainer.remove_callback(PrinterCallback)  # it prints seconds
trainer.train()
for entry in trainer.state.log_history:
    print({name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name})
predicted = trainer.predict(data[:2]).predictions
print(predicted.dtype, predicted.sum().item())
print([p.double().sum().item() for p in model.parameters()])
