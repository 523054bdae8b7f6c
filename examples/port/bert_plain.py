"""Fine-tuning of a BERT with layer-wise learning rates, in plain PyTorch."""

import torch
from models import EPOCHS, STEPS_PER_EPOCH, sentences
from transformers import BertConfig, BertForSequenceClassification


BATCH_SIZE = 16
PEAK, DECAY = 2e-3, 0.8
LAYERS = 3
WARMUP, STEPS = STEPS_PER_EPOCH, EPOCHS * STEPS_PER_EPOCH

(train_words, train_labels), (valid_words, valid_labels) = sentences(batch_size=BATCH_SIZE)


def bert():
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        problem_type="single_label_classification",
    )
    return BertForSequenceClassification(config)


def shuffled(epoch):
    order = torch.randperm(len(train_words), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH_SIZE):
        yield train_words[rows], train_labels[rows]


def depth_of(name):
    if "embeddings" in name:
        return LAYERS + 1
    for layer in range(LAYERS):
        if f"encoder.layer.{layer}." in name:
            return LAYERS - layer
    return 0


def learning_rate(step, floor):
    if step < WARMUP:
        return PEAK * step / WARMUP
    return PEAK + (floor - PEAK) * (step - WARMUP) / (STEPS - WARMUP)


def train(model, batches, *, floor=0.0):
    groups = [{"params": [], "factor": DECAY**depth} for depth in range(LAYERS + 2)]
    for name, parameter in model.named_parameters():
        groups[depth_of(name)]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    step, curve = 0, []
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for words, labels in batches(epoch):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, floor) * group["factor"]
            optimizer.zero_grad()
            loss = model(words, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            step += 1
        model.eval()
        with torch.no_grad():
            accuracy = (model(valid_words).logits.argmax(1) == valid_labels).float().mean()
        curve.append({"train_loss": torch.stack(losses).mean().item(), "accuracy": accuracy.item()})
    return curve


if __name__ == "__main__":
    for floor in (0.0, 1e-4):
        torch.manual_seed(0)
        print(floor, train(bert(), shuffled, floor=floor)[-1])
