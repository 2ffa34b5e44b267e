"""The models of the part `held-out`, which share no code with those of `develop`."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from step_corpus.layers import cross_entropy


class RootMeanSquare(nn.Module):
    """A norm without a mean and a bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (
            x
            * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype)
            * self.weight
        )


class Gate(nn.Module):
    """A gated layer of three matrices."""

    def __init__(self, width):
        super().__init__()
        self.norm = RootMeanSquare(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, 2 * width, bias=False)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.back(F.silu(self.gate(y)) * self.value(y))


class Gated(nn.Module):
    """Gated layers over the running mean of embeddings."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.tokens_embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Gate(width) for _ in range(depth))
        self.last_norm = RootMeanSquare(width)
        self.unembed = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, labels):
        x = self.tokens_embed(tokens)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + x.cumsum(1) / count
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.unembed(self.last_norm(x)), labels)


class Recurrent(nn.Module):
    """Cells that are stepped over the tokens, and a head tied to the embedding."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.table_embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.table_embed.weight

    def forward(self, tokens, labels):
        x = self.table_embed(tokens)
        for cell in self.blocks:
            state, outputs = torch.zeros_like(x[:, 0]), []
            for token in x.unbind(1):
                state = cell(token, state)
                outputs.append(state)
            x = x + torch.stack(outputs, 1)
        return cross_entropy(self.head(self.norm(x)), labels)


class Convolution(nn.Module):
    """Convolutions over the tokens before, with norms of groups of channels."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 3), nn.GELU(), nn.Conv1d(width, width, 1, bias=False)
            )
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.embed(tokens).transpose(1, 2)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(F.pad(norm(x), (2, 0)))
        return cross_entropy(self.head(x.transpose(1, 2)), labels)


class Routed(nn.Module):
    """Experts whose weights are stacked; the two best of each token answer."""

    def __init__(self, width, vocabulary, depth):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = RootMeanSquare(width)
        self.router = nn.Parameter(torch.empty(4, width))
        self.experts_in = nn.Parameter(torch.empty(4, 2 * width, width))
        self.experts_out = nn.Parameter(torch.empty(4, width, 2 * width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        y = self.norm(x)
        logits = y @ self.router.T
        best = logits.topk(2, -1).indices
        mask = torch.zeros_like(logits).scatter(-1, best, 1.0)
        shares = (logits.exp() * mask) / (logits.exp() * mask).sum(-1, keepdim=True)
        inner = F.gelu(torch.einsum("bsd,ehd->bseh", y, self.experts_in))
        out = torch.einsum("bseh,edh,bse->bsd", inner, self.experts_out, shares)
        return cross_entropy(self.head(x + out), labels)


MODELS = {
    "gated": lambda w, v, d: Gated(w, v, d),
    "recurrent": lambda w, v, d: Recurrent(w, v, d),
    "convolution": lambda w, v, d: Convolution(w, v, d),
    "routed": lambda w, v, d: Routed(w, v, d),
}
