"""Expert parallelism: one MoE layer whose experts lie on several ranks.

    >>> import torch, mxpert
    >>> from mxpert.distributed import ExpertParallel
    >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=8)
    >>> ep.size, ep.num_local_experts
    (1, 4)

Under torchrun the same lines give each rank its share of the experts; see `ExpertParallel`.
"""

from ..errors import PeerLostError
from .expert_parallel import ExpertParallel
from .placement import Placement
from .transport import DispatchedTokens, Transport

__all__ = ["DispatchedTokens", "ExpertParallel", "PeerLostError", "Placement", "Transport"]
