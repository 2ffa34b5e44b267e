"""What trainers of other libraries are run with: a model of a few thousand parameters that is drawn at random, a
tokenizer of words that is made here, and sentences of these words. Nothing of it is downloaded."""

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{index}" for index in range(120)]
VOCABULARY = len(SPECIAL) + len(WORDS)


def tokenizer(**options):
    words = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    own = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"bos_token": "<eos>", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=own, **named, **options)


def model(seed=0, **options):
    set_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, **special, **options))


def sentence(chance, shortest, longest):
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(shortest, longest)))


def sentences(columns, count=64, seed=0):
    """A data set: for each column the least and the largest number of words."""
    chance = random.Random(seed)
    rows = [{name: sentence(chance, *lengths) for name, lengths in columns.items()} for _ in range(count)]
    return Dataset.from_list(rows)


def arguments(directory, **more):
    """What every trainer of transformers and trl is told."""
    usual = {
        "output_dir": str(directory), "max_steps": 3, "max_grad_norm": 0.1, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    return usual | more
