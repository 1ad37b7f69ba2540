"""This package is rawattn's front end for torch: its operators, their gradients, transforms and sharding, and which calls go
through them."""

from . import caches as caches
from . import transforms as transforms
from .autograd import differentiable as differentiable
from .dispatcher import dispatch as dispatch
from .dispatcher import dispatch_plain as dispatch_plain
from .dispatcher import is_tensor as is_tensor
from .dispatcher import seed_of as seed_of
from .modes import is_plain as is_plain
from .operators import attention as attention
from .operators import attention_backward as attention_backward
