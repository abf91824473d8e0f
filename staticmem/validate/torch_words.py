"""Names that both the process that predicts and the one that runs have; it imports nothing."""

from __future__ import annotations

OPTIMIZERS = {  # by the flag's word, the class of torch.optim
    "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad", "radam": "RAdam",
    "nadam": "NAdam", "adamax": "Adamax", "adadelta": "Adadelta", "adafactor": "Adafactor",
}  # fmt: skip
