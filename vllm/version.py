"""The version of this package and of the public interface it offers. Layer: L0."""

__version__ = "0.33.0"
__version_tuple__ = (0, 33, 0)
