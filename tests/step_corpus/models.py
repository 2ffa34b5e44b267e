"""The models of the part `develop`: each takes tokens and labels and returns the mean loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from step_corpus.layers import cross_entropy


class Perceptron(nn.Module):
    """An embedding, layers with norms and biases, and a head."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return cross_entropy(self.head(x), labels)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.silu(self.up(self.feed_norm(x))))


class Transformer(nn.Module):
    """A small language model; the head may be the embedding."""

    def __init__(self, width, vocabulary, depth, tied):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)), labels)


class Mixture(nn.Module):
    """Experts that are modules, each weighed by a router for every token."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(4)
        )

    def forward(self, x):
        x = self.norm(x)
        shares = self.router(x).softmax(-1)
        return sum(
            share * expert(x)
            for share, expert in zip(shares.unsqueeze(-1).unbind(-2), self.experts)
        )


class Experts(nn.Module):
    """A stack of mixtures of experts."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixture(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return cross_entropy(self.head(x), labels)


MODELS = {
    "mlp": lambda w, v, d: Perceptron(w, v, d),
    "transformer": lambda w, v, d: Transformer(w, v, d, tied=False),
    "tied": lambda w, v, d: Transformer(w, v, d, tied=True),
    "experts": lambda w, v, d: Experts(w, v, d),
}
