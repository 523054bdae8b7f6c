"""A language model trained with Muon and AdamW, in plain PyTorch."""

import torch
from models import EPOCHS, GPT, STEPS_PER_EPOCH, language_loss, text


BATCH_SIZE = 16
PEAK, RATIO = 0.02, 0.15
STEPS = EPOCHS * STEPS_PER_EPOCH

train_blocks, valid_blocks = text(batch_size=BATCH_SIZE, context=16)


def shuffled(epoch):
    order = torch.randperm(len(train_blocks), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH_SIZE):
        yield (train_blocks[rows],)


def stable_then_down(step, cooldown):
    left = STEPS - step
    return PEAK * min(1.0, left / (cooldown * STEPS_PER_EPOCH))


def train(model, batches, *, cooldown=1):
    hidden = [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.dim() == 2
    ]
    known = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    muon = torch.optim.Muon(hidden, weight_decay=0.01)
    adamw = torch.optim.AdamW(rest, betas=(0.8, 0.95), weight_decay=0.0)
    step, curve = 0, []
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for (blocks,) in batches(epoch):
            rate = stable_then_down(step, cooldown)
            muon.param_groups[0]["lr"] = rate
            adamw.param_groups[0]["lr"] = rate * RATIO
            muon.zero_grad()
            adamw.zero_grad()
            loss = language_loss(model, blocks)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(rest, 1.0)
            muon.step()
            adamw.step()
            losses.append(loss.detach())
            step += 1
        model.eval()
        with torch.no_grad():
            valid_loss = language_loss(model, valid_blocks).item()
        curve.append({"train_loss": torch.stack(losses).mean().item(), "valid_loss": valid_loss})
    return curve


if __name__ == "__main__":
    for cooldown in (1, 2):
        torch.manual_seed(0)
        print(cooldown, train(GPT(), shuffled, cooldown=cooldown)[-1])
