"""A GAN with two optimizers, in thrifty."""

import torch
import torch.nn.functional as F
from models import EPOCHS, GAN, digits

import thrifty as th


NOISE = 16


class AdversarialDigits(th.Task):
    batch_size = 64
    optimizer = th.Optimizers(
        generator=th.Adam(lr="lr", betas=(0.5, 0.999), params="generator.*"),
        discriminator=th.Adam(lr="lr", betas=(0.5, 0.999), params="discriminator.*"),
    )

    def data(self, hp):
        (train_x, _), (valid_x, _) = digits(batch_size=self.batch_size)
        fixed = torch.randn(len(valid_x), NOISE, generator=torch.Generator().manual_seed(1))
        return th.ArrayData(train=(train_x,), valid=(valid_x, fixed))

    def model(self, hp):
        return GAN()

    def step(self, model, batch):
        real = batch[0].flatten(1)
        fake = model.generator(torch.randn(len(real), NOISE))
        is_real, is_fake = model.discriminator(real), model.discriminator(fake.detach())
        loss = F.softplus(-is_real).mean() + F.softplus(is_fake).mean()
        loss.backward()
        self.optimizers["discriminator"].step()
        self.optimizers["generator"].zero_grad()
        F.softplus(-model.discriminator(fake)).mean().backward()
        self.optimizers["generator"].step()
        return loss

    def metrics(self, model, batch):
        valid, noise = batch
        made = model.generator(noise)
        return {"distance": (made.mean(0) - valid.flatten(1).mean(0)).norm()}


study = th.Study(
    AdversarialDigits(),
    th.Space(lr=th.Step(2e-3, [3], gamma=th.Choice([0.1, 0.3]))),
    algorithm=th.GridSearch(max_epochs=EPOCHS),
    metric="distance",
    mode="min",
    storage="sqlite:///port.db",
    name="gan",
)

if __name__ == "__main__":
    study.run()
    for trial in study.trials:
        print(trial.config["lr"], trial.values)
