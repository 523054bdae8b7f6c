"""Fine-tuning of a BERT with layer-wise learning rates, in thrifty."""

from models import EPOCHS, sentences
from transformers import BertConfig, BertForSequenceClassification

import thrifty as th


LAYERS = 3
DEPTHS = {f"*encoder.layer.{n}.*": LAYERS - n for n in range(LAYERS)} | {"*embeddings*": LAYERS + 1}


class FineTuning(th.Task):
    batch_size = 16
    optimizer = th.AdamW(
        lr="lr",
        weight_decay=0.01,
        clip_norm=1.0,
        groups={name: {"lr": th.times("lr", 0.8**depth)} for name, depth in DEPTHS.items()},
    )

    def data(self, hp):
        train, valid = sentences(batch_size=self.batch_size)
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp):
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

    def loss(self, model, batch):
        words, labels = batch
        return model(words, labels=labels).loss

    def metrics(self, model, batch):
        words, labels = batch
        return {"accuracy": (model(words).logits.argmax(1) == labels).float().mean()}


study = th.Study(
    FineTuning(),
    th.Space(lr=th.Warmup(1, th.Linear(2e-3, floor=th.Choice([0.0, 1e-4])))),
    algorithm=th.GridSearch(max_epochs=EPOCHS),
    metric="accuracy",
    storage="sqlite:///port.db",
    name="bert",
)

if __name__ == "__main__":
    study.run()
    for trial in study.trials:
        print(trial.config["lr"], trial.values)
