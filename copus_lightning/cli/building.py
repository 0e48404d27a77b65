"""Model, optimizer, data and loggers as a configuration describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from copus_lightning.config import Config, ConfigError, DataConfig, ModelConfig, OptimizerConfig
from copus_lightning.data import TokenDataset, build_corpus


def build_model(config: ModelConfig) -> Any:
    """The Hugging Face model on `meta`: no memory, no weights yet.

    Raises:
        ConfigError: Transformers does not know the model type, or cannot build it from these fields.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if config.model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.model_type: {config.model_type!r} is unknown to the installed transformers: use one"
            " like llama"
        )
    try:
        fields = AutoConfig.for_model(config.model_type, **config.hugging_face_fields())
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(fields)
    except Exception as error:  # whatever a model's own code raises on sizes that do not go together
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"model: transformers cannot build {config.model_type} of these fields: {reason}"
        ) from error


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer over all parameters, those of one dimension without weight decay if that is wished."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": config.weight_decay}]
    if config.decay_matrices_only:
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        others = [parameter for parameter in parameters if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    first, second = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)


def build_datasets(config: DataConfig) -> tuple[TokenDataset, TokenDataset]:
    """Training and validation samples.

    Raises:
        ValueError: What is wrong with the data, naming the key.
    """
    return build_corpus(
        config.kind,
        config.path,
        config.sequence_length,
        tokenizer=config.tokenizer,
        dtype=config.dtype,
        validation_fraction=config.validation_fraction,
    )


def build_loggers(config: Config) -> list[Any]:
    """Lightning's loggers, writing into the run's folder. Every rank makes them, the first alone writes."""
    directory = Path(config.run.run_dir)
    loggers: list[Any] = []
    for name in config.run.loggers:
        if name == "csv":
            from lightning.fabric.loggers import CSVLogger

            loggers.append(CSVLogger(root_dir=directory, name="csv"))
        elif name == "tensorboard":
            from lightning.fabric.loggers import TensorBoardLogger

            loggers.append(TensorBoardLogger(root_dir=directory, name="tensorboard"))
        elif name == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            loggers.append(WandbLogger(name=directory.name, save_dir=directory))
        else:
            from lightning.pytorch.loggers import MLFlowLogger

            loggers.append(MLFlowLogger(run_name=directory.name, save_dir=str(directory / "mlflow")))
    return loggers
