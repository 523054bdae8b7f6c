"""What packed training costs: measured curves of time and memory, and the pack size that ends a study first.

Curves are plain numbers, measured elsewhere and kept by the store; nothing here touches a tensor or a device.
"""

from ._pack_choice import PackChoice as PackChoice, choose_pack as choose_pack
from ._pack_curve import PackCurve as PackCurve


__all__ = ["PackChoice", "PackCurve", "choose_pack"]
