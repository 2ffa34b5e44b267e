"""A Lightning job that records its step 0: python FILE; replay --dump dumps --step 0"""
import lightning
import torch
from backtape.lightning import BacktapeCallback
class Job(lightning.LightningModule):
    configure_optimizers = lambda self: torch.optim.AdamW(self.parameters(), lr=1e-3)
    def training_step(self, tokens, index):
        return torch.nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
job, loader = Job(), torch.utils.data.DataLoader(torch.randint(256, (24, 17)), batch_size=4)
job.model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256, bias=False))
lightning.Trainer(max_steps=3, logger=False, callbacks=[BacktapeCallback(steps="0", dir="dumps")]).fit(job, loader)
