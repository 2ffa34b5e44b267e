"""A tokenizer for a recipe of torchtune: torchtune's own, of a file of Hugging Face, with the two attributes that a
recipe of text asks for."""

from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer


class Words(HuggingFaceBaseTokenizer):
    pad_id, max_seq_len = 0, 64
