"""A language model trained with Muon and AdamW, in thrifty."""

import torch
from models import EPOCHS, GPT, language_loss, text

import thrifty as th


class MuonLanguageModel(th.Task):
    batch_size = 16
    optimizer = th.Optimizers(
        hidden=th.Optimizer(
            torch.optim.Muon,
            params=["blocks.*.attention.*.weight", "blocks.*.mlp.*.weight"],
            lr="lr",
            weight_decay=0.01,
        ),
        rest=th.AdamW(lr=th.times("lr", 0.15), betas=(0.8, 0.95), weight_decay=0.0, clip_norm=1.0),
    )

    def data(self, hp):
        train, valid = text(batch_size=self.batch_size, context=16)
        return th.ArrayData(train=(train,), valid=(valid,))

    def model(self, hp):
        return GPT()

    def loss(self, model, batch):
        return language_loss(model, *batch)

    def metrics(self, model, batch):
        return {"valid_loss": language_loss(model, *batch)}


study = th.Study(
    MuonLanguageModel(),
    th.Space(lr=th.WSD(0.02, cooldown=th.Choice([1, 2]))),
    algorithm=th.GridSearch(max_epochs=EPOCHS),
    metric="valid_loss",
    mode="min",
    storage="sqlite:///port.db",
    name="muon",
)

if __name__ == "__main__":
    study.run()
    for trial in study.trials:
        print(trial.config["lr"], trial.values)
