"""Data: digits (embedded), CIFAR-10, image folders and your own loaders, as sources of batches."""

from bcnet.data.device import DeviceData
from bcnet.data.load import load_data
from bcnet.data.options import LoadOptions
from bcnet.data.source import Batch, Data, Source, from_loaders

__all__ = ["Batch", "Data", "DeviceData", "LoadOptions", "Source", "from_loaders", "load_data"]
