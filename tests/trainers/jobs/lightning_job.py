"""A training by the Trainer of Lightning, of a tiny model."""

import warnings

import lightning
import torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 97)

    def loss(self, batch):
        logits = self.head(torch.tanh(self.mix(self.embed(batch[:, :-1]))))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0, verbose=False)
rows = torch.randint(97, (64, 13))
loader = torch.utils.data.DataLoader(rows, batch_size=4)
quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
lightning.Trainer(
    max_steps=3, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=0.05, val_check_interval=2,
    **dict.fromkeys(quiet, False),
).fit(Model(), loader, torch.utils.data.DataLoader(rows[:8], batch_size=4))  # fmt: skip
