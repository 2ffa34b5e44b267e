"""The decoder-only transformer of transformer_jax.py in torch: f32 master weights, bf16 compute.

The same weights (parameters.py) give the same model. The weights of a block lie in a module of
their own, which is what FSDP shards and brings together one at a time.
"""

import torch
import torch.nn.functional as F
from torch import nn

COMPUTE = torch.bfloat16


def rms_norm(x, scale):
    """x [..., D] over its root mean square, computed in f32, back in x's dtype."""
    x32 = x.float()
    inverse = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + 1e-6)
    return (x32 * inverse * scale).to(x.dtype)


class Block(nn.Module):
    """One transformer block on x [B, S, D]."""

    def __init__(self, weights, heads):
        super().__init__()
        self.heads = heads
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value.copy())))

    def forward(self, x):
        rows, length, width = x.shape
        qkv = rms_norm(x, self.attention_norm) @ self.qkv.to(COMPUTE)
        heads = qkv.reshape(rows, length, 3 * self.heads, width // self.heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(rows, length, width) @ self.attention_out.to(COMPUTE)
        inner = F.gelu(rms_norm(x, self.mlp_norm) @ self.mlp_in.to(COMPUTE), approximate="tanh")
        return x + inner @ self.mlp_out.to(COMPUTE)


BLOCK_WEIGHTS = ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out")


class Transformer(nn.Module):
    """Tokens [B, S] to the loss of each token; the head is given by the caller.

    The head runs inside `forward`, because that is where FSDP holds the whole unembedding.
    """

    def __init__(self, shape, parameters):
        super().__init__()
        own = {name: value for name, value in parameters.items() if name not in BLOCK_WEIGHTS}
        for name, value in own.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))
        layers = [{name: parameters[name][i] for name in BLOCK_WEIGHTS} for i in range(shape.layers)]
        self.blocks = nn.ModuleList(Block(weights, shape.heads) for weights in layers)

    def forward(self, tokens, head):
        # Rounded after the gather, so that its backward accumulates in f32; see transformer_jax.py.
        x = (F.embedding(tokens, self.embed) + self.position[: tokens.shape[1]]).to(COMPUTE)
        for block in self.blocks:
            x = block(x)
        q = rms_norm(x, self.final_norm).reshape(-1, x.shape[-1])
        return head(q, self.unembed.to(COMPUTE))
