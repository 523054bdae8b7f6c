"""A GAN with two optimizers, in plain PyTorch."""

import torch
import torch.nn.functional as F
from models import EPOCHS, GAN, digits


BATCH_SIZE, NOISE = 64, 16
LR, DROP_EPOCH = 2e-3, 3

(train_x, train_y), (valid_x, valid_y) = digits(batch_size=BATCH_SIZE)
fixed_noise = torch.randn(len(valid_x), NOISE, generator=torch.Generator().manual_seed(1))


def shuffled(epoch):
    order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH_SIZE):
        yield (train_x[rows],)


def train(model, batches, *, gamma=0.1):
    generator = torch.optim.Adam(model.generator.parameters(), lr=LR, betas=(0.5, 0.999))
    discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=LR, betas=(0.5, 0.999))
    schedules = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [DROP_EPOCH], gamma=gamma)
        for optimizer in (generator, discriminator)
    ]
    curve = []
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for (real,) in batches(epoch):
            real = real.flatten(1)
            fake = model.generator(torch.randn(len(real), NOISE))
            discriminator.zero_grad()
            is_real, is_fake = model.discriminator(real), model.discriminator(fake.detach())
            loss = F.softplus(-is_real).mean() + F.softplus(is_fake).mean()
            loss.backward()
            discriminator.step()
            generator.zero_grad()
            F.softplus(-model.discriminator(fake)).mean().backward()
            generator.step()
            losses.append(loss.detach())
        for schedule in schedules:
            schedule.step()
        model.eval()
        with torch.no_grad():
            made = model.generator(fixed_noise)
            distance = (made.mean(0) - valid_x.flatten(1).mean(0)).norm()
        curve.append({"train_loss": torch.stack(losses).mean().item(), "distance": distance.item()})
    return curve


if __name__ == "__main__":
    for gamma in (0.1, 0.3):
        torch.manual_seed(0)
        print(gamma, train(GAN(), shuffled, gamma=gamma)[-1])
