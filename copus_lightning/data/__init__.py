"""Data by global position: the order of samples, an elastic loader and token corpora."""

from copus_lightning.data.corpus import (
    TextCorpus,
    TokenDataset,
    TokenFile,
    build_corpus,
    byte_corpus,
    check_vocabulary,
    unigram_entropy,
)
from copus_lightning.data.loader import ElasticDataLoader
from copus_lightning.data.sampler import ElasticBatchSampler, GlobalOrder

__all__ = [
    "ElasticBatchSampler",
    "ElasticDataLoader",
    "GlobalOrder",
    "TextCorpus",
    "TokenDataset",
    "TokenFile",
    "build_corpus",
    "byte_corpus",
    "check_vocabulary",
    "unigram_entropy",
]
