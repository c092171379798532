"""Integrations with other frameworks, one module each, imported only when used."""

from castwise._faces import face

__all__: list[str] = []  # to import them all would need all frameworks

__getattr__, __dir__ = face(
    __name__, {}, ["accelerate", "lightning", "mlflow", "pytorch_lightning", "transformers", "wandb"]
)
