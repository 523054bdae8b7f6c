"""Dropout layers: gyro dropout and its block-wise form.

A plain PyTorch library: it does not depend on search, plans or databases.
"""

from ._convert import gyro_ as gyro_
from ._ensemble import SubnetworkEnsemble as SubnetworkEnsemble, subnetwork as subnetwork
from ._gyro import BlockGyroDropout as BlockGyroDropout, GyroDropout as GyroDropout
from ._masks import KeptGroups as KeptGroups
from ._schedule import GyroSchedule as GyroSchedule
from ._sequential import GyroMLP as GyroMLP, GyroSequential as GyroSequential
from ._sliced import gyro_conv2d as gyro_conv2d, gyro_linear as gyro_linear


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
