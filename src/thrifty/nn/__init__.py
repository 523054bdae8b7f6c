"""Dropout layers: gyro dropout and its block-wise form.

A plain PyTorch library: it does not depend on search, plans or databases.
"""

from ._convert import gyro_
from ._gyro import BlockGyroDropout, GyroDropout, SubnetworkEnsemble, subnetwork
from ._masks import GyroSchedule, KeptGroups
from ._sequential import GyroMLP, GyroSequential
from ._sliced import gyro_conv2d, gyro_linear


__all__ = [
    "BlockGyroDropout",
    "GyroDropout",
    "GyroMLP",
    "GyroSchedule",
    "GyroSequential",
    "KeptGroups",
    "SubnetworkEnsemble",
    "gyro_",
    "gyro_conv2d",
    "gyro_linear",
    "subnetwork",
]
