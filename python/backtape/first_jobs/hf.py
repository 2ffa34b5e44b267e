"""A job of the Trainer of transformers that records its step 0: python FILE; replay --dump dumps --step 0"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from backtape.transformers import BacktapeCallback

shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (24, 16))]
arguments = TrainingArguments("out", max_steps=3, save_strategy="no", report_to=[])
Trainer(model, arguments, train_dataset=rows, callbacks=[BacktapeCallback(steps="0", dir="dumps")]).train()
