"""Graph training on one machine with prefetched batches: sampling, layers and inference.

A plain PyTorch library: it does not depend on search, plans or databases. Needs
``thrifty[graph]``.
"""

from . import _pack_rules as _pack_rules
from ._batch import Batch as Batch, Block as Block, Mode as Mode
from ._convert import (
    from_edge_index as from_edge_index,
    from_networkx as from_networkx,
    from_pyg as from_pyg,
    from_scipy as from_scipy,
)
from ._data import GraphData as GraphData
from ._features import FeatureCache as FeatureCache
from ._gnn import GNN as GNN
from ._graph import (
    Graph as Graph,
    check_symmetric as check_symmetric,
    is_symmetric as is_symmetric,
    symmetric as symmetric,
)
from ._inclusion import (
    inclusion_probabilities as inclusion_probabilities,
    top_nodes as top_nodes,
)
from ._inference import (
    Layered as Layered,
    infer_layerwise as infer_layerwise,
    infer_sampled as infer_sampled,
)
from ._layers import GAT as GAT, GIN as GIN, SAGE as SAGE
from ._loader import NeighborLoader as NeighborLoader
from ._memory import tune_allocator as tune_allocator
from ._sampler import NeighborSampler as NeighborSampler
from ._saved import load_graph as load_graph, save_graph as save_graph


__all__ = [
    "GAT",
    "GIN",
    "GNN",
    "SAGE",
    "Batch",
    "Block",
    "FeatureCache",
    "Graph",
    "GraphData",
    "Layered",
    "Mode",
    "NeighborLoader",
    "NeighborSampler",
    "check_symmetric",
    "from_edge_index",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "inclusion_probabilities",
    "infer_layerwise",
    "infer_sampled",
    "is_symmetric",
    "load_graph",
    "save_graph",
    "symmetric",
    "top_nodes",
    "tune_allocator",
]
