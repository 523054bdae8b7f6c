"""What training costs: measured curves of time and memory of packs, the pack size that ends a study first, and whether slices of a product pay.

Curves are plain numbers, measured elsewhere and kept by the store; nothing here touches a tensor or a device.
"""

from ._pack_choice import PackChoice as PackChoice, choose_pack as choose_pack
from ._pack_curve import PackCurve as PackCurve
from ._slicing_costs import SlicedProduct as SlicedProduct, SlicingCosts as SlicingCosts


__all__ = ["PackChoice", "PackCurve", "SlicedProduct", "SlicingCosts", "choose_pack"]
