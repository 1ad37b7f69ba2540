"""What is asked for: frozen values that name their arrays, check them, and know their floating-point operations and bytes."""

from .forward import Forward

__all__ = ["Forward"]
