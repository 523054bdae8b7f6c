"""A loop of the kind that wins speed-runs on CIFAR, in plain PyTorch."""

import torch
import torch.nn.functional as F
from models import EPOCHS, STEPS_PER_EPOCH, conv_net, digits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


BATCH_SIZE = 64
PEAK, DIV = 0.1, 5.0
WARMUP, STEPS = STEPS_PER_EPOCH, EPOCHS * STEPS_PER_EPOCH

(train_x, train_y), (valid_x, valid_y) = digits(batch_size=BATCH_SIZE)


def one_cycle(step, last):
    if step < WARMUP:
        return PEAK / DIV + (PEAK - PEAK / DIV) * step / WARMUP
    return PEAK + (last - PEAK) * (step - WARMUP) / (STEPS - WARMUP)


def shuffled(epoch):
    order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH_SIZE):
        yield train_x[rows], train_y[rows]


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y, label_smoothing=0.2)


@torch.no_grad()
def evaluate(model):
    logits = model.eval()(valid_x)
    accuracy = (logits.argmax(1) == valid_y).float().mean()
    return accuracy.item(), F.cross_entropy(logits, valid_y).item()


def train(model, batches, *, last=0.0):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD(
        [
            {"params": weights, "factor": 1.0, "weight_decay": 5e-4},
            {"params": biases, "factor": 8.0, "weight_decay": 0.0},
        ],
        momentum=0.85,
        nesterov=True,
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step, curve = 0, []
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for x, y in batches(epoch):
            for group in optimizer.param_groups:
                group["lr"] = one_cycle(step, last) * group["factor"]
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            losses.append(loss.detach())
            step += 1
        found = {"train_loss": torch.stack(losses).mean().item()}
        found["accuracy"], found["valid_loss"] = evaluate(model)
        found["ema_accuracy"], found["ema_valid_loss"] = evaluate(average.module)
        curve.append(found)
    return curve


if __name__ == "__main__":
    for last in (0.0, 0.01):
        torch.manual_seed(0)
        print(last, train(conv_net(), shuffled, last=last)[-1])
