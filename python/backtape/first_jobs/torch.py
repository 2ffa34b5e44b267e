"""A torch job. To record step 0: BACKTAPE_STEPS=0 BACKTAPE_DIR=dumps python FILE; replay --dump dumps --step 0"""
import backtape.torch
import torch

model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
backtape.torch.attach(model, optimizer)
for tokens in torch.randint(256, (3, 4, 17)):
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
