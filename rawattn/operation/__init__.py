"""This package defines operations: frozen values that name and check arrays and count floating-point operations and bytes."""

from .forward import Forward

__all__ = ["Forward"]
