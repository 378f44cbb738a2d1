"""From files to tokenised rows with label masks."""

from packtrain.data.packing import efficiency, pack
from packtrain.data.prepare import PreparedData, prepare_data
from packtrain.data.report import DataReport
from packtrain.data.store import TokenStore
from packtrain.data.tokenizer import check_vocabulary, load_tokenizer

__all__ = [
    "DataReport",
    "PreparedData",
    "TokenStore",
    "check_vocabulary",
    "efficiency",
    "load_tokenizer",
    "pack",
    "prepare_data",
]
