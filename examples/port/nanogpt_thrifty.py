"""nanoGPT's loop in thrifty."""

from models import EPOCHS, GPT, language_loss, text

import thrifty as th


class NanoGPT(th.Task):
    batch_size, accumulate = 16, 2
    precision = "bf16-mixed"
    optimizer = th.AdamW(
        lr="lr",
        betas=(0.9, 0.95),
        weight_decay=0.1,
        clip_norm=1.0,
        groups={lambda p: p.dim() < 2: {"weight_decay": 0.0}},
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
    NanoGPT(),
    th.Space(lr=th.Warmup(1, th.Cosine(1e-3, floor=th.Choice([0.0, 1e-4])))),
    algorithm=th.GridSearch(max_epochs=EPOCHS),
    metric="valid_loss",
    mode="min",
    storage="sqlite:///port.db",
    name="nanogpt",
)

if __name__ == "__main__":
    study.run()
    for trial in study.trials:
        print(trial.config["lr"], trial.values)
