"""nanoGPT's loop in plain PyTorch."""

import math

import torch
from models import EPOCHS, GPT, STEPS_PER_EPOCH, language_loss, text


BATCH_SIZE, ACCUMULATE = 16, 2
PEAK = 1e-3
WARMUP, STEPS = STEPS_PER_EPOCH, EPOCHS * STEPS_PER_EPOCH

train_blocks, valid_blocks = text(batch_size=BATCH_SIZE, context=16)


def learning_rate(step, floor):
    if step < WARMUP:
        return PEAK * step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return floor + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK - floor)


def shuffled(epoch):
    order = torch.randperm(len(train_blocks), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH_SIZE):
        yield (train_blocks[rows],)


def train(model, batches, *, floor=0.0):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    step, curve = 0, []
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for (blocks,) in batches(epoch):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, floor)
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in blocks.split(BATCH_SIZE // ACCUMULATE):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = language_loss(model, part)
                loss = loss / ACCUMULATE
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(total)
            step += 1
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            valid_loss = language_loss(model, valid_blocks).item()
        curve.append({"train_loss": torch.stack(losses).mean().item(), "valid_loss": valid_loss})
    return curve


if __name__ == "__main__":
    for floor in (0.0, 1e-4):
        torch.manual_seed(0)
        print(floor, train(GPT(), shuffled, floor=floor)[-1])
