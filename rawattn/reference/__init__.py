"""The specification: attention, its gradients, and attention over caches, slow and exact."""

from .caches import append as append
from .caches import attention_kvcache as attention_kvcache
from .caches import merge_states as merge_states
from .formula import attention as attention
from .formula import attention_backward as attention_backward
