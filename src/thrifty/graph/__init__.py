"""Graph training on one machine with prefetched batches: sampling, layers and inference.

A plain PyTorch library: it does not depend on search, plans or databases. Needs the extra
``graph``.
"""

from ._batch import Batch, Block, Mode, tune_allocator
from ._conversions import from_edge_index, from_networkx, from_pyg, from_scipy
from ._features import FeatureCache, inclusion_probabilities, top_nodes
from ._gnn import GNN
from ._graph import Graph, check_symmetric, is_symmetric, symmetric
from ._graph_data import GraphData
from ._graph_layers import GAT, GIN, SAGE
from ._inference import Layered, infer_layerwise, infer_sampled
from ._loader import NeighborLoader
from ._sampler import NeighborSampler
from ._saved import load_graph, save_graph


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
